//! The files of `acp`: read up to a bound, made only where nothing is.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use zeroize::Zeroizing;

use super::Failure;
use crate::acp::did::Secret;

/// A key, a receipt and a log are for nobody else's eyes.
const MODE: u32 = 0o600;
/// Bytes of a key file; real ones have below 300.
const MAX_KEY: usize = 4096;

/// A file could not be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum FileError {
    #[error("{} cannot be read: {error}", path.display())]
    Unreadable { path: PathBuf, error: io::Error },
    #[error("{} has more than {max} bytes", path.display())]
    TooLarge { path: PathBuf, max: usize },
    #[error("{} is there already, and nothing is overwritten", path.display())]
    Exists { path: PathBuf },
    #[error("{} cannot be written: {error}", path.display())]
    NotWritten { path: PathBuf, error: io::Error },
}

impl FileError {
    pub(super) const fn code(&self) -> &'static str {
        match self {
            Self::Unreadable { .. } => "file_unreadable",
            Self::TooLarge { .. } => "file_too_large",
            Self::Exists { .. } => "file_exists",
            Self::NotWritten { .. } => "file_not_written",
        }
    }

    pub(super) const fn todo(&self) -> &'static str {
        match self {
            Self::Unreadable { .. } => "name a file that is there and that you may read",
            Self::TooLarge { .. } => "name the right file",
            Self::Exists { .. } => "name a path where nothing is",
            Self::NotWritten { .. } => "name a path in a directory that you may write to",
        }
    }
}

/// Reads a file, or whatever a path leads to, of at most `max` bytes.
pub(super) fn read(path: &Path, max: usize) -> Result<Zeroizing<Vec<u8>>, FileError> {
    let limit = u64::try_from(max).unwrap_or(u64::MAX).saturating_add(1);
    let mut bytes = Zeroizing::new(Vec::new());
    let read = File::open(path).and_then(|file| file.take(limit).read_to_end(&mut bytes));
    read.map_err(|error| FileError::Unreadable { path: path.to_owned(), error })?;
    if bytes.len() > max {
        return Err(FileError::TooLarge { path: path.to_owned(), max });
    }
    Ok(bytes)
}

/// The identity in a key file.
pub(super) fn read_key(path: &Path) -> Result<Secret, Failure> {
    Ok(Secret::from_key_file(&read(path, MAX_KEY)?)?)
}

/// Makes a file of mode 0600 where nothing is, not even a symbolic link, and syncs it. What could not
/// be written whole is taken away again.
pub(super) fn create(path: &Path, bytes: &[u8]) -> Result<(), FileError> {
    let not_written = |error| FileError::NotWritten { path: path.to_owned(), error };
    let opened = OpenOptions::new().write(true).create_new(true).mode(MODE).open(path);
    let mut file = opened.map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => FileError::Exists { path: path.to_owned() },
        _ => not_written(error),
    })?;
    let written = file.write_all(bytes).and_then(|()| file.sync_all());
    if written.is_err() {
        // It was made here, and half a key or log helps nobody.
        let _ = std::fs::remove_file(path);
    }
    written.map_err(not_written)?;
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let directory = File::open(parent.unwrap_or(Path::new(".")));
    directory.and_then(|directory| directory.sync_all()).map_err(not_written)
}
