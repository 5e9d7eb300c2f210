//! Bytes to values and back: deterministic CBOR, wire times. No protocol meaning lives here.

pub mod cbor;
pub mod time;
