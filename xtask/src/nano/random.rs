//! The CPU with its indexer's choice replaced by chance.

use k3_graph::device::{IndexQuery, SequenceRows};
use k3_graph::{Cpu, Device, DeviceError, Selected, Selection};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// [`Cpu`], except that a token beyond the indexer's budget attends as many keys as the budget has, drawn at random from
/// all that it may see.
///
/// The draw of a row follows from the seed, its position and its query: other in every layer, and the same for any
/// chunks, batch and threads.
#[derive(Debug)]
pub struct RandomSelection {
    cpu: Cpu,
    seed: u64,
}

impl RandomSelection {
    /// A device that computes on `cpu`.
    pub fn new(cpu: Cpu, seed: u64) -> Self {
        Self { cpu, seed }
    }

    /// `k` of the positions `0..keys`, ascending.
    fn draw(&self, query: &[f32], k: usize, keys: usize) -> Vec<u32> {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.seed.to_le_bytes()).update(&(keys as u64).to_le_bytes());
        for q in query {
            hasher.update(&q.to_le_bytes());
        }
        let mut rng = ChaCha8Rng::from_seed(*hasher.finalize().as_bytes());
        let mut positions: Vec<u32> = (0..keys as u32).collect();
        for i in 0..k {
            let other = i + (rng.next_u64() % (keys - i) as u64) as usize;
            positions.swap(i, other);
        }
        positions.truncate(k);
        positions.sort_unstable();
        positions
    }
}

impl Device for RandomSelection {
    k3_graph::delegate_device!(cpu: Cpu, types, rows, attn_res, kda, mla, route, experts, experts_ffn, states);

    fn kind(&self) -> &'static str {
        "cpu-f32, random selection"
    }

    fn deviation(&self) -> Option<&'static str> {
        Some("random selection")
    }

    fn index_select(
        &self,
        query: IndexQuery<'_, Self>,
        states: &[SequenceRows<'_, Self::MlaState>],
    ) -> Result<Selection, DeviceError> {
        let (k, width) = (query.config.topk, query.config.n_heads * query.config.head_dim);
        let q = self.cpu.download(query.q)?;
        let positions = states.iter().flat_map(|s| s.rows.clone().zip(s.position + 1..));
        let row = |(row, keys): (usize, usize)| {
            if keys <= k {
                return Selected::All;
            }
            Selected::Keys(self.draw(&q[row * width..(row + 1) * width], k, keys))
        };
        Ok(Selection { rows: positions.map(row).collect() })
    }
}
