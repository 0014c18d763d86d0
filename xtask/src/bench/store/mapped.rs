//! Mapped experts in a warm page cache, against reads of memory.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;
use std::time::Instant;

use anyhow::{Result, bail};
use k3_experts::{Choices, Expert, ExpertId, ExpertRequest, ExpertStore, MappedStore, Phase};
use k3_format::{Checkpoint, OpenOptions};
use k3_quant::MatrixData;
use k3_quant::cpu::probe;

use super::super::limits::Reader;

/// Bytes of the experts that are read, at least: more than any cache holds, and not more than memory.
const BYTES: usize = 2 << 30;
/// Passes that are timed, each beside one through as plain memory.
const PASSES: usize = 9;
/// Passes before them at most: the store hints everything until a while after the last page had to be read.
const WARMING: usize = 60;
/// Bytes that a thread takes at once.
const PIECE: usize = 1 << 20;

pub(super) fn run(dir: &Path, out: &mut impl Write) -> Result<()> {
    let threads = thread::available_parallelism()?.get();
    let memory = Reader::new(threads)?;
    let open = || -> Result<MappedStore> {
        Ok(MappedStore::new(Arc::new(Checkpoint::open(dir, &OpenOptions::default())?)))
    };
    let checkpoint = Checkpoint::open(dir, &OpenOptions::default())?;
    let config = checkpoint.config();
    let layers = config.first_k_dense_replace..config.num_hidden_layers();
    let a_layer = BYTES.div_ceil(checkpoint.experts().layout().len * layers.len());
    let experts: Vec<ExpertId> = (0..a_layer.min(config.moe.num_experts) as ExpertId).collect();
    let requests: Vec<(usize, &[ExpertId])> = layers
        .flat_map(|layer| experts.chunks(config.moe.num_experts_per_token).map(move |ids| (layer, ids)))
        .collect();
    let pass = |store: &MappedStore| -> Result<(f64, f64)> {
        let begin = Instant::now();
        let (mut bytes, mut fetching) = (0, 0.0);
        for &(layer, experts) in &requests {
            let fetch = Instant::now();
            let request = ExpertRequest { layer, experts, choices: Choices::default(), phase: Phase::Decode };
            let experts: Vec<Expert> = store.fetch(request).collect::<Result<_, _>>()?;
            fetching += fetch.elapsed().as_secs_f64();
            bytes += read(&experts, threads, memory.ahead())?;
        }
        let seconds = begin.elapsed().as_secs_f64();
        Ok((bytes as f64 / seconds, fetching / seconds))
    };
    // Everything comes into the page cache; then a mapping of its own, whose pages have to be found once.
    pass(&open()?)?;
    let store = open()?;
    let (first, _) = pass(&store)?;
    writeln!(
        out,
        "mapped, {} experts in the page cache, {threads} threads: the first pass {:.2} GB/s",
        requests.iter().map(|(_, ids)| ids.len()).sum::<usize>(),
        first / 1e9
    )?;
    let mut warming = 0;
    // Then a fiftieth of the time or less goes into fetching.
    while warming < WARMING && pass(&store)?.1 > 0.02 {
        warming += 1;
    }
    let mut ratios = Vec::new();
    for turn in 0..PASSES {
        // Each goes first in turn.
        let ((rate, fetching), plain) = if turn % 2 == 0 {
            let rate = pass(&store)?;
            (rate, memory.rate())
        } else {
            let plain = memory.rate();
            (pass(&store)?, plain)
        };
        ratios.push(rate / plain);
        writeln!(
            out,
            "memory {:.2} GB/s, mapped experts {:.2} GB/s, {:.1} % of the time in the store, ratio {:.3}",
            plain / 1e9,
            rate / 1e9,
            100.0 * fetching,
            rate / plain
        )?;
    }
    ratios.sort_by(f64::total_cmp);
    writeln!(out, "median ratio {:.3}, after {warming} passes", ratios[PASSES / 2])?;
    Ok(())
}

/// Reads every byte of some experts once, in pieces that threads take as they are free. Returns the bytes.
fn read(experts: &[Expert], threads: usize, ahead: Option<usize>) -> Result<usize> {
    let mut pieces = Vec::new();
    for matrix in experts.iter().flat_map(|expert| [&expert.w1, &expert.w2, &expert.w3]) {
        let MatrixData::Mxfp4 { packed, scale } = matrix.data() else {
            bail!("experts in {:?}, and only MXFP4 is measured, as in the released shards", matrix.format());
        };
        pieces.extend(packed.chunks(PIECE).chain(scale.chunks(PIECE)));
    }
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some(piece) = pieces.get(next.fetch_add(1, Relaxed)) {
            std::hint::black_box(probe::read(piece, ahead));
        }
    };
    thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(work);
        }
        work();
    });
    Ok(pieces.iter().map(|piece| piece.len()).sum())
}
