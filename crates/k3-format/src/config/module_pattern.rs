//! Entries of lists of modules: names and patterns.

use regex_automata::hybrid::dfa::{Cache, Config, DFA};
use regex_automata::nfa::thompson;
use regex_automata::{Anchored, Input};

use super::quantization::names_routed_experts;

/// What a pattern begins with; other entries are names.
const PATTERN: &str = "re:";
/// Bytes that a compiled pattern may take.
const MAX_COMPILED: usize = 1 << 20;

/// An entry of a list of modules, ready to be compared with many names. A pattern is matched from the beginning of the
/// name and need not reach its end, as compressed-tensors does.
pub(crate) struct ModulePattern {
    entry: String,
    /// `None` for a name.
    pattern: Option<Box<(DFA, Cache)>>,
}

impl ModulePattern {
    /// # Errors
    /// Why a pattern cannot be judged.
    pub(crate) fn new(entry: &str) -> Result<Self, String> {
        let pattern = entry.strip_prefix(PATTERN).map(|pattern| {
            let dfa = DFA::builder()
                .configure(Config::new().skip_cache_capacity_check(true).unicode_word_boundary(true))
                .thompson(thompson::Config::new().nfa_size_limit(Some(MAX_COMPILED)))
                .build(pattern)
                .map_err(|e| source_of(&e))?;
            let cache = dfa.create_cache();
            Ok::<_, String>(Box::new((dfa, cache)))
        });
        Ok(Self { entry: entry.to_owned(), pattern: pattern.transpose()? })
    }

    /// The entry, as written.
    pub(crate) fn entry(&self) -> &str {
        &self.entry
    }

    /// Whether it stands for a module of this name.
    ///
    /// # Errors
    /// Why a pattern cannot be judged.
    pub(crate) fn matches(&mut self, name: &str) -> Result<bool, String> {
        let Some(pattern) = &mut self.pattern else { return Ok(self.entry == name) };
        let (dfa, cache) = &mut **pattern;
        let input = Input::new(name).anchored(Anchored::Yes).earliest(true);
        Ok(dfa.try_search_fwd(cache, &input).map_err(|e| e.to_string())?.is_some())
    }

    /// Whether it speaks of the routed experts; `module` is the name of a matrix of one of them.
    ///
    /// # Errors
    /// Why a pattern cannot be judged.
    pub(crate) fn speaks_of_experts(&mut self, module: &str) -> Result<bool, String> {
        if self.pattern.is_none() {
            return Ok(names_routed_experts(&self.entry));
        }
        // The bank has a name of its own, which a pattern may end with.
        let bank = module.rsplitn(3, '.').nth(2).unwrap_or(module);
        Ok(self.matches(module)? || self.matches(bank)?)
    }
}

/// The innermost message in one line: the outer ones do not say what is wrong.
fn source_of(error: &dyn std::error::Error) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    let text = error.to_string();
    text.lines().last().unwrap_or_default().trim().trim_start_matches("error: ").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(entry: &str, expected: Result<bool, ()>) {
        let module = "language_model.model.layers.1.block_sparse_moe.experts.0.w1";
        let found = ModulePattern::new(entry).and_then(|mut p| p.speaks_of_experts(module));
        if let Err(why) = &found {
            assert!(!why.is_empty() && !why.contains('\n'), "{entry}: {why:?}");
        }
        assert_eq!(found.map_err(drop), expected, "{entry}");
    }

    #[test]
    fn entries_of_an_ignore_list() {
        check("re:.*block_sparse_moe.*", Ok(true));
        check("re:.*", Ok(true));
        check("re:.*block_sparse_moe\\.experts.*", Ok(true));
        check("re:.*\\.experts$", Ok(true));
        check("re:.*\\.experts\\.\\d+\\.w[123]$", Ok(true));
        check("re:language_model\\b", Ok(true));
        check("re:.*self_attn.*", Ok(false));
        check("re:.*shared_experts.*", Ok(false));
        check("re:.*mlp\\.(gate|up|gate_up|down)_proj.*", Ok(false));
        // From the beginning of the name.
        check("re:experts", Ok(false));
        check("re:block_sparse_moe", Ok(false));
        check("re:.*experts.0.w1.+", Ok(false));
        check("experts", Ok(true));
        check("lm_head", Ok(false));
        check("re:(", Err(()));
        check("re:(?!lm_head).*", Err(()));
        check("re:(((\\w{1000}){1000}){1000})", Err(()));
    }
}
