//! Petnames: our user's own labels for devices, in `petnames.json` (`rooms.md` 7.3). Read on every
//! use, because the reference's tools write the same file; never sent anywhere.

use std::collections::BTreeMap;

use serde_json::Value;

use super::device::DeviceId;
use super::files::{BaseDir, Document, FilesError, Secrecy};
use super::names::{self, IdError, NameError, NameKind};

const FILE: &str = "petnames.json";

/// Petnames could not be read or changed.
#[derive(Debug, thiserror::Error)]
pub enum PetnamesError {
    /// The device is not named by its full id.
    #[error(transparent)]
    Id(#[from] IdError),
    /// The label is not usable.
    #[error(transparent)]
    Name(#[from] NameError),
    /// The file could not be read or written. A file that is no JSON object is never overwritten.
    #[error(transparent)]
    Files(#[from] FilesError),
}

impl PetnamesError {
    /// Stable code of this error; `INVALID_DEVICE` and `INVALID_NAME` are the reference's.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Id(e) => e.code(),
            Self::Name(e) => e.code(),
            Self::Files(e) => e.code(),
        }
    }
}

/// All usable petnames as read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Petnames {
    labels: BTreeMap<DeviceId, String>,
    loose: bool,
}

impl Petnames {
    /// Reads them; none when there is no file. Entries with a bad id or label are left out.
    ///
    /// # Errors
    /// [`PetnamesError::Files`].
    pub fn read(dir: &BaseDir) -> Result<Self, PetnamesError> {
        let Some((document, content)) = dir.read_document(FILE, Secrecy::Plain)? else {
            return Ok(Self::default());
        };
        let labels = entries(&document).map(|(device, label)| (device, label.to_owned())).collect();
        Ok(Self { labels, loose: content.loose })
    }

    /// The label for `device`.
    #[must_use]
    pub fn get(&self, device: &DeviceId) -> Option<&str> {
        self.labels.get(device).map(String::as_str)
    }

    /// All labels, by device id.
    pub fn iter(&self) -> impl Iterator<Item = (&DeviceId, &str)> {
        self.labels.iter().map(|(device, label)| (device, label.as_str()))
    }

    /// Whether group or others have permissions on the file; worth a warning, closed by the next
    /// change.
    #[must_use]
    pub fn loose(&self) -> bool {
        self.loose
    }
}

/// Gives `device` (64 hex digits of either case) the label `name`; answers the id and the label
/// as stored. Entries that [`Petnames::read`] leaves out are lost.
///
/// # Errors
/// [`PetnamesError`]; nothing is changed then.
pub fn set(dir: &BaseDir, device: &str, name: &str) -> Result<(DeviceId, String), PetnamesError> {
    let device = names::full_id(device)?;
    let label = names::check(NameKind::Petname, name)?;
    let _guard = dir.guard()?;
    let mut document = cleaned(dir)?;
    document.set(&device.hex(), Value::String(label.clone()));
    dir.write_document(FILE, &document)?;
    Ok((device, label))
}

/// Removes the label of `device`; answers whether there was one. Writes nothing if not.
///
/// # Errors
/// [`PetnamesError`]; nothing is changed then.
pub fn clear(dir: &BaseDir, device: &str) -> Result<bool, PetnamesError> {
    let device = names::full_id(device)?;
    let _guard = dir.guard()?;
    let mut document = cleaned(dir)?;
    if document.remove(&device.hex()).is_none() {
        return Ok(false);
    }
    dir.write_document(FILE, &document)?;
    Ok(true)
}

fn entries(document: &Document) -> impl Iterator<Item = (DeviceId, &str)> {
    document.iter().filter_map(|(device, label)| {
        Some((DeviceId::parse(device)?, label.as_str().and_then(names::usable)?))
    })
}

fn cleaned(dir: &BaseDir) -> Result<Document, PetnamesError> {
    let mut clean = Document::default();
    if let Some((document, _)) = dir.read_document(FILE, Secrecy::Plain)? {
        for (device, label) in entries(&document) {
            clean.set(&device.hex(), Value::from(label));
        }
    }
    Ok(clean)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn base() -> (tempfile::TempDir, BaseDir) {
        let temp = tempfile::tempdir().unwrap();
        let dir = BaseDir::open(&temp.path().join("base")).unwrap();
        (temp, dir)
    }

    fn text(dir: &BaseDir) -> String {
        std::fs::read_to_string(dir.file(FILE)).unwrap()
    }

    #[test]
    fn set_and_clear_write_the_references_form() {
        let (_temp, dir) = base();
        assert_eq!(Petnames::read(&dir).unwrap(), Petnames::default());
        let (b, a) = ("b".repeat(64), "a".repeat(64));
        let (device, label) = set(&dir, &b.to_uppercase(), "  Bob's box ").unwrap();
        assert_eq!((device.hex(), label.as_str()), (b.clone(), "Bob's box"));
        set(&dir, &a, "\"Al\"").unwrap();
        set(&dir, &b, "Bob").unwrap();
        assert_eq!(text(&dir), format!("{{\n  \"{b}\": \"Bob\",\n  \"{a}\": \"\\\"Al\\\"\"\n}}\n"));
        let mode = std::fs::metadata(dir.file(FILE)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let read = Petnames::read(&dir).unwrap();
        assert_eq!(read.get(&device), Some("Bob"));
        assert_eq!(read.iter().count(), 2);
        assert!(clear(&dir, &b).unwrap());
        assert_eq!(text(&dir), format!("{{\n  \"{a}\": \"\\\"Al\\\"\"\n}}\n"));
        let before = dir.stamp(FILE).unwrap();
        assert!(!clear(&dir, &b).unwrap());
        assert_eq!(dir.stamp(FILE).unwrap(), before, "nothing was written");
    }

    #[test]
    fn bad_entries_are_skipped_and_bad_files_refused() {
        let (_temp, dir) = base();
        let (good, upper) = ("a".repeat(64), "B".repeat(64));
        let file = format!(
            r#"{{"{upper}":"x","short":"x","{good}":"ok","{}":"bad\u0007","{}":7}}"#,
            "c".repeat(64),
            "d".repeat(64)
        );
        std::fs::write(dir.file(FILE), file).unwrap();
        std::fs::set_permissions(dir.file(FILE), std::fs::Permissions::from_mode(0o644)).unwrap();
        let read = Petnames::read(&dir).unwrap();
        assert_eq!(read.iter().map(|(_, label)| label).collect::<Vec<_>>(), ["ok"]);
        assert!(read.loose());
        set(&dir, &"e".repeat(64), "new").unwrap();
        assert_eq!(Document::parse(text(&dir).as_bytes()).unwrap().iter().count(), 2);
        assert!(!Petnames::read(&dir).unwrap().loose());
        for bad in ["[]", "{", ""] {
            std::fs::write(dir.file(FILE), bad).unwrap();
            assert_eq!(Petnames::read(&dir).unwrap_err().code(), "file_not_json");
            assert_eq!(set(&dir, &good, "x").unwrap_err().code(), "file_not_json");
            assert_eq!(clear(&dir, &good).unwrap_err().code(), "file_not_json");
            assert_eq!(text(&dir), bad);
        }
    }

    #[test]
    fn bad_ids_and_names_are_refused() {
        let (_temp, dir) = base();
        for bad in ["", "abc", &"g".repeat(64), &"a".repeat(65), &"\u{202e}".repeat(64)] {
            let error = set(&dir, bad, "x").unwrap_err();
            assert_eq!(error.code(), "INVALID_DEVICE");
            assert!(!error.to_string().contains('\u{202e}'));
            assert_eq!(clear(&dir, bad).unwrap_err().code(), "INVALID_DEVICE");
        }
        let error = set(&dir, &"a".repeat(64), "\n").unwrap_err();
        assert_eq!(error.code(), "INVALID_NAME");
        assert!(error.to_string().contains("petname"));
        assert!(!dir.file(FILE).exists());
    }
}
