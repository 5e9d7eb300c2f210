//! One owner's side of all tasks: takes what comes, and takes the next step of each task where it is
//! this side's to take. What it does follows from what is stored, so that a start after a crash goes
//! on where the last run was.
//!
//! Sans-I/O: an [`Outcome`] says what to store, to send and to do, in this order. Running work,
//! asking people and calling tools are somebody else's; their answers come back as inputs.

mod forgetting;
mod gates;
mod group;
mod handing_on;
mod introductions;
mod requester;
mod tools;
mod worker;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::approval::{ApprovalBook, Used};
use super::capability::UseCounters;
use super::code::{Code, Error, Result};
use super::did::{Did, Secret};
use super::forgotten::Row;
use super::gateway::{Gateway, Output, StoreSecret, TaskRecord};
use super::invite::InviteUsed;
use super::log::{Cx, Effect, TaskLog, View, Wish, rules};
use super::objects::{
    ApprovalPolicy, Envelope, Event, GatewayEntry, Invite, Isolation, Party, RevocationNotice,
    State, TaskContract,
};
use super::quota::QuotaMeter;
use super::run::{Job, Progress, Ran};
use super::tool::{CallRecord, ToolDesk};
use super::value::{CallId, Digest, SessionKeyId, TaskId, Word};
use crate::codec::time::UnixMillis;
use crate::identity::entropy::Entropy;

pub use forgetting::{KEEP_MS, KEEP_REFUSED_MS, MAX_ENDED, MAX_REFUSED};
pub use gates::{Given, Question, ask_policy};
pub use group::Group;
pub use introductions::{CardTerms, InviteTerms};
pub use requester::{Grant, Order, Ordered};
pub use tools::ToolRequest;
pub use worker::choose_level;

/// Steps that one input may lead to in one task. A task takes two or three at once; more would be a
/// fault of this program, and a loop must not be.
const MAX_STEPS: usize = 16;

/// By which way a peer is reached.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(tag = "by", rename_all = "snake_case")]
pub enum Route {
    /// Relays, the first one that takes it.
    Relays {
        /// Their URLs.
        urls: Vec<String>,
    },
    /// A peer of the mesh.
    Mesh {
        /// Its device id, in hexadecimal.
        device: String,
    },
    /// Another gateway in this process.
    Local,
}

/// What this side offers as a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Profile {
    /// The adapter, as receipts name it.
    pub adapter: Word,
    /// Levels of isolation that it can be run at on this machine.
    pub levels: Vec<Isolation>,
    /// Those of them at which a run can reach the hosts that a manifest lists, and nothing else.
    pub levels_with_hosts: Vec<Isolation>,
    /// Whether it runs the requester's own code: never below `kernel` then, unless the manifest allows
    /// `subprocess` (decision 50).
    pub foreign_code: bool,
    /// Runs at one time; other accepted tasks wait.
    pub max_runs: usize,
}

/// A change to be stored, with the key of the task that it belongs to.
#[derive(Clone, Debug, PartialEq)]
pub struct Stored {
    /// The task; `None` for what is the owner's.
    pub task: Option<Digest>,
    /// The change.
    pub record: OwnerRecord,
}

/// A change to be stored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "of", rename_all = "snake_case")]
pub enum OwnerRecord {
    /// Of a task's log and keys.
    Task {
        /// The change.
        record: TaskRecord,
    },
    /// How the peer of a task is reached.
    Route {
        /// The way.
        route: Route,
    },
    /// What this owner laid down when it ordered the task.
    Ordered {
        /// That.
        order: Box<Ordered>,
    },
    /// A run is about to begin; one that was not over when the program ended is lost.
    RunBegun {
        /// Of which revision.
        revision: u64,
    },
    /// What the work wrote to stderr before it failed: for this owner, and never sent.
    Complaint {
        /// The end of it, as the program wrote it.
        text: String,
    },
    /// A tool call at the requester.
    Call {
        /// The change.
        record: CallRecord,
    },
    /// An approval was used.
    ApprovalUsed {
        /// Which.
        used: Used,
    },
    /// An invite was issued.
    InviteIssued {
        /// The invite.
        invite: Box<Invite>,
    },
    /// An invite was used.
    InviteUsed {
        /// How often by now.
        used: InviteUsed,
    },
    /// Something was taken back, here or elsewhere.
    Revoked {
        /// The notice.
        notice: Box<RevocationNotice>,
    },
    /// An entry of this gateway's journal.
    Journal {
        /// The entry.
        entry: Box<GatewayEntry>,
    },
}

/// An envelope with its way.
#[derive(Clone, Debug, PartialEq)]
pub struct Send {
    /// How.
    pub route: Route,
    /// What.
    pub envelope: Envelope,
}

/// What is to be done, once all is stored.
#[derive(Clone, Debug)]
pub enum Action {
    /// Run the work; [`Owner::run_progress`] and [`Owner::run_ended`] report.
    Run {
        /// Key of the task.
        task: Digest,
        /// What to run.
        job: Box<Job>,
    },
    /// Stop the run of a task.
    Stop {
        /// Key of the task.
        task: Digest,
    },
    /// Hold the run of a task, or let it go on: its budget is used up, and the owners are asked.
    Hold {
        /// Key of the task.
        task: Digest,
        /// Whether it is held.
        held: bool,
    },
    /// Ask the owner; [`Owner::answer`] takes the answer.
    Ask(Box<Question>),
    /// Run a tool; [`Owner::tool_done`] takes the result.
    CallTool {
        /// Key of the task.
        task: Digest,
        /// The call, approved and counted.
        call: Box<super::objects::ToolCall>,
    },
    /// A tool call of this side's work was answered.
    ToolAnswered {
        /// Key of the task.
        task: Digest,
        /// The call.
        call: CallId,
        /// The result, or the refusal.
        result: Result<Value>,
    },
    /// Tell relays that something was taken back.
    Publish(Box<RevocationNotice>),
}

/// What has happened to a task, for logs and for those who wait. Never a payload.
#[derive(Clone, Debug, PartialEq)]
pub struct Note {
    /// Key of the task.
    pub task: Digest,
    /// Its id.
    pub task_id: TaskId,
    /// The other side.
    pub peer: Did,
    /// What.
    pub what: Noted,
}

/// What has happened to a task.
#[derive(Clone, Debug, PartialEq)]
pub enum Noted {
    /// An entry is in the log.
    Entry {
        /// Its number.
        seq: u64,
        /// What happened.
        event: Event,
        /// Where the task is now.
        state: State,
        /// The first digits of its digest.
        head: String,
        /// Whether it stands with one signature.
        alone: bool,
    },
    /// A second signature came late.
    Countersigned {
        /// Of which entry.
        seq: u64,
    },
    /// A step did not come about; whose, and why.
    Trouble {
        /// What it was, where it was one.
        event: Option<Event>,
        /// Why.
        error: Error,
    },
}

/// What comes of an input: store the secrets, then the records in one transaction, then send, then
/// do; then unlink what is spent.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Keys of tasks, a file each.
    pub secrets: Vec<StoreSecret>,
    /// To store in one transaction, in this order.
    pub records: Vec<Stored>,
    /// Tasks of which nothing stays stored, removed with what is stored.
    pub forgotten: Vec<Digest>,
    /// What is kept of such tasks, stored with it.
    pub rows: Vec<Row>,
    /// To send.
    pub sends: Vec<Send>,
    /// To do.
    pub actions: Vec<Action>,
    /// What has happened.
    pub notes: Vec<Note>,
    /// Files of keys that nobody needs any more.
    pub spent: Vec<SessionKeyId>,
}

impl Outcome {
    /// Whether there is nothing to do.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.secrets.is_empty()
            && self.records.is_empty()
            && self.forgotten.is_empty()
            && self.rows.is_empty()
            && self.sends.is_empty()
            && self.actions.is_empty()
            && self.notes.is_empty()
            && self.spent.is_empty()
    }

    /// Puts `other` behind this: for storing several with one sync.
    pub fn append(&mut self, other: Self) {
        self.secrets.extend(other.secrets);
        self.records.extend(other.records);
        self.forgotten.extend(other.forgotten);
        self.rows.extend(other.rows);
        self.sends.extend(other.sends);
        self.actions.extend(other.actions);
        self.notes.extend(other.notes);
        self.spent.extend(other.spent);
    }

    fn own(&mut self, record: OwnerRecord) {
        self.records.push(Stored { task: None, record });
    }

    fn of(&mut self, task: Digest, record: OwnerRecord) {
        self.records.push(Stored { task: Some(task), record });
    }
}

/// A run of this process.
#[derive(Clone, Debug, Default)]
enum Run {
    /// None.
    #[default]
    None,
    /// Going on, perhaps held, perhaps told to stop.
    Running { held: bool, stopping: bool },
    /// Over; its result is not in the log yet.
    Over(Box<Ran>),
    /// Begun by a process that is gone.
    Lost,
}

/// What this side knows of a task beside its log.
#[derive(Debug, Default)]
struct File {
    route: Option<Route>,
    order: Option<Ordered>,
    /// Ordered by the group to be settled.
    settle: bool,
    /// The state in which the group's last order was carried out.
    obeyed: Option<State>,
    tools: ToolDesk,
    meter: QuotaMeter,
    run: Run,
    complaint: Option<String>,
    level: Option<Isolation>,
    progress: Option<Progress>,
    questions: BTreeMap<Digest, Question>,
    answers: BTreeMap<Digest, Given>,
    /// Until when a held run waits for its budget to be raised.
    held_until: Option<UnixMillis>,
    /// The run was stopped for its budget.
    over_budget: bool,
    /// What this owner has said to raises of the budget.
    raises: BTreeMap<Digest, worker::Raise>,
    /// Parts of the task that are handed on, by their contracts.
    children: BTreeMap<Digest, handing_on::Child>,
    /// Calls that wait for the owner.
    asked_calls: BTreeMap<CallId, tools::AskedCall>,
    /// Calls of the worker's that were refused since the start of this program.
    refused_calls: u64,
    /// Calls of this side's work that wait for the requester.
    open_calls: BTreeMap<CallId, tools::OpenCall>,
}

/// One input's work: the clock, the randomness, what has come of it so far.
struct Turn<'a> {
    now: UnixMillis,
    entropy: &'a mut dyn Entropy,
    out: Outcome,
}

impl<'a> Turn<'a> {
    fn new(now: UnixMillis, entropy: &'a mut dyn Entropy) -> Self {
        Self { now, entropy, out: Outcome::default() }
    }
}

/// One owner's side of all tasks.
#[derive(Debug)]
pub struct Owner {
    key: Secret,
    gateway: Gateway,
    /// What the owner has said in advance.
    policy: ApprovalPolicy,
    profile: Option<Profile>,
    files: BTreeMap<Digest, File>,
    approvals: ApprovalBook,
    counters: UseCounters,
    journal: Option<GatewayEntry>,
    /// When it is looked for ended tasks that are old; `None` while there is none.
    look_at: Option<UnixMillis>,
    /// Tasks that have ended since then.
    ended_since: usize,
}

impl Owner {
    /// An owner without tasks. `declared` is the secret of the key that its invites and cards name;
    /// `profile` is there where it works for others.
    #[must_use]
    pub fn new(
        key: Secret,
        declared: Option<zeroize::Zeroizing<[u8; 32]>>,
        policy: ApprovalPolicy,
        profile: Option<Profile>,
    ) -> Self {
        Self {
            gateway: Gateway::new(key.clone(), declared),
            key,
            policy,
            profile,
            files: BTreeMap::new(),
            approvals: ApprovalBook::new(),
            counters: UseCounters::new(),
            journal: None,
            look_at: None,
            ended_since: 0,
        }
    }

    /// Takes back what was stored, in the order in which it was.
    ///
    /// # Errors
    /// `AUDIT_INVALID` for records that no owner has written.
    pub fn restore(
        &mut self,
        stored: Vec<Stored>,
        mut secrets: Vec<StoreSecret>,
        now: UnixMillis,
    ) -> Result<()> {
        let mut tasks: BTreeMap<Digest, Vec<TaskRecord>> = BTreeMap::new();
        for Stored { task, record } in stored {
            match (task, record) {
                (Some(task), OwnerRecord::Task { record }) => {
                    tasks.entry(task).or_default().push(record);
                }
                (Some(task), record) => self.restore_file(task, record)?,
                (None, OwnerRecord::ApprovalUsed { used }) => self.approvals.restore(used),
                (None, OwnerRecord::InviteIssued { invite }) => {
                    self.gateway.invites.issued(*invite);
                }
                (None, OwnerRecord::InviteUsed { used }) => self.gateway.invites.restore(&used),
                (None, OwnerRecord::Revoked { notice }) => {
                    // The clock may have been set back; what was taken back stays so.
                    let now = now.max(notice.issued_at.millis());
                    self.gateway.revocations.add(*notice, now)?;
                }
                (None, OwnerRecord::Journal { entry }) => self.journal = Some(*entry),
                (None, _) => return Err(unfit()),
            }
        }
        // Some of them may be over.
        self.look_at = Some(UnixMillis(0));
        for (key, records) in tasks {
            let own = records.iter().find_map(|record| match record {
                TaskRecord::OwnKey { key } => Some(key.session_key_id.clone()),
                _ => None,
            });
            let at = secrets.iter().position(|secret| Some(&secret.id) == own.as_ref());
            let mine = at.map(|at| secrets.swap_remove(at)).into_iter().collect();
            if self.gateway.restore_task(records, mine)? != key {
                return Err(unfit());
            }
            self.files.entry(key).or_default();
        }
        Ok(())
    }

    fn restore_file(&mut self, task: Digest, record: OwnerRecord) -> Result<()> {
        let file = self.files.entry(task).or_default();
        match record {
            OwnerRecord::Route { route } => file.route = Some(route),
            OwnerRecord::Ordered { order } => file.order = Some(*order),
            OwnerRecord::RunBegun { .. } => file.run = Run::Lost,
            OwnerRecord::Complaint { text } => file.complaint = Some(text),
            OwnerRecord::Call { record } => file.tools.restore(record, &mut self.counters),
            _ => return Err(unfit()),
        }
        Ok(())
    }

    /// Takes back what was stored of forgotten tasks.
    pub fn restore_forgotten(&mut self, rows: Vec<Row>) {
        rows.into_iter().for_each(|row| self.gateway.forgotten.restore(row));
    }

    /// After a start, once leftovers of runs are gone: sends again what waits, asks every peer where
    /// it is, goes on.
    ///
    /// # Errors
    /// A fault of this program.
    pub fn resume(&mut self, now: UnixMillis, entropy: &mut dyn Entropy) -> Result<Outcome> {
        let mut turn = Turn::new(now, entropy);
        self.recount();
        for output in self.gateway.resume(now, turn.entropy)? {
            self.take(output, &mut turn);
        }
        let tasks: Vec<Digest> = self.gateway.tasks().map(|(task, _)| *task).collect();
        for task in tasks {
            self.join_group(task, &mut turn);
            self.consider(task, &mut turn);
        }
        turn.out.spent = self.gateway.spent_keys(now);
        Ok(turn.out)
    }

    /// Takes an envelope that came by `via`.
    ///
    /// # Errors
    /// What is wrong with it; nothing was changed.
    pub fn receive(
        &mut self,
        bytes: &[u8],
        via: &Route,
        now: UnixMillis,
        entropy: &mut dyn Entropy,
    ) -> Result<Outcome> {
        let mut turn = Turn::new(now, entropy);
        let Some(output) = self.gateway.receive(bytes, now, turn.entropy)? else {
            return Ok(turn.out);
        };
        let task = output.task;
        let file = self.files.entry(task).or_default();
        if file.route.is_none() {
            file.route = Some(via.clone());
            turn.out.of(task, OwnerRecord::Route { route: via.clone() });
        }
        self.take(output, &mut turn);
        self.consider(task, &mut turn);
        self.fill_places(&mut turn);
        Ok(turn.out)
    }

    /// Does what the time asks for.
    ///
    /// # Errors
    /// A fault of this program.
    pub fn poll(&mut self, now: UnixMillis, entropy: &mut dyn Entropy) -> Result<Outcome> {
        let mut turn = Turn::new(now, entropy);
        for output in self.gateway.poll(now, turn.entropy)? {
            self.take(output, &mut turn);
        }
        self.resend_calls(&mut turn);
        let due: Vec<Digest> = self.files.keys().copied().collect();
        for task in due {
            self.consider(task, &mut turn);
        }
        self.approvals.prune(now);
        self.gateway.revocations.prune(now);
        self.forget_ended(&mut turn);
        turn.out.spent.extend(self.gateway.spent_keys(now));
        Ok(turn.out)
    }

    /// When [`Self::poll`] has something to do next.
    #[must_use]
    pub fn next_poll(&self) -> Option<UnixMillis> {
        let files = self.files.iter().flat_map(|(task, file)| {
            let log = self.gateway.task(task);
            let questions = file.questions.values().map(|question| question.expires_at);
            let asked = file.asked_calls.values().map(tools::AskedCall::over_at);
            let progress = file.progress.as_ref().and(log).map(|log| log.view().progress_from());
            // Until the log is idle, nothing comes of these.
            let idle = log.is_some_and(is_idle);
            let steps = questions.chain(asked).chain(progress).filter(move |_| idle);
            let calls = file.open_calls.values().map(|call| call.next_send);
            steps.chain(calls).chain(file.held_until)
        });
        files.chain(self.gateway.next_poll()).chain(self.next_forgetting()).min()
    }

    // What may be read.

    /// The did.
    #[must_use]
    pub const fn did(&self) -> Did {
        self.gateway.did()
    }

    /// The owner's key, for what is signed outside of tasks.
    #[must_use]
    pub const fn key(&self) -> &Secret {
        &self.key
    }

    /// Who is admitted, which invites are out, what was taken back.
    #[must_use]
    pub const fn gateway(&self) -> &Gateway {
        &self.gateway
    }

    /// Lets these propose without an invite.
    pub fn admit(&mut self, admission: super::gateway::Admission) {
        self.gateway.admission = admission;
    }

    /// Lets a peer propose without an invite until then.
    pub fn vouch(&mut self, did: Did, until: UnixMillis, now: UnixMillis) {
        self.gateway.vouch(did, until, now);
    }

    /// The log of a task.
    #[must_use]
    pub fn task(&self, task: &Digest) -> Option<&TaskLog> {
        self.gateway.task(task)
    }

    /// The task that `id` means.
    ///
    /// # Errors
    /// `UNKNOWN_TASK`; `BAD_ID` when it is ambiguous (decision 39).
    pub fn find(&self, id: &TaskId) -> Result<Digest> {
        let mut found = self.gateway.find(id).map(|(task, log)| (*task, log.peer()));
        let first = found.next().ok_or_else(unknown)?;
        if let Some(second) = found.next() {
            let text = format!("two requesters chose this id: {} and {}", first.1, second.1);
            return Err(Error::new(Code::BadId, text));
        }
        Ok(first.0)
    }

    /// What waits for this owner's answer.
    pub fn questions(&self) -> impl Iterator<Item = &Question> {
        self.files.values().flat_map(|file| file.questions.values())
    }

    /// The end of what the work of a task wrote to stderr before it failed here: the program's words.
    #[must_use]
    pub fn complaint(&self, task: &Digest) -> Option<&str> {
        self.files.get(task).and_then(|file| file.complaint.as_deref())
    }

    /// The way to the peer of a task.
    #[must_use]
    pub fn route(&self, task: &Digest) -> Option<&Route> {
        self.files.get(task).and_then(|file| file.route.as_ref())
    }

    /// What was laid down when a task was ordered here.
    #[must_use]
    pub fn ordered(&self, task: &Digest) -> Option<&Ordered> {
        self.files.get(task).and_then(|file| file.order.as_ref())
    }

    // Steps.

    /// A task that is over: what waited is given up, what runs is stopped.
    fn close(&mut self, task: Digest, turn: &mut Turn<'_>) {
        self.drop_children(task);
        self.stop(task, turn);
    }

    fn view(&self, task: &Digest) -> Result<View> {
        self.gateway.task(task).map(|log| log.view().clone()).ok_or_else(unknown)
    }

    /// A context for the builders of `steps`.
    fn cx<'b>(key: &'b Secret, turn: &'b mut Turn<'_>) -> Cx<'b> {
        Cx { key, now: turn.now, entropy: turn.entropy }
    }

    /// Takes a step and whatever comes of it.
    fn act(&mut self, task: Digest, wish: Wish, turn: &mut Turn<'_>) -> Result<()> {
        let output = self.gateway.act(&task, wish, turn.now, turn.entropy)?;
        self.take(output, turn);
        Ok(())
    }

    /// Turns an output of the gateway into an outcome, and reacts to what it says has happened.
    fn take(&mut self, output: Output, turn: &mut Turn<'_>) {
        let task = output.task;
        turn.out.secrets.extend(output.secrets);
        for record in output.records {
            turn.out.of(task, OwnerRecord::Task { record });
        }
        if let Some(route) = self.files.get(&task).and_then(|file| file.route.clone()) {
            let send = |envelope| Send { route: route.clone(), envelope };
            turn.out.sends.extend(output.envelopes.into_iter().map(send));
        }
        for effect in output.effects {
            self.effect(task, effect, turn);
        }
    }

    fn effect(&mut self, task: Digest, effect: Effect, turn: &mut Turn<'_>) {
        let trouble = |event, error| Some(Noted::Trouble { event, error });
        let fork = |text: &str| Error::new(Code::AuditFork, text);
        let noted = match effect {
            Effect::Committed { seq, event, state, alone } => {
                self.committed(task, event, turn);
                if rules::is_terminal(state) {
                    self.has_ended(turn.now);
                }
                let log = self.gateway.task(&task);
                let at = usize::try_from(seq).unwrap_or(usize::MAX);
                let entry = log.and_then(|log| log.entries().get(at));
                let digest = entry.and_then(|committed| committed.entry.digest().ok());
                let head = digest.map(|digest| digest.short()).unwrap_or_default();
                Some(Noted::Entry { seq, event, state, head, alone })
            }
            Effect::Countersigned { seq } => Some(Noted::Countersigned { seq }),
            Effect::GivenUp { event: Event::Withdraw, .. } => {
                // The worker accepted before it heard of that: then its work is cancelled.
                let cancelled = self.cancel_in(task, "the offer was taken back", turn);
                cancelled.err().and_then(|error| trouble(Some(Event::Cancel), error))
            }
            Effect::Refused { event, error, .. } | Effect::GivenUp { event, error } => {
                trouble(Some(event), error)
            }
            Effect::Nacked { code, .. } => {
                trouble(None, Error::new(code, "the peer does not countersign this side's entry"))
            }
            Effect::Forked { .. } => {
                self.has_ended(turn.now);
                self.join_group(task, turn);
                trouble(None, fork("the peer signed two entries at one place; the task is stopped"))
            }
            Effect::Diverged { .. } => trouble(
                None,
                Error::new(Code::DivergedUnilateral, "both sides ended the task, differently"),
            ),
            Effect::SessionKey(_) => None,
            Effect::ToolCall(call) => {
                self.tool_called(task, call, turn);
                None
            }
            Effect::ToolResult(result) => {
                self.tool_answered(task, &result, turn);
                None
            }
        };
        if let Some(what) = noted {
            self.note(task, what, turn);
        }
    }

    fn note(&self, task: Digest, what: Noted, turn: &mut Turn<'_>) {
        if let Some(log) = self.gateway.task(&task) {
            let (task_id, peer) = (log.view().task_id().clone(), log.peer());
            turn.out.notes.push(Note { task, task_id, peer, what });
        }
    }

    fn trouble(&self, task: Digest, event: Option<Event>, error: Error, turn: &mut Turn<'_>) {
        self.note(task, Noted::Trouble { event, error }, turn);
    }

    /// What an entry means for what is kept beside the log.
    fn committed(&mut self, task: Digest, event: Event, turn: &mut Turn<'_>) {
        if event == Event::Progress {
            self.charge(task);
        }
        self.join_group(task, turn);
    }

    /// Takes the steps that are this side's to take now, and drops the questions that are over then.
    fn consider(&mut self, task: Digest, turn: &mut Turn<'_>) {
        for _ in 0..MAX_STEPS {
            match self.step(task, turn) {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => {
                    self.trouble(task, None, error, turn);
                    break;
                }
            }
        }
        // In a log that was stopped no question is open any more.
        let state = self.gateway.task(&task).and_then(|log| match log.is_forked() {
            true => Some(State::Failed),
            false => log.view().state(),
        });
        if let (Some(state), Some(file)) = (state, self.files.get_mut(&task)) {
            file.drop_questions(state);
        }
    }

    /// One step; whether there may be another one.
    fn step(&mut self, task: Digest, turn: &mut Turn<'_>) -> Result<bool> {
        let Some(log) = self.gateway.task(&task) else { return Ok(false) };
        let (me, idle) = (log.me(), is_idle(log));
        if log.is_over() {
            self.close(task, turn);
            return Ok(false);
        }
        let Some(state) = log.view().state() else { return Ok(false) };
        let view = log.view().clone();
        match me {
            Party::Worker => self.worker_step(task, &view, state, idle, turn),
            Party::Requester if idle => self.requester_step(task, &view, state, turn),
            Party::Requester => Ok(false),
        }
    }
}

/// Whether this side may put a next step into a log.
fn is_idle(log: &TaskLog) -> bool {
    log.is_idle() && !log.is_forked()
}

fn unknown() -> Error {
    Error::new(Code::UnknownTask, "no such task here")
}

fn unfit() -> Error {
    Error::new(Code::AuditInvalid, "a stored record does not fit")
}

/// The contract of a task that was proposed.
fn contract(view: &View) -> Result<&TaskContract> {
    view.contract().ok_or_else(|| Error::new(Code::IllegalTransition, "nothing was proposed yet"))
}
