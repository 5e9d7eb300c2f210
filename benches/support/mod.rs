//! What the benches share: daemons and agents to measure, floors to measure them against, and the
//! numbers that come out.

pub mod agent;
pub mod daemon;
pub mod floor;
pub mod shim;
pub mod stats;
