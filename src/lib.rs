//! commsd: a per-machine daemon through which LLM agents find each other, talk, remember and
//! delegate work.
//!
//! The rooms of the house, from the ground up; a floor uses only those below it
//! (`tests/architecture.rs` holds this):
//!
//! | floor | rooms |
//! | --- | --- |
//! | 1 | [`codec`] bytes to values, [`identity`] keys and their files, [`api::types`] the local API's values |
//! | 2 | [`mesh`] the agent-comms peer, sans-I/O; [`acp`] the Agent Collaboration Protocol, sans-I/O; [`vault`] EchoesVault: a planner without I/O, and its executor |
//! | 3 | [`store`] durable state, [`runtime`] tokio: sockets, timers, processes |
//! | 4 | [`daemon`] composition |
//! | 5 | [`api::client`], [`cli`], [`mcp`], [`web`]: surfaces that only talk to the local API |
//!
//! How a message travels: agent -> local socket (`runtime`) -> `api` request, the sender stamped from
//! the connection -> `daemon` -> `mesh::node` input -> outputs (frames for sessions, records for
//! `store`, events for agents, timers) -> `runtime` carries them out -> the other side's session ->
//! its node -> event -> its agent's socket -> acknowledgement the same way back.

pub mod acp;
pub mod api;
pub mod cli;
pub mod codec;
pub mod daemon;
pub mod identity;
pub mod mcp;
pub mod mesh;
pub mod runtime;
pub mod store;
pub mod vault;
pub mod web;
