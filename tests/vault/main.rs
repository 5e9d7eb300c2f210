//! The vault, from outside: golden cases, races, crashes, hostile files, and the portable runtime
//! beside the built binary.

// Clippy's leave for tests does not reach the helpers beside them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr)]

mod crashes;
mod differential;
mod engines;
mod full_disk;
mod golden;
mod hostile;
mod odd;
mod portable;
mod races;
mod runtimes;
mod strangers;
mod stress;
mod support;
