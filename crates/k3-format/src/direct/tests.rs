use super::*;

/// A file whose reads end after a few bytes and are interrupted now and then.
struct Hesitant {
    bytes: Vec<u8>,
    most: usize,
    calls: std::cell::Cell<usize>,
}

impl ReadAt for Hesitant {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        assert!(offset.is_multiple_of(DIRECT_ALIGN as u64) && buf.len().is_multiple_of(DIRECT_ALIGN));
        self.calls.set(self.calls.get() + 1);
        if self.calls.get().is_multiple_of(3) {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let rest = &self.bytes[self.bytes.len().min(offset as usize)..];
        let n = rest.len().min(buf.len()).min(self.most);
        buf[..n].copy_from_slice(&rest[..n]);
        Ok(n)
    }
}

fn pattern(len: u32) -> Vec<u8> {
    (0..len).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
}

fn check_read(most: usize, begin: usize, len: usize) {
    let file = Hesitant { bytes: pattern(50_001), most, calls: std::cell::Cell::new(0) };
    let (mut bounce, mut buf) = (vec![0; 2 * DIRECT_ALIGN], vec![0; len]);
    let result = read_direct(&file, &mut bounce, begin as u64, &mut buf);
    if begin + len <= file.bytes.len() {
        assert!(result.is_ok(), "{most} {begin} {len}");
        assert_eq!(buf, file.bytes[begin..begin + len], "{most} {begin} {len}");
    } else {
        let got = file.bytes.len().saturating_sub(begin) as u64;
        assert!(matches!(result, Err(ReadFailure::Short { got: g }) if g == got), "{most} {begin} {len}");
    }
}

#[test]
fn reads_of_whole_blocks() {
    for most in [usize::MAX, 8192, 4096] {
        for (begin, len) in [(0, 50_001), (816, 20_000), (4095, 2), (4096, 4096), (50_000, 1), (0, 0)] {
            check_read(most, begin, len);
        }
        check_read(most, 49_000, 1002);
        check_read(most, 50_001, 1);
    }
}

/// Written in pieces of these lengths, from memory that is aligned or not; `None` where the file system refuses.
fn check_write(pieces: &[usize], shift: usize) -> Option<()> {
    use std::os::unix::fs::OpenOptionsExt as _;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("out");
    let mut options = std::fs::OpenOptions::new();
    options.write(true).create_new(true).custom_flags(direct_flag().ok()?);
    let mut out = DirectOut::new(options.open(&path).ok()?).unwrap();
    let total: usize = pieces.iter().sum();
    let bytes = pattern(total as u32);
    let mut at = 0;
    for &piece in pieces {
        let mut buffer = Buffer::zeroed((piece + shift).max(1 << 20)).unwrap();
        let memory = &mut buffer.as_mut()[shift..shift + piece];
        memory.copy_from_slice(&bytes[at..at + piece]);
        out.write_all(memory).unwrap();
        at += piece;
    }
    out.finish().unwrap();
    assert!(std::fs::read(&path).unwrap() == bytes, "{pieces:?} {shift}");
    Some(())
}

#[test]
fn writes_of_any_length() {
    for shift in [0, 1] {
        for pieces in [
            &[][..],
            &[1],
            &[4096],
            &[4097, 4095, 1],
            &[8 << 20, 4096, 7],
            &[7, 8 << 20, 4096],
            &[DIRECT_BYTES - 1, 1, 1, DIRECT_BYTES],
        ] {
            if check_write(pieces, shift).is_none() {
                eprintln!("skipped: no direct transfers in the temporary folder");
                return;
            }
        }
    }
}
