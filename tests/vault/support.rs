//! A throw-away workspace and the two engines that work in it.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

/// The built binary.
pub const BINARY: &str = env!("CARGO_BIN_EXE_commsd");

/// The portable runtime.
pub fn runtime() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src/vault/portable/echoes_vault.py")
}

/// A page that is valid.
pub const PAGE: &str = "---\ntype: note\nstack: []\nstatus: active\nsummary: S.\n---\n\n# P\n";

/// The id that tests running as root use for a user who owns nothing.
pub const NOBODY: u32 = 65534;

/// Which engine runs a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    Native,
    Python,
}

/// Both.
pub const ENGINES: [Engine; 2] = [Engine::Native, Engine::Python];

/// A workspace with a folder beside it.
pub struct Space {
    _home: tempfile::TempDir,
    pub root: PathBuf,
    pub outside: PathBuf,
}

/// What a command answered.
#[derive(Debug)]
pub struct Answer {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Answer {
    pub fn from(output: Output) -> Self {
        Self {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }

    /// The JSON of a success.
    pub fn json(&self) -> Value {
        assert_eq!((self.code, self.stderr.as_str()), (Some(0), ""), "{self:?}");
        serde_json::from_str(&self.stdout).unwrap()
    }

    /// The message of a refusal, which has the one shape that refusals have.
    pub fn refusal(&self) -> String {
        assert_eq!((self.code, self.stdout.as_str()), (Some(2), ""), "{self:?}");
        assert!(self.stderr.ends_with('\n') && self.stderr.matches('\n').count() == 1, "{self:?}");
        let error: Value = serde_json::from_str(&self.stderr).unwrap();
        assert_eq!(error["ok"], false);
        assert_eq!(error.as_object().unwrap().len(), 2);
        error["error"].as_str().unwrap().to_owned()
    }
}

impl Space {
    /// An empty workspace.
    pub fn empty() -> Self {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().canonicalize().unwrap();
        let (root, outside) = (path.join("ws"), path.join("out"));
        fs::create_dir(&root).unwrap();
        fs::create_dir(&outside).unwrap();
        Self { _home: home, root, outside }
    }

    /// A workspace with a vault.
    pub fn new() -> Self {
        let space = Self::empty();
        space.run(&["init"], b"").json();
        space
    }

    pub fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        self.root.join(path)
    }

    pub fn write(&self, path: impl AsRef<Path>, content: impl AsRef<[u8]>) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    pub fn read(&self, path: impl AsRef<Path>) -> String {
        fs::read_to_string(self.path(path)).unwrap()
    }

    /// A command of an engine, ready to be spawned.
    pub fn command(&self, engine: Engine, args: &[&str]) -> Command {
        let mut command = match engine {
            Engine::Native => {
                let mut command = Command::new(BINARY);
                command.arg("vault");
                command
            }
            Engine::Python => {
                let mut command = Command::new("python3");
                command.arg(runtime());
                command
            }
        };
        command.arg("--workspace").arg(&self.root).args(args);
        self.surround(&mut command);
        command
    }

    /// The environment of every command.
    pub fn surround(&self, command: &mut Command) {
        command
            .env("HOME", self.root.parent().unwrap())
            .env("TZ", "UTC")
            .env("GIT_CONFIG_NOSYSTEM", "1")
            .env("GIT_CONFIG_GLOBAL", "/dev/null")
            .env("GIT_CEILING_DIRECTORIES", self.root.parent().unwrap())
            .env("COMMSD_NO_BROADCAST", "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
    }

    pub fn run_with(&self, engine: Engine, args: &[&str], stdin: &[u8]) -> Answer {
        finish(self.command(engine, args), stdin)
    }

    pub fn run(&self, args: &[&str], stdin: &[u8]) -> Answer {
        self.run_with(Engine::Native, args, stdin)
    }

    /// Runs a command with a JSON payload.
    pub fn send(&self, args: &[&str], payload: &Value) -> Answer {
        self.run(args, payload.to_string().as_bytes())
    }

    /// Everything below the root: path, mode, and content or target.
    pub fn snapshot(&self) -> BTreeMap<PathBuf, (u32, Vec<u8>)> {
        let mut all = BTreeMap::new();
        let mut folders = vec![self.root.clone()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(&folder).unwrap() {
                let path = entry.unwrap().path();
                let about = fs::symlink_metadata(&path).unwrap();
                let content = if about.is_symlink() {
                    fs::read_link(&path).unwrap().into_os_string().into_encoded_bytes()
                } else if about.is_file() {
                    fs::read(&path).unwrap_or_default()
                } else {
                    Vec::new()
                };
                if about.is_dir() {
                    folders.push(path.clone());
                }
                all.insert(path, (about.permissions().mode(), content));
            }
        }
        all
    }

    /// Names of files in a folder that look like temporary ones.
    pub fn temporary(&self, folder: &str) -> Vec<String> {
        fs::read_dir(self.path(folder))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name.ends_with(".tmp"))
            .collect()
    }
}

/// Runs a command to its end.
pub fn finish(mut command: Command, stdin: &[u8]) -> Answer {
    let mut child = command.spawn().unwrap_or_else(|e| panic!("cannot start {command:?}: {e}"));
    let mut pipe = child.stdin.take().unwrap();
    let stdin = stdin.to_vec();
    // A command that refuses early does not read its stdin to the end.
    let feeder = std::thread::spawn(move || {
        let _ = pipe.write_all(&stdin);
    });
    let output = child.wait_with_output().unwrap();
    feeder.join().unwrap();
    Answer::from(output)
}

/// Fails with a clear word where Python is missing.
pub fn need_python() {
    let found = Command::new("python3").arg("--version").output();
    assert!(found.is_ok_and(|out| out.status.success()), "these tests need python3 in PATH");
}
