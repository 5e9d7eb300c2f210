//! What a run leaves on record, so that its processes can be found and killed after a crash of the
//! daemon and of the supervisor: ids with their start times, and the random id of the run in the
//! environment of every process. Nothing else is ever killed.

use std::fs;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};

use super::level::run_briefly;
use super::tree;
use crate::identity::process::{Liveness, Processes as _, SystemProcesses};

/// File of a run's directory.
pub(super) const RECORD: &str = "run.json";
/// Variable of every process of a run, with the run's id.
pub(super) const RUN_VARIABLE: &str = "COMMSD_RUN";
/// How long killed processes may take to vanish.
const VANISH: Duration = Duration::from_secs(5);

/// The recorded processes of a run.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Record {
    /// Boot of the machine in which the marks hold.
    boot: Option<String>,
    /// Process id and the kernel's mark of its start; each leads its own group.
    processes: Vec<(u32, u64)>,
    /// Container engine and name of the container.
    pub container: Option<(String, String)>,
}

impl Record {
    /// With this process in it.
    pub fn of_supervisor() -> Self {
        let boot = SystemProcesses.boot().map(|boot| boot.id);
        let mut record = Self { boot, ..Self::default() };
        record.add(rustix::process::getpid());
        record
    }

    /// Adds a process, where it is known when it started.
    pub fn add(&mut self, pid: Pid) {
        let Ok(id) = u32::try_from(pid.as_raw_nonzero().get()) else { return };
        if let Liveness::Alive { started: Some(started) } = SystemProcesses.probe(id) {
            self.processes.push((id, started.mark));
        }
    }

    /// Writes it in place of what is there.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        let new = path.with_extension("new");
        fs::write(&new, serde_json::to_vec(self)?)?;
        fs::rename(&new, path)
    }

    /// The recorded ones that still live.
    fn living(&self) -> Vec<Pid> {
        if self.boot.is_none() || self.boot != SystemProcesses.boot().map(|boot| boot.id) {
            return Vec::new();
        }
        let lives = |(id, mark): &&(u32, u64)| {
            matches!(
                SystemProcesses.probe(*id),
                Liveness::Alive { started: Some(started) } if started.mark == *mark
            )
        };
        let pid = |(id, _): &(u32, u64)| i32::try_from(*id).ok().and_then(Pid::from_raw);
        self.processes.iter().filter(lives).filter_map(pid).collect()
    }
}

/// Processes whose environment carries the run's id.
fn marked(run: &str) -> Vec<Pid> {
    let mark = format!("{RUN_VARIABLE}={run}");
    let carries = |pid: &Pid| {
        fs::read(format!("/proc/{}/environ", pid.as_raw_nonzero()))
            .is_ok_and(|environ| environ.split(|byte| *byte == 0).any(|var| var == mark.as_bytes()))
    };
    tree::ids().filter(carries).collect()
}

/// Kills every process of the run whose directory this is, then removes the directory.
pub(super) fn reap(dir: &Path) {
    let Some(run) = dir.file_name().and_then(|name| name.to_str()) else { return };
    let record: Record = fs::read(dir.join(RECORD))
        .ok()
        .and_then(|bytes| serde_json::from_slice(&bytes).ok())
        .unwrap_or_default();
    let late = Instant::now() + VANISH;
    loop {
        let mut found = record.living();
        for leader in found.clone() {
            found.extend(tree::descendants(leader).iter().map(|process| process.pid));
        }
        found.extend(marked(run));
        for signal in [Signal::STOP, Signal::KILL] {
            for pid in &found {
                let _gone = kill_process(*pid, signal);
            }
        }
        if found.is_empty() || Instant::now() >= late {
            break;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    if let Some((engine, name)) = &record.container {
        let mut command = std::process::Command::new(engine);
        command.args(["rm", "--force", name]);
        let _nothing_left_to_remove = run_briefly(command);
    }
    // What cannot be removed is tried again at the next start.
    let _tried_again = fs::remove_dir_all(dir);
}

/// Kills what is left of earlier runs below `work_dir` and removes their directories. Blocking; for
/// the start of the daemon, before there is any run.
pub fn reap_leftovers(work_dir: &Path) {
    for entry in fs::read_dir(work_dir).into_iter().flatten().flatten() {
        let is_run = entry.file_name().to_str().is_some_and(|name| name.starts_with(super::PREFIX));
        if is_run && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            reap(&entry.path());
        }
    }
}
