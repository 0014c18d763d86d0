//! Small files beside the shards, read whole.

use std::io::{self, Read as _};
use std::path::Path;

use serde_json::Value;

use crate::content::Content;
use crate::error::Error;
use crate::json::{self, JsonFault};
use crate::shard_error::ShardError;
use crate::shard_file::open_regular;

/// The largest such file; the release's largest has 7 kB.
const MAX_BYTES: u64 = 64 << 20;

/// The bytes of a regular file (or of a link to one) of at most [`MAX_BYTES`].
pub(crate) fn read_small(file: &Path) -> Result<Vec<u8>, Error> {
    let failed = |source| Error::ReadFile { file: file.to_owned(), source };
    let too_large = |found: String| {
        let why = format!("{found} bytes, at most {MAX_BYTES} are read");
        failed(io::Error::new(io::ErrorKind::FileTooLarge, why))
    };
    let (open, len) = open_regular(file).map_err(|e| match e {
        ShardError::Io { cause, .. } => failed(cause),
        other => other.into(),
    })?;
    if len > MAX_BYTES {
        return Err(too_large(len.to_string()));
    }
    let mut bytes = Vec::with_capacity(len as usize);
    // Whatever the length said: some files have none, and others grow.
    open.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(too_large(format!("more than {MAX_BYTES}")));
    }
    Ok(bytes)
}

/// A small JSON file.
pub(crate) fn read_json(file: &Path) -> Result<Value, Error> {
    let bytes = read_small(file)?;
    json::parse(&bytes).map_err(|fault| match fault {
        JsonFault::Repeated { key, line, column } => {
            Error::RepeatedKey { file: file.to_owned(), key, line, column }
        }
        JsonFault::Invalid(source) => match Content::recognise(&bytes) {
            Content::Json | Content::Text(_) | Content::Unknown(_) => {
                Error::Json { file: file.to_owned(), source }
            }
            content => {
                ShardError::WrongContent { path: file.to_owned(), expected: "a JSON file", content }.into()
            }
        },
    })
}
