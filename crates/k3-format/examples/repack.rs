//! Repacks a checkpoint: `cargo run --release -p k3-format --example repack -- fixtures/tiny-k31 /tmp/tiny-k31-nvfp4`

use std::error::Error;
use std::path::Path;

use k3_format::repack::{Outcome, Recipe, Repack, RunOptions, VerifyMode};
use k3_format::{Checkpoint, OpenOptions};

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let (Some(source), Some(target)) = (args.next(), args.next()) else {
        return Err("the snapshot folder and the one to be made are needed".into());
    };
    let outcome = repack(source.as_ref(), target.as_ref())?;
    println!("\n{} shards, {} bytes", outcome.written.len(), outcome.bytes_written);
    Ok(())
}

/// Experts to NVFP4, without loss; the result is compared with the source.
pub(crate) fn repack(source: &Path, target: &Path) -> Result<Outcome, Box<dyn Error>> {
    let source = Checkpoint::open(source, &OpenOptions::default())?;
    let repack = Repack::new(&source, Recipe::default())?;
    let mut options = RunOptions::default();
    options.verify = VerifyMode::Full;
    let outcome = repack.run(target, &options, &mut |progress| {
        eprint!("\r{:?}: {} of {} bytes", progress.phase, progress.bytes_done, progress.bytes_total);
    })?;
    Ok(outcome)
}
