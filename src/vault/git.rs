//! Questions to the `git` programme. It is asked, never told to change anything; an answer that does
//! not come in time is as no answer.

use std::io::{Read as _, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use super::plan::text::strip;
use super::scan::{path_bytes, path_text};

/// Patience with a question about the repository, and with a list of its files (as the reference
/// engine has it).
const SHORT: Duration = Duration::from_secs(3);
const LONG: Duration = Duration::from_secs(5);
/// Largest `.git/HEAD` or `.git/config` that is looked at here; more than that is Git's to judge.
const MAX_TEXT: u64 = 64 * 1024;

/// A repository's configuration comes with the project and may name programs: nothing of it is to be
/// run. No file system monitor, no repository that lies as plain files in another one (it comes with a
/// clone), and no fetch of missing objects, which would start what the configuration names as
/// transport.
const OPTIONS: [&str; 4] = ["-c", "core.fsmonitor=false", "-c", "safe.bareRepository=explicit"];
const VARIABLES: [(&str, &str); 3] =
    [("GIT_OPTIONAL_LOCKS", "0"), ("GIT_NO_LAZY_FETCH", "1"), ("GIT_ALLOW_PROTOCOL", "")];

/// Answer of `git -C folder args`; `None` unless it ends well and in time.
fn ask(folder: &Path, args: &[&str], input: Option<Vec<u8>>, limit: Duration) -> Option<Vec<u8>> {
    let mut child = Command::new("git")
        .args(OPTIONS)
        .arg("-C")
        .arg(folder)
        .args(args)
        .envs(VARIABLES)
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

/// What can be said about a folder's work tree without starting Git.
#[derive(Debug, PartialEq, Eq)]
enum Guess {
    /// There is none.
    None,
    /// An ordinary one with this top.
    Top(PathBuf),
    /// Only Git knows.
    Ask,
}

/// Looks for a work tree as Git does, and is sure of ordinary cases only: no variable tells it where, and
/// on the way up the first sign of a repository is a `.git` folder of this user's, whose own
/// configuration says nothing about work trees.
fn guess(folder: &Path, has_variables: bool) -> Guess {
    if has_variables {
        return Guess::Ask;
    }
    for folder in folder.ancestors() {
        let is_there = |name: &str| folder.join(name).symlink_metadata().is_ok();
        let is_bare = is_there("HEAD") && is_there("objects");
        if folder.file_name().is_some_and(|name| name == ".git") || is_bare {
            return Guess::Ask;
        }
        if is_there(".git") {
            return if is_ordinary(folder) { Guess::Top(folder.into()) } else { Guess::Ask };
        }
    }
    Guess::None
}

fn is_ordinary(top: &Path) -> bool {
    let git = top.join(".git");
    let own = rustix::process::geteuid().as_raw();
    let ours = |path: &Path| path.symlink_metadata().is_ok_and(|m| m.is_dir() && m.uid() == own);
    let text = |name: &str| {
        let path = git.join(name);
        // Reading a pipe would not end.
        let is_text = path.symlink_metadata().is_ok_and(|m| m.is_file() && m.len() <= MAX_TEXT);
        is_text.then(|| std::fs::read_to_string(path).ok()).flatten().unwrap_or_default()
    };
    let (head, config) = (text("HEAD"), text("config"));
    let head = head.trim_end();
    let is_hash =
        |text: &str| matches!(text.len(), 40 | 64) && text.bytes().all(|b| b.is_ascii_hexdigit());
    let telling = ["worktree", "include", "extensions", "bare = true"];
    let config = config.to_ascii_lowercase();
    ours(top)
        && ours(&git)
        && ours(&git.join("objects"))
        && ours(&git.join("refs"))
        && (head.starts_with("ref: refs/") || is_hash(head))
        && config.contains("repositoryformatversion = 0")
        && config.contains("bare = false")
        && !telling.iter().any(|word| config.contains(word))
}

/// Beginnings of the environment variables that change how Git finds a work tree.
const TELLING: [&[u8]; 9] = [
    b"GIT_DIR",
    b"GIT_WORK_TREE",
    b"GIT_COMMON_DIR",
    b"GIT_CEILING_DIRECTORIES",
    b"GIT_DISCOVERY",
    b"GIT_CONFIG",
    b"GIT_OBJECT_DIRECTORY",
    b"GIT_IMPLICIT_WORK_TREE",
    b"GIT_TEST",
];

/// Whether the environment tells Git where to look.
fn has_variables() -> bool {
    std::env::vars_os().any(|(name, _)| TELLING.iter().any(|t| name.as_bytes().starts_with(t)))
}

/// The top of the innermost work tree that `folder` (absolute, resolved) is in.
pub fn toplevel(folder: &Path) -> Option<PathBuf> {
    match guess(folder, has_variables()) {
        Guess::None => None,
        Guess::Top(top) => Some(top),
        Guess::Ask => ask_toplevel(folder),
    }
}

/// Whether Git might find a repository from `folder`.
pub fn may_be_repository(folder: &Path) -> bool {
    guess(folder, has_variables()) != Guess::None
}

fn ask_toplevel(folder: &Path) -> Option<PathBuf> {
    let answer = ask(folder, &["rev-parse", "--show-toplevel"], None, SHORT)?;
    let answer = String::from_utf8(answer).ok()?;
    let path = Path::new(strip(&answer)).canonicalize().ok()?;
    path.is_dir().then_some(path)
}

/// Paths of a NUL-separated list, as [`path_text`] writes them.
fn paths(answer: &[u8]) -> Vec<String> {
    answer.split(|b| *b == 0).filter(|path| !path.is_empty()).map(path_text).collect()
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
        input.extend(path_bytes(file));
        input.push(0);
    }
    ask(root, &["check-ignore", "--no-index", "--stdin", "-z"], Some(input), LONG)
        .map(|answer| paths(&answer))
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn git(folder: &Path, args: &[&str]) {
        let done = Command::new("git")
            .arg("-C")
            .arg(folder)
            .args(["-c", "user.name=T", "-c", "user.email=t@example.invalid"])
            .args(args)
            .output()
            .unwrap();
        assert!(done.status.success(), "{args:?}: {}", String::from_utf8_lossy(&done.stderr));
    }

    /// Whatever is guessed is what Git says.
    #[test]
    fn guesses_agree_with_git() {
        let home = tempfile::tempdir().unwrap();
        let home = home.path().canonicalize().unwrap();
        let make = |name: &str| {
            let folder = home.join(name);
            fs::create_dir_all(folder.join("a/b")).unwrap();
            folder
        };
        let plain = make("plain");
        let fresh = make("fresh");
        git(&fresh, &["init", "-q"]);
        let full = make("full");
        git(&full, &["init", "-q"]);
        fs::write(full.join("a/f"), "x").unwrap();
        git(&full, &["add", "-A"]);
        git(&full, &["commit", "-q", "-m", "x"]);
        git(&full, &["checkout", "-q", "--detach"]);
        let tree = home.join("tree");
        git(&full, &["worktree", "add", "-q", tree.to_str().unwrap()]);
        let bare = make("bare");
        git(&bare, &["init", "-q", "--bare"]);
        let moved = make("moved");
        git(&moved, &["init", "-q"]);
        git(&moved, &["config", "core.worktree", plain.to_str().unwrap()]);
        let broken = make("broken");
        fs::create_dir(broken.join(".git")).unwrap();
        // Plain files in a clone that are a repository of their own are none here.
        let embedded = full.join("embedded");
        fs::create_dir_all(embedded.join("objects/a")).unwrap();
        fs::create_dir_all(embedded.join("refs")).unwrap();
        fs::write(embedded.join("HEAD"), "ref: refs/heads/main\n").unwrap();
        let config = "[core]\nrepositoryformatversion = 0\nbare = false\nworktree = .\n";
        fs::write(embedded.join("config"), config).unwrap();
        assert_eq!(toplevel(&embedded), None);
        assert_eq!((tracked(&embedded), untracked(&embedded)), (None, None));
        let nested = full.join("nested");
        fs::create_dir(&nested).unwrap();
        git(&nested, &["init", "-q"]);
        let folders = [
            plain.join("a"),
            fresh.join("a/b"),
            fresh.clone(),
            fresh.join(".git"),
            full.join("a"),
            tree.join("a"),
            bare.join("a"),
            bare.join("refs"),
            moved.join("a"),
            broken.join("a"),
            nested.clone(),
        ];
        let mut sure = 0;
        for folder in &folders {
            match guess(folder, false) {
                Guess::None => assert_eq!(ask_toplevel(folder), None, "{}", folder.display()),
                Guess::Top(top) => {
                    assert_eq!(ask_toplevel(folder), Some(top), "{}", folder.display());
                    sure += 1;
                }
                Guess::Ask => {}
            }
        }
        assert_eq!(sure, 4, "fresh twice, full, nested");
        assert_eq!(guess(&fresh, true), Guess::Ask);
    }
}
