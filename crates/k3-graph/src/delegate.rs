/// Methods of a [`Device`](crate::Device) that another one, held in a field, carries out: for devices that change one
/// operation and no type. Inside the `impl` block, name the field, its type, and which groups are the other's:
///
/// ```
/// # use k3_graph::device::*;
/// # use k3_graph::{Cpu, Device, DeviceError, Routing};
/// /// The CPU, except that every token goes to the first experts.
/// struct FirstExperts(Cpu);
///
/// impl Device for FirstExperts {
///     k3_graph::delegate_device!(0: Cpu, types, rows, attn_res, kda, mla, index_select, experts, experts_ffn, states);
///
///     fn kind(&self) -> &'static str {
///         "cpu-f32, first experts"
///     }
///     fn deviation(&self) -> Option<&'static str> {
///         Some("first experts")
///     }
///     fn route(&self, logits: &Self::Act, bias: &Vec<f32>, rule: RouterRule) -> Result<Routing, DeviceError> {
///         let (k, rows) = (rule.experts_per_token, self.download(logits)?.len() / bias.len());
///         let ids: Vec<u32> = (0..k as u32).collect();
///         let mut routing = Routing::with_rows(k, rows);
///         for _ in 0..rows {
///             routing.push(&ids, &vec![1.0 / k as f64; k], f64::INFINITY);
///         }
///         Ok(routing)
///     }
/// }
/// ```
///
/// `kind` and `deviation` are never in a group: another arithmetic has another name.
#[macro_export]
macro_rules! delegate_device {
    ($field:tt: $inner:ty, $($group:ident),+) => {
        $($crate::delegate_device!(@$group $field $inner);)+
    };
    (@types $field:tt $inner:ty) => {
        type Act = <$inner as $crate::Device>::Act;
        type Linear = <$inner as $crate::Device>::Linear;
        type Vector = <$inner as $crate::Device>::Vector;
        type KdaState = <$inner as $crate::Device>::KdaState;
        type MlaState = <$inner as $crate::Device>::MlaState;
        type Selection = <$inner as $crate::Device>::Selection;
        const VALUE_BYTES: usize = <$inner as $crate::Device>::VALUE_BYTES;

        fn score_bytes(&self, config: &$crate::device::ModelConfig, context: usize) -> u64 {
            $crate::Device::score_bytes(&self.$field, config, context)
        }
    };
    (@rows $field:tt $inner:ty) => {
        $crate::delegate_device! { @methods $field
            load_linear(weight: $crate::device::Matrix) -> Self::Linear;
            load_vector(weight: &[f32]) -> Self::Vector;
            upload(width: usize, values: &[f32]) -> Self::Act;
            download(x: &Self::Act) -> Vec<f32>;
            embed(table: &Self::Linear, ids: &[u32]) -> Self::Act;
            linear(weight: &Self::Linear, x: &Self::Act) -> Self::Act;
            rms_norm(x: &Self::Act, gain: &Self::Vector, eps: f64) -> Self::Act;
            add(acc: &mut Self::Act, y: &Self::Act) -> ();
            select_rows(x: &Self::Act, rows: &[usize]) -> Self::Act;
            situ_glu(gate: &Self::Act, up: &Self::Act, caps: $crate::device::SituCaps) -> Self::Act;
            sigmoid_gate(x: &Self::Act, gate: &Self::Act) -> Self::Act;
        }
    };
    (@attn_res $field:tt $inner:ty) => {
        $crate::delegate_device! { @methods $field
            attn_res_weights(sources: &[&Self::Act], score: &Self::Vector, eps: f64) -> Vec<f32>;
            attn_res_mix(sources: &[&Self::Act], score: &Self::Vector, eps: f64) -> Self::Act;
        }
    };
    (@kda $field:tt $inner:ty) => {
        $crate::delegate_device! { @methods $field
            new_kda_state(config: &$crate::device::KdaConfig) -> Self::KdaState;
            short_conv(
                x: &Self::Act,
                taps: &Self::Vector,
                which: $crate::device::Conv,
                states: &mut [$crate::device::SequenceRows<'_, Self::KdaState>]
            ) -> Self::Act;
            gated_head_norm(x: &Self::Act, gain: &Self::Vector, gate: &Self::Act, eps: f64) -> Self::Act;
        }
        fn kda_step(
            &self,
            step: $crate::device::KdaStep<'_, Self>,
            states: &mut [$crate::device::SequenceRows<'_, Self::KdaState>],
        ) -> Result<Self::Act, $crate::DeviceError> {
            let $crate::device::KdaStep { config, q, k, v, decay, beta, a_log, dt_bias } = step;
            let step = $crate::device::KdaStep { config, q, k, v, decay, beta, a_log, dt_bias };
            $crate::Device::kda_step(&self.$field, step, states)
        }
    };
    (@mla $field:tt $inner:ty) => {
        $crate::delegate_device! { @methods $field
            new_mla_state(
                config: &$crate::device::MlaConfig,
                indexer: Option<&$crate::device::IndexerConfig>
            ) -> Self::MlaState;
            mla_append(
                kv: &Self::Act,
                latent_gain: &Self::Vector,
                eps: f64,
                states: &mut [$crate::device::SequenceRows<'_, Self::MlaState>]
            ) -> ();
            index_append(
                k: &Self::Act,
                gain: &Self::Vector,
                bias: &Self::Vector,
                eps: f64,
                states: &mut [$crate::device::SequenceRows<'_, Self::MlaState>]
            ) -> ();
            download_selection(selection: &Self::Selection) -> $crate::Selection;
            lost_rows(selection: &Self::Selection) -> Vec<usize>;
        }
        fn index_scores(
            &self,
            query: $crate::device::IndexQuery<'_, Self>,
            states: &[$crate::device::SequenceRows<'_, Self::MlaState>],
        ) -> Result<Vec<Vec<f32>>, $crate::DeviceError> {
            let $crate::device::IndexQuery { config, q, weights } = query;
            let query = $crate::device::IndexQuery { config, q, weights };
            $crate::Device::index_scores(&self.$field, query, states)
        }
        fn mla_attend(
            &self,
            attend: $crate::device::MlaAttend<'_, Self>,
            selection: Option<&Self::Selection>,
            states: &[$crate::device::SequenceRows<'_, Self::MlaState>],
        ) -> Result<Self::Act, $crate::DeviceError> {
            let $crate::device::MlaAttend { config, q, kv_b } = attend;
            let attend = $crate::device::MlaAttend { config, q, kv_b };
            $crate::Device::mla_attend(&self.$field, attend, selection, states)
        }
    };
    (@index_select $field:tt $inner:ty) => {
        fn index_select(
            &self,
            query: $crate::device::IndexQuery<'_, Self>,
            states: &[$crate::device::SequenceRows<'_, Self::MlaState>],
        ) -> Result<Self::Selection, $crate::DeviceError> {
            let $crate::device::IndexQuery { config, q, weights } = query;
            let query = $crate::device::IndexQuery { config, q, weights };
            $crate::Device::index_select(&self.$field, query, states)
        }
    };
    (@route $field:tt $inner:ty) => {
        $crate::delegate_device! { @methods $field
            route(
                logits: &Self::Act,
                bias: &Self::Vector,
                rule: $crate::device::RouterRule
            ) -> $crate::Routing;
        }
    };
    (@experts $field:tt $inner:ty) => {
        $crate::delegate_device! { @methods $field
            expert_outputs(rows: usize, width: usize) -> Self::Act;
            expert_sum(outputs: &Self::Act, routing: &$crate::Routing) -> Self::Act;
        }
    };
    (@experts_ffn $field:tt $inner:ty) => {
        $crate::delegate_device! { @methods $field
            experts_ffn(
                experts: &[$crate::device::ExpertWork],
                z: &Self::Act,
                caps: $crate::device::SituCaps,
                out: &mut Self::Act
            ) -> Option<$crate::device::InFlight>;
        }
    };
    (@states $field:tt $inner:ty) => {
        $crate::delegate_device! { @methods $field
            copy_kda(state: &Self::KdaState) -> Self::KdaState;
            copy_mla(state: &Self::MlaState) -> Self::MlaState;
            export_kda(state: &Self::KdaState) -> Vec<$crate::device::StateTensor>;
            import_kda(
                config: &$crate::device::KdaConfig,
                parts: &[$crate::device::StateTensor]
            ) -> Self::KdaState;
            export_mla(state: &Self::MlaState) -> Vec<$crate::device::StateTensor>;
            import_mla(
                config: &$crate::device::MlaConfig,
                indexer: Option<&$crate::device::IndexerConfig>,
                tokens: usize,
                parts: &[$crate::device::StateTensor]
            ) -> Self::MlaState;
        }
    };
    (@methods $field:tt $($name:ident($($arg:ident: $of:ty),*) -> $out:ty;)+) => {
        $(
            fn $name(&self, $($arg: $of),*) -> Result<$out, $crate::DeviceError> {
                $crate::Device::$name(&self.$field, $($arg),*)
            }
        )+
    };
}
