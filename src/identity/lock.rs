//! Slot locks: which process serves a slot. Files that agent-comms 8.0.8 and 8.7 read and respect
//! (`transport.md` 5.3), with a third line of ours that tells a recycled process id.
//!
//! A lock is removed only when its holder is *proven* dead; whatever cannot be judged is held
//! (`decisions.md` 12). The reference removes some locks that count as held here, for example
//! those of another user's process, so [`HeldLock::still_ours`] is asked before every slot write.

use std::fmt;
use std::io;

use data_encoding::HEXLOWER;

use super::entropy::{Entropy, draw};
use super::files::{BaseDir, FilesError, Secrecy, Stamp};
use super::process::{Boot, Liveness, Processes};
use crate::codec::time::UnixMillis;

/// Largest lock file looked into; ours have about 100 bytes.
const MAX_LOCK: u64 = 4096;

/// Rounds of one claim. Every round but the last saw the lock change under our eyes, so this many
/// mean that something keeps rewriting it.
const ROUNDS: usize = 8;

/// How much later than the lock a process must have started (or the machine booted) to be another
/// one. `/proc` knows boot time to the second, and file times come from a coarser clock; a process
/// id is never used again within this time.
const CLOCK_SLACK_MS: u64 = 5_000;

/// What a takeover file's name adds to the lock's name.
pub const TAKEOVER_SUFFIX: &str = ".takeover";

/// A lock could not be claimed, checked or released.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// A file operation failed.
    #[error(transparent)]
    Files(#[from] FilesError),
    /// The lock changed in every round.
    #[error(
        "the lock {0} kept changing while it was claimed; see which process writes it, or remove it if it is a dangling link"
    )]
    Contended(String),
}

impl LockError {
    /// Stable code of this error.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Files(e) => e.code(),
            Self::Contended(_) => "lock_contended",
        }
    }
}

/// Why a lock counts as held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeldBy {
    /// Its process lives, or may live.
    Process,
    /// This very process claimed it before.
    ThisProcess,
    /// It was written during another boot, but after this one began: by another machine that
    /// shares the directory.
    OtherMachine,
    /// Another process is just replacing a stale lock.
    Takeover,
    /// The file cannot be read, or is not a lock as we know it.
    Unreadable,
}

/// Who holds a lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The process id in the file, where there is one.
    pub pid: Option<u32>,
    /// Why it counts as held.
    pub by: HeldBy,
    /// The lock file (or takeover file).
    pub path: std::path::PathBuf,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = super::files::shown(&self.path);
        let pid = self.pid.unwrap_or_default();
        match self.by {
            HeldBy::Process => write!(f, "process {pid} holds {path}"),
            HeldBy::ThisProcess => write!(f, "this daemon already holds {path}"),
            HeldBy::OtherMachine => write!(
                f,
                "process {pid} of another machine holds {path}; if that machine no longer uses it, remove the file"
            ),
            HeldBy::Takeover => write!(f, "process {pid} is just taking over ({path}); try again"),
            HeldBy::Unreadable => write!(
                f,
                "{path} is no lock that can be read; if no bridge runs in this directory, remove the file"
            ),
        }
    }
}

/// Why a lock's holder is proven dead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stale {
    /// There is no process with that id.
    Dead,
    /// The process with that id started after the lock was written.
    Recycled,
    /// The lock is older than this boot of the machine.
    BeforeBoot,
}

/// The outcome of a claim.
#[derive(Debug)]
pub enum Claim {
    /// The lock is ours now.
    Won {
        /// The lock; dropping it releases it.
        lock: HeldLock,
        /// Why an earlier lock was removed, if there was one.
        replaced: Option<Stale>,
    },
    /// Somebody else's.
    Held(Holder),
}

/// A lock that this process claimed. Dropping it releases it, as far as that is possible without
/// anyone to report to; [`HeldLock::release`] reports. Both block on the disk, and up to two
/// seconds on other commsd processes.
#[derive(Debug)]
pub struct HeldLock {
    dir: BaseDir,
    name: String,
    content: Vec<u8>,
    released: bool,
}

impl HeldLock {
    /// Whether the file still is the one we wrote. A lock that is gone or replaced is not.
    ///
    /// # Errors
    /// [`LockError::Files`] when the file cannot be looked at just now.
    pub fn still_ours(&self) -> Result<bool, LockError> {
        Ok(match self.dir.read(&self.name, MAX_LOCK, Secrecy::Plain) {
            Ok(Some(found)) => *found.bytes == self.content,
            Ok(None) | Err(FilesError::WrongKind { .. } | FilesError::TooLarge { .. }) => false,
            Err(e) => return Err(e.into()),
        })
    }

    /// Where the lock file is.
    #[must_use]
    pub fn path(&self) -> std::path::PathBuf {
        self.dir.file(&self.name)
    }

    /// The directory it is in.
    #[must_use]
    pub fn dir(&self) -> &BaseDir {
        &self.dir
    }

    /// Removes the lock if it still is ours; answers whether it was.
    ///
    /// # Errors
    /// [`LockError`]; the lock is then left as it is.
    pub fn release(mut self) -> Result<bool, LockError> {
        self.released = true;
        self.remove()
    }

    fn remove(&self) -> Result<bool, LockError> {
        let _guard = self.dir.guard()?;
        let ours = self.still_ours()?;
        if ours {
            self.dir.remove(&self.name)?;
        }
        Ok(ours)
    }
}

impl Drop for HeldLock {
    fn drop(&mut self) {
        if !self.released {
            // Nobody to tell: what stays is a lock of a process that soon is provably dead.
            let _ = self.remove();
        }
    }
}

/// Claims the lock `name` (see `SlotName::lock_file`) in `dir`, removing one whose holder is
/// proven dead. Blocks on the disk, and up to two seconds on other commsd processes.
///
/// # Errors
/// [`LockError`]. A held lock is no error but [`Claim::Held`].
pub fn claim(
    dir: &BaseDir,
    name: &str,
    processes: &dyn Processes,
    entropy: &mut dyn Entropy,
) -> Result<Claim, LockError> {
    let content = content(processes, entropy);
    let mut replaced = None;
    // Serves commsd processes and threads among each other; towards the reference the exclusive
    // link and the takeover file decide.
    let _guard = dir.guard()?;
    for _ in 0..ROUNDS {
        if dir.create(name, &content)? {
            let lock = HeldLock { dir: dir.clone(), name: name.into(), content, released: false };
            return Ok(Claim::Won { lock, replaced });
        }
        let Some(found) = Found::read(dir, name)? else { continue };
        let why = match judge(&found, processes) {
            Verdict::Held(pid, by) => {
                return Ok(Claim::Held(Holder { pid, by, path: dir.file(name) }));
            }
            Verdict::Stale(why) => why,
        };
        match remove_stale(dir, name, &found, &content, processes)? {
            Removal::Removed => replaced = Some(why),
            Removal::Changed => {}
            Removal::Busy(holder) => return Ok(Claim::Held(holder)),
        }
    }
    Err(LockError::Contended(super::files::shown(&dir.file(name))))
}

/// Process id, nonce, and where the platform tells them the process's start and the boot's id;
/// the reference reads the leading integer only.
fn content(processes: &dyn Processes, entropy: &mut dyn Entropy) -> Vec<u8> {
    let pid = processes.own_id();
    let nonce = HEXLOWER.encode(&draw::<16>(entropy));
    let mut text = format!("{pid}\n{nonce}\n");
    if let (Liveness::Alive { started: Some(started) }, Some(boot)) =
        (processes.probe(pid), processes.boot())
    {
        text.push_str(&format!("{} {}\n", started.mark, boot.id));
    }
    text.into_bytes()
}

/// A lock file as found.
#[derive(PartialEq, Eq)]
struct Found {
    /// Content and state; `None` when it cannot be read as a file.
    file: Option<(Vec<u8>, Stamp)>,
}

impl Found {
    fn read(dir: &BaseDir, name: &str) -> Result<Option<Self>, FilesError> {
        match dir.read(name, MAX_LOCK, Secrecy::Plain) {
            Ok(found) => {
                Ok(found.map(|found| Self { file: Some((found.bytes.to_vec(), found.stamp)) }))
            }
            Err(FilesError::WrongKind { .. } | FilesError::TooLarge { .. }) => {
                Ok(Some(Self { file: None }))
            }
            Err(FilesError::Io { source, .. })
                if source.kind() == io::ErrorKind::PermissionDenied =>
            {
                Ok(Some(Self { file: None }))
            }
            Err(e) => Err(e),
        }
    }
}

/// Whether a file was written clearly before `time`.
fn before(stamp: &Stamp, time: UnixMillis) -> bool {
    stamp.modified().plus(CLOCK_SLACK_MS) < time
}

/// What the lines of a lock say.
#[derive(Debug, PartialEq, Eq)]
struct Mark<'a> {
    pid: u32,
    /// Our third line: the process's start and the boot's id.
    birth: Option<(u64, &'a str)>,
}

impl<'a> Mark<'a> {
    /// Reads the first line as a process id and, where it has our form, the third as its birth.
    /// Lines that a later version adds are ignored; a first line of any other form is foreign.
    fn parse(bytes: &'a [u8]) -> Option<Self> {
        let mut lines = std::str::from_utf8(bytes).ok()?.split('\n');
        let first = lines.next().filter(|line| line.bytes().all(|byte| byte.is_ascii_digit()))?;
        let pid: u32 = first.parse().ok()?;
        if pid == 0 || i32::try_from(pid).is_err() {
            return None;
        }
        let birth = lines.nth(1).and_then(|line| {
            let (mark, boot) = line.split_once(' ')?;
            Some((mark.parse().ok()?, boot))
        });
        Some(Self { pid, birth })
    }
}

enum Verdict {
    Held(Option<u32>, HeldBy),
    Stale(Stale),
}

fn judge(found: &Found, processes: &dyn Processes) -> Verdict {
    let boot = processes.boot();
    let Some((bytes, stamp)) = &found.file else {
        return Verdict::Held(None, HeldBy::Unreadable);
    };
    let before_boot = boot.as_ref().is_some_and(|boot| before(stamp, boot.since));
    let Some(Mark { pid, birth }) = Mark::parse(bytes) else {
        // A power cut can leave a file empty or full of zeros; what was running then is not now.
        let torn = bytes.iter().all(|byte| *byte == 0);
        return match torn && before_boot {
            true => Verdict::Stale(Stale::BeforeBoot),
            false => Verdict::Held(None, HeldBy::Unreadable),
        };
    };
    match (birth, boot) {
        (Some((mark, written)), Some(Boot { id, .. })) => {
            if written != id {
                return match before_boot {
                    true => Verdict::Stale(Stale::BeforeBoot),
                    false => Verdict::Held(Some(pid), HeldBy::OtherMachine),
                };
            }
            match processes.probe(pid) {
                Liveness::Dead => Verdict::Stale(Stale::Dead),
                Liveness::Alive { started: Some(started) } if started.mark != mark => {
                    Verdict::Stale(Stale::Recycled)
                }
                Liveness::Alive { .. } if pid == processes.own_id() => {
                    Verdict::Held(Some(pid), HeldBy::ThisProcess)
                }
                Liveness::Alive { .. } => Verdict::Held(Some(pid), HeldBy::Process),
            }
        }
        _ => judge_by_time(stamp, pid, before_boot, processes),
    }
}

/// Judges a lock without our third line, as the reference writes it. All there is to compare is
/// wall-clock time, so a clock that was set forward after the lock was written can mislead this;
/// our own locks do not depend on it.
fn judge_by_time(stamp: &Stamp, pid: u32, before_boot: bool, processes: &dyn Processes) -> Verdict {
    let started = match processes.probe(pid) {
        Liveness::Dead => return Verdict::Stale(Stale::Dead),
        Liveness::Alive { started } => started,
    };
    if pid == processes.own_id() {
        // Where starts are known, our own locks carry the third line, so this is an earlier
        // process with our id. Elsewhere it may be ours.
        return match started {
            Some(_) => Verdict::Stale(Stale::Recycled),
            None => Verdict::Held(Some(pid), HeldBy::ThisProcess),
        };
    }
    if before_boot {
        Verdict::Stale(Stale::BeforeBoot)
    } else if started.is_some_and(|started| before(stamp, started.at)) {
        Verdict::Stale(Stale::Recycled)
    } else {
        Verdict::Held(Some(pid), HeldBy::Process)
    }
}

enum Removal {
    Removed,
    Changed,
    Busy(Holder),
}

/// Removes the stale lock as 8.7 does: while holding its takeover file, and only if it still has
/// the judged content. The caller then claims like everybody else.
fn remove_stale(
    dir: &BaseDir,
    name: &str,
    judged: &Found,
    content: &[u8],
    processes: &dyn Processes,
) -> Result<Removal, LockError> {
    let takeover = format!("{name}{TAKEOVER_SUFFIX}");
    if dir.create(&takeover, content)? {
        let removed = remove_if_same(dir, name, judged);
        dir.remove(&takeover)?;
        return Ok(if removed? { Removal::Removed } else { Removal::Changed });
    }
    let Some(found) = Found::read(dir, &takeover)? else { return Ok(Removal::Changed) };
    match judge(&found, processes) {
        Verdict::Held(pid, by) => {
            let by = if by == HeldBy::Process { HeldBy::Takeover } else { by };
            Ok(Removal::Busy(Holder { pid, by, path: dir.file(&takeover) }))
        }
        Verdict::Stale(_) => {
            remove_if_same(dir, &takeover, &found)?;
            Ok(Removal::Changed)
        }
    }
}

fn remove_if_same(dir: &BaseDir, name: &str, judged: &Found) -> Result<bool, LockError> {
    // Same bytes in another file would be a new claim by a process with the recycled id.
    let same = Found::read(dir, name)?.as_ref() == Some(judged);
    if same {
        dir.remove(name)?;
    }
    Ok(same)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::io::{BufRead as _, Write as _};
    use std::process::{Command, Stdio};
    use std::time::{Duration, SystemTime};

    use super::*;
    use crate::identity::entropy::{OsEntropy, SeededEntropy};
    use crate::identity::process::{Started, SystemProcesses};

    const NAME: &str = "identity-mcp--_home_u_proj.lock";
    const OWN: u32 = 4000;
    /// The tests' machine booted then; lock files are dated relative to it.
    const BOOT: UnixMillis = UnixMillis(1_700_000_000_000);
    const HOUR: u64 = 3_600_000;

    /// A staged machine: processes that are not listed are dead.
    struct Stage {
        alive: HashMap<u32, Option<Started>>,
        boot: Option<Boot>,
    }

    impl Stage {
        fn new() -> Self {
            let boot = Boot { id: "boot-a".to_owned(), since: BOOT };
            Self { alive: HashMap::new(), boot: Some(boot) }.with(OWN, started(77, 10 * HOUR))
        }

        fn with(mut self, pid: u32, started: Option<Started>) -> Self {
            self.alive.insert(pid, started);
            self
        }
    }

    #[expect(clippy::unnecessary_wraps, reason = "the value that Stage::with takes")]
    fn started(mark: u64, after_boot: u64) -> Option<Started> {
        Some(Started { mark, at: BOOT.plus(after_boot) })
    }

    impl Processes for Stage {
        fn own_id(&self) -> u32 {
            OWN
        }
        fn probe(&self, id: u32) -> Liveness {
            match self.alive.get(&id) {
                Some(started) => Liveness::Alive { started: *started },
                None => Liveness::Dead,
            }
        }
        fn boot(&self) -> Option<Boot> {
            self.boot.clone()
        }
    }

    fn base() -> (tempfile::TempDir, BaseDir) {
        let temp = tempfile::tempdir().unwrap();
        let dir = BaseDir::open(&temp.path().join("base")).unwrap();
        (temp, dir)
    }

    /// Writes a lock file as another process would have, dated `at`.
    fn leave(dir: &BaseDir, name: &str, content: &[u8], at: UnixMillis) {
        let mut file = std::fs::File::create(dir.file(name)).unwrap();
        file.write_all(content).unwrap();
        file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_millis(at.0)).unwrap();
    }

    fn entropy() -> SeededEntropy {
        SeededEntropy::new(1)
    }

    fn names(dir: &BaseDir) -> Vec<String> {
        let entries = std::fs::read_dir(dir.path()).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    fn won(claim: Claim) -> (HeldLock, Option<Stale>) {
        match claim {
            Claim::Won { lock, replaced } => (lock, replaced),
            Claim::Held(holder) => panic!("{holder}"),
        }
    }

    fn held(claim: Claim) -> Holder {
        match claim {
            Claim::Held(holder) => holder,
            Claim::Won { .. } => panic!("won"),
        }
    }

    #[test]
    fn the_file_is_pid_nonce_and_birth() {
        let (_temp, dir) = base();
        let (lock, replaced) = won(claim(&dir, NAME, &Stage::new(), &mut entropy()).unwrap());
        assert_eq!(replaced, None);
        let text = std::fs::read_to_string(lock.path()).unwrap();
        let lines: Vec<_> = text.split('\n').collect();
        let [pid, nonce, birth, ""] = lines[..] else { panic!("{text}") };
        assert_eq!((pid, birth), ("4000", "77 boot-a"));
        assert!(nonce.len() == 32 && nonce.bytes().all(|b| b.is_ascii_hexdigit()));
        assert_eq!(names(&dir), [NAME]);
        assert!(lock.still_ours().unwrap());
        assert!(lock.release().unwrap());
        assert!(names(&dir).is_empty());
    }

    #[test]
    fn where_starts_are_unknown_the_form_is_that_of_8_7() {
        let (_temp, dir) = base();
        let stage = Stage { boot: None, ..Stage::new().with(OWN, None) };
        let (lock, _) = won(claim(&dir, NAME, &stage, &mut entropy()).unwrap());
        assert_eq!(std::fs::read_to_string(lock.path()).unwrap().lines().count(), 2);
        let holder = held(claim(&dir, NAME, &stage, &mut entropy()).unwrap());
        assert_eq!(holder.by, HeldBy::ThisProcess);
    }

    #[test]
    fn only_a_proven_death_frees_a_lock() {
        use HeldBy::{OtherMachine, Process, ThisProcess, Unreadable};
        use Stale::{BeforeBoot, Dead, Recycled};
        let nonce = "00112233445566778899aabbccddeeff";
        let plain = |pid: u32| format!("{pid}\n");
        let ours = |pid: u32, birth: &str| format!("{pid}\n{nonce}\n{birth}\n");
        let at = BOOT.plus(5 * HOUR);
        let old = UnixMillis(BOOT.0 - HOUR);
        let early = started(3, HOUR);
        let late = started(9, 6 * HOUR);
        let stage = Stage::new;
        type Case = (&'static str, String, UnixMillis, Stage, Result<Stale, HeldBy>);
        let cases: Vec<Case> = vec![
            ("8.0.8, dead", plain(50), at, stage(), Ok(Dead)),
            ("8.7, dead", format!("50\n{nonce}\n"), at, stage(), Ok(Dead)),
            ("later version, dead", format!("50\n{nonce}\nx\ny\n"), at, stage(), Ok(Dead)),
            ("8.0.8, alive", plain(50), at, stage().with(50, early), Err(Process)),
            ("another user's", plain(50), at, stage().with(50, None), Err(Process)),
            (
                "another user's, from before boot",
                plain(50),
                old,
                stage().with(50, None),
                Ok(BeforeBoot),
            ),
            ("recycled", plain(50), at, stage().with(50, late), Ok(Recycled)),
            (
                "started just now",
                plain(50),
                at,
                stage().with(50, started(4, 5 * HOUR + 4_000)),
                Err(Process),
            ),
            (
                "started clearly later",
                plain(50),
                at,
                stage().with(50, started(4, 5 * HOUR + 6_000)),
                Ok(Recycled),
            ),
            ("our id, earlier process", plain(OWN), at, stage(), Ok(Recycled)),
            (
                "our id, platform tells nothing",
                plain(OWN),
                at,
                stage().with(OWN, None),
                Err(ThisProcess),
            ),
            ("ours", ours(OWN, "77 boot-a"), at, stage(), Err(ThisProcess)),
            ("our id, earlier incarnation", ours(OWN, "76 boot-a"), at, stage(), Ok(Recycled)),
            ("commsd, alive", ours(50, "3 boot-a"), at, stage().with(50, early), Err(Process)),
            ("commsd, dead", ours(50, "3 boot-a"), at, stage(), Ok(Dead)),
            ("commsd, recycled", ours(50, "2 boot-a"), at, stage().with(50, early), Ok(Recycled)),
            (
                "commsd, alive, clock set forward",
                ours(50, "3 boot-a"),
                old,
                stage().with(50, late.map(|s| Started { mark: 3, ..s })),
                Err(Process),
            ),
            (
                "commsd, alive, start hidden",
                ours(50, "3 boot-a"),
                at,
                stage().with(50, None),
                Err(Process),
            ),
            (
                "other boot, before this one",
                ours(50, "3 boot-b"),
                old,
                stage().with(50, early),
                Ok(BeforeBoot),
            ),
            ("other machine", ours(50, "3 boot-b"), at, stage(), Err(OtherMachine)),
            (
                "boot unknown, dead",
                ours(50, "3 boot-b"),
                at,
                Stage { boot: None, ..stage() },
                Ok(Dead),
            ),
            ("empty", String::new(), at, stage(), Err(Unreadable)),
            ("empty since a power cut", String::new(), old, stage(), Ok(BeforeBoot)),
            ("zeros since a power cut", "\0\0\0".to_owned(), old, stage(), Ok(BeforeBoot)),
            ("words", "held by me\n".to_owned(), old, stage(), Err(Unreadable)),
            ("leading space", " 50\n".to_owned(), at, stage(), Err(Unreadable)),
            ("trailing letters", "50abc\n".to_owned(), at, stage(), Err(Unreadable)),
            ("negative", "-50\n".to_owned(), at, stage(), Err(Unreadable)),
            ("zero", "0\n".to_owned(), at, stage(), Err(Unreadable)),
            (
                "no process id is that large",
                "99999999999\n".to_owned(),
                at,
                stage(),
                Err(Unreadable),
            ),
            ("beyond the signed range", "4294967295\n".to_owned(), at, stage(), Err(Unreadable)),
            ("too long", "5".repeat(5000), at, stage(), Err(Unreadable)),
        ];
        for (case, content, at, stage, expected) in cases {
            let (_temp, dir) = base();
            leave(&dir, NAME, content.as_bytes(), at);
            match claim(&dir, NAME, &stage, &mut entropy()).unwrap() {
                Claim::Won { lock, replaced } => {
                    assert_eq!(replaced.ok_or(HeldBy::Process), expected, "{case}");
                    assert!(lock.still_ours().unwrap());
                }
                Claim::Held(holder) => {
                    assert_eq!(Err(holder.by), expected, "{case}");
                    assert_eq!(std::fs::read(dir.file(NAME)).unwrap(), content.as_bytes());
                    let pid = expected != Err(HeldBy::Unreadable);
                    assert_eq!(holder.pid.is_some(), pid, "{case}");
                    assert!(holder.to_string().contains(NAME));
                }
            }
            assert!(names(&dir).len() <= 1, "{case}: only the lock may be left");
        }
    }

    #[test]
    fn a_folder_or_a_closed_file_in_the_locks_place_is_held() {
        use std::os::unix::fs::PermissionsExt as _;
        let (_temp, dir) = base();
        std::fs::create_dir(dir.file(NAME)).unwrap();
        let holder = held(claim(&dir, NAME, &Stage::new(), &mut entropy()).unwrap());
        assert_eq!((holder.pid, holder.by), (None, HeldBy::Unreadable));
        std::fs::remove_dir(dir.file(NAME)).unwrap();
        if rustix::process::geteuid().is_root() {
            println!("skipped in part: root reads files of mode 000");
            return;
        }
        leave(&dir, NAME, b"50\n", BOOT);
        std::fs::set_permissions(dir.file(NAME), std::fs::Permissions::from_mode(0o000)).unwrap();
        let holder = held(claim(&dir, NAME, &Stage::new(), &mut entropy()).unwrap());
        assert_eq!((holder.pid, holder.by), (None, HeldBy::Unreadable));
    }

    #[test]
    fn a_dangling_link_is_reported_not_followed_for_ever() {
        let (_temp, dir) = base();
        std::os::unix::fs::symlink("nowhere", dir.file(NAME)).unwrap();
        let error = claim(&dir, NAME, &Stage::new(), &mut entropy()).unwrap_err();
        assert_eq!(error.code(), "lock_contended");
    }

    #[test]
    fn a_takeover_in_progress_is_respected_and_a_dead_one_cleared() {
        let (_temp, dir) = base();
        let takeover = format!("{NAME}{TAKEOVER_SUFFIX}");
        let at = BOOT.plus(5 * HOUR);
        leave(&dir, NAME, b"50\n", at);
        leave(&dir, &takeover, b"60\nffffffffffffffffffffffffffffffff\n", at);
        let busy = Stage::new().with(60, started(1, HOUR));
        let holder = held(claim(&dir, NAME, &busy, &mut entropy()).unwrap());
        assert_eq!((holder.pid, holder.by), (Some(60), HeldBy::Takeover));
        assert_eq!(std::fs::read(dir.file(NAME)).unwrap(), b"50\n");

        let (lock, replaced) = won(claim(&dir, NAME, &Stage::new(), &mut entropy()).unwrap());
        assert_eq!(replaced, Some(Stale::Dead));
        assert_eq!(names(&dir), [NAME]);
        drop(lock);
        assert!(names(&dir).is_empty(), "dropping releases");
    }

    #[test]
    fn a_lock_that_is_no_longer_ours_is_noticed_and_left_alone() {
        let (_temp, dir) = base();
        let stage = Stage::new();
        let claimed =
            |seed| won(claim(&dir, NAME, &stage, &mut SeededEntropy::new(seed)).unwrap()).0;
        // Deleted by a reference process that took us for dead.
        let lock = claimed(1);
        dir.remove(NAME).unwrap();
        assert!(!lock.still_ours().unwrap());
        assert!(!lock.release().unwrap());
        // Replaced, even by a claim with our own process id.
        let lock = claimed(2);
        leave(&dir, NAME, b"4000\n", BOOT);
        assert!(!lock.still_ours().unwrap());
        assert!(!lock.release().unwrap());
        assert_eq!(std::fs::read(dir.file(NAME)).unwrap(), b"4000\n");
        // Replaced by something that is no file.
        dir.remove(NAME).unwrap();
        let lock = claimed(3);
        dir.remove(NAME).unwrap();
        std::fs::create_dir(dir.file(NAME)).unwrap();
        assert!(!lock.still_ours().unwrap());
        drop(lock);
        assert!(dir.file(NAME).is_dir());
    }

    #[test]
    fn a_stale_lock_that_changes_under_our_eyes_stays() {
        let (_temp, dir) = base();
        leave(&dir, NAME, b"50\n", BOOT);
        let judged = Found::read(&dir, NAME).unwrap().unwrap();
        // The same process id, recycled, claims in the same words.
        dir.remove(NAME).unwrap();
        assert!(dir.create(NAME, b"50\n").unwrap());
        assert!(!remove_if_same(&dir, NAME, &judged).unwrap());
        assert_eq!(names(&dir), [NAME]);
    }

    /// Two threads claim at once: one wins, the other is told who holds it.
    fn race(prepare: impl Fn(&BaseDir), rounds: u64) {
        let (_temp, dir) = base();
        let stage = Stage::new();
        let barrier = std::sync::Barrier::new(2);
        for round in 0..rounds {
            prepare(&dir);
            let attempt = |seed| {
                barrier.wait();
                claim(&dir, NAME, &stage, &mut SeededEntropy::new(seed)).unwrap()
            };
            let claims = std::thread::scope(|scope| {
                let a = scope.spawn(|| attempt(2 * round));
                let b = scope.spawn(|| attempt(2 * round + 1));
                [a.join().unwrap(), b.join().unwrap()]
            });
            let wins = claims.iter().filter(|claim| matches!(claim, Claim::Won { .. })).count();
            assert_eq!(wins, 1, "round {round}");
            for claim in claims {
                match claim {
                    Claim::Won { lock, .. } => {
                        assert!(lock.still_ours().unwrap());
                        assert!(lock.release().unwrap());
                    }
                    Claim::Held(holder) => assert_eq!(holder.by, HeldBy::ThisProcess),
                }
            }
        }
    }

    #[test]
    fn two_claimants_never_both_win_a_free_lock() {
        race(|_| {}, 200);
    }

    #[test]
    fn two_claimants_never_both_win_a_stale_lock() {
        let takeover = format!("{NAME}{TAKEOVER_SUFFIX}");
        race(
            |dir| {
                leave(dir, NAME, b"50\n", BOOT);
                leave(dir, &takeover, b"51\n", BOOT);
            },
            200,
        );
    }

    #[test]
    fn a_claimant_of_the_references_kind_and_ours_never_both_win() {
        // 8.0.8's way: link a full temporary file to the lock's name, nothing else.
        let (_temp, dir) = base();
        let stage = Stage::new().with(50, started(1, HOUR));
        let barrier = std::sync::Barrier::new(2);
        for round in 0..200 {
            let (theirs, ours) = std::thread::scope(|scope| {
                let theirs = scope.spawn(|| {
                    let temp = dir.file(&format!("{NAME}.50.tmp"));
                    std::fs::write(&temp, "50\n").unwrap();
                    barrier.wait();
                    let won = std::fs::hard_link(&temp, dir.file(NAME)).is_ok();
                    std::fs::remove_file(temp).unwrap();
                    won
                });
                let ours = scope.spawn(|| {
                    barrier.wait();
                    claim(&dir, NAME, &stage, &mut SeededEntropy::new(round)).unwrap()
                });
                (theirs.join().unwrap(), ours.join().unwrap())
            });
            match ours {
                Claim::Won { lock, .. } => assert!(!theirs && lock.release().unwrap()),
                Claim::Held(holder) => {
                    assert!(theirs && holder.pid == Some(50));
                    dir.remove(NAME).unwrap();
                }
            }
        }
    }

    const HELPER_DIR: &str = "COMMSD_TEST_LOCK_DIR";

    /// Not a test of its own: the body of the second process in the test below.
    #[test]
    fn helper_that_claims_and_waits() {
        let Some(dir) = std::env::var_os(HELPER_DIR) else { return };
        let dir = BaseDir::open(std::path::Path::new(&dir)).unwrap();
        let mut entropy = OsEntropy::open().unwrap();
        let (_lock, _) = won(claim(&dir, NAME, &SystemProcesses, &mut entropy).unwrap());
        println!("claimed");
        std::io::stdin().lines().for_each(drop);
    }

    #[test]
    fn a_killed_process_frees_its_lock() {
        let (_temp, dir) = base();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--nocapture", "identity::lock::tests::helper_that_claims_and_waits"])
            .env(HELPER_DIR, dir.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = std::io::BufReader::new(child.stdout.take().unwrap());
        let claimed = output.lines().any(|line| line.unwrap().ends_with("claimed"));
        assert!(claimed, "the helper ended early");
        let mut entropy = OsEntropy::open().unwrap();
        let holder = held(claim(&dir, NAME, &SystemProcesses, &mut entropy).unwrap());
        assert_eq!((holder.pid, holder.by), (Some(child.id()), HeldBy::Process));
        child.kill().unwrap();
        child.wait().unwrap();
        let (lock, replaced) = won(claim(&dir, NAME, &SystemProcesses, &mut entropy).unwrap());
        assert_eq!(replaced, Some(Stale::Dead));
        let holder = held(claim(&dir, NAME, &SystemProcesses, &mut entropy).unwrap());
        assert_eq!((holder.pid, holder.by), (Some(std::process::id()), HeldBy::ThisProcess));
        assert!(lock.release().unwrap());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_live_process_that_is_younger_than_the_lock_is_another_one() {
        let (_temp, dir) = base();
        let mut child =
            Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let Liveness::Alive { started: Some(started) } = SystemProcesses.probe(child.id()) else {
            panic!("Linux tells a child's start")
        };
        let mut entropy = OsEntropy::open().unwrap();
        leave(&dir, NAME, format!("{}\n", child.id()).as_bytes(), started.at.plus(1000));
        let holder = held(claim(&dir, NAME, &SystemProcesses, &mut entropy).unwrap());
        assert_eq!(holder.by, HeldBy::Process);
        // Nothing of this machine's present boot may be older than the lock for this case.
        let hour_ago = UnixMillis(started.at.0 - HOUR);
        leave(&dir, NAME, format!("{}\n", child.id()).as_bytes(), hour_ago);
        let (_lock, replaced) = won(claim(&dir, NAME, &SystemProcesses, &mut entropy).unwrap());
        assert!(matches!(replaced, Some(Stale::Recycled | Stale::BeforeBoot)));
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
