//! The split pattern as an anchored lazy DFA: linear time, no recursion, no look-ahead.

use std::sync::LazyLock;

use regex_automata::{
    Anchored, Input, MatchKind,
    hybrid::dfa::{Cache, DFA},
};

/// The published alternatives in their order, `docs/checkpoint.md` 8, without the last but one, `\s+(?!\S)`:
/// [`give_back`] plays it.
const ALTERNATIVES: [&str; 7] = [
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+",
];

/// States the DFA keeps before it starts anew, in bytes; ordinary text of many scripts needs about 2 MB.
const CACHE_BYTES: usize = 16 << 20;

/// The one pattern, compiled on first use.
static DFA: LazyLock<DFA> = LazyLock::new(|| {
    let config = DFA::config().cache_capacity(CACHE_BYTES).match_kind(MatchKind::LeftmostFirst);
    DFA::builder()
        .configure(config)
        .build(&ALTERNATIVES.join("|"))
        .expect("a constant pattern that the tests compile")
});

/// What a search needs of its own; one a thread.
pub(crate) fn new_cache() -> Cache {
    DFA.create_cache()
}

/// Calls `f` with each pre-token of `text`, in order; together they are `text`.
pub(crate) fn split<'t>(cache: &mut Cache, text: &'t str, mut f: impl FnMut(&'t str)) {
    // Every character starts some alternative, so each search is anchored where the last match ended; an unanchored
    // one would be far slower.
    let mut input = Input::new(text).anchored(Anchored::Yes);
    let mut at = 0;
    while at < text.len() {
        input.set_range(at..text.len());
        let end = DFA
            .try_search_fwd(cache, &input)
            .expect("no quit bytes are set, and the cache may be cleared without limit")
            .expect("every character starts some alternative")
            .offset();
        let end = give_back(text, at, end);
        f(&text[at..end]);
        at = end;
    }
}

/// `\s+(?!\S)`: a run of white space before a word leaves its last character to the word.
///
/// A match that ends in white space other than a line break is such a run, since no other alternative ends so, and it
/// is the whole run, since `\s+` is greedy.
fn give_back(text: &str, start: usize, end: usize) -> usize {
    let last = text[start..end].chars().next_back();
    match last {
        Some(c) if c.is_whitespace() && !matches!(c, '\r' | '\n') && end < text.len() => {
            let shorter = end - c.len_utf8();
            if shorter > start { shorter } else { end }
        }
        _ => end,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, expected: &[&str]) {
        let mut pieces = Vec::new();
        split(&mut new_cache(), text, |piece| pieces.push(piece));
        assert_eq!(pieces, expected, "{text:?}");
    }

    #[test]
    fn words_numbers_marks() {
        check("", &[]);
        check("Hello, World! 12345", &["Hello", ",", " World", "!", " ", "123", "45"]);
        check("camelCase HTTPServer", &["camel", "Case", " HTTPServer"]);
        check("x.\n\nY", &["x", ".\n\n", "Y"]);
        check("don't I'LL we'rE it\u{2019}s", &["don't", " I'LL", " we'rE", " it", "\u{2019}s"]);
        check("it'\u{17f}", &["it'\u{17f}"]);
        check("हिन्दी", &["हिन्दी"]);
    }

    #[test]
    fn han_stands_alone() {
        check("A中B", &["A", "中", "B"]);
        check("a中's", &["a", "中", "'s"]);
        check(" 中文。\n", &[" ", "中文", "。\n"]);
        check("カタカナ漢字かな", &["カタカナ", "漢字", "かな"]);
        check("々〇〡ー", &["々〇〡", "ー"]);
    }

    #[test]
    fn white_space() {
        check("a  b", &["a", " ", " b"]);
        check("a   ", &["a", "   "]);
        check(" \u{3000} b", &[" \u{3000}", " b"]);
        check("a \u{3000}1", &["a", " ", "\u{3000}", "1"]);
        check("a \t1", &["a", " ", "\t", "1"]);
        check(" \n \n  x", &[" \n \n", " ", " x"]);
        check("\r\n\u{85}\u{2028}x", &["\r\n", "\u{85}", "\u{2028}x"]);
        check("\u{1c}\u{1c}", &["\u{1c}\u{1c}"]);
    }

    #[test]
    fn every_character_starts_an_alternative() {
        let mut cache = new_cache();
        for c in '\0'..=char::MAX {
            let mut buffer = [0; 4];
            let text = &*c.encode_utf8(&mut buffer);
            split(&mut cache, text, |piece| assert_eq!(piece, text));
        }
    }
}
