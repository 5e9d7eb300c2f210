//! Bytes to values and back: deterministic CBOR, wire times, text fit to be shown. No protocol
//! meaning lives here.

pub mod cbor;
pub mod text;
pub mod time;
