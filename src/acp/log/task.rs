//! One side of a task: what it has stored, what it does with a message, what it does with time.
//!
//! Every change is a [`Record`]; the state is what [`TaskLog::apply`] makes of the records, so a log
//! read back from the store is the log that was. A caller stores the records of an output durably
//! before it sends the output's messages: then no crash can make this side sign two things at one
//! place.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::rules;
use super::view::{Fault, View};
use crate::acp::code::{Code, Error, Result};
use crate::acp::did::{Did, Secret};
use crate::acp::json::canonical;
use crate::acp::objects::{
    AuditEntry, AuditGenesis, Cause, Countersignature, Event, EvidenceNotice, Head, Nack, Party,
    ProgressUpdate, SessionKey, SessionMessage, State, TaskContract, ToolCall, ToolResult,
};
use crate::acp::sign::{self, Signature};
use crate::acp::value::{Count, Digest, MessageId, Read as _, Seq, Time};
use crate::codec::time::UnixMillis;
use crate::identity::entropy::Entropy;

/// How long a peer may take to countersign before an ending stands alone, ms (design 7.1).
pub const COUNTERSIGN_TIMEOUT_MS: u64 = 120_000;

/// Sendings, the first included, before an ending stands alone: three resends (design 7.1).
const SENDS_BEFORE_ALONE: u32 = 4;

/// How long the last of these resends has for its answer, ms: after a restart all are made anew.
const ANSWER_MS: u64 = 10_000;

/// Resends wait half a second, doubling up to a minute (design 18).
const RESEND_MS: u64 = 500;
const RESEND_MAX_MS: u64 = 60_000;

/// An ending that stands alone is still sent to the peer, hourly, for as long as relays keep mail.
const SEALED_RESEND_MS: u64 = 3_600_000;
const SEALED_RESEND_FOR_MS: u64 = 7 * 24 * 3_600_000;

/// Steps that wait behind a pending one: what a caller may want at once, and a few endings.
const MAX_WISHES: usize = 16;

/// Entries in one message, and objects; an honest peer is at most two entries behind.
const MAX_CARRIED: usize = 4;
const MAX_OBJECTS: usize = 64;

/// Objects of one entry: a contract, an input and 32 tokens.
const MAX_PAYLOAD: usize = 34;

/// Bytes of one entry's objects: what fits into an envelope of 1 MiB as base64url, with room for the
/// rest of the message.
const MAX_PAYLOAD_BYTES: usize = 720 * 1024;

/// Entries of the peer's that are kept as evidence beside the log.
const MAX_EVIDENCE: usize = 16;

/// What a step needs from outside.
pub struct Cx<'a> {
    /// This side's identity.
    pub key: &'a Secret,
    /// This side's clock.
    pub now: UnixMillis,
    /// The source of randomness.
    pub entropy: &'a mut dyn Entropy,
}

/// A step that this side wants to take, with its payload objects.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Wish {
    #[serde(with = "event_word")]
    /// What.
    pub event: Event,
    /// With what, in the order of design 7.3.
    pub objects: Vec<Value>,
}

mod event_word {
    use super::Event;
    use serde::{Deserialize as _, Deserializer, Serializer, de::Error as _};

    pub(super) fn serialize<S: Serializer>(event: &Event, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(event.as_str())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Event, D::Error> {
        let text = String::deserialize(d)?;
        Event::parse(&text).ok_or_else(|| D::Error::custom("no event"))
    }
}

/// An entry of the log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Committed {
    /// With one or two signatures.
    pub entry: AuditEntry,
    /// Digests of its payload objects.
    pub payload: Vec<Digest>,
}

/// A change of a log, to be stored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", rename_all_fields = "camelCase")]
pub enum Record {
    /// The log begins.
    Opened {
        /// Its genesis.
        genesis: AuditGenesis,
        /// Whether this side is the requester.
        requester: bool,
    },
    /// An object that an entry names.
    Object {
        /// Its digest.
        digest: Digest,
        /// The object.
        object: Value,
    },
    /// An entry of this side's that waits for the other signature.
    Pending {
        /// With this side's signature.
        entry: AuditEntry,
        /// Digests of its payload objects.
        payload: Vec<Digest>,
        /// When it was first sent.
        at: UnixMillis,
    },
    /// An entry is in the log: with both signatures, or alone.
    Committed(Committed),
    /// The second signature of an entry that stood alone has come.
    Countersigned {
        /// Number of the entry.
        seq: u64,
        /// The peer's signature.
        signature: Signature,
    },
    /// A step waits behind a pending one.
    Wished(Wish),
    /// The first waiting step was taken up, or given up.
    WishTaken,
    /// An entry of the peer's that is not in the log and says something about the peer.
    Evidence {
        /// The entry.
        entry: AuditEntry,
        /// `AUDIT_FORK` or `DIVERGED_UNILATERAL`.
        code: Code,
    },
}

/// Something the caller may act on; nothing depends on its doing so.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// An entry is in the log.
    Committed {
        /// Its number.
        seq: u64,
        /// What happened.
        event: Event,
        /// Where the task is now.
        state: State,
        /// Whether it stands with one signature.
        alone: bool,
    },
    /// The second signature of an entry that stood alone has come.
    Countersigned {
        /// Its number.
        seq: u64,
    },
    /// The peer's entry was not countersigned.
    Refused {
        /// Its number.
        seq: u64,
        /// What it was.
        event: Event,
        /// Why.
        error: Error,
    },
    /// The peer has not countersigned ours.
    Nacked {
        /// Its number.
        seq: u64,
        /// Why.
        code: Code,
    },
    /// A step that waited is not possible any more.
    GivenUp {
        /// What it was.
        event: Event,
        /// Why.
        error: Error,
    },
    /// The peer signed two entries at one place: the log is stopped.
    Forked {
        /// The place.
        seq: u64,
    },
    /// Both sides ended the task alone, differently.
    Diverged {
        /// The place.
        seq: u64,
    },
    /// The peer announced its key for this task.
    SessionKey(SessionKey),
    /// The worker asks for a tool.
    ToolCall(Box<ToolCall>),
    /// The answer to a tool call.
    ToolResult(Box<ToolResult>),
}

/// What comes of a step: store the records durably, then send the messages, then act.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outputs {
    /// To store, in this order.
    pub records: Vec<Record>,
    /// To send to the peer.
    pub messages: Vec<SessionMessage>,
    /// What has happened.
    pub effects: Vec<Effect>,
}

impl Outputs {
    fn merge(&mut self, other: Self) {
        self.records.extend(other.records);
        self.messages.extend(other.messages);
        self.effects.extend(other.effects);
    }
}

#[derive(Clone, Debug)]
struct Pending {
    entry: AuditEntry,
    digest: Digest,
    payload: Vec<Digest>,
    first_sent: UnixMillis,
    /// Not stored: counted anew after a restart, which only makes this side more patient.
    sends: u32,
    next_send: UnixMillis,
    /// From when on the peer has had its time; known once all resends were made.
    exhausted_at: Option<UnixMillis>,
}

/// One side's log of one task.
#[derive(Clone, Debug)]
pub struct TaskLog {
    me: Party,
    view: View,
    genesis_digest: Digest,
    entries: Vec<Committed>,
    objects: BTreeMap<Digest, Value>,
    /// At most two: the second is an ending on top of the first (decision 36).
    pending: Vec<Pending>,
    wishes: VecDeque<Wish>,
    evidence: Vec<(AuditEntry, Code)>,
    forked: bool,
    sealed_send: UnixMillis,
}

impl TaskLog {
    /// The log of a task before its first entry; returns the record that begins it.
    ///
    /// # Errors
    /// `BAD_FIELD` for a genesis with one did twice, `WRONG_SIGNER` when `me` is neither.
    pub fn open(genesis: AuditGenesis, me: Did) -> Result<(Self, Record)> {
        let party = genesis
            .party(me)
            .ok_or_else(|| Error::new(Code::WrongSigner, "this did has no part in the task"))?;
        let requester = party == Party::Requester;
        let record = Record::Opened { genesis: genesis.clone(), requester };
        Ok((Self::new(genesis, party)?, record))
    }

    fn new(genesis: AuditGenesis, me: Party) -> Result<Self> {
        let view = View::new(genesis)?;
        Ok(Self {
            me,
            genesis_digest: view.head(),
            view,
            entries: Vec::new(),
            objects: BTreeMap::new(),
            pending: Vec::new(),
            wishes: VecDeque::new(),
            evidence: Vec::new(),
            forked: false,
            sealed_send: UnixMillis(0),
        })
    }

    /// The log that `records` make, as they were stored.
    ///
    /// # Errors
    /// `AUDIT_INVALID` for records that no log has written.
    pub fn restore(records: impl IntoIterator<Item = Record>) -> Result<Self> {
        let mut records = records.into_iter();
        let Some(Record::Opened { genesis, requester }) = records.next() else {
            return Err(Error::new(Code::AuditInvalid, "a stored log begins with its genesis"));
        };
        let me = if requester { Party::Requester } else { Party::Worker };
        let mut log = Self::new(genesis, me)?;
        for record in records {
            log.apply(&record)?;
        }
        Ok(log)
    }

    /// Takes one stored record.
    ///
    /// # Errors
    /// `AUDIT_INVALID` for a record that does not fit.
    pub fn apply(&mut self, record: &Record) -> Result<()> {
        let unfit = || Error::new(Code::AuditInvalid, "a stored record does not fit the log");
        match record {
            Record::Opened { .. } => return Err(unfit()),
            Record::Object { digest, object } => {
                self.objects.insert(*digest, object.clone());
            }
            Record::Pending { entry, payload, at } => {
                self.pending.push(Pending {
                    digest: entry.digest()?,
                    entry: entry.clone(),
                    payload: payload.clone(),
                    first_sent: *at,
                    sends: 0,
                    next_send: *at,
                    exhausted_at: None,
                });
            }
            Record::Committed(committed) => self.apply_committed(committed)?,
            Record::Countersigned { seq, signature } => {
                let at = usize::try_from(*seq).map_err(|_| unfit())?;
                let committed = self.entries.get_mut(at).ok_or_else(unfit)?;
                committed.entry = committed.entry.with_countersignature(signature.clone())?;
            }
            Record::Wished(wish) => self.wishes.push_back(wish.clone()),
            Record::WishTaken => drop(self.wishes.pop_front()),
            Record::Evidence { entry, code } => {
                self.forked |= *code == Code::AuditFork;
                self.evidence.push((entry.clone(), *code));
            }
        }
        Ok(())
    }

    fn apply_committed(&mut self, committed: &Committed) -> Result<()> {
        let Committed { entry, payload } = committed;
        let digest = entry.digest()?;
        if entry.seq.get() != self.view.next_seq() {
            return Err(Error::new(Code::AuditInvalid, "a stored entry is out of order"));
        }
        let find = |digest: &Digest| self.objects.get(digest);
        let step = self.view.check_payload(entry, payload, &find).map_err(|fault| fault.error)?;
        self.view.apply(entry, digest, step);
        self.entries.push(committed.clone());
        match self.pending.first() {
            Some(first) if first.digest == digest => drop(self.pending.remove(0)),
            Some(_) => {
                // Another entry has this place: what stood here is tried again behind it.
                for lost in std::mem::take(&mut self.pending).into_iter().rev() {
                    let objects = lost.payload.iter().filter_map(|d| self.objects.get(d));
                    let objects = objects.cloned().collect();
                    self.wishes.push_front(Wish { event: lost.entry.event, objects });
                }
            }
            None => {}
        }
        Ok(())
    }

    /// Applies a record of this step and puts it out. What this side made itself fits.
    fn note(&mut self, out: &mut Outputs, record: Record) -> Result<()> {
        self.apply(&record)?;
        out.records.push(record);
        Ok(())
    }

    // What the caller may read.

    /// Which side this is.
    #[must_use]
    pub const fn me(&self) -> Party {
        self.me
    }

    /// The log so far: state, contract, receipts.
    #[must_use]
    pub const fn view(&self) -> &View {
        &self.view
    }

    /// What the log is keyed by (decision 39).
    #[must_use]
    pub const fn key(&self) -> Digest {
        self.genesis_digest
    }

    /// The entries.
    #[must_use]
    pub fn entries(&self) -> &[Committed] {
        &self.entries
    }

    /// An object that the log names.
    #[must_use]
    pub fn object(&self, digest: &Digest) -> Option<&Value> {
        self.objects.get(digest)
    }

    /// The input of the work, which came with the proposal.
    #[must_use]
    pub fn input(&self) -> Option<&Value> {
        self.entries.first().and_then(|proposal| self.object(proposal.payload.get(1)?))
    }

    /// The objects that the log, or an entry that was given up, names.
    #[must_use]
    pub const fn objects(&self) -> &BTreeMap<Digest, Value> {
        &self.objects
    }

    /// The other side.
    #[must_use]
    pub fn peer(&self) -> Did {
        self.view.genesis().actor(self.me.other())
    }

    /// This side's entries that wait for the other signature.
    pub fn pending(&self) -> impl Iterator<Item = &AuditEntry> {
        self.pending.iter().map(|pending| &pending.entry)
    }

    /// Whether nothing of this side's waits: no entry for its second signature, no step behind one.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.pending.is_empty() && self.wishes.is_empty()
    }

    /// Entries of the peer's that prove something against it.
    #[must_use]
    pub fn evidence(&self) -> &[(AuditEntry, Code)] {
        &self.evidence
    }

    /// Whether the peer was caught with two entries at one place; then nothing is done any more.
    #[must_use]
    pub const fn is_forked(&self) -> bool {
        self.forked
    }

    /// Whether this side has taken its offer back, which the worker has not answered yet.
    #[must_use]
    pub fn is_taken_back(&self) -> bool {
        let waiting = self.wishes.iter().map(|wish| wish.event);
        let sent = self.pending.iter().map(|pending| pending.entry.event);
        self.view.state().is_none() && waiting.chain(sent).any(|event| event == Event::Withdraw)
    }

    /// Whether nothing follows here: the task has ended, or its log was stopped for a fork.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.view.is_sealed() || self.forked
    }

    /// Whether every entry has both signatures.
    #[must_use]
    pub fn is_confirmed(&self) -> bool {
        self.entries.iter().rev().take(2).all(|c| c.entry.countersignature().is_some())
    }

    /// Whether it was accepted, or this side has ordered it: a worker's log of a proposal alone is none.
    #[must_use]
    pub fn is_contract(&self) -> bool {
        self.me == Party::Requester
            || self.entries.iter().any(|committed| committed.entry.event == Event::Accept)
    }

    fn head(&self) -> Option<Head> {
        let last = self.view.next_seq().checked_sub(1)?;
        Some(Head { seq: Count::clamped(last), digest: self.view.head() })
    }

    /// The log as it would be with what is pending.
    fn projected(&self) -> Result<View> {
        let mut view = self.view.clone();
        for pending in &self.pending {
            let find = |digest: &Digest| self.objects.get(digest);
            let step = view.check_payload(&pending.entry, &pending.payload, &find);
            view.apply(&pending.entry, pending.digest, step.map_err(|fault| fault.error)?);
        }
        Ok(view)
    }

    // What the caller does.

    /// Begins a task as its requester: PROPOSE with the contract (one signature), the input and the
    /// tokens granted.
    ///
    /// # Errors
    /// What makes the proposal illegal.
    pub fn propose(
        cx: &mut Cx<'_>,
        contract: &TaskContract,
        input: Value,
        tokens: Vec<Value>,
    ) -> Result<(Self, Outputs)> {
        let task_id = contract.task_id.clone();
        let genesis = AuditGenesis::new(task_id, cx.key.did(), contract.worker_did)?;
        let (mut log, opened) = Self::open(genesis, cx.key.did())?;
        let late = |limit: Time| cx.now >= limit.millis();
        if late(contract.offer_expires_at) || late(contract.manifest.deadline_at) {
            return Err(Error::new(Code::OfferExpired, "an offer that is over before it is made"));
        }
        let mut objects = vec![to_value(contract)?, input];
        objects.extend(tokens);
        let mut out = log.wish(cx, Wish { event: Event::Propose, objects })?;
        out.records.insert(0, opened);
        Ok((log, out))
    }

    /// Takes a step, or lets it wait behind the pending one.
    ///
    /// # Errors
    /// What makes the step illegal now; `WORKER_BUSY` when too many wait.
    pub fn wish(&mut self, cx: &mut Cx<'_>, wish: Wish) -> Result<Outputs> {
        let mut out = Outputs::default();
        if self.forked {
            return Err(Error::new(Code::AuditFork, "the peer signed two entries at one place"));
        }
        if self.pending.is_empty() && self.wishes.is_empty() && self.is_due(&wish, cx.now) {
            self.author(cx, &mut out, wish)?;
            return Ok(out);
        }
        if self.view.is_sealed() {
            return Err(Error::new(Code::IllegalTransition, "the task has ended"));
        }
        if self.wishes.len() >= MAX_WISHES {
            return Err(Error::new(Code::WorkerBusy, "too many steps wait for the peer"));
        }
        self.note(&mut out, Record::Wished(wish))?;
        self.advance(cx, &mut out)?;
        Ok(out)
    }

    fn is_due(&self, wish: &Wish, now: UnixMillis) -> bool {
        wish.event != Event::Progress || now >= self.view.progress_from()
    }

    /// Writes an entry at the next place of `view`, signs it and makes it pending.
    fn author(&mut self, cx: &mut Cx<'_>, out: &mut Outputs, wish: Wish) -> Result<()> {
        let view = self.projected()?;
        let (entry, payload, objects) = self.draft(cx, &view, wish)?;
        let at = cx.now;
        for (digest, object) in payload.iter().zip(objects) {
            if !self.objects.contains_key(digest) {
                self.note(out, Record::Object { digest: *digest, object })?;
            }
        }
        self.note(out, Record::Pending { entry, payload, at })?;
        self.send_pending(cx, out)
    }

    fn draft(
        &self,
        cx: &Cx<'_>,
        view: &View,
        mut wish: Wish,
    ) -> Result<(AuditEntry, Vec<Digest>, Vec<Value>)> {
        let event = wish.event;
        let to_state = rules::transition(view.state(), event).ok_or_else(|| {
            Error::new(Code::IllegalTransition, format!("no {event} in this state"))
        })?;
        self.check_own_time(view, event, cx.now)?;
        // A clock that was set back does not make the log run backwards.
        let time = Time::from(cx.now).max(view.last_at());
        if event == Event::Progress {
            number_progress(&mut wish.objects, view.next_progress(), time)?;
        }
        let mut bytes = 0;
        for object in &wish.objects {
            bytes += canonical(object)?.len();
        }
        if bytes > MAX_PAYLOAD_BYTES {
            let text = format!("{event} with {bytes} bytes, at most {MAX_PAYLOAD_BYTES} are sent");
            return Err(Error::new(Code::TooLarge, text));
        }
        let payload = wish.objects.iter().map(Digest::of).collect::<Result<Vec<_>>>()?;
        let mut entry = AuditEntry {
            task_id: view.task_id().clone(),
            seq: Count::new(view.next_seq())?,
            prev: view.head(),
            event,
            from_state: view.state(),
            to_state,
            actor_did: cx.key.did(),
            actor_role: self.me,
            at: time,
            payload_digest: Digest::of(&payload)?,
            unilateral: rules::is_unilateral(event),
            signatures: Seq::new(vec![Signature::blank(self.me.role(), cx.key.did())])?,
        };
        let signature = sign::sign(&entry, cx.key, self.me.role(), time.millis())?;
        entry.signatures = Seq::new(vec![signature])?;
        // What we would not countersign we do not write.
        let objects: BTreeMap<_, _> = payload.iter().zip(&wish.objects).collect();
        let find = |digest: &Digest| objects.get(digest).copied();
        view.check_chain(&entry, cx.now)
            .and_then(|()| view.check_payload(&entry, &payload, &find).map(drop))
            .map_err(|fault| fault.error)?;
        Ok((entry, payload, wish.objects))
    }

    /// What an author's own clock must say (decision 43).
    fn check_own_time(&self, view: &View, event: Event, now: UnixMillis) -> Result<()> {
        let Some(contract) = view.contract() else { return Ok(()) };
        let over = |limit: Time| now >= limit.millis();
        match event {
            Event::Accept if over(contract.offer_expires_at) => {
                Err(Error::new(Code::OfferExpired, "the offer is over"))
            }
            Event::Accept | Event::Deliver | Event::Rework
                if over(contract.manifest.deadline_at) =>
            {
                Err(Error::new(Code::DeadlinePassed, "the deadline has passed"))
            }
            _ => Ok(()),
        }
    }

    /// Takes up waiting steps while nothing is pending.
    fn advance(&mut self, cx: &mut Cx<'_>, out: &mut Outputs) -> Result<()> {
        while self.pending.is_empty() && !self.forked {
            let Some(wish) = self.wishes.front().cloned() else { break };
            if !self.view.is_sealed() && !self.is_due(&wish, cx.now) {
                break;
            }
            self.note(out, Record::WishTaken)?;
            let event = wish.event;
            if let Err(error) = self.author(cx, out, wish) {
                out.effects.push(Effect::GivenUp { event, error });
            }
        }
        Ok(())
    }

    // Messages.

    fn message(&self, cx: &mut Cx<'_>) -> SessionMessage {
        SessionMessage {
            message_id: MessageId::draw(cx.entropy),
            task_id: self.view.task_id().clone(),
            from: cx.key.did(),
            to: self.peer(),
            entries: Seq::default(),
            countersignatures: Seq::default(),
            objects: Seq::default(),
            session_key: None,
            head: self.head(),
            nack: None,
            tool_call: None,
            tool_result: None,
            sent_at: Time::from(cx.now),
        }
    }

    /// A message with a tool call or its result.
    ///
    /// # Errors
    /// `ILLEGAL_TRANSITION` while the task is not being worked on.
    pub fn tool_message(
        &self,
        cx: &mut Cx<'_>,
        call: Option<ToolCall>,
        result: Option<ToolResult>,
    ) -> Result<SessionMessage> {
        if call.is_some() && self.view.state() != Some(State::InProgress) {
            return Err(Error::new(Code::IllegalTransition, "tools are for work in progress"));
        }
        Ok(SessionMessage { tool_call: call, tool_result: result, ..self.message(cx) })
    }

    /// A message that carries `entries` with everything they name, as far as it fits.
    fn carry(
        &self,
        cx: &mut Cx<'_>,
        entries: Vec<(AuditEntry, &[Digest])>,
        countersignatures: Vec<Countersignature>,
        nack: Option<Nack>,
    ) -> Result<SessionMessage> {
        let mut objects: Vec<Value> = Vec::new();
        let mut carried = Vec::new();
        for (entry, payload) in entries {
            if carried.len() >= MAX_CARRIED || objects.len() + payload.len() > MAX_OBJECTS {
                break;
            }
            carried.push(entry);
            objects.extend(payload.iter().filter_map(|digest| self.objects.get(digest)).cloned());
        }
        Ok(SessionMessage {
            entries: Seq::new(carried)?,
            countersignatures: Seq::new(countersignatures)?,
            objects: Seq::new(objects)?,
            nack,
            ..self.message(cx)
        })
    }

    fn send_pending(&mut self, cx: &mut Cx<'_>, out: &mut Outputs) -> Result<()> {
        if self.pending.is_empty() {
            return Ok(());
        }
        let entries =
            self.pending.iter().map(|p| (p.entry.clone(), p.payload.as_slice())).collect();
        let message = self.carry(cx, entries, Vec::new(), None)?;
        out.messages.push(message);
        for pending in &mut self.pending {
            pending.sends = pending.sends.saturating_add(1);
            let wait = RESEND_MS << pending.sends.min(8).saturating_sub(1);
            pending.next_send = cx.now.plus(wait.min(RESEND_MAX_MS));
            if pending.sends == SENDS_BEFORE_ALONE {
                let answered = cx.now.plus(ANSWER_MS);
                let timeout = pending.first_sent.plus(COUNTERSIGN_TIMEOUT_MS);
                pending.exhausted_at = Some(timeout.max(answered));
            }
        }
        Ok(())
    }

    /// What the peer has not, when its head is `head`: our entries after it, and our signatures
    /// under its own.
    fn catch_up(&self, cx: &mut Cx<'_>, head: Option<u64>) -> Result<Option<SessionMessage>> {
        let from = head.map_or(0, |seq| seq.saturating_add(1));
        let from = usize::try_from(from).unwrap_or(usize::MAX);
        let mut entries = Vec::new();
        let mut countersignatures = Vec::new();
        for committed in self.entries.iter().skip(from).take(MAX_CARRIED) {
            let entry = &committed.entry;
            if entry.actor_role == self.me {
                entries.push((entry.author_only()?, committed.payload.as_slice()));
            } else if let Some(signature) = entry.countersignature() {
                countersignatures.push(countersign(entry, signature.clone())?);
            }
        }
        let behind = !entries.is_empty() || !countersignatures.is_empty();
        entries.extend(self.pending.iter().map(|p| (p.entry.clone(), p.payload.as_slice())));
        if entries.is_empty() && !behind {
            return Ok(None);
        }
        self.carry(cx, entries, countersignatures, None).map(Some)
    }

    /// Takes a message of the peer's, whose envelope was checked and opened.
    ///
    /// # Errors
    /// `WRONG_SIGNER`, `UNKNOWN_TASK` for a message that is not of this task and peer; everything
    /// else is answered, not failed.
    pub fn handle(&mut self, cx: &mut Cx<'_>, message: SessionMessage) -> Result<Outputs> {
        let mut out = Outputs::default();
        if message.from != self.peer() || message.to != cx.key.did() {
            return Err(Error::new(Code::WrongSigner, "not a message of this task's peer"));
        }
        if message.task_id != *self.view.task_id() {
            return Err(Error::new(Code::UnknownTask, "a message of another task"));
        }
        if self.forked {
            return Ok(out);
        }
        let mut answer = Answer::default();
        let is_request = message.entries.is_empty()
            && message.countersignatures.is_empty()
            && message.nack.is_none()
            && message.tool_call.is_none()
            && message.tool_result.is_none();
        for given in message.countersignatures.iter() {
            self.countersigned(cx, &mut out, given)?;
        }
        let objects = message
            .objects
            .into_vec()
            .into_iter()
            .map(|object| Ok((Digest::of(&object)?, object)))
            .collect::<Result<Vec<_>>>()?;
        for given in given_entries(message.entries.into_vec(), message.head.as_ref(), &objects)? {
            self.take_entry(cx, &mut out, &mut answer, given)?;
        }
        if let Some(nack) = message.nack
            && nack.code != Code::SeqConflict
            && self.pending.iter().any(|pending| pending.entry.seq == nack.seq)
        {
            out.effects.push(Effect::Nacked { seq: nack.seq.get(), code: nack.code });
        }
        out.effects.extend(message.session_key.map(Effect::SessionKey));
        out.effects.extend(message.tool_call.map(|call| Effect::ToolCall(Box::new(call))));
        out.effects.extend(message.tool_result.map(|result| Effect::ToolResult(Box::new(result))));
        let theirs = message.head.as_ref().map(|head| head.seq.get());
        let ahead = theirs.is_some_and(|seq| seq >= self.view.next_seq());
        if !answer.is_empty() {
            let reply = self.reply(cx, answer)?;
            out.messages.push(reply);
        } else if is_request {
            out.messages.extend(self.catch_up(cx, theirs)?);
        } else if ahead && !self.forked && !self.view.is_sealed() {
            let request = self.message(cx);
            out.messages.push(request);
        }
        self.advance(cx, &mut out)?;
        Ok(out)
    }

    fn reply(&self, cx: &mut Cx<'_>, answer: Answer) -> Result<SessionMessage> {
        let mut entries = Vec::new();
        if answer.ours {
            let next = usize::try_from(answer.from).unwrap_or(usize::MAX);
            for committed in self.entries.iter().skip(next).take(MAX_CARRIED) {
                if committed.entry.actor_role == self.me {
                    entries.push((committed.entry.author_only()?, committed.payload.as_slice()));
                }
            }
            entries.extend(self.pending.iter().map(|p| (p.entry.clone(), p.payload.as_slice())));
        }
        let nack = answer.nack.map(|(seq, code)| Nack { seq, code, head: self.head() });
        self.carry(cx, entries, answer.countersignatures, nack)
    }

    /// A second signature for one of ours.
    fn countersigned(
        &mut self,
        cx: &mut Cx<'_>,
        out: &mut Outputs,
        given: &Countersignature,
    ) -> Result<()> {
        let genesis = self.view.genesis().clone();
        let good = |entry: &AuditEntry| {
            entry.actor_role == self.me
                && entry.verify_countersignature(&genesis, &given.signature).is_ok()
        };
        if let Some(first) = self.pending.first()
            && first.digest == given.entry_digest
            && good(&first.entry)
        {
            let entry = first.entry.with_countersignature(given.signature.clone())?;
            let payload = first.payload.clone();
            return self.commit(cx, out, Committed { entry, payload });
        }
        let at = usize::try_from(given.seq.get()).unwrap_or(usize::MAX);
        if let Some(committed) = self.entries.get(at)
            && committed.entry.countersignature().is_none()
            && committed.entry.digest()? == given.entry_digest
            && good(&committed.entry)
        {
            let (seq, signature) = (given.seq.get(), given.signature.clone());
            self.note(out, Record::Countersigned { seq, signature })?;
            out.effects.push(Effect::Countersigned { seq });
        }
        Ok(())
    }

    fn commit(&mut self, cx: &Cx<'_>, out: &mut Outputs, committed: Committed) -> Result<()> {
        let entry = &committed.entry;
        let alone = entry.countersignature().is_none();
        let (seq, event, state) = (entry.seq.get(), entry.event, entry.to_state);
        self.note(out, Record::Committed(committed))?;
        if alone {
            self.sealed_send = cx.now.plus(SEALED_RESEND_MS);
        }
        out.effects.push(Effect::Committed { seq, event, state, alone });
        Ok(())
    }

    /// One entry of the peer's.
    fn take_entry(
        &mut self,
        cx: &mut Cx<'_>,
        out: &mut Outputs,
        answer: &mut Answer,
        given: Given<'_>,
    ) -> Result<()> {
        let entry = &given.entry;
        let theirs = entry.actor_role == self.me.other();
        if !theirs || self.forked || entry.verify(self.view.genesis()).is_err() {
            // Nobody else's entries count, and what is not signed was not said.
            return Ok(());
        }
        let (seq, digest) = (entry.seq.get(), entry.digest()?);
        if seq < self.view.next_seq() {
            return self.old_entry(out, answer, entry, digest, given.sealed);
        }
        if seq > self.view.next_seq() {
            // A gap; the peer's head asks for what is missing.
            return Ok(());
        }
        if !given.sealed
            && let Some(ours) = self.pending.first()
            && !gives_way(&ours.entry, entry)
        {
            answer.refuse(entry.seq, Code::SeqConflict);
            answer.send_ours(seq);
            return Ok(());
        }
        if let Err(Fault { error, stage: _ }) = self.judge(cx.now, &given) {
            answer.refuse(entry.seq, error.code());
            out.effects.push(Effect::Refused { seq, event: entry.event, error });
            return Ok(());
        }
        for (digest, object) in given.objects {
            if !self.objects.contains_key(digest) {
                let object = object.clone();
                self.note(out, Record::Object { digest: *digest, object })?;
            }
        }
        let payload = given.objects.iter().map(|(digest, _)| *digest).collect();
        let entry = entry.author_only()?;
        let signature = sign::sign(&entry, cx.key, self.me.role(), cx.now)?;
        answer.countersignatures.push(countersign(&entry, signature.clone())?);
        let entry = entry.with_countersignature(signature)?;
        self.commit(cx, out, Committed { entry, payload })
    }

    /// Whether the peer's next entry is well formed and legal.
    fn judge(&self, now: UnixMillis, given: &Given<'_>) -> Result<(), Fault> {
        self.view.check_chain(&given.entry, now)?;
        self.view.check_arrival(given.entry.event, now)?;
        let digests: Vec<Digest> = given.objects.iter().map(|(digest, _)| *digest).collect();
        let find = |wanted: &Digest| {
            given.objects.iter().find(|(digest, _)| digest == wanted).map(|(_, object)| object)
        };
        self.view.check_payload(&given.entry, &digests, &find).map(drop)
    }

    /// An entry at a place that is taken.
    fn old_entry(
        &mut self,
        out: &mut Outputs,
        answer: &mut Answer,
        entry: &AuditEntry,
        digest: Digest,
        sealed: bool,
    ) -> Result<()> {
        let seq = entry.seq.get();
        let at = usize::try_from(seq).unwrap_or(usize::MAX);
        let Some(ours) = self.entries.get(at).map(|committed| committed.entry.clone()) else {
            return Ok(());
        };
        if ours.digest()? == digest {
            if let Some(signature) = ours.countersignature() {
                answer.countersignatures.push(countersign(&ours, signature.clone())?);
            }
            return Ok(());
        }
        if ours.actor_role != self.me {
            if ours.prev != entry.prev {
                // An ending on top of what the peer has given up itself (decision 36).
                return Ok(());
            }
            // The peer signed both on the same ground: proof against it.
            self.keep_evidence(out, entry, Code::AuditFork)?;
            out.effects.push(Effect::Forked { seq });
            return Ok(());
        }
        if ours.countersignature().is_some() {
            // What the peer gave up itself.
            return Ok(());
        }
        if sealed {
            // Both ended the task alone; nothing is rewritten.
            let known = self.evidence.iter().any(|(known, _)| known == entry);
            if !known {
                self.keep_evidence(out, entry, Code::DivergedUnilateral)?;
                out.effects.push(Effect::Diverged { seq });
            }
            return Ok(());
        }
        answer.refuse(entry.seq, Code::SeqConflict);
        answer.send_ours(seq);
        Ok(())
    }

    fn keep_evidence(&mut self, out: &mut Outputs, entry: &AuditEntry, code: Code) -> Result<()> {
        if self.evidence.len() < MAX_EVIDENCE {
            self.note(out, Record::Evidence { entry: entry.clone(), code })?;
        }
        Ok(())
    }

    // Time.

    /// Does what the time asks for: resends, endings that are due, endings that stand alone.
    ///
    /// # Errors
    /// None that a caller can do something about; an error is a fault of this program.
    pub fn poll(&mut self, cx: &mut Cx<'_>) -> Result<Outputs> {
        let mut out = Outputs::default();
        if self.forked {
            return Ok(out);
        }
        self.end_what_is_due(cx, &mut out)?;
        self.stand_alone(cx, &mut out)?;
        if self.pending.iter().any(|pending| cx.now >= pending.next_send) {
            self.send_pending(cx, &mut out)?;
        }
        self.resend_sealed(cx, &mut out)?;
        self.advance(cx, &mut out)?;
        Ok(out)
    }

    /// Writes EXPIRE or ABANDON once it may be written, on top of an unanswered entry if need be.
    fn end_what_is_due(&mut self, cx: &mut Cx<'_>, out: &mut Outputs) -> Result<()> {
        let stuck = match self.pending.as_slice() {
            [] => false,
            [only] if !rules::may_be_last_alone(only.entry.event) => {
                if !is_exhausted(only, cx.now) {
                    return Ok(());
                }
                true
            }
            // An ending that waits is not ended once more.
            _ => return Ok(()),
        };
        let view = if stuck { self.projected()? } else { self.view.clone() };
        let abandon = view.abandon_at().filter(|_| self.me == Party::Requester);
        let (event, cause) = if abandon.is_some_and(|limit| cx.now >= limit) {
            (Event::Abandon, Cause::CancelGrace)
        } else {
            match view.expires_at() {
                Some((limit, cause)) if cx.now >= limit => (Event::Expire, cause),
                _ => return Ok(()),
            }
        };
        let at = Time::from(cx.now);
        let notice = EvidenceNotice { task_id: view.task_id().clone(), cause, at };
        self.author(cx, out, Wish { event, objects: vec![to_value(&notice)?] })
    }

    /// Ends the task on top of an entry that the peer does not answer (decision 36): WITHDRAW, FAIL,
    /// REJECT and CANCELLED when the caller asks for them; EXPIRE and ABANDON come by themselves.
    ///
    /// # Errors
    /// `PEER_TIMEOUT` while the peer still has time, `ILLEGAL_TRANSITION` for what is no such ending.
    pub fn end_on_top(&mut self, cx: &mut Cx<'_>, wish: Wish) -> Result<Outputs> {
        let mut out = Outputs::default();
        let alone = rules::is_unilateral(wish.event);
        let top = match self.pending.as_slice() {
            [only] => alone && !rules::may_be_last_alone(only.entry.event) && !self.forked,
            _ => false,
        };
        if !top {
            return Err(Error::new(
                Code::IllegalTransition,
                "nothing is stuck that this could end",
            ));
        }
        if !self.pending.iter().all(|pending| is_exhausted(pending, cx.now)) {
            return Err(Error::new(Code::PeerTimeout, "the peer still has time to answer"));
        }
        self.author(cx, &mut out, wish)?;
        Ok(out)
    }

    /// Seals an ending that the peer does not answer.
    fn stand_alone(&mut self, cx: &mut Cx<'_>, out: &mut Outputs) -> Result<()> {
        let ready = match self.pending.as_slice() {
            [only] => rules::may_be_last_alone(only.entry.event) && is_exhausted(only, cx.now),
            [_, last] => is_exhausted(last, cx.now),
            _ => false,
        };
        if !ready {
            return Ok(());
        }
        for pending in self.pending.clone() {
            let (entry, payload) = (pending.entry, pending.payload);
            self.commit(cx, out, Committed { entry, payload })?;
        }
        Ok(())
    }

    /// What stands alone is sent now and then: the peer may come back.
    fn resend_sealed(&mut self, cx: &mut Cx<'_>, out: &mut Outputs) -> Result<()> {
        if self.sealed_waits() && cx.now >= self.sealed_send {
            self.sealed_send = cx.now.plus(SEALED_RESEND_MS);
            let from = self.view.next_seq().saturating_sub(2).checked_sub(1);
            out.messages.extend(self.catch_up(cx, from)?);
        }
        Ok(())
    }

    /// When [`Self::poll`] has something to do next; right after a poll this is in the future.
    #[must_use]
    pub fn next_poll(&self) -> Option<UnixMillis> {
        if self.forked {
            return None;
        }
        let ends = |view: &View| {
            let abandon = view.abandon_at().filter(|_| self.me == Party::Requester);
            abandon.into_iter().chain(view.expires_at().map(|(limit, _)| limit)).min()
        };
        let own = match self.pending.as_slice() {
            [] => {
                let progress = self.wishes.front().map(|_| self.view.progress_from());
                progress.into_iter().chain(ends(&self.view)).min()
            }
            [only] if rules::may_be_last_alone(only.entry.event) => only.exhausted_at,
            // What is due is written on top of it, but not before the peer has had its time.
            [only] => only.exhausted_at.and_then(|from| {
                let ends = self.projected().ok().and_then(|view| ends(&view));
                ends.map(|ends| ends.max(from))
            }),
            [.., last] => last.exhausted_at,
        };
        let resend = self.pending.iter().map(|pending| pending.next_send).min();
        let sealed = self.sealed_waits().then_some(self.sealed_send);
        [own, resend, sealed].into_iter().flatten().min()
    }

    /// Whether an ending that stands alone is still worth sending.
    fn sealed_waits(&self) -> bool {
        self.view.is_sealed()
            && !self.is_confirmed()
            && self.evidence.is_empty()
            && self.sealed_send < self.view.last_at().millis().plus(SEALED_RESEND_FOR_MS)
    }

    /// After a start: sends again what waits, and asks the peer where it is.
    ///
    /// # Errors
    /// As [`Self::poll`].
    pub fn resume(&mut self, cx: &mut Cx<'_>) -> Result<Outputs> {
        let mut out = self.poll(cx)?;
        if out.messages.is_empty() && !self.view.is_sealed() && !self.forked {
            out.messages.push(self.message(cx));
        }
        Ok(out)
    }

    /// Merges outputs of steps that a caller stores together.
    #[must_use]
    pub fn together(outputs: impl IntoIterator<Item = Outputs>) -> Outputs {
        let mut all = Outputs::default();
        outputs.into_iter().for_each(|one| all.merge(one));
        all
    }
}

/// What a message is answered with.
#[derive(Default)]
struct Answer {
    countersignatures: Vec<Countersignature>,
    nack: Option<(Count, Code)>,
    /// Whether our own entries from `from` on go with it.
    ours: bool,
    from: u64,
}

impl Answer {
    fn is_empty(&self) -> bool {
        self.countersignatures.is_empty() && self.nack.is_none() && !self.ours
    }

    fn refuse(&mut self, seq: Count, code: Code) {
        self.nack.get_or_insert((seq, code));
    }

    fn send_ours(&mut self, from: u64) {
        if !self.ours {
            (self.ours, self.from) = (true, from);
        }
    }
}

fn countersign(entry: &AuditEntry, signature: Signature) -> Result<Countersignature> {
    Ok(Countersignature { seq: entry.seq, entry_digest: entry.digest()?, signature })
}

fn to_value<T: Serialize>(object: &T) -> Result<Value> {
    serde_json::to_value(object).map_err(|_| Error::new(Code::BadField, "no JSON form"))
}

/// Whether our pending entry gives way to the peer's at the same place.
fn gives_way(ours: &AuditEntry, theirs: &AuditEntry) -> bool {
    let (mine, other) = (rules::rank(ours.event), rules::rank(theirs.event));
    other > mine || (other == mine && theirs.actor_role == Party::Requester)
}

/// Whether the peer has had its time and its resends.
fn is_exhausted(pending: &Pending, now: UnixMillis) -> bool {
    pending.exhausted_at.is_some_and(|at| now >= at)
}

/// An entry of a message with the objects that it names.
struct Given<'a> {
    entry: AuditEntry,
    objects: &'a [(Digest, Value)],
    /// Whether its sender says that it has sealed it alone.
    sealed: bool,
}

/// The entries of a message in the order of their numbers.
///
/// An entry names its payload only by the digest of the list. The objects of a message are the
/// payloads of its entries one after the other, so each list is a run of them.
///
/// A sender has sealed an entry alone if its head is the last one, an ending that may stand alone;
/// and also the one right before that, if the ending is unilateral (decision 36).
fn given_entries<'a>(
    entries: Vec<AuditEntry>,
    head: Option<&Head>,
    objects: &'a [(Digest, Value)],
) -> Result<Vec<Given<'a>>> {
    let mut given: Vec<Given<'a>> = Vec::new();
    let mut rest = objects;
    for entry in entries {
        let mut run: &[_] = &[];
        for length in 0..=rest.len().min(MAX_PAYLOAD) {
            let (candidate, behind) = rest.split_at(length);
            let digests: Vec<Digest> = candidate.iter().map(|(digest, _)| *digest).collect();
            if Digest::of(&digests)? == entry.payload_digest {
                (run, rest) = (candidate, behind);
                break;
            }
        }
        given.push(Given { entry, objects: run, sealed: false });
    }
    given.sort_by_key(|given| given.entry.seq);
    let Some(last) = given.last_mut() else { return Ok(given) };
    let (event, prev) = (last.entry.event, last.entry.prev);
    if let Some(head) = head
        && rules::may_be_last_alone(event)
        && head.seq == last.entry.seq
        && head.digest == last.entry.digest()?
    {
        last.sealed = true;
        if let [.., below, _] = given.as_mut_slice()
            && rules::is_unilateral(event)
            && below.entry.digest()? == prev
        {
            below.sealed = true;
        }
    }
    Ok(given)
}

/// Gives a progress update its number and time: those of the place that it gets.
fn number_progress(objects: &mut [Value], number: u64, at: Time) -> Result<()> {
    let Some(first) = objects.first_mut() else { return Ok(()) };
    let update = ProgressUpdate::read(first.clone())?;
    *first = to_value(&ProgressUpdate { progress_seq: Count::new(number)?, at, ..update })?;
    Ok(())
}
