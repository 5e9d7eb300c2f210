//! The agent-comms peer, sans-I/O: frames and `now` in, frames and events out. No socket, clock or
//! randomness of its own.

pub mod wire;
