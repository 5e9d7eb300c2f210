//! Whom the user trusts beyond this machine: `gateway-trust.json`, lists of device, principal and
//! machine ids (`transport.md` 8.1). Only the file; proofs and memberships are the mesh's.
//!
//! Read as tolerantly as the reference does: what is missing or of a wrong type trusts nobody.
//! Written more carefully: a file that cannot be understood is never overwritten.

use std::collections::BTreeSet;

use serde_json::Value;

use super::device::DeviceId;
use super::files::{BaseDir, Content, Document, FilesError, Secrecy, Stamp};
use super::names::{self, IdError};

const FILE: &str = "gateway-trust.json";

/// The trust file could not be read or changed.
#[derive(Debug, thiserror::Error)]
pub enum TrustError {
    /// The device is not named by its full id.
    #[error(transparent)]
    Id(#[from] IdError),
    /// A list in the file is something else, and changing it would lose what is there.
    #[error("in {path} the member \"{member}\" is not a list; mend it or move the file away")]
    WrongPart {
        /// The file.
        path: String,
        /// The member.
        member: &'static str,
    },
    /// The file could not be read or written.
    #[error(transparent)]
    Files(#[from] FilesError),
}

impl TrustError {
    /// Stable code of this error; `INVALID_DEVICE` is the reference's.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Id(e) => e.code(),
            Self::WrongPart { .. } => "trust_wrong_part",
            Self::Files(e) => e.code(),
        }
    }
}

/// What is trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrustKind {
    /// One device.
    Device,
    /// Every device that proves membership with this user.
    Principal,
    /// Every device that proves membership with this machine.
    Machine,
}

impl TrustKind {
    /// In the order of the file.
    const ALL: [Self; 3] = [Self::Device, Self::Principal, Self::Machine];

    const fn member(self) -> &'static str {
        match self {
            Self::Device => "devices",
            Self::Principal => "principals",
            Self::Machine => "machines",
        }
    }
}

/// The trusted ids as last read.
#[derive(Debug)]
pub struct Trust {
    dir: BaseDir,
    stamp: Option<Stamp>,
    devices: BTreeSet<DeviceId>,
    principals: BTreeSet<DeviceId>,
    machines: BTreeSet<DeviceId>,
    loose: bool,
    problem: Option<String>,
}

impl Trust {
    /// Reads the file.
    ///
    /// # Errors
    /// [`TrustError::Files`] when there is a file that cannot be read from disk.
    pub fn open(dir: &BaseDir) -> Result<Self, TrustError> {
        let mut trust = Self {
            dir: dir.clone(),
            stamp: None,
            devices: BTreeSet::new(),
            principals: BTreeSet::new(),
            machines: BTreeSet::new(),
            loose: false,
            problem: None,
        };
        trust.reload()?;
        Ok(trust)
    }

    /// Reads the file again if it changed since; answers whether it did. To be called before each
    /// use, as the reference does.
    ///
    /// # Errors
    /// As [`Self::open`]; what was known before stays.
    pub fn refresh(&mut self) -> Result<bool, TrustError> {
        if self.dir.stamp(FILE)? == self.stamp {
            return Ok(false);
        }
        self.reload()?;
        Ok(true)
    }

    /// Whether `id` is in the list of `kind`. Ids in the file that are not lower-case hex never
    /// match.
    #[must_use]
    pub fn contains(&self, kind: TrustKind, id: &DeviceId) -> bool {
        self.list(kind).contains(id)
    }

    /// The list of `kind`, by id.
    #[must_use]
    pub fn list(&self, kind: TrustKind) -> &BTreeSet<DeviceId> {
        match kind {
            TrustKind::Device => &self.devices,
            TrustKind::Principal => &self.principals,
            TrustKind::Machine => &self.machines,
        }
    }

    /// Whether anything is trusted at all.
    #[must_use]
    pub fn has_any(&self) -> bool {
        TrustKind::ALL.iter().any(|kind| !self.list(*kind).is_empty())
    }

    /// Whether group or others have permissions on the file; worth a warning, closed by the next
    /// change.
    #[must_use]
    pub fn loose(&self) -> bool {
        self.loose
    }

    /// Why the file counts as empty although it is not, if so; worth a warning.
    #[must_use]
    pub fn problem(&self) -> Option<&str> {
        self.problem.as_deref()
    }

    /// Trusts `id` (64 hex digits of either case, stored in lower case); answers whether it is new.
    ///
    /// # Errors
    /// [`TrustError`]; nothing is changed then.
    pub fn add(&mut self, kind: TrustKind, id: &str) -> Result<bool, TrustError> {
        let id = names::full_id(id)?.hex();
        self.change(kind, |list| {
            let new = !list.iter().any(|entry| entry.as_str() == Some(&id));
            if new {
                list.push(Value::String(id));
            }
            new
        })
    }

    /// Trusts `id` no longer, also where somebody put it into the file in upper case; answers
    /// whether it was there.
    ///
    /// # Errors
    /// [`TrustError`]; nothing is changed then.
    pub fn remove(&mut self, kind: TrustKind, id: &str) -> Result<bool, TrustError> {
        let id = names::full_id(id)?.hex();
        self.change(kind, |list| {
            let before = list.len();
            list.retain(|entry| {
                !entry.as_str().is_some_and(|entry| entry.eq_ignore_ascii_case(&id))
            });
            list.len() < before
        })
    }

    /// Reloads, changes one list (`true`: write it), writes.
    fn change(
        &mut self,
        kind: TrustKind,
        edit: impl FnOnce(&mut Vec<Value>) -> bool,
    ) -> Result<bool, TrustError> {
        let _guard = self.dir.guard()?;
        let found = self.dir.read_document(FILE, Secrecy::Plain)?;
        let mut document = found.map(|(document, _)| document).unwrap_or_default();
        // All three, as 8.5 writes them: some reader may miss a list that is not there.
        for kind in TrustKind::ALL {
            if document.get(kind.member()).is_none() {
                document.set(kind.member(), Value::Array(Vec::new()));
            }
        }
        let member = kind.member();
        let Some(Value::Array(mut list)) = document.get(member).cloned() else {
            let path = super::files::shown(&self.dir.file(FILE));
            return Err(TrustError::WrongPart { path, member });
        };
        let changed = edit(&mut list);
        if changed {
            document.set(member, Value::Array(list));
            self.dir.write_document(FILE, &document)?;
        }
        self.reload()?;
        Ok(changed)
    }

    fn reload(&mut self) -> Result<(), TrustError> {
        let content = self.dir.read(FILE, super::files::MAX_FILE, Secrecy::Plain)?;
        let (document, problem) = match &content {
            None => (Document::default(), None),
            Some(Content { bytes, .. }) => match Document::parse(bytes) {
                Ok(document) => (document, None),
                Err(reason) => (Document::default(), Some(reason)),
            },
        };
        let ids = |kind: TrustKind| {
            let list = document.get(kind.member()).and_then(Value::as_array);
            list.into_iter().flatten().filter_map(|id| DeviceId::parse(id.as_str()?)).collect()
        };
        self.devices = ids(TrustKind::Device);
        self.principals = ids(TrustKind::Principal);
        self.machines = ids(TrustKind::Machine);
        self.stamp = content.as_ref().map(|content| content.stamp);
        self.loose = content.as_ref().is_some_and(|content| content.loose);
        self.problem = problem;
        Ok(())
    }
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

    fn id(digit: char) -> String {
        digit.to_string().repeat(64)
    }

    fn device(digit: char) -> DeviceId {
        DeviceId::parse(&id(digit)).unwrap()
    }

    #[test]
    fn adding_and_removing_write_the_references_form() {
        let (_temp, dir) = base();
        let mut trust = Trust::open(&dir).unwrap();
        assert!(!trust.has_any());
        assert!(trust.add(TrustKind::Device, &id('A')).unwrap());
        assert!(!trust.add(TrustKind::Device, &id('a')).unwrap());
        let (a, c) = (id('a'), id('c'));
        assert_eq!(
            text(&dir),
            format!(
                "{{\n  \"devices\": [\n    \"{a}\"\n  ],\n  \"principals\": [],\n  \"machines\": []\n}}\n"
            )
        );
        let mode = std::fs::metadata(dir.file(FILE)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert!(trust.add(TrustKind::Machine, &c).unwrap());
        assert!(trust.contains(TrustKind::Device, &device('a')));
        assert!(!trust.contains(TrustKind::Principal, &device('a')));
        assert!(trust.contains(TrustKind::Machine, &device('c')));
        assert!(trust.remove(TrustKind::Device, &id('A')).unwrap());
        assert!(!trust.remove(TrustKind::Device, &a).unwrap());
        assert!(trust.has_any() && trust.list(TrustKind::Device).is_empty());
    }

    #[test]
    fn what_others_wrote_stays_and_what_is_odd_trusts_nobody() {
        let (_temp, dir) = base();
        let (a, upper) = (id('a'), id('B'));
        let file = format!(
            r#"{{"later":{{"x":1}},"principals":["{a}",7,"{upper}","short"],"devices":"{a}"}}"#
        );
        std::fs::write(dir.file(FILE), file).unwrap();
        std::fs::set_permissions(dir.file(FILE), std::fs::Permissions::from_mode(0o664)).unwrap();
        let mut trust = Trust::open(&dir).unwrap();
        assert!(trust.loose() && trust.problem().is_none());
        assert!(trust.contains(TrustKind::Principal, &device('a')));
        assert_eq!(trust.list(TrustKind::Principal).len(), 1, "upper case never matches");
        assert!(trust.list(TrustKind::Device).is_empty());

        let before = text(&dir);
        assert_eq!(trust.add(TrustKind::Device, &a).unwrap_err().code(), "trust_wrong_part");
        assert_eq!(text(&dir), before);
        assert!(trust.remove(TrustKind::Principal, &id('b')).unwrap());
        let document = Document::parse(text(&dir).as_bytes()).unwrap();
        let members: Vec<_> = document.iter().map(|(member, _)| member).collect();
        assert_eq!(members, ["later", "principals", "devices", "machines"]);
        assert_eq!(document.get("principals").unwrap(), &serde_json::json!([a, 7, "short"]));
        assert!(!trust.loose());
    }

    #[test]
    fn changes_of_others_are_seen() {
        let (_temp, dir) = base();
        let mut ours = Trust::open(&dir).unwrap();
        let mut theirs = Trust::open(&dir).unwrap();
        assert!(!ours.refresh().unwrap());
        theirs.add(TrustKind::Device, &id('a')).unwrap();
        assert!(ours.refresh().unwrap());
        assert!(!ours.refresh().unwrap());
        assert!(ours.contains(TrustKind::Device, &device('a')));
        // Ours starts from theirs.
        theirs.add(TrustKind::Device, &id('c')).unwrap();
        ours.add(TrustKind::Device, &id('d')).unwrap();
        assert_eq!(ours.list(TrustKind::Device).len(), 3);
        dir.remove(FILE).unwrap();
        assert!(ours.refresh().unwrap());
        assert!(!ours.has_any());
    }

    #[test]
    fn a_file_that_cannot_be_understood_trusts_nobody_and_stays() {
        let (_temp, dir) = base();
        std::fs::write(dir.file(FILE), "{\"devices\": [").unwrap();
        let mut trust = Trust::open(&dir).unwrap();
        assert!(!trust.has_any());
        assert!(trust.problem().unwrap().contains("line 1"));
        assert_eq!(trust.add(TrustKind::Device, &id('a')).unwrap_err().code(), "file_not_json");
        assert_eq!(text(&dir), "{\"devices\": [");
        std::fs::remove_file(dir.file(FILE)).unwrap();
        std::fs::create_dir(dir.file(FILE)).unwrap();
        assert_eq!(trust.refresh().unwrap_err().code(), "file_wrong_kind");
    }

    #[test]
    fn only_full_ids_are_taken() {
        let (_temp, dir) = base();
        let mut trust = Trust::open(&dir).unwrap();
        for bad in ["", "abc", &id('g'), &format!("{}0", id('a'))] {
            assert_eq!(trust.add(TrustKind::Device, bad).unwrap_err().code(), "INVALID_DEVICE");
        }
        assert!(!dir.file(FILE).exists());
    }
}
