//! Text from stdin: UTF-8, or an error that says where it is not.

use std::fs::File;
use std::io::{Read, stdin};
use std::path::Path;

use anyhow::{Context, Result, anyhow, ensure};

/// The most bytes of one input: a hundred times what the longest context takes. More is a wrong file, or one without an end.
pub(crate) const MAX_BYTES: u64 = 512 << 20;

/// All of stdin, which holds `what`.
pub(crate) fn all_of_stdin(what: &str) -> Result<String> {
    all(stdin().lock(), MAX_BYTES).with_context(|| format!("reading {what} from stdin"))
}

/// All of a file, which holds `what`.
pub(crate) fn all_of_file(path: &Path, what: &str) -> Result<String> {
    let read = || all(File::open(path)?, MAX_BYTES);
    read().with_context(|| format!("reading {what} {}", path.display()))
}

fn all(from: impl Read, limit: u64) -> Result<String> {
    let mut bytes = Vec::new();
    from.take(limit + 1).read_to_end(&mut bytes)?;
    ensure!(bytes.len() as u64 <= limit, "it holds more than the {limit} bytes that are read at most");
    utf8(bytes, Place::default())
}

/// Where bytes stand in an input: what came before them, which ends with a line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Place {
    /// Lines before.
    pub(crate) lines: usize,
    /// Bytes before.
    pub(crate) bytes: usize,
}

/// The text of `bytes`, which stand at `place`. Offsets in the error count from 0, lines from 1.
pub(crate) fn utf8(bytes: Vec<u8>, place: Place) -> Result<String> {
    String::from_utf8(bytes).map_err(|error| {
        let (good, bad) = error.as_bytes().split_at(error.utf8_error().valid_up_to());
        let begun = good.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        let line = place.lines + good.split(|byte| *byte == b'\n').count();
        let byte = bad.first().copied().unwrap_or_default();
        anyhow!(
            "line {line}, byte offset {} ({} of the whole input): expected UTF-8 text, found the byte 0x{byte:02x}; \
             convert the input to UTF-8",
            good.len() - begun,
            place.bytes + good.len(),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(bytes: &[u8], place: Place, expected: &str) {
        let error = utf8(bytes.to_vec(), place).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error}");
    }

    #[test]
    fn an_input_has_an_end() {
        assert_eq!(all(&b"abcd"[..], 4).unwrap(), "abcd");
        let error = all(std::io::repeat(b'a'), 4).unwrap_err().to_string();
        assert!(error.contains("more than the 4 bytes"), "{error}");
    }

    #[test]
    fn bytes_that_are_no_text_are_found() {
        let first = Place::default();
        check(
            b"\xff",
            first,
            "line 1, byte offset 0 (0 of the whole input): expected UTF-8 text, found the byte 0xff",
        );
        check(b"ab\n\xc3\xa9x\xe9\n", first, "line 2, byte offset 3 (6 of the whole input)");
        // A character that the end of the input cuts off.
        check(
            b"ab\xe4\xb8",
            first,
            "line 1, byte offset 2 (2 of the whole input): expected UTF-8 text, found the byte 0xe4",
        );
        check(b"a\xff", Place { lines: 4, bytes: 20 }, "line 5, byte offset 1 (21 of the whole input)");
        assert_eq!(utf8("é\n".into(), first).unwrap(), "é\n");
    }
}
