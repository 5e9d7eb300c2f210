//! The engine on disk: one redb file with one table of entries, and beside it a mark of how far it
//! had been reported as kept.
//!
//! A commit is one transaction with one sync, whoever it is for. There is one way back after
//! whatever has happened, [`DiskStore::open`]: the file is checked page by page, and what cannot be
//! trusted is refused and left as it is. A crash loses what was not reported as kept; redb then goes
//! back to the commit before. That the same does not happen to what *was* reported (a page gone bad,
//! an old copy put in place) shows by the mark: it is written after the sync, without one of its
//! own, so it is never ahead of a store that is whole. A commit into a file that is not at its path
//! any more is not kept: whoever starts next would not find it.

use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{
    DirBuilderExt as _, FileExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _,
};
use std::path::{Path, PathBuf};
use std::time::Duration;

use redb::{
    Builder, CommitError, Database, DatabaseError, ReadableDatabase as _, ReadableTable as _,
    StorageError, Table, TableDefinition, TableError, TransactionError, WriteTransaction,
};

use super::change::{Change, Reader, changes, encode, only_ends};
use super::{Store, StoreError};
use crate::mesh::journal::Record;

/// Bytes of entries kept unless the configuration says otherwise.
pub const DEFAULT_LIMIT: usize = 1024 * 1024 * 1024;
/// Memory for pages of the file. Everything is read once, at the start; later only the branches on
/// the way to what is written are wanted.
const CACHE_BYTES: usize = 4 * 1024 * 1024;

const FILE: &str = "store.redb";
const MARK: &str = "store.mark";

/// How files begin that are complete under another name only; six random characters follow.
const TEMPORARY: &str = ".store";
/// One that is older belongs to nobody who still writes it: copying the largest store takes less.
const LEFT_OVER_AFTER: Duration = Duration::from_secs(600);

pub(super) const ENTRIES: TableDefinition<'_, &[u8], &[u8]> = TableDefinition::new("entries");
const META: TableDefinition<'_, &str, u64> = TableDefinition::new("meta");
/// Format of the entries.
pub(super) const VERSION: &str = "version";
/// A file is made smaller at the start when it is larger than this, so that most starts have nothing
/// to do, and more than [`COMPACT_RATIO`] times what is in it.
const COMPACT_ABOVE: u64 = 16 * 1024 * 1024;
const COMPACT_RATIO: u64 = 4;
/// Commits so far.
const COMMITS: &str = "commits";

/// Records with their encoded form.
type Batch<'a> = Vec<(&'a Record, Vec<u8>)>;

type Step = fn(&WriteTransaction) -> Result<(), StoreError>;

/// A format of entries, and how those before it become it: step n makes format n + 2 of n + 1.
///
/// Every change of [`Record`] or of the keys in `change` that an older commsd could not read makes a
/// new format, also a mere addition: it would take the store for a damaged one, and not for a newer
/// one. A test holds the number to what entries look like.
struct Format {
    version: u64,
    steps: &'static [Step],
}

const FORMAT: Format = Format { version: 3, steps: &[as_it_is, as_it_is] };

/// The step to a format that only adds kinds of entries (2: shares, grants, what is
/// sought, who may begin conversations; 3: how far beacons make the machine known).
fn as_it_is(_: &WriteTransaction) -> Result<(), StoreError> {
    Ok(())
}

/// A file that is in use, and where it should be found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl Place {
    pub(super) fn of(path: &Path) -> Result<Self, StoreError> {
        let meta = std::fs::metadata(path).map_err(|error| unusable(path, &error))?;
        Ok(Self { path: path.to_owned(), device: meta.dev(), inode: meta.ino() })
    }

    /// That the file is still there.
    ///
    /// # Errors
    /// [`StoreError::Gone`]: it is not, or another is. Where the system does not tell, it counts as
    /// there.
    pub fn check(&self) -> Result<(), StoreError> {
        let there = match std::fs::metadata(&self.path) {
            Ok(meta) => (meta.dev(), meta.ino()) == (self.device, self.inode),
            Err(error) => {
                !matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
            }
        };
        if there { Ok(()) } else { Err(StoreError::Gone { path: self.path.clone() }) }
    }
}

/// What is worth a word about a store that was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// A store with its mark.
    Whole,
    /// None was there: an empty one was made.
    Nothing,
    /// It holds something, and its mark is missing or says nothing: whether it has gone back to an
    /// earlier state cannot be told.
    Unmarked,
}

/// Keeps records in a file.
pub struct DiskStore {
    path: PathBuf,
    place: Place,
    found: Found,
    compacted: Option<(u64, u64)>,
    mark: File,
    /// None after a failure, until it has been opened again.
    database: Option<Database>,
    commits: u64,
    bytes: usize,
    limit: usize,
}

impl DiskStore {
    /// Opens the store in `dir`, which is created when missing (0700; the file 0600), and reads
    /// what is in it. An older format is brought up to date after a copy has been put beside it.
    ///
    /// # Errors
    /// [`StoreError`]; then nothing has been changed that matters.
    pub fn open(dir: &Path, limit: usize) -> Result<(Self, Vec<Record>), StoreError> {
        Self::open_as(dir, limit, &FORMAT)
    }

    fn open_as(
        dir: &Path,
        limit: usize,
        format: &Format,
    ) -> Result<(Self, Vec<Record>), StoreError> {
        let path = dir.join(FILE);
        let failed = |error: io::Error| unusable(&path, &error);
        DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(failed)?;
        std::fs::set_permissions(dir, Permissions::from_mode(0o700)).map_err(failed)?;
        let mut found = Found::Whole;
        match std::fs::metadata(&path) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                if dir.join(MARK).try_exists().map_err(failed)? {
                    return Err(StoreError::Missing { path });
                }
                create(dir, &path, format.version)?;
                found = Found::Nothing;
            }
            Err(error) => return Err(failed(error)),
        }
        let mut database = open_file(&path)?;
        let version = meta(&database, &path, VERSION)?;
        if version > format.version {
            return Err(StoreError::Newer { path, found: version, known: format.version });
        }
        if version < format.version {
            drop(database);
            keep_copy(dir, &path, version)?;
            database = open_file(&path)?;
            migrate(&database, &path, version, format)?;
        }
        clear_left_overs(dir);
        let commits = meta(&database, &path, COMMITS)?;
        let mark = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(dir.join(MARK))
            .map_err(failed)?;
        let marked = check_mark(&mark, &path, commits)?;
        // Without commits there is nothing to go back to.
        if !marked && commits > 0 {
            found = Found::Unmarked;
        }
        let (records, bytes) = read(&database, &path)?;
        let place = Place::of(&path)?;
        let compacted = compact(&mut database, &path, bytes);
        let database = Some(database);
        let store = Self { path, place, found, compacted, mark, database, commits, bytes, limit };
        Ok((store, records))
    }

    /// Encoded bytes kept.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Where its file is.
    #[must_use]
    pub fn place(&self) -> &Place {
        &self.place
    }

    /// What was there when it was opened.
    #[must_use]
    pub fn found(&self) -> Found {
        self.found
    }

    /// The file's bytes before and after it was made smaller, if it was.
    #[must_use]
    pub fn compacted(&self) -> Option<(u64, u64)> {
        self.compacted
    }

    /// Opens the file again after a failure.
    fn database(&mut self) -> Result<&Database, StoreError> {
        if self.database.is_none() {
            // Never another one in its place.
            self.place.check()?;
            let database = open_file(&self.path)?;
            let commits = meta(&database, &self.path, COMMITS)?;
            check_mark(&self.mark, &self.path, commits)?;
            let (_, bytes) = read(&database, &self.path)?;
            (self.commits, self.bytes) = (commits, bytes);
            self.database = Some(database);
        }
        self.database.as_ref().ok_or(StoreError::Busy)
    }

    fn write(&mut self, batches: &[&[(&Record, Vec<u8>)]]) -> Result<(), StoreError> {
        let next = self.commits + 1;
        let path = self.path.clone();
        let database = self.database()?;
        let mut growth = 0;
        let transaction = database.begin_write().map_err(|e| transaction_failed(&path, e))?;
        {
            let mut entries =
                transaction.open_table(ENTRIES).map_err(|error| table_failed(&path, error))?;
            for (record, value) in batches.iter().copied().flatten() {
                for change in changes(record) {
                    growth += apply(&mut entries, change, value)
                        .map_err(|error| storage_failed(&path, error))?;
                }
            }
        }
        set_meta(&transaction, &path, COMMITS, next)?;
        transaction.commit().map_err(|error| commit_failed(&path, error))?;
        self.commits = next;
        self.bytes = self.bytes.saturating_add_signed(growth);
        // Without a sync, see above; should it fail, only the check after a crash is weaker.
        let _ = self.mark.write_all_at(&mark_bytes(next), 0);
        self.place.check()
    }
}

impl Store for DiskStore {
    fn commit(&mut self, records: &[Record]) -> Result<(), StoreError> {
        self.commit_all(&[records]).pop().unwrap_or(Ok(()))
    }

    fn commit_all(&mut self, batches: &[&[Record]]) -> Vec<Result<(), StoreError>> {
        let mut taken = 0;
        let encoded: Vec<Result<Batch<'_>, StoreError>> = batches
            .iter()
            .map(|records| {
                let encoded = records
                    .iter()
                    .map(|record| Ok((record, encode(record)?)))
                    .collect::<Result<Batch<'_>, StoreError>>()?;
                let growth: usize = encoded.iter().map(|(_, value)| value.len()).sum();
                if !only_ends(records) && self.bytes + taken + growth > self.limit {
                    return Err(StoreError::Full { limit: self.limit });
                }
                taken += growth;
                Ok(encoded)
            })
            .collect();
        let fitting: Vec<&[(&Record, Vec<u8>)]> =
            encoded.iter().filter_map(|batch| batch.as_deref().ok()).collect();
        let written = if fitting.iter().all(|batch| batch.is_empty()) {
            Ok(())
        } else {
            self.write(&fitting)
        };
        if written.as_ref().is_err_and(|error| !matches!(error, StoreError::Gone { .. })) {
            // redb takes no more until it has been opened again.
            self.database = None;
        }
        encoded.into_iter().map(|batch| batch.and_then(|_| written.clone())).collect()
    }

    fn live(&self) -> Result<Vec<Record>, StoreError> {
        match &self.database {
            Some(database) => read(database, &self.path).map(|(records, _)| records),
            None => open_file(&self.path)
                .and_then(|database| read(&database, &self.path))
                .map(|(records, _)| records),
        }
    }
}

/// Carries out a change; returns by how many bytes the entries grew.
fn apply(
    entries: &mut Table<'_, &'static [u8], &'static [u8]>,
    change: Change,
    value: &[u8],
) -> Result<isize, StorageError> {
    let size = |bytes: usize| isize::try_from(bytes).unwrap_or(isize::MAX);
    match change {
        Change::Put(key) => {
            let old = entries.insert(key.as_slice(), value)?;
            Ok(size(value.len()) - old.map_or(0, |old| size(old.value().len())))
        }
        Change::Remove(key) => {
            let old = entries.remove(key.as_slice())?;
            Ok(-old.map_or(0, |old| size(old.value().len())))
        }
        Change::RemoveRange(first, last) => {
            let mut done = Vec::new();
            for entry in entries.range(first.as_slice()..=last.as_slice())? {
                let (key, value) = entry?;
                done.push((key.value().to_vec(), value.value().len()));
            }
            let mut growth = 0;
            for (key, bytes) in done {
                entries.remove(key.as_slice())?;
                growth -= size(bytes);
            }
            Ok(growth)
        }
    }
}

/// Gives back what the file holds on to since it was fuller: pages that are free are used again, but
/// never given back by themselves. A file that stays as it is is as good.
fn compact(database: &mut Database, path: &Path, bytes: usize) -> Option<(u64, u64)> {
    let size = || std::fs::metadata(path).map(|meta| meta.len()).ok();
    let before = size()?;
    if before <= COMPACT_ABOVE || before / COMPACT_RATIO <= bytes as u64 {
        return None;
    }
    database.compact().ok().filter(|done| *done)?;
    Some((before, size()?))
}

pub(super) fn builder() -> Builder {
    let mut builder = Builder::new();
    builder.set_cache_size(CACHE_BYTES).set_check_integrity_on_open(true);
    builder
}

/// Makes an empty store under another name, and puts it in place when it is complete.
pub(super) fn create(dir: &Path, path: &Path, version: u64) -> Result<(), StoreError> {
    let failed = |error: io::Error| unusable(path, &error);
    let temporary = tempfile::Builder::new()
        .prefix(TEMPORARY)
        .permissions(Permissions::from_mode(0o600))
        .tempfile_in(dir)
        .map_err(failed)?;
    {
        let database =
            builder().create(temporary.path()).map_err(|error| database_failed(path, error))?;
        let transaction =
            database.begin_write().map_err(|error| transaction_failed(path, error))?;
        transaction.open_table(ENTRIES).map_err(|error| table_failed(path, error))?;
        set_meta(&transaction, path, VERSION, version)?;
        set_meta(&transaction, path, COMMITS, 0)?;
        transaction.commit().map_err(|error| commit_failed(path, error))?;
        database.close().map_err(|error| database_failed(path, error))?;
    }
    temporary.as_file().sync_all().map_err(failed)?;
    match temporary.persist_noclobber(path) {
        Ok(_) => {}
        // Another daemon was faster; who may use it shows when it is opened.
        Err(error) if error.error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(failed(error.error)),
    }
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(failed)
}

pub(super) fn open_file(path: &Path) -> Result<Database, StoreError> {
    let length = std::fs::metadata(path).map_err(|error| unusable(path, &error))?.len();
    if length == 0 {
        // redb would make a new one of it.
        return Err(corrupt(path, "the file is empty"));
    }
    builder().open(path).map_err(|error| database_failed(path, error))
}

pub(super) fn meta(database: &Database, path: &Path, name: &str) -> Result<u64, StoreError> {
    let transaction = database.begin_read().map_err(|error| transaction_failed(path, error))?;
    let table = transaction.open_table(META).map_err(|error| table_failed(path, error))?;
    let value = table.get(name).map_err(|error| storage_failed(path, error))?;
    value.map(|value| value.value()).ok_or_else(|| corrupt(path, format!("it has no {name}")))
}

pub(super) fn set_meta(
    transaction: &WriteTransaction,
    path: &Path,
    name: &str,
    value: u64,
) -> Result<(), StoreError> {
    let mut table = transaction.open_table(META).map_err(|error| table_failed(path, error))?;
    table.insert(name, value).map_err(|error| storage_failed(path, error))?;
    Ok(())
}

fn read(database: &Database, path: &Path) -> Result<(Vec<Record>, usize), StoreError> {
    let transaction = database.begin_read().map_err(|error| transaction_failed(path, error))?;
    let table = transaction.open_table(ENTRIES).map_err(|error| table_failed(path, error))?;
    let mut reader = Reader::new();
    let mut bytes = 0;
    for entry in table.iter().map_err(|error| storage_failed(path, error))? {
        let (key, value) = entry.map_err(|error| storage_failed(path, error))?;
        bytes += value.value().len();
        reader.take(key.value(), value.value()).map_err(|what| corrupt(path, what))?;
    }
    Ok((reader.records(), bytes))
}

/// A copy of a store of an older format, which is never written over.
fn keep_copy(dir: &Path, path: &Path, version: u64) -> Result<(), StoreError> {
    let failed = |error: io::Error| unusable(path, &error);
    let to = dir.join(format!("{FILE}.format-{version}"));
    if to.try_exists().map_err(failed)? {
        return Ok(());
    }
    let mut from = File::open(path).map_err(failed)?;
    let mut copy = tempfile::Builder::new()
        .prefix(TEMPORARY)
        .permissions(Permissions::from_mode(0o600))
        .tempfile_in(dir)
        .map_err(failed)?;
    io::copy(&mut from, copy.as_file_mut()).map_err(failed)?;
    copy.as_file().sync_all().map_err(failed)?;
    copy.persist(&to).map_err(|error| failed(error.error))?;
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(failed)
}

/// Removes what processes have left that died while they made a store or a copy of one.
fn clear_left_overs(dir: &Path) {
    let is_temporary = |name: &std::ffi::OsStr| {
        let random = name.to_str().and_then(|name| name.strip_prefix(TEMPORARY));
        random.is_some_and(|random| random.len() == 6 && !random.contains('.'))
    };
    let is_old = |entry: &std::fs::DirEntry| {
        let changed = entry.metadata().and_then(|meta| meta.modified());
        changed.is_ok_and(|at| at.elapsed().is_ok_and(|age| age > LEFT_OVER_AFTER))
    };
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        if is_temporary(&entry.file_name()) && is_old(&entry) {
            // In nobody's way but the disk's: the next start tries again.
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

fn migrate(
    database: &Database,
    path: &Path,
    version: u64,
    format: &Format,
) -> Result<(), StoreError> {
    let done = usize::try_from(version).ok().and_then(|version| version.checked_sub(1));
    let Some(steps) = done.and_then(|done| format.steps.get(done..)) else {
        return Err(corrupt(path, format!("format {version} is none that there was")));
    };
    let transaction = database.begin_write().map_err(|error| transaction_failed(path, error))?;
    for step in steps {
        step(&transaction)?;
    }
    set_meta(&transaction, path, VERSION, format.version)?;
    transaction.commit().map_err(|error| commit_failed(path, error))
}

/// The number, and the number inverted: half a mark, or none, says nothing.
fn mark_bytes(commits: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    let (number, inverted) = bytes.split_at_mut(8);
    number.copy_from_slice(&commits.to_be_bytes());
    inverted.copy_from_slice(&(!commits).to_be_bytes());
    bytes
}

/// Whether the mark says anything. It may say nothing after a power failure, being written without
/// a sync: so that is no reason to refuse.
fn check_mark(mark: &File, path: &Path, commits: u64) -> Result<bool, StoreError> {
    let mut bytes = [0; 16];
    if mark.read_exact_at(&mut bytes, 0).is_err() {
        return Ok(false);
    }
    let mut number = [0; 8];
    number.copy_from_slice(&bytes[..8]);
    let reported = u64::from_be_bytes(number);
    if bytes != mark_bytes(reported) {
        return Ok(false);
    }
    if reported > commits {
        return Err(StoreError::RolledBack { path: path.to_owned(), found: commits, reported });
    }
    Ok(true)
}

// --- errors ---------------------------------------------------------------------------------------

pub(super) fn unusable(path: &Path, error: &io::Error) -> StoreError {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            StoreError::NoSpace { path: path.to_owned() }
        }
        _ => StoreError::Unavailable { path: path.to_owned(), reason: error.to_string() },
    }
}

pub(super) fn corrupt(path: &Path, what: impl std::fmt::Display) -> StoreError {
    StoreError::Corrupt(format!("{}: {what}", path.display()))
}

pub(super) fn storage_failed(path: &Path, error: StorageError) -> StoreError {
    match error {
        StorageError::Io(error) => match error.kind() {
            io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof => corrupt(path, error),
            _ => unusable(path, &error),
        },
        StorageError::Corrupted(what) => corrupt(path, what),
        other => StoreError::Unavailable { path: path.to_owned(), reason: other.to_string() },
    }
}

pub(super) fn database_failed(path: &Path, error: DatabaseError) -> StoreError {
    match error {
        DatabaseError::DatabaseAlreadyOpen | DatabaseError::LockProtocolMismatch => {
            StoreError::Locked { path: path.to_owned() }
        }
        DatabaseError::Storage(error) => storage_failed(path, error),
        other => corrupt(path, other),
    }
}

pub(super) fn transaction_failed(path: &Path, error: TransactionError) -> StoreError {
    match error {
        TransactionError::Storage(error) => storage_failed(path, error),
        other => StoreError::Unavailable { path: path.to_owned(), reason: other.to_string() },
    }
}

pub(super) fn table_failed(path: &Path, error: TableError) -> StoreError {
    match error {
        TableError::Storage(error) => storage_failed(path, error),
        other => corrupt(path, other),
    }
}

pub(super) fn commit_failed(path: &Path, error: CommitError) -> StoreError {
    match error {
        CommitError::Storage(error) => storage_failed(path, error),
        other => StoreError::Unavailable { path: path.to_owned(), reason: other.to_string() },
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;
    use crate::codec::time::UnixMillis;
    use crate::identity::device::DeviceId;
    use crate::identity::entropy::{Entropy as _, SeededEntropy};
    use crate::mesh::discovery::{Sides, Visibility};
    use crate::mesh::records::ConsentPolicy;
    use crate::store::MemoryStore;

    const LIMIT: usize = 64 * 1024 * 1024;

    fn id(n: u8) -> DeviceId {
        DeviceId([n; 32])
    }

    fn mail(agent: u8, seq: u64) -> Record {
        let event = vec![seq as u8; 200 + seq as usize % 700];
        Record::Mailbox { agent: id(agent), seq, at: UnixMillis(seq), event }
    }

    fn open(dir: &Path) -> Result<(DiskStore, Vec<Record>), StoreError> {
        DiskStore::open(dir, LIMIT)
    }

    fn mode(path: &Path) -> u32 {
        std::fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn what_was_committed_is_there_after_opening_again_and_nobody_else_can_read_it() {
        let home = tempfile::tempdir().unwrap();
        let dir = home.path().join("state/store");
        let (mut store, found) = open(&dir).unwrap();
        assert!(found.is_empty());
        for path in [dir.clone(), dir.join(FILE), dir.join(MARK)] {
            assert_eq!(mode(&path) & 0o077, 0, "{}", path.display());
        }
        store.commit(&[mail(1, 1), mail(1, 2), mail(2, 1)]).unwrap();
        store.commit(&[Record::Acknowledged { agent: id(1), seq: 1 }]).unwrap();
        let live = store.live().unwrap();
        assert_eq!(live.len(), 3);
        let bytes = store.bytes();
        drop(store);
        let (store, found) = open(&dir).unwrap();
        assert_eq!((found, store.bytes()), (live, bytes));
        let names: BTreeSet<_> =
            std::fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(
            names,
            BTreeSet::from([FILE.into(), MARK.into()]),
            "nothing is left lying about"
        );
    }

    #[test]
    fn one_store_has_one_daemon() {
        let home = tempfile::tempdir().unwrap();
        let (_store, _) = open(home.path()).unwrap();
        let error = open(home.path()).err().unwrap();
        assert_eq!(error.code(), "store_locked");
    }

    #[test]
    fn a_full_store_refuses_whole_batches_and_still_lets_go() {
        let home = tempfile::tempdir().unwrap();
        let (mut store, _) = DiskStore::open(home.path(), 700).unwrap();
        store.commit(&[mail(1, 1), mail(1, 2)]).unwrap();
        let results =
            store.commit_all(&[&[mail(2, 1), mail(2, 2)], &[Record::AgentGone { agent: id(3) }]]);
        assert_eq!(results[0].clone().unwrap_err().code(), "store_full");
        assert_eq!(results[1], Ok(()), "one batch does not take the others with it");
        assert_eq!(store.live().unwrap(), vec![mail(1, 1), mail(1, 2)]);
        store.commit(&[Record::Acknowledged { agent: id(1), seq: 2 }]).unwrap();
        store.commit(&[mail(2, 1)]).unwrap();
    }

    #[test]
    fn a_newer_format_is_left_alone() {
        let home = tempfile::tempdir().unwrap();
        let newer = Format { version: 7, steps: &[] };
        drop(DiskStore::open_as(home.path(), LIMIT, &newer).unwrap());
        let error = open(home.path()).err().unwrap();
        assert_eq!(error.code(), "store_newer");
        assert!(error.to_string().contains("format 7"), "{error}");
        DiskStore::open_as(home.path(), LIMIT, &newer).unwrap();
    }

    /// The place of a record's kind. A new kind does not compile until it has one, and an example.
    fn number(record: &Record) -> usize {
        match record {
            Record::Start { .. } => 0,
            Record::Agent { .. } => 1,
            Record::AgentGone { .. } => 2,
            Record::Acknowledged { .. } => 3,
            Record::Seen { .. } => 4,
            Record::Unseen { .. } => 5,
            Record::Mailbox { .. } => 6,
            Record::Withdrawn { .. } => 7,
            Record::Outgoing { .. } => 8,
            Record::OutgoingDone { .. } => 9,
            Record::Opened { .. } => 10,
            Record::Invited { .. } => 11,
            Record::InvitedDone { .. } => 12,
            Record::Asked { .. } => 13,
            Record::AskedDone { .. } => 14,
            Record::Copy { .. } => 15,
            Record::CopyDone { .. } => 16,
            Record::Room { .. } => 17,
            Record::RoomGone { .. } => 18,
            Record::Message { .. } => 19,
            Record::MessagesGone { .. } => 20,
            Record::Revocation { .. } => 21,
            Record::RevocationGone { .. } => 22,
            Record::Share { .. } => 23,
            Record::ShareGone { .. } => 24,
            Record::ShareGrant { .. } => 25,
            Record::ShareGrantGone { .. } => 26,
            Record::Sought { .. } => 27,
            Record::SoughtDone { .. } => 28,
            Record::Consent { .. } => 29,
            Record::MeshVisibility { .. } => 30,
        }
    }

    /// One of each kind.
    fn examples() -> Vec<Record> {
        let (agent, owner, token, at) = (id(1), id(2), [3; 16], UnixMillis(4));
        let text = |text: &str| text.to_owned();
        let (recipient, author, message) = (id(5), id(6), text("m"));
        vec![
            Record::Start { number: 1 },
            Record::Agent { agent, key: text("k"), record: vec![1] },
            Record::AgentGone { agent },
            Record::Acknowledged { agent, seq: 2 },
            Record::Seen { agent, seq: 3, author, message: message.clone() },
            Record::Unseen { agent, up_to: 4 },
            Record::Mailbox { agent, seq: 5, at, event: vec![2] },
            Record::Withdrawn { agent, seq: 6 },
            Record::Outgoing {
                agent,
                recipient,
                number: 7,
                path: text("p"),
                params: vec![3],
                queued_at: at,
                asks: true,
            },
            Record::OutgoingDone { agent, number: 8 },
            Record::Opened { agent, path: text("p") },
            Record::Invited { agent, path: text("p") },
            Record::InvitedDone { agent, path: text("p") },
            Record::Asked { agent, id: text("i"), path: text("p"), requester: author, at },
            Record::AskedDone { agent, id: text("i") },
            Record::Copy { recipient, author, message: message.clone(), event: vec![4], since: at },
            Record::CopyDone { recipient, author, message },
            Record::Room { path: text("p"), record: vec![5], put_out: vec![author] },
            Record::RoomGone { path: text("p") },
            Record::Message { path: text("p"), seq: 9, at, message: vec![6] },
            Record::MessagesGone { path: text("p"), up_to: 10 },
            Record::Revocation { token: [7; 32], issuer: owner, source: author, entry: vec![7] },
            Record::RevocationGone { token: [7; 32], issuer: owner },
            Record::Share { name: text("n"), place: text("/p"), write: true, at },
            Record::ShareGone { name: text("n") },
            Record::ShareGrant {
                name: text("n"),
                token,
                bearer: agent,
                write: true,
                at,
                expires: at,
                delegations: 1,
                revoked: true,
            },
            Record::ShareGrantGone { name: text("n"), token },
            Record::Sought {
                agent,
                owner,
                capability: text("c"),
                path: text("n"),
                until: at,
                valid_until: Some(at),
            },
            Record::SoughtDone { agent, owner, capability: text("c"), path: text("n") },
            Record::Consent { agent, policy: ConsentPolicy::Open },
            Record::MeshVisibility {
                visibility: Sides { loopback: Visibility::Quiet, network: Visibility::Dark },
            },
        ]
    }

    #[test]
    fn entries_of_another_look_are_another_format() {
        use sha2::{Digest as _, Sha256};
        let mut look = Sha256::new();
        for (place, record) in examples().iter().enumerate() {
            assert_eq!(number(record), place);
            look.update(encode(record).unwrap());
            look.update(format!("{:?}", changes(record)));
        }
        let look = data_encoding::HEXLOWER.encode(&look.finalize());
        // An older commsd must say "newer", and not "damaged", of what it cannot read: whoever comes
        // here because this fails gives FORMAT another version with a step, then notes both here.
        assert_eq!((FORMAT.version, look.get(..16).unwrap()), (3, "cc0a0dbdeb5f8a67"));
    }

    #[test]
    fn a_store_of_the_first_format_is_taken_over_and_is_then_newer_to_its_writer() {
        let home = tempfile::tempdir().unwrap();
        let first = Format { version: 1, steps: &[] };
        let (mut store, _) = DiskStore::open_as(home.path(), LIMIT, &first).unwrap();
        store.commit(&[mail(1, 1)]).unwrap();
        drop(store);
        let (mut store, found) = open(home.path()).unwrap();
        assert_eq!(found, [mail(1, 1)]);
        let share = examples().remove(23);
        store.commit(std::slice::from_ref(&share)).unwrap();
        drop(store);
        let error = DiskStore::open_as(home.path(), LIMIT, &first).err().unwrap();
        assert_eq!(error.code(), "store_newer");
        assert_eq!(open(home.path()).unwrap().1, [mail(1, 1), share]);
    }

    #[test]
    fn a_file_that_was_full_once_is_small_again_after_a_start() {
        let home = tempfile::tempdir().unwrap();
        let (mut store, _) = open(home.path()).unwrap();
        let size = || std::fs::metadata(home.path().join(FILE)).unwrap().len();
        let agent = DeviceId([1; 32]);
        let event = vec![7; 128 * 1024];
        for seq in 1..=200 {
            let at = UnixMillis(1);
            store.commit(&[Record::Mailbox { agent, seq, at, event: event.clone() }]).unwrap();
        }
        assert!(size() > COMPACT_ABOVE);
        drop(store);
        // As long as there is something in it, it stays.
        let (mut store, records) = open(home.path()).unwrap();
        assert_eq!((records.len(), store.compacted()), (200, None));
        store.commit(&[Record::Acknowledged { agent, seq: 199 }]).unwrap();
        let live = store.live().unwrap();
        drop(store);
        let before = size();
        let (store, records) = open(home.path()).unwrap();
        assert_eq!(records, live);
        assert_eq!(store.compacted(), Some((before, size())));
        assert!(size() < COMPACT_ABOVE / 4, "{} bytes", size());
        drop(store);
        // Nothing was lost by it, and there is no second time.
        let (store, records) = open(home.path()).unwrap();
        assert_eq!((records, store.compacted()), (live, None));
    }

    #[test]
    fn an_older_format_is_brought_up_to_date_beside_a_copy() {
        let home = tempfile::tempdir().unwrap();
        let (mut store, _) = open(home.path()).unwrap();
        store.commit(&[mail(1, 1), mail(2, 1)]).unwrap();
        drop(store);
        fn forget_one(transaction: &WriteTransaction) -> Result<(), StoreError> {
            let mut entries = transaction.open_table(ENTRIES).unwrap();
            entries.pop_first().unwrap();
            Ok(())
        }
        fn fail(_: &WriteTransaction) -> Result<(), StoreError> {
            Err(StoreError::Busy)
        }
        // A step that fails leaves the old format.
        let failing = Format { version: FORMAT.version + 1, steps: &[as_it_is, as_it_is, fail] };
        assert!(DiskStore::open_as(home.path(), LIMIT, &failing).is_err());
        assert_eq!(open(home.path()).unwrap().1.len(), 2);
        let next = Format { version: FORMAT.version + 1, steps: &[as_it_is, as_it_is, forget_one] };
        let (store, found) = DiskStore::open_as(home.path(), LIMIT, &next).unwrap();
        assert_eq!(found, vec![mail(2, 1)]);
        drop(store);
        assert_eq!(open(home.path()).err().unwrap().code(), "store_newer");
        // The copy is the store as it was.
        let copy = home.path().join(format!("store.redb.format-{}", FORMAT.version));
        assert_eq!(mode(&copy), 0o600);
        let old = tempfile::tempdir().unwrap();
        std::fs::copy(&copy, old.path().join(FILE)).unwrap();
        assert_eq!(open(old.path()).unwrap().1.len(), 2);
    }

    #[test]
    fn what_is_no_store_is_refused_and_left_as_it_is() {
        for (bytes, what) in [
            (Vec::new(), "empty"),
            (vec![0; 100_000], "zeros"),
            (b"not a store at all".to_vec(), "text"),
            (vec![0xa5; 73_728], "noise"),
        ] {
            let home = tempfile::tempdir().unwrap();
            std::fs::write(home.path().join(FILE), &bytes).unwrap();
            let error = open(home.path()).err().unwrap();
            assert_eq!(error.code(), "store_corrupt", "{what}: {error}");
            assert_eq!(std::fs::read(home.path().join(FILE)).unwrap(), bytes, "{what}");
        }
        // One that holds something else than entries of ours.
        let home = tempfile::tempdir().unwrap();
        let (store, _) = open(home.path()).unwrap();
        let transaction = store.database.as_ref().unwrap().begin_write().unwrap();
        let value = encode(&mail(1, 1)).unwrap();
        transaction.open_table(ENTRIES).unwrap().insert(&b"x"[..], value.as_slice()).unwrap();
        transaction.commit().unwrap();
        drop(store);
        assert_eq!(open(home.path()).err().unwrap().code(), "store_corrupt");
    }

    #[test]
    fn a_store_that_is_not_at_its_place_any_more_keeps_nothing_until_it_is_back() {
        let home = tempfile::tempdir().unwrap();
        let (path, away) = (home.path().join(FILE), home.path().join("away"));
        let (mut store, _) = open(home.path()).unwrap();
        assert_eq!((store.found(), store.place().check()), (Found::Nothing, Ok(())));
        store.commit(&[mail(1, 1)]).unwrap();
        for replaced in [false, true] {
            std::fs::rename(&path, &away).unwrap();
            if replaced {
                // Even by a store.
                std::fs::copy(&away, &path).unwrap();
            }
            assert_eq!(store.place().check().unwrap_err().code(), "store_gone");
            let error = store.commit(&[mail(1, 2)]).unwrap_err();
            assert_eq!(error.code(), "store_gone");
            std::fs::rename(&away, &path).unwrap();
            store.commit(&[mail(1, 2)]).unwrap();
        }
        drop(store);
        assert_eq!(open(home.path()).unwrap().1, [mail(1, 1), mail(1, 2)]);
        // The whole directory.
        let dir = home.path().join("state");
        let (mut store, _) = open(&dir).unwrap();
        std::fs::remove_dir_all(&dir).unwrap();
        assert_eq!(store.commit(&[mail(1, 1)]).unwrap_err().code(), "store_gone");
    }

    #[test]
    fn a_mark_without_its_store_and_a_store_without_its_mark_do_not_pass_in_silence() {
        let home = tempfile::tempdir().unwrap();
        let (path, mark) = (home.path().join(FILE), home.path().join(MARK));
        let (mut store, _) = open(home.path()).unwrap();
        store.commit(&[mail(1, 1)]).unwrap();
        drop(store);
        let (store, _) = open(home.path()).unwrap();
        assert_eq!(store.found(), Found::Whole);
        drop(store);
        for said in [&b""[..], b"half", &[0xa5; 16]] {
            std::fs::write(&mark, said).unwrap();
            let (mut store, found) = open(home.path()).unwrap();
            assert_eq!((store.found(), found), (Found::Unmarked, vec![mail(1, 1)]));
            // From the next commit on it has one.
            store.commit(&[mail(1, 1)]).unwrap();
            drop(store);
            assert_eq!(open(home.path()).unwrap().0.found(), Found::Whole);
        }
        let whole = std::fs::read(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let error = open(home.path()).err().unwrap();
        assert_eq!(error.code(), "store_missing");
        assert!(error.todo().contains("store.mark"));
        assert!(!path.exists(), "nothing is made in its place");
        std::fs::write(&path, whole).unwrap();
        assert_eq!(open(home.path()).unwrap().1, [mail(1, 1)]);
        std::fs::remove_file(&path).unwrap();
        std::fs::remove_file(&mark).unwrap();
        assert_eq!(open(home.path()).unwrap().1, []);
    }

    #[test]
    fn an_old_copy_in_place_of_the_store_is_noticed() {
        let home = tempfile::tempdir().unwrap();
        let (mut store, _) = open(home.path()).unwrap();
        store.commit(&[mail(1, 1)]).unwrap();
        drop(store);
        let old = std::fs::read(home.path().join(FILE)).unwrap();
        let (mut store, _) = open(home.path()).unwrap();
        store.commit(&[mail(1, 2)]).unwrap();
        drop(store);
        std::fs::write(home.path().join(FILE), old).unwrap();
        let error = open(home.path()).err().unwrap();
        assert_eq!(error.code(), "store_rolled_back");
        assert!(error.todo().contains("store.mark"));
        std::fs::remove_file(home.path().join(MARK)).unwrap();
        assert_eq!(open(home.path()).unwrap().1, vec![mail(1, 1)]);
    }

    /// A store with some history, as it is after a crash (`None`: after an orderly end), and what
    /// was in it after each commit.
    fn grown(dir: &Path, crashed: bool) -> (Vec<u8>, Vec<u8>, Vec<Vec<Record>>) {
        let (mut store, _) = open(dir).unwrap();
        let mut states = Vec::new();
        for n in 0..40_u64 {
            let batch: Vec<Record> = (0..4).map(|k| mail(1 + (k % 3) as u8, 4 * n + k)).collect();
            store.commit(&batch).unwrap();
            if n % 7 == 6 {
                store.commit(&[Record::Acknowledged { agent: id(1), seq: 3 * n }]).unwrap();
            }
            states.push(store.live().unwrap());
        }
        let files = || (std::fs::read(dir.join(FILE)).unwrap(), dir.join(MARK));
        let (file, mark) = if crashed {
            files()
        } else {
            drop(store);
            files()
        };
        (file, std::fs::read(mark).unwrap(), states)
    }

    /// Recovered whole or refused; never anything else.
    fn judge(file: &[u8], mark: &[u8], last: &[Record], what: &str) -> bool {
        let home = tempfile::tempdir().unwrap();
        std::fs::write(home.path().join(FILE), file).unwrap();
        std::fs::write(home.path().join(MARK), mark).unwrap();
        match open(home.path()) {
            Ok((_, found)) => {
                assert!(found == last, "{what}: {} of {} entries", found.len(), last.len());
                true
            }
            Err(error) => {
                assert!(
                    ["store_corrupt", "store_rolled_back"].contains(&error.code()),
                    "{what}: {error}"
                );
                false
            }
        }
    }

    #[test]
    fn what_a_killed_process_left_is_removed_and_nothing_else() {
        let home = tempfile::tempdir().unwrap();
        let old = std::time::SystemTime::now() - 2 * LEFT_OVER_AFTER;
        for name in
            [".storeaB3xYz", ".storefresh1", ".store", ".store.notes", "store.redb.format-1"]
        {
            let file = File::create(home.path().join(name)).unwrap();
            if name != ".storefresh1" {
                file.set_modified(old).unwrap();
            }
        }
        let there = |name: &str| home.path().join(name).exists();
        drop(open(home.path()).unwrap());
        assert!(!there(".storeaB3xYz"));
        assert!(
            [".storefresh1", ".store", ".store.notes", "store.redb.format-1"].map(there)
                == [true; 4]
        );
    }

    #[test]
    fn a_store_cut_short_is_recovered_whole_or_refused() {
        for crashed in [false, true] {
            let home = tempfile::tempdir().unwrap();
            let (file, mark, states) = grown(home.path(), crashed);
            let last = states.last().unwrap();
            assert!(judge(&file, &mark, last, "whole"));
            for length in (0..file.len()).step_by(4096) {
                judge(&file[..length], &mark, last, &format!("{crashed} cut to {length}"));
            }
        }
    }

    #[test]
    fn flipped_bits_are_recovered_or_refused() {
        let mut refused = 0;
        for crashed in [false, true] {
            let home = tempfile::tempdir().unwrap();
            let (file, mark, states) = grown(home.path(), crashed);
            let last = states.last().unwrap();
            let mut entropy = SeededEntropy::new(7);
            for n in 0..200 {
                let mut damaged = file.clone();
                let mut drawn = [0; 8];
                entropy.fill(&mut drawn);
                let drawn = usize::from_be_bytes(drawn);
                // Every other one in the head, where it hurts most.
                let at = if n % 2 == 0 { drawn % 4096 } else { drawn % file.len() };
                damaged[at] ^= 1 << (drawn >> 40 & 7);
                refused +=
                    usize::from(!judge(&damaged, &mark, last, &format!("{crashed} {n} at {at}")));
            }
        }
        assert!(refused > 20, "the damage was felt: {refused}");
    }

    #[test]
    fn a_commit_that_fails_is_forgotten_and_the_next_goes_on() {
        let home = tempfile::tempdir().unwrap();
        let (mut store, _) = open(home.path()).unwrap();
        store.commit(&[mail(1, 1)]).unwrap();
        // As after a failure of the medium.
        store.database = None;
        store.commit(&[mail(1, 2)]).unwrap();
        assert_eq!(store.live().unwrap(), vec![mail(1, 1), mail(1, 2)]);
        // While it cannot be opened everything fails, by name.
        store.database = None;
        let aside = home.path().join("aside");
        std::fs::rename(home.path().join(FILE), &aside).unwrap();
        assert_eq!(store.commit(&[mail(1, 3)]).unwrap_err().code(), "store_gone");
        std::fs::rename(&aside, home.path().join(FILE)).unwrap();
        store.commit(&[mail(1, 3)]).unwrap();
        assert_eq!(store.live().unwrap().len(), 3);
    }

    fn record() -> impl Strategy<Value = Record> {
        let agent = || (1..4_u8).prop_map(id);
        let seq = || 1..20_u64;
        let text = || "[ab]{1,2}";
        let bytes = || prop::collection::vec(any::<u8>(), 0..60);
        prop_oneof![
            (agent(), seq(), bytes()).prop_map(|(agent, seq, event)| Record::Mailbox {
                agent,
                seq,
                at: UnixMillis(seq),
                event
            }),
            (agent(), seq()).prop_map(|(agent, seq)| Record::Acknowledged { agent, seq }),
            (agent(), seq()).prop_map(|(agent, seq)| Record::Withdrawn { agent, seq }),
            (agent(), seq(), text()).prop_map(|(agent, seq, message)| Record::Seen {
                agent,
                seq,
                author: id(9),
                message
            }),
            (agent(), seq()).prop_map(|(agent, up_to)| Record::Unseen { agent, up_to }),
            (agent(), text(), bytes()).prop_map(|(agent, key, record)| Record::Agent {
                agent,
                key,
                record
            }),
            agent().prop_map(|agent| Record::AgentGone { agent }),
            (agent(), seq(), bytes()).prop_map(|(agent, number, params)| Record::Outgoing {
                agent,
                recipient: id(9),
                number,
                path: String::new(),
                params,
                queued_at: UnixMillis(1),
                asks: true
            }),
            (agent(), seq()).prop_map(|(agent, number)| Record::OutgoingDone { agent, number }),
            (agent(), text()).prop_map(|(agent, path)| Record::Opened { agent, path }),
            agent().prop_map(|agent| Record::Consent { agent, policy: ConsentPolicy::Open }),
            (agent(), text()).prop_map(|(agent, path)| Record::Invited { agent, path }),
            (agent(), text()).prop_map(|(agent, path)| Record::InvitedDone { agent, path }),
            (agent(), text()).prop_map(|(agent, id)| Record::Asked {
                agent,
                id,
                path: String::new(),
                requester: DeviceId([8; 32]),
                at: UnixMillis(1)
            }),
            (agent(), text()).prop_map(|(agent, id)| Record::AskedDone { agent, id }),
            (agent(), agent(), text(), bytes()).prop_map(|(recipient, author, message, event)| {
                Record::Copy { recipient, author, message, event, since: UnixMillis(1) }
            }),
            (agent(), agent(), text()).prop_map(|(recipient, author, message)| Record::CopyDone {
                recipient,
                author,
                message
            }),
            (text(), bytes()).prop_map(|(path, record)| Record::Room {
                path,
                record,
                put_out: vec![id(7)]
            }),
            text().prop_map(|path| Record::RoomGone { path }),
            (text(), seq(), bytes()).prop_map(|(path, seq, message)| Record::Message {
                path,
                seq,
                at: UnixMillis(2),
                message
            }),
            (text(), seq()).prop_map(|(path, up_to)| Record::MessagesGone { path, up_to }),
            (agent(), agent(), bytes()).prop_map(|(token, issuer, entry)| Record::Revocation {
                token: token.0,
                issuer,
                source: issuer,
                entry
            }),
            (agent(), agent())
                .prop_map(|(token, issuer)| Record::RevocationGone { token: token.0, issuer }),
            (text(), text(), any::<bool>()).prop_map(|(name, place, write)| Record::Share {
                name,
                place,
                write,
                at: UnixMillis(3)
            }),
            text().prop_map(|name| Record::ShareGone { name }),
            (text(), 0..3_u8, agent(), any::<bool>()).prop_map(|(name, token, bearer, revoked)| {
                Record::ShareGrant {
                    name,
                    token: [token.wrapping_mul(127); 16],
                    bearer,
                    write: true,
                    at: UnixMillis(3),
                    expires: UnixMillis(4),
                    delegations: 1,
                    revoked,
                }
            }),
            (text(), 0..3_u8).prop_map(|(name, token)| Record::ShareGrantGone {
                name,
                token: [token.wrapping_mul(127); 16]
            }),
            (agent(), agent(), text(), text()).prop_map(|(agent, owner, capability, path)| {
                let (until, valid_until) = (UnixMillis(5), Some(UnixMillis(6)));
                Record::Sought { agent, owner, capability, path, until, valid_until }
            }),
            (agent(), agent(), text(), text()).prop_map(|(agent, owner, capability, path)| {
                Record::SoughtDone { agent, owner, capability, path }
            }),
            prop_oneof![Just(Visibility::Quiet), Just(Visibility::Dark)].prop_map(|network| {
                let loopback = Visibility::Discoverable;
                Record::MeshVisibility { visibility: Sides { loopback, network } }
            }),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn it_keeps_what_the_engine_in_memory_keeps(
            batches in prop::collection::vec(prop::collection::vec(record(), 0..6), 1..30),
            limit in 600..4000_usize,
            again in 0..30_usize,
        ) {
            let home = tempfile::tempdir().unwrap();
            let mut model = MemoryStore::with_limit(limit);
            let (mut store, _) = DiskStore::open(home.path(), limit).unwrap();
            for (n, batch) in batches.iter().enumerate() {
                if n == again {
                    drop(store);
                    store = DiskStore::open(home.path(), limit).unwrap().0;
                }
                let expected = model.commit(batch);
                prop_assert_eq!(store.commit(batch), expected);
                prop_assert_eq!(store.bytes(), model.bytes());
            }
            let expected = model.live().unwrap();
            prop_assert_eq!(&store.live().unwrap(), &expected);
            drop(store);
            prop_assert_eq!(&DiskStore::open(home.path(), limit).unwrap().1, &expected);
        }
    }
}
