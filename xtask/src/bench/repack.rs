//! A repack beside `cp` of the same files to the same disk, from the same state of the page cache.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use indicatif::DecimalBytes;
use k3_experts::memory::peak_rss;
use k3_format::repack::{IoMode, Recipe, Repack, RunOptions};
use k3_format::{Checkpoint, OpenOptions};

/// Arguments of `cargo xtask bench repack`.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct Args {
    /// Convert this snapshot [default: one made with `synth --geometry k31` and the numbers below]
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Folder on the disk to measure, with room for three copies [default: the system's for temporary files]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Layers of the snapshot that is made
    #[arg(long, default_value_t = 2)]
    layers: usize,
    /// Routed experts of a layer of it
    #[arg(long, default_value_t = 64)]
    experts: usize,
    /// How often each is measured
    #[arg(long, default_value_t = 2)]
    repeat: usize,
}

pub(super) fn run(args: &Args) -> Result<()> {
    let place = match &args.dir {
        Some(dir) => tempfile::tempdir_in(dir),
        None => tempfile::tempdir(),
    };
    let place = place.context("making a temporary folder")?;
    let source = match &args.model {
        Some(dir) => dir.clone(),
        None => synthetic(args, place.path())?,
    };
    let mut out = std::io::stdout();
    for warm in [true, false] {
        let state = if warm { "page cache holds the source" } else { "page cache without the source" };
        for round in 1..=args.repeat.max(1) {
            let (copy, synced) = copy(&source, &place.path().join("copy"), warm)?;
            writeln!(out, "{state}, round {round}:")?;
            writeln!(out, "  cp {copy:.2} s, with the bytes brought to the disk {synced:.2} s")?;
            for (name, io) in [("direct", IoMode::Direct), ("cached", IoMode::Cached)] {
                let target = place.path().join("repacked");
                prepare(&source, warm)?;
                let start = Instant::now();
                let written = convert(&source, &target, io);
                let seconds = start.elapsed().as_secs_f64();
                remove(&target)?;
                match written {
                    Ok(bytes) => writeln!(
                        out,
                        "  repack, {name}: {seconds:.2} s for {}, {:.2} x cp with sync, {:.2} x cp",
                        DecimalBytes(bytes),
                        seconds / synced,
                        seconds / copy,
                    )?,
                    Err(error) => writeln!(out, "  repack, {name}: {error:#}")?,
                }
            }
        }
    }
    match peak_rss() {
        Some(peak) => writeln!(out, "peak memory {:.0} MB", peak as f64 / 1e6)?,
        None => writeln!(out, "peak memory not measured: there is no /proc here")?,
    }
    Ok(())
}

fn synthetic(args: &Args, place: &Path) -> Result<PathBuf> {
    let dir = place.join("source");
    // In a process of its own: the peak of this one is that of converting.
    let this = std::env::current_exe().context("finding this program")?;
    let made = Command::new(this)
        .args(["synth", "--geometry", "k31"])
        .args(["--layers", &args.layers.to_string(), "--experts", &args.experts.to_string()])
        .arg(&dir)
        .status()
        .context("starting `synth`")?;
    ensure!(made.success(), "`synth` failed");
    Ok(dir)
}

/// Seconds of `cp`, and of `cp` followed by a sync of what it wrote.
fn copy(source: &Path, target: &Path, warm: bool) -> Result<(f64, f64)> {
    prepare(source, warm)?;
    let start = Instant::now();
    let copied = Command::new("cp").arg("-rL").arg(source).arg(target).status().context("starting `cp`")?;
    let copy = start.elapsed().as_secs_f64();
    ensure!(copied.success(), "`cp` failed");
    for file in files(target)? {
        File::open(&file)?.sync_all().with_context(|| format!("synchronizing {}", file.display()))?;
    }
    let synced = start.elapsed().as_secs_f64();
    remove(target)?;
    Ok((copy, synced))
}

fn convert(source: &Path, target: &Path, io: IoMode) -> Result<u64> {
    let source = Checkpoint::open(source, &OpenOptions::default())?;
    let repack = Repack::new(&source, Recipe::default())?;
    let mut options = RunOptions::default();
    options.io = io;
    Ok(repack.run(target, &options, &mut |_| {})?.bytes_written)
}

/// Brings the source into the page cache, or out of it, with nothing left to be written.
fn prepare(source: &Path, warm: bool) -> Result<()> {
    // Writes of the round before are not part of this one.
    let synced = Command::new("sync").status().context("starting `sync`")?;
    ensure!(synced.success(), "`sync` failed");
    for path in files(source)? {
        let mut file = File::open(&path).with_context(|| format!("opening {}", path.display()))?;
        if warm {
            std::io::copy(&mut file, &mut std::io::sink())
                .with_context(|| format!("reading {}", path.display()))?;
        } else {
            #[cfg(target_os = "linux")]
            rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)
                .map_err(std::io::Error::from)
                .with_context(|| format!("dropping {} from the page cache", path.display()))?;
        }
    }
    Ok(())
}

fn files(dir: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(dir).with_context(|| format!("listing {}", dir.display()))?;
    let paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    Ok(paths.into_iter().filter(|path| path.is_file()).collect())
}

fn remove(dir: &Path) -> Result<()> {
    if !dir.exists() {
        return Ok(());
    }
    fs::remove_dir_all(dir).with_context(|| format!("removing {}", dir.display()))
}
