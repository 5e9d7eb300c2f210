//! What callers ask of an office ([`AcpCall`]): the local API, the office's own socket and the MCP
//! tools all come here, and get the same answers.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::delegation::{self, GroupResult, Standing, Watcher};
use super::office::Office;
use super::orders::{self, no_relay};
use super::transports::Transports;
use super::worker::{self, Introduction};
use crate::acp::audit::{AuditLog, from_bundle, read_anchor, to_bundle, verify};
use crate::acp::code::{Code, Error, Result};
use crate::acp::did::Did;
use crate::acp::json::canonical;
use crate::acp::multi::MAX_WORKERS;
use crate::acp::objects::{
    AuditBundle, Decision, Event, Gate, Party, RevocationTarget, State, Target,
};
use crate::acp::owner::{Given, Order, Owner, Question};
use crate::acp::value::{Digest, InviteId, Name, Prose, Read as _, TaskId, UrlText, Word};
use crate::api::acp::{
    AcpCall, AcpNews, Answer, Combine, CreateInvite, DEFAULT_WAIT_MS, DelegateMulti, DelegateTask,
    DiscoverWorkers, ExportAudit, InviteStatus, ListTasks, MAX_WAIT_MS, Revocable, RevokeToken,
    Side, TaskStatus, VerifyAuditBundle, Work,
};
use crate::api::types::ApiError;
use crate::codec::text::escape_untrusted;
use crate::runtime::acp_transport::{CardFilter, TransportError};
use crate::runtime::clock::unix_now;

/// Tasks in one list unless the caller asks for fewer or more, and at most.
const LIST: usize = 50;
const MAX_LIST: usize = 500;

/// How long an invite is good unless the caller says otherwise, ms.
const INVITE_LIFE_MS: u64 = 24 * 3_600_000;

/// Cards in one answer.
const MAX_CARDS: usize = 200;

/// Bytes of a list in one answer: it travels in one line of the local API.
const MAX_LIST_BYTES: usize = 512 * 1024;

/// An office with its ways to others: what calls are served by.
#[derive(Clone)]
pub struct Service {
    /// The office.
    pub office: Office,
    /// Its ways.
    pub transports: Transports,
    /// The name in its invites.
    pub name: Name,
}

impl Service {
    /// Does what `call` asks. `watcher` is told of a delegation's course while it is waited for.
    ///
    /// # Errors
    /// The code and sentence for the caller; never a payload or a key.
    pub async fn serve(&self, call: AcpCall, watcher: &dyn Watcher) -> Result<Value> {
        match call {
            AcpCall::Whoami => Ok(json!({
                "did": self.office.did(),
                "relays": self.transports.relays(),
            })),
            AcpCall::DelegateTask(call) => self.delegate(call, watcher).await,
            AcpCall::DelegateMulti(call) => self.delegate_multi(call, watcher).await,
            // Work for a core, for as long as a log is long: not for the threads that others wait for.
            AcpCall::VerifyAuditBundle(call) => {
                let verified = tokio::task::spawn_blocking(move || verify_bundle(call)).await;
                verified.map_err(|_| Error::new(Code::AuditInvalid, "it could not be verified"))?
            }
            AcpCall::CreateInvite(call) => self.create_invite(call).await,
            AcpCall::InviteStatus(call) => self.invite_status(call).await,
            AcpCall::RevokeToken(call) => self.revoke(call).await,
            AcpCall::TaskStatus(call) => self.status(call).await,
            AcpCall::ListTasks(call) => self.list(call).await,
            AcpCall::CancelTask(call) => {
                let id = TaskId::parse(&call.task_id)?;
                let reason = Prose::parse(&call.reason)?;
                let task = self
                    .office
                    .act(move |owner, now, entropy| {
                        let task = owner.find(&id)?;
                        owner.cancel(&task, &reason, now, entropy).map(|out| (task, out))
                    })
                    .await?;
                self.office.look(move |owner| Ok(shown(&Standing::of(owner, &task)?))).await
            }
            AcpCall::DiscoverWorkers(call) => self.discover(call).await,
            AcpCall::ListApprovals => {
                let all = |owner: &Owner| {
                    let all: Vec<Value> = owner.questions().map(question).collect();
                    Ok(json!({ "approvals": all }))
                };
                self.office.look(all).await
            }
            AcpCall::Answer(call) => self.answer(call).await,
            AcpCall::ExportAudit(call) => self.export(call).await,
        }
    }

    fn relays(&self, work: &Work) -> Vec<String> {
        work.relay.clone().map_or_else(|| self.transports.relays(), |relay| vec![relay])
    }

    /// The order of `work` from whom `to` names.
    async fn order(&self, to: &str, work: &Work) -> Result<Order> {
        let parent = {
            let work = work.clone();
            self.office.look(move |owner| orders::parent(owner, &work)).await?
        };
        // Those of a part are the requester's of the whole.
        for tool in orders::tools(work)?.iter().filter(|_| parent.is_none()) {
            self.office.offers(tool).map_err(|error| error.inside("tools"))?;
        }
        let worker = match self.transports.mesh().filter(|_| orders::names_peer(to)) {
            Some(mesh) => mesh.worker(to.trim()).await.map_err(|error| error.inside("to"))?,
            None => {
                let (to, relays) = (to.to_owned(), self.relays(work));
                let read = move |owner: &Owner| orders::worker(owner, &to, &relays, unix_now());
                self.office.look(read).await?
            }
        };
        orders::order(work, worker, parent.as_ref(), unix_now())
    }

    async fn delegate(&self, call: DelegateTask, watcher: &dyn Watcher) -> Result<Value> {
        let wait = wait(call.work.wait_ms.unwrap_or(DEFAULT_WAIT_MS));
        let order = self.order(&call.to, &call.work).await?;
        let never = CancellationToken::new();
        let begun = BegunBy::new(watcher);
        let done = delegation::delegate(&self.office, order, &begun, &never);
        tokio::pin!(done);
        let late = async {
            tokio::time::sleep(wait).await;
            // One that is not stored yet would be known to nobody.
            begun.standing().await
        };
        let standing = tokio::select! {
            standing = &mut done => standing?,
            // It goes on; `task_status` tells.
            standing = late => standing,
        };
        delegated(&self.office, &standing).await
    }

    async fn delegate_multi(&self, call: DelegateMulti, watcher: &dyn Watcher) -> Result<Value> {
        let wait = wait(call.work.wait_ms.unwrap_or(DEFAULT_WAIT_MS));
        let size = call.quorum_size.map(|size| usize::try_from(size).unwrap_or(usize::MAX));
        let quorum = match call.mode {
            Combine::Race => None,
            Combine::Quorum => {
                Some(size.unwrap_or_else(|| delegation::default_quorum(call.workers.len())))
            }
        };
        let mode = call.mode;
        if !(2..=MAX_WORKERS).contains(&call.workers.len()) {
            let text = "the same work is given to 2 to 16 workers";
            return Err(Error::new(Code::BadField, text).inside("workers"));
        }
        if call.work.parent_task_id.is_some() {
            let text = "a part of a task is handed on to one worker";
            return Err(Error::new(Code::BadField, text).inside("parentTaskId"));
        }
        let mut orders = Vec::with_capacity(call.workers.len());
        for to in &call.workers {
            orders.push(self.order(to, &call.work).await?);
        }
        let late = CancellationToken::new();
        let done = delegation::delegate_group(&self.office, orders, quorum, watcher, &late);
        tokio::pin!(done);
        let result = tokio::select! {
            result = &mut done => result?,
            () = tokio::time::sleep(wait) => {
                // Nobody can be told later which tasks these were: they are cancelled.
                late.cancel();
                done.await?
            }
        };
        Ok(group(&result, mode))
    }

    async fn create_invite(&self, call: CreateInvite) -> Result<Value> {
        let name = call.name.as_deref().map_or(Ok(self.name.clone()), Name::parse)?;
        let relays =
            if call.relay_urls.is_empty() { self.transports.relays() } else { call.relay_urls };
        if relays.is_empty() {
            let text =
                "an invite names the relay by which its worker is reached, and there is none";
            return Err(no_relay(text).inside("relayUrls"));
        }
        let introduction = Introduction {
            name,
            description: Prose::default(),
            skills: Vec::new(),
            relay_urls: relays
                .iter()
                .map(|url| UrlText::parse(url))
                .collect::<Result<_>>()
                .map_err(|error| error.inside("relayUrls"))?,
            max_uses: call.max_uses.unwrap_or(1),
            life_ms: call.expires_in_ms.unwrap_or(INVITE_LIFE_MS),
        };
        let (invite, text) = worker::invite(&self.office, &introduction).await?;
        Ok(json!({
            "invite": text, "inviteId": invite.invite_id, "expiresAt": invite.expires_at,
        }))
    }

    async fn invite_status(&self, call: InviteStatus) -> Result<Value> {
        let id = InviteId::parse(&call.invite_id)?;
        let look = move |owner: &Owner| {
            let book = &owner.gateway().invites;
            let uses = book.uses(&id);
            let fault = book.may_use(&id, &owner.gateway().revocations, unix_now()).err();
            let fault = fault.filter(|_| uses.is_some());
            Ok(json!({
                "issued": uses.is_some(),
                "uses": uses,
                "code": fault.as_ref().map(Error::code),
                "message": fault.as_ref().map(Error::message),
            }))
        };
        self.office.look(look).await
    }

    async fn revoke(&self, call: RevokeToken) -> Result<Value> {
        let kind = match call.target_type {
            Revocable::Invite => RevocationTarget::Invite,
            Revocable::Capability => RevocationTarget::Capability,
            Revocable::Card => RevocationTarget::Card,
        };
        let notice = self
            .office
            .act(move |owner, now, entropy| {
                // A slip must not look like success.
                if kind == RevocationTarget::Invite
                    && !owner.gateway().invites.knows(&InviteId::parse(&call.target_id)?)
                {
                    let text = "this owner has issued no such invite";
                    let todo = "`commsd acp invite show TEXT` tells an invite's id and whose it is";
                    return Err(Error::new(Code::BadId, text).with_todo(todo));
                }
                owner.revoke(kind, &call.target_id, &call.reason, now, entropy)
            })
            .await?;
        Ok(json!({ "notice": notice, "published": self.transports.relays() }))
    }

    async fn status(&self, call: TaskStatus) -> Result<Value> {
        let id = TaskId::parse(&call.task_id)?;
        let mut told = self.office.watch();
        let task = self.office.look(move |owner| owner.find(&id)).await?;
        let until = tokio::time::Instant::now() + wait(call.wait_ms.unwrap_or(0));
        loop {
            let standing = self.office.look(move |owner| Standing::of(owner, &task)).await?;
            let late = tokio::time::Instant::now() >= until;
            if standing.over || late {
                return Ok(detailed(&standing));
            }
            tokio::select! {
                _ = told.recv() => {}
                () = tokio::time::sleep_until(until) => {}
            }
        }
    }

    async fn list(&self, call: ListTasks) -> Result<Value> {
        let state = call.state.as_deref().map(|text| {
            let todo = "give one of a task's states, as PROPOSED or SETTLED (docs/acp.md)";
            State::parse(text)
                .ok_or_else(|| Error::new(Code::BadField, "no such state").with_todo(todo))
        });
        let state = state.transpose()?;
        let peer = call.peer.as_deref().map(Did::parse).transpose()?;
        let limit = call.limit.map_or(LIST, |limit| usize::try_from(limit).unwrap_or(MAX_LIST));
        let role = call.role.map(|side| match side {
            Side::Requester => Party::Requester,
            Side::Worker => Party::Worker,
        });
        self.office
            .look(move |owner| {
                let mut tasks: Vec<(u64, Digest)> = owner
                    .gateway()
                    .tasks()
                    .filter(|(_, log)| role.is_none_or(|role| log.me() == role))
                    .filter(|(_, log)| state.is_none() || log.view().state() == state)
                    .filter(|(_, log)| peer.is_none_or(|peer| log.peer() == peer))
                    .map(|(task, log)| (log.view().last_at().millis().0, *task))
                    .collect();
                tasks.sort_by_key(|(at, _)| std::cmp::Reverse(*at));
                let newest = tasks.iter().take(limit.min(MAX_LIST));
                let list = newest.map(|(_, task)| Ok(shown(&Standing::of(owner, task)?)));
                Ok(json!({ "tasks": within_a_line(list.collect::<Result<_>>()?) }))
            })
            .await
    }

    async fn discover(&self, call: DiscoverWorkers) -> Result<Value> {
        let relay = call.relay.or_else(|| self.transports.relays().into_iter().next());
        let relay = relay.ok_or_else(|| no_relay("no relay is named that could be asked"))?;
        let filter = CardFilter {
            adapter: call.adapter.as_deref().map(Word::parse).transpose()?,
            skill: call.skill.as_deref().map(Word::parse).transpose()?,
        };
        let failed = |error: TransportError| {
            Error::new(error.code(), format!("{relay}: {}", error.message()))
        };
        let client = self.transports.client(&relay).map_err(failed)?;
        let mut cards = Vec::new();
        let mut after: Option<String> = None;
        loop {
            let page = client.cards(&filter, after.as_deref()).await.map_err(failed)?;
            cards.extend(page.cards);
            if cards.len() >= MAX_CARDS || page.next.is_none() {
                let more = cards.len() > MAX_CARDS || page.next.is_some();
                cards.truncate(MAX_CARDS);
                let all = cards.len();
                let cards = within_a_line(cards.iter().map(|card| json!(card)).collect());
                let more = more || cards.len() < all;
                return Ok(json!({ "relay": relay, "cards": cards, "more": more }));
            }
            after = page.next;
        }
    }

    async fn answer(&self, call: Answer) -> Result<Value> {
        let decision = if call.approve { Decision::Approved } else { Decision::Denied };
        let (id, reason) = (call.id.clone(), call.reason);
        self.office
            .act(move |owner, now, entropy| {
                let given = Given::Word(decision, reason);
                owner.answer(&id, given, now, entropy).map(|out| ((), out))
            })
            .await?;
        Ok(json!({ "id": call.id, "decision": decision }))
    }

    async fn export(&self, call: ExportAudit) -> Result<Value> {
        let id = TaskId::parse(&call.task_id)?;
        let bundle = self
            .office
            .look(move |owner| {
                let task = owner.find(&id)?;
                let log = owner.task(&task).map(AuditLog::of);
                let mut log = log.ok_or_else(|| Error::new(Code::UnknownTask, "no such task"))?;
                if call.redact {
                    log.redact();
                }
                to_bundle(&log, owner.key(), unix_now())
            })
            .await?;
        let Some(out) = call.out.map(PathBuf::from) else {
            let value = serde_json::to_value(bundle);
            return value.map_err(|_| Error::new(Code::BadField, "no JSON form"));
        };
        let bytes = canonical(&bundle)?;
        let written = tokio::task::spawn_blocking(move || {
            write_new(&out, &bytes)
                .map(|()| json!({ "path": out.to_string_lossy(), "bytes": bytes.len() }))
        });
        written.await.map_err(std::io::Error::from).flatten().map_err(|error| {
            let todo = "name an absolute path with nothing there, in a directory of yours";
            Error::new(Code::BadField, error.to_string()).with_todo(todo).inside("out")
        })
    }
}

/// A refusal as callers see it.
#[must_use]
pub fn refusal(error: &Error) -> ApiError {
    ApiError::new(error.code().as_str(), error.to_string(), error.todo())
}

/// A watcher that hands on what programs are told.
pub struct Teller<F>(pub F);

impl<F: Fn(AcpNews) + Send + Sync> Watcher for Teller<F> {
    fn moved(&self, standing: &Standing) {
        (self.0)(moved(standing));
    }

    fn asked(&self, question: &Question) {
        (self.0)(asked(question));
    }

    fn quiet(&self, standing: &Standing) {
        (self.0)(quiet(standing));
    }
}

/// What is told of a task's new entry, or progress.
#[must_use]
pub fn moved(standing: &Standing) -> AcpNews {
    // With other entries it would be an old one.
    let told = standing.progress.as_ref().filter(|_| standing.last == Some(Event::Progress));
    AcpNews::Moved {
        task_id: standing.task_id.to_string(),
        status: standing.status().to_owned(),
        percent: told.and_then(|told| told.percent).map(|percent| percent.get()),
        step: told.map(|told| told.step.to_string()).unwrap_or_default(),
        message: told.map(|told| told.message.to_string()).unwrap_or_default(),
    }
}

/// What is told of a proposal that nobody answers.
#[must_use]
pub fn quiet(standing: &Standing) -> AcpNews {
    AcpNews::Quiet { task_id: standing.task_id.to_string() }
}

/// What is told of a question.
#[must_use]
pub fn asked(question: &Question) -> AcpNews {
    AcpNews::Asked {
        id: question.id(),
        gate: question.gate().as_str().to_owned(),
        task_id: question.task_id.to_string(),
        question: sentence(question),
        about: question.about.clone(),
        expires_at: question.expires_at.iso(),
    }
}

/// What a question asks, in a line. Titles are another owner's words.
fn sentence(question: &Question) -> String {
    let title = escape_untrusted(&question.title);
    let peer = question.peer;
    match (&question.target, question.gate()) {
        (Target::BudgetOverrun { metric, from, to, .. }, _) => {
            format!("raise {metric} of \"{title}\" from {from} to {to}? ({peer})")
        }
        (Target::ExternalSend { resource, action, .. }, _) => {
            format!("let {peer} use {action} on {resource} for \"{title}\"?")
        }
        (Target::Redelegation { .. }, _) => {
            format!("hand a part of \"{title}\" of {peer} on?")
        }
        (_, Gate::ContractAcceptance) => format!("accept the task \"{title}\" of {peer}?"),
        (_, Gate::FinalAcceptance) => {
            format!("take the result of \"{title}\", which has passed its checks? ({peer})")
        }
        (_, gate) => format!("{} for \"{title}\"? ({peer})", gate.as_str()),
    }
}

/// Makes a file that is its owner's alone.
fn write_new(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    if !path.is_absolute() {
        return Err(std::io::Error::other("not an absolute path"));
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

fn wait(ms: u64) -> Duration {
    Duration::from_millis(ms.min(MAX_WAIT_MS))
}

/// Remembers how far a delegation is, for a caller who stops waiting.
struct BegunBy<'a> {
    watcher: &'a dyn Watcher,
    standing: watch::Sender<Option<Standing>>,
}

impl<'a> BegunBy<'a> {
    fn new(watcher: &'a dyn Watcher) -> Self {
        Self { watcher, standing: watch::Sender::new(None) }
    }

    /// How far it is, once it has begun.
    async fn standing(&self) -> Standing {
        let mut told = self.standing.subscribe();
        let begun = told.wait_for(Option::is_some).await.ok().and_then(|begun| begun.clone());
        match begun {
            Some(standing) => standing,
            // Its sender lives as long as this.
            None => std::future::pending().await,
        }
    }
}

impl Watcher for BegunBy<'_> {
    fn moved(&self, standing: &Standing) {
        self.standing.send_replace(Some(standing.clone()));
        self.watcher.moved(standing);
    }

    fn asked(&self, question: &Question) {
        self.watcher.asked(question);
    }

    fn quiet(&self, standing: &Standing) {
        self.watcher.quiet(standing);
    }
}

/// What came of a delegation: how it stands, its result, its audit.
///
/// # Errors
/// `UNKNOWN_TASK`.
pub async fn delegated(office: &Office, standing: &Standing) -> Result<Value> {
    let task = standing.task;
    let audit = office.look(move |owner| delegation::audit(owner, &task)).await?;
    let mut answer = shown(standing);
    if let Some(members) = answer.as_object_mut() {
        members.insert("deliverable".into(), json!(standing.output));
        let audit = json!({ "status": audit.status, "head": audit.head, "entries": audit.entries });
        members.insert("audit".into(), audit);
    }
    Ok(answer)
}

/// As many of a list, from its beginning, as fit into one answer.
fn within_a_line(list: Vec<Value>) -> Vec<Value> {
    let mut bytes = 0;
    let fits = |value: &Value| {
        bytes += value.to_string().len();
        bytes <= MAX_LIST_BYTES
    };
    list.into_iter().take_while(fits).collect()
}

/// A task in a list.
fn shown(standing: &Standing) -> Value {
    let failure = standing.failure.as_ref();
    json!({
        "taskId": standing.task_id,
        "status": standing.status(),
        "role": standing.me.role().as_str(),
        "peer": standing.peer,
        "title": standing.title,
        "entries": standing.entries,
        "head": standing.head,
        "waitingOn": standing.waiting_on,
        "failure": failure.map(|(code, message)| json!({ "code": code, "message": message })),
    })
}

/// A task by itself.
#[must_use]
pub fn detailed(standing: &Standing) -> Value {
    let mut task = receipt(standing);
    if let Some(members) = task.as_object_mut() {
        members.insert("deliverable".into(), json!(standing.output));
        members.insert("order".into(), standing.order.clone());
        members.insert("stderr".into(), json!(standing.complaint));
    }
    task
}

/// A task by itself, without its result.
fn receipt(standing: &Standing) -> Value {
    let mut task = shown(standing);
    if let Some(members) = task.as_object_mut() {
        members.insert("usage".into(), json!(standing.usage));
        members.insert("lastProgress".into(), json!(standing.progress));
        members.insert("confirmed".into(), json!(standing.confirmed));
    }
    task
}

fn question(question: &Question) -> Value {
    json!({
        "id": question.id(),
        "gate": question.gate().as_str(),
        "taskId": question.task_id,
        "peer": question.peer,
        "title": question.title,
        "about": question.about,
        "target": question.target,
        "targetDigest": question.digest,
        "askedAt": question.asked_at.iso(),
        "expiresAt": question.expires_at.iso(),
    })
}

/// What came of work that several were given. The results of those that were not taken stay with
/// their tasks: sixteen of them are more than an answer takes.
#[must_use]
pub fn group(result: &GroupResult, mode: Combine) -> Value {
    use crate::acp::multi::Outcome;
    let (winner, digest) = match &result.outcome {
        Some(Outcome::Winner(task)) => (json!(task), Value::Null),
        Some(Outcome::Agreed { output, .. }) => (Value::Null, json!(output)),
        _ => (Value::Null, Value::Null),
    };
    let failure = result.failure();
    let status = match (&failure, result.output()) {
        (Some((code, ..)), _) => code.as_str(),
        (None, Some(_)) => State::Settled.as_str(),
        // Decided, and the owner was not asked or has not answered yet; or cancelled.
        (None, None) if result.outcome.is_some() => State::Verified.as_str(),
        (None, None) => State::Cancelled.as_str(),
    };
    json!({
        "mode": mode,
        "status": status,
        "winner": winner,
        "agreedDigest": digest,
        "deliverable": result.output(),
        "failure": failure.map(|(code, message, detail)| {
            json!({ "code": code, "message": message, "detail": detail })
        }),
        "receipts": result.tasks.iter().map(receipt).collect::<Vec<_>>(),
    })
}

fn verify_bundle(call: VerifyAuditBundle) -> Result<Value> {
    let log = from_bundle(AuditBundle::read(call.bundle)?)?;
    let anchor = call.anchor.map(|anchor| read_anchor(&canonical(&anchor)?)).transpose()?;
    let report = verify(&log, anchor.as_ref(), unix_now());
    serde_json::to_value(report).map_err(|_| Error::new(Code::BadField, "no JSON form"))
}
