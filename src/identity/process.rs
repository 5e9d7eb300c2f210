//! What can be known about another process of this machine: whether it lives, when it started, and
//! which boot this is. Behind a trait, so that tests can stage every case.

use crate::codec::time::UnixMillis;

/// When a process started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Started {
    /// The kernel's own stamp (Linux: clock ticks since boot); together with the process id and
    /// the boot it never occurs twice, and no change of the wall clock moves it.
    pub mark: u64,
    /// The same as wall-clock time, for comparison with file times; moves when the clock is set.
    pub at: UnixMillis,
}

/// Whether a process lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Liveness {
    /// Proven: there is no such process, or only its unreaped remains.
    Dead,
    /// There is one, or nothing proves that there is none.
    Alive {
        /// When it started, where that can be known.
        started: Option<Started>,
    },
}

/// This boot of the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Boot {
    /// The kernel's random id for it; no white space.
    pub id: String,
    /// When it began, by the wall clock.
    pub since: UnixMillis,
}

/// Answers about processes.
pub trait Processes {
    /// The id of the asking process.
    fn own_id(&self) -> u32;
    /// Whether process `id` lives. Anything short of proof is [`Liveness::Alive`].
    fn probe(&self, id: u32) -> Liveness;
    /// This boot, where the platform tells.
    fn boot(&self) -> Option<Boot>;
}

/// The operating system's answers. Linux tells everything (`/proc`); other Unix systems tell only
/// whether a process lives.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemProcesses;

impl Processes for SystemProcesses {
    fn own_id(&self) -> u32 {
        std::process::id()
    }

    fn probe(&self, id: u32) -> Liveness {
        let pid = i32::try_from(id).ok().filter(|id| *id > 0);
        let Some(pid) = pid.and_then(rustix::process::Pid::from_raw) else {
            return Liveness::Dead;
        };
        liveness(rustix::process::test_kill_process(pid), || system::stat(id))
    }

    fn boot(&self) -> Option<Boot> {
        system::boot()
    }
}

/// A process above the asking one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ancestor {
    /// Its id.
    pub id: u32,
    /// The name of its program, as the system has it (Linux: 15 bytes).
    pub name: String,
}

/// Ancestors looked at: a harness is a few shells and wrappers away.
const MAX_ANCESTORS: usize = 16;

/// The processes above the asking one, the nearest first; as many as the system tells.
#[must_use]
pub fn ancestors() -> Vec<Ancestor> {
    let mut above = Vec::new();
    let table = system::Parents::read();
    let mut id = std::process::id();
    while above.len() < MAX_ANCESTORS {
        let Some((parent, _)) = table.of(id) else { break };
        let Some((_, name)) = table.of(parent) else { break };
        above.push(Ancestor { id: parent, name });
        id = parent;
    }
    above
}

/// The harness that started the asking program, among its ancestors: the first that is none of the
/// shells and wrappers through which harnesses start programs.
#[must_use]
pub fn harness(ancestors: &[Ancestor]) -> Option<u32> {
    const WRAPPERS: [&str; 10] =
        ["sh", "bash", "dash", "zsh", "fish", "ksh", "env", "timeout", "npx", "uvx"];
    let wraps = |name: &str| {
        let name = name.rsplit('/').next().unwrap_or(name).trim_start_matches('-');
        // npm tells what it runs in its name.
        WRAPPERS.contains(&name) || name.starts_with("npm ") || name == "npm"
    };
    ancestors.iter().find(|ancestor| !wraps(&ancestor.name)).map(|ancestor| ancestor.id)
}

/// State letter and start of a process, as `/proc` tells them.
type Stat = (char, Option<Started>);

fn liveness(signal: rustix::io::Result<()>, stat: impl FnOnce() -> Option<Stat>) -> Liveness {
    // Only "no such process" proves death; EPERM is another user's live process.
    if signal == Err(rustix::io::Errno::SRCH) {
        return Liveness::Dead;
    }
    match stat() {
        // A zombie or a process being removed runs no code and never writes again.
        Some(('Z' | 'X', _)) => Liveness::Dead,
        Some((_, started)) => Liveness::Alive { started },
        None => Liveness::Alive { started: None },
    }
}

#[cfg(target_os = "linux")]
mod system {
    use std::io::Read as _;

    use super::{Boot, Started, Stat};
    use crate::codec::time::UnixMillis;

    /// `/proc/stat` grows with the number of processors; far beyond any real one.
    const MAX_PROC: u64 = 4 * 1024 * 1024;

    fn read(path: &str) -> Option<Vec<u8>> {
        let mut bytes = Vec::new();
        std::fs::File::open(path).ok()?.take(MAX_PROC).read_to_end(&mut bytes).ok()?;
        Some(bytes)
    }

    pub(super) fn stat(id: u32) -> Option<Stat> {
        let hertz = rustix::param::clock_ticks_per_second();
        parse_stat(&read(&format!("/proc/{id}/stat"))?, booted_at(), hertz)
    }

    /// Who started whom: each is looked up when it is asked for.
    pub(super) struct Parents;

    impl Parents {
        pub(super) fn read() -> Self {
            Self
        }

        /// The parent of a process, and its own name.
        pub(super) fn of(&self, id: u32) -> Option<(u32, String)> {
            parse_parent(&read(&format!("/proc/{id}/stat"))?)
        }
    }

    /// Fields 4 (parent) and 2 (name).
    pub(super) fn parse_parent(text: &[u8]) -> Option<(u32, String)> {
        let open = text.iter().position(|byte| *byte == b'(')?.saturating_add(1);
        let close = text.iter().rposition(|byte| *byte == b')')?;
        let name = String::from_utf8_lossy(text.get(open..close)?).into_owned();
        let rest = std::str::from_utf8(text.get(close.saturating_add(1)..)?).ok()?;
        Some((rest.split_ascii_whitespace().nth(1)?.parse().ok()?, name))
    }

    pub(super) fn boot() -> Option<Boot> {
        let id = String::from_utf8(read("/proc/sys/kernel/random/boot_id")?).ok()?;
        let id = id.trim().to_owned();
        let plain = !id.is_empty() && !id.contains(char::is_whitespace);
        Some(Boot { id, since: booted_at()? }).filter(|_| plain)
    }

    /// Start of this boot: the `btime` line, in seconds.
    fn booted_at() -> Option<UnixMillis> {
        let text = read("/proc/stat")?;
        let line = text.split(|byte| *byte == b'\n').find_map(|l| l.strip_prefix(b"btime "))?;
        let seconds: u64 = std::str::from_utf8(line).ok()?.trim().parse().ok()?;
        Some(UnixMillis(seconds.saturating_mul(1000)))
    }

    /// Fields 3 (state) and 22 (start in ticks since boot) of `/proc/ID/stat`; field 2 is a name
    /// in parentheses that may itself hold spaces and parentheses. The state is the first thread's:
    /// where that has ended before others (field 20 counts them), the process lives.
    pub(super) fn parse_stat(text: &[u8], booted: Option<UnixMillis>, hertz: u64) -> Option<Stat> {
        let after_name = text.iter().rposition(|byte| *byte == b')')?.saturating_add(1);
        let rest = std::str::from_utf8(text.get(after_name..)?).ok()?;
        let mut fields = rest.split_ascii_whitespace();
        let state = fields.next()?.chars().next()?;
        let threads = fields.nth(16).and_then(|count| count.parse::<u64>().ok());
        let state = if state == 'Z' && threads > Some(1) { 'S' } else { state };
        let started = fields.nth(1).and_then(|ticks| ticks.parse::<u64>().ok()).and_then(|mark| {
            let since_boot = mark.saturating_mul(1000).checked_div(hertz)?;
            Some(Started { mark, at: booted?.plus(since_boot) })
        });
        Some((state, started))
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    use std::collections::HashMap;
    use std::process::{Command, Stdio};

    use super::{Boot, Stat};

    /// Who started whom, as `ps` tells it: there is no `/proc`.
    pub(super) struct Parents(HashMap<u32, (u32, String)>);

    impl Parents {
        pub(super) fn read() -> Self {
            let listed = Command::new("/bin/ps")
                .args(["-axo", "pid=,ppid=,comm="])
                .stdin(Stdio::null())
                .stderr(Stdio::null())
                .output();
            let text = listed.map(|listed| listed.stdout).unwrap_or_default();
            let line = |line: &str| {
                let (id, rest) = line.trim().split_once(char::is_whitespace)?;
                let (parent, name) = rest.trim().split_once(char::is_whitespace)?;
                Some((id.parse().ok()?, (parent.parse().ok()?, name.trim().to_owned())))
            };
            Self(String::from_utf8_lossy(&text).lines().filter_map(line).collect())
        }

        /// The parent of a process, and its own name.
        pub(super) fn of(&self, id: u32) -> Option<(u32, String)> {
            self.0.get(&id).cloned()
        }
    }

    pub(super) fn stat(_id: u32) -> Option<Stat> {
        None
    }

    pub(super) fn boot() -> Option<Boot> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::Errno;

    #[test]
    fn only_a_missing_process_is_dead() {
        let started = Started { mark: 5, at: UnixMillis(9) };
        let running = || Some(('S', Some(started)));
        assert_eq!(liveness(Err(Errno::SRCH), running), Liveness::Dead);
        let alive = Liveness::Alive { started: Some(started) };
        assert_eq!(liveness(Ok(()), running), alive);
        assert_eq!(liveness(Err(Errno::PERM), running), alive);
        assert_eq!(liveness(Err(Errno::PERM), || None), Liveness::Alive { started: None });
        assert_eq!(liveness(Err(Errno::INVAL), || None), Liveness::Alive { started: None });
        assert_eq!(liveness(Ok(()), || Some(('Z', Some(started)))), Liveness::Dead);
    }

    #[test]
    fn the_harness_is_the_first_ancestor_that_is_no_wrapper() {
        let above = |names: &[&str]| -> Vec<Ancestor> {
            let named =
                |(at, name): (usize, &&str)| Ancestor { id: 100 + at as u32, name: (*name).into() };
            names.iter().enumerate().map(named).collect()
        };
        assert_eq!(harness(&above(&["claude", "zsh", "tmux"])), Some(100));
        assert_eq!(harness(&above(&["sh", "npm exec commsd", "node", "bash"])), Some(102));
        assert_eq!(harness(&above(&["-zsh", "/bin/bash", "/usr/bin/opencode"])), Some(102));
        assert_eq!(harness(&above(&["sh"])), None);
        assert_eq!(harness(&[]), None);
    }

    #[test]
    fn ancestors_begin_with_the_parent() {
        let above = ancestors();
        assert_eq!(above[0].id, std::os::unix::process::parent_id());
        assert!(above.iter().all(|ancestor| !ancestor.name.is_empty()));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_name_may_hold_spaces_and_parentheses() {
        let parsed = system::parse_parent(b"77 (a) b (c)) S 12 77 77 0 -1");
        assert_eq!(parsed, Some((12, "a) b (c)".to_owned())));
        for bad in [&b""[..], b"77", b"77 (a", b"77 (a) S", b"77 (a) S x", b"77 )a( S 1"] {
            assert_eq!(system::parse_parent(bad), None);
        }
    }

    #[test]
    fn numbers_that_are_no_process_are_dead() {
        for id in [0, u32::MAX, 1 << 31] {
            assert_eq!(SystemProcesses.probe(id), Liveness::Dead);
        }
    }

    #[test]
    fn a_child_is_alive_then_a_zombie_then_gone() {
        use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};
        let mut child = std::process::Command::new("cat")
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let id = child.id();
        assert!(matches!(SystemProcesses.probe(id), Liveness::Alive { .. }));
        drop(child.stdin.take());
        // Waits for its end without reaping it.
        let pid = Pid::from_child(&child);
        waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT).unwrap();
        if cfg!(target_os = "linux") {
            assert_eq!(SystemProcesses.probe(id), Liveness::Dead);
        }
        child.wait().unwrap();
        assert_eq!(SystemProcesses.probe(id), Liveness::Dead);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_stat_line_is_read_around_odd_names() {
        let rest = "S 1 8 8 0 -1 4194304 101 0 0 0 0 0 0 0 20 0 1 0 99135 3133440 407";
        let booted = Some(UnixMillis(1_000_000));
        let expected = Some(('S', Some(Started { mark: 99135, at: UnixMillis(1_991_350) })));
        for name in ["cat", "a) Z 1 (b", "tmux: server", ""] {
            let line = format!("8876 ({name}) {rest}\n");
            assert_eq!(system::parse_stat(line.as_bytes(), booted, 100), expected);
        }
        // Gone is who has no thread left but the first.
        let state = |text: &str| system::parse_stat(text.as_bytes(), booted, 100).unwrap().0;
        let zombie = rest.replacen('S', "Z", 1);
        assert_eq!(state(&format!("1 (x) {zombie}")), 'Z');
        assert_eq!(
            state(&format!("1 (x) {}", zombie.replacen(" 20 0 1 0 ", " 20 0 3 0 ", 1))),
            'S'
        );
        let raw = [b"1 (\xff\xfe) ", rest.as_bytes()].concat();
        assert_eq!(system::parse_stat(&raw, booted, 100), expected);
        assert_eq!(system::parse_stat(&raw, None, 100), Some(('S', None)));
        assert_eq!(system::parse_stat(&raw, booted, 0), Some(('S', None)));
        assert_eq!(system::parse_stat(b"1 (x) S 1", booted, 100), Some(('S', None)));
        assert_eq!(system::parse_stat(b"1 (x", booted, 100), None);
        assert_eq!(system::parse_stat(b"1 (x)", booted, 100), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_process_started_between_boot_and_the_files_it_writes() {
        use std::os::unix::fs::MetadataExt as _;
        let boot = SystemProcesses.boot().unwrap();
        assert_eq!(SystemProcesses.boot().unwrap().id, boot.id);
        let Liveness::Alive { started: Some(started) } = SystemProcesses.probe(std::process::id())
        else {
            unreachable!("this process lives and Linux tells its start")
        };
        assert!(started.at >= boot.since);
        let file = tempfile::NamedTempFile::new().unwrap();
        let written = file.as_file().metadata().unwrap().mtime();
        // btime is cut to whole seconds, so allow one.
        assert!(started.at.seconds() <= u64::try_from(written).unwrap() + 1);
    }
}
