//! What a pass needs of memory: foreseen from the config, and measured.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use k3_experts::MappedStore;
use k3_format::{
    AttentionKind, Checkpoint, IndexerConfig, KdaConfig, MlaConfig, ModelConfig, MoeConfig, OpenOptions,
};
use k3_graph::{Cpu, Device, LogitsWanted, Model, ModelOptions, Silent, Span, working_bytes_per_token};
use peak_alloc::PeakAlloc;

#[global_allocator]
static PEAK: PeakAlloc = PeakAlloc;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name)
}

/// Bytes that a pass over `tokens` keeps at its peak beyond what is there after it.
fn measured(model: &Model<Cpu>, store: &MappedStore, tokens: usize, logits: LogitsWanted) -> usize {
    let ids: Vec<u32> = (0..tokens as u32).map(|i| 3 + i * 7919 % 500).collect();
    let mut state = model.new_state().unwrap();
    PEAK.reset_peak_usage();
    let results = model.forward(&mut [Span { state: &mut state, tokens: &ids, logits }], store, &mut Silent);
    let peak = PEAK.peak_usage();
    results.unwrap().pop().unwrap().unwrap();
    // What is left is the state, and the threads.
    peak - PEAK.current_usage()
}

/// One test, so that nothing else runs meanwhile.
#[test]
fn what_is_foreseen_is_what_is_needed() {
    let mut wrong = Vec::new();
    for name in ["tiny-k3", "tiny-k31", "dims-k31"] {
        let checkpoint = Arc::new(Checkpoint::open(&fixture(name), &OpenOptions::default()).unwrap());
        let (config, store) = (checkpoint.config().clone(), MappedStore::new(checkpoint.clone()));
        // One thread: of several, each may hold the inner values of another expert, or not, as they are scheduled.
        let device = Cpu::new(1).unwrap();
        let model =
            Model::load(device, config.clone(), &*checkpoint, &ModelOptions::default(), &mut |_, _| {})
                .unwrap();
        // The threads take what they need first.
        measured(&model, &store, 40, LogitsWanted::All);
        for logits in [LogitsWanted::Last, LogitsWanted::All] {
            // The difference of two lengths: what does not grow cancels out.
            let (short, long) = (300, 900);
            let needed = measured(&model, &store, long, logits) - measured(&model, &store, short, logits);
            let needed = needed as f64 / (long - short) as f64;
            let foreseen = working_bytes_per_token(&config, Cpu::VALUE_BYTES, logits) as f64;
            let line = format!("{name} {logits:?}: foreseen {foreseen}, needed {needed:.0}");
            println!("{line}");
            if !(1.0..1.2).contains(&(foreseen / needed)) {
                wrong.push(line);
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:?}");
    // As docs/architecture.md says: a prompt of 3,266 tokens is one chunk.
    assert_eq!((released(), (2 << 30) / released()), (657_416, 3266));
}

/// Of the released K3.1 Pro.
fn released() -> u64 {
    let config = ModelConfig {
        hidden_size: 7168,
        vocab_size: 163_840,
        rms_norm_eps: 1e-5,
        activation_situ_beta: 4.0,
        activation_situ_linear_beta: 25.0,
        attn_res_block_size: 12,
        first_k_dense_replace: 1,
        intermediate_size: 33_792,
        max_position_embeddings: 1 << 20,
        layers: (0..93)
            .map(|l| if l % 4 == 3 || l == 92 { AttentionKind::FullAttention } else { AttentionKind::Kda })
            .collect(),
        kda: KdaConfig { num_heads: 96, head_dim: 128, short_conv_kernel_size: 4, gate_lower_bound: -5.0 },
        mla: MlaConfig {
            num_heads: 96,
            q_lora_rank: 1536,
            kv_lora_rank: 512,
            qk_nope_head_dim: 128,
            qk_rope_head_dim: 64,
            v_head_dim: 128,
        },
        moe: MoeConfig {
            num_experts: 896,
            num_experts_per_token: 16,
            num_shared_experts: 2,
            moe_intermediate_size: 3072,
            routed_expert_hidden_size: 3584,
            moe_renormalize: true,
            routed_scaling_factor: 1.0,
        },
        indexer: Some(IndexerConfig { n_heads: 32, head_dim: 128, topk: 2048 }),
        tokens: k3_format::SpecialTokens::default(),
    };
    let bytes = working_bytes_per_token(&config, Cpu::VALUE_BYTES, LogitsWanted::Last);
    println!("released: {bytes} bytes a token");
    bytes
}
