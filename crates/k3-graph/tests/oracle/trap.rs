//! Every silent error of `docs/arithmetic.md`, as a switch of the oracle.

/// Where a trap shows itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shows {
    /// Logits of at least one fixture are further off than ten times the acceptance bound.
    Logits,
    /// Router weights of at least one fixture are further off than ten times the bound.
    RouterWeights,
    /// No fixture can show it; vectors of `fixtures/ops` do.
    Ops(Vectors),
    /// Neither can those; a result known by hand does.
    ClosedForm(Step),
}

/// The operator vectors that stand in where no fixture can show a trap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Vectors {
    Mxfp4Decode,
    TopkSelect,
}

/// One step on inputs whose result is known by hand (`ops::closed_form`), where neither fixtures
/// nor vectors show a trap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    L2Norm,
    IndexKeyNorm,
    RouterBias,
    RouterTies,
    RoutedScaling,
}

macro_rules! traps {
    ($($name:ident, $section:literal, $shows:expr, $text:literal;)*) => {
        /// One variant for each way to be wrong without noticing; `None` is the model as published.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Trap {
            None,
            $($name,)*
        }

        /// Trap, section of `docs/arithmetic.md` (or of `docs/checkpoint.md` where it says so), where it shows, in words.
        pub(crate) const TRAPS: &[(Trap, &str, Shows, &str)] = &[
            $((Trap::$name, $section, $shows, $text),)*
        ];
    };
}

use Shows::{ClosedForm, Logits, Ops, RouterWeights};

traps! {
    EmbeddingNormed, "3.2", Logits, "the embedding goes through a norm";
    MixAddedToPrefix, "3.2", Logits, "the mix h is added to the prefix";
    PrefixKeptAfterPush, "3.2", Logits, "the prefix is kept after the push";
    PushBeforeAttentionMix, "3.2", Logits, "the push comes before the attention mix";
    MixNormalisedSources, "3.2", Logits, "normalised sources are mixed";
    PrefixLeftOut, "3.2", Logits, "the prefix is no source";
    BlockCountedFromNextLayer, "3.2", Logits, "a block starts at (l + 1) % B";
    MixScoreScaled, "3.1", Logits, "mix scores are scaled by hidden^-0.5";
    MixGainFoldedInBf16, "10", Logits, "the folded mix gain c is rounded to bf16";

    LoraNormEpsFromConfig, "4, 10", Logits, "q_a and kv_a norms take the config's eps 1e-5";

    ConvTapsReversed, "5.1", Logits, "convolution taps are reversed";
    ConvCarriesConvolved, "5.1", Logits, "the window carries convolved values over a chunk border";
    ConvWindowForgotten, "5.1", Logits, "the window is forgotten at a chunk border";
    ConvSkippedOnV, "5.1", Logits, "v is not convolved";
    ConvWithoutSilu, "5.1", Logits, "no SiLU after the convolution";
    ConvTapsInBf16, "1.1", Logits, "convolution taps are narrowed to bf16";
    L2MeanNotSum, "5.2", Logits, "the L2 norm divides by the mean";
    ScaleOnQAndK, "5.2", Logits, "q and k are both scaled";
    ScaleOnNeither, "5.2", Logits, "neither q nor k is scaled";
    L2EpsOnMean, "5.2", ClosedForm(Step::L2Norm), "an RMSNorm helper: eps 1e-6 on the mean";
    ALogPerChannel, "5.3, 10", Logits, "A_log is read per channel";
    SoftplusClampGate, "5.3, 10", Logits, "the bound clamps the softplus gate";
    DtBiasAfterALog, "5.3", Logits, "dt_bias is added after the factor exp(A_log)";
    DecayBottleneckActivated, "5.3", Logits, "SiLU between f_a and f_b";
    DtBiasInBf16, "5.3", Logits, "dt_bias is narrowed to bf16";
    ALogInBf16, "5.3", Logits, "A_log is narrowed to bf16";
    BetaDoubled, "5.4", Logits, "beta is doubled";
    DecayAfterWrite, "5.5", Logits, "the state decays after the write";
    UndecayedStateRead, "5.5", Logits, "k reads the undecayed state";
    OutputBeforeWrite, "5.5", Logits, "the output is read before the write";
    DecayOnValueAxis, "5.5", Logits, "the value axis decays";
    StateRestoredTransposed, "5.5", Logits, "a snapshot's state comes back transposed";
    GateBeforeNorm, "5.6", Logits, "the output gate comes before the norm";
    OutputGateSilu, "5.6", Logits, "the output gate is a SiLU";
    ONormOverWholeWidth, "5.6", Logits, "o_norm runs over all heads at once";
    ONormInBf16, "1.1", Logits, "o_norm gain is narrowed to bf16";

    ScaleOfNopeDims, "6", Logits, "softmax scale nope^-0.5";
    ExtraDimsDropped, "6", Logits, "the extra dims are dropped";
    ExtraDimsRotated, "6", Logits, "the extra dims are rotated";
    NormOverLatentAndExtra, "6", Logits, "kv_a norm covers latent and extra dims";
    QbSplitNopeThenExtra, "6", Logits, "q_b is split all nope, then all extra";
    KvbSplitKeysThenValues, "6", Logits, "kv_b is split all keys, then all values";
    NormBeforeMlaGate, "6", Logits, "a norm before the MLA gate";
    YarnMscale, "6", Logits, "Yarn mscale in the softmax scale";

    ReluAfterHeadSum, "7.2", Logits, "relu after the head sum";
    IndexWeightsSoftmax, "7.2", Logits, "softmax on the head weights";
    IndexWeightsSigmoid, "7.2", Logits, "sigmoid on the head weights";
    IndexQueryFromRawLora, "7.2", Logits, "index query from the raw q_a output";
    IndexQueryFromQb, "7.2", Logits, "index query from q_b (the heads' nope part)";
    IndexKeyFromLatent, "7.2", Logits, "index key from the latent (its first dims)";
    IndexKeyNormWithoutBias, "7.2", Logits, "k_norm without its bias";
    IndexKeyRmsNorm, "7.2", Logits, "k_norm as an RMSNorm";
    IndexNormEps1e5, "7.1, 10", ClosedForm(Step::IndexKeyNorm), "k_norm eps 1e-5";
    IndexerRotated, "7.2", Logits, "half of the index dims are rotated";
    IndexSelectionPerHead, "7.2", Logits, "one selection per head";
    IndexKeysNotCachedWhileDormant, "7.2", Logits, "index keys of the first top-k tokens are not cached";
    EmitAllAtLeastTheta, "7.2", Logits, "all scores >= theta are emitted";
    TiesToLatest, "7.2", Logits, "ties go to the latest position";
    SelectionByBitPattern, "7.2", Ops(Vectors::TopkSelect), "selection by bit pattern: -0.0 below +0.0";
    IndexScoresAbsolute, "7.1", Logits, "selection by absolute score";
    IndexScoresInBf16, "7.1", Logits, "scores are rounded to bf16 before the selection";
    IndexerIgnored, "7", Logits, "the indexer is ignored";
    IndexerQuantized, "7.2", Logits, "wq_b and wk are quantized to int8";

    SigmaOfCappedGate, "8.1", Logits, "sigma sees the capped gate";
    UpNotCapped, "8.1", Logits, "the up branch has no cap";
    GateNotCapped, "8.1", Logits, "the gate has no cap";
    SiluGlu, "8.1", Logits, "SiLU-GLU instead of SiTU-GLU";
    RouterWeightsFromBiasedScore, "8.2", Logits, "router weights from the biased score";
    RouterBiasIgnored, "8.2", Logits, "the router bias is ignored";
    RouterSoftmax, "8.2", Logits, "softmax over the experts";
    RouterLogitsInBf16, "8.2", Logits, "router logits are rounded to bf16";
    RouterBiasInBf16, "1.1", ClosedForm(Step::RouterBias), "the router bias is narrowed to bf16";
    RouterRenormalisedOverAll, "8.2", RouterWeights, "weights are renormalised over all experts";
    RouterNotRenormalised, "8.2", RouterWeights, "weights are not renormalised";
    RouterTiesToHighestId, "8.2", ClosedForm(Step::RouterTies), "router ties go to the highest id";
    RoutedScalingIgnored, "8.2", ClosedForm(Step::RoutedScaling), "routed_scaling_factor is ignored";
    NormPerExpert, "8.3", Logits, "the routed norm runs per expert";
    RoutedNormLeftOut, "8.3", Logits, "no routed norm";
    WeightsOnExpertInputs, "8.3", Logits, "router weights scale the experts' inputs";
    SharedSplitWrongly, "8.3", Logits, "the shared MLP is split into two wrong halves";
    W1W3Swapped, "8.3", Logits, "w1 and w3 are swapped";
    ExpertDropped, "8.3", Logits, "the last-ranked expert is dropped";
    ExpertActivationsInMxfp8, "10", Logits, "expert activations go through MXFP8";
    NibblesSwapped, "checkpoint 6.1", Logits, "the nibbles of a byte are swapped";
    ScaleZeroFlushed, "checkpoint 6.1", Ops(Vectors::Mxfp4Decode), "E8M0 byte 0 is flushed to 0";
    Scale255IsZero, "10", Ops(Vectors::Mxfp4Decode), "E8M0 byte 255 is 0";
    Scale255IsInfinity, "10", Ops(Vectors::Mxfp4Decode), "E8M0 byte 255 is infinite";
}
