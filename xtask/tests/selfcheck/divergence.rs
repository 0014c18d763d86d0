//! Damaged weights, and where they are said to show first.

use std::fs;
use std::path::Path;

use k3_format::{Checkpoint, ExpertLocation, OpenOptions, Role, TensorId};
use xtask::expect::{Outcome, read_tensors};
use xtask::selfcheck::{Args, Sublayer};
use xtask::{LoadName, OpenArgs};

use crate::names;
use crate::support::{copy, fixture, on, refusal, selfcheck};

/// Flips a bit of the first scale of the first matrix of an expert, in the file.
fn damage(dir: &Path, layer: usize, expert: u32) {
    let checkpoint = Checkpoint::open(dir, &OpenOptions::default()).unwrap();
    let experts = checkpoint.experts();
    let ExpertLocation::Run { shard, begin } = experts.location(layer, expert).unwrap() else {
        panic!("fixture experts lie in one piece");
    };
    let at = begin as usize + experts.layout().parts[1].start;
    let file = dir.join(&checkpoint.shards().files()[shard].name);
    let mut bytes = fs::read(&file).unwrap();
    bytes[at] ^= 4;
    fs::write(&file, bytes).unwrap();
}

#[test]
fn a_flipped_bit_in_an_expert_is_located() {
    let dir = copy("tiny-k31", &[]);
    damage(dir.path(), 5, 3);
    let (reports, text) = selfcheck(&on(dir.path(), None));
    let [report] = reports.try_into().unwrap();
    assert!(!report.is_good());
    let divergence = report.divergence.as_ref().unwrap();
    assert_eq!((divergence.layer, divergence.sublayer), (Some(5), Sublayer::Moe), "{text}");
    // Later layers inherit the error; only this one is wrong with the right input.
    let wrong: Vec<_> = report.forced.as_ref().unwrap().iter().filter(|f| f.relative_l2 > 5e-6).collect();
    assert_eq!(
        wrong.iter().map(|f| (f.layer, f.sublayer)).collect::<Vec<_>>(),
        [(5, Sublayer::Moe)],
        "{text}"
    );
    assert_eq!(report.check("attn_in").unwrap().outcome, Outcome::Failed);
    assert_eq!(report.check("KDA alone").unwrap().outcome, Outcome::Passed);
    assert!(text.contains("first divergence: layer 5, MoE, position "), "{text}");
    assert!(text.contains("wrong itself, with expected inputs: layer 5 MoE"), "{text}");
}

#[test]
fn a_divergence_is_located_by_the_last_position_alone() {
    let dir = copy("tiny-k31", &["trace.safetensors"]);
    for expert in 0..16 {
        damage(dir.path(), 5, expert);
    }
    let (reports, text) = selfcheck(&on(dir.path(), None));
    let divergence = reports[0].divergence.as_ref().unwrap();
    assert_eq!(
        (divergence.layer, divergence.sublayer, divergence.position),
        (Some(5), Sublayer::Moe, Some(79)),
        "{text}"
    );
    assert!(text.contains("errors cannot be told from inherited ones"), "{text}");
}

/// Puts a NaN at the begin of a row of a BF16 matrix.
fn put_nan(dir: &Path, role: Role, row: usize) {
    let checkpoint = Checkpoint::open(dir, &OpenOptions::default()).unwrap();
    let tensor = checkpoint.tensor(TensorId::model(role)).unwrap();
    assert_eq!(tensor.byte_len(), 2 * tensor.shape.iter().product::<u64>());
    let file = dir.join(&checkpoint.shards().files()[tensor.shard].name);
    let at = tensor.begin as usize + 2 * row * tensor.shape[1] as usize;
    let mut bytes = fs::read(&file).unwrap();
    bytes[at..][..2].copy_from_slice(&0x7fc0_u16.to_le_bytes());
    fs::write(&file, bytes).unwrap();
}

/// The run fails its check `finite` with this, which is also where the run first diverges.
#[track_caller]
fn check_not_finite(args: &Args, place: &str) {
    let (reports, text) = selfcheck(args);
    assert!(!reports[0].is_good());
    assert_eq!(names(&reports[0], Outcome::Failed), ["finite"], "{text}");
    assert!(reports[0].check("finite").unwrap().note.contains(place), "{text}");
    let first = text.lines().find(|line| line.starts_with("  first divergence: ")).unwrap();
    assert!(first.contains(place), "{text}");
}

#[test]
fn an_embedding_that_is_not_a_number_is_a_failed_check() {
    let dir = copy("tiny-k3", &[]);
    let expected = read_tensors(&fixture("tiny-k3").join("expected.safetensors")).unwrap();
    let ids = expected["input_ids"].as_i32().unwrap();
    let position = 5;
    let before = ids[..position].contains(&ids[position]);
    assert!(!before, "a token of its own");
    put_nan(dir.path(), Role::EmbedTokens, ids[position] as usize);
    check_not_finite(&on(dir.path(), None), "position 5, ");
}

/// Read whole, matrices are checked; mapped ones show it where they are used.
#[test]
fn a_matrix_that_is_not_a_number() {
    let dir = copy("tiny-k3", &[]);
    put_nan(dir.path(), Role::LmHead, 3);
    let error = refusal(&on(dir.path(), None));
    assert!(error.contains("lm_head.weight: row 3, column 0") && error.contains("NaN"), "{error}");
    let open = OpenArgs { load: LoadName::Map, ..OpenArgs::default() };
    check_not_finite(&Args { open, ..on(dir.path(), None) }, "position 0, logits");
}
