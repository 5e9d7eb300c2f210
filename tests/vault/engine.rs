//! The two engines as other programs see them: the binary, and the portable runtime under Python.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde_json::{Value, json};

/// A file of this repository.
pub fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// The portable runtime's source.
pub fn portable() -> PathBuf {
    repository("src/vault/portable/echoes_vault.py")
}

/// What a command did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    pub status: i64,
    pub out: String,
    pub err: String,
}

impl Outcome {
    /// The result, which must be one of success.
    pub fn value(&self) -> Value {
        assert_eq!(self.status, 0, "{self:?}");
        serde_json::from_str(&self.out).unwrap()
    }

    /// The message of a refusal.
    pub fn message(&self) -> String {
        assert_eq!((self.status, self.out.as_str()), (2, ""), "{self:?}");
        let value: Value = serde_json::from_str(&self.err).expect(&self.err);
        assert_eq!(value["ok"], false, "{self:?}");
        value["error"].as_str().unwrap().to_owned()
    }
}

/// A process without this machine's settings.
fn clean(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new(program);
    command
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .env("HOME", "/nonexistent")
        .env("TZ", "UTC")
        .env("LC_ALL", "C.UTF-8")
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .env("COMMSD_NO_BROADCAST", "1");
    command
}

/// A command prefix that Python programs start with. Without site packages it starts sooner.
pub fn python() -> Command {
    let mut command = clean("python3");
    command.arg("-S");
    command
}

/// The binary's vault commands.
pub fn native() -> Command {
    let mut command = clean(env!("CARGO_BIN_EXE_commsd"));
    command.arg("vault");
    command
}

/// Runs a command to its end.
pub fn run(mut command: Command, stdin: &str) -> Outcome {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A command that is refused before it reads its payload closes the pipe.
    let _ = child.stdin.take().unwrap().write_all(stdin.as_bytes());
    let output = child.wait_with_output().unwrap();
    Outcome {
        status: output.status.code().unwrap_or(-1).into(),
        out: String::from_utf8(output.stdout).unwrap(),
        err: String::from_utf8(output.stderr).unwrap(),
    }
}

/// Runs one of the binary's vault commands.
pub fn run_native(workspace: &Path, words: &[&str], stdin: &str) -> Outcome {
    let mut command = native();
    command.arg("--workspace").arg(workspace).args(words);
    run(command, stdin)
}

/// Runs a command of the workspace's own copy of the portable runtime.
pub fn run_portable(workspace: &Path, words: &[&str], stdin: &str) -> Outcome {
    let mut command = python();
    command.arg(workspace.join(".echoes-vault/echoes_vault.py"));
    command.arg("--workspace").arg(workspace).args(words);
    run(command, stdin)
}

/// One Python process that runs many commands of the portable runtime.
pub struct Driver {
    child: Child,
    requests: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Driver {
    pub fn start() -> Self {
        let mut command = python();
        command.arg(repository("tests/vault/driver.py")).arg(portable());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let requests = child.stdin.take().unwrap();
        let answers = BufReader::new(child.stdout.take().unwrap());
        Self { child, requests, answers }
    }

    /// Runs a command as the workspace's own copy would.
    pub fn run(&mut self, workspace: &Path, words: &[&str], stdin: &str) -> Outcome {
        let mut all = vec!["--workspace", workspace.to_str().unwrap()];
        all.extend(words);
        let file = workspace.join(".echoes-vault/echoes_vault.py");
        let request = json!({"words": all, "stdin": stdin, "file": file});
        writeln!(self.requests, "{request}").unwrap();
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        let answer: Value = serde_json::from_str(&line).expect("the driver ended");
        let text = |member: &str| answer[member].as_str().unwrap().to_owned();
        Outcome { status: answer["status"].as_i64().unwrap(), out: text("out"), err: text("err") }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Copies a folder with all that is in it.
pub fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

/// All files below a folder, as paths from it and contents, in order; a folder ends in `/`.
pub fn tree(folder: &Path) -> Vec<(Vec<u8>, Vec<u8>)> {
    use std::os::unix::ffi::OsStrExt as _;
    let mut found = Vec::new();
    let mut pending = vec![folder.to_owned()];
    while let Some(inner) = pending.pop() {
        for entry in std::fs::read_dir(&inner).unwrap() {
            let path = entry.unwrap().path();
            let mut name = path.strip_prefix(folder).unwrap().as_os_str().as_bytes().to_vec();
            if path.is_dir() {
                name.push(b'/');
                found.push((name, Vec::new()));
                pending.push(path);
            } else {
                found.push((name, std::fs::read(path).unwrap()));
            }
        }
    }
    found.sort();
    found
}

/// `bytes` without what no two runs share: times, the names of fresh entries, the workspace's path.
pub fn mask(bytes: &[u8], workspace: &Path) -> Vec<u8> {
    let workspace = workspace.to_str().unwrap().as_bytes();
    let mut masked = Vec::with_capacity(bytes.len());
    let mut rest = bytes;
    while let Some((first, after)) = rest.split_first() {
        let found = [
            (rest.starts_with(workspace).then_some(workspace.len()), &b"<WS>"[..]),
            (fits(rest, b"dddd-dd-dd/ddddddddTddddddddddddZ"), b"<DAY>/<UTC>Z"),
            (fits(rest, b"dddd-dd-ddTdd:dd:dd+00:00"), b"<TIME>"),
            (fits(rest, b"-hhhhhhhh.md"), b"-<RANDOM>.md"),
        ];
        match found.iter().find_map(|(length, name)| length.map(|length| (length, name))) {
            Some((length, name)) => {
                masked.extend_from_slice(name);
                rest = &rest[length..];
            }
            None => {
                masked.push(*first);
                rest = after;
            }
        }
    }
    masked
}

/// The length of a template that `bytes` start with: `d` is a digit, `h` a hexadecimal one.
fn fits(bytes: &[u8], template: &[u8]) -> Option<usize> {
    let fit = bytes.len() >= template.len()
        && bytes.iter().zip(template).all(|(byte, wanted)| match wanted {
            b'd' => byte.is_ascii_digit(),
            b'h' => byte.is_ascii_digit() || (b'a'..=b'f').contains(byte),
            other => byte == other,
        });
    fit.then_some(template.len())
}
