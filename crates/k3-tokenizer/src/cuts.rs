//! The cuts that the published wrapper makes before BPE, `docs/checkpoint.md` 8.
//!
//! They are hard boundaries: no pre-token crosses one, so they change the ids of huge runs.

/// Code points in a block.
const BLOCK_CHARS: usize = 400_000;
/// Consecutive code points of one white-space class before a cut.
const RUN_CHARS: usize = 25_000;

/// The pieces of `text`, in order; together they are `text`. Each is a BPE call of its own.
pub(crate) fn pieces(text: &str) -> Pieces<'_> {
    Pieces { rest: text, block: 0 }
}

/// Iterator of [`pieces`].
pub(crate) struct Pieces<'t> {
    rest: &'t str,
    /// Code points of the current block that are already handed out.
    block: usize,
}

impl<'t> Iterator for Pieces<'t> {
    type Item = &'t str;

    fn next(&mut self) -> Option<&'t str> {
        if self.rest.is_empty() {
            return None;
        }
        // Not even one-byte characters could reach a limit: most texts end here.
        if self.rest.len() <= RUN_CHARS && self.block + self.rest.len() <= BLOCK_CHARS {
            return Some(std::mem::take(&mut self.rest));
        }
        let (mut run, mut run_is_space) = (0, false);
        for (at, c) in self.rest.char_indices() {
            if self.block == BLOCK_CHARS {
                self.block = 0;
                // A cut may fall on the end of a block: then there is nothing to hand out before it.
                if at > 0 {
                    return Some(self.take(at));
                }
            }
            let is_space = is_python_space(c);
            run = if is_space == run_is_space { run + 1 } else { 1 };
            run_is_space = is_space;
            if run > RUN_CHARS {
                return Some(self.take(at));
            }
            self.block += 1;
        }
        Some(std::mem::take(&mut self.rest))
    }
}

impl<'t> Pieces<'t> {
    fn take(&mut self, at: usize) -> &'t str {
        let (piece, rest) = self.rest.split_at(at);
        self.rest = rest;
        piece
    }
}

/// Python's `str.isspace` of one code point: Unicode white space and the four separators U+001C..1F, 29 in all.
fn is_python_space(c: char) -> bool {
    c.is_whitespace() || matches!(c, '\u{1c}'..='\u{1f}')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lengths(text: &str) -> Vec<usize> {
        let lengths: Vec<_> = pieces(text).map(|p| p.chars().count()).collect();
        assert_eq!(pieces(text).collect::<String>(), text);
        lengths
    }

    #[test]
    fn python_space_has_29_code_points() {
        assert_eq!(('\0'..=char::MAX).filter(|&c| is_python_space(c)).count(), 29);
    }

    #[test]
    fn runs_are_cut_before_char_25001() {
        assert_eq!(lengths(""), [0; 0]);
        assert_eq!(lengths(&"a".repeat(25_000)), [25_000]);
        assert_eq!(lengths(&"a".repeat(25_001)), [25_000, 1]);
        assert_eq!(lengths(&" ".repeat(50_001)), [25_000, 25_000, 1]);
        assert_eq!(lengths(&"中".repeat(25_001)), [25_000, 1]);
        assert_eq!(lengths(&format!("{}b c", " ".repeat(25_001))), [25_000, 4]);
        assert_eq!(lengths(&format!("{} {}", "a".repeat(25_000), "b".repeat(25_000))), [50_001]);
    }

    #[test]
    fn the_four_separators_are_space() {
        assert_eq!(lengths(&format!("{}{}", "\u{1c}".repeat(13_000), " ".repeat(13_000))), [25_000, 1_000]);
        assert_eq!(lengths(&format!("{}{}", "\u{200b}".repeat(13_000), " ".repeat(13_000))), [26_000]);
    }

    #[test]
    fn blocks_have_400000_chars() {
        let words = "ab ".repeat(133_334); // 400,002 characters
        assert_eq!(lengths(&words), [400_000, 2]);
        assert_eq!(lengths(&words[..400_000]), [400_000]);
        assert_eq!(lengths(&words[..399_999]), [399_999]);
        // A block boundary starts a new count of the run.
        let text = format!("{}{}", "ab ".repeat(130_000), "x".repeat(40_000));
        assert_eq!(lengths(&text), [400_000, 25_000, 5_000]);
        // A block's end on a multiple of the run limit.
        assert_eq!(lengths(&"a".repeat(400_001)), [vec![25_000; 16], vec![1]].concat());
    }
}
