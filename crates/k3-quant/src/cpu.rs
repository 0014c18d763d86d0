//! The fast host kernels.
