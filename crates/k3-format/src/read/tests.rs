use std::cell::{Cell, RefCell};

use super::*;

/// Bytes in memory that come in pieces of random length, with interruptions in between.
struct Moody {
    bytes: Vec<u8>,
    state: Cell<u64>,
    asked: RefCell<Vec<usize>>,
}

impl Moody {
    fn new(len: usize, seed: u64) -> Self {
        let bytes = (0..len).map(|i| (i * 131 + i / 256) as u8).collect();
        Self { bytes, state: Cell::new(seed), asked: RefCell::default() }
    }

    fn random(&self) -> usize {
        let next =
            self.state.get().wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.state.set(next);
        (next >> 33) as usize
    }
}

impl ReadAt for Moody {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.asked.borrow_mut().push(buf.len());
        if self.random().is_multiple_of(3) {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let rest = &self.bytes[self.bytes.len().min(offset as usize)..];
        let most = buf.len().min(rest.len());
        let n = if most == 0 { 0 } else { 1 + self.random() % most };
        buf[..n].copy_from_slice(&rest[..n]);
        Ok(n)
    }
}

#[test]
fn short_reads_and_interruptions_change_nothing() {
    for seed in 0..200 {
        let file = Moody::new(1000, seed);
        let (begin, cap) = (file.random() % 1000, 1 + file.random() % 50);
        let len = file.random() % (1001 - begin);
        let mut buf = vec![0xaa; len];
        read_full(&file, cap, begin as u64, &mut buf).unwrap();
        assert_eq!(buf, file.bytes[begin..begin + len], "seed {seed}");
        assert!(file.asked.borrow().iter().all(|&n| n <= cap), "seed {seed}: more than {cap} bytes asked");

        let bytes = read_aligned(&file, cap, begin as u64, len).unwrap();
        assert_eq!(bytes, file.bytes[begin..begin + len], "seed {seed}");
        assert!(len == 0 || bytes.as_ptr().addr().is_multiple_of(ALIGN), "seed {seed}");
    }
}

#[test]
fn the_end_of_the_file_is_told_with_what_was_there() {
    for (begin, len, there) in [(990, 11, 10), (0, 1001, 1000), (1000, 1, 0), (5000, 7, 0)] {
        let file = Moody::new(1000, 7);
        match read_full(&file, 7, begin, &mut vec![0; len]) {
            Err(ReadFailure::Short { got }) => assert_eq!(got, there, "{len} bytes from {begin}"),
            other => panic!("{len} bytes from {begin}: {other:?}"),
        }
    }
}

#[test]
fn other_errors_end_the_read() {
    struct Broken;
    impl ReadAt for Broken {
        fn read_at(&self, _: &mut [u8], _: u64) -> io::Result<usize> {
            Err(io::ErrorKind::PermissionDenied.into())
        }
    }
    let failure = read_full(&Broken, 7, 0, &mut [0]);
    assert!(matches!(failure, Err(ReadFailure::Io(e)) if e.kind() == io::ErrorKind::PermissionDenied));
}

#[test]
fn memory_is_aligned_and_zero_at_every_size() {
    for len in [0, 1, 63, 64, 65, 1000, Buffer::LARGE - 1, Buffer::LARGE, Buffer::LARGE + 1] {
        let mut buffer = Buffer::zeroed(len).unwrap();
        assert_eq!(buffer.as_mut(), vec![0; len], "{len}");
        assert!(buffer.as_mut().as_ptr().addr().is_multiple_of(ALIGN), "{len}");
        buffer.as_mut().fill(7);
        assert_eq!(buffer.freeze(), vec![7; len], "{len}");
    }
}

#[test]
fn too_little_memory_is_an_error_that_names_the_tensor() {
    // More than any address space, and more than any allocation may have.
    for len in [1 << 62, usize::MAX] {
        match read_aligned(&Moody::new(1000, 7), 7, 0, len) {
            Err(e @ ReadFailure::Memory(_)) => {
                let path = std::path::Path::new("dir/shard");
                let error = crate::shard_file::read_error(path, "tensor `t.weight`", 0, len, e);
                let text = error.to_string();
                for part in
                    ["t.weight", "dir/shard", &len.to_string(), "do not fit into memory; use LoadMode::Map"]
                {
                    assert!(text.contains(part), "{text}");
                }
            }
            other => panic!("{len}: {other:?}"),
        }
    }
}

#[test]
fn the_cap_is_that_of_linux() {
    assert_eq!(MAX_READ_BYTES, 2_147_479_552);
}
