//! The files under the base directory (`~/.agent-comms`): who may read them, how they are read
//! within limits, replaced as a whole, or created by exactly one process.
//!
//! Two kinds of file ([`Secrecy`]): private keys are refused when group or others may touch them;
//! everything else is read as it is and closed to others at the next write, because every write
//! makes a new file of mode 0600. Calls block on the disk: call them off the event loop.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FlockOperation, OFlags};
use rustix::io::Errno;
use serde_json::{Map, Value};
use zeroize::{Zeroize as _, Zeroizing};

use crate::codec::text::escape_untrusted;
use crate::codec::time::UnixMillis;

/// Largest JSON file read or written. A token is under 1 KiB, so this holds far more than ten
/// thousand of them, and a runaway file cannot exhaust memory.
pub const MAX_FILE: u64 = 16 * 1024 * 1024;

/// Tries for the directory's guard, [`GUARD_POLL`] apart: 2 s together. A holder needs a few disk
/// syncs; one that takes longer is stopped or hangs on its disk.
const GUARD_TRIES: u32 = 200;
const GUARD_POLL: Duration = Duration::from_millis(10);

/// Permission bits of group and others.
const OTHERS: u32 = 0o077;
/// Random characters in a temporary file's name; with prefix and suffix the name stays short, so
/// that it fits wherever the target's name fits.
const TEMP_RANDOM: usize = 12;

/// A file of the base directory could not be used.
#[derive(Debug, thiserror::Error)]
pub enum FilesError {
    /// The operating system refused.
    #[error("cannot {action} {}: {source}", shown(path))]
    Io {
        /// What was tried, as a verb.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The base directory is open to other users.
    #[error(
        "{} has mode {mode:03o}, so other users can reach the keys in it; run: chmod 700 {}",
        shown(path),
        quoted(path)
    )]
    LooseDirectory {
        /// The directory.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// A private-key file is open to other users.
    #[error(
        "{} holds a private key and has mode {mode:03o}; run: chmod 600 {} (if others used this machine meanwhile, remove the file instead: they may know the key)",
        shown(path),
        quoted(path)
    )]
    LooseFile {
        /// The file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// The directory or key file belongs to another user.
    #[error(
        "{} belongs to user id {owner}; run as that user, or give it to yourself with chown",
        shown(path)
    )]
    ForeignOwner {
        /// The file or directory.
        path: PathBuf,
        /// Its owner.
        owner: u32,
    },
    /// Something else than a regular file (or, for the base directory, than a directory).
    #[error("{} is not a {expected}; move it away", shown(path))]
    WrongKind {
        /// The path.
        path: PathBuf,
        /// What it should have been.
        expected: &'static str,
    },
    /// Larger than the limit.
    #[error(
        "{} is larger than {limit} bytes, which no file of this kind should be; look at it and move it away",
        shown(path)
    )]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// The limit in bytes.
        limit: u64,
    },
    /// Not one JSON object.
    #[error("{} is not a JSON object ({reason}); mend it or move it away", shown(path))]
    NotJson {
        /// The file.
        path: PathBuf,
        /// Where reading stopped; never a part of the content.
        reason: String,
    },
    /// Another process has been changing files for longer than two seconds.
    #[error(
        "another process has been changing files in {} for 2 s; try again, and look for a stopped process if it stays so",
        shown(path)
    )]
    Busy {
        /// The base directory.
        path: PathBuf,
    },
}

impl FilesError {
    /// Stable code of this error.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Io { .. } => "file_io",
            Self::LooseDirectory { .. } => "directory_loose",
            Self::LooseFile { .. } => "file_loose",
            Self::ForeignOwner { .. } => "file_foreign_owner",
            Self::WrongKind { .. } => "file_wrong_kind",
            Self::TooLarge { .. } => "file_too_large",
            Self::NotJson { .. } => "file_not_json",
            Self::Busy { .. } => "files_busy",
        }
    }
}

/// `path` fit for a message.
pub(crate) fn shown(path: &Path) -> String {
    escape_untrusted(&path.to_string_lossy())
}

/// `path` as one word of a POSIX shell command.
fn quoted(path: &Path) -> String {
    format!("'{}'", shown(path).replace('\'', r"'\''"))
}

/// What a file holds, which decides how strictly its permissions are judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Secrecy {
    /// A private key: refused unless it is ours (or root's) and closed to group and others.
    Private,
    /// Anything else.
    Plain,
}

/// What tells one state of a file from another: inode, modification time, size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    inode: u64,
    modified: UnixMillis,
    size: u64,
}

impl Stamp {
    fn of(metadata: &std::fs::Metadata) -> Self {
        let seconds = u64::try_from(metadata.mtime()).unwrap_or(0);
        let nanos = u64::try_from(metadata.mtime_nsec()).unwrap_or(0);
        let modified = UnixMillis(seconds.saturating_mul(1000)).plus(nanos / 1_000_000);
        Self { inode: metadata.ino(), modified, size: metadata.len() }
    }

    /// When the file's content was last written.
    #[must_use]
    pub fn modified(&self) -> UnixMillis {
        self.modified
    }
}

/// A file as read.
pub struct Content {
    /// Its bytes; wiped when dropped, since they may be a key.
    pub bytes: Zeroizing<Vec<u8>>,
    /// Its state when read.
    pub stamp: Stamp,
    /// Whether group or others have any permission on it (only possible for [`Secrecy::Plain`]).
    pub loose: bool,
}

/// A JSON object read from a file. Keeps every member in its order; wipes `privateKey` when
/// dropped. Has no `Debug`: it may hold a key.
#[derive(Clone, Default)]
pub struct Document(Map<String, Value>);

impl Document {
    /// Reads one JSON object; the error says where reading stopped, without any content.
    ///
    /// # Errors
    /// The reason, for [`FilesError::NotJson`].
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        match serde_json::from_slice(bytes) {
            Ok(Value::Object(members)) => Ok(Self(members)),
            Ok(_) => Err("the outermost value is something else".to_owned()),
            Err(e) => Err(format!("line {}, column {}", e.line(), e.column())),
        }
    }

    /// Pretty JSON with two spaces and a trailing newline, as the reference writes.
    ///
    /// # Errors
    /// Only what serde_json reports; a JSON value always serialises.
    pub fn to_bytes(&self) -> Result<Zeroizing<Vec<u8>>, serde_json::Error> {
        let mut bytes = Zeroizing::new(serde_json::to_vec_pretty(&self.0)?);
        bytes.push(b'\n');
        Ok(bytes)
    }

    /// A member.
    #[must_use]
    pub fn get(&self, member: &str) -> Option<&Value> {
        self.0.get(member)
    }

    /// A member that is text.
    #[must_use]
    pub fn text(&self, member: &str) -> Option<&str> {
        self.0.get(member).and_then(Value::as_str)
    }

    /// All members in file order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.0.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// Sets a member; an existing one keeps its place.
    pub fn set(&mut self, member: &str, value: Value) {
        self.0.insert(member.to_owned(), value);
    }

    /// Removes a member; the others keep their order.
    pub fn remove(&mut self, member: &str) -> Option<Value> {
        self.0.shift_remove(member)
    }

    /// The entries of a member that is an object; none for anything else.
    pub fn entries(&self, member: &str) -> impl Iterator<Item = (&str, &Value)> {
        let entries = self.0.get(member).and_then(Value::as_object);
        entries.into_iter().flatten().map(|(key, value)| (key.as_str(), value))
    }

    /// One entry of a member that is an object.
    #[must_use]
    pub fn entry(&self, member: &str, key: &str) -> Option<&Value> {
        self.0.get(member)?.as_object()?.get(key)
    }

    /// Sets (or with `None` removes) one entry of a member that is an object; a missing or
    /// wrong-typed member becomes an object first, unless there is nothing to set.
    pub fn set_entry(&mut self, member: &str, key: &str, value: Option<Value>) {
        let object = self.0.get_mut(member).and_then(Value::as_object_mut);
        match (object, value) {
            (Some(object), Some(value)) => {
                object.insert(key.to_owned(), value);
            }
            (Some(object), None) => {
                object.shift_remove(key);
            }
            (None, Some(value)) => {
                let entries = Map::from_iter([(key.to_owned(), value)]);
                self.0.insert(member.to_owned(), Value::Object(entries));
            }
            (None, None) => {}
        }
    }
}

impl Drop for Document {
    fn drop(&mut self) {
        if let Some(Value::String(key)) = self.0.get_mut("privateKey") {
            key.zeroize();
        }
    }
}

/// Reads a file of at most `limit` bytes wherever it is; `None` when there is none.
///
/// # Errors
/// [`FilesError`], permissions judged as `secrecy` asks, on the opened file itself.
pub fn read(path: &Path, limit: u64, secrecy: Secrecy) -> Result<Option<Content>, FilesError> {
    // NONBLOCK: opening a FIFO that somebody put there must not hang.
    let nonblock = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or(0);
    let file = match OpenOptions::new().read(true).custom_flags(nonblock).open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(io_error("open", path, source)),
    };
    let metadata = file.metadata().map_err(|source| io_error("read", path, source))?;
    if !metadata.is_file() {
        return Err(FilesError::WrongKind { path: path.into(), expected: "regular file" });
    }
    let mode = metadata.mode() & 0o777;
    let loose = mode & OTHERS != 0;
    if secrecy == Secrecy::Private {
        check_owner(path, &metadata)?;
        if loose {
            return Err(FilesError::LooseFile { path: path.into(), mode });
        }
    }
    let mut bytes = Zeroizing::new(Vec::new());
    file.take(limit.saturating_add(1))
        .read_to_end(&mut bytes)
        .map_err(|source| io_error("read", path, source))?;
    if bytes.len() as u64 > limit {
        return Err(FilesError::TooLarge { path: path.into(), limit });
    }
    Ok(Some(Content { bytes, stamp: Stamp::of(&metadata), loose }))
}

/// The base directory: ours alone, mode 0700.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BaseDir {
    path: PathBuf,
}

/// Keeps other commsd processes and threads from changing this directory's files; ends when
/// dropped. The reference does not know it.
#[derive(Debug)]
pub struct Guard(
    #[expect(dead_code, reason = "closing the handle releases the lock")] Option<File>,
);

impl BaseDir {
    /// Opens the directory, creating it and missing parents with mode 0700.
    ///
    /// # Errors
    /// [`FilesError::LooseDirectory`], [`FilesError::ForeignOwner`], [`FilesError::WrongKind`],
    /// [`FilesError::Io`]. An existing directory is never re-moded: the user decides.
    pub fn open(path: &Path) -> Result<Self, FilesError> {
        let created = DirBuilder::new().recursive(true).mode(0o700).create(path);
        let metadata = match created.and_then(|()| std::fs::metadata(path)) {
            Ok(metadata) => metadata,
            Err(e)
                if matches!(
                    e.kind(),
                    io::ErrorKind::AlreadyExists | io::ErrorKind::NotADirectory
                ) =>
            {
                return Err(FilesError::WrongKind { path: path.into(), expected: "directory" });
            }
            Err(source) => return Err(io_error("create the directory", path, source)),
        };
        if !metadata.is_dir() {
            return Err(FilesError::WrongKind { path: path.into(), expected: "directory" });
        }
        check_owner(path, &metadata)?;
        let mode = metadata.mode() & 0o777;
        if mode & OTHERS != 0 {
            return Err(FilesError::LooseDirectory { path: path.into(), mode });
        }
        Ok(Self { path: path.into() })
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The path of a file in it.
    #[must_use]
    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Reads a file of at most `limit` bytes; `None` when there is none.
    ///
    /// # Errors
    /// [`FilesError`], permissions judged as `secrecy` asks, on the opened file itself.
    pub fn read(
        &self,
        name: &str,
        limit: u64,
        secrecy: Secrecy,
    ) -> Result<Option<Content>, FilesError> {
        read(&self.file(name), limit, secrecy)
    }

    /// Reads a JSON object, with the file's state.
    ///
    /// # Errors
    /// [`FilesError`]; [`FilesError::NotJson`] names the place, never the content.
    pub fn read_document(
        &self,
        name: &str,
        secrecy: Secrecy,
    ) -> Result<Option<(Document, Content)>, FilesError> {
        let Some(content) = self.read(name, MAX_FILE, secrecy)? else { return Ok(None) };
        let document = Document::parse(&content.bytes)
            .map_err(|reason| FilesError::NotJson { path: self.file(name), reason })?;
        Ok(Some((document, content)))
    }

    /// The file's state without reading it; `None` when there is none.
    ///
    /// # Errors
    /// [`FilesError::Io`].
    pub fn stamp(&self, name: &str) -> Result<Option<Stamp>, FilesError> {
        let path = self.file(name);
        match std::fs::metadata(&path) {
            Ok(metadata) => Ok(Some(Stamp::of(&metadata))),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(io_error("read", &path, source)),
        }
    }

    /// Writes `document` as the file's whole content, mode 0600, synced; a reader sees the old
    /// content or the new, also after a crash.
    ///
    /// # Errors
    /// [`FilesError::TooLarge`] before anything is written, [`FilesError::Io`].
    pub fn write_document(&self, name: &str, document: &Document) -> Result<(), FilesError> {
        let path = self.file(name);
        let temp = self.temp_with(&path, &document_bytes(&path, document)?)?;
        temp.persist(&path).map_err(|e| io_error("replace", &path, e.error))?;
        self.sync()
    }

    /// Creates the file with `document`; `false` when there already is one. Of several processes
    /// exactly one succeeds, and nobody ever sees half a file.
    ///
    /// # Errors
    /// As [`Self::write_document`].
    pub fn create_document(&self, name: &str, document: &Document) -> Result<bool, FilesError> {
        let path = self.file(name);
        self.create(name, &document_bytes(&path, document)?)
    }

    /// Creates the file with `bytes`, as [`Self::create_document`] does.
    ///
    /// # Errors
    /// [`FilesError::Io`].
    pub fn create(&self, name: &str, bytes: &[u8]) -> Result<bool, FilesError> {
        let path = self.file(name);
        let temp = self.temp_with(&path, bytes)?;
        // A hard link is the claim that the reference makes too: it never replaces anything.
        if !link(temp.path(), &path)? {
            return Ok(false);
        }
        drop(temp);
        self.sync()?;
        Ok(true)
    }

    /// Gives the file a second name `to`; `false` when that name is taken.
    ///
    /// # Errors
    /// [`FilesError::Io`].
    pub fn keep_as(&self, name: &str, to: &str) -> Result<bool, FilesError> {
        link(&self.file(name), &self.file(to))
    }

    /// Removes the file; nothing to do when there is none.
    ///
    /// # Errors
    /// [`FilesError::Io`].
    pub fn remove(&self, name: &str) -> Result<(), FilesError> {
        let path = self.file(name);
        match std::fs::remove_file(&path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                Err(io_error("remove", &path, source))
            }
            _ => Ok(()),
        }
    }

    /// Waits at most two seconds for the right to change several files in one step.
    ///
    /// On file systems without such locks the guard guards nothing; every single step stays safe.
    ///
    /// # Errors
    /// [`FilesError::Busy`], [`FilesError::Io`].
    pub fn guard(&self) -> Result<Guard, FilesError> {
        let handle =
            File::open(&self.path).map_err(|source| io_error("open", &self.path, source))?;
        for _ in 0..GUARD_TRIES {
            match rustix::fs::flock(&handle, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Guard(Some(handle))),
                Err(Errno::WOULDBLOCK | Errno::INTR) => std::thread::sleep(GUARD_POLL),
                Err(Errno::NOLCK | Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => {
                    return Ok(Guard(None));
                }
                Err(e) => return Err(io_error("lock", &self.path, e.into())),
            }
        }
        Err(FilesError::Busy { path: self.path.clone() })
    }

    fn temp_with(
        &self,
        target: &Path,
        bytes: &[u8],
    ) -> Result<tempfile::NamedTempFile, FilesError> {
        let failed = |source| io_error("write", target, source);
        // tempfile creates with mode 0600 and O_EXCL, and removes the file on every error path.
        let mut temp = tempfile::Builder::new()
            .prefix(".commsd-")
            .suffix(".tmp")
            .rand_bytes(TEMP_RANDOM)
            .tempfile_in(&self.path)
            .map_err(failed)?;
        temp.write_all(bytes).and_then(|()| temp.as_file().sync_all()).map_err(failed)?;
        Ok(temp)
    }

    fn sync(&self) -> Result<(), FilesError> {
        match File::open(&self.path).and_then(|dir| dir.sync_all()) {
            // Some file systems cannot sync a directory; there is nothing more to do there.
            Err(e)
                if !matches!(
                    e.kind(),
                    io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported
                ) =>
            {
                Err(io_error("sync", &self.path, e))
            }
            _ => Ok(()),
        }
    }
}

fn document_bytes(path: &Path, document: &Document) -> Result<Zeroizing<Vec<u8>>, FilesError> {
    let bytes = document.to_bytes().map_err(|e| io_error("write", path, e.into()))?;
    if bytes.len() as u64 > MAX_FILE {
        return Err(FilesError::TooLarge { path: path.into(), limit: MAX_FILE });
    }
    Ok(bytes)
}

fn link(from: &Path, to: &Path) -> Result<bool, FilesError> {
    match std::fs::hard_link(from, to) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        Err(source) => Err(io_error("create", to, source)),
    }
}

fn check_owner(path: &Path, metadata: &std::fs::Metadata) -> Result<(), FilesError> {
    let owner = metadata.uid();
    // Root can read every file anyway, so what root owns is no more exposed than what we own.
    if owner != 0 && owner != rustix::process::geteuid().as_raw() {
        return Err(FilesError::ForeignOwner { path: path.into(), owner });
    }
    Ok(())
}

fn io_error(action: &'static str, path: &Path, source: io::Error) -> FilesError {
    FilesError::Io { action, path: path.into(), source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    fn base() -> (tempfile::TempDir, BaseDir) {
        let temp = tempfile::tempdir().unwrap();
        let dir = BaseDir::open(&temp.path().join("a/b")).unwrap();
        (temp, dir)
    }

    fn mode(path: &Path) -> u32 {
        std::fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    fn chmod(path: &Path, mode: u32) {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }

    fn names(dir: &BaseDir) -> Vec<String> {
        let mut names: Vec<_> = std::fs::read_dir(dir.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn the_directory_and_its_parents_are_ours_alone() {
        let (temp, dir) = base();
        assert_eq!(mode(&temp.path().join("a")), 0o700);
        assert_eq!(mode(dir.path()), 0o700);
        assert_eq!(BaseDir::open(dir.path()).unwrap(), dir);
    }

    #[test]
    fn a_loose_directory_is_an_error_with_the_cure() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("it's loose");
        std::fs::create_dir(&path).unwrap();
        for loose in [0o750, 0o755, 0o701, 0o720] {
            chmod(&path, loose);
            let error = BaseDir::open(&path).unwrap_err();
            assert_eq!(error.code(), "directory_loose");
            let text = error.to_string();
            assert!(text.contains(&format!("mode {loose:o}")), "{text}");
            assert!(text.contains(r"chmod 700 '"), "{text}");
            assert!(text.contains(r"it'\''s loose'"), "{text}");
            assert_eq!(mode(&path), loose, "never re-moded");
        }
        chmod(&path, 0o700);
        BaseDir::open(&path).unwrap();
    }

    #[test]
    fn a_file_in_the_directorys_place_is_named() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("file");
        std::fs::write(&path, "").unwrap();
        assert_eq!(BaseDir::open(&path).unwrap_err().code(), "file_wrong_kind");
        assert_eq!(BaseDir::open(&path.join("below")).unwrap_err().code(), "file_wrong_kind");
    }

    #[test]
    fn another_users_directory_is_refused() {
        if !rustix::process::geteuid().is_root() {
            println!("skipped: only root can give a directory away");
            return;
        }
        let (_temp, dir) = base();
        std::os::unix::fs::chown(dir.path(), Some(12345), None).unwrap();
        let error = BaseDir::open(dir.path()).unwrap_err();
        assert_eq!(error.code(), "file_foreign_owner");
        assert!(error.to_string().contains("12345"));
    }

    #[test]
    fn documents_have_the_references_form() {
        let (_temp, dir) = base();
        let text = "{\n  \"z\": \"ü\\n\\u001f\\u2028\",\n  \"a\": {},\n  \"list\": [\n    1,\n    []\n  ],\n  \"n\": null\n}\n";
        let text = text.replace("\\u2028", "\u{2028}");
        let document = Document::parse(text.as_bytes()).unwrap();
        dir.write_document("x.json", &document).unwrap();
        assert_eq!(std::fs::read_to_string(dir.file("x.json")).unwrap(), text);
        assert_eq!(mode(&dir.file("x.json")), 0o600);
        assert_eq!(names(&dir), ["x.json"], "no temporary file is left");
    }

    #[test]
    fn a_write_closes_a_loose_file_and_private_reads_refuse_one() {
        let (_temp, dir) = base();
        let path = dir.file("key.json");
        std::fs::write(&path, "{}").unwrap();
        for loose in [0o640, 0o604, 0o660, 0o610] {
            chmod(&path, loose);
            let error = dir.read_document("key.json", Secrecy::Private).err().unwrap();
            assert_eq!(error.code(), "file_loose");
            assert!(error.to_string().contains("chmod 600 '"), "{error}");
            assert!(dir.read_document("key.json", Secrecy::Plain).unwrap().unwrap().1.loose);
        }
        dir.write_document("key.json", &Document::default()).unwrap();
        assert_eq!(mode(&path), 0o600);
        assert!(!dir.read_document("key.json", Secrecy::Private).unwrap().unwrap().1.loose);
    }

    #[test]
    fn odd_files_are_errors_not_hangs() {
        let (_temp, dir) = base();
        assert!(dir.read("none", 10, Secrecy::Private).unwrap().is_none());
        std::fs::create_dir(dir.file("folder")).unwrap();
        let code = |name| dir.read(name, 10, Secrecy::Plain).err().unwrap().code();
        assert_eq!(code("folder"), "file_wrong_kind");
        #[cfg(target_os = "linux")]
        {
            use rustix::fs::{CWD, FileType, Mode, mknodat};
            mknodat(CWD, dir.file("fifo"), FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
            assert_eq!(code("fifo"), "file_wrong_kind");
        }
        std::fs::write(dir.file("big"), [b'x'; 11]).unwrap();
        assert_eq!(code("big"), "file_too_large");
        std::fs::write(dir.file("ten"), [b'x'; 10]).unwrap();
        assert!(dir.read("ten", 10, Secrecy::Plain).unwrap().is_some());
    }

    #[test]
    fn what_is_no_object_is_refused_without_showing_it() {
        for (text, place) in [
            ("", "line 1, column 0"),
            ("[\"secret\"]", "outermost"),
            ("{\"privateKey\": \"secret\", }", "line 1"),
            ("{} secret", "line 1"),
            ("\u{feff}{}", "line 1"),
            ("// secret\n{}", "line 1"),
        ] {
            let reason = Document::parse(text.as_bytes()).err().unwrap();
            assert!(reason.contains(place), "{reason}");
            assert!(!reason.contains("secret"), "{reason}");
        }
        assert!(Document::parse(b"{\"a\":\"\xff\"}").is_err());
    }

    #[test]
    fn only_one_creates() {
        let (_temp, dir) = base();
        for round in 0..50 {
            let name = format!("file-{round}");
            let create = |who: &[u8]| dir.create(&name, who).unwrap();
            let (a, b) = std::thread::scope(|scope| {
                let a = scope.spawn(|| create(b"a"));
                let b = scope.spawn(|| create(b"b"));
                (a.join().unwrap(), b.join().unwrap())
            });
            assert!(a != b);
            let winner = if a { b"a" } else { b"b" };
            assert_eq!(std::fs::read(dir.file(&name)).unwrap(), winner);
            assert_eq!(mode(&dir.file(&name)), 0o600);
        }
        assert_eq!(names(&dir).len(), 50);
    }

    #[test]
    fn too_large_a_document_changes_nothing() {
        let (_temp, dir) = base();
        dir.write_document("x", &Document::default()).unwrap();
        let mut huge = Document::default();
        huge.set("a", Value::String("x".repeat(usize::try_from(MAX_FILE).unwrap())));
        assert_eq!(dir.write_document("x", &huge).unwrap_err().code(), "file_too_large");
        assert_eq!(std::fs::read(dir.file("x")).unwrap(), b"{}\n");
    }

    #[test]
    fn a_stamp_tells_a_replaced_file() {
        let (_temp, dir) = base();
        assert_eq!(dir.stamp("x").unwrap(), None);
        dir.write_document("x", &Document::default()).unwrap();
        let first = dir.stamp("x").unwrap();
        assert_eq!(dir.stamp("x").unwrap(), first);
        let keep = dir.keep_as("x", "y").unwrap();
        assert!(keep && !dir.keep_as("x", "y").unwrap());
        dir.write_document("x", &Document::default()).unwrap();
        assert_ne!(dir.stamp("x").unwrap(), first, "another inode");
        dir.remove("x").unwrap();
        dir.remove("x").unwrap();
        assert_eq!(dir.stamp("y").unwrap(), first);
    }

    #[test]
    fn the_guard_lets_one_in() {
        let (_temp, dir) = base();
        let inside = std::sync::atomic::AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..20 {
                        let _guard = dir.guard().unwrap();
                        assert_eq!(inside.fetch_add(1, std::sync::atomic::Ordering::SeqCst), 0);
                        inside.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
                    }
                });
            }
        });
        let held = dir.guard().unwrap();
        assert_eq!(dir.guard().unwrap_err().code(), "files_busy");
        drop(held);
        dir.guard().unwrap();
    }

    #[test]
    fn entries_keep_order_and_leave_other_members_alone() {
        let mut document =
            Document::parse(br#"{"b":1,"t":{"x":1,"y":2,"z":3},"odd":"text","a":[]}"#).unwrap();
        document.set_entry("t", "x", None);
        document.set_entry("t", "y", Some(Value::from(9)));
        document.set_entry("none", "x", None);
        document.set_entry("new", "k", Some(Value::Null));
        document.set_entry("odd", "k", None);
        assert_eq!(document.entries("t").map(|(k, _)| k).collect::<Vec<_>>(), ["y", "z"]);
        assert_eq!(document.entries("odd").count(), 0);
        let compact = serde_json::to_string(&document.0).unwrap();
        assert_eq!(compact, r#"{"b":1,"t":{"y":9,"z":3},"odd":"text","a":[],"new":{"k":null}}"#);
    }
}
