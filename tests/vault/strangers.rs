//! What others have put into a project: configuration of Git that names programs, and files that only
//! their owner may read. Both engines answer alike.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};

use crate::differential::{contents, describe};
use crate::support::{
    Answer, BINARY, ENGINES, Engine, NOBODY, Space, finish, need_python, runtime,
};

fn git(space: &Space, folder: &Path, args: &[&str]) {
    let mut command = Command::new("git");
    space.surround(&mut command);
    command.arg("-C").arg(folder).args(["-c", "user.name=T", "-c", "user.email=t@example.invalid"]);
    let done = command.args(args).output().unwrap();
    assert!(done.status.success(), "{args:?}: {}", String::from_utf8_lossy(&done.stderr));
}

/// A file system monitor in the project's own configuration.
fn monitor(space: &Space, trap: &str) -> PathBuf {
    git(space, &space.root, &["init", "-q"]);
    git(space, &space.root, &["config", "core.fsmonitor", trap]);
    space.root.clone()
}

/// Files of a project that are a repository themselves, as a clone brings them.
fn embedded(space: &Space, trap: &str) -> PathBuf {
    git(space, &space.root, &["init", "-q"]);
    let config = format!(
        "[core]\nrepositoryformatversion = 0\nbare = false\nworktree = .\nfsmonitor = \"{trap}\"\n"
    );
    space.write("tools/HEAD", "ref: refs/heads/main\n");
    space.write("tools/objects/k", "");
    space.write("tools/refs/k", "");
    space.write("tools/config", config);
    space.path("tools")
}

/// A clone that lacks the ignore rules in its index and would fetch them by a programme.
fn fetching(space: &Space, trap: &str) -> PathBuf {
    let origin = space.outside.join("origin");
    fs::create_dir(&origin).unwrap();
    git(space, &origin, &["init", "-q"]);
    git(space, &origin, &["config", "uploadpack.allowFilter", "true"]);
    fs::write(origin.join(".gitignore"), "x\n").unwrap();
    git(space, &origin, &["add", "-A"]);
    git(space, &origin, &["commit", "-q", "-m", "x"]);
    let url = format!("file://{}", origin.display());
    let clone = ["clone", "-q", "--filter=blob:none", "--no-checkout", &url, "clone"];
    git(space, &space.root, &clone);
    let top = space.path("clone");
    git(space, &top, &["read-tree", "HEAD"]);
    git(space, &top, &["update-index", "--skip-worktree", ".gitignore"]);
    git(space, &top, &["config", "remote.origin.uploadpack", trap]);
    fs::write(top.join("new"), "").unwrap();
    top
}

#[test]
fn nothing_that_a_repository_names_is_run() {
    need_python();
    type Set = fn(&Space, &str) -> PathBuf;
    for (what, set) in
        [("monitor", monitor as Set), ("embedded", embedded as Set), ("fetching", fetching as Set)]
    {
        let space = Space::empty();
        let ran = space.outside.join("ran");
        let start = set(&space, &format!("touch {}; false", ran.display()));
        // The trap works: Git by itself walks into it.
        let mut plain = Command::new("git");
        space.surround(&mut plain);
        plain.arg("-C").arg(&start).args(["ls-files", "--others", "--exclude-standard"]);
        plain.output().unwrap();
        assert!(ran.exists(), "{what}");
        fs::remove_file(&ran).unwrap();
        let start = start.to_str().unwrap();
        for engine in ENGINES {
            for words in
                [&["inspect"][..], &["status", "--format", "card"], &["init"], &["inspect"]]
            {
                let words = [&["--workspace", start], words].concat();
                let answer = space.run_with(engine, &words, b"");
                assert_eq!(answer.code, Some(0), "{what} {engine:?} {words:?}: {answer:?}");
                assert!(!ran.exists(), "{what} {engine:?} {words:?}");
            }
            let report = space.run_with(engine, &["--workspace", start, "inspect"], b"").json();
            assert_eq!(report["workspace"], json!(start), "{what} {engine:?}");
        }
    }
}

/// Copies of the engines that every user can reach.
struct Engines(Space);

impl Engines {
    fn new() -> Self {
        need_python();
        let space = Space::empty();
        fs::copy(BINARY, space.outside.join("commsd")).unwrap();
        fs::copy(runtime(), space.outside.join("echoes_vault.py")).unwrap();
        open_up(space.root.parent().unwrap());
        Self(space)
    }

    /// Runs a command as somebody who may not read what has no mode.
    fn run(&self, engine: Engine, space: &Space, words: &[&str], stdin: &str) -> Answer {
        let mut command = match engine {
            Engine::Native => {
                let mut command = Command::new(self.0.outside.join("commsd"));
                command.arg("vault");
                command
            }
            Engine::Python => {
                let mut command = Command::new("python3");
                command.arg("-B").arg(self.0.outside.join("echoes_vault.py"));
                command
            }
        };
        command.arg("--workspace").arg(&space.root).args(words);
        space.surround(&mut command);
        let probe = self.0.path("probe");
        fs::write(&probe, "").unwrap();
        if chown(&probe, Some(NOBODY), None).is_ok() {
            command.uid(NOBODY).gid(NOBODY);
        }
        finish(command, stdin.as_bytes())
    }
}

/// Lets everybody write into a folder and read what is in it.
fn open_up(folder: &Path) {
    fs::set_permissions(folder, fs::Permissions::from_mode(0o777)).unwrap();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            open_up(&path);
        } else {
            fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
        }
    }
}

/// A vault in which nobody may read `path`, written so many seconds ago.
fn closed(path: &str, age: u64) -> Space {
    let space = Space::new();
    if !space.path(path).exists() {
        space.write(path, "1-0123456789abcdef\n");
    }
    open_up(space.root.parent().unwrap());
    let file = fs::File::options().write(true).open(space.path(path)).unwrap();
    file.set_modified(SystemTime::now() - Duration::from_secs(age)).unwrap();
    fs::set_permissions(space.path(path), fs::Permissions::from_mode(0o000)).unwrap();
    space
}

#[test]
fn files_that_cannot_be_read_are_found_and_not_stumbled_over() {
    let engines = Engines::new();
    let list = |report: &Value, of: &str| report["health"][of].to_string();
    type Holds = fn(&Value, &dyn Fn(&Value, &str) -> String) -> bool;
    let cases: [(&str, Holds, bool); 5] = [
        (
            "EchoesVault/index.md",
            |report, list| {
                list(report, "unreadableFiles") == "[\"index.md\"]"
                    && list(report, "indexOutOfDate") == "[\"index.md\"]"
            },
            true,
        ),
        (
            ".echoes-vault/echoes_vault.py",
            |report, list| {
                report["health"]["projectRuntime"]["recognized"] == false
                    && list(report, "missingStructure").contains("echoes_vault.py")
            },
            false,
        ),
        (
            "EchoesVault/.echoes-vault.json",
            |report, _| report["health"]["marker"]["valid"] == false,
            false,
        ),
        ("AGENTS.md", |report, list| list(report, "missingStructure") == "[\"AGENTS.md\"]", true),
        (
            ".echoes-vault/state.json",
            |report, _| report["health"]["stateFile"]["valid"] == false,
            true,
        ),
    ];
    let entry = "{\"entry\": \"x\"}";
    for (path, holds, writes) in cases {
        let [native, python] = ENGINES.map(|engine| {
            let space = closed(path, 0);
            let report = engines.run(engine, &space, &["inspect"], "");
            assert!(holds(&report.json(), &list), "{path} {engine:?}: {report:?}");
            let card = engines.run(engine, &space, &["status", "--format", "card"], "");
            let append = engines.run(engine, &space, &["append"], entry);
            assert_eq!(append.code == Some(0), writes, "{path} {engine:?}: {append:?}");
            let answers = [report, card, append].map(|answer| describe(&answer, &space.root));
            (answers, contents(&space))
        });
        assert_eq!(native, python, "{path}");
    }
}

#[test]
fn a_lock_that_cannot_be_read_is_judged_by_its_age() {
    let engines = Engines::new();
    let run = |engine, age| {
        let space = closed(".echoes-vault/lock", age);
        let answer = engines.run(engine, &space, &["append"], "{\"entry\": \"x\"}");
        (answer, space.path(".echoes-vault/lock").exists())
    };
    for engine in ENGINES {
        let (answer, remains) = run(engine, 70);
        answer.json();
        assert!(!remains, "{engine:?}");
    }
    // The waiting takes 8 s.
    std::thread::scope(|scope| {
        let waiting = ENGINES.map(|engine| scope.spawn(move || run(engine, 5)));
        for waiting in waiting {
            let (answer, remains) = waiting.join().unwrap();
            assert!(answer.refusal().contains("locked"), "{answer:?}");
            assert!(remains);
        }
    });
}
