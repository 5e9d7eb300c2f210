//! The task that owns one [`Owner`]: takes what comes from relays, peers, runs and callers, has it
//! stored, and only then sends, answers and acts. What comes together is stored with one sync.

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;

use tokio::sync::{broadcast, mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::audit::AuditFiles;
use super::outbox::Outbox;
use super::{OfficeError, OfficeTask, Transports, tools::Toolbox};
use crate::acp::code::{Code, Error, Result as AcpResult};
use crate::acp::did::Did;
use crate::acp::objects::ToolCall;
use crate::acp::owner::{Action, Note, Noted, Outcome, Owner, Question, Route, ToolRequest};
use crate::acp::run::{Progress, Ran};
use crate::acp::tool::ToolName;
use crate::acp::value::Digest;
use crate::codec::time::UnixMillis;
use crate::daemon::logging::{emit, event};
use crate::identity::entropy::{Entropy, OsEntropy};
use crate::runtime::adapter::{self, Adapter, Control, ToolUse};
use crate::runtime::clock::unix_now;
use crate::store::{Commit, OwnerStore};

/// Inputs that may wait. Beyond it whoever brings one waits itself: relays keep their mail, runs are
/// slowed down.
const MAX_WAITING: usize = 256;

/// Inputs that are stored with one sync.
const MAX_GROUP: usize = 64;

/// What is told to those who watch and are slow; they then look at the state itself.
const MAX_TOLD: usize = 1024;

/// Uses of tools that wait for the office, per run; each is taken at once.
const MAX_USES: usize = 16;

/// Reports of progress that wait for the office, per run; the newest counts.
const MAX_PROGRESS: usize = 16;

/// How long the end of a program waits for its runs to be gone: a run has five seconds for itself,
/// and its killing takes moments.
const RUNS_END: std::time::Duration = std::time::Duration::from_secs(8);

/// How long a program that ends waits for its mail to be taken.
const FLUSH: std::time::Duration = std::time::Duration::from_secs(10);

/// How long a clock may be wrong before the office looks again, ms: a suspended machine wakes up
/// with timers that are late.
const LONGEST_SLEEP_MS: u64 = 60_000;

/// What those who watch are told.
#[derive(Clone, Debug)]
pub enum Told {
    /// Something happened to a task.
    Note(Note),
    /// The owner is asked.
    Question(Question),
    /// Mail was not handed over; its log sends it again some time.
    Undelivered {
        /// To whom.
        to: Did,
        /// Why.
        error: Error,
        /// Whether it may have come there all the same: what a relay answered says neither.
        in_doubt: bool,
    },
}

/// How an office is furnished.
pub struct Furnishing {
    /// The owner, with what the store held.
    pub owner: Owner,
    /// Its store.
    pub store: OwnerStore,
    /// What runs the work, where it works for others.
    pub adapter: Option<Adapter>,
    /// Where runs have their directories.
    pub work_dir: PathBuf,
    /// The ways to others.
    pub transports: Transports,
    /// Tools that this owner's workers may be granted.
    pub tools: Toolbox,
    /// Audit files to write.
    pub audit: AuditFiles,
}

type Then = Box<dyn FnOnce(Result<(), Error>) + Send>;
type Act =
    Box<dyn FnOnce(&mut Owner, UnixMillis, &mut dyn Entropy) -> (Outcome, Option<Then>) + Send>;

/// What an office takes.
enum Input {
    /// A caller's wish; its answer follows once all is stored.
    Act(Act),
    /// An envelope, and whom to tell that it is stored.
    Mail { bytes: Vec<u8>, via: Route, stored: Option<oneshot::Sender<()>> },
    /// A run says how far it is.
    Progress(Digest, Progress),
    /// A run is over.
    Ended(Digest, Box<Ran>),
    /// A tool has run.
    Tool(Digest, Box<ToolCall>, AcpResult<serde_json::Value>),
}

/// The way into an office.
#[derive(Clone)]
pub struct Office {
    inputs: mpsc::Sender<Input>,
    told: broadcast::Sender<Told>,
    did: Did,
    outbox: Outbox,
    tools: Arc<Toolbox>,
}

impl Office {
    /// The did of its owner.
    #[must_use]
    pub const fn did(&self) -> Did {
        self.did
    }

    /// What happens from now on.
    #[must_use]
    pub fn watch(&self) -> broadcast::Receiver<Told> {
        self.told.subscribe()
    }

    /// Does something as the owner. The answer comes when everything that it led to is on disk.
    ///
    /// # Errors
    /// What `act` says; `RELAY_UNREACHABLE` when the office is closed, or could not store.
    pub async fn act<T: Send + 'static>(
        &self,
        act: impl FnOnce(&mut Owner, UnixMillis, &mut dyn Entropy) -> AcpResult<(T, Outcome)>
        + Send
        + 'static,
    ) -> AcpResult<T> {
        let (tell, told) = oneshot::channel();
        let act: Act = Box::new(move |owner, now, entropy| match act(owner, now, entropy) {
            Ok((answer, out)) => {
                let then: Then = Box::new(move |stored| {
                    let _ = tell.send(stored.map(|()| answer));
                });
                (out, Some(then))
            }
            Err(error) => {
                let _ = tell.send(Err(error));
                (Outcome::default(), None)
            }
        });
        self.inputs.send(Input::Act(act)).await.map_err(|_| closed())?;
        told.await.map_err(|_| closed())?
    }

    /// Looks at the owner's state.
    ///
    /// # Errors
    /// What `look` says, and as [`Self::act`].
    pub async fn look<T: Send + 'static>(
        &self,
        look: impl FnOnce(&Owner) -> AcpResult<T> + Send + 'static,
    ) -> AcpResult<T> {
        self.act(move |owner, _, _| look(owner).map(|seen| (seen, Outcome::default()))).await
    }

    /// Hands an envelope in that came by `via`, and waits until what it led to is on disk.
    ///
    /// # Errors
    /// When the office is closed; what is wrong with an envelope is told to nobody.
    pub async fn mail(&self, bytes: Vec<u8>, via: Route) -> AcpResult<()> {
        let (stored, told) = oneshot::channel();
        let mail = Input::Mail { bytes, via, stored: Some(stored) };
        self.inputs.send(mail).await.map_err(|_| closed())?;
        told.await.map_err(|_| closed())
    }

    /// Lets a peer propose without an invite until then.
    ///
    /// # Errors
    /// As [`Self::act`].
    pub async fn vouch(&self, did: Did, until: UnixMillis) -> AcpResult<()> {
        self.act(move |owner, now, _| {
            owner.vouch(did, until, now);
            Ok(((), Outcome::default()))
        })
        .await
    }

    /// Uses a tool of the requester's for the work of a task, and waits for its answer.
    ///
    /// # Errors
    /// The requester's refusal, and as [`Self::act`].
    pub async fn use_tool(
        &self,
        task: Digest,
        request: ToolRequest,
    ) -> AcpResult<serde_json::Value> {
        let tools = Arc::clone(&self.tools);
        let answer = self
            .act(move |owner, now, entropy| {
                let (call, out) = owner.request_tool(&task, request, now, entropy)?;
                // Before the call leaves, so that no answer is too early.
                Ok((tools.wait(task, call), out))
            })
            .await?;
        answer.await.map_err(|_| closed())?
    }

    /// Whether this owner has a tool for everything that `name` names.
    ///
    /// # Errors
    /// `BAD_FIELD` when there is none.
    pub fn offers(&self, name: &ToolName) -> AcpResult<()> {
        self.tools.offers(name)
    }

    /// Waits until everything that was to be sent has been taken by a relay or a peer, or given up;
    /// ten seconds at most. What is left is sent after the next start.
    pub async fn flushed(&self) {
        // A peer that cannot be reached holds nobody else up.
        let _late = tokio::time::timeout(FLUSH, self.outbox.flushed()).await;
    }
}

fn closed() -> Error {
    Error::new(Code::RelayUnreachable, "this side of the task is closed, or could not store")
        .with_todo(
            "start it again; if its log speaks of the store, free space or mend the disk first",
        )
}

/// A call of a worker's as a request of this side's own work.
fn request(call: &ToolCall) -> ToolRequest {
    ToolRequest {
        call_id: None,
        resource: call.resource.clone(),
        action: call.action.clone(),
        arguments: call.arguments.clone(),
    }
}

/// A run that goes on.
struct Running {
    cancel: CancellationToken,
    hold: watch::Sender<bool>,
}

/// Opens an office; it works until `stop`, or until it cannot store any more.
///
/// # Errors
/// [`OfficeError`] when the system gives no randomness.
pub fn open(
    furnishing: Furnishing,
    stop: CancellationToken,
) -> Result<(Office, OfficeTask), OfficeError> {
    let entropy = OsEntropy::open()?;
    let (inputs, waiting) = mpsc::channel(MAX_WAITING);
    let told = broadcast::Sender::new(MAX_TOLD);
    let outbox = Outbox::new(furnishing.transports.clone(), told.clone(), stop.clone());
    let tools = Arc::new(furnishing.tools);
    let office = Office {
        inputs: inputs.clone(),
        told,
        did: furnishing.owner.did(),
        outbox,
        tools: Arc::clone(&tools),
    };
    let desk = Desk {
        owner: furnishing.owner,
        store: Some(furnishing.store),
        adapter: furnishing.adapter.map(Arc::new),
        work_dir: furnishing.work_dir,
        tools,
        audit: Some(furnishing.audit),
        entropy,
        runs: BTreeMap::new(),
        jobs: JoinSet::new(),
        office: office.clone(),
    };
    furnishing.transports.listen(&office, &stop);
    let task = tokio::spawn(desk.work(waiting, stop));
    Ok((office, task))
}

struct Desk {
    owner: Owner,
    /// Away while a batch is written.
    store: Option<OwnerStore>,
    audit: Option<AuditFiles>,
    adapter: Option<Arc<Adapter>>,
    work_dir: PathBuf,
    tools: Arc<Toolbox>,
    entropy: OsEntropy,
    runs: BTreeMap<Digest, Running>,
    jobs: JoinSet<()>,
    office: Office,
}

impl Desk {
    async fn work(
        mut self,
        mut waiting: mpsc::Receiver<Input>,
        stop: CancellationToken,
    ) -> Result<(), OfficeError> {
        let worked = self.until_stopped(&mut waiting, &stop).await;
        drop(waiting);
        // Whatever has happened, nothing of a run is left behind.
        for run in self.runs.values() {
            run.cancel.cancel();
        }
        let gone = async { while self.jobs.join_next().await.is_some() {} };
        if tokio::time::timeout(RUNS_END, gone).await.is_err() {
            emit(&event("acp_runs_left").with("runs", self.runs.len()));
        }
        worked
    }

    async fn until_stopped(
        &mut self,
        waiting: &mut mpsc::Receiver<Input>,
        stop: &CancellationToken,
    ) -> Result<(), OfficeError> {
        let work_dir = self.work_dir.clone();
        tokio::task::spawn_blocking(move || adapter::reap_leftovers(&work_dir)).await?;
        let out = self.owner.resume(unix_now(), &mut self.entropy)?;
        self.settle(out, Vec::new()).await?;
        loop {
            let wake = self.sleep();
            let mut inputs = VecDeque::new();
            tokio::select! {
                biased;
                () = stop.cancelled() => return Ok(()),
                input = waiting.recv() => inputs.extend(input),
                () = tokio::time::sleep(wake) => {}
                Some(_) = self.jobs.join_next() => continue,
            }
            while inputs.len() < MAX_GROUP
                && let Ok(input) = waiting.try_recv()
            {
                inputs.push_back(input);
            }
            let mut out = Outcome::default();
            let mut thens = Vec::new();
            for input in inputs {
                self.take(input, &mut out, &mut thens);
            }
            let now = unix_now();
            if self.owner.next_poll().is_some_and(|due| due <= now) {
                out.append(self.owner.poll(now, &mut self.entropy)?);
            }
            self.settle(out, thens).await?;
        }
    }

    /// How long there is nothing to do by the clock.
    fn sleep(&self) -> std::time::Duration {
        let due = self.owner.next_poll().map(|due| due.0.saturating_sub(unix_now().0));
        std::time::Duration::from_millis(due.unwrap_or(LONGEST_SLEEP_MS).min(LONGEST_SLEEP_MS))
    }

    fn take(&mut self, input: Input, out: &mut Outcome, thens: &mut Vec<Then>) {
        let now = unix_now();
        let entropy = &mut self.entropy;
        let taken = match input {
            Input::Act(act) => {
                let (done, then) = act(&mut self.owner, now, entropy);
                thens.extend(then);
                Ok(done)
            }
            Input::Mail { bytes, via, stored } => {
                if let Some(stored) = stored {
                    thens.push(Box::new(move |kept| {
                        if kept.is_ok() {
                            let _ = stored.send(());
                        }
                    }));
                }
                let taken = self.owner.receive(&bytes, &via, now, entropy);
                if let Err(error) = &taken {
                    emit(&event("acp_envelope_refused").with("code", error.code().as_str()));
                }
                Ok(taken.unwrap_or_default())
            }
            Input::Progress(task, progress) => {
                self.owner.run_progress(&task, progress, now, entropy)
            }
            Input::Ended(task, ran) => {
                self.runs.remove(&task);
                self.owner.run_ended(&task, *ran, now, entropy)
            }
            Input::Tool(task, call, result) => {
                self.owner.tool_done(&task, &call, result.as_ref().cloned(), now, entropy)
            }
        };
        match taken {
            Ok(done) => out.append(done),
            Err(error) => emit(&event("acp_step_failed").with("code", error.code().as_str())),
        }
    }

    /// Stores an outcome, then lets it out.
    async fn settle(&mut self, out: Outcome, thens: Vec<Then>) -> Result<(), OfficeError> {
        let Outcome { secrets, records, forgotten, rows, sends, actions, notes, spent } = out;
        let nothing = secrets.is_empty() && records.is_empty() && spent.is_empty();
        let kept = if nothing && forgotten.is_empty() && rows.is_empty() {
            Ok(())
        } else {
            let lines = self.audit_lines(&notes);
            let (Some(mut store), Some(mut audit)) = (self.store.take(), self.audit.take()) else {
                return Err(OfficeError::Closed);
            };
            if !forgotten.is_empty() {
                emit(&event("acp_forgotten").with("tasks", forgotten.len()));
            }
            let (store, audit, kept) = tokio::task::spawn_blocking(move || {
                let commit = Commit {
                    secrets: &secrets,
                    records: &records,
                    forgotten: &forgotten,
                    rows: &rows,
                    now: unix_now(),
                };
                let kept = store
                    .commit(commit)
                    .map_err(OfficeError::from)
                    .and_then(|()| audit.append(lines))
                    .and_then(|()| Ok(store.unlink(&spent)?));
                audit.forget(&forgotten);
                (store, audit, kept)
            })
            .await?;
            (self.store, self.audit) = (Some(store), Some(audit));
            kept
        };
        let answer = kept.as_ref().map(drop).map_err(|_| {
            Error::new(Code::RelayUnreachable, "nothing can be stored; the log says why")
                .with_todo("free space or mend the disk, and try again")
        });
        for then in thens {
            then(answer.clone());
        }
        kept?;
        for note in notes {
            self.tell(note);
        }
        for send in sends {
            self.office.outbox.send(send);
        }
        for action in actions {
            self.perform(action);
        }
        Ok(())
    }

    fn audit_lines(&mut self, notes: &[Note]) -> Vec<super::audit::Lines> {
        let Some(audit) = &mut self.audit else { return Vec::new() };
        let mut tasks: Vec<Digest> = notes.iter().map(|note| note.task).collect();
        tasks.dedup();
        tasks
            .iter()
            .filter_map(|task| self.owner.task(task).map(|log| (task, log)))
            .flat_map(|(task, log)| audit.lines(task, log))
            .collect()
    }

    fn tell(&self, note: Note) {
        let told = match &note.what {
            Noted::Entry { seq, event: entry, state, head, alone } => event("acp_entry")
                .with("place", *seq)
                .with("entry", entry.as_str())
                .with("state", state.as_str())
                .with("head", head.as_str())
                .with("alone", *alone),
            Noted::Countersigned { seq } => event("acp_countersigned").with("place", *seq),
            Noted::Trouble { event: entry, error } => event("acp_trouble")
                .with("entry", entry.map_or("", crate::acp::objects::Event::as_str))
                .with("code", error.code().as_str()),
        };
        emit(&told.with("task", note.task_id.as_str()).with("peer", note.peer.to_string()));
        // Nobody may be watching.
        let _ = self.office.told.send(Told::Note(note));
    }

    fn perform(&mut self, action: Action) {
        match action {
            Action::Run { task, job } => self.run(task, *job),
            Action::Stop { task } => {
                if let Some(run) = self.runs.get(&task) {
                    run.cancel.cancel();
                }
            }
            Action::Hold { task, held } => {
                if let Some(run) = self.runs.get(&task) {
                    run.hold.send_replace(held);
                }
            }
            Action::Ask(question) => {
                emit(
                    &event("acp_question")
                        .with("id", question.id())
                        .with("gate", question.gate().as_str())
                        .with("task", question.task_id.as_str()),
                );
                let _ = self.office.told.send(Told::Question(*question));
            }
            Action::CallTool { task, call } => {
                let (tools, office) = (Arc::clone(&self.tools), self.office.clone());
                let parent = self.owner.ordered(&task).and_then(|ordered| ordered.parent);
                self.jobs.spawn(async move {
                    let result = match parent {
                        None => tools.call(&call).await,
                        // A tool of the requester's of the whole, used as this side may use it.
                        Some(parent) => office.use_tool(parent, request(&call)).await,
                    };
                    let _ = office.inputs.send(Input::Tool(task, call, result)).await;
                });
            }
            Action::ToolAnswered { task, call, result } => {
                self.tools.answered(&task, &call, result);
            }
            Action::Publish(notice) => self.office.outbox.publish(*notice),
        }
    }

    fn run(&mut self, task: Digest, job: crate::acp::run::Job) {
        let Some(adapter) = self.adapter.clone() else { return };
        let (hold, held) = watch::channel(false);
        let (report, mut reports) = mpsc::channel(MAX_PROGRESS);
        let cancel = CancellationToken::new();
        self.runs.insert(task, Running { cancel: cancel.clone(), hold });
        let (tools, mut uses) = mpsc::channel::<ToolUse>(MAX_USES);
        let office = self.office.clone();
        self.jobs.spawn(async move {
            let control = Control { cancel, hold: held, progress: report, tools };
            let run = adapter.run(job, control);
            tokio::pin!(run);
            // As many as the run may have open; given up with it.
            let mut using = JoinSet::new();
            let ran = loop {
                tokio::select! {
                    ran = &mut run => break ran,
                    Some(progress) = reports.recv() => {
                        let _ = office.inputs.send(Input::Progress(task, progress)).await;
                    }
                    Some(used) = uses.recv() => {
                        let office = office.clone();
                        using.spawn(async move {
                            let result = office.use_tool(task, used.request.clone()).await;
                            used.answer(result);
                        });
                    }
                    Some(_) = using.join_next() => {}
                }
            };
            let _ = office.inputs.send(Input::Ended(task, Box::new(ran))).await;
        });
    }
}
