//! Whole meshes of nodes in one thread and in virtual time. A run follows from its seed: a
//! failure says how to have it again.

mod rng;
mod support;
pub mod ways;
mod world;

mod acp;
mod authority;
mod formation;
mod grants;
mod intrusion;
mod messages;
mod random;
mod rooms;
mod services;
