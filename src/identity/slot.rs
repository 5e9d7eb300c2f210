//! Slots: one device identity per (harness, working directory), in the files that the reference
//! keeps for it (`transport.md` 5.1, 5.2). An agent keeps its id whether a Node bridge or commsd
//! serves its slot.
//!
//! A slot file is written only by the holder of the slot's lock. Differences from the reference,
//! all so that no key and no grant is ever lost: a file whose key is usable keeps that key,
//! whatever else is wrong with it; a file without a usable key is kept under another name before
//! a new identity takes its place; each change starts from what is on disk at that moment.

use std::path::PathBuf;

use serde_json::Value;

use super::certificate::Certificate;
use super::device::DeviceKey;
use super::entropy::Entropy;
use super::files::{BaseDir, Document, FilesError, Secrecy, shown};
use super::keyfile::{Change, KeyFile, MakeError, Opening, Table};
use super::lock::{HeldLock, LockError};
use crate::codec::text::{escape_untrusted, hides_something, is_hidden, truncate_chars};
use crate::codec::time::UnixMillis;

/// Longest file name on the file systems in use.
const MAX_NAME: usize = 255;
/// The longest addition to a slot's base name: the name under which an unreadable file is kept
/// (13 digits of milliseconds). The reference's temporary files are about as long.
const LONGEST_AFFIX: usize = "identity-.json.unreadable-0000000000000".len();
/// Characters of a refused name or path shown in an error.
const SHOWN_CHARS: usize = 80;
/// Names tried for keeping an unreadable file; each is one millisecond later.
const ASIDE_TRIES: u64 = 16;

/// A slot cannot be named, opened or written.
#[derive(Debug, thiserror::Error)]
pub enum SlotError {
    /// The harness name cannot be part of a file name.
    #[error(
        "the harness name \"{0}\" is empty or contains / or hidden characters; use a plain name"
    )]
    Harness(String),
    /// The working directory contains NUL.
    #[error("the directory \"{0}\" contains NUL")]
    Directory(String),
    /// The slot's file name would exceed what file systems take.
    #[error(
        "the directory {directory} gives a slot file name of {length} bytes, and 255 is the most; use a directory with a shorter path"
    )]
    NameTooLong {
        /// The directory, cut.
        directory: String,
        /// Bytes of the longest file name the slot would need.
        length: usize,
    },
    /// A file operation failed.
    #[error(transparent)]
    Files(#[from] FilesError),
    /// The lock could not be checked.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// A key or certificate could not be made.
    #[error(transparent)]
    Make(#[from] MakeError),
    /// The lock is not ours any more; nothing was written.
    #[error("another process has taken the lock {0}; this agent's changes are no longer stored")]
    LockLost(String),
    /// The file now holds another key; nothing was written.
    #[error(
        "{0} was replaced with another identity while this process holds its lock; this agent's changes are no longer stored"
    )]
    KeyReplaced(String),
}

impl SlotError {
    /// Stable code of this error.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Harness(_) => "slot_harness",
            Self::Directory(_) => "slot_directory",
            Self::NameTooLong { .. } => "slot_name_too_long",
            Self::Files(e) => e.code(),
            Self::Lock(e) => e.code(),
            Self::Make(e) => e.code(),
            Self::LockLost(_) => "slot_lock_lost",
            Self::KeyReplaced(_) => "slot_key_replaced",
        }
    }
}

/// The name of a slot, which is also the name of its files.
///
/// Two directories whose names differ only in replaced characters give the same name, as with the
/// reference; [`SlotTable::Places`] tells whose the slot is.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotName {
    base: String,
}

impl SlotName {
    /// The slot of `harness` in `cwd` (for harness `cli`: of that agent's name).
    ///
    /// # Errors
    /// [`SlotError::Harness`], [`SlotError::Directory`], [`SlotError::NameTooLong`].
    pub fn new(harness: &str, cwd: &str) -> Result<Self, SlotError> {
        Self::build(harness, cwd, &slug(cwd))
    }

    /// The `number`th further slot of the same harness and directory, a name that no reference
    /// bridge in that directory uses.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn numbered(harness: &str, cwd: &str, number: u32) -> Result<Self, SlotError> {
        Self::build(harness, cwd, &format!("{}~{number}", slug(cwd)))
    }

    fn build(harness: &str, cwd: &str, slug: &str) -> Result<Self, SlotError> {
        if harness.is_empty() || harness.contains(['/', '\0']) || hides_something(harness) {
            return Err(SlotError::Harness(excerpt(harness)));
        }
        if cwd.contains('\0') {
            return Err(SlotError::Directory(excerpt(cwd)));
        }
        let base = format!("{harness}--{slug}");
        let length = base.len().saturating_add(LONGEST_AFFIX);
        if length > MAX_NAME {
            return Err(SlotError::NameTooLong { directory: excerpt(cwd), length });
        }
        Ok(Self { base })
    }

    /// `<harness>--<slug>`, common to all names.
    #[must_use]
    pub fn base(&self) -> &str {
        &self.base
    }

    /// `identity-<harness>--<slug>.json`.
    #[must_use]
    pub fn identity_file(&self) -> String {
        format!("identity-{}.json", self.base)
    }

    /// `identity-<harness>--<slug>.lock`.
    #[must_use]
    pub fn lock_file(&self) -> String {
        format!("identity-{}.lock", self.base)
    }

    /// `oplog-<harness>--<slug>`, a directory.
    #[must_use]
    pub fn oplog_dir(&self) -> String {
        format!("oplog-{}", self.base)
    }

    /// `connection-codes-<harness>--<slug>.json`.
    #[must_use]
    pub fn connection_codes_file(&self) -> String {
        super::connection_code::ledger_file(&self.base)
    }
}

/// Each of the characters that some file system forbids becomes `_`, one for one. Hidden and control
/// characters, which the reference leaves as they are, become `<hex>`: no other slug has `<`, so
/// none is the same, and a listing of the directory acts on no terminal.
fn slug(cwd: &str) -> String {
    let mut out = String::with_capacity(cwd.len());
    for c in cwd.chars() {
        match c {
            '\\' | '/' | ':' | '*' | '?' | '"' | '<' | '>' | '|' => out.push('_'),
            c if is_hidden(c) => out.push_str(&format!("<{:x}>", u32::from(c))),
            c => out.push(c),
        }
    }
    out
}

fn excerpt(text: &str) -> String {
    escape_untrusted(truncate_chars(text, SHOWN_CHARS))
}

/// The maps that a slot file may carry. Their values stay JSON here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotTable {
    /// Room path to token.
    RoomTokens,
    /// `<room path>::<member hex>` to base64 token id.
    IssuedGrants,
    /// Group path to token.
    GroupTokens,
    /// `<owner hex>/<scope path>::<capability>` to token; ours alone.
    ServiceTokens,
    /// The directory (for harness `cli`: the agent's name) that has the slot, to `true`; ours alone.
    Places,
}

impl Table for SlotTable {
    fn member(self) -> &'static str {
        match self {
            Self::RoomTokens => "roomTokens",
            Self::IssuedGrants => "issuedGrants",
            Self::GroupTokens => "groupTokens",
            Self::ServiceTokens => "x-commsd-serviceTokens",
            Self::Places => "x-commsd-places",
        }
    }
}

/// A slot as opened.
pub struct Opened {
    /// The slot.
    pub slot: SlotFile,
    /// What had to be done.
    pub opening: Opening,
    /// Where the file that held no usable key is kept, if there was one; worth reporting, because
    /// the agent now has another id.
    pub kept_aside: Option<PathBuf>,
}

/// A slot's stored identity with its tables. Has no `Debug`: it holds a key.
#[derive(Clone)]
pub struct SlotFile {
    dir: BaseDir,
    slot: SlotName,
    keys: KeyFile,
}

impl SlotFile {
    /// Opens the slot, creating its identity where there is none; the holder of `lock` only.
    ///
    /// # Errors
    /// [`SlotError`]. A file that is open to other users or cannot be read from disk is an error
    /// and stays untouched.
    pub fn open(
        slot: &SlotName,
        lock: &HeldLock,
        now: UnixMillis,
        entropy: &mut dyn Entropy,
    ) -> Result<Opened, SlotError> {
        let dir = lock.dir().clone();
        let _guard = dir.guard()?;
        check(slot, lock)?;
        let name = slot.identity_file();
        let document = match dir.read_document(&name, Secrecy::Private) {
            Ok(found) => found.map(|(document, _)| document),
            // Unreadable as JSON: goes the way of a file without a key.
            Err(FilesError::NotJson { .. }) => Some(Document::default()),
            Err(e) => return Err(e.into()),
        };
        let mut kept_aside = None;
        let found = match document {
            None => None,
            Some(document) => {
                let found = KeyFile::open(document, now, entropy)?;
                if found.is_none() {
                    kept_aside = Some(keep_aside(&dir, &name, now)?);
                }
                found
            }
        };
        let (keys, opening) = match found {
            Some(found) => found,
            None => (KeyFile::create(now, entropy)?, Opening::Created),
        };
        if opening != Opening::Loaded {
            dir.write_document(&name, keys.document())?;
        }
        Ok(Opened { slot: Self { dir, slot: slot.clone(), keys }, opening, kept_aside })
    }

    /// The device's key.
    #[must_use]
    pub fn key(&self) -> &DeviceKey {
        self.keys.key()
    }

    /// The certificate to present.
    #[must_use]
    pub fn certificate(&self) -> &Certificate {
        self.keys.certificate()
    }

    /// When the certificate counts as expired.
    #[must_use]
    pub fn expires_at(&self) -> Option<UnixMillis> {
        self.keys.expires_at()
    }

    /// Where the identity is stored.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.dir.file(&self.slot.identity_file())
    }

    /// The entries of a table, in file order; none when the table is missing or no object.
    pub fn entries(&self, table: SlotTable) -> impl Iterator<Item = (&str, &Value)> {
        self.keys.document().entries(table.member())
    }

    /// One entry of a table.
    #[must_use]
    pub fn entry(&self, table: SlotTable, key: &str) -> Option<&Value> {
        self.keys.document().entry(table.member(), key)
    }

    /// Stores `changes`, all or none, on top of what is on disk now (a Node process without the
    /// lock may have added tokens); afterwards this value shows the same.
    ///
    /// # Errors
    /// [`SlotError::LockLost`] and [`SlotError::KeyReplaced`]: go on ephemerally. Others: nothing
    /// changed, on disk or here.
    pub fn apply(
        &mut self,
        lock: &HeldLock,
        changes: &[Change<SlotTable>],
    ) -> Result<(), SlotError> {
        self.rewrite(lock, |keys| {
            keys.apply(changes);
            Ok(true)
        })
    }

    /// Renews the certificate where that is due, as opening does; tells whether it was.
    ///
    /// # Errors
    /// As [`Self::apply`].
    pub fn renew_if_due(
        &mut self,
        lock: &HeldLock,
        now: UnixMillis,
        entropy: &mut dyn Entropy,
    ) -> Result<bool, SlotError> {
        let mut renewed = false;
        self.rewrite(lock, |keys| {
            renewed = keys.renew_if_due(now, entropy)?;
            Ok(renewed)
        })?;
        Ok(renewed)
    }

    /// Reloads, changes (`true`: write it), writes.
    fn rewrite(
        &mut self,
        lock: &HeldLock,
        change: impl FnOnce(&mut KeyFile) -> Result<bool, SlotError>,
    ) -> Result<(), SlotError> {
        let _guard = self.dir.guard()?;
        check(&self.slot, lock)?;
        let name = self.slot.identity_file();
        let replaced = || SlotError::KeyReplaced(shown(&self.path()));
        let mut keys = match self.dir.read_document(&name, Secrecy::Private) {
            Ok(Some((document, _))) => self.keys.reloaded(document).ok_or_else(replaced)?,
            // Removed by hand, while we hold its lock: what we know is all there is.
            Ok(None) => self.keys.clone(),
            Err(FilesError::NotJson { .. }) => return Err(replaced()),
            Err(e) => return Err(e.into()),
        };
        if change(&mut keys)? {
            self.dir.write_document(&name, keys.document())?;
        }
        self.keys = keys;
        Ok(())
    }
}

/// Whether `lock` is this slot's and still ours.
fn check(slot: &SlotName, lock: &HeldLock) -> Result<(), SlotError> {
    let path = lock.dir().file(&slot.lock_file());
    match path == lock.path() && lock.still_ours()? {
        true => Ok(()),
        false => Err(SlotError::LockLost(shown(&path))),
    }
}

/// Gives the unreadable file a name under which it stays: a careful user may still save a key
/// from it, and nobody can save one from a file that was overwritten.
fn keep_aside(dir: &BaseDir, name: &str, now: UnixMillis) -> Result<PathBuf, SlotError> {
    let mut aside = String::new();
    for later in 0..ASIDE_TRIES {
        aside = format!("{name}.unreadable-{}", now.plus(later).0);
        if dir.keep_as(name, &aside)? {
            return Ok(dir.file(&aside));
        }
    }
    let source = std::io::ErrorKind::AlreadyExists.into();
    Err(FilesError::Io {
        action: "keep the unreadable slot file as",
        path: dir.file(&aside),
        source,
    }
    .into())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use serde_json::json;

    use super::*;
    use crate::identity::certificate::{VALIDITY_MS, peer_public_key};
    use crate::identity::entropy::SeededEntropy;
    use crate::identity::keyfile::RENEWAL_MARGIN_MS;
    use crate::identity::lock::{Claim, claim};
    use crate::identity::process::SystemProcesses;

    const NOW: UnixMillis = UnixMillis(1_795_989_097_142);

    struct Bench {
        _temp: tempfile::TempDir,
        dir: BaseDir,
        name: SlotName,
        lock: HeldLock,
        entropy: SeededEntropy,
    }

    impl Bench {
        fn new() -> Self {
            let temp = tempfile::tempdir().unwrap();
            let dir = BaseDir::open(&temp.path().join("base")).unwrap();
            let name = SlotName::new("mcp", "/home/u/my proj").unwrap();
            let mut entropy = SeededEntropy::new(1);
            let lock = claimed(&dir, &name, &mut entropy);
            Self { _temp: temp, dir, name, lock, entropy }
        }

        fn open(&mut self, now: UnixMillis) -> Result<Opened, SlotError> {
            SlotFile::open(&self.name, &self.lock, now, &mut self.entropy)
        }

        fn path(&self) -> PathBuf {
            self.dir.file(&self.name.identity_file())
        }

        fn text(&self) -> String {
            std::fs::read_to_string(self.path()).unwrap()
        }

        /// Writes as the reference does: two spaces, trailing newline, 0600.
        fn put(&self, text: &str) {
            std::fs::write(self.path(), text).unwrap();
            std::fs::set_permissions(self.path(), std::fs::Permissions::from_mode(0o600)).unwrap();
        }
    }

    fn claimed(dir: &BaseDir, name: &SlotName, entropy: &mut SeededEntropy) -> HeldLock {
        match claim(dir, &name.lock_file(), &SystemProcesses, entropy).unwrap() {
            Claim::Won { lock, .. } => lock,
            Claim::Held(holder) => panic!("{holder}"),
        }
    }

    fn change(table: SlotTable, key: &str, value: Option<Value>) -> Change<SlotTable> {
        Change { table, key: key.to_owned(), value }
    }

    #[test]
    fn names_follow_the_reference() {
        let slot = SlotName::new("mcp", "/home/u/my proj").unwrap();
        assert_eq!(slot.identity_file(), "identity-mcp--_home_u_my proj.json");
        assert_eq!(slot.lock_file(), "identity-mcp--_home_u_my proj.lock");
        assert_eq!(slot.oplog_dir(), "oplog-mcp--_home_u_my proj");
        assert_eq!(slot.connection_codes_file(), "connection-codes-mcp--_home_u_my proj.json");
        let odd = SlotName::new("cc:peer", r#"\/:*?"<>|.ü 'x"#).unwrap();
        assert_eq!(odd.base(), "cc:peer--_________.ü 'x");
        assert_eq!(SlotName::new("mcp", "/a/b").unwrap(), SlotName::new("mcp", "/a_b").unwrap());
        // Hidden characters are written out, and as nothing else is.
        let odd = SlotName::new("mcp", "/\u{202e}\u{1b}[31m\u{7f}").unwrap();
        assert_eq!(odd.base(), "mcp--_<202e><1b>[31m<7f>");
        assert_ne!(odd, SlotName::new("mcp", "/<202e><1b>[31m<7f>").unwrap());
        assert_eq!(SlotName::new("mcp", "/👩\u{200d}💻").unwrap().base(), "mcp--_👩\u{200d}💻");
        let second = SlotName::numbered("mcp", "/a/b", 2).unwrap();
        assert_eq!(second.identity_file(), "identity-mcp--_a_b~2.json");
    }

    #[test]
    fn names_that_make_no_file_are_refused_by_path() {
        let code = |harness, cwd: &str| SlotName::new(harness, cwd).unwrap_err().code();
        for harness in ["", "a/b", "a\0", "../../x"] {
            assert_eq!(code(harness, "/w"), "slot_harness");
        }
        assert_eq!(code("mcp", "/a\0b"), "slot_directory");
        let long = |n: usize| format!("/{}", "ü".repeat(n));
        assert_eq!(code("mcp", &long(110)), "slot_name_too_long");
        let error = SlotName::new("mcp", &format!("/\x1b{}", long(200))).unwrap_err().to_string();
        assert!(error.contains("directory /\\u{1b}/üü") && error.contains("255"), "{error}");
        // The longest that is taken fits with every name that will be made of it.
        let longest = (1..110).rev().find_map(|n| SlotName::new("mcp", &long(n)).ok()).unwrap();
        let aside = format!("{}.unreadable-{}", longest.identity_file(), NOW.0);
        assert!((MAX_NAME - 1..=MAX_NAME).contains(&aside.len()));
        assert!(longest.connection_codes_file().len() <= MAX_NAME);
        assert!(longest.lock_file().len() + ".takeover".len() <= MAX_NAME);
    }

    #[test]
    fn a_new_slot_has_the_references_form() {
        let mut bench = Bench::new();
        let opened = bench.open(NOW).unwrap();
        assert_eq!((opened.opening, opened.kept_aside), (Opening::Created, None));
        let text = bench.text();
        let lines: Vec<_> = text.lines().collect();
        let key = opened.slot.key().to_pkcs8_pem().unwrap().replace('\n', "\\n");
        let certificate = opened.slot.certificate().pem().replace('\n', "\\n");
        assert_eq!(
            lines,
            [
                "{",
                &format!("  \"privateKey\": \"{key}\","),
                &format!("  \"certificate\": \"{certificate}\","),
                "  \"expiresAt\": \"2027-11-29T21:51:37.142Z\"",
                "}"
            ]
        );
        assert!(text.ends_with("}\n"));
        let mode = std::fs::metadata(bench.path()).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let again = bench.open(NOW.plus(5)).unwrap();
        assert_eq!(again.opening, Opening::Loaded);
        assert_eq!(again.slot.key().id(), opened.slot.key().id());
        assert_eq!(again.slot.expires_at(), Some(NOW.plus(VALIDITY_MS)));
        assert_eq!(bench.text(), text, "loading writes nothing");
    }

    #[test]
    fn a_file_of_the_reference_keeps_everything() {
        let mut bench = Bench::new();
        let id = bench.open(NOW).unwrap().slot.key().id();
        // As a reference process rewrites it: other order, a member of a later version, tokens.
        let ours: Value = serde_json::from_str(&bench.text()).unwrap();
        let theirs = json!({
            "futureMember": { "b": 1, "a": [1.5, null, "x"] },
            "expiresAt": ours["expiresAt"],
            "certificate": ours["certificate"],
            "privateKey": ours["privateKey"],
            "roomTokens": { "z/room": ["aa", { "1": -7, "4": "bb" }, null, "cc"], "a/room": [] },
            "issuedGrants": { "z/room::00ff": "aWQ=" },
        });
        let text = serde_json::to_string_pretty(&theirs).unwrap() + "\n";
        bench.put(&text);
        let mut slot = bench.open(NOW).unwrap().slot;
        assert_eq!(slot.key().id(), id);
        assert_eq!(bench.text(), text);
        let rooms: Vec<_> = slot.entries(SlotTable::RoomTokens).map(|(room, _)| room).collect();
        assert_eq!(rooms, ["z/room", "a/room"]);
        assert_eq!(slot.entry(SlotTable::IssuedGrants, "z/room::00ff"), Some(&json!("aWQ=")));
        assert_eq!(slot.entries(SlotTable::GroupTokens).count(), 0);

        slot.apply(
            &bench.lock,
            &[
                change(SlotTable::RoomTokens, "z/room", None),
                change(SlotTable::RoomTokens, "new", Some(json!([1]))),
                change(SlotTable::GroupTokens, "g", Some(json!("t"))),
            ],
        )
        .unwrap();
        let mut expected = theirs.clone();
        expected["roomTokens"] = json!({ "a/room": [], "new": [1] });
        expected["groupTokens"] = json!({ "g": "t" });
        assert_eq!(bench.text(), serde_json::to_string_pretty(&expected).unwrap() + "\n");
        assert_eq!(bench.open(NOW).unwrap().slot.entries(SlotTable::RoomTokens).count(), 2);
    }

    #[test]
    fn changes_start_from_what_is_on_disk() {
        let mut bench = Bench::new();
        let mut slot = bench.open(NOW).unwrap().slot;
        // A Node process without the lock adds a token meanwhile.
        let mut theirs: Value = serde_json::from_str(&bench.text()).unwrap();
        theirs["roomTokens"] = json!({ "theirs": ["t"] });
        bench.put(&(serde_json::to_string_pretty(&theirs).unwrap() + "\n"));
        let add = change(SlotTable::RoomTokens, "ours", Some(json!(["o"])));
        slot.apply(&bench.lock, &[add]).unwrap();
        let tokens = serde_json::from_str::<Value>(&bench.text()).unwrap()["roomTokens"].clone();
        assert_eq!(tokens, json!({ "theirs": ["t"], "ours": ["o"] }));
        assert!(slot.entry(SlotTable::RoomTokens, "theirs").is_some());
        // Removed by hand: everything known is written again.
        bench.dir.remove(&bench.name.identity_file()).unwrap();
        slot.apply(&bench.lock, &[change(SlotTable::GroupTokens, "g", Some(json!(1)))]).unwrap();
        let opened = bench.open(NOW).unwrap();
        assert_eq!(opened.opening, Opening::Loaded);
        assert_eq!(opened.slot.entries(SlotTable::RoomTokens).count(), 2);
    }

    #[test]
    fn certificates_are_renewed_in_time_with_the_same_key() {
        let mut bench = Bench::new();
        let first = bench.open(NOW).unwrap().slot;
        let due = NOW.plus(VALIDITY_MS - RENEWAL_MARGIN_MS);
        assert_eq!(bench.open(due).unwrap().opening, Opening::Loaded);
        let renewed = bench.open(due.plus(1)).unwrap();
        assert_eq!(renewed.opening, Opening::Renewed);
        assert_eq!(renewed.slot.key().id(), first.key().id());
        assert_ne!(renewed.slot.certificate(), first.certificate());
        assert_eq!(renewed.slot.expires_at(), Some(due.plus(1 + VALIDITY_MS)));
        let mut slot = bench.open(due.plus(2)).unwrap().slot;
        assert_eq!(slot.certificate(), renewed.slot.certificate());

        // While serving, too.
        let entropy = &mut SeededEntropy::new(2);
        assert!(!slot.renew_if_due(&bench.lock, due, entropy).unwrap());
        assert!(slot.renew_if_due(&bench.lock, due.plus(VALIDITY_MS), entropy).unwrap());
        assert_ne!(slot.certificate(), renewed.slot.certificate());
        assert!(bench.text().contains(&slot.expires_at().unwrap().iso()));
    }

    #[test]
    fn damage_beside_the_key_costs_only_a_certificate() {
        let mut bench = Bench::new();
        let slot = bench.open(NOW).unwrap().slot;
        let good: Value = serde_json::from_str(&bench.text()).unwrap();
        let other = SlotName::new("mcp", "/elsewhere").unwrap();
        let other = claimed(&bench.dir, &other, &mut bench.entropy);
        let foreign = SlotFile::open(&bench.name, &other, NOW, &mut bench.entropy);
        assert_eq!(foreign.err().unwrap().code(), "slot_lock_lost", "another slot's lock");
        for (member, value) in [
            ("expiresAt", json!("soon")),
            ("expiresAt", json!(17)),
            ("expiresAt", Value::Null),
            ("certificate", json!("-----BEGIN")),
            ("certificate", Value::Null),
            ("certificate", json!(other_certificate())),
        ] {
            let mut bad = good.clone();
            bad[member] = value.clone();
            bad["roomTokens"] = json!({ "r": [] });
            bench.put(&bad.to_string());
            let opened = bench.open(NOW).unwrap();
            assert_eq!((opened.opening, opened.kept_aside), (Opening::Renewed, None), "{value}");
            assert_eq!(opened.slot.key().id(), slot.key().id());
            assert_eq!(opened.slot.entries(SlotTable::RoomTokens).count(), 1);
            let held = peer_public_key(opened.slot.certificate().der()).unwrap();
            assert_eq!(held.device(), slot.key().id());
        }
    }

    fn other_certificate() -> String {
        let key = DeviceKey::from_scalar(&[3; 32]).unwrap();
        crate::identity::certificate::self_signed(&key, NOW, &[0; 16]).unwrap().pem().to_owned()
    }

    #[test]
    fn a_file_without_a_usable_key_is_kept_aside() {
        let mut bench = Bench::new();
        let old = bench.open(NOW).unwrap().slot.key().id();
        let mut ids = vec![old];
        let half = bench.text()[..200].to_owned();
        let cases = [half.as_str(), "", "null", "{}", r#"{"privateKey":"nonsense"}"#, "\0\0\0"];
        for (round, bad) in cases.into_iter().enumerate() {
            bench.put(bad);
            let opened = bench.open(NOW).unwrap();
            assert_eq!(opened.opening, Opening::Created);
            let kept = opened.kept_aside.unwrap();
            assert_eq!(std::fs::read_to_string(&kept).unwrap(), bad);
            // Never over an earlier one, although the clock stands still.
            let name =
                format!("identity-mcp--_home_u_my proj.json.unreadable-{}", NOW.0 + round as u64);
            assert_eq!(kept, bench.dir.file(&name));
            let id = opened.slot.key().id();
            assert!(!ids.contains(&id));
            ids.push(id);
            assert_eq!(bench.open(NOW).unwrap().slot.key().id(), id);
        }
    }

    #[test]
    fn a_loose_key_file_is_refused_and_left_as_it_is() {
        let mut bench = Bench::new();
        bench.open(NOW).unwrap();
        let text = bench.text();
        for mode in [0o640, 0o604, 0o666] {
            std::fs::set_permissions(bench.path(), std::fs::Permissions::from_mode(mode)).unwrap();
            let error = bench.open(NOW).err().unwrap();
            assert_eq!(error.code(), "file_loose");
            assert!(error.to_string().contains("chmod 600"), "{error}");
        }
        assert_eq!(bench.text(), text);
    }

    #[test]
    fn without_the_lock_nothing_is_written() {
        let mut bench = Bench::new();
        let mut slot = bench.open(NOW).unwrap().slot;
        let text = bench.text();
        bench.dir.remove(&bench.name.lock_file()).unwrap();
        let add = [change(SlotTable::RoomTokens, "r", Some(json!([])))];
        assert_eq!(slot.apply(&bench.lock, &add).unwrap_err().code(), "slot_lock_lost");
        let late = NOW.plus(VALIDITY_MS);
        let renewal = slot.renew_if_due(&bench.lock, late, &mut bench.entropy);
        assert_eq!(renewal.unwrap_err().code(), "slot_lock_lost");
        assert_eq!(bench.open(late).err().unwrap().code(), "slot_lock_lost");
        assert_eq!(bench.text(), text);
        assert_eq!(slot.entries(SlotTable::RoomTokens).count(), 0);
    }

    #[test]
    fn another_identity_in_the_file_is_not_overwritten() {
        let mut bench = Bench::new();
        let mut slot = bench.open(NOW).unwrap().slot;
        let mut other = Bench::new();
        other.entropy = SeededEntropy::new(99);
        other.open(NOW).unwrap();
        for text in [other.text(), "{}".to_owned(), "half".to_owned()] {
            bench.put(&text);
            let add = [change(SlotTable::RoomTokens, "r", Some(json!([])))];
            assert_eq!(slot.apply(&bench.lock, &add).unwrap_err().code(), "slot_key_replaced");
            assert_eq!(bench.text(), text);
        }
    }
}
