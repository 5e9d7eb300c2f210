//! Files of a workspace, reached only through opened directory handles, so that no symbolic link,
//! however late it appears, leads a read or write out of the workspace.
//!
//! Paths are relative to the workspace's root and may pass through links that end inside it
//! (`docs/decisions.md`, Vault); what is replaced is never a link itself. On Linux the kernel
//! resolves (`openat2` with `RESOLVE_BENEATH`); elsewhere, and for absolute links that end inside the
//! root, the walk is done here, one handle a step.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags, FileType, Mode, OFlags, RenameFlags, Stat};
use rustix::io::Errno;

use super::error::VaultError;
use crate::identity::entropy::Entropy;

/// Largest file read as a page, entry, state or guide: far more than any text that people write, and
/// a few of them at once fit into memory.
pub const MAX_FILE: u64 = 512 * 1024 * 1024;
/// What is read of a file with one call. Pages have a few kilobytes; readers hold a few of these.
const SMALL_FILE: usize = 16 * 1024;
/// Links followed on one path; Linux's own limit.
const MAX_LINKS: usize = 40;
/// Tries of one resolution that a rename elsewhere disturbs; after that the walk is done by hand.
const MAX_DISTURBED: usize = 16;
/// Tries for a temporary name that is free: with 37^8 names the second is hardly ever needed.
const MAX_TEMP_NAMES: usize = 8;
/// Random characters in a temporary name, and the alphabet they come from.
const TEMP_RANDOM: usize = 8;
const TEMP_ALPHABET: &[u8; 37] = b"abcdefghijklmnopqrstuvwxyz0123456789_";
const TEMP_SUFFIX: &str = ".tmp";

/// Mode of files that are written; folders follow the umask.
const FILE_MODE: Mode = Mode::from_raw_mode(0o600);
const FOLDER_MODE: Mode = Mode::from_raw_mode(0o777);

/// Flags for a handle that is only looked at.
#[cfg(any(target_os = "linux", target_os = "android"))]
const LOOK: OFlags = OFlags::PATH;
#[cfg(not(any(target_os = "linux", target_os = "android")))]
const LOOK: OFlags = OFlags::NONBLOCK;

/// Whether links on the way are followed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Links {
    /// Those that end inside the root.
    Inside,
    /// None.
    Refused,
}

/// What a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A regular file.
    File,
    /// A folder.
    Folder,
    /// A symbolic link.
    Link,
    /// Anything else.
    Other,
}

impl From<FileType> for Kind {
    fn from(kind: FileType) -> Self {
        match kind {
            FileType::RegularFile => Self::File,
            FileType::Directory => Self::Folder,
            FileType::Symlink => Self::Link,
            _ => Self::Other,
        }
    }
}

fn kind_of(stat: &Stat) -> Kind {
    FileType::from_raw_mode(stat.st_mode).into()
}

/// An opened folder.
pub struct Dir {
    handle: OwnedFd,
    /// From the root; only for messages.
    path: String,
}

/// An opened workspace root.
pub struct Tree {
    handle: OwnedFd,
    path: PathBuf,
}

/// How a file is put in its place.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Whether or not one is there.
    Any,
    /// Only if none is there.
    New,
}

fn io_error(action: &'static str, path: &str, source: impl Into<io::Error>) -> VaultError {
    VaultError::Io { action, path: path.to_owned(), source: source.into() }
}

/// Folder and name of a path.
fn parent(path: &str) -> (&str, &str) {
    path.rsplit_once('/').unwrap_or(("", path))
}

/// What a resolution of `path` means; `None` if nothing is there.
fn resolved(found: Result<OwnedFd, Errno>, path: &str) -> Result<Option<OwnedFd>, VaultError> {
    match found {
        Ok(handle) => Ok(Some(handle)),
        Err(Errno::NOENT | Errno::NOTDIR) => Ok(None),
        Err(Errno::XDEV) => Err(VaultError::Outside(path.to_owned())),
        Err(Errno::LOOP) => Err(VaultError::SymbolicLink(path.to_owned())),
        Err(error) => Err(io_error("open", path, error)),
    }
}

impl Tree {
    /// Opens the folder at `path`, which is absolute and resolved.
    ///
    /// # Errors
    /// [`VaultError::Workspace`].
    pub fn open(path: &Path) -> Result<Self, VaultError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let handle = rustix::fs::open(path, flags, Mode::empty()).map_err(|error| {
            VaultError::Workspace { path: path.into(), why: io::Error::from(error).to_string() }
        })?;
        Ok(Self { handle, path: path.into() })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens `path`; an empty path is the root.
    fn resolve(&self, path: &[u8], flags: OFlags, links: Links) -> Result<OwnedFd, Errno> {
        let path = if path.is_empty() { b"." } else { path };
        let flags = flags | OFlags::CLOEXEC;
        #[cfg(any(target_os = "linux", target_os = "android"))]
        {
            use rustix::fs::ResolveFlags;
            let mut how = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
            if links == Links::Refused {
                how |= ResolveFlags::NO_SYMLINKS;
            }
            for _ in 0..MAX_DISTURBED {
                match rustix::fs::openat2(&self.handle, path, flags, Mode::empty(), how) {
                    Err(Errno::AGAIN | Errno::INTR) => {}
                    // Absolute links, and kernels or sandboxes without this call.
                    Err(Errno::XDEV | Errno::NOSYS | Errno::PERM) => break,
                    done => return done,
                }
            }
        }
        self.walk(path, flags, links)
    }

    /// As [`Tree::resolve`], one handle a step.
    pub(super) fn walk(&self, path: &[u8], flags: OFlags, links: Links) -> Result<OwnedFd, Errno> {
        let step = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let parts = |path: &[u8]| -> Vec<Vec<u8>> {
            path.split(|b| *b == b'/').filter(|p| !p.is_empty()).map(<[u8]>::to_vec).collect()
        };
        let mut todo: VecDeque<Vec<u8>> = parts(path).into();
        // The handles from the root down to where we are.
        let mut stack: Vec<OwnedFd> = Vec::new();
        let mut followed = 0;
        while let Some(name) = todo.pop_front() {
            if name == b"." {
                continue;
            }
            if name == b".." {
                if stack.pop().is_none() {
                    return Err(Errno::XDEV);
                }
                continue;
            }
            let here = stack.last().map_or(self.handle.as_fd(), |handle| handle.as_fd());
            let stat = rustix::fs::statat(here, &*name, AtFlags::SYMLINK_NOFOLLOW)?;
            let last = todo.is_empty();
            match kind_of(&stat) {
                Kind::Link if last && flags.contains(OFlags::NOFOLLOW) => {
                    return rustix::fs::openat(here, &*name, flags, Mode::empty());
                }
                Kind::Link => {
                    followed += 1;
                    if links == Links::Refused || followed > MAX_LINKS {
                        return Err(Errno::LOOP);
                    }
                    let target = rustix::fs::readlinkat(here, &*name, Vec::new())?.into_bytes();
                    let mut target = target.as_slice();
                    if target.first() == Some(&b'/') {
                        let inside = target.strip_prefix(self.path.as_os_str().as_bytes());
                        target = inside
                            .filter(|rest| rest.is_empty() || rest.first() == Some(&b'/'))
                            .ok_or(Errno::XDEV)?;
                        stack.clear();
                    }
                    for part in parts(target).into_iter().rev() {
                        todo.push_front(part);
                    }
                }
                Kind::Folder if !last => {
                    stack.push(rustix::fs::openat(here, &*name, step, Mode::empty())?);
                }
                _ if last => {
                    return rustix::fs::openat(
                        here,
                        &*name,
                        flags | OFlags::NOFOLLOW,
                        Mode::empty(),
                    );
                }
                _ => return Err(Errno::NOTDIR),
            }
        }
        let here = stack.last().map_or(self.handle.as_fd(), |handle| handle.as_fd());
        rustix::fs::openat(here, ".", flags, Mode::empty())
    }

    /// Resolves `path`; `None` if nothing is there.
    fn resolve_maybe(
        &self,
        path: &str,
        flags: OFlags,
        links: Links,
    ) -> Result<Option<OwnedFd>, VaultError> {
        resolved(self.resolve(path.as_bytes(), flags, links), path)
    }

    /// Refuses `path` if it leads out of the workspace; what does not exist does not.
    ///
    /// # Errors
    /// [`VaultError::Outside`], or [`VaultError::SymbolicLink`] for a loop of links.
    pub fn confine(&self, path: &str) -> Result<(), VaultError> {
        match self.resolve(path.as_bytes(), LOOK, Links::Inside) {
            Err(Errno::XDEV) => Err(VaultError::Outside(path.to_owned())),
            Err(Errno::LOOP) => Err(VaultError::SymbolicLink(path.to_owned())),
            _ => Ok(()),
        }
    }

    /// State of what `path` leads to; a loop of links leads nowhere.
    fn stat(&self, path: &str) -> Result<Option<Stat>, VaultError> {
        let found = match self.resolve_maybe(path, LOOK, Links::Inside) {
            Err(VaultError::SymbolicLink(_)) => None,
            found => found?,
        };
        match found {
            Some(handle) => rustix::fs::fstat(handle)
                .map(Some)
                .map_err(|error| io_error("look at", path, error)),
            None => Ok(None),
        }
    }

    /// Modification time of what `path` leads to, as [`modified`] gives it.
    ///
    /// # Errors
    /// [`VaultError`], if it leads out or cannot be looked at.
    pub fn modified(&self, path: &str) -> Result<Option<(i64, i64)>, VaultError> {
        Ok(self.stat(path)?.as_ref().map(modified))
    }

    /// Bytes of the file that `path` is, links followed; `None` if nothing is there.
    ///
    /// # Errors
    /// [`VaultError`].
    pub fn size(&self, path: &str) -> Result<Option<u64>, VaultError> {
        Ok(self.stat(path)?.map(|stat| u64::try_from(stat.st_size).unwrap_or(0)))
    }

    /// What `path` is, links followed; `None` if nothing is there or a link leads nowhere.
    ///
    /// # Errors
    /// [`VaultError`], if it leads out or cannot be looked at.
    pub fn kind(&self, path: &str) -> Result<Option<Kind>, VaultError> {
        Ok(self.stat(path)?.as_ref().map(kind_of))
    }

    /// What `path` itself is, a final link not followed.
    ///
    /// # Errors
    /// [`VaultError`], if it leads out or cannot be looked at.
    pub fn own_kind(&self, path: &str) -> Result<Option<Kind>, VaultError> {
        let (folder, name) = parent(path);
        match self.folder(folder)? {
            Some(folder) => folder.kind(name),
            None => Ok(None),
        }
    }

    /// Opens a folder; `None` if it does not exist or is no folder.
    ///
    /// # Errors
    /// [`VaultError`], if it leads out or cannot be opened.
    pub fn folder(&self, path: &str) -> Result<Option<Dir>, VaultError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        let handle = self.resolve_maybe(path, flags, Links::Inside)?;
        Ok(handle.map(|handle| Dir { handle, path: path.to_owned() }))
    }

    /// Opens a folder that is reached without any link below `top`, which itself may be reached
    /// through links.
    ///
    /// # Errors
    /// [`VaultError`].
    pub fn real_folder(top: &Dir, path: &[u8]) -> Result<Option<Dir>, VaultError> {
        let below = Self { handle: top.duplicate()?, path: PathBuf::new() };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        let shown = top.at(&String::from_utf8_lossy(path));
        match below.resolve(path, flags, Links::Refused) {
            Ok(handle) => Ok(Some(Dir { handle, path: shown })),
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::XDEV) => Ok(None),
            Err(error) => Err(io_error("open", &shown, error)),
        }
    }

    /// Opens a folder, making what is missing of its path.
    ///
    /// # Errors
    /// [`VaultError`].
    pub fn make_folder(&self, path: &str) -> Result<Dir, VaultError> {
        if let Some(folder) = self.folder(path)? {
            return Ok(folder);
        }
        let (above, name) = parent(path);
        let above = self.make_folder(above)?;
        match rustix::fs::mkdirat(&above.handle, name, FOLDER_MODE) {
            Ok(()) => above.sync()?,
            Err(Errno::EXIST) => {}
            Err(error) => return Err(io_error("make the folder", path, error)),
        }
        self.folder(path)?
            .ok_or_else(|| io_error("open the folder", path, io::Error::from(Errno::NOTDIR)))
    }

    /// Reads a file, links followed; `None` if nothing is there.
    ///
    /// # Errors
    /// [`VaultError`].
    pub fn read(&self, path: &str) -> Result<Option<Vec<u8>>, VaultError> {
        self.read_raw(path.as_bytes())
    }

    /// As [`Tree::read`], for a path that may not be UTF-8.
    ///
    /// # Errors
    /// [`VaultError`].
    pub fn read_raw(&self, path: &[u8]) -> Result<Option<Vec<u8>>, VaultError> {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK;
        let shown = String::from_utf8_lossy(path);
        match resolved(self.resolve(path, flags, Links::Inside), &shown)? {
            Some(handle) => read_all(handle, &shown, Vec::new()).map(Some),
            None => Ok(None),
        }
    }

    /// Opens a file without reading it, links followed.
    ///
    /// # Errors
    /// [`VaultError`].
    pub(super) fn open_file(&self, path: &str) -> Result<Option<File>, VaultError> {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK;
        Ok(self.resolve_maybe(path, flags, Links::Inside)?.map(File::from))
    }

    /// Reads a file as text with LF line ends, links followed.
    ///
    /// # Errors
    /// [`VaultError`].
    pub fn text(&self, path: &str) -> Result<Option<String>, VaultError> {
        match self.read(path)? {
            Some(bytes) => super::plan::text::decode(bytes)
                .map(Some)
                .ok_or_else(|| VaultError::NotUtf8(path.to_owned())),
            None => Ok(None),
        }
    }

    /// Puts `bytes` at `path`, whole or not at all: a temporary file beside it, its content on disk,
    /// then renamed, then the folder on disk. Missing folders are made. `check` runs right before the
    /// rename and may still call it off.
    ///
    /// # Errors
    /// [`VaultError`]; then the file is as it was.
    pub fn replace(
        &self,
        path: &str,
        bytes: &[u8],
        place: Place,
        entropy: &mut dyn Entropy,
        check: &dyn Fn() -> Result<(), VaultError>,
    ) -> Result<(), VaultError> {
        let (folder, name) = parent(path);
        let dir = self.make_folder(folder)?;
        dir.refuse_irregular(name, path)?;
        let (temp, file) = dir.temporary(name, entropy)?;
        let done = self.fill_and_rename(path, &dir, &temp, file, bytes, place, check);
        if done.is_err() {
            // If this fails too, the name tells the next writer that it may go.
            let _ = rustix::fs::unlinkat(&dir.handle, &temp, AtFlags::empty());
        }
        done
    }

    #[allow(clippy::too_many_arguments)] // One step of `replace`, which owns all of these.
    fn fill_and_rename(
        &self,
        path: &str,
        dir: &Dir,
        temp: &str,
        mut file: File,
        bytes: &[u8],
        place: Place,
        check: &dyn Fn() -> Result<(), VaultError>,
    ) -> Result<(), VaultError> {
        let (folder, name) = parent(path);
        hook::reached(hook::Point::Written);
        file.write_all(bytes)
            .and_then(|()| file.sync_all())
            .map_err(|error| io_error("write", path, error))?;
        drop(file);
        hook::reached(hook::Point::Synced);
        check()?;
        // The folder must still be where it was opened, and no link may have come in between.
        match self.folder(folder)? {
            Some(again) if again.same(dir)? => {}
            _ => return Err(VaultError::Raced(path.to_owned())),
        }
        dir.refuse_irregular(name, path)?;
        let renamed = match place {
            Place::Any => rustix::fs::renameat(&dir.handle, temp, &dir.handle, name),
            Place::New => dir.rename_new(temp, name),
        };
        match renamed {
            Ok(()) => {}
            Err(Errno::EXIST) => return Err(VaultError::Raced(path.to_owned())),
            Err(error) => return Err(io_error("replace", path, error)),
        }
        hook::reached(hook::Point::Renamed);
        dir.sync()
    }
}

impl Dir {
    fn at(&self, name: &str) -> String {
        if self.path.is_empty() { name.to_owned() } else { format!("{}/{name}", self.path) }
    }

    /// The same folder once more.
    pub(super) fn again(&self) -> Result<Self, VaultError> {
        Ok(Self { handle: self.duplicate()?, path: self.path.clone() })
    }

    fn duplicate(&self) -> Result<OwnedFd, VaultError> {
        self.handle.try_clone().map_err(|error| io_error("open", &self.path, error))
    }

    /// Whether both are one folder.
    fn same(&self, other: &Self) -> Result<bool, VaultError> {
        let stat = |dir: &Self| {
            rustix::fs::fstat(&dir.handle).map_err(|error| io_error("look at", &dir.path, error))
        };
        let (one, other) = (stat(self)?, stat(other)?);
        Ok(one.st_dev == other.st_dev && one.st_ino == other.st_ino)
    }

    /// Puts the folder's entries on disk. File systems that cannot do that are believed.
    fn sync(&self) -> Result<(), VaultError> {
        match rustix::fs::fsync(&self.handle) {
            Ok(()) | Err(Errno::INVAL | Errno::NOTSUP | Errno::ROFS) => Ok(()),
            Err(error) => Err(io_error("sync the folder", &self.path, error)),
        }
    }

    /// State of an entry, a link not followed; `None` if there is none.
    ///
    /// # Errors
    /// [`VaultError::Io`].
    pub fn stat(&self, name: &str) -> Result<Option<Stat>, VaultError> {
        match rustix::fs::statat(&self.handle, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Some(stat)),
            Err(Errno::NOENT | Errno::NOTDIR | Errno::NAMETOOLONG) => Ok(None),
            Err(error) => Err(io_error("look at", &self.at(name), error)),
        }
    }

    /// What an entry is, a link not followed.
    ///
    /// # Errors
    /// [`VaultError::Io`].
    pub fn kind(&self, name: &str) -> Result<Option<Kind>, VaultError> {
        Ok(self.stat(name)?.as_ref().map(kind_of))
    }

    fn refuse_irregular(&self, name: &str, path: &str) -> Result<(), VaultError> {
        match self.kind(name)? {
            None | Some(Kind::File) => Ok(()),
            Some(Kind::Link) => Err(VaultError::SymbolicLink(path.to_owned())),
            Some(_) => Err(VaultError::NotRegular(path.to_owned())),
        }
    }

    /// Shows every entry but `.` and `..`, in no order.
    ///
    /// # Errors
    /// [`VaultError::Io`].
    pub fn each(&self, mut see: impl FnMut(&[u8], Kind)) -> Result<(), VaultError> {
        let fail = |error: Errno| io_error("list", &self.path, error);
        for entry in rustix::fs::Dir::read_from(&self.handle).map_err(fail)? {
            let entry = entry.map_err(fail)?;
            let name = entry.file_name().to_bytes();
            if name == b"." || name == b".." {
                continue;
            }
            let kind = match entry.file_type() {
                FileType::Unknown => {
                    match rustix::fs::statat(&self.handle, name, AtFlags::SYMLINK_NOFOLLOW) {
                        Ok(stat) => kind_of(&stat),
                        Err(Errno::NOENT) => continue,
                        Err(error) => return Err(fail(error)),
                    }
                }
                known => known.into(),
            };
            see(name, kind);
        }
        Ok(())
    }

    /// Reads a regular file of this folder; a link is refused, `None` if nothing is there.
    ///
    /// # Errors
    /// [`VaultError`].
    pub fn read(&self, name: &str) -> Result<Option<Vec<u8>>, VaultError> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        match rustix::fs::openat(&self.handle, name, flags, Mode::empty()) {
            Ok(handle) => read_small(handle, || self.at(name)).map(Some),
            Err(Errno::NOENT | Errno::NOTDIR | Errno::NAMETOOLONG) => Ok(None),
            Err(Errno::LOOP) => Err(VaultError::SymbolicLink(self.at(name))),
            Err(error) => Err(io_error("open", &self.at(name), error)),
        }
    }

    /// Size and modification time (seconds and nanoseconds since 1970) of a regular file, and whether
    /// this process may read it.
    ///
    /// # Errors
    /// [`VaultError::Io`].
    pub fn measure(&self, name: &[u8]) -> Result<(u64, (i64, i64), bool), VaultError> {
        let stat = rustix::fs::statat(&self.handle, name, AtFlags::SYMLINK_NOFOLLOW)
            .map_err(|error| io_error("look at", &self.path, error))?;
        // Readable by all needs no further question.
        let readable = stat.st_mode & 0o444 == 0o444
            || rustix::fs::accessat(&self.handle, name, Access::READ_OK, AtFlags::empty()).is_ok();
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        Ok((size, modified(&stat), readable))
    }

    /// A new, empty temporary file for `name`.
    fn temporary(
        &self,
        name: &str,
        entropy: &mut dyn Entropy,
    ) -> Result<(String, File), VaultError> {
        for _ in 0..MAX_TEMP_NAMES {
            let temp = temporary_name(name, entropy);
            match self.create(&temp) {
                Ok(file) => return Ok((temp, file)),
                Err(Errno::EXIST) => {}
                Err(error) => return Err(io_error("write beside", &self.at(name), error)),
            }
        }
        Err(io_error("write beside", &self.at(name), Errno::EXIST))
    }

    /// Creates a file of this process alone.
    pub(super) fn create(&self, name: &str) -> Result<File, Errno> {
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        rustix::fs::openat(&self.handle, name, flags, FILE_MODE).map(File::from)
    }

    /// Renames within the folder, onto nothing.
    fn rename_new(&self, from: &str, to: &str) -> Result<(), Errno> {
        let flags = RenameFlags::NOREPLACE;
        match rustix::fs::renameat_with(&self.handle, from, &self.handle, to, flags) {
            Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => {
                rustix::fs::linkat(&self.handle, from, &self.handle, to, AtFlags::empty())?;
                rustix::fs::unlinkat(&self.handle, from, AtFlags::empty())
            }
            done => done,
        }
    }

    /// Swaps two entries in one step.
    pub(super) fn exchange(&self, one: &str, other: &str) -> Result<(), Errno> {
        let flags = RenameFlags::EXCHANGE;
        rustix::fs::renameat_with(&self.handle, one, &self.handle, other, flags)
    }

    /// Removes a file or link.
    pub(super) fn remove(&self, name: &str) -> Result<(), Errno> {
        rustix::fs::unlinkat(&self.handle, name, AtFlags::empty())
    }
}

/// Modification time in seconds and nanoseconds since 1970.
#[allow(clippy::useless_conversion, clippy::cast_possible_wrap)] // Widths differ between systems.
pub fn modified(stat: &Stat) -> (i64, i64) {
    (stat.st_mtime.into(), i64::try_from(stat.st_mtime_nsec).unwrap_or(0))
}

/// Reads a file that is probably small with one call: a short answer of a regular file is all of it.
fn read_small(handle: OwnedFd, path: impl Fn() -> String) -> Result<Vec<u8>, VaultError> {
    let mut bytes = Vec::with_capacity(SMALL_FILE);
    match rustix::io::read(&handle, rustix::buffer::spare_capacity(&mut bytes)) {
        Ok(0 | SMALL_FILE..) => read_all(handle, &path(), bytes),
        Ok(_) => Ok(bytes),
        // A folder, or a pipe that nobody writes to.
        Err(Errno::ISDIR | Errno::AGAIN) => Err(VaultError::NotRegular(path())),
        Err(error) => Err(io_error("read", &path(), error)),
    }
}

/// Reads on from what has been read already.
fn read_all(handle: OwnedFd, path: &str, mut bytes: Vec<u8>) -> Result<Vec<u8>, VaultError> {
    let fail = |error: io::Error| io_error("read", path, error);
    let stat = rustix::fs::fstat(&handle).map_err(|error| fail(error.into()))?;
    if kind_of(&stat) != Kind::File {
        return Err(VaultError::NotRegular(path.to_owned()));
    }
    let size = u64::try_from(stat.st_size).unwrap_or(0);
    if size > MAX_FILE {
        return Err(VaultError::TooLarge { path: path.to_owned(), limit: MAX_FILE });
    }
    // One byte more than the size lets the end be seen without another growth.
    bytes.reserve((usize::try_from(size).unwrap_or(0) + 1).saturating_sub(bytes.len()));
    File::from(handle).take(MAX_FILE + 1).read_to_end(&mut bytes).map_err(fail)?;
    if bytes.len() as u64 > MAX_FILE {
        return Err(VaultError::TooLarge { path: path.to_owned(), limit: MAX_FILE });
    }
    Ok(bytes)
}

/// A name for a temporary file beside `name`.
pub(super) fn temporary_name(name: &str, entropy: &mut dyn Entropy) -> String {
    let mut random = [0; TEMP_RANDOM];
    entropy.fill(&mut random);
    let random = random.map(|b| {
        let at = usize::from(b) % TEMP_ALPHABET.len();
        char::from(TEMP_ALPHABET.get(at).copied().unwrap_or(b'_'))
    });
    format!(".{name}.{}{TEMP_SUFFIX}", random.iter().collect::<String>())
}

/// The name that a temporary file of any engine's pattern was meant for.
pub fn temporary_of(name: &str) -> Option<&str> {
    let rest = name.strip_prefix('.')?.strip_suffix(TEMP_SUFFIX)?;
    let (target, random) = rest.rsplit_once('.')?;
    let fits = random.len() == TEMP_RANDOM && random.bytes().all(|b| TEMP_ALPHABET.contains(&b));
    (fits && !target.is_empty()).then_some(target)
}

/// Where tests reach in.
pub(super) mod hook {
    /// Moments of a replacement.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Point {
        /// The temporary file exists.
        Written,
        /// Its content is on disk.
        Synced,
        /// It has taken the target's place.
        Renamed,
    }

    #[cfg(not(test))]
    pub fn reached(_: Point) {}

    #[cfg(test)]
    pub use with_tests::{reached, set};

    #[cfg(test)]
    mod with_tests {
        use super::Point;
        use std::cell::RefCell;

        type Action = Box<dyn FnMut(Point)>;

        thread_local! {
            static ACTION: RefCell<Option<Action>> = const { RefCell::new(None) };
        }

        /// Runs `action` at every point that this thread reaches from now on.
        pub fn set(action: impl FnMut(Point) + 'static) {
            ACTION.with(|slot| *slot.borrow_mut() = Some(Box::new(action)));
        }

        pub fn reached(point: Point) {
            let action = ACTION.with(|slot| slot.borrow_mut().take());
            if let Some(mut action) = action {
                action(point);
                ACTION.with(|slot| *slot.borrow_mut() = Some(action));
            }
        }
    }
}
