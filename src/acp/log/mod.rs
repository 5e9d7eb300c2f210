//! The log of a task as one side holds it (design 7): entries signed by both, a pending one of its
//! own, and the protocol that brings the two copies together over a bad link.

pub mod rules;
mod task;
mod view;

pub use task::{COUNTERSIGN_TIMEOUT_MS, Committed, Cx, Effect, Outputs, Record, TaskLog, Wish};
pub use view::{Fault, Find, Kept, Stage, Step, View};
