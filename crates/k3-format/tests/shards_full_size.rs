//! Opening a checkpoint with the full number of tensors: 96 sparse shards, nothing but headers on the disk.
//!
//! `cargo test --release -p k3-format --test shards_full_size -- --ignored --nocapture` prints time and memory.

use std::fmt::Write as _;
use std::fs;
use std::time::Instant;

use k3_format::Shards;

const PARTS: [(&str, &str, u64); 6] = [
    ("w1.weight_packed", "[3072,1792]", 3072 * 1792),
    ("w1.weight_scale", "[3072,112]", 3072 * 112),
    ("w2.weight_packed", "[3584,1536]", 3584 * 1536),
    ("w2.weight_scale", "[3584,96]", 3584 * 96),
    ("w3.weight_packed", "[3072,1792]", 3072 * 1792),
    ("w3.weight_scale", "[3072,112]", 3072 * 112),
];

fn peak_memory() -> String {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    status.lines().find(|line| line.starts_with("VmHWM")).unwrap_or("VmHWM unknown").to_owned()
}

#[test]
#[ignore = "writes 130 MB of headers"]
fn half_a_million_tensors() {
    const SHARDS: usize = 96;
    const EXPERTS: usize = 864;
    let dir = tempfile::tempdir().unwrap();
    let mut index = fs::File::create(dir.path().join("model.safetensors.index.json"))
        .map(std::io::BufWriter::new)
        .unwrap();
    let mut separator = "{\"weight_map\":{";
    for shard in 0..SHARDS {
        let name = format!("model-{:05}-of-{SHARDS:06}.safetensors", shard + 1);
        let (mut header, mut at) = (String::new(), 0);
        for expert in 0..EXPERTS {
            for (part, shape, size) in PARTS {
                let tensor =
                    format!("language_model.model.layers.{shard}.block_sparse_moe.experts.{expert}.{part}");
                let before = if header.is_empty() { '{' } else { ',' };
                let end = at + size;
                let offsets = format!("\"data_offsets\":[{at},{end}]");
                write!(header, "{before}\"{tensor}\":{{\"dtype\":\"U8\",\"shape\":{shape},{offsets}}}")
                    .unwrap();
                std::io::Write::write_fmt(
                    &mut index,
                    format_args!("{separator}\n    \"{tensor}\": \"{name}\""),
                )
                .unwrap();
                (at, separator) = (end, ",");
            }
        }
        header.push('}');
        let path = dir.path().join(&name);
        fs::write(&path, [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat()).unwrap();
        fs::OpenOptions::new()
            .write(true)
            .open(&path)
            .unwrap()
            .set_len(8 + header.len() as u64 + at)
            .unwrap();
    }
    std::io::Write::write_all(&mut index, b"}}").unwrap();
    drop(index);

    let before = peak_memory();
    let start = Instant::now();
    let shards = Shards::open(dir.path()).unwrap();
    println!(
        "{} tensors opened in {:.2?}; {before} before, {} after",
        shards.len(),
        start.elapsed(),
        peak_memory()
    );
    assert_eq!(shards.len(), SHARDS * EXPERTS * PARTS.len());
    let tensor =
        shards.get("language_model.model.layers.95.block_sparse_moe.experts.863.w3.weight_scale").unwrap();
    assert_eq!((tensor.shard, tensor.end), (95, shards.files()[95].len));
}
