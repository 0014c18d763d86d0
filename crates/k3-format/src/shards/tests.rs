use super::*;

#[test]
fn reads_of_seven_bytes_give_the_same_tensors() {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/dims-k31");
    let whole = Shards::open(Path::new(dir)).unwrap();
    let mut pieces = Shards::open(Path::new(dir)).unwrap();
    pieces.read_cap = 7;
    let mut biggest = 0;
    for tensor in whole.iter().filter(|t| t.byte_len() < 10_000) {
        biggest = biggest.max(tensor.byte_len());
        assert_eq!(pieces.read(&tensor).unwrap(), whole.read(&tensor).unwrap(), "{}", tensor.name);
    }
    assert!(biggest > 1000);
}
