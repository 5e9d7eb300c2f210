//! Who a device is: keys, ids, and the files under `~/.agent-comms` that keep them.
//! Nothing here speaks on a network.

pub mod device;
