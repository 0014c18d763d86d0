//! The mapped backend on a fixture whose experts are not in id order and lie in three shards.

#[path = "support/contents.rs"]
mod contents;
#[path = "support/request.rs"]
mod request;

use std::path::Path;
use std::sync::Arc;

use k3_experts::{ExpertError, ExpertStore, MappedStore};
use k3_format::{Checkpoint, OpenOptions};

use contents::{check_contents, values};
use request::request;

fn store() -> (Arc<Checkpoint>, MappedStore) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/tiny-k31");
    let checkpoint = Arc::new(Checkpoint::open(&dir, &OpenOptions::default()).unwrap());
    (checkpoint.clone(), MappedStore::new(checkpoint))
}

#[test]
fn every_expert_comes_once_and_is_what_a_read_gives() {
    let (checkpoint, store) = store();
    let ids: Vec<u32> = (0..16).rev().collect();
    for layer in 1..13 {
        let arrived: Vec<_> = store.fetch(request(layer, &ids)).collect::<Result<_, _>>().unwrap();
        let mut found: Vec<u32> = arrived.iter().map(|e| e.id).collect();
        found.sort_unstable();
        assert_eq!(found, (0..16).collect::<Vec<_>>());
        for expert in arrived {
            check_contents(&checkpoint, layer, &expert);
        }
    }
    let counters = store.counters();
    assert_eq!(counters.requested, 12 * 16);
    assert_eq!(counters.bytes, 12 * 16 * checkpoint.experts().layout().len as u64);
}

#[test]
fn an_expert_outlives_its_store() {
    let (checkpoint, store) = store();
    let expert = store.fetch(request(5, &[3])).next().unwrap().unwrap();
    let expected = values(&checkpoint.read_expert(5, 3).unwrap().w2);
    drop((checkpoint, store));
    assert_eq!(values(&expert.w2), expected);
}

#[test]
fn what_is_not_there_is_an_error_in_its_place() {
    let (_, store) = store();
    let mut arrivals = store.fetch(request(3, &[2, 16, 4]));
    assert_eq!(arrivals.next().unwrap().unwrap().id, 2);
    let error = arrivals.next().unwrap().unwrap_err();
    assert!(matches!(error, ExpertError::Unknown { layer: 3, expert: 16, experts: 16 }), "{error}");
    assert_eq!(arrivals.next().unwrap().unwrap().id, 4);
    let twice: Vec<_> = store.fetch(request(3, &[2, 2, 4])).collect();
    assert!(matches!(twice[1], Err(ExpertError::Repeated { layer: 3, expert: 2 })), "{twice:?}");
    assert!(twice[0].is_ok() && twice[2].is_ok() && twice.len() == 3);
    // Layer 0 is dense, layer 13 does not exist.
    for layer in [0, 13] {
        let error = store.fetch(request(layer, &[0])).next().unwrap().unwrap_err();
        assert!(matches!(error, ExpertError::Unknown { experts: 0, .. }), "{error}");
    }
}

#[test]
fn hints_may_name_anything() {
    let (_, store) = store();
    store.prefetch(4, &[0, 1, 99]);
    store.prefetch(99, &[0]);
    assert_eq!(store.counters().requested, 0);
}
