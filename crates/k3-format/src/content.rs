//! What a file holds that should hold weights or an index and does not.

use std::fmt;

/// Bytes of a file's beginning that [`Content::recognise`] looks at.
pub(crate) const PROBE_BYTES: usize = 512;

/// The UTF-8 byte order mark, which JSON must not begin with.
const BOM: &[u8] = b"\xef\xbb\xbf";

/// What stands in place of a file that was expected. Shown with the way to get the real file.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Content {
    /// No bytes at all.
    Empty,
    /// The text pointer that git-lfs leaves in a clone without large files.
    GitLfsPointer,
    /// The text pointer of the Xet storage.
    XetPointer,
    /// A web page, mostly a login or error page that a download saved.
    Html,
    /// An XML document, mostly the error answer of an object store.
    Xml,
    /// JSON text, mostly the error answer of an API.
    Json,
    /// Other text; its beginning.
    Text(String),
    /// A GGUF model.
    Gguf,
    /// A zip archive, as `torch.save` writes it.
    Zip,
    /// Zero bytes, as in a file that was reserved and not yet filled.
    Zeros,
    /// JSON text behind a byte order mark.
    ByteOrderMark,
    /// Text of 16-bit characters, as some editors and shells of Windows write it.
    Utf16,
    /// None of these; the first bytes.
    Unknown(Vec<u8>),
}

impl Content {
    /// Names what begins with `head`, which is the first [`PROBE_BYTES`] of the file or all of it.
    pub(crate) fn recognise(head: &[u8]) -> Self {
        let head = &head[..head.len().min(PROBE_BYTES)];
        let text = head.strip_prefix(BOM).unwrap_or(head).trim_ascii_start();
        let begins = |what: &str| {
            text.get(..what.len()).is_some_and(|start| start.eq_ignore_ascii_case(what.as_bytes()))
        };
        if head.is_empty() {
            Self::Empty
        } else if begins("version https://git-lfs") {
            Self::GitLfsPointer
        } else if begins("# xet version") {
            Self::XetPointer
        } else if begins("<!doctype html") || begins("<html") || begins("<head") {
            Self::Html
        } else if begins("<?xml") || begins("<error") {
            Self::Xml
        } else if head.starts_with(b"GGUF") {
            Self::Gguf
        } else if head.starts_with(b"PK\x03\x04") {
            Self::Zip
        } else if head.iter().all(|&b| b == 0) {
            Self::Zeros
        } else if is_utf16(head) {
            Self::Utf16
        } else if let Some(words) = readable(head) {
            match text.first() {
                Some(b'{' | b'[') if head.starts_with(BOM) => Self::ByteOrderMark,
                Some(b'{' | b'[') => Self::Json,
                _ => Self::Text(words),
            }
        } else {
            Self::Unknown(head[..head.len().min(16)].to_vec())
        }
    }
}

/// Whether `head` begins as 16-bit text: a byte order mark and an ASCII character, or two of these.
fn is_utf16(head: &[u8]) -> bool {
    let ascii = |c: u8| c.is_ascii_graphic() || c.is_ascii_whitespace();
    match *head {
        [0xff, 0xfe, c, 0, ..] | [0xfe, 0xff, 0, c, ..] => ascii(c),
        [a, 0, b, 0, ..] | [0, a, 0, b, ..] => ascii(a) && ascii(b),
        _ => false,
    }
}

/// The first 60 characters, if `head` is text. Its last character may be cut.
fn readable(head: &[u8]) -> Option<String> {
    let text = match std::str::from_utf8(head) {
        Ok(text) => text,
        Err(e) if e.error_len().is_none() && e.valid_up_to() > 0 => {
            std::str::from_utf8(&head[..e.valid_up_to()]).ok()?
        }
        Err(_) => return None,
    };
    let control = |c: char| c.is_control() && !c.is_whitespace();
    (!text.contains(control)).then(|| text.chars().take(60).collect())
}

impl fmt::Display for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const AGAIN: &str = "download the file again";
        match self {
            Self::Empty => write!(
                f,
                "an empty file, as an interrupted download or a full disk leaves it; check the free space and {AGAIN}"
            ),
            Self::GitLfsPointer => f.write_str(
                "a git-lfs pointer: the repository was cloned without its large files; run `git lfs install` and \
                 `git lfs pull` in the clone, or download the file itself (`hf download REPOSITORY FILE`)",
            ),
            Self::XetPointer => f.write_str(
                "a Xet pointer: the repository was cloned without its large files; install git-xet and pull again, \
                 or download the file itself (`hf download REPOSITORY FILE`)",
            ),
            Self::Html => write!(
                f,
                "an HTML page, as a login or error page saved by a download; check address and access rights, and {AGAIN}"
            ),
            Self::Xml => write!(
                f,
                "an XML document, as the error answer of an object store; check address and access rights, and {AGAIN}"
            ),
            Self::Json => write!(
                f,
                "JSON text, as the error answer of a download; read it, check address and access rights, and {AGAIN}"
            ),
            Self::Text(start) => write!(f, "text that begins with {start:?}; {AGAIN}"),
            Self::Gguf => f.write_str("a GGUF model; get the safetensors files that the model's publisher released"),
            Self::Zip => f.write_str(
                "a zip archive, as PyTorch saves weights; get the safetensors files that the model's publisher released",
            ),
            Self::Zeros => {
                write!(f, "zeros at its beginning, as in a file that was reserved and never filled; {AGAIN}")
            }
            Self::ByteOrderMark => {
                write!(f, "JSON text behind a byte order mark; save it as UTF-8 without one, or {AGAIN}")
            }
            Self::Utf16 => write!(f, "text in UTF-16; save it as UTF-8 without byte order mark, or {AGAIN}"),
            Self::Unknown(bytes) => {
                f.write_str("data that begins with the bytes")?;
                for byte in bytes {
                    write!(f, " {byte:02x}")?;
                }
                write!(f, ", which is no safetensors header; {AGAIN}")
            }
        }
    }
}
