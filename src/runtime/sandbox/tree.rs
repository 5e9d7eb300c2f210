//! The processes of this machine as `/proc` shows them: who descends from whom, since when, and what
//! they use. Where there is no `/proc` there are none to see.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use rustix::process::{Pid, Signal, kill_process};

/// Most directory entries counted of a run's directory; one with more counts as over any limit.
const MAX_ENTRIES: usize = 100_000;

/// One process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Process {
    /// Its id.
    pub pid: Pid,
    parent: i32,
    /// Whether only its exit code is left.
    zombie: bool,
    /// Processor time of it and of its children that were waited for, in clock ticks.
    ticks: u64,
    /// Resident pages.
    pages: u64,
}

impl Process {
    /// Reads the line of `/proc/PID/stat`. The name in parentheses may hold anything, so the fields
    /// are counted from its last parenthesis.
    fn parse(stat: &str) -> Option<Self> {
        let pid = Pid::from_raw(stat.split(' ').next()?.parse().ok()?)?;
        let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_ascii_whitespace().collect();
        // proc_pid_stat(5) numbers fields from 1, and the first of these is its third.
        let number = |n: usize| fields.get(n - 3)?.parse::<u64>().ok();
        Some(Self {
            pid,
            parent: fields.get(1)?.parse().ok()?,
            zombie: matches!(*fields.first()?, "Z" | "X"),
            ticks: number(14)? + number(15)? + number(16)? + number(17)?,
            pages: number(24)?,
        })
    }

    /// Sends it a signal; one that is gone needs none.
    pub fn signal(&self, signal: Signal) {
        let _gone = kill_process(self.pid, signal);
    }
}

/// The ids of all processes.
pub(super) fn ids() -> impl Iterator<Item = Pid> {
    fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok().and_then(Pid::from_raw))
}

fn all() -> impl Iterator<Item = Process> {
    ids().filter_map(|pid| {
        let stat = fs::read(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
        Process::parse(&String::from_utf8_lossy(&stat))
    })
}

/// Every living process that descends from `root`, without `root`.
pub(super) fn descendants(root: Pid) -> Vec<Process> {
    let mut children: BTreeMap<i32, Vec<Process>> = BTreeMap::new();
    for process in all() {
        children.entry(process.parent).or_default().push(process);
    }
    let mut found = Vec::new();
    let mut parents = vec![root.as_raw_nonzero().get()];
    while let Some(parent) = parents.pop() {
        // Taken out, so that a circle made of ids that changed hands meanwhile ends.
        for process in children.remove(&parent).unwrap_or_default() {
            parents.push(process.pid.as_raw_nonzero().get());
            found.push(process);
        }
    }
    found.retain(|process| !process.zombie);
    found
}

/// What processes use together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Use {
    /// How many they are.
    pub processes: u64,
    /// Resident bytes.
    pub memory_bytes: u64,
    /// Processor time, ms, with that of the descendants that `root` has waited for.
    pub cpu_ms: u64,
}

/// What the descendants of `root` use, and have used.
pub(super) fn usage(root: Pid, descendants: &[Process]) -> Use {
    let page = u64::try_from(rustix::param::page_size()).unwrap_or(4096);
    let ticks: u64 = descendants.iter().map(|process| process.ticks).sum();
    let waited_for = waited_for_ticks(root);
    let per_second = rustix::param::clock_ticks_per_second().max(1);
    Use {
        processes: u64::try_from(descendants.len()).unwrap_or(u64::MAX),
        memory_bytes: descendants.iter().map(|process| process.pages.saturating_mul(page)).sum(),
        cpu_ms: (ticks + waited_for).saturating_mul(1000) / per_second,
    }
}

/// Clock ticks of the descendants that `pid` has waited for.
fn waited_for_ticks(pid: Pid) -> u64 {
    let read = || {
        let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
        let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_ascii_whitespace().collect();
        Some(fields.get(13)?.parse::<u64>().ok()? + fields.get(14)?.parse::<u64>().ok()?)
    };
    read().unwrap_or(0)
}

/// Bytes on disk of everything below `dir`; `u64::MAX` when there are too many entries to count.
/// Links are not followed.
pub(super) fn disk_bytes(dir: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let (mut bytes, mut entries) = (0_u64, 0);
    let mut dirs = vec![dir.to_owned()];
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(&dir).into_iter().flatten().flatten() {
            entries += 1;
            if entries > MAX_ENTRIES {
                return u64::MAX;
            }
            let Ok(meta) = entry.metadata() else { continue };
            // st_blocks counts 512-byte units whatever the block size of the file system is.
            bytes = bytes.saturating_add(meta.blocks().saturating_mul(512));
            if meta.is_dir() {
                dirs.push(entry.path());
            }
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_parentheses_is_no_trap() {
        let line = "42 (a) S 1 (b)) R 7 42 42 0 -1 0 1 2 3 4 10 20 30 40 20 0 1 0 999 5000 6 0";
        let process = Process::parse(line).unwrap();
        assert_eq!((process.pid, process.parent), (Pid::from_raw(42).unwrap(), 7));
        assert_eq!((process.ticks, process.pages, process.zombie), (100, 6, false));
    }

    #[test]
    fn files_are_counted_and_links_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("a")).unwrap();
        std::fs::write(dir.path().join("a/file"), vec![1; 1 << 20]).unwrap();
        std::os::unix::fs::symlink("/", dir.path().join("a/root")).unwrap();
        let bytes = disk_bytes(dir.path());
        assert!((1 << 20..2 << 20).contains(&bytes), "{bytes}");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_child_is_found_and_its_use_known() {
        let mut child =
            std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        let me = rustix::process::getpid();
        let found = descendants(me);
        assert!(found.iter().any(|p| p.pid == Pid::from_child(&child)));
        assert!(usage(me, &found).processes >= 1);
        drop(child.stdin.take());
        child.wait().unwrap();
        assert!(descendants(me).iter().all(|p| p.pid != Pid::from_child(&child)));
    }
}
