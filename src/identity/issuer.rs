//! The identities that vouch for devices: the user's (`user-identity.json`) and this machine's
//! (`machine-identity.json`), shared by every bridge of the account (`transport.md` 5.2, 5.3).
//!
//! Whoever comes first creates a file, everybody else adopts it. A file without a usable key is an
//! error that names it, never replaced: what the key has signed would lose its root.

use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;

use super::certificate::Certificate;
use super::device::DeviceKey;
use super::entropy::Entropy;
use super::files::{BaseDir, Document, FilesError, MAX_FILE, Secrecy, shown};
use super::keyfile::{Change, KeyFile, MakeError, Opening, Table};
use super::names::{self, NameError, NameKind};
use crate::codec::time::UnixMillis;

const DISPLAY_NAME: &str = "displayName";

/// 8.0.8 creates the user file empty and fills it afterwards, so a file without a key that is
/// younger than this is given time: [`CREATE_TRIES`] times [`CREATE_POLL`], the reference's own
/// 2 s and 10 ms.
const CREATE_WAIT_MS: u64 = 2_000;
const CREATE_TRIES: u32 = 200;
const CREATE_POLL: Duration = Duration::from_millis(10);

/// An issuer's file could not be opened or written.
#[derive(Debug, thiserror::Error)]
pub enum IssuerError {
    /// No usable key in the file.
    #[error(
        "{0} holds no usable private key; restore it from a backup, or move it away to start with a new identity (grants of the old one end then)"
    )]
    Invalid(String),
    /// The file now holds another key; nothing was written.
    #[error("{0} was replaced with another identity; restart to use it")]
    KeyReplaced(String),
    /// A file operation failed.
    #[error(transparent)]
    Files(#[from] FilesError),
    /// A key or certificate could not be made.
    #[error(transparent)]
    Make(#[from] MakeError),
    /// The display name is not usable.
    #[error(transparent)]
    Name(#[from] NameError),
}

impl IssuerError {
    /// Stable code of this error; `INVALID_NAME` is the reference's.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Invalid(_) => "issuer_invalid",
            Self::KeyReplaced(_) => "issuer_key_replaced",
            Self::Files(e) => e.code(),
            Self::Make(e) => e.code(),
            Self::Name(e) => e.code(),
        }
    }
}

/// Which issuer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IssuerKind {
    /// The user: "principal" on the wire.
    User,
    /// This machine, for this account.
    Machine,
}

impl IssuerKind {
    /// The file's name.
    #[must_use]
    pub const fn file(self) -> &'static str {
        match self {
            Self::User => "user-identity.json",
            Self::Machine => "machine-identity.json",
        }
    }
}

/// The maps that an issuer's file may carry: id in hex to base64 token id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IssuerTable {
    /// By admitted device.
    IssuedDeviceGrants,
    /// By bearer of a grant to send direct messages.
    IssuedDmGrants,
}

impl Table for IssuerTable {
    fn member(self) -> &'static str {
        match self {
            Self::IssuedDeviceGrants => "issuedDeviceGrants",
            Self::IssuedDmGrants => "issuedDmGrants",
        }
    }
}

/// An issuer's identity. Has no `Debug`: it holds a key.
#[derive(Clone)]
pub struct IssuerFile {
    dir: BaseDir,
    kind: IssuerKind,
    keys: KeyFile,
}

impl IssuerFile {
    /// Opens the file, creating it where there is none. Waits up to two seconds for another
    /// process that is just creating it.
    ///
    /// # Errors
    /// [`IssuerError`]; an existing file is left as it is.
    pub fn open(
        dir: &BaseDir,
        kind: IssuerKind,
        now: UnixMillis,
        entropy: &mut dyn Entropy,
    ) -> Result<(Self, Opening), IssuerError> {
        let name = kind.file();
        for _ in 0..CREATE_TRIES {
            let Some(content) = dir.read(name, MAX_FILE, Secrecy::Private)? else {
                let keys = KeyFile::create(now, entropy)?;
                if dir.create_document(name, keys.document())? {
                    return Ok((Self { dir: dir.clone(), kind, keys }, Opening::Created));
                }
                continue;
            };
            let found = match Document::parse(&content.bytes) {
                Ok(document) => KeyFile::open(document, now, entropy)?,
                Err(_) => None,
            };
            if let Some((keys, opening)) = found {
                let mut issuer = Self { dir: dir.clone(), kind, keys };
                if opening == Opening::Renewed {
                    issuer.rewrite(|keys| Ok(keys.renew_if_due(now, entropy).map(|_| true)?))?;
                }
                return Ok((issuer, opening));
            }
            if now.since(content.stamp.modified()) >= CREATE_WAIT_MS {
                break;
            }
            std::thread::sleep(CREATE_POLL);
        }
        Err(IssuerError::Invalid(shown(&dir.file(name))))
    }

    /// The issuer's key.
    #[must_use]
    pub fn key(&self) -> &DeviceKey {
        self.keys.key()
    }

    /// Its certificate.
    #[must_use]
    pub fn certificate(&self) -> &Certificate {
        self.keys.certificate()
    }

    /// When the certificate counts as expired.
    #[must_use]
    pub fn expires_at(&self) -> Option<UnixMillis> {
        self.keys.expires_at()
    }

    /// Where it is stored.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.dir.file(self.kind.file())
    }

    /// The display name that this issuer claims, if a usable one is set.
    #[must_use]
    pub fn display_name(&self) -> Option<&str> {
        self.keys.document().text(DISPLAY_NAME).filter(|name| names::is_clean(name))
    }

    /// The entries of a table, in file order; none when the table is missing or no object.
    pub fn entries(&self, table: IssuerTable) -> impl Iterator<Item = (&str, &Value)> {
        self.keys.document().entries(table.member())
    }

    /// One entry of a table.
    #[must_use]
    pub fn entry(&self, table: IssuerTable, key: &str) -> Option<&Value> {
        self.keys.document().entry(table.member(), key)
    }

    /// Reads again what other processes may have changed: the name and the tables.
    ///
    /// # Errors
    /// [`IssuerError`]; what was known before stays.
    pub fn reload(&mut self) -> Result<(), IssuerError> {
        self.keys = self.on_disk()?;
        Ok(())
    }

    /// Stores `changes`, all or none, on top of what is on disk now.
    ///
    /// # Errors
    /// [`IssuerError`]; nothing changed then, on disk or here.
    pub fn apply(&mut self, changes: &[Change<IssuerTable>]) -> Result<(), IssuerError> {
        self.rewrite(|keys| {
            keys.apply(changes);
            Ok(true)
        })
    }

    /// Sets the display name, stored trimmed, or clears it.
    ///
    /// # Errors
    /// [`IssuerError::Name`]; others as for [`Self::apply`].
    pub fn set_display_name(&mut self, name: Option<&str>) -> Result<(), IssuerError> {
        let name = name.map(|name| names::check(NameKind::Machine, name)).transpose()?;
        self.rewrite(|keys| {
            match name {
                Some(name) => keys.document_mut().set(DISPLAY_NAME, Value::String(name)),
                None => drop(keys.document_mut().remove(DISPLAY_NAME)),
            }
            Ok(true)
        })
    }

    /// Renews the certificate where that is due, as opening does; tells whether it was.
    ///
    /// # Errors
    /// As [`Self::apply`].
    pub fn renew_if_due(
        &mut self,
        now: UnixMillis,
        entropy: &mut dyn Entropy,
    ) -> Result<bool, IssuerError> {
        let mut renewed = false;
        self.rewrite(|keys| {
            renewed = keys.renew_if_due(now, entropy)?;
            Ok(renewed)
        })?;
        Ok(renewed)
    }

    fn on_disk(&self) -> Result<KeyFile, IssuerError> {
        let name = self.kind.file();
        match self.dir.read_document(name, Secrecy::Private)? {
            // Removed by hand while we run: what we know is all there is.
            None => Ok(self.keys.clone()),
            Some((document, _)) => self
                .keys
                .reloaded(document)
                .ok_or_else(|| IssuerError::KeyReplaced(shown(&self.path()))),
        }
    }

    /// Reloads, changes (`true`: write it), writes.
    fn rewrite(
        &mut self,
        change: impl FnOnce(&mut KeyFile) -> Result<bool, IssuerError>,
    ) -> Result<(), IssuerError> {
        let _guard = self.dir.guard()?;
        let mut keys = self.on_disk()?;
        if change(&mut keys)? {
            self.dir.write_document(self.kind.file(), keys.document())?;
        }
        self.keys = keys;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::fs::PermissionsExt as _;
    use std::time::SystemTime;

    use serde_json::json;

    use super::*;
    use crate::identity::certificate::VALIDITY_MS;
    use crate::identity::entropy::SeededEntropy;

    const NOW: UnixMillis = UnixMillis(1_795_989_097_142);
    /// The principal key of a real 8.0.8 peer and its id, as recorded.
    const PRINCIPAL_KEY: &str = "-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgSMJmj72MAXOSp76e
pP3N3KtmdFzjVtd0gBFqHsBUAp+hRANCAATiWrhrggub4nK/NdRg4PuCe0FT8rg1
IHGkwfN41qAUuQh/YNJb4AKDnUxS8KzvEeY+fQWknMGIVqs9fIvEFcZp
-----END PRIVATE KEY-----
";
    const PRINCIPAL_ID: &str = "44d6c8169bc5221f12414aae88665c474e32b93e1c1c269f1d3ed5cbdc69db4b";

    fn base() -> (tempfile::TempDir, BaseDir) {
        let temp = tempfile::tempdir().unwrap();
        let dir = BaseDir::open(&temp.path().join("base")).unwrap();
        (temp, dir)
    }

    fn open(
        dir: &BaseDir,
        now: UnixMillis,
        seed: u64,
    ) -> Result<(IssuerFile, Opening), IssuerError> {
        IssuerFile::open(dir, IssuerKind::User, now, &mut SeededEntropy::new(seed))
    }

    fn text(dir: &BaseDir) -> String {
        std::fs::read_to_string(dir.file("user-identity.json")).unwrap()
    }

    /// Writes the file as another process would have, dated `at`.
    fn put(dir: &BaseDir, text: &str, at: UnixMillis) {
        let mut file = std::fs::File::create(dir.file("user-identity.json")).unwrap();
        file.set_permissions(std::fs::Permissions::from_mode(0o600)).unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_millis(at.0)).unwrap();
    }

    fn pretty(value: &Value) -> String {
        serde_json::to_string_pretty(value).unwrap() + "\n"
    }

    fn change(table: IssuerTable, key: &str, value: Option<Value>) -> Change<IssuerTable> {
        Change { table, key: key.to_owned(), value }
    }

    #[test]
    fn files_are_created_once_and_adopted_afterwards() {
        let (_temp, dir) = base();
        let (user, opening) = open(&dir, NOW, 1).unwrap();
        assert_eq!(opening, Opening::Created);
        let members = serde_json::from_str::<Value>(&text(&dir)).unwrap();
        let members: Vec<_> = members.as_object().unwrap().keys().cloned().collect();
        assert_eq!(members, ["privateKey", "certificate", "expiresAt"]);
        let mode = std::fs::metadata(user.path()).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let (again, opening) = open(&dir, NOW, 2).unwrap();
        assert_eq!((opening, again.key().id()), (Opening::Loaded, user.key().id()));
        let mut entropy = SeededEntropy::new(3);
        let (machine, _) = IssuerFile::open(&dir, IssuerKind::Machine, NOW, &mut entropy).unwrap();
        assert_ne!(machine.key().id(), user.key().id());
        assert!(dir.file("machine-identity.json").exists());
    }

    #[test]
    fn of_two_creators_the_loser_adopts_the_winners_key() {
        for round in 0..50 {
            let (_temp, dir) = base();
            let barrier = std::sync::Barrier::new(2);
            let attempt = |seed| {
                barrier.wait();
                open(&dir, NOW, seed).unwrap()
            };
            let ((a, how_a), (b, how_b)) = std::thread::scope(|scope| {
                let a = scope.spawn(|| attempt(2 * round));
                let b = scope.spawn(|| attempt(2 * round + 1));
                (a.join().unwrap(), b.join().unwrap())
            });
            assert_eq!(a.key().id(), b.key().id());
            let created = [how_a, how_b].into_iter().filter(|how| *how == Opening::Created);
            assert_eq!(created.count(), 1);
        }
    }

    #[test]
    fn a_recorded_key_is_adopted_and_gets_what_is_missing() {
        let (_temp, dir) = base();
        let file = json!({ "later": [1], "privateKey": PRINCIPAL_KEY, "issuedDmGrants": { "ab": "aQ==" } });
        put(&dir, &pretty(&file), NOW);
        let (user, opening) = open(&dir, NOW, 1).unwrap();
        assert_eq!(opening, Opening::Renewed);
        assert_eq!(user.key().id().hex(), PRINCIPAL_ID);
        assert!(user.certificate().holds(user.key()));
        let stored: Value = serde_json::from_str(&text(&dir)).unwrap();
        assert_eq!(stored["later"], json!([1]));
        assert_eq!(stored["privateKey"], json!(PRINCIPAL_KEY));
        assert_eq!(stored["issuedDmGrants"], file["issuedDmGrants"]);
        assert_eq!(stored["expiresAt"], json!("2027-11-29T21:51:37.142Z"));
        assert_eq!(open(&dir, NOW, 1).unwrap().1, Opening::Loaded);
    }

    #[test]
    fn renewal_keeps_key_name_and_grants() {
        let (_temp, dir) = base();
        let (mut user, _) = open(&dir, NOW, 1).unwrap();
        user.set_display_name(Some("  den \u{feff}")).unwrap();
        let grant = change(IssuerTable::IssuedDeviceGrants, "ab", Some(json!("aQ==")));
        user.apply(&[grant]).unwrap();
        let (renewed, opening) = open(&dir, NOW.plus(VALIDITY_MS), 2).unwrap();
        assert_eq!(opening, Opening::Renewed);
        assert_eq!(renewed.key().id(), user.key().id());
        assert_ne!(renewed.certificate(), user.certificate());
        assert_eq!(renewed.display_name(), Some("den"));
        assert_eq!(renewed.entries(IssuerTable::IssuedDeviceGrants).count(), 1);
        assert_eq!(renewed.expires_at(), Some(NOW.plus(2 * VALIDITY_MS)));
        let mut entropy = SeededEntropy::new(3);
        let mut renewed = renewed;
        assert!(!renewed.renew_if_due(NOW.plus(VALIDITY_MS), &mut entropy).unwrap());
        assert!(renewed.renew_if_due(NOW.plus(2 * VALIDITY_MS), &mut entropy).unwrap());
        assert!(text(&dir).contains(&NOW.plus(3 * VALIDITY_MS).iso()));
    }

    #[test]
    fn processes_see_each_others_changes() {
        let (_temp, dir) = base();
        let (mut ours, _) = open(&dir, NOW, 1).unwrap();
        let (mut theirs, _) = open(&dir, NOW, 2).unwrap();
        theirs.set_display_name(Some("den")).unwrap();
        theirs.apply(&[change(IssuerTable::IssuedDmGrants, "ab", Some(json!("x")))]).unwrap();
        ours.apply(&[change(IssuerTable::IssuedDmGrants, "cd", Some(json!("y")))]).unwrap();
        assert_eq!(ours.display_name(), Some("den"));
        theirs.reload().unwrap();
        let keys: Vec<_> =
            theirs.entries(IssuerTable::IssuedDmGrants).map(|(key, _)| key).collect();
        assert_eq!(keys, ["ab", "cd"]);
        ours.set_display_name(None).unwrap();
        assert!(!text(&dir).contains("displayName"));
        theirs.apply(&[change(IssuerTable::IssuedDmGrants, "ab", None)]).unwrap();
        assert_eq!(theirs.entry(IssuerTable::IssuedDmGrants, "ab"), None);
        assert_eq!(theirs.display_name(), None);
    }

    #[test]
    fn an_invalid_file_is_named_and_stays() {
        let (_temp, dir) = base();
        for bad in ["", "{}", "[]", "{\"privateKey\": \"x\"}", "{\"privateKey\""] {
            put(&dir, bad, UnixMillis(NOW.0 - CREATE_WAIT_MS));
            let error = open(&dir, NOW, 1).err().unwrap();
            assert_eq!(error.code(), "issuer_invalid");
            assert!(error.to_string().contains("user-identity.json"));
            assert_eq!(text(&dir), bad);
        }
    }

    #[test]
    fn a_file_that_is_just_being_created_is_waited_for() {
        let (_temp, dir) = base();
        let whole = pretty(&json!({ "privateKey": PRINCIPAL_KEY }));
        // As 8.0.8 does: created empty, filled a moment later.
        put(&dir, "", NOW);
        let path = dir.file("user-identity.json");
        std::fs::write(&path, "").unwrap();
        let now = dir.stamp("user-identity.json").unwrap().unwrap().modified();
        let user = std::thread::scope(|scope| {
            let opening = scope.spawn(|| open(&dir, now, 1).unwrap().0);
            std::fs::write(&path, &whole).unwrap();
            opening.join().unwrap()
        });
        assert_eq!(user.key().id().hex(), PRINCIPAL_ID);
    }

    #[test]
    fn another_key_or_a_loose_file_is_refused() {
        let (_temp, dir) = base();
        let (mut user, _) = open(&dir, NOW, 1).unwrap();
        let whole = pretty(&json!({ "privateKey": PRINCIPAL_KEY }));
        put(&dir, &whole, NOW);
        assert_eq!(user.set_display_name(Some("x")).unwrap_err().code(), "issuer_key_replaced");
        assert_eq!(user.reload().unwrap_err().code(), "issuer_key_replaced");
        assert_eq!(text(&dir), whole);
        let loose = std::fs::Permissions::from_mode(0o644);
        std::fs::set_permissions(user.path(), loose).unwrap();
        assert_eq!(open(&dir, NOW, 1).err().unwrap().code(), "file_loose");
        assert_eq!(user.reload().unwrap_err().code(), "file_loose");
    }

    #[test]
    fn unusable_display_names_are_refused_or_left_out() {
        let (_temp, dir) = base();
        let (mut user, _) = open(&dir, NOW, 1).unwrap();
        let before = text(&dir);
        assert_eq!(user.set_display_name(Some("\u{1b}[2J")).unwrap_err().code(), "INVALID_NAME");
        assert_eq!(text(&dir), before);
        for bad in [json!(" padded "), json!("a\nb"), json!(7), json!("")] {
            let mut file: Value = serde_json::from_str(&before).unwrap();
            file["displayName"] = bad;
            put(&dir, &pretty(&file), NOW);
            assert_eq!(open(&dir, NOW, 1).unwrap().0.display_name(), None);
        }
    }
}
