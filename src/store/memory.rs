//! The engine that keeps everything in memory, as the bytes that a disk would hold.

use std::collections::BTreeMap;

use super::change::{Change, Reader, changes, encode, only_ends};
use super::{Store, StoreError};
use crate::mesh::journal::Record;

/// Bytes kept in memory. Sixteen full mailboxes; more means that nobody takes events any more.
pub const MAX_MEMORY_BYTES: usize = 256 * 1024 * 1024;

/// Keeps records in memory: survives nothing.
#[derive(Clone, Debug)]
pub struct MemoryStore {
    entries: BTreeMap<Vec<u8>, Vec<u8>>,
    bytes: usize,
    limit: usize,
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::with_limit(MAX_MEMORY_BYTES)
    }
}

impl MemoryStore {
    /// An empty store that keeps at most `limit` encoded bytes.
    #[must_use]
    pub fn with_limit(limit: usize) -> Self {
        Self { entries: BTreeMap::new(), bytes: 0, limit }
    }

    /// Encoded bytes kept.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    fn remove(&mut self, key: &[u8]) {
        if let Some(old) = self.entries.remove(key) {
            self.bytes -= old.len();
        }
    }
}

impl Store for MemoryStore {
    fn commit(&mut self, records: &[Record]) -> Result<(), StoreError> {
        let encoded = records.iter().map(encode).collect::<Result<Vec<_>, _>>()?;
        let growth: usize = encoded.iter().map(Vec::len).sum();
        if !only_ends(records) && self.bytes + growth > self.limit {
            return Err(StoreError::Full { limit: self.limit });
        }
        for (record, value) in records.iter().zip(encoded) {
            for change in changes(record) {
                match change {
                    Change::Put(key) => {
                        self.remove(&key);
                        self.bytes += value.len();
                        self.entries.insert(key, value.clone());
                    }
                    Change::Remove(key) => self.remove(&key),
                    Change::RemoveRange(first, last) => {
                        let done: Vec<Vec<u8>> =
                            self.entries.range(first..=last).map(|(key, _)| key.clone()).collect();
                        for key in done {
                            self.remove(&key);
                        }
                    }
                }
            }
        }
        Ok(())
    }

    fn live(&self) -> Result<Vec<Record>, StoreError> {
        let mut reader = Reader::new();
        for (key, value) in &self.entries {
            reader.take(key, value).map_err(StoreError::Corrupt)?;
        }
        Ok(reader.records())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::time::UnixMillis;
    use crate::identity::device::DeviceId;

    fn id(n: u8) -> DeviceId {
        DeviceId([n; 32])
    }

    fn mail(seq: u64) -> Record {
        Record::Mailbox { agent: id(1), seq, at: UnixMillis(1), event: vec![7; 100] }
    }

    fn outgoing(number: u64) -> Record {
        Record::Outgoing {
            agent: id(1),
            recipient: id(2),
            number,
            path: String::new(),
            params: vec![1],
            queued_at: UnixMillis(5),
            asks: false,
        }
    }

    #[test]
    fn what_is_ended_is_not_kept() {
        let mut store = MemoryStore::default();
        store.commit(&[mail(1), mail(2), mail(3), outgoing(1), outgoing(2)]).unwrap();
        store.commit(&[Record::Acknowledged { agent: id(1), seq: 2 }]).unwrap();
        store.commit(&[Record::OutgoingDone { agent: id(1), number: 1 }]).unwrap();
        // An acknowledged event that is written late does not come back.
        store.commit(&[mail(1)]).unwrap();
        let live = store.live().unwrap();
        assert_eq!(live, vec![Record::Acknowledged { agent: id(1), seq: 2 }, mail(3), outgoing(2)]);
    }

    #[test]
    fn copies_end_by_author_and_message() {
        let mut store = MemoryStore::default();
        let copy = |message: &str| Record::Copy {
            recipient: id(2),
            author: id(3),
            message: message.into(),
            event: vec![1],
            since: UnixMillis(1),
        };
        store.commit(&[copy("a"), copy("b")]).unwrap();
        store
            .commit(&[Record::CopyDone { recipient: id(2), author: id(3), message: "a".into() }])
            .unwrap();
        assert_eq!(store.live().unwrap(), vec![copy("b")]);
    }

    #[test]
    fn a_full_store_refuses_whole_batches_and_still_lets_go() {
        let mut store = MemoryStore::with_limit(400);
        store.commit(&[mail(1), mail(2)]).unwrap();
        let before = store.bytes();
        let refused = store.commit(&[outgoing(1), mail(3)]).unwrap_err();
        assert_eq!(refused.code(), "store_full");
        assert_eq!(store.bytes(), before);
        store.commit(&[Record::Acknowledged { agent: id(1), seq: 2 }]).unwrap();
        store.commit(&[mail(3), outgoing(1)]).unwrap();
        assert_eq!(store.live().unwrap().len(), 3);
    }
}
