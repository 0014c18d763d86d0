//! k3-runner
