//! The lock that every writer of a checkout holds (specification, section 11.1): a file created
//! exclusively, with its owner's token in it, given up only by its owner, taken over when it is older
//! than a minute.
//!
//! Beyond the specification a holder refreshes the file's time, so that it never looks abandoned while
//! at work, and keeps an advisory lock (`flock`) on it, as the portable runtime does, so that engines
//! that know of it see a holder alive however old the file looks. An abandoned lock is taken over in one
//! step (the two files change places), so that one that came alive in between is put back and never
//! deleted. A lock that cannot be opened, as another user's, is judged by its age alone.

use std::fs::File;
use std::io::{ErrorKind, Write as _};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::clock::Clock;
use super::error::VaultError;
use super::plan::text::strip;
use super::stop::Stop;
use super::tree::{Dir, Kind, Tree, modified, temporary_name};
use crate::identity::entropy::Entropy;

/// The runtime's folder.
pub const FOLDER: &str = ".echoes-vault";
/// The lock in it.
pub const NAME: &str = "lock";
/// Its path from the root.
pub const PATH: &str = ".echoes-vault/lock";

/// How long a writer waits for another one (specification).
const PATIENCE: Duration = Duration::from_secs(8);
/// From which age on a lock counts as abandoned (specification).
const STALE: Duration = Duration::from_secs(60);
/// Pause between two looks.
const POLL: Duration = Duration::from_millis(50);
/// How often a holder refreshes its lock: six times within [`STALE`], so that a slow disk does not
/// make it look abandoned.
const REFRESH: Duration = Duration::from_secs(10);
/// Bytes of a foreign lock that are looked at: a token has under 40.
const MAX_TOKEN: usize = 200;

/// The lock, held until this value goes.
pub struct Lock {
    folder: Dir,
    token: String,
    /// Ends the refreshing thread when it goes.
    stop: Option<mpsc::Sender<()>>,
    refresher: Option<JoinHandle<()>>,
}

/// What tells one lock file from the next.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Identity {
    device: u64,
    inode: u64,
    modified: (i64, i64),
}

/// What stands in the lock's place.
struct Found {
    identity: Identity,
    /// Age by the wall clock; `None` if it is from the future or leads nowhere.
    age: Option<Duration>,
}

impl Lock {
    /// Takes the lock, waiting for another holder if need be.
    ///
    /// # Errors
    /// [`VaultError::Locked`], or what the file system says.
    pub fn acquire(
        tree: &Tree,
        clock: &dyn Clock,
        entropy: &mut dyn Entropy,
        stop: &Stop,
    ) -> Result<Self, VaultError> {
        Self::acquire_refreshing(tree, clock, entropy, stop, REFRESH)
    }

    fn acquire_refreshing(
        tree: &Tree,
        clock: &dyn Clock,
        entropy: &mut dyn Entropy,
        stop: &Stop,
        refresh: Duration,
    ) -> Result<Self, VaultError> {
        let folder = tree.make_folder(FOLDER)?;
        let mut random = [0; 8];
        entropy.fill(&mut random);
        let token = format!("{}-{}", std::process::id(), data_encoding::HEXLOWER.encode(&random));
        let start = clock.elapsed();
        loop {
            stop.check()?;
            match folder.create(NAME) {
                Ok(file) => return Self::own(folder, NAME, token, file, refresh),
                Err(Errno::EXIST) => {}
                Err(error) => return Err(fail("create", error)),
            }
            if let Some(found) = look(tree, &folder, clock)? {
                let old = found.age.is_some_and(|age| age > STALE);
                // The advisory lock lasts as long as the file is open.
                if old && let Some(_advisory) = claim(tree)? {
                    match Self::take_over(&folder, &found, &token, entropy, refresh)? {
                        Some(lock) => return Ok(lock),
                        None => continue,
                    }
                }
                let waited = clock.elapsed().saturating_sub(start);
                if waited >= PATIENCE {
                    return Err(VaultError::Locked {
                        holder: holder(&folder),
                        age: found.age.unwrap_or_default().as_secs(),
                        waited: waited.as_secs(),
                    });
                }
            }
            clock.sleep(POLL);
        }
    }

    /// Writes the token into the file just created under `name` and starts refreshing it.
    fn own(
        folder: Dir,
        name: &str,
        token: String,
        mut file: File,
        refresh: Duration,
    ) -> Result<Self, VaultError> {
        advise(&file);
        if let Err(error) = file.write_all(format!("{token}\n").as_bytes()) {
            // Best effort: an empty lock would only make others wait.
            let _ = folder.remove(name);
            return Err(VaultError::Io { action: "write", path: PATH.into(), source: error });
        }
        let (stop, stopped) = mpsc::channel();
        let refresher = std::thread::Builder::new()
            .name("vault-lock".into())
            .spawn(move || {
                while stopped.recv_timeout(refresh) == Err(mpsc::RecvTimeoutError::Timeout) {
                    // Without it the lock may count as abandoned; `held` notices if it is taken.
                    let _ = file.set_modified(SystemTime::now());
                }
            })
            .map_err(|error| VaultError::Io {
                action: "refresh",
                path: PATH.into(),
                source: error,
            })?;
        Ok(Self { folder, token, stop: Some(stop), refresher: Some(refresher) })
    }

    /// Takes an abandoned lock's place. `None` if it was not abandoned after all, or has gone. The
    /// advisory lock on the abandoned file keeps others from doing the same.
    fn take_over(
        folder: &Dir,
        found: &Found,
        token: &str,
        entropy: &mut dyn Entropy,
        refresh: Duration,
    ) -> Result<Option<Self>, VaultError> {
        let ours = temporary_name(NAME, entropy);
        let file = folder.create(&ours).map_err(|error| fail("create a file beside", error))?;
        let lock = Self::own(folder.again()?, &ours, token.to_owned(), file, refresh)?;
        match folder.exchange(&ours, NAME) {
            Ok(()) => {}
            Err(Errno::NOENT) => {
                let _ = folder.remove(&ours);
                return Ok(lock.discard());
            }
            Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => {
                // No exchange on this file system: look once more, then remove and start again.
                let _ = folder.remove(&ours);
                if identity(folder, NAME)? == Some(found.identity) {
                    folder.remove(NAME).map_err(|error| fail("remove the abandoned", error))?;
                }
                return Ok(lock.discard());
            }
            Err(error) => {
                let _ = folder.remove(&ours);
                return Err(fail("take over", error));
            }
        }
        if identity(folder, &ours)? == Some(found.identity) {
            folder.remove(&ours).map_err(|error| fail("remove the abandoned", error))?;
            return Ok(Some(lock));
        }
        // Somebody else's living lock has come in between: back with it.
        folder.exchange(&ours, NAME).map_err(|error| fail("give back", error))?;
        let _ = folder.remove(&ours);
        Ok(lock.discard())
    }

    /// Ends the refreshing of a lock that never took its place.
    fn discard(mut self) -> Option<Self> {
        self.end_refreshing();
        self.token.clear();
        None
    }

    /// Whether the lock is still ours: asked before every change of a file, because a waiter of another
    /// engine may take a lock away by mistake.
    ///
    /// # Errors
    /// [`VaultError::LockLost`].
    pub fn held(&self) -> Result<(), VaultError> {
        if read(&self.folder).as_deref() == Some(&self.token) {
            Ok(())
        } else {
            Err(VaultError::LockLost)
        }
    }

    fn end_refreshing(&mut self) {
        self.stop = None;
        if let Some(refresher) = self.refresher.take() {
            let _ = refresher.join();
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        if !self.token.is_empty() && self.held().is_ok() {
            // Nothing can be done about a lock that cannot be removed; it will count as abandoned.
            let _ = self.folder.remove(NAME);
        }
        self.end_refreshing();
    }
}

/// Takes the advisory lock on a lock file; whether nobody else has it. File systems without such locks
/// are taken at the file's age.
fn advise(file: &File) -> bool {
    flock(file, FlockOperation::NonBlockingLockExclusive) != Err(Errno::WOULDBLOCK)
}

/// Claims the right to take an old lock over; `None` if its holder lives, or it has gone. Without a file
/// the lock cannot be opened, so that its age alone has decided.
fn claim(tree: &Tree) -> Result<Option<Option<File>>, VaultError> {
    match tree.open_file(PATH) {
        Ok(Some(file)) => Ok(advise(&file).then_some(Some(file))),
        Ok(None) => Ok(None),
        Err(VaultError::Io { source, .. }) if source.kind() == ErrorKind::PermissionDenied => {
            Ok(Some(None))
        }
        Err(error) => Err(error),
    }
}

fn fail(action: &'static str, error: Errno) -> VaultError {
    VaultError::Io { action, path: PATH.into(), source: error.into() }
}

/// The trimmed content of the lock; `None` if it cannot be read as one.
fn read(folder: &Dir) -> Option<String> {
    let bytes = folder.read(NAME).ok()??;
    let text = String::from_utf8(bytes).ok()?;
    (text.len() <= MAX_TOKEN).then(|| strip(&text).to_owned())
}

/// Who holds the lock, for a message.
fn holder(folder: &Dir) -> String {
    let token = read(folder).unwrap_or_default();
    match token.split_once('-') {
        Some((pid, _)) if pid.parse::<u32>().is_ok() => format!("process {pid}"),
        _ => "an unknown process".into(),
    }
}

#[allow(clippy::useless_conversion, clippy::unnecessary_fallible_conversions)] // Widths differ.
fn identity(folder: &Dir, name: &str) -> Result<Option<Identity>, VaultError> {
    Ok(folder.stat(name)?.map(|stat| Identity {
        device: u64::try_from(stat.st_dev).unwrap_or(0),
        inode: stat.st_ino,
        modified: modified(&stat),
    }))
}

/// Looks at what stands in the lock's place; `None` if it has gone.
fn look(tree: &Tree, folder: &Dir, clock: &dyn Clock) -> Result<Option<Found>, VaultError> {
    let Some(identity) = identity(folder, NAME)? else { return Ok(None) };
    let written = match folder.kind(NAME)? {
        Some(Kind::Folder) => return Err(VaultError::NotRegular(PATH.into())),
        // A link's target tells the age.
        Some(Kind::Link) => tree.modified(PATH)?,
        _ => Some(identity.modified),
    };
    let age = written.and_then(|(seconds, nanoseconds)| {
        let since = Duration::new(u64::try_from(seconds).ok()?, u32::try_from(nanoseconds).ok()?);
        clock.now().duration_since(UNIX_EPOCH + since).ok()
    });
    Ok(Some(Found { identity, age }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::entropy::SeededEntropy;
    use jiff::tz::TimeZone;
    use std::fs;
    use std::path::PathBuf;
    use std::sync::atomic::{AtomicU64, Ordering};

    /// A clock that moves only when somebody sleeps.
    struct Turned {
        start: SystemTime,
        millis: AtomicU64,
        at_sleep: Box<dyn Fn(u64) + Send + Sync>,
    }

    impl Turned {
        fn new(at_sleep: impl Fn(u64) + Send + Sync + 'static) -> Self {
            Self {
                start: SystemTime::now(),
                millis: AtomicU64::new(0),
                at_sleep: Box::new(at_sleep),
            }
        }
    }

    impl Clock for Turned {
        fn now(&self) -> SystemTime {
            self.start + self.elapsed()
        }
        fn elapsed(&self) -> Duration {
            Duration::from_millis(self.millis.load(Ordering::SeqCst))
        }
        fn sleep(&self, time: Duration) {
            let now = self.millis.fetch_add(time.as_millis() as u64, Ordering::SeqCst);
            (self.at_sleep)(now);
        }
        fn zone(&self) -> TimeZone {
            TimeZone::UTC
        }
    }

    struct Place {
        _home: tempfile::TempDir,
        tree: Tree,
        lock: PathBuf,
    }

    fn place() -> Place {
        let home = tempfile::tempdir().unwrap();
        let root = home.path().canonicalize().unwrap();
        fs::create_dir(root.join(FOLDER)).unwrap();
        let lock = root.join(PATH);
        Place { _home: home, tree: Tree::open(&root).unwrap(), lock }
    }

    fn age(path: &PathBuf, age: Duration) {
        let file = fs::OpenOptions::new().write(true).open(path).unwrap();
        file.set_modified(SystemTime::now() - age).unwrap();
    }

    fn entropy() -> SeededEntropy {
        SeededEntropy::new(7)
    }

    #[test]
    fn a_lock_carries_its_owner_and_goes_with_it() {
        let place = place();
        let clock = Turned::new(|_| ());
        let lock = Lock::acquire(&place.tree, &clock, &mut entropy(), &Stop::default()).unwrap();
        let text = fs::read_to_string(&place.lock).unwrap();
        let (pid, random) = text.strip_suffix('\n').unwrap().split_once('-').unwrap();
        assert_eq!(pid, std::process::id().to_string());
        assert!(random.len() == 16 && random.bytes().all(|b| b.is_ascii_hexdigit()));
        lock.held().unwrap();
        drop(lock);
        assert!(!place.lock.exists());
    }

    #[test]
    fn a_living_lock_is_waited_for_8_s_and_stays() {
        let place = place();
        fs::write(&place.lock, "4242-0123456789abcdef\n").unwrap();
        let clock = Turned::new(|_| ());
        let error =
            Lock::acquire(&place.tree, &clock, &mut entropy(), &Stop::default()).err().unwrap();
        assert!(matches!(error, VaultError::Locked { .. }), "{error}");
        assert!(error.to_string().contains("process 4242"), "{error}");
        assert_eq!(clock.elapsed(), PATIENCE);
        assert_eq!(fs::read_to_string(&place.lock).unwrap(), "4242-0123456789abcdef\n");
    }

    #[test]
    fn a_lock_is_abandoned_only_after_60_s() {
        let place = place();
        fs::write(&place.lock, "1-0\n").unwrap();
        age(&place.lock, Duration::from_secs(61));
        let clock = Turned::new(|_| panic!("no need to wait"));
        let lock = Lock::acquire(&place.tree, &clock, &mut entropy(), &Stop::default()).unwrap();
        lock.held().unwrap();
        drop(lock);
        assert!(fs::read_dir(place.lock.parent().unwrap()).unwrap().next().is_none());

        fs::write(&place.lock, "1-0\n").unwrap();
        age(&place.lock, Duration::from_secs(57));
        let clock = Turned::new(|_| ());
        let lock = Lock::acquire(&place.tree, &clock, &mut entropy(), &Stop::default()).unwrap();
        assert!(clock.elapsed() > Duration::from_secs(2) && clock.elapsed() < PATIENCE);
        drop(lock);
    }

    #[test]
    fn a_lock_from_the_future_is_alive() {
        let place = place();
        fs::write(&place.lock, "1-0\n").unwrap();
        let file = fs::OpenOptions::new().write(true).open(&place.lock).unwrap();
        file.set_modified(SystemTime::now() + Duration::from_secs(3600)).unwrap();
        let clock = Turned::new(|_| ());
        assert!(Lock::acquire(&place.tree, &clock, &mut entropy(), &Stop::default()).is_err());
        assert!(place.lock.exists());
    }

    #[test]
    fn a_lock_that_comes_alive_during_the_takeover_is_put_back() {
        let place = place();
        fs::write(&place.lock, "1-0\n").unwrap();
        age(&place.lock, Duration::from_secs(90));
        let folder = place.tree.folder(FOLDER).unwrap().unwrap();
        let clock = Turned::new(|_| ());
        let found = look(&place.tree, &folder, &clock).unwrap().unwrap();
        // What was looked at goes, and another writer takes the lock.
        fs::remove_file(&place.lock).unwrap();
        fs::write(&place.lock, "2-0\n").unwrap();
        let taken = Lock::take_over(&folder, &found, "3-0", &mut entropy(), REFRESH).unwrap();
        assert!(taken.is_none());
        assert_eq!(fs::read_to_string(&place.lock).unwrap(), "2-0\n");
        assert_eq!(fs::read_dir(place.lock.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn a_lost_lock_is_noticed_and_the_new_one_left() {
        let place = place();
        let clock = Turned::new(|_| ());
        let lock = Lock::acquire(&place.tree, &clock, &mut entropy(), &Stop::default()).unwrap();
        fs::remove_file(&place.lock).unwrap();
        assert!(matches!(lock.held(), Err(VaultError::LockLost)));
        fs::write(&place.lock, "2-0\n").unwrap();
        assert!(matches!(lock.held(), Err(VaultError::LockLost)));
        drop(lock);
        assert_eq!(fs::read_to_string(&place.lock).unwrap(), "2-0\n");
    }

    #[test]
    fn a_lock_at_work_is_refreshed() {
        let place = place();
        let clock = Turned::new(|_| ());
        let often = Duration::from_millis(5);
        let lock =
            Lock::acquire_refreshing(&place.tree, &clock, &mut entropy(), &Stop::default(), often)
                .unwrap();
        age(&place.lock, Duration::from_secs(3600));
        let deadline = std::time::Instant::now() + Duration::from_secs(10);
        let fresh = || {
            let modified = fs::metadata(&place.lock).unwrap().modified().unwrap();
            modified.elapsed().is_ok_and(|age| age < STALE)
        };
        while !fresh() {
            assert!(std::time::Instant::now() < deadline, "never refreshed");
            std::thread::yield_now();
        }
        drop(lock);
    }

    #[test]
    fn an_old_lock_whose_holder_lives_is_not_taken() {
        let place = place();
        let clock = Turned::new(|_| ());
        let lock = Lock::acquire(&place.tree, &clock, &mut entropy(), &Stop::default()).unwrap();
        age(&place.lock, Duration::from_secs(3600));
        let text = fs::read_to_string(&place.lock).unwrap();
        let error =
            Lock::acquire(&place.tree, &clock, &mut entropy(), &Stop::default()).err().unwrap();
        assert!(matches!(error, VaultError::Locked { .. }), "{error}");
        assert_eq!(fs::read_to_string(&place.lock).unwrap(), text);
        lock.held().unwrap();
    }

    #[test]
    fn a_folder_in_the_locks_place_is_refused() {
        let place = place();
        fs::create_dir(&place.lock).unwrap();
        let clock = Turned::new(|_| ());
        let error =
            Lock::acquire(&place.tree, &clock, &mut entropy(), &Stop::default()).err().unwrap();
        assert_eq!(error.code(), "vault_not_regular");
    }
}
