//! Text from a file that ends up on a terminal, where a control character could forge or hide output.

use std::borrow::Cow;

/// Whether `c` acts on a terminal instead of showing: control characters, and marks that turn the writing direction.
fn acts(c: char) -> bool {
    c.is_control() || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Whether all of `text` only shows.
pub(crate) fn is_printable(text: &str) -> bool {
    // Half a million tensor names take the first way.
    text.bytes().all(|b| (b' '..=b'~').contains(&b)) || !text.contains(acts)
}

/// `text` with every character that acts written as an escape.
pub(crate) fn printable(text: &str) -> Cow<'_, str> {
    if is_printable(text) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if acts(c) { out.extend(c.escape_default()) } else { out.push(c) }
    }
    Cow::Owned(out)
}
