//! What a record changes, the same for every engine: entries of one ordered table, found by a kind,
//! then by what the record is about. The order of the kinds is the order of [`super::Store::live`].

use std::collections::BTreeMap;

use super::StoreError;
use crate::identity::device::DeviceId;
use crate::mesh::journal::Record;

/// Kinds of entries. The numbers are stored.
mod kind {
    pub(super) const START: u8 = 0;
    pub(super) const AGENT: u8 = 1;
    pub(super) const ACKNOWLEDGED: u8 = 2;
    pub(super) const SEEN: u8 = 3;
    pub(super) const MAILBOX: u8 = 4;
    pub(super) const OUTGOING: u8 = 5;
    pub(super) const OPENED: u8 = 6;
    pub(super) const INVITED: u8 = 7;
    pub(super) const ASKED: u8 = 8;
    pub(super) const COPY: u8 = 9;
    pub(super) const ROOM: u8 = 10;
    pub(super) const MESSAGE: u8 = 11;
    pub(super) const REVOCATION: u8 = 12;
    pub(super) const SHARE: u8 = 13;
    pub(super) const SHARE_GRANT: u8 = 14;
    pub(super) const CONSENT: u8 = 15;
    pub(super) const SOUGHT: u8 = 16;
    pub(super) const MESH_VISIBILITY: u8 = 17;
    /// Those that belong to one agent.
    pub(super) const OF_AGENT: [u8; 10] =
        [AGENT, ACKNOWLEDGED, SEEN, MAILBOX, OUTGOING, OPENED, INVITED, ASKED, CONSENT, SOUGHT];
}

/// One change of the table.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// The record itself is the entry's value.
    Put(Vec<u8>),
    /// The entry goes.
    Remove(Vec<u8>),
    /// All entries between two keys go, both included.
    RemoveRange(Vec<u8>, Vec<u8>),
}

struct Key(Vec<u8>);

impl Key {
    fn of(kind: u8) -> Self {
        Self(vec![kind])
    }

    fn device(mut self, device: &DeviceId) -> Self {
        self.0.extend(device.0);
        self
    }

    fn number(mut self, number: u64) -> Self {
        self.0.extend(number.to_be_bytes());
        self
    }

    fn token(mut self, token: &[u8; 16]) -> Self {
        self.0.extend(token);
        self
    }

    /// Ends with a zero, which no path and no id has, so that no key is the beginning of another.
    fn text(mut self, text: &str) -> Self {
        self.0.extend(text.bytes().filter(|byte| *byte != 0));
        self.0.push(0);
        self
    }

    fn up_to(self, last: Self) -> Change {
        Change::RemoveRange(self.0, last.0)
    }
}

/// What a record changes, in order.
pub(super) fn changes(record: &Record) -> Vec<Change> {
    use kind::*;
    let put = |key: Key| vec![Change::Put(key.0)];
    let remove = |key: Key| vec![Change::Remove(key.0)];
    let of_agent = |kind: u8, agent: &DeviceId| Key::of(kind).device(agent);
    match record {
        Record::Start { .. } => put(Key::of(START)),
        Record::MeshVisibility { .. } => put(Key::of(MESH_VISIBILITY)),
        Record::Agent { agent, .. } => put(of_agent(AGENT, agent)),
        Record::AgentGone { agent } => OF_AGENT
            .into_iter()
            .map(|kind| {
                // Above every number and every text, in which there is no such byte.
                let last = [of_agent(kind, agent).0, vec![0xff; 9]].concat();
                Change::RemoveRange(of_agent(kind, agent).0, last)
            })
            .collect(),
        Record::Acknowledged { agent, seq } => vec![
            of_agent(MAILBOX, agent).number(0).up_to(of_agent(MAILBOX, agent).number(*seq)),
            Change::Put(of_agent(ACKNOWLEDGED, agent).0),
        ],
        Record::Seen { agent, seq, .. } => put(of_agent(SEEN, agent).number(*seq)),
        Record::Unseen { agent, up_to } => {
            vec![of_agent(SEEN, agent).number(0).up_to(of_agent(SEEN, agent).number(*up_to))]
        }
        Record::Mailbox { agent, seq, .. } => put(of_agent(MAILBOX, agent).number(*seq)),
        Record::Withdrawn { agent, seq } => remove(of_agent(MAILBOX, agent).number(*seq)),
        Record::Outgoing { agent, number, .. } => put(of_agent(OUTGOING, agent).number(*number)),
        Record::OutgoingDone { agent, number } => remove(of_agent(OUTGOING, agent).number(*number)),
        Record::Opened { agent, path } => put(of_agent(OPENED, agent).text(path)),
        Record::Consent { agent, .. } => put(of_agent(CONSENT, agent)),
        Record::Invited { agent, path } => put(of_agent(INVITED, agent).text(path)),
        Record::InvitedDone { agent, path } => remove(of_agent(INVITED, agent).text(path)),
        Record::Asked { agent, id, .. } => put(of_agent(ASKED, agent).text(id)),
        Record::AskedDone { agent, id } => remove(of_agent(ASKED, agent).text(id)),
        Record::Copy { recipient, author, message, .. } => {
            put(Key::of(COPY).device(recipient).device(author).text(message))
        }
        Record::CopyDone { recipient, author, message } => {
            remove(Key::of(COPY).device(recipient).device(author).text(message))
        }
        Record::Room { path, .. } => put(Key::of(ROOM).text(path)),
        Record::RoomGone { path } => remove(Key::of(ROOM).text(path)),
        Record::Message { path, seq, .. } => put(Key::of(MESSAGE).text(path).number(*seq)),
        Record::MessagesGone { path, up_to } => {
            let key = |seq| Key::of(MESSAGE).text(path).number(seq);
            vec![key(0).up_to(key(*up_to))]
        }
        Record::Revocation { token, issuer, .. } => put(revocation(token, issuer)),
        Record::RevocationGone { token, issuer } => remove(revocation(token, issuer)),
        Record::Share { name, .. } => put(Key::of(SHARE).text(name)),
        Record::ShareGone { name } => {
            let grant = |token| Key::of(SHARE_GRANT).text(name).token(&token);
            vec![
                Change::Remove(Key::of(SHARE).text(name).0),
                grant([0; 16]).up_to(grant([0xff; 16])),
            ]
        }
        Record::ShareGrant { name, token, .. } => put(Key::of(SHARE_GRANT).text(name).token(token)),
        Record::ShareGrantGone { name, token } => {
            remove(Key::of(SHARE_GRANT).text(name).token(token))
        }
        Record::Sought { agent, owner, capability, path, .. } => {
            put(of_agent(SOUGHT, agent).text(capability).text(path).device(owner))
        }
        Record::SoughtDone { agent, owner, capability, path } => {
            remove(of_agent(SOUGHT, agent).text(capability).text(path).device(owner))
        }
    }
}

fn revocation(token: &[u8; 32], issuer: &DeviceId) -> Key {
    Key::of(kind::REVOCATION).device(&DeviceId(*token)).device(issuer)
}

/// Whether a batch makes the store no larger to speak of: such a one is always taken, or a full
/// store would stay full.
pub(super) fn only_ends(records: &[Record]) -> bool {
    records.iter().all(|record| {
        matches!(
            record,
            Record::Acknowledged { .. }
                | Record::Seen { .. }
                | Record::Unseen { .. }
                | Record::Withdrawn { .. }
                | Record::OutgoingDone { .. }
                | Record::InvitedDone { .. }
                | Record::AskedDone { .. }
                | Record::CopyDone { .. }
                | Record::RoomGone { .. }
                | Record::MessagesGone { .. }
                | Record::RevocationGone { .. }
                | Record::ShareGone { .. }
                | Record::ShareGrantGone { .. }
                | Record::SoughtDone { .. }
                | Record::AgentGone { .. }
        )
    })
}

/// The record as an entry's value.
pub(super) fn encode(record: &Record) -> Result<Vec<u8>, StoreError> {
    postcard::to_allocvec(record).map_err(|error| StoreError::Encoding(error.to_string()))
}

/// Reads entries back, in the order of their keys.
pub(super) struct Reader {
    acknowledged: BTreeMap<DeviceId, u64>,
    records: Vec<Record>,
}

impl Reader {
    pub(super) fn new() -> Self {
        Self { acknowledged: BTreeMap::new(), records: Vec::new() }
    }

    /// Takes an entry.
    ///
    /// # Errors
    /// A text that says what is wrong with it.
    pub(super) fn take(&mut self, key: &[u8], value: &[u8]) -> Result<(), String> {
        let (record, rest) =
            postcard::take_from_bytes::<Record>(value).map_err(|error| error.to_string())?;
        let stands_here =
            changes(&record).iter().any(|change| matches!(change, Change::Put(k) if k == key));
        if !rest.is_empty() || !stands_here {
            return Err("an entry does not belong where it stands".into());
        }
        match &record {
            Record::Acknowledged { agent, seq } => {
                self.acknowledged.insert(*agent, *seq);
            }
            // Written late: the agent has it already.
            Record::Mailbox { agent, seq, .. }
                if self.acknowledged.get(agent).is_some_and(|up_to| seq <= up_to) =>
            {
                return Ok(());
            }
            _ => {}
        }
        self.records.push(record);
        Ok(())
    }

    pub(super) fn records(self) -> Vec<Record> {
        self.records
    }
}
