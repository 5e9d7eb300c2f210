//! The local API: its values ([`types`], floor 1) and its client ([`client`], floor 5).
//! The server end lives in `runtime::local_socket`, what the requests mean in `daemon`.

pub mod client;
pub mod types;
