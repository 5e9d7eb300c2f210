//! A file that belongs to somebody else and is changed all the same: read whole, replaced whole, with a
//! copy of what it was. A link is followed, mode and place are kept, and a file that another program
//! writes meanwhile is not overwritten.

use std::fs::{self, File, Permissions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use crate::api::types::ApiError;

/// Largest file that is read. Claude Code keeps histories in its file, which grows to some MiB; more
/// than this is no configuration.
const MAX_FILE: u64 = 64 * 1024 * 1024;
/// Modes of a file that there was none of, and of its folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cli) enum New {
    /// Of this user alone: it may get secrets later.
    Private,
    /// As an editor would make it, by the umask: it is a project's.
    Shared,
}

/// Who may do what with a file that is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cli) enum Access {
    /// Exactly this.
    Mode(u32),
    /// What the umask leaves.
    Umask,
}

/// What the copy's name ends with.
const BACKUP: &str = ".before-commsd";

/// Why a file could not be read or written.
#[derive(Debug, thiserror::Error)]
pub(in crate::cli) enum FileError {
    /// The operating system refused.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried, as a verb.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It is not a file, or a link to nothing.
    #[error("{} is {what}", path.display())]
    Unusable {
        /// The file.
        path: PathBuf,
        /// What it is.
        what: &'static str,
    },
    /// Its owner has closed it to changes.
    #[error("{} is read-only", path.display())]
    ReadOnly {
        /// The file.
        path: PathBuf,
    },
    /// A link leads out of where it has to stay.
    #[error("{} leads out of the project, to {}", path.display(), target.display())]
    Outside {
        /// The file.
        path: PathBuf,
        /// Where it leads.
        target: PathBuf,
    },
    /// Another program has written it while it was looked at.
    #[error("{} is being written by another program", path.display())]
    Changed {
        /// The file.
        path: PathBuf,
    },
}

impl FileError {
    fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { action, path: path.to_owned(), source }
    }

    /// A stable name.
    pub(in crate::cli) fn code(&self) -> &'static str {
        match self {
            Self::Io { .. } => "file_io",
            Self::Unusable { .. } => "file_unusable",
            Self::ReadOnly { .. } => "file_read_only",
            Self::Outside { .. } => "file_outside",
            Self::Changed { .. } => "file_changed",
        }
    }

    fn todo(&self) -> String {
        match self {
            Self::Io { .. } => "check its permissions and those of its directory".into(),
            Self::Unusable { .. } => "move it out of the way".into(),
            Self::ReadOnly { path } => {
                format!("if it may be changed: chmod u+w {}", path.display())
            }
            Self::Outside { .. } => {
                "put a file (or folder) of the project's own in the place of the link".into()
            }
            Self::Changed { .. } => "end that program, or try again".into(),
        }
    }
}

impl From<FileError> for ApiError {
    fn from(error: FileError) -> Self {
        Self::new(error.code(), error.to_string(), error.todo())
    }
}

/// A file as it was when it was looked at.
#[derive(Debug)]
pub(in crate::cli) struct Kept {
    /// Where it is, links followed.
    path: PathBuf,
    /// What it says; none when there is none.
    pub text: Option<String>,
    access: Access,
}

impl Kept {
    /// Reads the file. One that there is none of would be this user's alone.
    pub(in crate::cli) fn open(path: &Path) -> Result<Self, FileError> {
        Self::open_as(path, New::Private)
    }

    /// Reads the file; `new` says what one would be that there is none of.
    fn open_as(path: &Path, new: New) -> Result<Self, FileError> {
        let unusable = |what| FileError::Unusable { path: path.to_owned(), what };
        let path = match fs::canonicalize(path) {
            Ok(path) => path,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                if fs::symlink_metadata(path).is_ok() {
                    return Err(unusable("a link to nothing"));
                }
                let access = match new {
                    New::Private => Access::Mode(0o600),
                    New::Shared => Access::Umask,
                };
                return Ok(Self { path: path.to_owned(), text: None, access });
            }
            Err(error) => return Err(FileError::io("find", path)(error)),
        };
        let meta = fs::metadata(&path).map_err(FileError::io("look at", &path))?;
        if !meta.is_file() {
            return Err(unusable("no file"));
        }
        let text = Some(read(&path)?);
        Ok(Self { path, text, access: Access::Mode(meta.permissions().mode() & 0o7777) })
    }

    /// Reads the file of a project, which no link leads out of the project in `dir`.
    pub(in crate::cli) fn open_within(dir: &Path, path: &Path) -> Result<Self, FileError> {
        let kept = Self::open_as(path, New::Shared)?;
        // Of one that there is none of, the folders that are there; the rest would be made.
        let mut there = kept.path.ancestors().filter(|path| fs::symlink_metadata(path).is_ok());
        let there = there.next().unwrap_or(dir);
        let find = |path: &Path| fs::canonicalize(path).map_err(FileError::io("find", path));
        let target = find(there)?;
        if !target.starts_with(find(dir)?) {
            return Err(FileError::Outside { path: path.to_owned(), target });
        }
        Ok(kept)
    }

    /// Where the copy is, or would be.
    pub(in crate::cli) fn backup_path(&self) -> PathBuf {
        let mut name = self.path.clone().into_os_string();
        name.push(BACKUP);
        name.into()
    }

    /// What the copy says, if there is one.
    pub(in crate::cli) fn backup(&self) -> Result<Option<String>, FileError> {
        let path = self.backup_path();
        match fs::symlink_metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(FileError::io("look at", &path)(error)),
            Ok(meta) if meta.is_file() => read(&path).map(Some),
            Ok(_) => Err(FileError::Unusable { path, what: "no file" }),
        }
    }

    /// Keeps a copy of the file as it was; where there was none, none is left of an earlier one.
    pub(in crate::cli) fn back_up(&self) -> Result<Option<PathBuf>, FileError> {
        let path = self.backup_path();
        // What is there must be a copy of ours, or nothing.
        self.backup()?;
        match &self.text {
            Some(text) => {
                replace(&path, text, self.access)?;
                Ok(Some(path))
            }
            None => {
                self.drop_backup()?;
                Ok(None)
            }
        }
    }

    /// Removes the copy.
    pub(in crate::cli) fn drop_backup(&self) -> Result<(), FileError> {
        let path = self.backup_path();
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(FileError::io("remove", &path)(error))
            }
            _ => Ok(()),
        }
    }

    /// Whether the file may be changed.
    pub(in crate::cli) fn writable(&self) -> Result<(), FileError> {
        // Also for root, who could: a file that is read-only is meant to be.
        if self.text.is_some() && matches!(self.access, Access::Mode(mode) if mode & 0o200 == 0) {
            return Err(FileError::ReadOnly { path: self.path.clone() });
        }
        Ok(())
    }

    /// Writes the file anew, or removes it, if it still is as it was read.
    pub(in crate::cli) fn write(&self, text: Option<&str>) -> Result<(), FileError> {
        self.writable()?;
        let now = match fs::symlink_metadata(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            _ => Some(read(&self.path)?),
        };
        if now != self.text {
            return Err(FileError::Changed { path: self.path.clone() });
        }
        match text {
            Some(text) => replace(&self.path, text, self.access),
            None => fs::remove_file(&self.path).map_err(FileError::io("remove", &self.path)),
        }
    }
}

fn read(path: &Path) -> Result<String, FileError> {
    let failed = || FileError::io("read", path);
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(failed())?;
    file.take(MAX_FILE + 1).read_to_end(&mut bytes).map_err(failed())?;
    if bytes.len() as u64 > MAX_FILE {
        return Err(FileError::Unusable { path: path.to_owned(), what: "too large" });
    }
    String::from_utf8(bytes)
        .map_err(|_| FileError::Unusable { path: path.to_owned(), what: "not UTF-8 text" })
}

/// Puts a whole file in its place, with its final mode from the moment it has its name.
pub(in crate::cli) fn replace(path: &Path, text: &str, access: Access) -> Result<(), FileError> {
    let failed = || FileError::io("write", path);
    let dir = path.parent().unwrap_or(Path::new("/"));
    // Modes at the making, of which the umask takes its part.
    let (folder, temporary) = match access {
        Access::Mode(_) => (0o700, 0o600),
        Access::Umask => (0o777, 0o666),
    };
    fs::DirBuilder::new()
        .recursive(true)
        .mode(folder)
        .create(dir)
        .map_err(FileError::io("create", dir))?;
    let mut file = tempfile::Builder::new()
        .prefix(".commsd-")
        .permissions(Permissions::from_mode(temporary))
        .tempfile_in(dir)
        .map_err(failed())?;
    file.write_all(text.as_bytes()).map_err(failed())?;
    if let Access::Mode(mode) = access {
        file.as_file().set_permissions(Permissions::from_mode(mode)).map_err(failed())?;
    }
    file.as_file().sync_all().map_err(failed())?;
    file.persist(path).map_err(|error| failed()(error.error))?;
    // The name is as durable as the text; not every file system can do that for a directory.
    let _ = File::open(dir).and_then(|dir| dir.sync_all());
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn a_file_is_replaced_where_its_link_leads_with_its_mode_and_a_copy() {
        let dir = tempfile::tempdir().unwrap();
        let (target, link) = (dir.path().join("dotfiles.json"), dir.path().join("link.json"));
        fs::write(&target, "old").unwrap();
        fs::set_permissions(&target, Permissions::from_mode(0o664)).unwrap();
        symlink("dotfiles.json", &link).unwrap();
        let kept = Kept::open(&link).unwrap();
        kept.back_up().unwrap();
        kept.write(Some("new")).unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read_to_string(&target).unwrap(), "new");
        assert_eq!(mode(&target), 0o664);
        let backup = dir.path().join("dotfiles.json.before-commsd");
        assert_eq!((fs::read_to_string(&backup).unwrap().as_str(), mode(&backup)), ("old", 0o664));
    }

    #[test]
    fn no_link_leads_out_of_a_project() {
        let home = tempfile::tempdir().unwrap();
        let [project, other] = ["p", "p2"].map(|name| home.path().join(name));
        fs::create_dir(&project).unwrap();
        fs::create_dir(&other).unwrap();
        fs::write(other.join("mine.json"), "{}").unwrap();
        symlink("../p2/mine.json", project.join("out.json")).unwrap();
        symlink("../p2", project.join("folder")).unwrap();
        symlink("../nowhere", project.join("dangling")).unwrap();
        let open = |name: &str| Kept::open_within(&project, &project.join(name));
        for name in ["out.json", "folder/mine.json", "folder/new.json"] {
            let error = open(name).unwrap_err();
            assert_eq!(error.code(), "file_outside", "{name}");
            let said = error.to_string();
            assert!(said.contains(name) && said.contains("/p2"), "{said}");
        }
        assert_eq!(open("dangling/new.json").unwrap_err().code(), "file_io");
        // Within it, links are followed, and so is one to the project itself.
        fs::create_dir(project.join("real")).unwrap();
        fs::write(project.join("real/in.json"), "{}").unwrap();
        symlink("real/in.json", project.join("in.json")).unwrap();
        symlink("p", home.path().join("link")).unwrap();
        for name in ["in.json", "real/new.json", "new/new.json"] {
            assert!(open(name).is_ok(), "{name}");
        }
        let linked = home.path().join("link");
        assert!(Kept::open_within(&linked, &linked.join("real/in.json")).is_ok());
    }

    #[test]
    fn a_new_file_is_closed_to_others() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b/new.json");
        let kept = Kept::open(&path).unwrap();
        assert_eq!((kept.text.as_deref(), kept.back_up().unwrap()), (None, None));
        kept.write(Some("{}")).unwrap();
        assert_eq!((mode(&path), mode(&dir.path().join("a"))), (0o600, 0o700));
    }

    #[test]
    fn what_must_not_be_written_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        fs::write(&path, "old").unwrap();
        let kept = Kept::open(&path).unwrap();
        fs::write(&path, "somebody else's").unwrap();
        assert_eq!(kept.write(Some("new")).unwrap_err().code(), "file_changed");
        assert_eq!(fs::read_to_string(&path).unwrap(), "somebody else's");
        fs::set_permissions(&path, Permissions::from_mode(0o444)).unwrap();
        let kept = Kept::open(&path).unwrap();
        assert_eq!(kept.write(Some("new")).unwrap_err().code(), "file_read_only");
        assert_eq!(kept.write(None).unwrap_err().code(), "file_read_only");
        let dangling = dir.path().join("link");
        symlink("nowhere", &dangling).unwrap();
        assert_eq!(Kept::open(&dangling).unwrap_err().code(), "file_unusable");
        assert_eq!(Kept::open(dir.path()).unwrap_err().code(), "file_unusable");
        fs::write(dir.path().join("latin1"), b"\xe9").unwrap();
        assert_eq!(Kept::open(&dir.path().join("latin1")).unwrap_err().code(), "file_unusable");
        // A directory in the place of the copy.
        fs::write(dir.path().join("g"), "old").unwrap();
        fs::create_dir(dir.path().join("g.before-commsd")).unwrap();
        let kept = Kept::open(&dir.path().join("g")).unwrap();
        assert_eq!(kept.back_up().unwrap_err().code(), "file_unusable");
    }
}
