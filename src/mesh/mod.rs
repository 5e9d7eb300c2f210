//! The agent-comms peer, sans-I/O: values on the wire (`wire`), the state machines, and `node`
//! that composes them for all devices of one daemon. Time and randomness come in; bytes, timers
//! and records go out; nothing here touches a socket, a clock or a file.

pub mod checked;
pub mod delivery;
pub mod directory;
pub mod discovery;
pub mod election;
pub mod events;
pub mod first_contact;
pub mod formation;
pub mod journal;
pub mod log;
pub mod message;
pub mod node;
pub mod records;
pub mod relay_hub;
pub mod replica;
pub mod session;
pub mod wire;
