//! The wire against golden vectors and recordings of real peers, and whole meshes of nodes in
//! simulation.
//!
//! `tests/vectors/lab` is part of the repository. The upstream vectors are not: they are read from
//! the directory that `COMMSD_WIRE_MESH_VECTORS` names, else from `../shared/vectors/wire-mesh`
//! beside the repository, and their tests say that they were skipped where both are absent.

// clippy.toml allows these inside test functions; the helpers of a test binary need it said.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod corpus;
mod hub;
mod replay;
mod sim;
mod support;
mod vectors_cbor;
mod vectors_channel;
mod vectors_frames;
mod vectors_mutated;
mod vectors_tokens;
