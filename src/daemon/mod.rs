//! Composition: configuration, then store, node, services and surfaces.

use std::io::Write as _;
use std::process::ExitCode;

use crate::api::types::ApiError;
use crate::runtime::local_socket::{Claim, claim};
use config::Config;

pub mod config;

/// Runs the daemon until it is told to stop. A second one for the same socket says who runs and is
/// done.
///
/// # Errors
/// What keeps it from starting, before anything is bound.
pub fn run(config: &Config) -> Result<ExitCode, ApiError> {
    let claimed = claim(&config.socket)
        .map_err(|error| ApiError::new(error.code(), error.to_string(), error.todo()))?;
    match claimed {
        Claim::Theirs(holder) => {
            let _ = writeln!(std::io::stderr(), "{holder}");
            Ok(ExitCode::SUCCESS)
        }
        Claim::Ours(_) => Err(ApiError::plain("no_mesh", "this build cannot reach the mesh")),
    }
}
