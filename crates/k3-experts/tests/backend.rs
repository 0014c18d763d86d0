//! Which store is opened on a real file system, with what reads.

#[path = "support/request.rs"]
mod request;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use k3_experts::backend::{Backend, OpenedStore, StoreOptions, open_store};
use k3_experts::memory::Machine;
use k3_experts::plan::{ExpertSizes, MemoryPlan, Needs};
use k3_experts::slab::{Direct, ProbeOptions, slot_bytes};
use k3_experts::trace::Geometry;
use k3_format::{Checkpoint, OpenOptions};

use request::request;

fn fixture() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/tiny-k31")
}

fn open(dir: &Path) -> Arc<Checkpoint> {
    Arc::new(Checkpoint::open(dir, &OpenOptions::default()).unwrap())
}

/// Room for the whole checkpoint three times, of which the needs leave half a megabyte for 12 MB of slots.
fn tight(checkpoint: &Checkpoint) -> MemoryPlan {
    let files: u64 = checkpoint.shards().files().iter().map(|file| file.len).sum();
    let room = 3 * files;
    let geometry = Geometry { layers: 12, experts: 16, per_token: 4 };
    let sizes = ExpertSizes { geometry, slot_bytes: slot_bytes(checkpoint, Direct::ALIGN), moving: 14 };
    let reserve = MemoryPlan::new(&Machine::with(room), Needs::default(), sizes, None).reserve;
    let needs = Needs { pinned: room - reserve - (1 << 19), ..Needs::default() };
    MemoryPlan::new(&Machine::with(room), needs, sizes, None)
}

fn fetch(opened: &OpenedStore) {
    assert_eq!(opened.store.fetch(request(3, &[1, 2, 5, 9])).map(Result::unwrap).count(), 4);
}

fn options(backend: Option<Backend>) -> StoreOptions {
    let probe = ProbeOptions { time: Duration::from_millis(5), ..ProbeOptions::default() };
    StoreOptions { backend, probe, ..StoreOptions::default() }
}

/// Which way is faster differs from machine to machine; that both were read, and are told, does not.
fn check_measured(dir: &Path) {
    let checkpoint = open(dir);
    let plan = tight(&checkpoint);
    assert_eq!(plan.missing, 0);
    let opened = open_store(&checkpoint, &plan, options(None)).unwrap();
    assert!(opened.probed_bytes > 0);
    assert!(opened.description.contains("GB/s at 6 in flight ("), "{opened:?}");
    match (Direct::new(checkpoint.clone()), opened.backend) {
        (Ok(_), Backend::Direct) => assert!(opened.description.contains("buffered "), "{opened:?}"),
        (Ok(_), Backend::Buffered) => assert!(opened.description.contains("(direct "), "{opened:?}"),
        (Err(_), Backend::Buffered) => {
            assert!(opened.description.contains("direct reads are not possible: "), "{opened:?}");
        }
        other => panic!("{other:?}"),
    }
    let slab = opened.slab.as_ref().unwrap();
    assert!(slab.slots() as u64 * slab.slot_bytes() as u64 <= plan.experts);
    fetch(&opened);
}

#[test]
fn what_does_not_fit_is_measured() {
    check_measured(&fixture());
    // Not every kernel reads this one past its cache.
    if let Ok(memory) = tempfile::tempdir_in("/dev/shm") {
        for file in std::fs::read_dir(fixture()).unwrap() {
            let file = file.unwrap();
            std::fs::copy(file.path(), memory.path().join(file.file_name())).unwrap();
        }
        check_measured(memory.path());
    }
}

#[test]
fn what_is_asked_for_is_not_measured() {
    let checkpoint = open(&fixture());
    let plan = tight(&checkpoint);
    let mut backends = vec![Backend::Mapped, Backend::Buffered];
    backends.extend(Direct::new(checkpoint.clone()).ok().map(|_| Backend::Direct));
    for backend in backends {
        let opened = open_store(&checkpoint, &plan, options(Some(backend))).unwrap();
        assert_eq!((opened.backend, opened.probed_bytes), (backend, 0));
        assert!(opened.description.starts_with(&format!("{backend}")), "{opened:?}");
        assert!(opened.description.contains("as asked"), "{opened:?}");
        fetch(&opened);
    }
}

#[test]
fn what_is_small_is_mapped_at_once() {
    let checkpoint = open(&fixture());
    let plan = tight(&checkpoint);
    let roomy = MemoryPlan::new(&Machine::with(1 << 40), Needs::default(), plan.sizes, None);
    let opened = open_store(&checkpoint, &roomy, options(None)).unwrap();
    assert_eq!((opened.backend, opened.probed_bytes), (Backend::Mapped, 0));
    assert!(opened.slab.is_none() && opened.description.contains("a quarter of memory"), "{opened:?}");
    fetch(&opened);
}
