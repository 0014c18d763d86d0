//! What the config says about matrices outside the routed experts, against what they are.

use std::collections::HashMap;

use crate::config::{EVERY_LINEAR, ModulePattern, QuantizationConfig, QuantizationGroup};
use crate::error::{TensorErrors, TensorProblem};
use crate::linear::StoredLinear;
use crate::names::{Extent, LANGUAGE_MODEL, Names};
use crate::warning::Warning;
use crate::{ModelConfig, TensorId};

/// A list of the config, ready to be searched.
struct List(Vec<ModulePattern>);

impl List {
    /// Entries that cannot be judged go to `warnings`.
    fn new<'a>(entries: impl Iterator<Item = &'a String>, warnings: &mut Vec<Warning>) -> Self {
        let pattern = |entry: &String| match ModulePattern::new(entry) {
            Ok(pattern) => Some(pattern),
            Err(why) => {
                push_once(warnings, Warning::IgnorePattern { entry: entry.clone(), why });
                None
            }
        };
        Self(entries.filter_map(pattern).collect())
    }

    /// The first entry that stands for the module under one of its names.
    fn find(&mut self, spellings: &[String]) -> Option<&str> {
        let matches = |p: &mut ModulePattern| spellings.iter().any(|name| p.matches(name).unwrap_or(false));
        let at = self.0.iter_mut().position(matches)?;
        Some(self.0[at].entry())
    }
}

fn push_once(warnings: &mut Vec<Warning>, warning: Warning) {
    if !warnings.contains(&warning) {
        warnings.push(warning);
    }
}

/// The names under which configs list a module: with the wrapper's prefix or without it, and with the MoE block called
/// as in other models.
fn spellings(module: &str) -> Vec<String> {
    let plain = module.strip_prefix(LANGUAGE_MODEL).unwrap_or(module);
    let bare = plain.strip_prefix("model.").unwrap_or(plain);
    let mut names: Vec<String> = [module, plain, bare].map(str::to_owned).into();
    names.dedup();
    if module.contains(".block_sparse_moe.") {
        let others: Vec<_> = names.iter().map(|n| n.replace(".block_sparse_moe.", ".mlp.")).collect();
        names.extend(others);
    }
    names
}

/// Compares every matrix with the groups and the list of exceptions. Another format than the config says is an error;
/// quantized or not is a warning, since the tensors show which.
pub(crate) fn compare(
    quantization: &QuantizationConfig,
    config: &ModelConfig,
    names: &Names,
    linears: &HashMap<TensorId, StoredLinear>,
    errors: &mut TensorErrors,
    warnings: &mut Vec<Warning>,
) {
    let named = |group: &QuantizationGroup| group.targets.iter().any(|t| t != EVERY_LINEAR);
    // Published trees have neither quantized matrices nor groups that name some, and a thousand matrices.
    if linears.is_empty() && !quantization.groups.iter().any(named) {
        return;
    }
    let mut groups: Vec<(&QuantizationGroup, List)> = quantization
        .groups
        .iter()
        .map(|group| {
            let named = group.targets.iter().filter(|t| *t != EVERY_LINEAR);
            (group, List::new(named, warnings))
        })
        .collect();
    let every = quantization.groups.iter().find(|g| g.targets.iter().any(|t| t == EVERY_LINEAR));
    let mut ignore = List::new(quantization.ignore.iter(), warnings);
    let mut unquantized: Option<(usize, String, String)> = None;
    let mut ignored = Vec::new();
    for (id, entry) in Names::tensors(config) {
        if !matches!(entry.extent(config), Extent::Matrix(..)) {
            continue;
        }
        let module = names.module(entry, id.layer);
        let spellings = spellings(&module);
        let group = groups.iter_mut().find_map(|(group, list)| list.find(&spellings).map(|_| *group));
        let exception = ignore.find(&spellings);
        let Some(stored) = linears.get(&id) else {
            if let (Some(group), None) = (group, exception) {
                let first = || (0, names.name(entry, id.layer), group.entry.clone());
                unquantized.get_or_insert_with(first).0 += 1;
            }
            continue;
        };
        let tensor = format!("{module}.weight_scale");
        if let Some(exception) = exception {
            if !ignored.iter().any(|known| known == exception) {
                ignored.push(exception.to_owned());
                warnings.push(Warning::IgnoredModuleIsQuantized { tensor, entry: exception.to_owned() });
            }
            continue;
        }
        let group = group.or(every);
        if group.and_then(|g| g.format) != Some(stored.format.weight_format()) {
            errors.push(|| TensorProblem::Disagrees {
                name: tensor,
                found: stored.format.to_string(),
                entry: group.map_or_else(
                    || format!("{} and the other entries do not list it", quantization.entry),
                    |group| group.entry.clone(),
                ),
            });
        }
    }
    if let Some((count, tensor, entry)) = unquantized {
        warnings.push(Warning::ListedModulesAreNotQuantized { count, tensor, entry });
    }
}
