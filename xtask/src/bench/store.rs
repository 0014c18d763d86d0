//! Bytes per second that the expert store delivers, against plain reads of the same files.

mod mapped;

use std::io::Write as _;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use k3_experts::slab::{Direct, Reader};
use k3_experts::{Choices, Counters, ExpertId, ExpertRequest, ExpertStore, Phase, SlabOptions, SlabStore};
use k3_format::{Checkpoint, ExpertLocation, OpenOptions};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// Both rates are taken this often, in turn: drives change their rate with time.
const TRIES: usize = 6;
/// Bytes of one measurement, at least.
const BYTES: u64 = 4 << 30;
/// Bytes of a plain read: the rate of the better is the limit. Drives differ in which they like.
const PIECES: [usize; 2] = [usize::MAX, 4 << 20];
/// Alignment of direct reads.
const ALIGN: usize = 4096;
/// Lengths of plain reads are multiples of this, as the store's are: some systems slow down for others.
const GRANULE: usize = 64 << 10;

pub(super) fn run(dir: &Path, reads_in_flight: usize, budget_bytes: u64) -> Result<()> {
    let mut out = std::io::stdout();
    let checkpoint = Arc::new(Checkpoint::open(dir, &OpenOptions::default())?);
    let reader: Arc<dyn Reader> = Arc::new(Direct::new(checkpoint.clone())?);
    let options = SlabOptions { budget_bytes, reads_in_flight, ..SlabOptions::default() };
    let config = checkpoint.config();
    let (first, layers) = (config.first_k_dense_replace, config.num_hidden_layers());
    let (experts, per_token) = (config.moe.num_experts, config.moe.num_experts_per_token);
    let expert_bytes = checkpoint.experts().layout().len;
    let all = (expert_bytes * experts * (layers - first)) as u64;
    ensure!(
        budget_bytes < all / 2,
        "a budget of {budget_bytes} bytes holds half of the {all} bytes of experts or more: there would be little to read; name a smaller --budget-mb, or a larger snapshot"
    );
    ensure!(
        checkpoint.experts().scattered() == 0,
        "the plain reads need experts in one piece, as in the released shards"
    );
    writeln!(
        out,
        "{} experts of {expert_bytes} bytes, {reads_in_flight} reads in flight",
        (layers - first) * experts
    )?;

    // A token's experts of each layer, at random: nearly all are misses with a budget far below the checkpoint.
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let tokens = (BYTES / (expert_bytes * per_token * (layers - first)) as u64).max(1) as usize;
    let mut ratios = Vec::new();
    let mut visits = || -> Vec<(usize, Vec<ExpertId>)> {
        let layers = (0..tokens).flat_map(|_| first..layers);
        layers.map(|layer| (layer, distinct(&mut rng, per_token, experts))).collect()
    };
    for turn in 0..TRIES {
        // Different experts for the two, and each goes first in turn: what one has read may be cached behind the drive.
        let (mut plain, mut counters, mut rate) = (0.0, Counters::default(), 0.0);
        for step in 0..2 {
            if (turn + step) % 2 == 0 {
                for piece in PIECES {
                    let rate = plain_rate(&checkpoint, &*reader, &visits(), reads_in_flight, piece)?;
                    plain = rate.max(plain);
                }
            } else {
                // A new store each time; its memory is touched before the clock starts, as that of the plain reads.
                let store = SlabStore::new(checkpoint.clone(), &reader, options)?;
                let fetch = |visits: &[(usize, Vec<ExpertId>)]| -> Result<()> {
                    for (layer, experts) in visits {
                        let (layer, choices, phase) = (*layer, Choices::default(), Phase::Decode);
                        for expert in store.fetch(ExpertRequest { layer, experts, choices, phase }) {
                            expert.context("fetching an expert")?;
                        }
                    }
                    Ok(())
                };
                let visits = visits();
                fetch(&visits[..visits.len() / 2])?;
                let before = store.counters();
                let begin = Instant::now();
                fetch(&visits)?;
                let seconds = begin.elapsed().as_secs_f64();
                counters = store.counters();
                counters.bytes_demanded -= before.bytes_demanded;
                counters.hits -= before.hits;
                counters.requested -= before.requested;
                rate = counters.bytes_demanded as f64 / seconds;
            }
        }
        ratios.push(rate / plain);
        let hit_rate = counters.hits as f64 / counters.requested as f64;
        writeln!(
            out,
            "plain direct reads {:.2} GB/s, store {:.2} GB/s of {:.1} GB read at hit rate {hit_rate:.2}, ratio {:.3}",
            plain / 1e9,
            rate / 1e9,
            counters.bytes_demanded as f64 / 1e9,
            rate / plain
        )?;
    }
    ratios.sort_by(f64::total_cmp);
    writeln!(out, "median ratio {:.3}", f64::midpoint(ratios[TRIES / 2 - 1], ratios[TRIES / 2]))?;
    mapped::run(dir, &mut out)
}

/// Bytes per second of threads that read experts in pieces of at most `piece` bytes, and do nothing else.
fn plain_rate(
    checkpoint: &Checkpoint,
    reader: &dyn Reader,
    visits: &[(usize, Vec<ExpertId>)],
    threads: usize,
    piece: usize,
) -> Result<f64> {
    let len = checkpoint.experts().layout().len;
    let mut reads = Vec::new();
    for (layer, ids) in visits {
        for &id in ids {
            let ExpertLocation::Run { shard, begin } = checkpoint.experts().location(*layer, id)? else {
                continue;
            };
            let (mut offset, end) = (begin - begin % ALIGN as u64, begin + len as u64);
            while offset < end {
                let bytes = (end - offset).min(piece as u64);
                reads.push((shard, offset, bytes as usize));
                offset += bytes;
            }
        }
    }
    let longest = piece.min(len + ALIGN).next_multiple_of(GRANULE);
    let next = AtomicUsize::new(0);
    // The clock starts when every thread has touched its memory.
    let start = Barrier::new(threads + 1);
    let work = || -> Result<u64> {
        let mut buffer = vec![1_u8; longest + ALIGN];
        start.wait();
        let lead = buffer.as_ptr().align_offset(ALIGN);
        let buffer = &mut buffer[lead..lead + longest];
        let mut all = 0;
        while let Some(&(shard, offset, bytes)) = reads.get(next.fetch_add(1, Relaxed)) {
            let mut done = 0;
            while done < bytes {
                let end = bytes.next_multiple_of(GRANULE);
                let n = reader.read_at(shard, &mut buffer[done..end], offset + done as u64)?;
                ensure!(n > 0, "a shard ended early");
                done += n;
            }
            all += done as u64;
        }
        Ok(all)
    };
    thread::scope(|scope| -> Result<f64> {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        start.wait();
        let begin = Instant::now();
        let mut bytes = 0;
        for thread in threads {
            bytes += thread.join().expect("a reading thread does not panic")?;
        }
        Ok(bytes as f64 / begin.elapsed().as_secs_f64())
    })
}

/// `k` of `of` experts in any order.
fn distinct(rng: &mut ChaCha8Rng, k: usize, of: usize) -> Vec<ExpertId> {
    let mut ids: Vec<ExpertId> = (0..of as ExpertId).collect();
    for i in 0..k {
        let j = i + (rng.next_u64() % (of - i) as u64) as usize;
        ids.swap(i, j);
    }
    ids.truncate(k);
    ids
}
