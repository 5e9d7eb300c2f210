//! The Agent Collaboration Protocol against golden bytes, hostile bytes made by hand, and two
//! gateways over a bad link in simulation.
//!
//! `tests/vectors/acp` was made with another implementation (Python); `check_vectors.py` beside it
//! checks the same files in that language.

// clippy.toml allows these inside test functions; the helpers of a test binary need it said.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod adapters;
mod chain;
mod cli;
mod corpus;
mod desk;
mod fork;
mod gateways;
mod offices;
mod owners;
mod programs;
mod refute;
mod relay;
mod relay_server;
mod relay_support;
mod sandbox;
mod suites;
mod support;
mod tools;
mod transport;
mod vectors;
mod walk;
