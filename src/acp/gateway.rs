//! A gateway: one identity with its tasks. Envelopes in and out, keys of tasks, which task a message
//! is of, whom a worker answers at all. What a task then does is [`super::log`]'s.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use zeroize::Zeroizing;

use super::code::{Code, Error, Result};
use super::did::{Did, Secret};
use super::envelope::{self, KeyRef, MAX_ENVELOPE, MAX_ENVELOPE_LIFE_MS};
use super::forgotten::{Forgotten, Row, Tombstone};
use super::invite::InviteBook;
use super::json::canonical;
use super::log::rules::TOLERANCE_MS;
use super::log::{Cx, Effect, Outputs, Record, TaskLog, Wish};
use super::objects::{
    AuditGenesis, Envelope, Event, Party, SessionKey, SessionMessage, State, TaskContract,
    ToolCall, ToolResult,
};
use super::revocation::RevocationRegistry;
use super::sign::Role;
use super::value::{
    Digest, EnvelopeId, Key32, Read as _, SKEW_MS, SessionKeyId, TaskId, read_bytes,
};
use crate::codec::time::UnixMillis;
use crate::identity::entropy::Entropy;

/// Tasks that have not ended, in all (design 17).
pub const MAX_OPEN_TASKS: usize = 256;

/// Tasks that have not ended, with one peer.
pub const MAX_OPEN_PER_PEER: usize = 32;

/// Envelope ids that are remembered; each until it is over. At the bound the oldest is forgotten: a
/// message that comes twice is answered the same way.
const MAX_SEEN: usize = 16_384;

/// How long the key of a task outlives its end, for late resends, ms.
pub const KEY_AFTERLIFE_MS: u64 = 24 * 3_600_000;

/// Peers that may propose without an invite at one time: their owner has let each of them in.
pub const MAX_VOUCHED: usize = 1024;

/// Whom a worker lets propose without an invite.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Admission {
    /// Nobody.
    #[default]
    Invited,
    /// These.
    Known(Vec<Did>),
    /// Anybody.
    Anyone,
}

/// A change of a gateway's task, to be stored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum TaskRecord {
    /// Of its log.
    Log {
        /// The change.
        record: Record,
    },
    /// This side announces a key; its secret is stored apart.
    OwnKey {
        /// The key.
        key: SessionKey,
    },
    /// The peer has announced a key.
    PeerKey {
        /// The key.
        key: SessionKey,
    },
    /// The peer's key out of its invite or card.
    PeerDeclared {
        /// The key.
        key: Key32,
    },
}

/// A secret that is stored before anything of the same output: one file, mode 0600 (decision 47).
#[derive(Clone)]
pub struct StoreSecret {
    /// Its name.
    pub id: SessionKeyId,
    /// The X25519 secret.
    pub secret: Zeroizing<[u8; 32]>,
}

impl std::fmt::Debug for StoreSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "StoreSecret({})", self.id)
    }
}

/// What comes of a step of one task: store the secrets, then the records, then send the envelopes.
#[derive(Clone, Debug)]
pub struct Output {
    /// Key of the task: its genesis digest.
    pub task: Digest,
    /// To store first.
    pub secrets: Vec<StoreSecret>,
    /// To store in one transaction.
    pub records: Vec<TaskRecord>,
    /// To send, once all is stored.
    pub envelopes: Vec<Envelope>,
    /// What has happened.
    pub effects: Vec<Effect>,
}

#[derive(Clone, Debug)]
struct Task {
    log: TaskLog,
    own_key: Option<SessionKey>,
    peer_key: Option<SessionKey>,
    peer_declared: Option<Key32>,
}

/// One identity with its tasks.
#[derive(Debug)]
pub struct Gateway {
    key: Secret,
    declared: Option<Zeroizing<[u8; 32]>>,
    session_secrets: BTreeMap<SessionKeyId, Zeroizing<[u8; 32]>>,
    tasks: BTreeMap<Digest, Task>,
    seen: BTreeMap<(Did, EnvelopeId), UnixMillis>,
    /// Whom a worker lets propose without an invite.
    pub admission: Admission,
    /// Dids that a peer of this owner's was found to be, and until when they may propose as well.
    vouched: BTreeMap<Did, UnixMillis>,
    /// Invites issued here.
    pub invites: InviteBook,
    /// What was taken back.
    pub revocations: RevocationRegistry,
    /// Tasks of others that were forgotten.
    pub forgotten: Forgotten,
}

impl Gateway {
    /// A gateway without tasks. `declared` is the secret of the key that its invites and cards name.
    #[must_use]
    pub fn new(key: Secret, declared: Option<Zeroizing<[u8; 32]>>) -> Self {
        Self {
            key,
            declared,
            session_secrets: BTreeMap::new(),
            tasks: BTreeMap::new(),
            seen: BTreeMap::new(),
            admission: Admission::default(),
            vouched: BTreeMap::new(),
            invites: InviteBook::new(),
            revocations: RevocationRegistry::new(),
            forgotten: Forgotten::default(),
        }
    }

    /// Its did.
    #[must_use]
    pub const fn did(&self) -> Did {
        self.key.did()
    }

    /// Takes a task back from the store, with the secrets that are stored apart.
    ///
    /// # Errors
    /// `AUDIT_INVALID` for records that no task has written.
    pub fn restore_task(
        &mut self,
        records: Vec<TaskRecord>,
        secrets: Vec<StoreSecret>,
    ) -> Result<Digest> {
        let (mut own_key, mut peer_key, mut peer_declared) = (None, None, None);
        let mut log = Vec::new();
        for record in records {
            match record {
                TaskRecord::Log { record } => log.push(record),
                TaskRecord::OwnKey { key } => own_key = Some(key),
                TaskRecord::PeerKey { key } => peer_key = Some(key),
                TaskRecord::PeerDeclared { key } => peer_declared = Some(key),
            }
        }
        let log = TaskLog::restore(log)?;
        let task = log.key();
        self.tasks.insert(task, Task { log, own_key, peer_key, peer_declared });
        self.session_secrets.extend(secrets.into_iter().map(|kept| (kept.id, kept.secret)));
        Ok(task)
    }

    /// The log of a task.
    #[must_use]
    pub fn task(&self, task: &Digest) -> Option<&TaskLog> {
        self.tasks.get(task).map(|task| &task.log)
    }

    /// All tasks by their keys.
    pub fn tasks(&self) -> impl Iterator<Item = (&Digest, &TaskLog)> {
        self.tasks.iter().map(|(key, task)| (key, &task.log))
    }

    /// The tasks with this id; more than one when requesters chose the same (decision 39).
    pub fn find<'a>(&'a self, id: &'a TaskId) -> impl Iterator<Item = (&'a Digest, &'a TaskLog)> {
        self.tasks().filter(move |(_, log)| log.view().task_id() == id)
    }

    fn cx<'a>(key: &'a Secret, now: UnixMillis, entropy: &'a mut dyn Entropy) -> Cx<'a> {
        Cx { key, now, entropy }
    }

    /// Begins a task with a worker, whose invite or card may have declared a key.
    ///
    /// # Errors
    /// As [`TaskLog::propose`]; `WORKER_BUSY` when too many tasks are open.
    pub fn propose(
        &mut self,
        contract: &TaskContract,
        input: Value,
        tokens: Vec<Value>,
        worker_key: Option<Key32>,
        now: UnixMillis,
        entropy: &mut dyn Entropy,
    ) -> Result<Output> {
        self.check_room(contract.worker_did)?;
        let mut cx = Self::cx(&self.key, now, entropy);
        let (log, outputs) = TaskLog::propose(&mut cx, contract, input, tokens)?;
        let task = log.key();
        if self.tasks.contains_key(&task) {
            return Err(Error::new(Code::BadId, "a task with this id and worker is there already"));
        }
        let mut output = Output::empty(task);
        let mut new = Task { log, own_key: None, peer_key: None, peer_declared: worker_key };
        output.records.extend(worker_key.map(|key| TaskRecord::PeerDeclared { key }));
        self.new_key(&mut new, &mut output, entropy);
        self.tasks.insert(task, new);
        self.put_out(task, outputs, &mut output, now, entropy)?;
        Ok(output)
    }

    /// Takes a step in a task.
    ///
    /// # Errors
    /// `UNKNOWN_TASK`, and as [`TaskLog::wish`].
    pub fn act(
        &mut self,
        task: &Digest,
        wish: Wish,
        now: UnixMillis,
        entropy: &mut dyn Entropy,
    ) -> Result<Output> {
        let accepts = wish.event == Event::Accept;
        let mut output = Output::empty(*task);
        let entry = self.tasks.get_mut(task).ok_or_else(unknown)?;
        let mut cx = Self::cx(&self.key, now, entropy);
        let outputs = entry.log.wish(&mut cx, wish)?;
        if accepts {
            self.ensure_key(task, &mut output, entropy);
        }
        self.put_out(*task, outputs, &mut output, now, entropy)?;
        Ok(output)
    }

    /// Ends a task on top of a step that its peer does not answer; as [`TaskLog::end_on_top`].
    ///
    /// # Errors
    /// `UNKNOWN_TASK`, and as [`TaskLog::end_on_top`].
    pub fn end_on_top(
        &mut self,
        task: &Digest,
        wish: Wish,
        now: UnixMillis,
        entropy: &mut dyn Entropy,
    ) -> Result<Output> {
        let mut output = Output::empty(*task);
        let entry = self.tasks.get_mut(task).ok_or_else(unknown)?;
        let outputs = entry.log.end_on_top(&mut Self::cx(&self.key, now, entropy), wish)?;
        self.put_out(*task, outputs, &mut output, now, entropy)?;
        Ok(output)
    }

    /// Sends a tool call, or the answer to one.
    ///
    /// # Errors
    /// `UNKNOWN_TASK`, `ILLEGAL_TRANSITION`.
    pub fn send_tool(
        &mut self,
        task: &Digest,
        call: Option<ToolCall>,
        result: Option<ToolResult>,
        now: UnixMillis,
        entropy: &mut dyn Entropy,
    ) -> Result<Output> {
        let mut output = Output::empty(*task);
        let entry = self.tasks.get(task).ok_or_else(unknown)?;
        let mut cx = Self::cx(&self.key, now, entropy);
        let message = entry.log.tool_message(&mut cx, call, result)?;
        let outputs = Outputs { messages: vec![message], ..Outputs::default() };
        self.put_out(*task, outputs, &mut output, now, entropy)?;
        Ok(output)
    }

    /// Does what the time asks for, in every task.
    ///
    /// # Errors
    /// As [`TaskLog::poll`].
    pub fn poll(&mut self, now: UnixMillis, entropy: &mut dyn Entropy) -> Result<Vec<Output>> {
        self.each(now, entropy, |log, cx| match log.next_poll() {
            Some(due) if due <= cx.now => log.poll(cx),
            _ => Ok(Outputs::default()),
        })
    }

    /// After a start: what waits is sent again, and every peer is asked where it is.
    ///
    /// # Errors
    /// As [`TaskLog::poll`].
    pub fn resume(&mut self, now: UnixMillis, entropy: &mut dyn Entropy) -> Result<Vec<Output>> {
        self.each(now, entropy, TaskLog::resume)
    }

    fn each(
        &mut self,
        now: UnixMillis,
        entropy: &mut dyn Entropy,
        step: impl Fn(&mut TaskLog, &mut Cx<'_>) -> Result<Outputs>,
    ) -> Result<Vec<Output>> {
        let keys: Vec<Digest> = self.tasks.keys().copied().collect();
        let mut all = Vec::new();
        for task in keys {
            let Some(entry) = self.tasks.get_mut(&task) else { continue };
            let outputs = step(&mut entry.log, &mut Self::cx(&self.key, now, entropy))?;
            if outputs != Outputs::default() {
                let mut output = Output::empty(task);
                self.put_out(task, outputs, &mut output, now, entropy)?;
                all.push(output);
            }
        }
        Ok(all)
    }

    /// When [`Self::poll`] has something to do next.
    #[must_use]
    pub fn next_poll(&self) -> Option<UnixMillis> {
        self.tasks.values().filter_map(|task| task.log.next_poll()).min()
    }

    /// Forgets the keys of tasks that have ended long ago; their files are to be unlinked.
    pub fn spent_keys(&mut self, now: UnixMillis) -> Vec<SessionKeyId> {
        let mut spent = Vec::new();
        for task in self.tasks.values() {
            let last_at = task.log.view().last_at().millis();
            let over = task.log.is_over() && now >= last_at.plus(KEY_AFTERLIFE_MS);
            if let Some(key) = task.own_key.as_ref().filter(|_| over)
                && self.session_secrets.remove(&key.session_key_id).is_some()
            {
                spent.push(key.session_key_id.clone());
            }
        }
        spent
    }

    /// Forgets a task that has ended; `None` when it has not. Of one that could be proposed again, its
    /// proposal is remembered: those changes come back, with its key, where that is there still.
    pub fn forget(
        &mut self,
        task: &Digest,
        now: UnixMillis,
    ) -> Option<(Vec<Row>, Option<SessionKeyId>)> {
        if !self.tasks.get(task)?.log.is_over() {
            return None;
        }
        let ended = self.tasks.remove(task)?;
        let key = ended.own_key.map(|key| key.session_key_id);
        let key = key.filter(|id| self.session_secrets.remove(id).is_some());
        let log = &ended.log;
        let proposed = log.entries().first().filter(|_| log.me() == Party::Worker);
        let until = log.view().contract().map(offer_over_at).filter(|until| now < *until);
        let rows = proposed.zip(until).map(|(proposed, until)| {
            let proposed_at = proposed.entry.at.millis();
            self.forgotten.add(*task, Tombstone { proposed_at, until }, now)
        });
        Some((rows.unwrap_or_default(), key))
    }

    /// Takes an envelope as it came. `None`: nothing to do or to say, as for a proposal of somebody
    /// who is not admitted, who gets no answer.
    ///
    /// # Errors
    /// What is wrong with the envelope; nothing is sent.
    pub fn receive(
        &mut self,
        bytes: &[u8],
        now: UnixMillis,
        entropy: &mut dyn Entropy,
    ) -> Result<Option<Output>> {
        let envelope = Envelope::read_checked(bytes, MAX_ENVELOPE, now)?;
        if envelope.to != self.did() {
            return Err(Error::new(Code::WrongAudience, "an envelope for somebody else"));
        }
        let id = (envelope.from, envelope.envelope_id.clone());
        self.seen.retain(|_, until| now < *until);
        if self.seen.contains_key(&id) {
            return Ok(None);
        }
        let key = envelope.key_ref()?;
        let plaintext = Zeroizing::new(envelope.open(&*self.secret_of(&key)?)?);
        let message: SessionMessage = read_bytes(&plaintext, MAX_ENVELOPE)?;
        if message.from != envelope.from || message.to != envelope.to {
            return Err(Error::new(
                Code::WrongSigner,
                "a message of somebody else in this envelope",
            ));
        }
        let output = self.take(message, &key, now, entropy)?;
        // Only what was taken counts as seen: a message that came too early may come again.
        if self.seen.len() >= MAX_SEEN {
            let oldest =
                self.seen.iter().min_by_key(|(_, until)| **until).map(|(id, _)| id.clone());
            if let Some(oldest) = oldest {
                self.seen.remove(&oldest);
            }
        }
        self.seen.insert(id, envelope.expires_at.millis().plus(SKEW_MS));
        Ok(output)
    }

    fn secret_of(&self, key: &KeyRef) -> Result<Zeroizing<[u8; 32]>> {
        let gone = || Error::new(Code::StaleKey, "encrypted to a key that is not here (any more)");
        match key {
            KeyRef::Identity => Ok(self.key.decryption_key()),
            KeyRef::Declared => self.declared.clone().ok_or_else(gone),
            KeyRef::Session(id) => self.session_secrets.get(id).cloned().ok_or_else(gone),
        }
    }

    fn take(
        &mut self,
        message: SessionMessage,
        key: &KeyRef,
        now: UnixMillis,
        entropy: &mut dyn Entropy,
    ) -> Result<Option<Output>> {
        let Some(task) = self.task_of(&message)? else { return Ok(None) };
        let mut output = Output::empty(task);
        let mut fresh = None;
        if !self.tasks.contains_key(&task) {
            if !self.admits(&task, &message, now) {
                return Ok(None);
            }
            let genesis = AuditGenesis::new(message.task_id.clone(), message.from, self.did())?;
            let (log, record) = TaskLog::open(genesis, self.did())?;
            fresh = Some(record);
            let new = Task { log, own_key: None, peer_key: None, peer_declared: None };
            self.tasks.insert(task, new);
        }
        let taken = self.hand_over(task, key, message, &mut output, now, entropy);
        if fresh.is_some() && self.task(&task).is_none_or(|log| log.entries().is_empty()) {
            // The proposal was not taken: it leaves nothing behind.
            self.tasks.remove(&task);
            return taken.map(|_| None);
        }
        let mut outputs = taken?;
        if let Some(record) = fresh {
            outputs.records.insert(0, record);
        }
        self.put_out(task, outputs, &mut output, now, entropy)?;
        Ok(Some(output))
    }

    fn hand_over(
        &mut self,
        task: Digest,
        key: &KeyRef,
        message: SessionMessage,
        output: &mut Output,
        now: UnixMillis,
        entropy: &mut dyn Entropy,
    ) -> Result<Outputs> {
        let entry = self.tasks.get_mut(&task).ok_or_else(unknown)?;
        check_key(entry, key, &message)?;
        if let Some(announced) = &message.session_key
            && entry.peer_key.is_none()
        {
            // Once: a second key in the same task would be a way to read on.
            entry.peer_key = Some(announced.clone());
            output.records.push(TaskRecord::PeerKey { key: announced.clone() });
        }
        entry.log.handle(&mut Self::cx(&self.key, now, entropy), message)
    }

    /// Which task a message is of. A requester may choose an id that is in use the other way round,
    /// so the roles in the message decide.
    fn task_of(&self, message: &SessionMessage) -> Result<Option<Digest>> {
        let (me, peer, id) = (self.did(), message.from, &message.task_id);
        let working = AuditGenesis::new(id.clone(), peer, me)?.digest()?;
        let ordering = AuditGenesis::new(id.clone(), me, peer)?.digest()?;
        let role = message
            .entries
            .first()
            .map(|entry| entry.actor_role)
            .or_else(|| match message.countersignatures.first()?.signature.role {
                Role::Requester => Some(Party::Requester),
                Role::Worker => Some(Party::Worker),
                _ => None,
            })
            .or_else(|| message.tool_call.as_ref().map(|_| Party::Worker))
            .or_else(|| message.tool_result.as_ref().map(|_| Party::Requester));
        let known = |task: &Digest| self.tasks.contains_key(task);
        let by_head = |task: &Digest| {
            let head = message.head.as_ref().map(|head| head.digest);
            self.task(task).is_some_and(|log| {
                log.entries().iter().any(|c| c.entry.digest().ok() == head && head.is_some())
            })
        };
        Ok(match role {
            Some(Party::Requester) => Some(working),
            Some(Party::Worker) if known(&ordering) => Some(ordering),
            Some(Party::Worker) => return Err(unknown()),
            None if known(&working) && known(&ordering) => {
                Some(if by_head(&ordering) { ordering } else { working })
            }
            None => [working, ordering].into_iter().find(known),
        })
    }

    /// Lets a peer propose without an invite until then, beside those of [`Self::admission`]. Beyond
    /// [`MAX_VOUCHED`] nobody else is let in for a while.
    pub fn vouch(&mut self, did: Did, until: UnixMillis, now: UnixMillis) {
        self.vouched.retain(|_, until| now < *until);
        if self.vouched.len() < MAX_VOUCHED || self.vouched.contains_key(&did) {
            self.vouched.insert(did, until);
        }
    }

    /// Whether a worker answers a proposal at all (design 7.1: no oracle, no work for strangers). One
    /// that is over, or was there before, is not answered either.
    fn admits(&self, task: &Digest, message: &SessionMessage, now: UnixMillis) -> bool {
        let first = message.entries.first().filter(|entry| entry.event == Event::Propose);
        let is_new = first.is_some_and(|entry| self.forgotten.is_new(task, entry.at.millis()));
        let contract = message.objects.first().cloned().map(TaskContract::read);
        let Some(Ok(contract)) = contract.filter(|_| is_new) else { return false };
        if now >= offer_over_at(&contract) {
            return false;
        }
        let invited = contract
            .invite_id
            .as_ref()
            .is_some_and(|id| self.invites.may_use(id, &self.revocations, now).is_ok());
        let known = match &self.admission {
            Admission::Invited => false,
            Admission::Known(dids) => dids.contains(&message.from),
            Admission::Anyone => true,
        };
        let vouched = self.vouched.get(&message.from).is_some_and(|until| now < *until);
        (invited || known || vouched) && self.check_room(message.from).is_ok()
    }

    fn check_room(&self, peer: Did) -> Result<()> {
        let open = || self.tasks.values().filter(|task| !task.log.is_over());
        let with_peer = open().filter(|task| task.log.peer() == peer).count();
        if open().count() >= MAX_OPEN_TASKS || with_peer >= MAX_OPEN_PER_PEER {
            return Err(Error::new(Code::WorkerBusy, "too many tasks are open"));
        }
        Ok(())
    }

    fn ensure_key(&mut self, task: &Digest, output: &mut Output, entropy: &mut dyn Entropy) {
        if let Some(mut entry) = self.tasks.remove(task) {
            if entry.own_key.is_none() {
                self.new_key(&mut entry, output, entropy);
            }
            self.tasks.insert(*task, entry);
        }
    }

    fn new_key(&mut self, task: &mut Task, output: &mut Output, entropy: &mut dyn Entropy) {
        let (secret, public_key) = envelope::draw_key_pair(entropy);
        let id = SessionKeyId::draw(entropy);
        let key = SessionKey { session_key_id: id.clone(), public_key };
        self.session_secrets.insert(id.clone(), secret.clone());
        output.secrets.push(StoreSecret { id, secret });
        output.records.push(TaskRecord::OwnKey { key: key.clone() });
        task.own_key = Some(key);
    }

    /// Turns the outputs of a log into records and envelopes.
    fn put_out(
        &self,
        task: Digest,
        outputs: Outputs,
        output: &mut Output,
        now: UnixMillis,
        entropy: &mut dyn Entropy,
    ) -> Result<()> {
        let entry = self.tasks.get(&task).ok_or_else(unknown)?;
        output.records.extend(outputs.records.into_iter().map(|record| TaskRecord::Log { record }));
        output.effects.extend(outputs.effects);
        let peer = entry.log.peer();
        let session = entry.peer_key.as_ref();
        let (key_ref, public) = match (session, entry.peer_declared) {
            (Some(key), _) => (KeyRef::Session(key.session_key_id.clone()), key.public_key),
            (None, Some(key)) => (KeyRef::Declared, key),
            (None, None) => (KeyRef::Identity, peer.encryption_key()),
        };
        for mut message in outputs.messages {
            let announces =
                message.entries.iter().any(|e| matches!(e.event, Event::Propose | Event::Accept));
            message.session_key = entry.own_key.clone().filter(|_| announces);
            let plaintext = Zeroizing::new(canonical(&message)?);
            output.envelopes.push(Envelope::seal(
                &self.key,
                peer,
                (&key_ref, public),
                &plaintext,
                now,
                MAX_ENVELOPE_LIFE_MS,
                entropy,
            )?);
        }
        Ok(())
    }
}

impl Output {
    fn empty(task: Digest) -> Self {
        Self {
            task,
            secrets: Vec::new(),
            records: Vec::new(),
            envelopes: Vec::new(),
            effects: Vec::new(),
        }
    }
}

/// From when on an offer is over for both sides, whose clocks may differ.
fn offer_over_at(contract: &TaskContract) -> UnixMillis {
    let offer = contract.offer_expires_at.min(contract.manifest.deadline_at);
    offer.millis().plus(TOLERANCE_MS)
}

fn unknown() -> Error {
    Error::new(Code::UnknownTask, "no such task here")
}

/// Decision 47: once this side has announced a key, nothing else counts, but for a proposal and for
/// the question of a peer that has not seen ACCEPT.
fn check_key(task: &Task, used: &KeyRef, message: &SessionMessage) -> Result<()> {
    let Some(own) = &task.own_key else { return Ok(()) };
    if *used == KeyRef::Session(own.session_key_id.clone()) {
        return Ok(());
    }
    let proposes = message.entries.iter().any(|entry| entry.event == Event::Propose);
    let asks = message.entries.is_empty()
        && message.countersignatures.is_empty()
        && message.nack.is_none()
        && message.tool_call.is_none()
        && message.tool_result.is_none();
    let unseen = task.log.me() == Party::Worker && task.log.view().state() == Some(State::Proposed);
    if proposes || (asks && unseen) {
        return Ok(());
    }
    Err(Error::new(Code::StaleKey, "this task has a key of its own"))
}
