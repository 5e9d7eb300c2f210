//! The local API: its values ([`types`], [`acp`]), the tool that models call ([`tool`]) and the meeting place
//! ([`endpoint`]) on floor 1, and its client
//! ([`client`]) on floor 5.
//! The server end lives in `runtime::local_socket`, what the requests mean in `daemon`.

pub mod acp;
pub mod client;
pub mod endpoint;
pub mod tool;
pub mod types;
