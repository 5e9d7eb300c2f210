//! Where commsd meets the operating system: tokio tasks, sockets, timers, processes.
//! It carries values in and out and knows no protocol.

pub mod clock;
pub mod hub;
pub mod local_socket;
pub mod sys;
