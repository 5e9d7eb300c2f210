//! The durable state of one owner of the Agent Collaboration Protocol: what
//! [`Owner`](crate::acp::owner::Owner) asks to be stored, in the order in which it asked, in one redb
//! file; keys of tasks are files of their own beside it, so that they can be unlinked (decision 47).
//!
//! A commit is one transaction with one sync; it also takes out what there is of forgotten tasks. A
//! file that cannot be read as a whole is refused.

use std::collections::BTreeSet;
use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use redb::{Database, ReadableDatabase as _, ReadableTable as _, TableDefinition, TableError};
use zeroize::Zeroizing;

use super::disk::{self, ENTRIES, Place};
use super::{StoreError, disk::unusable};
use crate::acp::forgotten::{Row, Tombstone};
use crate::acp::gateway::{StoreSecret, TaskRecord};
use crate::acp::owner::{OwnerRecord, Stored};
use crate::acp::value::{Digest, SessionKeyId};
use crate::codec::time::UnixMillis;

const FILE: &str = "owner.redb";
const KEYS: &str = "keys";
const SUFFIX: &str = ".key";

/// Format of the records. Every change of [`OwnerRecord`] that an older commsd could not read makes
/// a new one.
const FORMAT: u64 = 2;

/// What is kept of forgotten tasks: by a task's digest, or under no key the time until when nothing
/// unknown is taken, two times in ms. New with format 2, under which an older commsd would take a
/// forgotten proposal again.
const FORGOTTEN: TableDefinition<'_, &[u8], (u64, u64)> = TableDefinition::new("forgotten");

/// Bytes of the number of a record, with which its key begins; its task's digest follows.
const NUMBER: usize = 8;

/// Keeps what one owner asks for.
pub struct OwnerStore {
    path: PathBuf,
    place: Place,
    database: Database,
    next: u64,
}

/// What was stored.
#[derive(Debug, Default)]
pub struct Kept {
    /// Records, in the order in which they were stored.
    pub records: Vec<Stored>,
    /// Keys of tasks.
    pub secrets: Vec<StoreSecret>,
    /// What is kept of forgotten tasks.
    pub forgotten: Vec<Row>,
}

/// What is stored at once.
#[derive(Clone, Copy, Debug, Default)]
pub struct Commit<'a> {
    /// Keys of tasks; before all else.
    pub secrets: &'a [StoreSecret],
    /// Records.
    pub records: &'a [Stored],
    /// Tasks whose records go.
    pub forgotten: &'a [Digest],
    /// What is kept of such tasks.
    pub rows: &'a [Row],
    /// Clock: uses of approvals that are over by now go with the tasks.
    pub now: UnixMillis,
}

impl OwnerStore {
    /// Opens the store in `dir`, which is made when missing (0700; files 0600).
    ///
    /// # Errors
    /// [`StoreError`]; nothing is made anew in place of what cannot be read. `Locked` when another
    /// process works with this owner.
    pub fn open(dir: &Path) -> Result<(Self, Kept), StoreError> {
        let path = dir.join(FILE);
        let failed = |error: io::Error| unusable(&path, &error);
        for dir in [dir.to_owned(), dir.join(KEYS)] {
            DirBuilder::new().recursive(true).mode(0o700).create(&dir).map_err(failed)?;
            std::fs::set_permissions(&dir, Permissions::from_mode(0o700)).map_err(failed)?;
        }
        if !path.try_exists().map_err(failed)? {
            disk::create(dir, &path, FORMAT)?;
        }
        let database = disk::open_file(&path)?;
        let found = disk::meta(&database, &path, disk::VERSION)?;
        if found > FORMAT {
            return Err(StoreError::Newer { path, found, known: FORMAT });
        }
        if found < FORMAT {
            upgrade(&database, &path)?;
        }
        let (records, next) = read(&database, &path)?;
        let forgotten = read_forgotten(&database, &path)?;
        let place = Place::of(&path)?;
        let store = Self { path, place, database, next };
        let secrets = store.secrets(&records)?;
        Ok((store, Kept { records, secrets, forgotten }))
    }

    fn keys(&self) -> PathBuf {
        self.path.with_file_name(KEYS)
    }

    /// The keys that records name. One without a record was written before a crash took the record:
    /// nothing was ever encrypted to it, and it goes.
    fn secrets(&self, records: &[Stored]) -> Result<Vec<StoreSecret>, StoreError> {
        let failed = |error: io::Error| unusable(&self.path, &error);
        let named: BTreeSet<&str> = records
            .iter()
            .filter_map(|stored| match &stored.record {
                OwnerRecord::Task { record: TaskRecord::OwnKey { key } } => {
                    Some(key.session_key_id.as_str())
                }
                _ => None,
            })
            .collect();
        let mut secrets = Vec::new();
        for entry in std::fs::read_dir(self.keys()).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name();
            let Some(id) = name.to_str().and_then(|name| name.strip_suffix(SUFFIX)) else {
                continue;
            };
            if !named.contains(id) {
                std::fs::remove_file(entry.path()).map_err(failed)?;
                continue;
            }
            let bytes = Zeroizing::new(std::fs::read(entry.path()).map_err(failed)?);
            let broken = || StoreError::Corrupt(format!("{}: no key", entry.path().display()));
            let secret = Zeroizing::new(<[u8; 32]>::try_from(&bytes[..]).map_err(|_| broken())?);
            secrets
                .push(StoreSecret { id: SessionKeyId::parse(id).map_err(|_| broken())?, secret });
        }
        Ok(secrets)
    }

    /// Keeps secrets, then all the rest, or nothing of it.
    ///
    /// # Errors
    /// [`StoreError`]: the owner's state is ahead of what is kept, and must not be used any more.
    pub fn commit(&mut self, commit: Commit<'_>) -> Result<(), StoreError> {
        let Commit { secrets, records, forgotten, rows, now } = commit;
        let failed = |error: io::Error| unusable(&self.path, &error);
        for secret in secrets {
            let path = self.keys().join(format!("{}{SUFFIX}", secret.id));
            let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
            let mut file = file.map_err(failed)?;
            file.write_all(&*secret.secret).map_err(failed)?;
            file.sync_all().map_err(failed)?;
        }
        if !secrets.is_empty() {
            File::open(self.keys()).and_then(|dir| dir.sync_all()).map_err(failed)?;
        }
        if records.is_empty() && forgotten.is_empty() && rows.is_empty() {
            return Ok(());
        }
        let path = self.path.clone();
        let transaction =
            self.database.begin_write().map_err(|error| disk::transaction_failed(&path, error))?;
        {
            let mut table = transaction
                .open_table(ENTRIES)
                .map_err(|error| disk::table_failed(&path, error))?;
            for (number, stored) in (self.next..).zip(records) {
                let value = serde_json::to_vec(&stored.record)
                    .map_err(|error| StoreError::Encoding(error.to_string()))?;
                table
                    .insert(&key(number, stored.task.as_ref())[..], &value[..])
                    .map_err(|error| disk::storage_failed(&path, error))?;
            }
            if !forgotten.is_empty() {
                let forgotten: BTreeSet<String> = forgotten.iter().map(Digest::to_string).collect();
                table
                    .retain(|key, value| match key.get(NUMBER..).unwrap_or_default() {
                        [] => !is_over(value, now),
                        task => {
                            std::str::from_utf8(task).is_ok_and(|task| !forgotten.contains(task))
                        }
                    })
                    .map_err(|error| disk::storage_failed(&path, error))?;
            }
        }
        if !rows.is_empty() {
            let table = transaction.open_table(FORGOTTEN);
            let mut table = table.map_err(|error| disk::table_failed(&path, error))?;
            for (task, kept) in rows {
                let key = task.as_ref().map(Digest::to_string).unwrap_or_default();
                let changed = match kept {
                    Some(kept) => {
                        table.insert(key.as_bytes(), (kept.proposed_at.0, kept.until.0)).map(drop)
                    }
                    None => table.remove(key.as_bytes()).map(drop),
                };
                changed.map_err(|error| disk::storage_failed(&path, error))?;
            }
        }
        transaction.commit().map_err(|error| disk::commit_failed(&path, error))?;
        self.next += records.len() as u64;
        self.place.check()
    }

    /// Unlinks keys that nobody needs any more. One that is gone already is no fault.
    ///
    /// # Errors
    /// [`StoreError`]; they can be unlinked later.
    pub fn unlink(&self, spent: &[SessionKeyId]) -> Result<(), StoreError> {
        for id in spent {
            match std::fs::remove_file(self.keys().join(format!("{id}{SUFFIX}"))) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(unusable(&self.path, &error)),
            }
        }
        Ok(())
    }
}

/// Whether an owner's record says nothing any more. Only uses of approvals end by themselves; their
/// beginning tells them apart without reading all of the others.
fn is_over(value: &[u8], now: UnixMillis) -> bool {
    value.starts_with(br#"{"of":"approval_used""#)
        && matches!(
            serde_json::from_slice(value),
            Ok(OwnerRecord::ApprovalUsed { used }) if used.until <= now
        )
}

/// Makes a file of an older format one of this format: the table that is new in it.
fn upgrade(database: &Database, path: &Path) -> Result<(), StoreError> {
    let transaction =
        database.begin_write().map_err(|error| disk::transaction_failed(path, error))?;
    transaction.open_table(FORGOTTEN).map_err(|error| disk::table_failed(path, error))?;
    disk::set_meta(&transaction, path, disk::VERSION, FORMAT)?;
    transaction.commit().map_err(|error| disk::commit_failed(path, error))
}

fn read_forgotten(database: &Database, path: &Path) -> Result<Vec<Row>, StoreError> {
    let transaction =
        database.begin_read().map_err(|error| disk::transaction_failed(path, error))?;
    let table = match transaction.open_table(FORGOTTEN) {
        // Nothing was forgotten yet.
        Err(TableError::TableDoesNotExist(_)) => return Ok(Vec::new()),
        table => table.map_err(|error| disk::table_failed(path, error))?,
    };
    let mut rows = Vec::new();
    for entry in table.iter().map_err(|error| disk::storage_failed(path, error))? {
        let (key, value) = entry.map_err(|error| disk::storage_failed(path, error))?;
        let (proposed_at, until) = value.value();
        let kept = Tombstone { proposed_at: UnixMillis(proposed_at), until: UnixMillis(until) };
        let task = match key.value() {
            [] => None,
            key => {
                let task = std::str::from_utf8(key).ok().and_then(|text| Digest::parse(text).ok());
                Some(
                    task.ok_or_else(|| disk::corrupt(path, "a forgotten task without its digest"))?,
                )
            }
        };
        rows.push((task, Some(kept)));
    }
    Ok(rows)
}

fn key(number: u64, task: Option<&Digest>) -> Vec<u8> {
    let mut key = number.to_be_bytes().to_vec();
    key.extend(task.map(Digest::to_string).unwrap_or_default().bytes());
    key
}

fn read(database: &Database, path: &Path) -> Result<(Vec<Stored>, u64), StoreError> {
    let transaction =
        database.begin_read().map_err(|error| disk::transaction_failed(path, error))?;
    let table = transaction.open_table(ENTRIES).map_err(|error| disk::table_failed(path, error))?;
    let (mut records, mut next) = (Vec::new(), 0);
    for entry in table.iter().map_err(|error| disk::storage_failed(path, error))? {
        let (key, value) = entry.map_err(|error| disk::storage_failed(path, error))?;
        let (number, task) = key.value().split_at_checked(NUMBER).unwrap_or_default();
        let number = <[u8; NUMBER]>::try_from(number);
        let number = number.map_err(|_| disk::corrupt(path, "a key without a number"))?;
        let digest = std::str::from_utf8(task).ok().and_then(|text| Digest::parse(text).ok());
        if digest.is_none() && !task.is_empty() {
            return Err(disk::corrupt(path, "a key with half a task"));
        }
        let record = serde_json::from_slice(value.value())
            .map_err(|error| disk::corrupt(path, format!("a record cannot be read: {error}")))?;
        next = u64::from_be_bytes(number) + 1;
        records.push(Stored { task: digest, record });
    }
    Ok((records, next))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::acp::owner::Route;

    fn stored(n: u8) -> Stored {
        let task = n.is_multiple_of(2).then(|| Digest::of(&n).unwrap());
        Stored { task, record: OwnerRecord::Route { route: Route::Mesh { device: n.to_string() } } }
    }

    fn records(records: &[Stored]) -> Commit<'_> {
        Commit { records, ..Commit::default() }
    }

    fn mode(path: &Path) -> u32 {
        std::fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn what_was_kept_comes_back_in_order_and_nobody_else_can_read_it() {
        let dir = tempfile::tempdir().unwrap();
        let home = dir.path().join("owner");
        let (mut store, kept) = OwnerStore::open(&home).unwrap();
        assert!(kept.records.is_empty() && kept.secrets.is_empty());
        let all: Vec<Stored> = (0..20).map(stored).collect();
        store.commit(records(&all[..7])).unwrap();
        store.commit(records(&all[7..])).unwrap();
        assert!(matches!(OwnerStore::open(&home), Err(StoreError::Locked { .. })));
        drop(store);
        assert_eq!(OwnerStore::open(&home).unwrap().1.records, all);
        assert_eq!(
            (mode(&home), mode(&home.join(KEYS)), mode(&home.join(FILE))),
            (0o700, 0o700, 0o600)
        );
    }

    #[test]
    fn a_key_without_its_record_goes_and_one_with_it_stays_until_it_is_spent() {
        use crate::acp::objects::SessionKey;
        use crate::acp::value::Key32;
        let dir = tempfile::tempdir().unwrap();
        let (mut store, _) = OwnerStore::open(dir.path()).unwrap();
        let secret = |id: &str, byte| StoreSecret {
            id: SessionKeyId::parse(id).unwrap(),
            secret: Zeroizing::new([byte; 32]),
        };
        let named = secret("sk_aaaaaaaaaaaa", 1);
        let key = SessionKey { session_key_id: named.id.clone(), public_key: Key32([9; 32]) };
        let record = OwnerRecord::Task { record: TaskRecord::OwnKey { key } };
        let record = Stored { task: Some(Digest::of(&1).unwrap()), record };
        let unnamed = [secret("sk_bbbbbbbbbbbb", 2)];
        store.commit(Commit { secrets: &unnamed, ..Commit::default() }).unwrap();
        let secrets = std::slice::from_ref(&named);
        store.commit(Commit { secrets, ..records(&[record]) }).unwrap();
        let file = dir.path().join(KEYS).join("sk_aaaaaaaaaaaa.key");
        assert_eq!(mode(&file), 0o600);
        drop(store);
        let (store, kept) = OwnerStore::open(dir.path()).unwrap();
        assert_eq!(kept.secrets.len(), 1);
        assert_eq!((&kept.secrets[0].id, *kept.secrets[0].secret), (&named.id, [1; 32]));
        assert_eq!(std::fs::read_dir(dir.path().join(KEYS)).unwrap().count(), 1);
        store.unlink(std::slice::from_ref(&named.id)).unwrap();
        store.unlink(&[named.id]).unwrap();
        assert!(!file.exists());
    }

    #[test]
    fn what_is_forgotten_goes_with_what_is_stored_and_uses_that_are_over_go_with_it() {
        use crate::acp::approval::Used;
        use crate::acp::value::ApprovalId;
        let dir = tempfile::tempdir().unwrap();
        let (mut store, _) = OwnerStore::open(dir.path()).unwrap();
        let used = |n: u64| {
            let receipt_id = ApprovalId::parse(&format!("apr_{n:08}")).unwrap();
            let used = Used { receipt: Digest::of(&n).unwrap(), receipt_id, until: UnixMillis(n) };
            Stored { task: None, record: OwnerRecord::ApprovalUsed { used } }
        };
        let all: Vec<Stored> = (0..20).map(stored).chain([used(5), used(6)]).collect();
        store.commit(records(&all)).unwrap();
        let task = |n: u8| Digest::of(&n).unwrap();
        let kept = Tombstone { proposed_at: UnixMillis(1), until: UnixMillis(2) };
        let rows = [(Some(task(4)), Some(kept)), (None, Some(kept)), (Some(task(8)), Some(kept))];
        // The last words of a task that is forgotten come with it.
        let last = [stored(4), stored(2)];
        let forgotten = [task(4), task(8)];
        let now = UnixMillis(5);
        store.commit(Commit { forgotten: &forgotten, rows: &rows, now, ..records(&last) }).unwrap();
        let gone = [(Some(task(8)), None)];
        store.commit(Commit { rows: &gone, ..Commit::default() }).unwrap();
        drop(store);
        let (_, found) = OwnerStore::open(dir.path()).unwrap();
        let stays = |stored: &Stored| ![Some(task(4)), Some(task(8))].contains(&stored.task);
        let mut wanted: Vec<Stored> = all.into_iter().filter(stays).collect();
        wanted.retain(|stored| *stored != used(5));
        wanted.push(stored(2));
        assert_eq!(found.records, wanted);
        assert_eq!(found.forgotten, [(None, Some(kept)), (Some(task(4)), Some(kept))]);
    }

    #[test]
    fn a_file_of_the_first_format_becomes_one_of_this() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE);
        disk::create(dir.path(), &path, 1).unwrap();
        let (store, kept) = OwnerStore::open(dir.path()).unwrap();
        assert!(kept.forgotten.is_empty());
        assert_eq!(disk::meta(&store.database, &path, disk::VERSION).unwrap(), FORMAT);
    }

    #[test]
    fn what_is_no_store_is_refused_and_left_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        drop(OwnerStore::open(dir.path()).unwrap());
        let path = dir.path().join(FILE);
        for bad in [&b""[..], b"not a store", &[0; 4096]] {
            std::fs::write(&path, bad).unwrap();
            let error = OwnerStore::open(dir.path()).err().unwrap();
            assert!(matches!(error, StoreError::Corrupt(_)), "{error}");
            assert_eq!(std::fs::read(&path).unwrap(), bad);
        }
    }
}
