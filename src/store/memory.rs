//! The engine that keeps everything in memory, as the bytes that a disk would hold.

use std::collections::BTreeMap;

use super::{Store, StoreError};
use crate::identity::device::DeviceId;
use crate::mesh::journal::Record;

/// Bytes kept in memory. Sixteen full mailboxes; more means that nobody takes events any more.
pub const MAX_MEMORY_BYTES: usize = 256 * 1024 * 1024;

/// What a record is found by. The order of the variants is the order of [`Store::live`].
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Key {
    Acknowledged(DeviceId),
    Mailbox(DeviceId, u64),
    Outgoing(DeviceId, u64),
    Copy(DeviceId, DeviceId, String),
}

/// Keeps records in memory: survives nothing.
#[derive(Clone, Debug)]
pub struct MemoryStore {
    records: BTreeMap<Key, Vec<u8>>,
    acknowledged: BTreeMap<DeviceId, u64>,
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
        Self { records: BTreeMap::new(), acknowledged: BTreeMap::new(), bytes: 0, limit }
    }

    /// Encoded bytes kept.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    fn put(&mut self, key: Key, encoded: Vec<u8>) {
        self.bytes += encoded.len();
        if let Some(old) = self.records.insert(key, encoded) {
            self.bytes -= old.len();
        }
    }

    fn drop_key(&mut self, key: &Key) {
        if let Some(old) = self.records.remove(key) {
            self.bytes -= old.len();
        }
    }

    fn apply(&mut self, record: &Record, encoded: Vec<u8>) {
        match record {
            Record::Mailbox { agent, seq, .. } => {
                // Written late: the agent has it already.
                if self.acknowledged.get(agent).is_none_or(|up_to| seq > up_to) {
                    self.put(Key::Mailbox(*agent, *seq), encoded);
                }
            }
            Record::Acknowledged { agent, seq } => {
                let up_to = self.acknowledged.entry(*agent).or_insert(0);
                if *seq < *up_to {
                    return;
                }
                *up_to = *seq;
                let done: Vec<Key> = self
                    .records
                    .range(Key::Mailbox(*agent, 0)..=Key::Mailbox(*agent, *seq))
                    .map(|(key, _)| key.clone())
                    .collect();
                for key in done {
                    self.drop_key(&key);
                }
                self.put(Key::Acknowledged(*agent), encoded);
            }
            Record::Outgoing { agent, number, .. } => {
                self.put(Key::Outgoing(*agent, *number), encoded);
            }
            Record::OutgoingDone { agent, number } => {
                self.drop_key(&Key::Outgoing(*agent, *number));
            }
            Record::Copy { recipient, author, message, .. } => {
                self.put(Key::Copy(*recipient, *author, message.clone()), encoded);
            }
            Record::CopyDone { recipient, author, message } => {
                self.drop_key(&Key::Copy(*recipient, *author, message.clone()));
            }
        }
    }
}

impl Store for MemoryStore {
    fn commit(&mut self, records: &[Record]) -> Result<(), StoreError> {
        let mut encoded = Vec::with_capacity(records.len());
        let mut growth = 0;
        for record in records {
            let bytes = postcard::to_allocvec(record)
                .map_err(|error| StoreError::Encoding(error.to_string()))?;
            if !matches!(record, Record::OutgoingDone { .. } | Record::CopyDone { .. }) {
                growth += bytes.len();
            }
            encoded.push(bytes);
        }
        // What ends something is always taken, or a full store would stay full.
        let ends = records.iter().all(|record| {
            matches!(
                record,
                Record::Acknowledged { .. } | Record::OutgoingDone { .. } | Record::CopyDone { .. }
            )
        });
        if !ends && self.bytes + growth > self.limit {
            return Err(StoreError::Full { limit: self.limit });
        }
        for (record, bytes) in records.iter().zip(encoded) {
            self.apply(record, bytes);
        }
        Ok(())
    }

    fn live(&self) -> Result<Vec<Record>, StoreError> {
        self.records
            .values()
            .map(|bytes| {
                postcard::from_bytes(bytes).map_err(|error| StoreError::Corrupt(error.to_string()))
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::time::UnixMillis;

    fn id(n: u8) -> DeviceId {
        DeviceId([n; 32])
    }

    fn mail(seq: u64) -> Record {
        Record::Mailbox { agent: id(1), seq, event: vec![7; 100] }
    }

    fn outgoing(number: u64) -> Record {
        Record::Outgoing {
            agent: id(1),
            recipient: id(2),
            number,
            path: String::new(),
            params: vec![1],
            queued_at: UnixMillis(5),
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
