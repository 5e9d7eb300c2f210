//! The blind relay, sans-I/O (design 11): what it checks, keeps and answers. It holds no private
//! key and reads no message; envelopes, cards and notices come in verified, and what must outlive a
//! crash goes out as records.

pub mod auth;
