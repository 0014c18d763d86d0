//! Which decoder layers attend how (`docs/checkpoint.md` 2.3).

use super::fields::Fields;
use crate::AttentionKind;

const KDA: &str = "kda_layers";
const FULL: &str = "full_attn_layers";

/// The kind of every layer, if the two 1-based lists of `linear_attn_config` are a partition of `1..=layers`.
pub(super) fn read(fields: &mut Fields<'_>, layers: Option<usize>) -> Option<Vec<AttentionKind>> {
    let kda = fields.int_list(KDA, "the Kimi Delta Attention layers, counted from 1");
    let full = fields.int_list(FULL, "the full attention layers, counted from 1");
    let (kda, full, layers) = (kda?, full?, layers?);

    let mut kinds: Vec<Option<AttentionKind>> = vec![None; layers];
    let mut good = true;
    let mut place = |key: &str, list: &[usize], kind: AttentionKind| {
        let mut wrong = |what: String, layer: usize| {
            fields.problem(key, what, Some(&layer.into()), "layers are counted from 1");
            good = false;
        };
        for &layer in list {
            match layer.checked_sub(1).and_then(|l| kinds.get_mut(l)) {
                None => wrong(format!("entries from 1 to num_hidden_layers {layers}"), layer),
                Some(Some(there)) if *there == kind => wrong("every layer once".to_owned(), layer),
                Some(Some(_)) => wrong("no layer of the other list".to_owned(), layer),
                Some(free) => *free = Some(kind),
            }
        }
    };
    place(KDA, &kda, AttentionKind::Kda);
    place(FULL, &full, AttentionKind::FullAttention);

    let unplaced: Vec<usize> = (1..=layers).filter(|&l| kinds[l - 1].is_none()).collect();
    if !unplaced.is_empty() {
        let first: Vec<String> = unplaced.iter().take(8).map(ToString::to_string).collect();
        let more = if unplaced.len() > first.len() { ", ..." } else { "" };
        let found = format!("{} in neither list: {}{more}", unplaced.len(), first.join(", "));
        let reason = "a layer of no known kind cannot be run; layers are counted from 1";
        fields.problem(KDA, "every layer in one of the two lists", Some(&found.into()), reason);
        good = false;
    }
    if good { kinds.into_iter().collect() } else { None }
}
