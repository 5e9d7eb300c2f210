//! Replicated state and who may say what about it: agents, rooms, histories
//! (`rooms.md` 1.8, decisions 6 and 7). Pure merge rules; nothing here sends.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use super::records::{
    AgentRecord, AgentStatus, DmMessage, MAX_TEXT_BYTES, MAX_VERSION, RoomMessage, RoomRecord,
    RoomType,
};
use super::wire::room_path::RoomPath;
use crate::codec::cbor;
use crate::codec::time::UnixMillis;
use crate::identity::device::DeviceId;

/// Agents held. A machine has tens; the bound stops a peer that invents them.
pub const MAX_AGENTS: usize = 4096;
/// Rooms held, for the same reason.
pub const MAX_ROOMS: usize = 4096;
/// Rooms of our own agents, and those they join, that find a place beside them: a crowd of others
/// is no reason to refuse an agent its room.
pub const MAX_OWN_ROOMS: usize = 4096;
/// Stamps taken in one room: the largest room we serve.
pub const MAX_ROOM_STAMPS: usize = 2048;
/// Bytes of text taken from one agent record (name, cwd, tags, rooms together).
pub const MAX_AGENT_TEXT: usize = 64 * 1024;
/// Bytes of text taken from one room record.
pub const MAX_ROOM_TEXT: usize = 16 * 1024;
/// Messages kept per room or conversation unless the configuration says otherwise; the oldest go
/// first.
pub const MAX_HISTORY_MESSAGES: usize = 1000;
/// Bytes of content kept per room or conversation unless the configuration says otherwise.
pub const MAX_HISTORY_BYTES: usize = 4 * 1024 * 1024;
/// Bytes of content kept in all of them; the longest gives first. They are all in memory.
pub const MAX_ALL_HISTORY_BYTES: usize = 64 * 1024 * 1024;
/// Age at which a message leaves its history unless the configuration says otherwise.
pub const MAX_HISTORY_AGE_MS: u64 = 30 * 24 * 3600 * 1000;
/// Conversations (rooms and DMs) with a history.
pub const MAX_HISTORIES: usize = 8192;
/// Bytes of a message beside its text and readers: two ids of at most 128 and a time.
const MAX_MESSAGE_REST: usize = 512;
/// Readers noted per message; a room has at most [`MAX_ROOM_STAMPS`] members.
const MAX_READ_BY: usize = MAX_ROOM_STAMPS;

/// Who speaks, as far as authority goes.
#[derive(Clone, Copy, Debug)]
pub struct Speaker {
    /// Device authenticated by the session.
    pub device: DeviceId,
    /// Whether it runs under our user: only then are statements about third parties heard.
    pub same_user: bool,
    /// Whether it is a commsd, which keeps the creation time that an owner gives its room (a
    /// reference peer notes when it joined): another time is another room of the same name.
    pub commsd: bool,
}

/// Where the owner of a room is, as far as a statement about the room goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// Elsewhere, and not to be reached.
    Away,
    /// Elsewhere, with a session here: nobody need speak for it.
    Here,
    /// One of our devices. `restored`: it holds its own token for the room, so the room is not
    /// destroyed, and what peers remember of it helps after a restart.
    Ours {
        /// Whether copies of others count.
        restored: bool,
    },
}

/// An owner that takes a room back from its peers goes on this far above their version, so that
/// no stamp of before the restart, wherever it turns up, is above a later one.
pub const RESTORED_VERSION_STEP: u64 = 1 << 20;

/// How far above a room's version the stamp of a member's own coming or going may be: what it may
/// have heard of a restored owner before us. Without a bound one stamp at the top of the range
/// would leave the owner no version to go on with.
pub const MAX_STAMP_STEP: u64 = 2 * RESTORED_VERSION_STEP;

/// What a statement did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Merge {
    /// Taken; the held record changed.
    Changed,
    /// Known already, or older than what is held.
    Unchanged,
    /// Not the speaker's to say, malformed, or over a bound: the reason is a stable word.
    Refused(&'static str),
}

/// An agent record with where it came from.
#[derive(Clone, Debug)]
pub struct HeldAgent {
    /// The record.
    pub record: AgentRecord,
    /// Said by somebody else: the device's own word replaces it whatever its version.
    pub hearsay: bool,
}

/// A room record with where it came from.
#[derive(Clone, Debug)]
pub struct HeldRoom {
    /// The record.
    pub record: RoomRecord,
    /// Said by somebody else than its owner.
    pub hearsay: bool,
    /// Of a stored room of ours: who is believed about it, its members when it was stored. Of others
    /// that are hearsay: anybody of our own user.
    witnesses: Option<BTreeSet<DeviceId>>,
    /// Members whose last leave was stated by the owner: only the owner re-joins them.
    pub owner_leaves: BTreeSet<DeviceId>,
    /// Join and leave stamps as the owner last stated them, which a member's own may exceed.
    owner_said: BTreeMap<DeviceId, (u64, u64)>,
}

impl HeldRoom {
    /// Unites with another copy: newer texts win, and of each stamp the higher.
    fn take(&mut self, incoming: RoomRecord) {
        let record = &mut self.record;
        if incoming.version >= record.version {
            record.version = incoming.version;
            record.name = incoming.name;
            record.kind = incoming.kind;
            record.created_at = incoming.created_at;
            record.description = incoming.description;
        }
        merge_stamps(&mut record.member_joins, &incoming.member_joins);
        merge_stamps(&mut record.member_leaves, &incoming.member_leaves);
        merge_stamps(&mut record.invited_joins, &incoming.invited_joins);
        merge_stamps(&mut record.invited_leaves, &incoming.invited_leaves);
    }

    /// As [`Self::take`], from the owner: whom it has newly let in or put out is in or out, whatever
    /// stamps that agent has given itself here.
    fn take_from_owner(&mut self, incoming: RoomRecord) {
        let said = stamps_of_members(&incoming);
        for (agent, (join, leave)) in &said {
            let before = self.owner_said.get(agent).copied().unwrap_or_default();
            if join.max(leave) <= &before.0.max(before.1) {
                continue;
            }
            for (held, stated) in
                [(&mut self.record.member_joins, *join), (&mut self.record.member_leaves, *leave)]
            {
                if let Some(own) = held.get_mut(agent) {
                    *own = (*own).min(stated);
                }
            }
        }
        self.take(incoming);
        // As bounded as the stamps that were taken.
        let record = &self.record;
        self.owner_said.extend(said.into_iter().filter(|(agent, _)| {
            record.member_joins.contains_key(agent) || record.member_leaves.contains_key(agent)
        }));
    }

    /// A record in the owner's words, as the only thing known of the room.
    fn from_owner(record: RoomRecord) -> Self {
        let owner_said = stamps_of_members(&record);
        Self { record, hearsay: false, witnesses: None, owner_leaves: BTreeSet::new(), owner_said }
    }

    /// Its owner, ours, goes on from what others remember of it.
    fn restore(&mut self) {
        self.hearsay = true;
        self.record.version = (self.record.version + RESTORED_VERSION_STEP).min(MAX_VERSION);
    }

    /// Notes who is out by a record that counts as the owner's.
    fn note_leaves(&mut self) {
        for (agent, leave) in &self.record.member_leaves {
            if self.record.member_joins.get(agent).is_none_or(|join| leave >= join) {
                self.owner_leaves.insert(*agent);
            } else {
                self.owner_leaves.remove(agent);
            }
        }
    }
}

/// What is kept of histories.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HistoryLimits {
    /// Messages of one room or conversation.
    pub messages: usize,
    /// Bytes of content of one room or conversation.
    pub bytes: usize,
    /// Milliseconds since a message came.
    pub age_ms: u64,
    /// Bytes of content of all together.
    pub all_bytes: usize,
}

impl Default for HistoryLimits {
    fn default() -> Self {
        Self {
            messages: MAX_HISTORY_MESSAGES,
            bytes: MAX_HISTORY_BYTES,
            age_ms: MAX_HISTORY_AGE_MS,
            all_bytes: MAX_ALL_HISTORY_BYTES,
        }
    }
}

/// A history with local sequence numbers, which have no gaps.
#[derive(Clone, Debug)]
pub struct History<M> {
    limits: HistoryLimits,
    next_seq: u64,
    bytes: usize,
    messages: VecDeque<M>,
    /// When each of them came.
    arrived: VecDeque<UnixMillis>,
    /// Sequence numbers by message id.
    by_id: HashMap<String, u64>,
    /// Messages that nobody has asked to store yet.
    fresh: BTreeSet<u64>,
    /// Messages whose readers have changed since they were stored.
    reread: BTreeSet<u64>,
    /// Some of the oldest have gone since that was told last.
    shortened: bool,
}

impl<M> Default for History<M> {
    fn default() -> Self {
        Self {
            limits: HistoryLimits::default(),
            next_seq: 1,
            bytes: 0,
            messages: VecDeque::new(),
            arrived: VecDeque::new(),
            by_id: HashMap::new(),
            fresh: BTreeSet::new(),
            reread: BTreeSet::new(),
            shortened: false,
        }
    }
}

/// What has to be stored of a history.
#[derive(Debug, PartialEq, Eq)]
pub struct HistoryChange {
    /// Room or conversation.
    pub path: RoomPath,
    /// Everything up to this number has gone.
    pub gone_up_to: Option<u64>,
    /// New or changed messages, encoded, with their numbers and when they came.
    pub messages: Vec<(u64, UnixMillis, Vec<u8>)>,
}

/// What a history needs to know of a message.
pub trait Message {
    /// Hex id.
    fn id(&self) -> &str;
    /// Author.
    fn author(&self) -> DeviceId;
    /// Readers.
    fn read_by(&mut self) -> &mut Vec<DeviceId>;
    /// Bytes of its text.
    fn text(&self) -> usize;
    /// How many have read it.
    fn readers(&self) -> usize;
    /// Bytes it counts for, which never change.
    fn weight(&self) -> usize;
    /// Whether it is no larger than our own peers let a message be.
    fn fits(&self) -> bool {
        self.text() <= MAX_TEXT_BYTES
            && self.weight() - self.text() <= MAX_MESSAGE_REST
            && self.readers() <= MAX_READ_BY
    }
}

impl Message for RoomMessage {
    fn id(&self) -> &str {
        &self.id
    }
    fn author(&self) -> DeviceId {
        self.from
    }
    fn read_by(&mut self) -> &mut Vec<DeviceId> {
        &mut self.read_by
    }
    fn text(&self) -> usize {
        self.content.len()
    }
    fn readers(&self) -> usize {
        self.read_by.len()
    }
    fn weight(&self) -> usize {
        let reply_to = self.reply_to.as_ref().map_or(0, String::len);
        self.text() + self.id.len() + self.timestamp.len() + reply_to
    }
}

impl Message for DmMessage {
    fn id(&self) -> &str {
        &self.id
    }
    fn author(&self) -> DeviceId {
        self.from
    }
    fn read_by(&mut self) -> &mut Vec<DeviceId> {
        &mut self.read_by
    }
    fn text(&self) -> usize {
        self.content.len()
    }
    fn readers(&self) -> usize {
        self.read_by.len()
    }
    fn weight(&self) -> usize {
        let reply_to = self.reply_to.as_ref().map_or(0, String::len);
        self.text() + self.id.len() + self.timestamp.len() + reply_to
    }
}

impl<M: Message> History<M> {
    /// Appends a message not yet held, or unites the readers of one that is.
    /// Returns the local sequence number when it is new.
    pub fn add(&mut self, mut message: M, now: UnixMillis) -> Option<u64> {
        message.read_by().truncate(MAX_READ_BY);
        if self.by_id.contains_key(message.id()) {
            let readers = std::mem::take(message.read_by());
            for reader in readers {
                self.mark_read(message.id(), None, reader);
            }
            return None;
        }
        let seq = self.next_seq;
        self.append(message, now);
        self.fresh.insert(seq);
        while self.messages.len() > self.limits.messages
            || (self.bytes > self.limits.bytes && self.messages.len() > 1)
        {
            self.drop_oldest();
        }
        Some(seq)
    }

    fn append(&mut self, message: M, at: UnixMillis) {
        self.bytes += message.weight();
        self.by_id.insert(message.id().to_owned(), self.next_seq);
        self.messages.push_back(message);
        self.arrived.push_back(at);
        self.next_seq += 1;
    }

    fn drop_oldest(&mut self) {
        let seq = self.first_seq();
        if let Some(old) = self.messages.pop_front() {
            self.arrived.pop_front();
            self.by_id.remove(old.id());
            self.bytes -= old.weight();
            self.fresh.remove(&seq);
            self.reread.remove(&seq);
            self.shortened = true;
        }
    }

    /// Takes back a stored message. One with a gap before it begins the history anew.
    fn restore(&mut self, seq: u64, at: UnixMillis, message: M) {
        if self.by_id.contains_key(message.id()) {
            return;
        }
        if seq != self.next_seq {
            while !self.messages.is_empty() {
                self.drop_oldest();
            }
            self.next_seq = seq;
        }
        self.append(message, at);
    }

    /// Notes a reader of a message, if `of` wrote it and none else counts (`None`: whoever wrote
    /// it). True when that is news.
    fn mark_read(&mut self, id: &str, of: Option<DeviceId>, reader: DeviceId) -> bool {
        let Some(seq) = self.by_id.get(id).copied() else { return false };
        let Some(position) = self.position_of(seq) else { return false };
        let Some(held) = self.messages.get_mut(position) else { return false };
        let news =
            of.is_none_or(|author| held.author() == author) && add_reader(held.read_by(), reader);
        if news {
            self.reread.insert(seq);
        }
        news
    }

    /// What has to be stored since this was asked last; of changed readers only if wanted.
    fn take_changes(&mut self, path: &RoomPath, readers: bool) -> Option<HistoryChange>
    where
        M: serde::Serialize,
    {
        let mut wanted = std::mem::take(&mut self.fresh);
        if readers {
            wanted.append(&mut self.reread);
        } else {
            self.reread.retain(|seq| !wanted.contains(seq));
        }
        let first = self.first_seq();
        let gone_up_to = std::mem::take(&mut self.shortened).then(|| first - 1);
        let messages: Vec<_> = wanted
            .into_iter()
            .filter_map(|seq| {
                let at = usize::try_from(seq.checked_sub(first)?).ok()?;
                let encoded = cbor::to_value(self.messages.get(at)?).ok()?.encode();
                Some((seq, *self.arrived.get(at)?, encoded))
            })
            .collect();
        (gone_up_to.is_some() || !messages.is_empty()).then(|| HistoryChange {
            path: path.clone(),
            gone_up_to,
            messages,
        })
    }

    /// Nothing of what has changed is stored.
    fn skip_changes(&mut self) {
        self.fresh.clear();
        self.reread.clear();
        self.shortened = false;
    }

    /// Everything has to be stored again.
    fn forget_stored(&mut self) {
        self.fresh = (self.first_seq()..self.next_seq).collect();
    }

    /// Messages with their sequence numbers, oldest first.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (u64, &M)> {
        let first = self.first_seq();
        self.messages.iter().enumerate().map(move |(at, message)| (first + at as u64, message))
    }

    /// The message with this id.
    #[must_use]
    pub fn find(&self, id: &str) -> Option<&M> {
        self.messages.get(self.position(id)?)
    }

    fn position(&self, id: &str) -> Option<usize> {
        self.position_of(*self.by_id.get(id)?)
    }

    fn position_of(&self, seq: u64) -> Option<usize> {
        usize::try_from(seq.checked_sub(self.first_seq())?).ok()
    }

    fn first_seq(&self) -> u64 {
        self.next_seq - self.messages.len() as u64
    }
}

fn add_reader(readers: &mut Vec<DeviceId>, reader: DeviceId) -> bool {
    let new = readers.len() < MAX_READ_BY && !readers.contains(&reader);
    if new {
        readers.push(reader);
    }
    new
}

/// All replicated state of one daemon.
#[derive(Default)]
pub struct Replica {
    agents: BTreeMap<DeviceId, HeldAgent>,
    rooms: BTreeMap<RoomPath, HeldRoom>,
    room_histories: BTreeMap<RoomPath, History<RoomMessage>>,
    dm_histories: BTreeMap<RoomPath, History<DmMessage>>,
    limits: HistoryLimits,
    /// Rooms that may have changed since they were stored.
    changed_rooms: BTreeSet<RoomPath>,
    /// Histories that may have.
    changed_histories: BTreeSet<RoomPath>,
    /// Histories that are gone, though there may be new ones in their place.
    removed_histories: BTreeSet<RoomPath>,
}

impl Replica {
    // --- what is stored ---------------------------------------------------------------------

    /// What is kept of histories from now on.
    pub fn limit_histories(&mut self, limits: HistoryLimits) {
        self.limits = limits;
    }

    /// Rooms that may have changed since this was asked last.
    pub fn take_changed_rooms(&mut self) -> BTreeSet<RoomPath> {
        std::mem::take(&mut self.changed_rooms)
    }

    /// A room has to be stored again.
    pub fn note_room_changed(&mut self, path: RoomPath) {
        self.changed_rooms.insert(path);
    }

    /// What has to be stored of histories since this was asked last, of those that are wanted.
    /// Changed readers of messages that are stored already wait until they are asked for.
    pub fn take_changed_histories(
        &mut self,
        readers: bool,
        wanted: impl Fn(&RoomPath) -> bool,
    ) -> Vec<HistoryChange> {
        let changed = std::mem::take(&mut self.changed_histories);
        let mut changes = Vec::new();
        for path in changed {
            if !wanted(&path) {
                self.skip_changed_history(&path);
                continue;
            }
            let (change, waits) = match self.room_histories.get_mut(&path) {
                Some(history) => (history.take_changes(&path, readers), !history.reread.is_empty()),
                None => match self.dm_histories.get_mut(&path) {
                    Some(history) => {
                        (history.take_changes(&path, readers), !history.reread.is_empty())
                    }
                    None => (None, false),
                },
            };
            if waits {
                self.changed_histories.insert(path.clone());
            }
            if self.removed_histories.remove(&path) {
                let messages = change.map(|change| change.messages).unwrap_or_default();
                changes.push(HistoryChange { path, gone_up_to: Some(u64::MAX), messages });
            } else {
                changes.extend(change);
            }
        }
        changes
    }

    /// Nothing is stored of what has changed in histories.
    pub fn skip_changed_histories(&mut self) {
        for path in std::mem::take(&mut self.changed_histories) {
            self.skip_changed_history(&path);
        }
    }

    fn skip_changed_history(&mut self, path: &RoomPath) {
        self.removed_histories.remove(path);
        if let Some(history) = self.room_histories.get_mut(path) {
            history.skip_changes();
        }
        if let Some(history) = self.dm_histories.get_mut(path) {
            history.skip_changes();
        }
    }

    /// A history has to be stored again, from the beginning.
    pub fn store_history_again(&mut self, path: &RoomPath) {
        if let Some(history) = self.room_histories.get_mut(path) {
            history.forget_stored();
        }
        if let Some(history) = self.dm_histories.get_mut(path) {
            history.forget_stored();
        }
        self.changed_histories.insert(path.clone());
        self.removed_histories.insert(path.clone());
    }

    /// Takes back a stored room. Its owner has the last word on it; for one of ours, whose last
    /// changes a crash may have cost, that is also what its members remember.
    pub fn restore_room(
        &mut self,
        path: RoomPath,
        record: RoomRecord,
        put_out: Vec<DeviceId>,
        ours: bool,
    ) {
        let witnesses = ours.then(|| record.members.iter().copied().collect());
        let mut held = HeldRoom { witnesses, ..HeldRoom::from_owner(record) };
        held.hearsay = true;
        held.owner_leaves = put_out.into_iter().collect();
        held.owner_said.clear();
        self.rooms.insert(path, held);
    }

    /// Takes back a stored message of a room; messages come by their numbers.
    pub fn restore_room_message(
        &mut self,
        path: &RoomPath,
        seq: u64,
        at: UnixMillis,
        message: RoomMessage,
    ) {
        let limits = self.limits;
        self.room_histories
            .entry(path.clone())
            .or_insert_with(|| History { limits, ..History::default() })
            .restore(seq, at, message);
    }

    /// Takes back a stored message of a conversation; messages come by their numbers.
    pub fn restore_dm(&mut self, path: &RoomPath, seq: u64, at: UnixMillis, message: DmMessage) {
        let limits = self.limits;
        self.dm_histories
            .entry(path.clone())
            .or_insert_with(|| History { limits, ..History::default() })
            .restore(seq, at, message);
    }

    /// Members of a room that its owner has put out.
    #[must_use]
    pub fn put_out(&self, path: &RoomPath) -> Vec<DeviceId> {
        self.rooms
            .get(path)
            .map(|held| held.owner_leaves.iter().copied().collect())
            .unwrap_or_default()
    }

    /// Lets go of messages that are too old, and of the longest histories' oldest ones when all
    /// together have grown too large.
    pub fn trim_histories(&mut self, now: UnixMillis) {
        let age = self.limits.age_ms;
        let old = |at: Option<&UnixMillis>| at.is_some_and(|at| now.since(*at) > age);
        for (path, history) in &mut self.room_histories {
            while old(history.arrived.front()) {
                history.drop_oldest();
                self.changed_histories.insert(path.clone());
            }
        }
        for (path, history) in &mut self.dm_histories {
            while old(history.arrived.front()) {
                history.drop_oldest();
                self.changed_histories.insert(path.clone());
            }
        }
        loop {
            let rooms = self.room_histories.iter().map(|(path, h)| (h.bytes, path));
            let dms = self.dm_histories.iter().map(|(path, h)| (h.bytes, path));
            let (mut all, mut longest) = (0, None);
            for (bytes, path) in rooms.chain(dms) {
                all += bytes;
                longest = longest.max(Some((bytes, path)));
            }
            let Some((_, path)) = longest.filter(|_| all > self.limits.all_bytes) else { return };
            let path = path.clone();
            if let Some(history) = self.room_histories.get_mut(&path) {
                shorten(history);
            } else if let Some(history) = self.dm_histories.get_mut(&path) {
                shorten(history);
            }
            self.changed_histories.insert(path);
        }
    }

    // --- agents -----------------------------------------------------------------------------

    /// The record of an agent.
    #[must_use]
    pub fn agent(&self, id: &DeviceId) -> Option<&AgentRecord> {
        self.agents.get(id).map(|held| &held.record)
    }

    /// All records.
    pub fn agents(&self) -> impl ExactSizeIterator<Item = &AgentRecord> {
        self.agents.values().map(|held| &held.record)
    }

    /// Stores the record of an agent of our own.
    pub fn put_own_agent(&mut self, record: AgentRecord) {
        self.agents.insert(record.id, HeldAgent { record, hearsay: false });
    }

    /// Changes a held record in place.
    pub fn agent_mut(&mut self, id: &DeviceId) -> Option<&mut AgentRecord> {
        self.agents.get_mut(id).map(|held| &mut held.record)
    }

    /// Removes an agent.
    pub fn remove_agent(&mut self, id: &DeviceId) -> Option<AgentRecord> {
        self.agents.remove(id).map(|held| held.record)
    }

    /// A statement about an agent that is not ours. `session_lives`: the device concerned has a
    /// session here, so nobody needs to speak for it.
    pub fn merge_agent(
        &mut self,
        incoming: AgentRecord,
        speaker: Speaker,
        session_lives: bool,
    ) -> Merge {
        let text = incoming.name.len()
            + incoming.harness.len()
            + incoming.cwd.len()
            + incoming.started_at.len()
            + incoming.tags.iter().map(String::len).sum::<usize>()
            + incoming.subscribed_rooms.iter().map(String::len).sum::<usize>();
        if text > MAX_AGENT_TEXT {
            return Merge::Refused("agent_too_large");
        }
        if incoming.version > MAX_VERSION {
            return Merge::Refused("version_too_high");
        }
        let own_word = incoming.id == speaker.device;
        if !own_word {
            if !speaker.same_user {
                return Merge::Refused("not_authorised");
            }
            if session_lives {
                return Merge::Refused("device_speaks_for_itself");
            }
        }
        let Some(held) = self.agents.get_mut(&incoming.id) else {
            if self.agents.len() >= MAX_AGENTS {
                return Merge::Refused("too_many_agents");
            }
            self.agents.insert(incoming.id, HeldAgent { record: incoming, hearsay: !own_word });
            return Merge::Changed;
        };
        // The device's own word replaces hearsay, and a restarted device (another start time)
        // begins again at version 1: both whatever the versions say.
        let replaces = own_word && (held.hearsay || held.record.started_at != incoming.started_at);
        if !own_word && !held.hearsay && incoming.version <= held.record.version {
            return Merge::Unchanged;
        }
        if incoming.version < held.record.version && !replaces {
            return Merge::Unchanged;
        }
        let mut record = incoming;
        if record.version == held.record.version {
            for room in &held.record.subscribed_rooms {
                if !record.subscribed_rooms.contains(room) {
                    record.subscribed_rooms.push(room.clone());
                }
            }
        }
        let changed = held.record != record || held.hearsay == own_word;
        *held = HeldAgent { record, hearsay: !own_word };
        if changed { Merge::Changed } else { Merge::Unchanged }
    }

    /// Marks an agent offline. The version is raised so that the mark survives older copies
    /// (reference 8.4 and later), but not the agent's own word, unless the mark is that word
    /// (`own_word`). True when it was not offline before.
    pub fn set_offline(&mut self, id: &DeviceId, own_word: bool) -> bool {
        match self.agents.get_mut(id) {
            Some(held) if held.record.status != AgentStatus::Offline => {
                held.record.status = AgentStatus::Offline;
                held.record.version += 1;
                held.hearsay |= !own_word;
                true
            }
            _ => false,
        }
    }

    // --- rooms ------------------------------------------------------------------------------

    /// A room.
    #[must_use]
    pub fn room(&self, path: &RoomPath) -> Option<&RoomRecord> {
        self.rooms.get(path).map(|held| &held.record)
    }

    /// All rooms.
    pub fn rooms(&self) -> impl Iterator<Item = (&RoomPath, &RoomRecord)> {
        self.rooms.iter().map(|(path, held)| (path, &held.record))
    }

    /// Stores a room of our own, or one whose owner just told us its state.
    pub fn put_room(&mut self, path: RoomPath, record: RoomRecord) -> bool {
        if !self.rooms.contains_key(&path) && self.rooms.len() >= MAX_ROOMS + MAX_OWN_ROOMS {
            return false;
        }
        let owner_leaves =
            self.rooms.remove(&path).map(|held| held.owner_leaves).unwrap_or_default();
        self.changed_rooms.insert(path.clone());
        self.rooms.insert(path, HeldRoom { owner_leaves, ..HeldRoom::from_owner(record) });
        true
    }

    /// Changes a held room in place, for an owner or member of ours.
    pub fn room_mut(&mut self, path: &RoomPath) -> Option<&mut RoomRecord> {
        let held = self.rooms.get_mut(path)?;
        self.changed_rooms.insert(path.clone());
        Some(&mut held.record)
    }

    /// Removes the record of a room.
    pub fn remove_room(&mut self, path: &RoomPath) -> Option<RoomRecord> {
        self.changed_rooms.insert(path.clone());
        self.rooms.remove(path).map(|held| held.record)
    }

    /// Notes that the owner put `agent` out, so that only the owner lets it in again.
    pub fn note_owner_leave(&mut self, path: &RoomPath, agent: DeviceId) {
        if let Some(held) = self.rooms.get_mut(path)
            && held.owner_leaves.insert(agent)
        {
            self.changed_rooms.insert(path.clone());
        }
    }

    /// Notes that the owner let `agent` in.
    pub fn note_owner_join(&mut self, path: &RoomPath, agent: &DeviceId) {
        if let Some(held) = self.rooms.get_mut(path)
            && held.owner_leaves.remove(agent)
        {
            self.changed_rooms.insert(path.clone());
        }
    }

    /// Whether the owner put `agent` out.
    #[must_use]
    pub fn put_out_by_owner(&self, path: &RoomPath, agent: &DeviceId) -> bool {
        self.rooms.get(path).is_some_and(|held| held.owner_leaves.contains(agent))
    }

    /// A statement about a room.
    pub fn merge_room(
        &mut self,
        incoming: RoomRecord,
        speaker: Speaker,
        owner: Owner,
    ) -> (Merge, Option<RoomPath>) {
        let version = |replica: &Self, path: &RoomPath| replica.room(path).map(|r| r.version);
        let before = RoomPath::parse(&incoming.id).ok().and_then(|path| version(self, &path));
        let (merge, path) = self.merge_statement(incoming, speaker, owner);
        // A version may rise though nothing else is taken.
        if let Some(path) = &path
            && (merge == Merge::Changed || version(self, path) != before)
        {
            self.changed_rooms.insert(path.clone());
        }
        (merge, path)
    }

    fn merge_statement(
        &mut self,
        mut incoming: RoomRecord,
        speaker: Speaker,
        owner: Owner,
    ) -> (Merge, Option<RoomPath>) {
        let Ok(path) = RoomPath::parse(&incoming.id) else {
            return (Merge::Refused("bad_room_path"), None);
        };
        if path.owner() != Some(incoming.owner) {
            return (Merge::Refused("owner_not_in_path"), None);
        }
        let text = incoming.name.len() + incoming.description.len() + incoming.created_at.len();
        let stamps = incoming
            .member_joins
            .len()
            .max(incoming.member_leaves.len())
            .max(incoming.invited_joins.len().max(incoming.invited_leaves.len()));
        if text > MAX_ROOM_TEXT || stamps > MAX_ROOM_STAMPS {
            return (Merge::Refused("room_too_large"), None);
        }
        if incoming.version > MAX_VERSION || highest_stamp(&incoming) > MAX_VERSION {
            return (Merge::Refused("version_too_high"), None);
        }
        let ours = matches!(owner, Owner::Ours { .. });
        let own_word = incoming.owner == speaker.device && !ours;
        let Some(held) = self.rooms.get_mut(&path) else {
            if !own_word {
                let refused = match owner {
                    // Destroyed, or invented.
                    Owner::Ours { restored: false } => Some("unknown_own_room"),
                    _ if !speaker.same_user => Some("not_authorised"),
                    // The owner tells us what is for us; somebody else may not have heard the end
                    // of it.
                    Owner::Here => Some("owner_speaks_for_itself"),
                    _ => None,
                };
                if let Some(reason) = refused {
                    return (Merge::Refused(reason), Some(path));
                }
            }
            if self.rooms.len() >= MAX_ROOMS {
                return (Merge::Refused("too_many_rooms"), None);
            }
            incoming.recompute_views();
            let mut held = HeldRoom { hearsay: !own_word, ..HeldRoom::from_owner(incoming) };
            if !own_word {
                held.owner_said.clear();
            }
            if ours {
                held.restore();
            }
            held.note_leaves();
            self.rooms.insert(path.clone(), held);
            return (Merge::Changed, Some(path));
        };
        if own_word {
            let before = held.record.clone();
            let was_hearsay = std::mem::replace(&mut held.hearsay, false);
            // Another creation is another room of the same name.
            if was_hearsay || incoming.created_at != before.created_at {
                *held = HeldRoom::from_owner(incoming);
            } else {
                held.take_from_owner(incoming);
            }
            held.record.recompute_views();
            held.note_leaves();
            let changed = held.record != before || was_hearsay;
            return (if changed { Merge::Changed } else { Merge::Unchanged }, Some(path));
        }
        let other_room = speaker.commsd && incoming.created_at != held.record.created_at;
        // Hearsay is only as good as the newest of it; an owner that lost its memory takes all
        // that its peers have.
        let taken = match owner {
            Owner::Away | Owner::Ours { restored: true } => {
                let witness = held.witnesses.as_ref().is_none_or(|w| w.contains(&speaker.device));
                speaker.same_user && held.hearsay && witness
            }
            Owner::Here | Owner::Ours { restored: false } => false,
        };
        if other_room && !(taken && incoming.created_at > held.record.created_at) {
            return (Merge::Refused("other_creation"), Some(path));
        }
        if taken {
            let before = held.record.clone();
            if other_room {
                held.record = incoming;
                held.owner_leaves.clear();
                if ours {
                    held.restore();
                }
            } else {
                let version =
                    if ours { before.version } else { before.version.max(incoming.version) };
                held.take(incoming);
                held.record.version = version;
            }
            held.record.recompute_views();
            held.note_leaves();
            let changed = held.record != before;
            if changed && ours {
                held.record.version = (held.record.version + 1).min(MAX_VERSION);
            }
            return (if changed { Merge::Changed } else { Merge::Unchanged }, Some(path));
        }
        // Somebody else's word: only its own coming and going counts.
        let agent = speaker.device;
        let join = incoming.member_joins.get(&agent).copied().unwrap_or(0);
        let leave = incoming.member_leaves.get(&agent).copied().unwrap_or(0);
        let held_join = held.record.member_joins.get(&agent).copied().unwrap_or(0);
        let held_leave = held.record.member_leaves.get(&agent).copied().unwrap_or(0);
        let bound = held.record.version.saturating_add(MAX_STAMP_STEP);
        if (join > held_join && join > bound) || (leave > held_leave && leave > bound) {
            return (Merge::Refused("stamp_too_high"), Some(path));
        }
        let mut changed = false;
        if ours && speaker.same_user {
            // Somebody has seen more of our room than we have: we go on above that.
            held.record.version = held.record.version.max(incoming.version);
        }
        // Who has not been in has nothing to leave.
        if leave > held_leave && held_join > 0 {
            held.record.member_leaves.insert(agent, leave);
            held.record.version = held.record.version.max(leave);
            changed = true;
        }
        let comes_in = join > held_join && join > leave.max(held_leave);
        if comes_in {
            let admitted = !held.owner_leaves.contains(&agent)
                && (held.record.kind == RoomType::Public
                    || held.record.is_invited(&agent)
                    || held.record.is_member(&agent)
                    || (held.hearsay && held.witnesses.is_none()));
            let full = held_join == 0 && held.record.member_joins.len() >= MAX_ROOM_STAMPS;
            if !admitted || full {
                held.record.recompute_views();
                return (Merge::Refused("not_admitted"), Some(path));
            }
            held.record.member_joins.insert(agent, join);
            held.record.version = held.record.version.max(join);
            changed = true;
        }
        held.record.recompute_views();
        if changed && ours {
            // The owner says so in turn: then all have it, and who came or went knows.
            held.record.version = (held.record.version + 1).min(MAX_VERSION);
        }
        (if changed { Merge::Changed } else { Merge::Unchanged }, Some(path))
    }

    /// An owner that holds its room's token again comes into service: it goes on from what is
    /// remembered here. Returns the rooms concerned.
    pub fn restore_rooms(&mut self, held: &BTreeSet<&RoomPath>) -> Vec<RoomPath> {
        let mut restored = Vec::new();
        for (path, room) in &mut self.rooms {
            if room.hearsay && held.contains(path) {
                room.restore();
                self.changed_rooms.insert(path.clone());
                restored.push(path.clone());
            }
        }
        restored
    }

    /// A room is gone. Only its owner may say so.
    pub fn merge_room_delete(&mut self, path: &RoomPath, speaker: Speaker) -> Merge {
        if path.owner() != Some(speaker.device) {
            return Merge::Refused("not_owner");
        }
        if self.remove_room(path).is_some() { Merge::Changed } else { Merge::Unchanged }
    }

    // --- histories --------------------------------------------------------------------------

    /// The history of a room.
    #[must_use]
    pub fn room_history(&self, path: &RoomPath) -> Option<&History<RoomMessage>> {
        self.room_histories.get(path)
    }

    /// The history of a room, made when missing; `None` at the bound.
    pub fn room_history_mut(&mut self, path: &RoomPath) -> Option<&mut History<RoomMessage>> {
        if !self.room_histories.contains_key(path) && self.histories() >= MAX_HISTORIES {
            return None;
        }
        self.changed_histories.insert(path.clone());
        let limits = self.limits;
        let new = || History { limits, ..History::default() };
        Some(self.room_histories.entry(path.clone()).or_insert_with(new))
    }

    /// The history of a conversation.
    #[must_use]
    pub fn dm_history(&self, path: &RoomPath) -> Option<&History<DmMessage>> {
        self.dm_histories.get(path)
    }

    /// The history of a conversation, made when missing; `None` at the bound.
    pub fn dm_history_mut(&mut self, path: &RoomPath) -> Option<&mut History<DmMessage>> {
        if !self.dm_histories.contains_key(path) && self.histories() >= MAX_HISTORIES {
            return None;
        }
        self.changed_histories.insert(path.clone());
        let limits = self.limits;
        let new = || History { limits, ..History::default() };
        Some(self.dm_histories.entry(path.clone()).or_insert_with(new))
    }

    /// Notes the reader of messages, where they are held, by whomever or by `of` alone. Gives back
    /// those for which that is news.
    pub fn mark_read(
        &mut self,
        path: &RoomPath,
        mut ids: Vec<String>,
        of: Option<DeviceId>,
        reader: DeviceId,
    ) -> Vec<String> {
        let mut rooms = self.room_histories.get_mut(path);
        let mut dms = self.dm_histories.get_mut(path);
        ids.retain(|id| {
            rooms.as_mut().is_some_and(|history| history.mark_read(id, of, reader))
                || dms.as_mut().is_some_and(|history| history.mark_read(id, of, reader))
        });
        if !ids.is_empty() {
            self.changed_histories.insert(path.clone());
        }
        ids
    }

    /// All room histories.
    pub fn room_histories(&self) -> impl Iterator<Item = (&RoomPath, &History<RoomMessage>)> {
        self.room_histories.iter()
    }

    /// All DM histories.
    pub fn dm_histories(&self) -> impl Iterator<Item = (&RoomPath, &History<DmMessage>)> {
        self.dm_histories.iter()
    }

    /// Forgets a room's history.
    pub fn remove_room_history(&mut self, path: &RoomPath) {
        if self.room_histories.remove(path).is_some() {
            self.changed_histories.insert(path.clone());
            self.removed_histories.insert(path.clone());
        }
    }

    fn histories(&self) -> usize {
        self.room_histories.len() + self.dm_histories.len()
    }
}

/// Drops the older quarter.
fn shorten<M: Message>(history: &mut History<M>) {
    for _ in 0..history.messages.len().div_ceil(4) {
        history.drop_oldest();
    }
}

/// Join and leave stamps per agent.
fn stamps_of_members(room: &RoomRecord) -> BTreeMap<DeviceId, (u64, u64)> {
    let mut stamps: BTreeMap<DeviceId, (u64, u64)> = BTreeMap::new();
    for (agent, join) in &room.member_joins {
        stamps.entry(*agent).or_default().0 = *join;
    }
    for (agent, leave) in &room.member_leaves {
        stamps.entry(*agent).or_default().1 = *leave;
    }
    stamps
}

fn merge_stamps(held: &mut BTreeMap<DeviceId, u64>, incoming: &BTreeMap<DeviceId, u64>) {
    for (agent, stamp) in incoming {
        if held.len() >= MAX_ROOM_STAMPS && !held.contains_key(agent) {
            continue;
        }
        let entry = held.entry(*agent).or_insert(0);
        *entry = (*entry).max(*stamp);
    }
}

fn highest_stamp(room: &RoomRecord) -> u64 {
    [&room.member_joins, &room.member_leaves, &room.invited_joins, &room.invited_leaves]
        .into_iter()
        .flat_map(BTreeMap::values)
        .copied()
        .max()
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::records::Visibility;

    fn id(n: u8) -> DeviceId {
        DeviceId([n; 32])
    }

    fn user(n: u8) -> Speaker {
        Speaker { device: id(n), same_user: true, commsd: false }
    }

    fn stranger(n: u8) -> Speaker {
        Speaker { device: id(n), same_user: false, commsd: false }
    }

    fn agent(n: u8, version: u64, started: &str) -> AgentRecord {
        AgentRecord {
            id: id(n),
            version,
            name: format!("agent {n}"),
            harness: "mcp".into(),
            cwd: "/".into(),
            pid: 1,
            started_at: started.into(),
            visibility: Visibility::Visible,
            status: AgentStatus::Active,
            tags: vec![],
            subscribed_rooms: vec![],
        }
    }

    fn room(owner: u8, version: u64, members: &[(u8, u64)]) -> RoomRecord {
        let mut room = RoomRecord {
            id: format!("{}/r", id(owner)),
            version,
            name: "r".into(),
            kind: RoomType::Public,
            owner: id(owner),
            created_at: String::new(),
            description: String::new(),
            members: vec![],
            invited: vec![],
            member_joins: members.iter().map(|(n, v)| (id(*n), *v)).collect(),
            member_leaves: BTreeMap::new(),
            invited_joins: BTreeMap::new(),
            invited_leaves: BTreeMap::new(),
        };
        room.recompute_views();
        room
    }

    #[test]
    fn nobody_speaks_for_a_device_that_is_here() {
        let mut replica = Replica::default();
        assert_eq!(replica.merge_agent(agent(1, 3, "t"), user(1), true), Merge::Changed);
        let mut lie = agent(1, 9, "t");
        lie.name = "forged".into();
        assert_eq!(
            replica.merge_agent(lie.clone(), user(2), true),
            Merge::Refused("device_speaks_for_itself")
        );
        assert_eq!(
            replica.merge_agent(lie.clone(), stranger(2), false),
            Merge::Refused("not_authorised")
        );
        assert_eq!(replica.agent(&id(1)).unwrap().name, "agent 1");
        // Away, a peer of the same user is heard; the device's own word then replaces it.
        assert_eq!(replica.merge_agent(lie, user(2), false), Merge::Changed);
        assert_eq!(replica.merge_agent(agent(1, 4, "t"), user(1), true), Merge::Changed);
        assert_eq!(replica.agent(&id(1)).unwrap().name, "agent 1");
    }

    #[test]
    fn a_restarted_device_is_believed_at_version_one() {
        let mut replica = Replica::default();
        replica.merge_agent(agent(1, 7, "first"), user(1), true);
        assert_eq!(replica.merge_agent(agent(1, 1, "first"), user(1), true), Merge::Unchanged);
        assert_eq!(replica.merge_agent(agent(1, 1, "second"), user(1), true), Merge::Changed);
        assert_eq!(replica.agent(&id(1)).unwrap().version, 1);
    }

    #[test]
    fn version_at_the_top_of_the_range_is_refused() {
        let mut replica = Replica::default();
        assert_eq!(
            replica.merge_agent(agent(1, MAX_VERSION + 1, "t"), user(1), true),
            Merge::Refused("version_too_high")
        );
    }

    #[test]
    fn only_the_owner_changes_a_room_for_others() {
        let mut replica = Replica::default();
        replica.merge_room(room(1, 2, &[(1, 1), (2, 2)]), user(1), Owner::Away);
        let mut forged = room(1, 9, &[(1, 1), (2, 2), (3, 9), (4, 9)]);
        forged.name = "forged".into();
        let (merge, path) = replica.merge_room(forged, user(3), Owner::Away);
        assert_eq!(merge, Merge::Changed);
        let held = replica.room(&path.unwrap()).unwrap();
        assert_eq!((held.name.as_str(), held.members.len()), ("r", 3));
        assert!(held.is_member(&id(3)) && !held.is_member(&id(4)));
    }

    #[test]
    fn a_kicked_member_does_not_come_back_by_itself() {
        let mut replica = Replica::default();
        replica.merge_room(room(1, 2, &[(1, 1), (2, 2)]), user(1), Owner::Away);
        let mut kicked = room(1, 3, &[(1, 1), (2, 2)]);
        kicked.member_leaves.insert(id(2), 3);
        replica.merge_room(kicked, user(1), Owner::Away);
        let (merge, path) = replica.merge_room(room(1, 4, &[(1, 1), (2, 4)]), user(2), Owner::Away);
        assert_eq!(merge, Merge::Refused("not_admitted"));
        let path = path.unwrap();
        assert!(!replica.room(&path).unwrap().is_member(&id(2)));
        // The owner lets it in again.
        let mut back = room(1, 5, &[(1, 1), (2, 5)]);
        back.member_leaves.insert(id(2), 3);
        assert_eq!(replica.merge_room(back, user(1), Owner::Away).0, Merge::Changed);
        assert!(replica.room(&path).unwrap().is_member(&id(2)));
    }

    #[test]
    fn stamps_that_a_member_gave_itself_do_not_outlive_the_owners_word() {
        let mut replica = Replica::default();
        let stamps = |join: u64, leave: u64, version: u64| {
            let mut room = room(1, version, &[(1, 1), (2, join)]);
            room.member_leaves.insert(id(2), leave);
            room
        };
        let (_, path) = replica.merge_room(room(1, 2, &[(1, 1), (2, 2)]), user(1), Owner::Here);
        let path = path.unwrap();
        // A member raises both of its stamps far above the owner's.
        let (merge, _) = replica.merge_room(stamps(900, 899, 900), user(2), Owner::Here);
        assert_eq!(merge, Merge::Changed);
        // Put out by the owner, which has not heard of it.
        replica.merge_room(stamps(2, 3, 3), user(1), Owner::Here);
        assert!(!replica.room(&path).unwrap().is_member(&id(2)));
        // Let in again by the owner, and known to be in.
        replica.merge_room(stamps(4, 3, 4), user(1), Owner::Here);
        assert!(replica.room(&path).unwrap().is_member(&id(2)));
        // What the owner says of others leaves a member's own leave alone.
        replica.merge_room(stamps(4, 5, 5), user(2), Owner::Here);
        let mut third = stamps(4, 3, 6);
        third.member_joins.insert(id(3), 6);
        replica.merge_room(third, user(1), Owner::Here);
        let held = replica.room(&path).unwrap();
        assert!(held.is_member(&id(3)) && !held.is_member(&id(2)));
    }

    #[test]
    fn kick_racing_a_join_ends_outside() {
        let mut replica = Replica::default();
        replica.merge_room(room(1, 4, &[(1, 1), (2, 4)]), user(1), Owner::Away);
        let mut tie = room(1, 4, &[(1, 1), (2, 4)]);
        tie.member_leaves.insert(id(2), 4);
        let (_, path) = replica.merge_room(tie, user(1), Owner::Away);
        assert!(!replica.room(&path.unwrap()).unwrap().is_member(&id(2)));
    }

    #[test]
    fn rooms_with_paths_that_do_not_parse_are_refused() {
        let mut replica = Replica::default();
        let mut bad = room(1, 1, &[(1, 1)]);
        bad.id = "nonsense".into();
        assert_eq!(
            replica.merge_room(bad, user(1), Owner::Away).0,
            Merge::Refused("bad_room_path")
        );
        let mut foreign = room(1, 1, &[(1, 1)]);
        foreign.owner = id(2);
        assert_eq!(
            replica.merge_room(foreign, user(2), Owner::Away).0,
            Merge::Refused("owner_not_in_path")
        );
    }

    #[test]
    fn histories_are_bounded_and_deduplicated() {
        let mut history = History::default();
        let message = |n: usize| DmMessage {
            id: format!("{n:032x}"),
            from: id(1),
            to: id(2),
            content: "x".into(),
            timestamp: String::new(),
            reply_to: None,
            read_by: vec![id(1)],
            streaming_behavior: None,
        };
        for n in 0..MAX_HISTORY_MESSAGES + 10 {
            assert!(history.add(message(n), UnixMillis(n as u64)).is_some());
        }
        assert_eq!(history.iter().count(), MAX_HISTORY_MESSAGES);
        let mut read = message(MAX_HISTORY_MESSAGES);
        read.read_by.push(id(2));
        assert_eq!(history.add(read, UnixMillis(1)), None);
        let held = history.find(&format!("{MAX_HISTORY_MESSAGES:032x}")).unwrap();
        assert_eq!(held.read_by, vec![id(1), id(2)]);
        // Numbers go on without a gap, and what went is as if it had never been.
        let kept: Vec<(u64, &str)> = history.iter().map(|(seq, m)| (seq, m.id.as_str())).collect();
        assert_eq!(kept[0], (11, format!("{:032x}", 10).as_str()));
        let newest = MAX_HISTORY_MESSAGES as u64 + 10;
        assert_eq!(kept[kept.len() - 1], (newest, format!("{:032x}", newest - 1).as_str()));
        assert!(
            history.find(&message(9).id).is_none()
                && !history.mark_read(&message(9).id, None, id(3))
        );
        assert_eq!(history.add(message(9), UnixMillis(1)), Some(newest + 1));
        assert!(history.mark_read(&message(9).id, None, id(3)));
        assert_eq!(history.find(&message(9).id).unwrap().read_by, vec![id(1), id(3)]);
    }
}
