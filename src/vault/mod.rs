//! EchoesVault Protocol 1.0.0: a native writer of a repository's memory, in process, without a daemon.
//!
//! [`Workspace`] is an opened root; its methods are the commands, with typed input and typed answers
//! that serialize to the reference engine's JSON. [`plan`] decides, from texts and facts alone;
//! everything else here touches files, through opened directory handles only (`tree`), or asks
//! `git` (`git`). Nothing here is async: off the event loop with it.
//!
//! Sources: the specification "EchoesVault Protocol 1.0.0"; where it is silent, the reference engine's
//! behaviour as the golden cases in `tests/vectors/echoes` record it.

mod clock;
mod delegate;
mod error;
mod git;
mod lock;
pub mod plan;
mod scan;
mod serve;
mod stop;
mod sweep;
#[cfg(test)]
mod tests;
mod tree;
mod workspace;
mod write;

pub use clock::{Clock, SystemClock};
pub use delegate::run_project_runtime;
pub use error::VaultError;
pub use plan::engine::{Runtime, Standing};
pub use plan::payload::{AppendInput, EndInput, PageInput};
pub use serve::{Asked, Request};
pub use stop::Stop;
pub use workspace::{IndexText, Options, PageText, Workspace};
pub use write::{DEFAULT_RECENT, Setup};
