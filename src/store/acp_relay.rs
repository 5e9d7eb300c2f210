//! A relay's records on disk (design 11, decision 49): one redb file, `relay.redb`, with the small
//! entries in one table and the bytes of envelopes in another, which is read only when an envelope is
//! fetched. It knows what an entry is found by, and nothing of what it is for.
//!
//! A commit is one transaction with one sync. After a failure nothing is taken until the file has
//! been opened again, and whoever keeps a relay's state rebuilds it from what is there then. Only one
//! process has the file open.

use std::fs::{DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use parking_lot::RwLock;
use redb::{
    Database, ReadableDatabase as _, ReadableTable as _, StorageError, TableDefinition, TableError,
};

use super::StoreError;
use super::disk::{
    ENTRIES, Place, VERSION, commit_failed, corrupt, create, meta, open_file, storage_failed,
    table_failed, transaction_failed, unusable,
};
use crate::acp::relay::{Cursor, Record};

const FILE: &str = "relay.redb";
/// Bytes of envelopes by their cursor.
const BODIES: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("bodies");
/// Format of the entries: a change of [`Record`] or of [`key`] that an older commsd could not read
/// makes a new one.
const FORMAT: u64 = 1;

/// A relay's file. Shared between the one thread that writes and those that fetch.
pub struct RelayDisk {
    path: PathBuf,
    place: Place,
    /// None after a failure, until it has been opened again.
    database: RwLock<Option<Database>>,
}

impl RelayDisk {
    /// Opens the file in `dir`, which is created when missing (0700; the file 0600), checks all of
    /// it, and hands out what is in it.
    ///
    /// # Errors
    /// [`StoreError`]: in use, of a newer format, damaged, or what `take` says of a record.
    pub fn open(
        dir: &Path,
        take: impl FnMut(Record) -> Result<(), String>,
    ) -> Result<Self, StoreError> {
        let path = dir.join(FILE);
        let failed = |error: io::Error| unusable(&path, &error);
        DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(failed)?;
        std::fs::set_permissions(dir, Permissions::from_mode(0o700)).map_err(failed)?;
        if !path.try_exists().map_err(failed)? {
            create(dir, &path, FORMAT)?;
        }
        let database = open_file(&path)?;
        let version = meta(&database, &path, VERSION)?;
        if version > FORMAT {
            return Err(StoreError::Newer { path, found: version, known: FORMAT });
        }
        if version < FORMAT {
            return Err(corrupt(&path, format!("format {version} is none that there was")));
        }
        read(&database, &path, take)?;
        let place = Place::of(&path)?;
        Ok(Self { path, place, database: RwLock::new(Some(database)) })
    }

    /// Whether it takes records; otherwise [`Self::reopen`] comes first.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.database.read().is_some()
    }

    /// Opens the file again after a failure, and hands out what is in it.
    ///
    /// # Errors
    /// [`StoreError`]; then nothing has changed.
    pub fn reopen(&self, take: impl FnMut(Record) -> Result<(), String>) -> Result<(), StoreError> {
        let mut slot = self.database.write();
        *slot = None;
        // Never another one in its place.
        self.place.check()?;
        let database = open_file(&self.path)?;
        read(&database, &self.path, take)?;
        *slot = Some(database);
        Ok(())
    }

    /// Keeps records, all of them or none. Once this has returned, no crash undoes it.
    ///
    /// # Errors
    /// [`StoreError`]; then they are not promised, and the file has to be opened again.
    pub fn commit(&self, records: &[Record]) -> Result<(), StoreError> {
        if records.is_empty() {
            return Ok(());
        }
        let result = self.write(records);
        if result.is_err() {
            *self.database.write() = None;
        }
        result
    }

    fn write(&self, records: &[Record]) -> Result<(), StoreError> {
        let path = &self.path;
        let slot = self.database.read();
        let database = slot.as_ref().ok_or(StoreError::Busy)?;
        let transaction = database.begin_write().map_err(|e| transaction_failed(path, e))?;
        {
            let opened = |error| table_failed(path, error);
            let mut entries = transaction.open_table(ENTRIES).map_err(opened)?;
            let mut bodies = transaction.open_table(BODIES).map_err(opened)?;
            let stored = |error: StorageError| storage_failed(path, error);
            for record in records {
                let (key, ends) = key(record);
                if ends {
                    entries.remove(key.as_slice()).map_err(stored)?;
                } else {
                    let value = postcard::to_allocvec(record)
                        .map_err(|error| StoreError::Encoding(error.to_string()))?;
                    entries.insert(key.as_slice(), value.as_slice()).map_err(stored)?;
                }
                match record {
                    Record::Envelope { cursor, json, .. } => {
                        bodies.insert(*cursor, json.as_slice()).map_err(stored)?;
                    }
                    Record::EnvelopeGone { cursor } => {
                        bodies.remove(*cursor).map_err(stored)?;
                    }
                    _ => {}
                }
            }
        }
        transaction.commit().map_err(|error| commit_failed(path, error))?;
        // What is written into a file that is not at its path is lost to whoever starts next.
        self.place.check()
    }

    /// The bytes of envelopes, those that are still there. Reads the disk.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn bodies(
        &self,
        cursors: impl IntoIterator<Item = Cursor>,
    ) -> Result<Vec<(Cursor, Vec<u8>)>, StoreError> {
        let path = &self.path;
        let slot = self.database.read();
        let database = slot.as_ref().ok_or(StoreError::Busy)?;
        let transaction = database.begin_read().map_err(|e| transaction_failed(path, e))?;
        let bodies = match transaction.open_table(BODIES) {
            // Nothing was ever stored.
            Err(TableError::TableDoesNotExist(_)) => return Ok(Vec::new()),
            opened => opened.map_err(|error| table_failed(path, error))?,
        };
        let mut found = Vec::new();
        for cursor in cursors {
            if let Some(body) = bodies.get(cursor.0).map_err(|e| storage_failed(path, e))? {
                found.push((cursor, body.value().to_vec()));
            }
        }
        Ok(found)
    }
}

fn read(
    database: &Database,
    path: &Path,
    mut take: impl FnMut(Record) -> Result<(), String>,
) -> Result<(), StoreError> {
    let transaction = database.begin_read().map_err(|error| transaction_failed(path, error))?;
    let entries = transaction.open_table(ENTRIES).map_err(|error| table_failed(path, error))?;
    for entry in entries.iter().map_err(|error| storage_failed(path, error))? {
        let (found, value) = entry.map_err(|error| storage_failed(path, error))?;
        let record: Record = postcard::from_bytes(value.value())
            .map_err(|_| corrupt(path, "an entry that is no record"))?;
        if key(&record) != (found.value().to_vec(), false) {
            return Err(corrupt(path, "an entry at the place of another"));
        }
        take(record).map_err(|what| corrupt(path, what))?;
    }
    Ok(())
}

/// What a record is found by, and whether it ends what is there.
fn key(record: &Record) -> (Vec<u8>, bool) {
    let of = |tag: u8, parts: &[&[u8]]| [&[tag], parts.concat().as_slice()].concat();
    match record {
        Record::Next { .. } => (of(b'x', &[]), false),
        Record::Envelope { cursor, .. } => (of(b'e', &[&cursor.to_be_bytes()]), false),
        Record::EnvelopeGone { cursor } => (of(b'e', &[&cursor.to_be_bytes()]), true),
        Record::Known { id, .. } => (of(b'k', &[id]), false),
        Record::KnownGone { id } => (of(b'k', &[id]), true),
        Record::Nonce { until, who, nonce } => {
            (of(b'n', &[&until.0.to_be_bytes(), who, nonce]), false)
        }
        Record::NonceGone { until, who, nonce } => {
            (of(b'n', &[&until.0.to_be_bytes(), who, nonce]), true)
        }
        Record::Contact { owner, peer, .. } => (of(b'c', &[owner, peer]), false),
        Record::ContactGone { owner, peer } => (of(b'c', &[owner, peer]), true),
        Record::Card { who, .. } => (of(b'r', &[who]), false),
        Record::CardGone { who } => (of(b'r', &[who]), true),
        Record::Notice { cursor, .. } => (of(b'v', &[&cursor.to_be_bytes()]), false),
        Record::NoticeGone { cursor } => (of(b'v', &[&cursor.to_be_bytes()]), true),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::acp::value::Digest;
    use crate::codec::time::UnixMillis;

    fn open(dir: &Path) -> Result<(RelayDisk, Vec<Record>), StoreError> {
        let mut found = Vec::new();
        let disk = RelayDisk::open(dir, |record| {
            found.push(record);
            Ok(())
        })?;
        Ok((disk, found))
    }

    fn envelope(cursor: u64, body: &[u8]) -> Record {
        Record::Envelope {
            cursor,
            to: [1; 32],
            from: [2; 32],
            id: [3; 32],
            digest: Digest::of_canonical(body),
            bytes: 3,
            until: UnixMillis(7),
            known_until: UnixMillis(9),
            json: body.to_vec(),
        }
    }

    fn every() -> Vec<Record> {
        let (who, nonce, until) = ([4; 32], [5; 16], UnixMillis(6));
        vec![
            Record::Next { cursor: 8 },
            envelope(1, b"one"),
            Record::Known { id: [7; 32], digest: Digest::of_canonical(b""), cursor: 0, until },
            Record::Nonce { until, who, nonce },
            Record::Contact { owner: who, peer: [9; 32], at: until },
            Record::Card { who, json: b"{}".to_vec() },
            Record::Notice { cursor: 2, at: until, json: b"{}".to_vec() },
        ]
    }

    fn sorted(mut records: Vec<Record>) -> Vec<Record> {
        records.sort_by_key(|record| key(record).0);
        records
    }

    #[test]
    fn what_was_committed_is_there_and_what_ended_is_not() {
        let home = tempfile::tempdir().unwrap();
        let (disk, found) = open(home.path()).unwrap();
        assert_eq!(found, []);
        assert_eq!(disk.bodies([Cursor(1)]).unwrap(), []);
        disk.commit(&every()).unwrap();
        let body = (Cursor(1), b"one".to_vec());
        assert_eq!(disk.bodies([Cursor(0), Cursor(1), Cursor(2)]).unwrap(), [body]);
        // No orderly end.
        drop(disk);
        let (disk, found) = open(home.path()).unwrap();
        let mut expected = sorted(every());
        for record in &mut expected {
            if let Record::Envelope { json, .. } = record {
                json.clear();
            }
        }
        assert_eq!(found, expected);
        let (who, nonce, until) = ([4; 32], [5; 16], UnixMillis(6));
        disk.commit(&[
            Record::EnvelopeGone { cursor: 1 },
            Record::KnownGone { id: [7; 32] },
            Record::NonceGone { until, who, nonce },
            Record::ContactGone { owner: who, peer: [9; 32] },
            Record::CardGone { who },
            Record::NoticeGone { cursor: 2 },
        ])
        .unwrap();
        assert_eq!(disk.bodies([Cursor(1)]).unwrap(), []);
        drop(disk);
        assert_eq!(open(home.path()).unwrap().1, [Record::Next { cursor: 8 }]);
    }

    #[test]
    fn one_relay_a_file_and_no_file_that_is_not_one() {
        let home = tempfile::tempdir().unwrap();
        let (disk, _) = open(home.path()).unwrap();
        let second = open(home.path()).err().unwrap();
        assert_eq!(second.code(), "store_locked");
        assert!(second.to_string().contains("relay.redb"), "{second}");
        drop(disk);
        let file = home.path().join(FILE);
        for bytes in [Vec::new(), vec![0xa5; 50_000], b"a text".to_vec()] {
            std::fs::write(&file, &bytes).unwrap();
            assert_eq!(open(home.path()).err().unwrap().code(), "store_corrupt");
            assert_eq!(std::fs::read(&file).unwrap(), bytes, "it is left as it is");
        }
        std::fs::remove_file(&file).unwrap();
        create(home.path(), &file, FORMAT + 1).unwrap();
        assert_eq!(open(home.path()).err().unwrap().code(), "store_newer");
        // Its own entries, at the wrong place.
        std::fs::remove_file(&file).unwrap();
        let (disk, _) = open(home.path()).unwrap();
        {
            let slot = disk.database.read();
            let transaction = slot.as_ref().unwrap().begin_write().unwrap();
            let value = postcard::to_allocvec(&envelope(1, b"one")).unwrap();
            transaction.open_table(ENTRIES).unwrap().insert(&b"e"[..], value.as_slice()).unwrap();
            transaction.commit().unwrap();
        }
        drop(disk);
        assert_eq!(open(home.path()).err().unwrap().code(), "store_corrupt");
    }

    #[test]
    fn a_file_that_is_gone_keeps_nothing_until_it_is_back() {
        let home = tempfile::tempdir().unwrap();
        let (disk, _) = open(home.path()).unwrap();
        let (file, away) = (home.path().join(FILE), home.path().join("away"));
        std::fs::rename(&file, &away).unwrap();
        assert_eq!(disk.commit(&[envelope(1, b"one")]).unwrap_err().code(), "store_gone");
        assert!(!disk.is_open());
        assert_eq!(disk.commit(&[envelope(1, b"one")]).unwrap_err().code(), "store_busy");
        assert_eq!(disk.reopen(|_| Ok(())).unwrap_err().code(), "store_gone");
        std::fs::rename(&away, &file).unwrap();
        disk.reopen(|_| Ok(())).unwrap();
        disk.commit(&[envelope(2, b"two")]).unwrap();
        assert_eq!(disk.bodies([Cursor(2)]).unwrap().len(), 1);
    }
}
