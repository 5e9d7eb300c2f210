//! `acp demo`.

use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;
use std::process::ExitCode;

use super::Place;
use crate::api::types::ApiError;
use crate::cli::acp::{Failure, files};
use crate::cli::{exit, output};
use crate::daemon::acp::demo::{self, Scenario};

/// What the first scenario leaves (decision 53).
const FILES: [&str; 3] = ["alice.jsonl", "bob.jsonl", "trust-anchor.json"];

pub(super) fn run(audit_dir: Option<&Path>, place: &Place) -> Result<ExitCode, Failure> {
    let unwritable = |error: std::io::Error| {
        let todo = "name a directory that you may write to";
        let error = ApiError::new("file_not_written", format!("no directory: {error}"), todo);
        Failure { error, exit: exit::FAILED }
    };
    // Everything but the logs is thrown away, and these too where nobody asked for them.
    let state = tempfile::tempdir().map_err(unwritable)?;
    let thrown = state.path().join("audit");
    let audit = audit_dir.unwrap_or(&thrown);
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(audit).map_err(unwritable)?;
    for name in FILES {
        let path = audit.join(name);
        if path.symlink_metadata().is_ok() {
            return Err(files::FileError::Exists { path }.into());
        }
    }
    let scenarios =
        place.block_on(async { Ok(demo::run(&state.path().join("state"), audit, None).await?) })?;
    let good = scenarios.iter().flat_map(|scenario| &scenario.shown).all(demo::Shown::is_good);
    let text = if place.json {
        output::json_line(&demo::as_json(&scenarios))
    } else {
        text(&scenarios, audit_dir, good)
    };
    let good = output::write_out(&text).is_ok() && good;
    Ok(ExitCode::from(if good { exit::DONE } else { exit::FAILED }))
}

fn text(scenarios: &[Scenario], audit_dir: Option<&Path>, good: bool) -> String {
    let mut text = String::new();
    for (number, scenario) in (1..).zip(scenarios) {
        text += &format!("{number}. {}\n", scenario.title);
        for shown in &scenario.shown {
            let mark = if shown.is_good() { "ok  " } else { "BAD " };
            text += &format!("   {mark} {}: {}\n", shown.what, output::printable(&shown.found));
            if !shown.is_good() {
                text += &format!("        expected {}\n", shown.expected);
            }
        }
    }
    if let Some(dir) = audit_dir {
        let dir = output::printable(&dir.to_string_lossy());
        text += &format!("logs: {}\n", FILES.map(|name| format!("{dir}/{name}")).join(", "));
    }
    text +=
        if good { "all as it should be\n" } else { "something went otherwise than it should\n" };
    text
}
