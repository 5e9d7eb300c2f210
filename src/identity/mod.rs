//! Who a device is: keys, ids, names, and the files under `~/.agent-comms` that keep them.
//! Nothing here speaks on a network or reads a clock; `now` and randomness come in.

pub mod certificate;
pub mod connection_code;
pub mod device;
pub mod entropy;
pub mod files;
pub mod issuer;
pub mod keyfile;
pub mod lock;
pub mod names;
pub mod openpgp;
pub mod petnames;
pub mod process;
pub mod slot;
pub mod trust;
