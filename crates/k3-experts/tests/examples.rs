//! The example does what it says.

#[allow(dead_code, reason = "its `main` is run by people")]
#[path = "../examples/store.rs"]
mod store;

use std::path::Path;

#[test]
fn what_was_read_is_found_the_second_time() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/tiny-k31");
    let counters = store::fetch_twice(&dir).unwrap();
    assert_eq!((counters.requested, counters.misses, counters.hits), (6, 3, 3));
}
