//! The Agent Collaboration Protocol, sans-I/O: signed objects, the session log of a task with its
//! state machine, the audit of that log, capabilities and approvals, verification of results.
//! Time and randomness come in; messages, records to store and effects go out. Nothing here touches
//! a socket, a clock or a file. `docs/acp.md` is the protocol in words.

pub mod approval;
pub mod audit;
pub mod binding;
pub mod capability;
pub mod code;
pub mod did;
pub mod endpoint;
pub mod envelope;
pub mod forgotten;
pub mod gateway;
pub mod invite;
pub mod json;
pub mod log;
pub mod multi;
pub mod objects;
pub mod owner;
pub mod price;
pub mod quota;
pub mod relay;
pub mod revocation;
pub mod run;
pub mod schema;
pub mod sign;
pub mod steps;
pub mod tool;
pub mod validate;
pub mod value;
pub mod verify;
