//! Where commsd meets the operating system: tokio tasks, sockets, timers, processes.
//! It carries values in and out and knows no protocol.

pub mod clock;
pub mod dial;
pub mod hub;
pub mod link;
pub mod listener;
pub mod local_socket;
pub mod origin;
pub mod sys;
pub mod tls;
pub mod udp;
