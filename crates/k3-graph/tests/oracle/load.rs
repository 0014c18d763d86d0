//! Builds the oracle's layers from a fixture folder (`docs/checkpoint.md` 2.2, 2.3, 3).

use std::path::Path;

use serde_json::Value;

use super::attnres::ResPair;
use super::indexer::Indexer;
use super::kda::Kda;
use super::mla::Mla;
use super::moe::{Expert, Glu, Moe, Router};
use super::mxfp4::Packed;
use super::num::Matrix;
use super::snapshot::{Tensors, json};
use super::{Attention, Layer, Mlp, Model, Widths};

const PREFIX: &str = "language_model.model.";

impl Model {
    pub(crate) fn load(folder: &Path) -> Self {
        let config = &json(&folder.join("config.json"))["text_config"];
        let reader = Reader { config, tensors: &Tensors::of_snapshot(folder) };
        let hidden = reader.size("hidden_size");
        let widths = Widths {
            hidden,
            latent: reader.size("routed_expert_hidden_size"),
            q_lora: reader.size("q_lora_rank"),
            kv_lora: reader.size("kv_lora_rank"),
            q_b: reader.size("num_attention_heads")
                * (reader.size("qk_nope_head_dim") + reader.size("qk_rope_head_dim")),
            attention_out: reader.size("num_attention_heads") * reader.size("v_head_dim"),
        };
        assert_eq!(reader.number("activation_situ_beta"), 4.0);
        assert_eq!(reader.number("activation_situ_linear_beta"), 25.0);
        Self {
            widths,
            eps: reader.number("rms_norm_eps"),
            block: reader.size("attn_res_block_size"),
            embedding: reader.tensors.matrix(&format!("{PREFIX}embed_tokens.weight")),
            layers: (0..reader.size("num_hidden_layers")).map(|l| reader.layer(l)).collect(),
            output_res: reader.res_pair(PREFIX, "output_attn_res"),
            norm: reader.tensors.floats(&format!("{PREFIX}norm.weight")),
            head: reader.tensors.matrix("language_model.lm_head.weight"),
        }
    }
}

struct Reader<'a> {
    config: &'a Value,
    tensors: &'a Tensors,
}

impl Reader<'_> {
    fn number(&self, field: &str) -> f64 {
        self.config[field].as_f64().unwrap_or_else(|| panic!("{field} is no number"))
    }

    fn size(&self, field: &str) -> usize {
        size(self.config, field)
    }

    fn matrix(&self, prefix: &str, name: &str) -> Matrix {
        self.tensors.matrix(&format!("{prefix}{name}.weight"))
    }

    fn floats(&self, prefix: &str, name: &str) -> Vec<f64> {
        self.tensors.floats(&format!("{prefix}{name}"))
    }

    fn res_pair(&self, prefix: &str, name: &str) -> ResPair {
        ResPair {
            norm: self.floats(prefix, &format!("{name}_norm.weight")),
            proj: self.floats(prefix, &format!("{name}_proj.weight")),
        }
    }

    fn layer(&self, l: usize) -> Layer {
        let prefix = format!("{PREFIX}layers.{l}.");
        let full = self.config["linear_attn_config"]["full_attn_layers"].as_array().expect("a list");
        // The lists count from 1.
        let is_full = full.iter().any(|n| n.as_u64() == Some(l as u64 + 1));
        Layer {
            input_norm: self.floats(&prefix, "input_layernorm.weight"),
            post_norm: self.floats(&prefix, "post_attention_layernorm.weight"),
            attention_res: self.res_pair(&prefix, "self_attention_res"),
            mlp_res: self.res_pair(&prefix, "mlp_res"),
            attention: if is_full {
                Attention::Mla(Box::new(self.mla(&format!("{prefix}self_attn."))))
            } else {
                Attention::Kda(Box::new(self.kda(&format!("{prefix}self_attn."))))
            },
            mlp: if l < self.size("first_k_dense_replace") {
                Mlp::Dense(self.glu(&format!("{prefix}mlp.")))
            } else {
                Mlp::Moe(Box::new(self.moe(&format!("{prefix}block_sparse_moe."))))
            },
        }
    }

    fn kda(&self, prefix: &str) -> Kda {
        let config = &self.config["linear_attn_config"];
        assert_eq!(size(config, "short_conv_kernel_size"), 4);
        Kda {
            heads: size(config, "num_heads"),
            dim: size(config, "head_dim"),
            lower_bound: config["gate_lower_bound"].as_f64().expect("a number"),
            projections: ["q_proj", "k_proj", "v_proj"].map(|name| self.matrix(prefix, name)),
            taps: ["q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight"]
                .map(|name| self.floats(prefix, name)),
            a_log: self.floats(prefix, "A_log"),
            dt_bias: self.floats(prefix, "dt_bias"),
            f_a: self.matrix(prefix, "f_a_proj"),
            f_b: self.matrix(prefix, "f_b_proj"),
            beta: self.matrix(prefix, "b_proj"),
            gate: self.matrix(prefix, "g_proj"),
            o_norm: self.floats(prefix, "o_norm.weight"),
            o_proj: self.matrix(prefix, "o_proj"),
        }
    }

    fn mla(&self, prefix: &str) -> Mla {
        Mla {
            heads: self.size("num_attention_heads"),
            nope: self.size("qk_nope_head_dim"),
            extra: self.size("qk_rope_head_dim"),
            value: self.size("v_head_dim"),
            latent: self.size("kv_lora_rank"),
            q_a: self.matrix(prefix, "q_a_proj"),
            q_a_norm: self.floats(prefix, "q_a_layernorm.weight"),
            q_b: self.matrix(prefix, "q_b_proj"),
            kv_a: self.matrix(prefix, "kv_a_proj_with_mqa"),
            kv_a_norm: self.floats(prefix, "kv_a_layernorm.weight"),
            kv_b: self.matrix(prefix, "kv_b_proj"),
            gate: self.matrix(prefix, "g_proj"),
            o_proj: self.matrix(prefix, "o_proj"),
            indexer: self.indexer(&format!("{prefix}indexer.")),
        }
    }

    fn indexer(&self, prefix: &str) -> Option<Indexer> {
        let config = &self.config["dsa_config"];
        assert_eq!(config.is_object(), self.tensors.has(&format!("{prefix}wk.weight")), "{prefix}");
        config.is_object().then(|| Indexer {
            heads: size(config, "index_n_heads"),
            dim: size(config, "index_head_dim"),
            topk: size(config, "index_topk"),
            wq_b: self.matrix(prefix, "wq_b"),
            wk: self.matrix(prefix, "wk"),
            k_norm: self.floats(prefix, "k_norm.weight"),
            k_norm_bias: self.floats(prefix, "k_norm.bias"),
            weights: self.matrix(prefix, "weights_proj"),
        })
    }

    fn glu(&self, prefix: &str) -> Glu {
        Glu {
            gate: self.matrix(prefix, "gate_proj"),
            up: self.matrix(prefix, "up_proj"),
            down: self.matrix(prefix, "down_proj"),
        }
    }

    fn moe(&self, prefix: &str) -> Moe {
        Moe {
            router: Router {
                per_token: self.size("num_experts_per_token"),
                renormalize: self.config["moe_renormalize"].as_bool().expect("a bool"),
                scaling_factor: self.number("routed_scaling_factor"),
                weight: self.matrix(prefix, "gate"),
                bias: self.floats(prefix, "gate.e_score_correction_bias"),
            },
            shared_count: self.size("num_shared_experts"),
            down_proj: self.matrix(prefix, "routed_expert_down_proj"),
            norm: self.floats(prefix, "routed_expert_norm.weight"),
            up_proj: self.matrix(prefix, "routed_expert_up_proj"),
            shared: self.glu(&format!("{prefix}shared_experts.")),
            experts: (0..self.size("num_experts"))
                .map(|e| Expert {
                    w1: self.packed(&format!("{prefix}experts.{e}.w1.")),
                    w2: self.packed(&format!("{prefix}experts.{e}.w2.")),
                    w3: self.packed(&format!("{prefix}experts.{e}.w3.")),
                })
                .collect(),
        }
    }

    fn packed(&self, prefix: &str) -> Packed {
        let name = format!("{prefix}weight_packed");
        let &[rows, half] = self.tensors.shape(&name) else { panic!("{name}: expected two axes") };
        Packed {
            rows,
            cols: 2 * half,
            codes: self.tensors.bytes(&name),
            scales: self.tensors.bytes(&format!("{prefix}weight_scale")),
        }
    }
}

fn size(config: &Value, field: &str) -> usize {
    let value = config[field].as_u64().unwrap_or_else(|| panic!("{field} is no size"));
    usize::try_from(value).expect("a size")
}
