//! The golden cases of the reference engine, replayed against the binary by the runner beside them.

use std::path::Path;
use std::process::Command;

use crate::support::{BINARY, need_python};

/// Replays the cases of some areas; `count` of them must pass.
fn replay(areas: &[&str], tags: &[&str], count: usize) {
    need_python();
    let cases = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors/echoes");
    let mut command = Command::new("python3");
    command.arg(cases.join("run_golden.py")).args(["--lenient", "--skip-tag", "unsafe"]);
    // Most of a case is waiting: for processes, and in some for a lock.
    command.args(["--jobs", "8"]).args(tags);
    for area in areas {
        command.args(["--area", area]);
    }
    command.args(["--", BINARY, "vault"]);
    let output = command.output().expect("python3 runs");
    let report = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{report}{}", String::from_utf8_lossy(&output.stderr));
    assert!(report.ends_with(&format!("{count} passed, 0 failed\n")), "{report}");
}

const NATIVE: [&str; 2] = ["--skip-tag", "delegation"];

#[test]
fn golden_locks() {
    replay(&["lock", "symlinks"], &NATIVE, 71);
}

#[test]
fn golden_setup() {
    replay(&["init", "migration", "gating"], &NATIVE, 140);
}

#[test]
fn golden_pages() {
    replay(&["frontmatter", "names", "index", "upsert"], &NATIVE, 267);
}

#[test]
fn golden_sessions() {
    replay(&["append", "end", "flow", "search", "start", "health"], &NATIVE, 248);
}

#[test]
fn golden_delegation() {
    let runtime = crate::support::runtime();
    let runtime = runtime.to_str().unwrap();
    replay(&[], &["--only-tag", "delegation", "--runtime", runtime], 34);
}
