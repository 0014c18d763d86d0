//! The weights of the model on a device.

use std::sync::Arc;

use k3_format::{
    AttentionKind, IndexerConfig, ModelConfig, Role, SourceError, TensorId, Variant, WeightSource,
};

use crate::device::{Device, DeviceError, RouterRule, SituCaps};
use crate::forward::Lookahead;
use crate::state::{ExportedState, SequenceState, StateError, StateShape};

/// How to load a model.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct ModelOptions {
    /// Load only the first layers; the output mix, norm and head then follow the last one loaded.
    pub layers: Option<usize>,
    /// Attend all keys although the model has an indexer. For contexts up to its budget the result is
    /// bit-identical; beyond it, it is another function than the one the weights were trained for.
    pub ignore_indexer: bool,
    /// Use of a token's experts only the first, in rank order, up to this share of their weight, above 0 and at most 1
    /// (`docs/arithmetic.md` 8.2, "Routed top-p"). Below 1 it is another function than the one the weights were
    /// trained for.
    pub routed_top_p: Option<f64>,
    /// How to guess which experts come next, for stores that read ahead.
    pub lookahead: Lookahead,
}

impl ModelOptions {
    /// Load only the first `layers` layers.
    #[must_use]
    pub fn with_layers(mut self, layers: Option<usize>) -> Self {
        self.layers = layers;
        self
    }

    /// Attend all keys.
    #[must_use]
    pub fn with_ignore_indexer(mut self, ignore: bool) -> Self {
        self.ignore_indexer = ignore;
        self
    }

    /// Use experts up to a share of a token's weight.
    #[must_use]
    pub fn with_routed_top_p(mut self, p: Option<f64>) -> Self {
        self.routed_top_p = p;
        self
    }

    /// How to guess which experts come next.
    #[must_use]
    pub fn with_lookahead(mut self, lookahead: Lookahead) -> Self {
        self.lookahead = lookahead;
        self
    }
}

/// Why a model could not be loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The source does not have it or could not read it.
    #[error("loading {id}")]
    Source {
        /// Which weight.
        id: TensorId,
        /// What the source said.
        #[source]
        source: SourceError,
    },
    /// A weight of another size than the config says.
    #[error("{id}: expected {expected}, found {found}")]
    Shape {
        /// Which weight.
        id: TensorId,
        /// From the config.
        expected: String,
        /// From the source.
        found: String,
    },
    /// A norm gain without a single value: no trained model has one, but a file that was never filled reads so.
    #[error(
        "{id}: all values are zero; the file was not written to its end (an interrupted copy, a sparse file): get it again"
    )]
    ZeroGain {
        /// Which weight.
        id: TensorId,
    },
    /// More layers asked for than there are, or none.
    #[error("{asked} layers asked for, the model has {layers}")]
    Layers {
        /// [`ModelOptions::layers`]
        asked: usize,
        /// Of the model.
        layers: usize,
    },
    /// A share that is none.
    #[error("routed top-p is a share of a token's weight, above 0 and at most 1; found {found:?}")]
    RoutedTopP {
        /// [`ModelOptions::routed_top_p`]
        found: f64,
    },
    /// The device refused.
    #[error("loading {id}")]
    Device {
        /// Which weight.
        id: TensorId,
        /// What the device said.
        #[source]
        source: DeviceError,
    },
}

/// The language model on a device, without its routed experts.
pub struct Model<D: Device> {
    pub(crate) device: D,
    pub(crate) config: ModelConfig,
    pub(crate) state_shape: Arc<StateShape>,
    pub(crate) routed_top_p: Option<f64>,
    pub(crate) lookahead: Lookahead,
    pub(crate) embed_tokens: D::Linear,
    pub(crate) layers: Vec<Layer<D>>,
    pub(crate) output_attn_res: D::Vector,
    pub(crate) norm: D::Vector,
    pub(crate) lm_head: D::Linear,
}

pub(crate) struct Layer<D: Device> {
    /// Absent in layer 0, whose stack of snapshots is empty: the stored weights are dead.
    pub(crate) self_attention_res: Option<D::Vector>,
    pub(crate) input_layernorm: D::Vector,
    pub(crate) attention: Attention<D>,
    pub(crate) mlp_res: D::Vector,
    pub(crate) post_attention_layernorm: D::Vector,
    pub(crate) mlp: Mlp<D>,
}

#[allow(clippy::large_enum_variant, reason = "one a layer, never moved")]
pub(crate) enum Attention<D: Device> {
    Kda(Kda<D>),
    Mla(Mla<D>),
}

/// Shapes with P = heads * head_dim, E = hidden.
pub(crate) struct Kda<D: Device> {
    /// `[P, E]` of q, k, v
    pub(crate) qkv_proj: [D::Linear; 3],
    /// `[P, taps]` of q, k, v
    pub(crate) qkv_conv1d: [D::Vector; 3],
    /// `[heads]`
    pub(crate) a_log: D::Vector,
    /// `[P]`
    pub(crate) dt_bias: D::Vector,
    /// `[head_dim, E]`
    pub(crate) f_a_proj: D::Linear,
    /// `[P, head_dim]`
    pub(crate) f_b_proj: D::Linear,
    /// `[heads, E]`
    pub(crate) b_proj: D::Linear,
    /// `[P, E]`
    pub(crate) g_proj: D::Linear,
    /// `[head_dim]`
    pub(crate) o_norm: D::Vector,
    /// `[E, P]`
    pub(crate) o_proj: D::Linear,
}

pub(crate) struct Mla<D: Device> {
    /// `[q_lora, E]`
    pub(crate) q_a_proj: D::Linear,
    /// `[q_lora]`
    pub(crate) q_a_layernorm: D::Vector,
    /// `[heads * (nope + extra), q_lora]`
    pub(crate) q_b_proj: D::Linear,
    /// `[kv_lora + extra, E]`
    pub(crate) kv_a_proj_with_mqa: D::Linear,
    /// `[kv_lora]`
    pub(crate) kv_a_layernorm: D::Vector,
    /// `[heads * (nope + v), kv_lora]`
    pub(crate) kv_b_proj: D::Linear,
    /// `[heads * v, E]`
    pub(crate) g_proj: D::Linear,
    /// `[E, heads * v]`
    pub(crate) o_proj: D::Linear,
    pub(crate) indexer: Option<Indexer<D>>,
}

pub(crate) struct Indexer<D: Device> {
    /// `[n_heads * head_dim, q_lora]`
    pub(crate) wq_b: D::Linear,
    /// `[head_dim, E]`
    pub(crate) wk: D::Linear,
    /// `[head_dim]`
    pub(crate) k_norm_weight: D::Vector,
    /// `[head_dim]`
    pub(crate) k_norm_bias: D::Vector,
    /// `[n_heads, E]`
    pub(crate) weights_proj: D::Linear,
}

#[allow(clippy::large_enum_variant, reason = "one a layer, never moved")]
pub(crate) enum Mlp<D: Device> {
    Dense(GatedMlp<D>),
    Moe(Moe<D>),
}

#[allow(clippy::struct_field_names, reason = "named as in the checkpoint")]
pub(crate) struct GatedMlp<D: Device> {
    /// `[inner, E]`
    pub(crate) gate_proj: D::Linear,
    /// `[inner, E]`
    pub(crate) up_proj: D::Linear,
    /// `[E, inner]`
    pub(crate) down_proj: D::Linear,
}

pub(crate) struct Moe<D: Device> {
    /// `[experts, E]`
    pub(crate) gate: D::Linear,
    /// `[experts]`
    pub(crate) e_score_correction_bias: D::Vector,
    /// `[latent, E]`
    pub(crate) routed_expert_down_proj: D::Linear,
    /// `[latent]`
    pub(crate) routed_expert_norm: D::Vector,
    /// `[E, latent]`
    pub(crate) routed_expert_up_proj: D::Linear,
    pub(crate) shared_experts: GatedMlp<D>,
}

/// Loads and checks one weight after the other.
struct Loader<'a, D> {
    device: &'a D,
    source: &'a dyn WeightSource,
    config: &'a ModelConfig,
}

impl<D: Device> Loader<'_, D> {
    fn linear(&self, id: TensorId, out: usize, input: usize) -> Result<D::Linear, LoadError> {
        let m = self.source.matrix(id).map_err(|source| LoadError::Source { id, source })?;
        if (m.rows(), m.cols()) != (out, input) {
            return Err(LoadError::Shape {
                id,
                expected: format!("[{out}, {input}]"),
                found: format!("{m:?}"),
            });
        }
        self.device.load_linear(m).map_err(|source| LoadError::Device { id, source })
    }

    fn host_vector(&self, id: TensorId, len: usize) -> Result<Vec<f32>, LoadError> {
        let v = self.source.vector(id).map_err(|source| LoadError::Source { id, source })?;
        if v.len() != len {
            let (expected, found) = (format!("{len} values"), format!("{} values", v.len()));
            return Err(LoadError::Shape { id, expected, found });
        }
        Ok(v)
    }

    fn vector(&self, id: TensorId, len: usize) -> Result<D::Vector, LoadError> {
        let v = self.host_vector(id, len)?;
        self.device.load_vector(&v).map_err(|source| LoadError::Device { id, source })
    }

    /// A norm's gain.
    fn gain(&self, id: TensorId, len: usize) -> Result<D::Vector, LoadError> {
        let v = self.host_vector(id, len)?;
        if v.iter().all(|&v| v == 0.0) {
            return Err(LoadError::ZeroGain { id });
        }
        self.device.load_vector(&v).map_err(|source| LoadError::Device { id, source })
    }

    /// An AttnRes score vector: norm gain times projection, folded once. The product of two bf16 is exact in f32.
    fn attn_res(&self, norm: TensorId, proj: TensorId) -> Result<D::Vector, LoadError> {
        let e = self.config.hidden_size;
        let (norm, row) = (self.host_vector(norm, e)?, self.host_vector(proj, e)?);
        let score: Vec<f32> = norm.iter().zip(&row).map(|(g, a)| g * a).collect();
        self.device.load_vector(&score).map_err(|source| LoadError::Device { id: proj, source })
    }

    fn layer(&self, l: usize, indexer: Option<&IndexerConfig>) -> Result<Layer<D>, LoadError> {
        let e = self.config.hidden_size;
        let id = |role| TensorId::layer(l, role);
        Ok(Layer {
            self_attention_res: if l == 0 {
                None
            } else {
                Some(self.attn_res(id(Role::SelfAttentionResNorm), id(Role::SelfAttentionResProj))?)
            },
            input_layernorm: self.gain(id(Role::InputLayernorm), e)?,
            attention: match self.config.layers[l] {
                AttentionKind::Kda => Attention::Kda(self.kda(l)?),
                AttentionKind::FullAttention => Attention::Mla(self.mla(l, indexer)?),
            },
            mlp_res: self.attn_res(id(Role::MlpResNorm), id(Role::MlpResProj))?,
            post_attention_layernorm: self.gain(id(Role::PostAttentionLayernorm), e)?,
            mlp: if self.config.is_moe(l) {
                Mlp::Moe(self.moe(l)?)
            } else {
                let roles = [Role::MlpGateProj, Role::MlpUpProj, Role::MlpDownProj];
                Mlp::Dense(self.gated_mlp(l, roles, self.config.intermediate_size)?)
            },
        })
    }

    fn kda(&self, l: usize) -> Result<Kda<D>, LoadError> {
        let (e, c) = (self.config.hidden_size, &self.config.kda);
        let (p, d, taps) = (c.projection_size(), c.head_dim, c.short_conv_kernel_size);
        let id = |role| TensorId::layer(l, role);
        Ok(Kda {
            qkv_proj: [
                self.linear(id(Role::QProj), p, e)?,
                self.linear(id(Role::KProj), p, e)?,
                self.linear(id(Role::VProj), p, e)?,
            ],
            qkv_conv1d: [
                self.vector(id(Role::QConv1d), p * taps)?,
                self.vector(id(Role::KConv1d), p * taps)?,
                self.vector(id(Role::VConv1d), p * taps)?,
            ],
            a_log: self.vector(id(Role::ALog), c.num_heads)?,
            dt_bias: self.vector(id(Role::DtBias), p)?,
            f_a_proj: self.linear(id(Role::FAProj), d, e)?,
            f_b_proj: self.linear(id(Role::FBProj), p, d)?,
            b_proj: self.linear(id(Role::BProj), c.num_heads, e)?,
            g_proj: self.linear(id(Role::GProj), p, e)?,
            o_norm: self.gain(id(Role::ONorm), d)?,
            o_proj: self.linear(id(Role::OProj), e, p)?,
        })
    }

    fn mla(&self, l: usize, indexer: Option<&IndexerConfig>) -> Result<Mla<D>, LoadError> {
        let (e, c) = (self.config.hidden_size, &self.config.mla);
        let o = c.output_size();
        let id = |role| TensorId::layer(l, role);
        Ok(Mla {
            q_a_proj: self.linear(id(Role::QAProj), c.q_lora_rank, e)?,
            q_a_layernorm: self.gain(id(Role::QALayernorm), c.q_lora_rank)?,
            q_b_proj: self.linear(id(Role::QBProj), c.num_heads * c.qk_head_dim(), c.q_lora_rank)?,
            kv_a_proj_with_mqa: self.linear(
                id(Role::KvAProjWithMqa),
                c.kv_lora_rank + c.qk_rope_head_dim,
                e,
            )?,
            kv_a_layernorm: self.gain(id(Role::KvALayernorm), c.kv_lora_rank)?,
            kv_b_proj: self.linear(
                id(Role::KvBProj),
                c.num_heads * (c.qk_nope_head_dim + c.v_head_dim),
                c.kv_lora_rank,
            )?,
            g_proj: self.linear(id(Role::GProj), o, e)?,
            o_proj: self.linear(id(Role::OProj), e, o)?,
            indexer: indexer
                .map(|x| {
                    Ok(Indexer {
                        wq_b: self.linear(id(Role::IndexerWqB), x.n_heads * x.head_dim, c.q_lora_rank)?,
                        wk: self.linear(id(Role::IndexerWk), x.head_dim, e)?,
                        k_norm_weight: self.vector(id(Role::IndexerKNormWeight), x.head_dim)?,
                        k_norm_bias: self.vector(id(Role::IndexerKNormBias), x.head_dim)?,
                        weights_proj: self.linear(id(Role::IndexerWeightsProj), x.n_heads, e)?,
                    })
                })
                .transpose()?,
        })
    }

    fn moe(&self, l: usize) -> Result<Moe<D>, LoadError> {
        let (e, c) = (self.config.hidden_size, &self.config.moe);
        let latent = c.routed_expert_hidden_size;
        let id = |role| TensorId::layer(l, role);
        let shared = [Role::SharedGateProj, Role::SharedUpProj, Role::SharedDownProj];
        Ok(Moe {
            gate: self.linear(id(Role::RouterGate), c.num_experts, e)?,
            e_score_correction_bias: self.vector(id(Role::RouterBias), c.num_experts)?,
            routed_expert_down_proj: self.linear(id(Role::RoutedExpertDownProj), latent, e)?,
            routed_expert_norm: self.gain(id(Role::RoutedExpertNorm), latent)?,
            routed_expert_up_proj: self.linear(id(Role::RoutedExpertUpProj), e, latent)?,
            shared_experts: self.gated_mlp(l, shared, c.shared_intermediate_size())?,
        })
    }

    fn gated_mlp(&self, l: usize, roles: [Role; 3], inner: usize) -> Result<GatedMlp<D>, LoadError> {
        let e = self.config.hidden_size;
        let [gate, up, down] = roles.map(|role| TensorId::layer(l, role));
        Ok(GatedMlp {
            gate_proj: self.linear(gate, inner, e)?,
            up_proj: self.linear(up, inner, e)?,
            down_proj: self.linear(down, e, inner)?,
        })
    }
}

impl<D: Device> Model<D> {
    /// Loads the pinned weights; no routed expert is touched. `progress` hears `(layers done, layers)`.
    pub fn load(
        device: D,
        config: ModelConfig,
        source: &dyn WeightSource,
        options: &ModelOptions,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Self, LoadError> {
        let layers = config.num_hidden_layers();
        let count = options.layers.unwrap_or(layers);
        if count == 0 || count > layers {
            return Err(LoadError::Layers { asked: count, layers });
        }
        if let Some(found) = options.routed_top_p.filter(|p| !(*p > 0.0 && *p <= 1.0)) {
            return Err(LoadError::RoutedTopP { found });
        }
        let routed_top_p = options.routed_top_p.filter(|p| *p < 1.0);
        let indexer = if options.ignore_indexer { None } else { config.indexer.clone() };
        let (e, v) = (config.hidden_size, config.vocab_size);
        let loader = Loader { device: &device, source, config: &config };
        let id = TensorId::model;
        let embed_tokens = loader.linear(id(Role::EmbedTokens), v, e)?;
        let output_attn_res = loader.attn_res(id(Role::OutputAttnResNorm), id(Role::OutputAttnResProj))?;
        let norm = loader.gain(id(Role::Norm), e)?;
        let lm_head = loader.linear(id(Role::LmHead), v, e)?;
        progress(0, count);
        let layers = (0..count)
            .map(|l| {
                let layer = loader.layer(l, indexer.as_ref());
                progress(l + 1, count);
                layer
            })
            .collect::<Result<_, _>>()?;
        let state_shape = Arc::new(StateShape {
            layers: config.layers[..count].to_vec(),
            kda: config.kda.clone(),
            mla: config.mla.clone(),
            indexer,
        });
        Ok(Self {
            device,
            config,
            state_shape,
            routed_top_p,
            lookahead: options.lookahead,
            embed_tokens,
            layers,
            output_attn_res,
            norm,
            lm_head,
        })
    }

    /// The device it is on.
    pub fn device(&self) -> &D {
        &self.device
    }

    /// The model's sizes.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Which function runs: K3.1 weights with the indexer ignored attend as K3 does.
    pub fn attends_as(&self) -> Variant {
        if self.indexer().is_some() { Variant::K31 } else { Variant::K3 }
    }

    /// [`ModelOptions::routed_top_p`], if it leaves any expert out: 1 is the model's own function.
    pub fn routed_top_p(&self) -> Option<f64> {
        self.routed_top_p
    }

    /// Layers loaded.
    pub fn num_layers(&self) -> usize {
        self.layers.len()
    }

    /// The state of an empty sequence.
    pub fn new_state(&self) -> Result<SequenceState<D>, DeviceError> {
        SequenceState::new(&self.device, &self.state_shape)
    }

    /// A state that [`SequenceState::export`] gave, on this device.
    pub fn import_state(&self, exported: &ExportedState) -> Result<SequenceState<D>, StateError> {
        SequenceState::import(&self.device, &self.state_shape, exported)
    }

    /// `None` also when it is ignored.
    pub(crate) fn indexer(&self) -> Option<&IndexerConfig> {
        self.state_shape.indexer.as_ref()
    }

    pub(crate) fn situ_caps(&self) -> SituCaps {
        SituCaps {
            beta: self.config.activation_situ_beta,
            linear_beta: self.config.activation_situ_linear_beta,
        }
    }

    pub(crate) fn router_rule(&self) -> RouterRule {
        let moe = &self.config.moe;
        RouterRule {
            experts_per_token: moe.num_experts_per_token,
            renormalize: moe.moe_renormalize,
            scaling_factor: moe.routed_scaling_factor,
            top_p: self.routed_top_p,
        }
    }
}
