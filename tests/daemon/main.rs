//! The daemon seen from outside: its local socket, its commands, the files it comes with.

// Clippy's leave for tests does not reach the helpers beside them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod acp;
mod acp_mesh;
mod asking;
mod bench;
mod cli;
mod codes;
mod conformance;
mod contrib;
mod daemon;
mod discovery;
mod durable;
mod events;
mod findings;
mod hook;
mod hub;
mod limits;
mod listeners;
mod local_socket;
mod mcp;
mod mesh;
mod namespaces;
mod pi;
mod presence;
mod setup;
mod signals;
mod transport;
mod vault_mesh;
mod web;
