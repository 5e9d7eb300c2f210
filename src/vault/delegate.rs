//! Handing a command over to the project's own, newer runtime. A newer engine may keep things that
//! this one does not know, so this one does not write past it (specification, section 12.1).

use std::ffi::OsString;
use std::process::{Command, ExitStatus};

use super::error::VaultError;
use super::plan::marker::RUNTIME;
use super::workspace::Workspace;

/// Runs the project's runtime with `args`, an array and never a shell's text; stdin, stdout and stderr
/// are this process's.
///
/// # Errors
/// [`VaultError::Python`], if there is no `python3` that can be started.
pub fn run_project_runtime(
    workspace: &Workspace,
    args: &[OsString],
) -> Result<ExitStatus, VaultError> {
    Command::new("python3")
        .arg(workspace.root().join(RUNTIME))
        .args(args)
        .status()
        .map_err(VaultError::Python)
}
