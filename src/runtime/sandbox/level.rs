//! Which levels of isolation work on this machine, found by trying each, and which of them a run
//! gets (design 10.1, 10.2).

use std::io::{Read as _, Write as _};
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use super::confine::Confinement;
use super::{FIRST_ARGUMENT, Sandbox, boxes};
use crate::acp::objects::Isolation;

/// What the executable says inside a level, so that another one is not taken for it.
const GREETING: &str = "commsd sandbox 1\n";
/// How long a level may take to be tried.
const PATIENCE: Duration = Duration::from_secs(10);

/// A level and whether it can be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Level {
    /// The level.
    pub isolation: Isolation,
    /// Why it cannot be used; none if it can.
    pub missing: Option<String>,
}

/// Says the greeting: the stage that a level is tried with.
pub(super) fn hello() -> ExitCode {
    match std::io::stdout().write_all(GREETING.as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// Tries every level.
pub(super) fn probe(sandbox: &Sandbox, engine: &Result<boxes::Engine, String>) -> Vec<Level> {
    let executable = &sandbox.executable;
    // Without a supervisor there is no run at all, and the plain stage is what `subprocess` takes.
    let plain = greets(executable, &Confinement { unprivileged: true, ..Confinement::default() });
    let kernel = plain.clone().and_then(|()| greets(executable, &boxes::kernel_trial(executable)));
    let namespace = plain.clone().and_then(|()| {
        let argv = boxes::namespace_trial(executable)?;
        greets(executable, &Confinement { argv, session: true, ..Confinement::default() })
    });
    let oci = plain.clone().and_then(|()| engine.as_ref().map(|_| ()).map_err(Clone::clone));
    let found = [
        (Isolation::Oci, oci),
        (Isolation::Namespace, namespace),
        (Isolation::Kernel, kernel),
        (Isolation::Subprocess, plain.clone()),
        (Isolation::None, plain),
    ];
    found.map(|(isolation, result)| Level { isolation, missing: result.err() }).into()
}

/// Whether the executable greets from within `confinement`; with no program given, itself.
fn greets(executable: &Path, confinement: &Confinement) -> Result<(), String> {
    let mut confinement = confinement.clone();
    if confinement.argv.is_empty() {
        confinement.argv = greeting_argv(executable)?;
    }
    let text = serde_json::to_string(&confinement).map_err(|e| e.to_string())?;
    let mut command = Command::new(executable);
    command.args([FIRST_ARGUMENT, "confine", &text]).env_clear();
    let (said, complaint) = run_briefly(command)?;
    if said == GREETING { Ok(()) } else { Err(complaint) }
}

/// The command line that greets.
pub(super) fn greeting_argv(executable: &Path) -> Result<Vec<String>, String> {
    let path = executable.to_str().ok_or("the path of the executable is not UTF-8")?;
    Ok([path, FIRST_ARGUMENT, "hello"].map(str::to_owned).into())
}

/// Runs `command`, at most for [`PATIENCE`]; its stdout if it succeeded (else empty), and a line for
/// people.
pub(super) fn run_briefly(mut command: Command) -> Result<(String, String), String> {
    /// A trial says one line, an engine a digest.
    const MOST: u64 = 4096;
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|e| format!("cannot be started: {e}"))?;
    let late = Instant::now() + PATIENCE;
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if Instant::now() < late => std::thread::sleep(Duration::from_millis(2)),
            _ => {
                let _ended_already = child.kill();
                let _reaped = child.wait();
                return Err("it did not answer in time".to_owned());
            }
        }
    };
    let mut read = [String::new(), String::new()];
    if let (Some(stdout), Some(stderr)) = (child.stdout.take(), child.stderr.take()) {
        let [out, err] = &mut read;
        let _not_text = stdout.take(MOST).read_to_string(out);
        let _not_text = stderr.take(MOST).read_to_string(err);
    }
    let [out, err] = read;
    let line = err.lines().next().unwrap_or_default();
    let line: String = line.chars().filter(|c| !c.is_control()).take(200).collect();
    let complaint = if line.is_empty() { format!("its trial ended with {status}") } else { line };
    Ok((if status.success() { out } else { String::new() }, complaint))
}
