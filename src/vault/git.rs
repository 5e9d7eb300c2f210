//! Questions to the `git` programme. It is asked, never told to change anything; an answer that does
//! not come in time is as no answer.

use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use super::plan::text::strip;

/// Patience with a question about the repository, and with a list of its files (as the reference
/// engine has it).
const SHORT: Duration = Duration::from_secs(3);
const LONG: Duration = Duration::from_secs(5);
/// Environment variables by which Git finds a repository in unusual places.
const LOCATORS: [&str; 4] =
    ["GIT_DIR", "GIT_WORK_TREE", "GIT_COMMON_DIR", "GIT_DISCOVERY_ACROSS_FILESYSTEM"];

/// Answer of `git -C folder args`; `None` unless it ends well and in time.
fn ask(folder: &Path, args: &[&str], input: Option<Vec<u8>>, limit: Duration) -> Option<Vec<u8>> {
    let mut child = Command::new("git")
        .arg("-C")
        .arg(folder)
        .args(args)
        .stdin(if input.is_some() { Stdio::piped() } else { Stdio::null() })
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let stdin = child.stdin.take();
    let mut stdout = child.stdout.take()?;
    let (done, answer) = mpsc::channel();
    // The threads end when the child does, at the latest when it is killed below.
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let read = stdout.read_to_end(&mut bytes).map(|_| bytes);
        let _ = done.send(read);
    });
    if let (Some(mut stdin), Some(input)) = (stdin, input) {
        std::thread::spawn(move || {
            // A child that does not read on has its reasons; its exit code counts.
            let _ = stdin.write_all(&input);
        });
    }
    let bytes = answer.recv_timeout(limit);
    if bytes.is_err() {
        let _ = child.kill();
    }
    let status = child.wait().ok()?;
    if status.success() { bytes.ok()?.ok() } else { None }
}

/// Whether Git could find a repository from `folder` at all. Most plain folders are told apart here,
/// without starting a process.
fn may_be_repository(folder: &Path) -> bool {
    LOCATORS.iter().any(|name| std::env::var_os(name).is_some())
        || folder.ancestors().any(|folder| {
            folder.join(".git").symlink_metadata().is_ok()
                || (folder.join("HEAD").symlink_metadata().is_ok()
                    && folder.join("objects").symlink_metadata().is_ok())
        })
}

/// The top of the innermost work tree that `folder` is in.
pub fn toplevel(folder: &Path) -> Option<PathBuf> {
    if !may_be_repository(folder) {
        return None;
    }
    let answer = ask(folder, &["rev-parse", "--show-toplevel"], None, SHORT)?;
    let answer = String::from_utf8(answer).ok()?;
    let path = Path::new(strip(&answer)).canonicalize().ok()?;
    path.is_dir().then_some(path)
}

/// Paths of a NUL-separated list that are UTF-8; the others are no file of a vault.
fn paths(answer: &[u8]) -> Vec<String> {
    answer
        .split(|b| *b == 0)
        .filter(|path| !path.is_empty())
        .filter_map(|path| std::str::from_utf8(path).ok().map(str::to_owned))
        .collect()
}

/// Files that Git knows below `root`.
pub fn tracked(root: &Path) -> Option<Vec<String>> {
    ask(root, &["ls-files", "-z"], None, LONG).map(|answer| paths(&answer))
}

/// Files below `root` that it neither knows nor ignores.
pub fn untracked(root: &Path) -> Option<Vec<String>> {
    ask(root, &["ls-files", "--others", "--exclude-standard", "-z"], None, LONG)
        .map(|answer| paths(&answer))
}

/// Those of `files` that an ignore rule names. A failure counts as none.
pub fn ignored(root: &Path, files: &[String]) -> Vec<String> {
    let mut input = Vec::new();
    for file in files {
        input.extend_from_slice(file.as_bytes());
        input.push(0);
    }
    ask(root, &["check-ignore", "--no-index", "--stdin", "-z"], Some(input), LONG)
        .map(|answer| paths(&answer))
        .unwrap_or_default()
}
