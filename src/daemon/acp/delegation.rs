//! Work ordered from others, and what came of it: one task, or the same work given to several.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::broadcast::error::RecvError;
use tokio_util::sync::CancellationToken;

use super::office::{Office, Told};
use crate::acp::audit::{AuditLog, Report, verify};
use crate::acp::code::{Code, Error, Result};
use crate::acp::did::Did;
use crate::acp::log::TaskLog;
use crate::acp::multi::{MAX_WORKERS, Multi, Outcome as GroupOutcome};
use crate::acp::objects::{Event, Party, ProgressUpdate, State};
use crate::acp::owner::{Group, Noted, Order, Outcome, Owner, Question};
use crate::acp::value::{Digest, TaskId};
use crate::runtime::clock::unix_now;

/// How long a cancelled task may take to end before it is left to the next start.
const CANCEL_TIME: Duration = Duration::from_secs(20);

/// How long it is waited for the answer to an offer's withdrawal where there was none to the offer.
const UNANSWERED: Duration = Duration::from_secs(2);

/// How long the other tasks of a group may take to end once it is decided.
const GROUP_END: Duration = Duration::from_secs(15);

/// How often the state is looked at although nothing was told: told things can be missed.
const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// How a task stands, for people and programs.
#[derive(Clone, Debug)]
pub struct Standing {
    /// Key of its log.
    pub task: Digest,
    /// Its id.
    pub task_id: TaskId,
    /// Which side this is.
    pub me: Party,
    /// The other side.
    pub peer: Did,
    /// The requester's title: untrusted text at a worker.
    pub title: String,
    /// Where it is; `None` while the proposal was not countersigned.
    pub state: Option<State>,
    /// Whether that proposal was taken back.
    pub taken_back: bool,
    /// Whether nothing follows here: it has ended, or was stopped because the peer signed two things
    /// at one place.
    pub over: bool,
    /// Whether nothing follows, and both sides know.
    pub confirmed: bool,
    /// What happened last.
    pub last: Option<Event>,
    /// What was ordered: the members of the manifest that say so, and the input.
    pub order: Value,
    /// The newest progress.
    pub progress: Option<ProgressUpdate>,
    /// The result, once it was delivered.
    pub output: Option<Value>,
    /// Why it ended badly: code and sentence of the last entry's notice, or of the failed checks.
    pub failure: Option<(Code, String)>,
    /// The end of what the work wrote to stderr before it failed at this worker: the program's words.
    pub complaint: Option<String>,
    /// What was used, by the newest receipt.
    pub usage: Option<Value>,
    /// Entries in the log.
    pub entries: u64,
    /// Digest of the last one.
    pub head: Digest,
    /// What this side waits for: the gate of a question, or the peer.
    pub waiting_on: Option<String>,
}

impl Standing {
    /// How `task` stands at `owner`.
    ///
    /// # Errors
    /// `UNKNOWN_TASK`.
    pub fn of(owner: &Owner, task: &Digest) -> Result<Self> {
        let log = owner.task(task);
        let log = log.ok_or_else(|| Error::new(Code::UnknownTask, "no such task here"))?;
        let view = log.view();
        let gate = owner.questions().find(|question| question.task == *task);
        let waiting_on = match gate {
            Some(question) => Some(question.gate().as_str().to_owned()),
            None if !log.is_idle() && !log.is_over() => Some("peer".to_owned()),
            None => None,
        };
        let order = order_of(log);
        let usage = view.usage().map(|kept| serde_json::to_value(&kept.object.usage));
        Ok(Self {
            task: *task,
            task_id: view.task_id().clone(),
            me: log.me(),
            peer: log.peer(),
            title: order.get("title").and_then(Value::as_str).unwrap_or_default().to_owned(),
            state: view.state(),
            taken_back: log.is_taken_back(),
            over: log.is_over(),
            confirmed: view.is_sealed() && log.is_confirmed(),
            last: log.entries().last().map(|committed| committed.entry.event),
            order,
            progress: view.last_progress().cloned(),
            output: view.deliverable().map(|kept| kept.object.output.clone()),
            failure: failure(log),
            complaint: owner.complaint(task).map(str::to_owned),
            usage: usage.transpose().unwrap_or_default(),
            entries: view.next_seq(),
            head: view.head(),
            waiting_on,
        })
    }

    /// The word for where it is.
    #[must_use]
    pub fn status(&self) -> &'static str {
        match self.state {
            Some(state) => state.as_str(),
            None if self.taken_back => "WITHDRAWING",
            None => "PROPOSING",
        }
    }
}

/// What was ordered, as far as the log holds it: an offer that was not answered yet is there as well.
fn order_of(log: &TaskLog) -> Value {
    let contract = log.entries().first().and_then(|entry| log.object(entry.payload.first()?));
    let manifest = contract.and_then(|contract| contract.get("manifest"));
    let Some(manifest) = manifest.and_then(Value::as_object) else { return Value::Null };
    let shown = [
        "title",
        "description",
        "deadlineAt",
        "inputSchema",
        "outputSchema",
        "budget",
        "sandboxPolicy",
        "verification",
        "maxRevisions",
        "redelegation",
        "parentTaskId",
    ];
    let members = shown
        .iter()
        .filter_map(|name| manifest.get(*name).map(|value| ((*name).to_owned(), value.clone())));
    let input = log.input().map(|input| ("input".to_owned(), input.clone()));
    Value::Object(members.chain(input).collect())
}

/// Why a task ended badly, by the objects of its log.
fn failure(log: &TaskLog) -> Option<(Code, String)> {
    let view = log.view();
    if log.is_forked() && !view.is_sealed() {
        let text = "the peer signed two entries at one place; the task was stopped, and the log holds the proof";
        return Some((Code::AuditFork, text.into()));
    }
    match view.state()? {
        State::Rejected | State::Failed => {
            let notice = log.object(log.entries().last()?.payload.first()?)?;
            let code = Code::parse(notice.get("code")?.as_str()?)?;
            Some((code, notice.get("message")?.as_str()?.to_owned()))
        }
        State::Disputed => {
            let failed = view.report()?.object.checks.iter().find(|check| !check.passed);
            Some(match failed {
                Some(check) => {
                    let text = format!("check {}: {}", &*check.name, &*check.detail);
                    (check.code.unwrap_or(Code::CheckFailed), text)
                }
                None => (Code::ApprovalDenied, "the requester's owner did not take it".into()),
            })
        }
        State::Expired => Some((Code::DeadlinePassed, "it was not done in time".into())),
        State::Cancelled | State::Withdrawn => Some((Code::Cancelled, "it was cancelled".into())),
        State::Superseded => Some((Code::Cancelled, "another worker's result was taken".into())),
        _ => None,
    }
}

/// The audit of a task as it is now, by the same rules as `acp audit-verify`.
///
/// # Errors
/// `UNKNOWN_TASK`.
pub fn audit(owner: &Owner, task: &Digest) -> Result<Report> {
    let log = owner.task(task);
    let log = log.ok_or_else(|| Error::new(Code::UnknownTask, "no such task here"))?;
    Ok(verify(&AuditLog::of(log), None, unix_now()))
}

/// Whoever watches a delegation: told what happens, asked what the gates ask.
pub trait Watcher: Send + Sync {
    /// The task has a new entry, or new progress.
    fn moved(&self, standing: &Standing);
    /// The owner is asked. The answer goes to [`Office::act`] with [`Owner::answer`], by whichever
    /// way the owner has; here a question is only shown.
    fn asked(&self, question: &Question);
    /// Nobody has answered the proposal for a while: told once.
    fn quiet(&self, _: &Standing) {}
}

/// How long a worker that is there takes to answer, as far as anybody can tell.
const QUIET: Duration = Duration::from_secs(10);

/// Orders one task and waits until it is over, cancelled by `cancel`, or until its proposal cannot be
/// handed over.
///
/// # Errors
/// Why the order was not possible, or `RELAY_UNREACHABLE`.
pub async fn delegate(
    office: &Office,
    order: Order,
    watcher: &dyn Watcher,
    cancel: &CancellationToken,
) -> Result<Standing> {
    let mut told = office.watch();
    let worker = order.worker;
    let task = match order.parent {
        None => {
            let ordered = office.act(move |owner, now, entropy| {
                owner.order(order, now, entropy).map(|(task, _, out)| (task, out))
            });
            ordered.await?
        }
        Some(parent) => hand_on(office, parent, order, watcher, cancel).await?,
    };
    let mut wish = Cancelling::new(cancel);
    let tasks = [task];
    let mut unreachable = None;
    let mut shown = None;
    let mut quiet_at = Some(tokio::time::Instant::now() + QUIET);
    loop {
        let standing = office.look(move |owner| Standing::of(owner, &task)).await?;
        if shown != Some(standing.entries) {
            shown = Some(standing.entries);
            watcher.moved(&standing);
        }
        if standing.over {
            office.flushed().await;
            return Ok(standing);
        }
        if standing.state.is_none() && quiet_at.is_some_and(|at| at <= tokio::time::Instant::now())
        {
            quiet_at = None;
            watcher.quiet(&standing);
        }
        if standing.state.is_none()
            && let Some(error) = unreachable.take()
        {
            // Most likely nobody has seen the offer; it must not come up later by itself, and whoever
            // has seen it is told.
            let withdrawn = office.act(move |owner, now, entropy| {
                owner.cancel(&task, "", now, entropy).map(|out| ((), out))
            });
            withdrawn.await?;
            return Err(error);
        }
        tokio::select! {
            event = told.recv() => match event {
                Ok(Told::Question(question)) if question.task == task => watcher.asked(&question),
                Ok(Told::Undelivered { to, error, in_doubt }) if to == worker => {
                    unreachable = Some(if in_doubt { doubtful(&error) } else { error });
                }
                Ok(_) | Err(RecvError::Lagged(_)) => {}
                Err(RecvError::Closed) => return Err(ended()),
            },
            () = tokio::time::sleep(LOOK_AGAIN) => {}
            over = wish.due(office, &tasks) => if over {
                return office.look(move |owner| Standing::of(owner, &task)).await;
            },
        }
    }
}

/// Hands a part of `parent` on, and waits until this side's owner has agreed.
async fn hand_on(
    office: &Office,
    parent: Digest,
    order: Order,
    watcher: &dyn Watcher,
    cancel: &CancellationToken,
) -> Result<Digest> {
    let mut told = office.watch();
    let child = office.act(move |owner, now, entropy| owner.hand_on(order, now, entropy)).await?;
    loop {
        if let Some(task) = office.look(move |owner| owner.handed_on(&parent, &child)).await? {
            return Ok(task);
        }
        tokio::select! {
            event = told.recv() => match event {
                Ok(Told::Question(question)) if question.asks_about_child(&child) => {
                    watcher.asked(&question);
                }
                Ok(_) | Err(RecvError::Lagged(_)) => {}
                Err(RecvError::Closed) => return Err(ended()),
            },
            () = tokio::time::sleep(LOOK_AGAIN) => {}
            () = cancel.cancelled() => {
                return Err(Error::new(Code::Cancelled, "cancelled before it was handed on"));
            }
        }
    }
}

/// An offer that was not handed over, as far as can be told.
fn doubtful(error: &Error) -> Error {
    let text = format!(
        "{}; it is not known whether the worker saw the offer, which was taken back",
        error.message()
    );
    Error::new(Code::RelayUnreachable, text)
}

fn ended() -> Error {
    Error::new(Code::RelayUnreachable, "this side of the task has ended").with_todo(
        "start it again: a task that was proposed goes on, and `commsd acp tasks` lists it",
    )
}

/// A wish to cancel, from outside: first the tasks are cancelled, then, after a while, left alone.
struct Cancelling<'a> {
    wish: &'a CancellationToken,
    given_up_at: Option<tokio::time::Instant>,
}

impl<'a> Cancelling<'a> {
    const fn new(wish: &'a CancellationToken) -> Self {
        Self { wish, given_up_at: None }
    }

    /// Resolves when the wish comes (the tasks are then cancelled), and again when they have had
    /// their time: `true` then.
    async fn due(&mut self, office: &Office, tasks: &[Digest]) -> bool {
        if let Some(at) = self.given_up_at {
            tokio::time::sleep_until(at).await;
            return true;
        }
        self.wish.cancelled().await;
        let mut wait = Duration::ZERO;
        for &task in tasks {
            let asked = office.act(move |owner, now, entropy| {
                let answered = owner.task(&task).is_some_and(|log| log.view().state().is_some());
                owner
                    .cancel(&task, "cancelled by its owner", now, entropy)
                    .map(|out| (answered, out))
            });
            match asked.await {
                // Whoever has not answered the offer will not answer that it is taken back.
                Ok(answered) => wait = wait.max(if answered { CANCEL_TIME } else { UNANSWERED }),
                // One that is past the point goes on to its end.
                Err(error) => super::complain(&error.into()),
            }
        }
        self.given_up_at = Some(tokio::time::Instant::now() + wait);
        false
    }
}

/// What came of work that several were given.
#[derive(Clone, Debug)]
pub struct GroupResult {
    /// How it ended; `None` when it was cancelled before that.
    pub outcome: Option<GroupOutcome>,
    /// All tasks.
    pub tasks: Vec<Standing>,
}

impl GroupResult {
    /// The result that was agreed on, or won.
    #[must_use]
    pub fn output(&self) -> Option<&Value> {
        let settled = self.tasks.iter().find(|task| task.state == Some(State::Settled))?;
        settled.output.as_ref()
    }

    /// The failure: its code, a sentence, and for a quorum the votes.
    #[must_use]
    pub fn failure(&self) -> Option<(Code, String, Value)> {
        let outcome = self.outcome.as_ref()?;
        let code = outcome.code()?;
        let detail = match outcome {
            GroupOutcome::NoQuorum { size, votes } => {
                let votes = votes.iter().map(
                    |(output, workers)| json!({ "outputDigest": output, "workerDids": workers }),
                );
                json!({ "quorumSize": size, "votes": votes.collect::<Vec<_>>() })
            }
            _ => Value::Null,
        };
        let text = match code {
            Code::QuorumNotReached => "the workers do not agree",
            _ => "no worker's result passed",
        };
        Some((code, text.to_owned(), detail))
    }
}

/// Checks who is to be given the same work, and how many must agree; one vote each.
///
/// # Errors
/// `BAD_FIELD`, `DUPLICATE_WORKER`.
pub fn check_group(workers: &[Did], quorum: Option<usize>) -> Result<()> {
    if !(2..=MAX_WORKERS).contains(&workers.len()) {
        return Err(Error::new(Code::BadField, "2 to 16 workers"));
    }
    let different: BTreeSet<&Did> = workers.iter().collect();
    if different.len() < workers.len() {
        return Err(Error::new(Code::DuplicateWorker, "one did, one vote"));
    }
    if quorum.is_some_and(|size| !(1..=workers.len()).contains(&size)) {
        return Err(Error::new(Code::BadField, "a quorum is 1 to the number of workers"));
    }
    Ok(())
}

/// The quorum for so many workers when none is asked for.
#[must_use]
pub const fn default_quorum(workers: usize) -> usize {
    Multi::default_quorum(workers)
}

/// Gives the same work to several, and waits until the group is decided and its tasks are over.
///
/// # Errors
/// As [`check_group`], and why an order was not possible.
pub async fn delegate_group(
    office: &Office,
    orders: Vec<Order>,
    quorum: Option<usize>,
    watcher: &dyn Watcher,
    cancel: &CancellationToken,
) -> Result<GroupResult> {
    let workers: Vec<Did> = orders.iter().map(|order| order.worker).collect();
    check_group(&workers, quorum)?;
    let mut told = office.watch();
    let (tasks, group) = office
        .act(move |owner, now, entropy| {
            let mut all = Outcome::default();
            let mut tasks = Vec::new();
            let id = TaskId::draw(entropy).to_string().replacen("task_", "multi_", 1);
            let group = Group { id, workers: orders.len(), quorum };
            for mut order in orders {
                order.group = Some(group.clone());
                let label = crate::acp::value::Prose::lossy(&group.id);
                order.labels.0.insert("multiId".into(), label);
                let (task, _, out) = owner.order(order, now, entropy)?;
                all.append(out);
                tasks.push(task);
            }
            Ok(((tasks, group), all))
        })
        .await?;
    let mut wish = Cancelling::new(cancel);
    let mut decided_at = None;
    loop {
        let (tasks_now, group_now) = (tasks.clone(), group.clone());
        let (standings, outcome) = office
            .look(move |owner| {
                let standings: Result<Vec<_>> =
                    tasks_now.iter().map(|task| Standing::of(owner, task)).collect();
                Ok((standings?, owner.group_outcome(&group_now)))
            })
            .await?;
        let over = standings.iter().all(|standing| standing.over);
        if outcome.is_some() && decided_at.is_none() {
            decided_at = Some(tokio::time::Instant::now());
        }
        let late = decided_at.is_some_and(|at| at.elapsed() > GROUP_END);
        if over || late {
            office.flushed().await;
            return Ok(GroupResult { outcome, tasks: standings });
        }
        tokio::select! {
            event = told.recv() => match event {
                Ok(Told::Question(question)) if tasks.contains(&question.task) => {
                    watcher.asked(&question);
                }
                Ok(Told::Note(note)) if tasks.contains(&note.task) => {
                    let moved = matches!(note.what, Noted::Entry { .. });
                    let standing = standings.iter().find(|standing| standing.task == note.task);
                    if let Some(standing) = standing.filter(|_| moved) {
                        watcher.moved(standing);
                    }
                }
                Ok(_) | Err(RecvError::Lagged(_)) => {}
                Err(RecvError::Closed) => return Err(ended()),
            },
            () = tokio::time::sleep(LOOK_AGAIN) => {}
            given_up = wish.due(office, &tasks) => if given_up {
                return Ok(GroupResult { outcome, tasks: standings });
            },
        }
    }
}
