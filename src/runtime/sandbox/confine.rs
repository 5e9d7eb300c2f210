//! The last stage before the command: this executable restricts itself and becomes the command.
//! Restrictions are asked for as hard requirements; whatever cannot be applied ends the stage, and
//! nothing runs.

use std::ffi::OsStr;
use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use rustix::process::{Resource, Rlimit, setrlimit};
use serde::{Deserialize, Serialize};

/// Exit code of the stage when nothing ran.
pub(super) const NOT_STARTED: u8 = 125;
/// What its message on stderr begins with. A command that imitates it only spoils its own run.
pub(super) const COMPLAINT: &str = "commsd sandbox: ";

/// What is restricted, and what is run.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Confinement {
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Whether to begin a session, with a process group of its own and no terminal.
    pub session: bool,
    /// Whether nothing that the command runs may gain privileges, and none are kept.
    pub unprivileged: bool,
    /// Limits of each process.
    pub limits: Option<Limits>,
    /// Files and ports that can be reached; none for no rule.
    pub files: Option<Files>,
    /// System calls that are refused; none for no filter.
    pub calls: Option<Sockets>,
}

/// Limits that the kernel keeps for each process.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Limits {
    /// Bytes of private writable memory (RLIMIT_DATA; RLIMIT_AS would end every JavaScript engine).
    pub memory_bytes: u64,
    /// Seconds of processor time.
    pub cpu_s: u64,
    /// Bytes of one file.
    pub file_bytes: u64,
    /// Processes of the user in this user namespace; only where the namespace is the run's own.
    pub processes: Option<u64>,
}

/// Open files of each process; more than any adapter's program was seen to need.
const OPEN_FILES: u64 = 1024;

/// What Landlock lets through.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Files {
    /// Read and run; one that does not exist is left out.
    pub read: Vec<PathBuf>,
    /// Read and write, not run: devices.
    pub devices: Vec<PathBuf>,
    /// Everything.
    pub write: Vec<PathBuf>,
    /// TCP ports that may be connected to.
    pub ports: Vec<u16>,
}

/// Sockets that may be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Sockets {
    /// None but unnamed stream pairs.
    None,
    /// Those, and TCP.
    Tcp,
    /// Any: the network namespace is the run's own.
    Any,
}

/// Runs the stage with the confinement in `text`.
pub(super) fn main(text: &OsStr) -> ExitCode {
    let why = match text.to_str().map(serde_json::from_str::<Confinement>) {
        Some(Ok(confinement)) => confinement.apply(),
        _ => "the stage was started by hand".to_owned(),
    };
    let _nobody_listens = writeln!(std::io::stderr(), "{COMPLAINT}{why}");
    ExitCode::from(NOT_STARTED)
}

impl Confinement {
    /// Applies everything and becomes the command; returns only why it did not.
    fn apply(self) -> String {
        let Some((program, arguments)) = self.argv.split_first() else {
            return "no program".to_owned();
        };
        if let Err(why) = self.restrict() {
            return why;
        }
        let error = Command::new(program).args(arguments).exec();
        format!("the program cannot be run: {error}")
    }

    fn restrict(&self) -> Result<(), String> {
        if self.session {
            rustix::process::setsid().map_err(|e| format!("no session: {e}"))?;
        }
        if let Some(limits) = &self.limits {
            limits.apply()?;
        }
        #[cfg(target_os = "linux")]
        self.restrict_by_kernel()?;
        #[cfg(not(target_os = "linux"))]
        if self.files.is_some() || self.calls.is_some() {
            return Err("this system has neither Landlock nor seccomp".to_owned());
        }
        Ok(())
    }

    #[cfg(target_os = "linux")]
    fn restrict_by_kernel(&self) -> Result<(), String> {
        use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};
        if self.unprivileged {
            rustix::thread::set_no_new_privs(true).map_err(|e| format!("no_new_privs: {e}"))?;
        }
        if let Some(files) = &self.files {
            super::landlock::apply(files).map_err(|e| format!("Landlock: {e}"))?;
        }
        if self.unprivileged {
            let none = CapabilitySet::empty();
            let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
            set_capabilities(None, sets).map_err(|e| format!("capabilities: {e}"))?;
        }
        if self.session {
            // After the capabilities, whose change forgets it. The supervisor's stdin ends with the
            // daemon; this is for a supervisor that is killed itself.
            rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
                .map_err(|e| format!("parent's death: {e}"))?;
        }
        if let Some(sockets) = self.calls {
            super::calls::apply(sockets).map_err(|e| format!("seccomp: {e}"))?;
        }
        Ok(())
    }
}

impl Limits {
    fn apply(&self) -> Result<(), String> {
        let set = |resource, limit: u64, name: &str| {
            // A lower limit that is in force already stays.
            let hard = rustix::process::getrlimit(resource).maximum;
            let limit = hard.map_or(limit, |hard| hard.min(limit));
            let rlimit = Rlimit { current: Some(limit), maximum: Some(limit) };
            setrlimit(resource, rlimit).map_err(|e| format!("{name}: {e}"))
        };
        set(Resource::Core, 0, "core")?;
        set(Resource::Cpu, self.cpu_s, "processor time")?;
        set(Resource::Data, self.memory_bytes, "memory")?;
        set(Resource::Fsize, self.file_bytes, "size of files")?;
        set(Resource::Nofile, OPEN_FILES, "open files")?;
        match self.processes {
            Some(processes) => set(Resource::Nproc, processes, "processes"),
            None => Ok(()),
        }
    }
}
