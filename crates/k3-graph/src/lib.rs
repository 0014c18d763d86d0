//! k3-graph
