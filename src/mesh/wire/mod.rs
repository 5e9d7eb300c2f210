//! What travels on the mesh as typed values: frames, scopes, room paths, signed structures, and
//! the rules by which they are valid. Pure: keys, times and randomness come in as arguments.
//! Who is trusted and what a frame does is decided elsewhere.

pub mod advert;
pub mod capability;
pub mod claim;
pub mod cose;
pub mod fields;
pub mod frame;
pub mod handshake;
pub mod name_claim;
pub mod notice;
pub mod revocation;
pub mod room_path;
pub mod scope;
pub mod secure_channel;
pub mod token;
