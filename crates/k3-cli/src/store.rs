//! Which expert store, and how large.

use std::sync::Arc;

use anyhow::{Context, Result};
use clap::ValueEnum;
use k3_experts::slab::{Buffered, Direct, Reader};
use k3_experts::{ExpertStore, MappedStore, SlabOptions, SlabStore};
use k3_format::Checkpoint;

/// Options of the expert store.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct StoreArgs {
    /// How routed experts are read; no result depends on it
    #[arg(long, value_enum, default_value_t = StoreName::Mapped)]
    store: StoreName,
    /// Bytes of memory for experts, as in 8GiB or 20GB; not for the mapped store, where the system decides
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, default_value = "8GiB")]
    expert_budget: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum StoreName {
    /// Mapped files: the system's page cache decides what stays
    Mapped,
    /// Read past the page cache into slots of our own
    Direct,
    /// Read through the page cache into slots of our own
    Buffered,
}

impl StoreArgs {
    /// Opens the store, and says what it is.
    pub(crate) fn open(&self, checkpoint: &Arc<Checkpoint>) -> Result<(Arc<dyn ExpertStore>, String)> {
        let reader: Arc<dyn Reader> = match self.store {
            StoreName::Mapped => {
                return Ok((Arc::new(MappedStore::new(checkpoint.clone())), "experts mapped".into()));
            }
            StoreName::Direct => Arc::new(
                Direct::new(checkpoint.clone())
                    .context("reading past the page cache; try --store buffered")?,
            ),
            StoreName::Buffered => Arc::new(Buffered::new(checkpoint.clone())?),
        };
        let options = SlabOptions { budget_bytes: self.expert_budget, ..SlabOptions::default() };
        let store = SlabStore::new(checkpoint.clone(), &reader, options)?;
        let layers = checkpoint.config().num_hidden_layers() - checkpoint.config().first_k_dense_replace;
        let banner = format!(
            "experts {} into {:.1} GB: {} slots of {} bytes, {:.1} a layer",
            if self.store == StoreName::Direct { "read directly" } else { "read through the page cache" },
            self.expert_budget as f64 / 1e9,
            store.slots(),
            store.slot_bytes(),
            store.slots() as f64 / layers.max(1) as f64,
        );
        Ok((Arc::new(store), banner))
    }
}

/// A number with an optional unit.
pub(crate) fn parse_bytes(text: &str) -> Result<u64, String> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let scale: u64 = match unit.trim() {
        "" | "B" => 1,
        "kB" | "KB" => 1_000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        _ => {
            return Err(format!(
                "expected bytes, kB, MB, GB, KiB, MiB or GiB after the number, found {unit:?}"
            ));
        }
    };
    let number: u64 = number.parse().map_err(|_| "expected a whole number, as in 8GiB".to_owned())?;
    number.checked_mul(scale).ok_or_else(|| "more bytes than a file can have".to_owned())
}

#[cfg(test)]
mod tests {
    use super::parse_bytes;

    #[test]
    fn bytes_have_units() {
        let check =
            |text: &str, expected: Option<u64>| assert_eq!(parse_bytes(text).ok(), expected, "{text}");
        check("17", Some(17));
        check("8GiB", Some(8 << 30));
        check("20 GB", Some(20_000_000_000));
        check("1.5GB", None);
        check("GB", None);
        check("-1", None);
        check("99999999999GiB", None);
        check("5 apples", None);
    }
}
