//! Expected results of a checkpoint (`docs/vectors.md`): reading, recording and comparing them.
//!
//! What a run is held to and what a run recorded have one form, [`Tensors`] by name, and one table says what each of
//! them is ([`layout`]). So a file that `cargo xtask trace` wrote is an expectation like any other.

mod compare;
mod layout;
mod ranks;
mod read;
mod record;
mod run;
mod tensor;

pub use compare::{Check, Found, Outcome, compare};
pub use layout::{Axis, Entry, Rows, Rule, Sizes, layout};
pub use read::Expectations;
pub use record::{Injection, Wanted};
pub use run::{Recording, record};
pub use tensor::{Tensor, Tensors, Values, read_tensors, write_tensors};

pub(crate) use compare::{Comparison, exceeds, relative_l2};
pub(crate) use ranks::align;
pub(crate) use read::FILES;
pub(crate) use run::fits_context;
pub(crate) use tensor::refuse_existing;
