//! The official MCP conformance suite against our servers on stdio, in both of its lifecycles. What
//! we do not pass stands with its reason in `tests/sdk/conformance_expected.mjs`; anything else that
//! fails is a failure, and so is anything of the list that passes.

use std::path::Path;
use std::time::Duration;

use tokio::process::Command;

use crate::daemon::{Daemon, Ports};

/// The newest revision with a handshake, and the first without.
const REVISIONS: [&str; 2] = ["2025-11-25", "2026-07-28"];

/// Runs the suite of one revision against one server.
async fn judge(suite: &Path, home: &Path, revision: &str, server: &str, args: &[&str]) {
    let output = Command::new("node")
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/sdk/conformance.mjs"))
        .args([suite.as_os_str(), revision.as_ref(), server.as_ref()])
        .arg(env!("CARGO_BIN_EXE_commsd"))
        .args(args)
        .current_dir(home)
        .env("HOME", home)
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(Duration::from_secs(120), output);
    let output = output.await.expect("it never ends").unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let noted = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{server}, {revision}: {said}{noted}");
    assert!(said.contains("Baseline check passed"), "{server}, {revision}: {said}{noted}");
}

/// The suite is no crate: the gate installs it and says where it is.
#[tokio::test]
async fn the_official_suite_passes_but_for_what_is_listed() {
    let Some(suite) = std::env::var_os("COMMSD_CONFORMANCE") else {
        crate::limits::skipped("COMMSD_CONFORMANCE does not say where the suite is");
        return;
    };
    let daemon = Daemon::start(Ports::free()).await;
    let home = daemon.home.path();
    let at = ["--home", home.to_str().unwrap()];
    for revision in REVISIONS {
        let own = ["acp", "mcp-server"];
        judge(Path::new(&suite), home, revision, "acp", &[&at[..], &own].concat()).await;
        let session = ["mcp", "--no-start", "--harness", "codex"];
        judge(Path::new(&suite), home, revision, "mcp", &[&at[..], &session].concat()).await;
    }
}
