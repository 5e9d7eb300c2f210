//! What is asked of an office that runs: tasks, answers, invites, revocations. With `--key` of the
//! office of that key, or, when none runs, of one that is opened for the moment; without it of the
//! daemon's.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::ExitCode;

use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::draft;
use super::terminal::{quoted, say};
use super::{Place, Surroundings, protocol};
use crate::acp::code::Code;
use crate::acp::endpoint::EndpointPolicy;
use crate::acp::objects::RevocationTarget;
use crate::acp::value::{Name, TaskId};
use crate::api::acp::{
    AcpCall, Answer, CancelTask, ExportAudit, ListTasks, Revocable, RevokeToken, TaskStatus,
};
use crate::api::types::ApiError;
use crate::cli::acp::Failure;
use crate::cli::acp::args::{
    AnswerArgs, ApprovalsCommand, CancelArgs, RevokeArgs, Side, TaskArgs, TasksArgs,
};
use crate::cli::{exit, output};
use crate::codec::text::escape_untrusted;
use crate::daemon::acp::service::{Service, Teller};
use crate::daemon::acp::{OfficeError, owner_dir, read_key, socket};

/// Bytes of an id as `delegate` makes it: `task_` and 128 bits as base32.
const DRAWN_ID: usize = 5 + 26;

/// Tasks among which the beginning of an id is looked for: as many as one list has.
const LOOKED_AT: u64 = 500;

/// Whose office is asked, and by which relays it may talk when it is opened for this call.
pub(super) struct Whom<'a> {
    key: Option<&'a Path>,
    relays: &'a [String],
    endpoints: Option<EndpointPolicy>,
}

impl<'a> Whom<'a> {
    /// The office of a key, or the daemon's.
    pub(super) const fn of(key: Option<&'a Path>) -> Self {
        Self { key, relays: &[], endpoints: None }
    }
}

/// Asks an office, which is opened for the moment when it is that of a key and none runs.
pub(super) fn ask(
    whom: &Whom<'_>,
    call: AcpCall,
    place: &Place,
    around: &Surroundings,
) -> Result<Value, Failure> {
    let Some(key) = whom.key else {
        return around.ask(call, |_| {});
    };
    let dir = owner_dir(&place.state_dir, read_key(key)?.did());
    let mut options = place.office(key)?;
    options.relays = whom.relays.to_vec();
    if let Some(endpoints) = whom.endpoints {
        options.endpoints = endpoints;
    }
    place.block_on(async {
        if let Some(answer) = socket::ask(&dir, &call).await.map_err(protocol)? {
            return Ok(answer);
        }
        let stop = CancellationToken::new();
        let transports = options.transports()?;
        let (office, task) = options.open(transports.clone(), stop.clone()).await?;
        let name = Name::lossy("a commsd owner");
        let service = Service { office: office.clone(), transports, name };
        let sends = !call.only_reads();
        let answer = service.serve(call, &Teller(|_| {})).await;
        if sends {
            office.flushed().await;
        }
        stop.cancel();
        drop((office, service));
        task.await.map_err(OfficeError::from)??;
        answer.map_err(protocol)
    })
}

fn usage(text: impl Into<String>, todo: &str) -> Failure {
    Failure { error: ApiError::new("usage", text, todo), exit: exit::USAGE }
}

/// The whole id of a task that is named by the beginning of it. What begins none of the newest tasks
/// is left as it is, for the office to say that it knows no such task.
fn whole_id(
    id: &TaskId,
    whom: &Whom<'_>,
    place: &Place,
    around: &Surroundings,
) -> Result<String, Failure> {
    if id.as_str().len() >= DRAWN_ID {
        return Ok(id.as_str().to_owned());
    }
    let call = AcpCall::ListTasks(ListTasks { limit: Some(LOOKED_AT), ..ListTasks::default() });
    begun_by(id.as_str(), &ask(whom, call, place, around)?)
}

/// The id in a list of tasks that is `id`, or else the only one that begins with it.
fn begun_by(id: &str, tasks: &Value) -> Result<String, Failure> {
    let tasks = listed(tasks, "tasks");
    let ids = tasks.filter_map(|task| task.get("taskId")?.as_str());
    let begun: BTreeSet<&str> = ids.filter(|whole| whole.starts_with(id)).collect();
    match begun.first() {
        // The shortest comes first: it is `id` itself when that is there.
        Some(first) if begun.len() > 1 && *first != id => Err(usage(
            format!("{} tasks begin with {id}", begun.len()),
            "give more of the id; commsd acp tasks lists them",
        )),
        Some(first) => Ok((*first).to_owned()),
        None => Ok(id.to_owned()),
    }
}

pub(super) fn finish(
    place: &Place,
    answer: &Value,
    text: impl FnOnce(&Value) -> String,
) -> ExitCode {
    if place.json {
        output::print(&output::json_line(answer))
    } else {
        output::print(&text(answer))
    }
}

/// The entries of a list.
fn listed<'a>(answer: &'a Value, name: &str) -> impl Iterator<Item = &'a Value> {
    answer.get(name).and_then(Value::as_array).into_iter().flatten()
}

/// A task's state. One whose peer has signed two things at one place is stopped wherever it was.
fn state(task: &Value) -> String {
    let fork = Code::AuditFork.as_str();
    let forked = task.pointer("/failure/code").is_some_and(|code| code == fork);
    let state = word(task, "status");
    if forked { format!("{state} ({fork})") } else { state }
}

pub(super) fn word(value: &Value, name: &str) -> String {
    escape_untrusted(value.get(name).and_then(Value::as_str).unwrap_or_default())
}

pub(super) fn millis(time: std::time::Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

pub(super) fn revoke(
    args: &RevokeArgs,
    place: &Place,
    around: &Surroundings,
) -> Result<ExitCode, Failure> {
    let target_type = match args.target_type {
        RevocationTarget::Invite => Revocable::Invite,
        RevocationTarget::Capability => Revocable::Capability,
        RevocationTarget::Card => Revocable::Card,
    };
    let call = AcpCall::RevokeToken(RevokeToken {
        target_type,
        target_id: (*args.target_id).to_owned(),
        reason: (*args.reason).to_owned(),
    });
    let whom = Whom {
        key: args.key.as_deref(),
        relays: &args.relays,
        endpoints: Some(args.access.policy()),
    };
    let answer = ask(&whom, call, place, around)?;
    if answer.get("published").and_then(Value::as_array).is_none_or(Vec::is_empty) {
        say("note: no relay was told; who knows only relays does not hear of it (--relay URL)");
    }
    Ok(finish(place, &answer, |answer| {
        let notice = answer.get("notice").unwrap_or(&Value::Null);
        format!(
            "taken back: {} {} ({})\n",
            word(notice, "targetType"),
            word(notice, "targetId"),
            word(notice, "noticeId")
        )
    }))
}

pub(super) fn tasks(
    args: &TasksArgs,
    place: &Place,
    around: &Surroundings,
) -> Result<ExitCode, Failure> {
    let call = AcpCall::ListTasks(ListTasks {
        role: args.role.map(|side| match side {
            Side::Requester => crate::api::acp::Side::Requester,
            Side::Worker => crate::api::acp::Side::Worker,
        }),
        state: args.state.map(|state| state.as_str().to_owned()),
        peer: args.peer.map(|peer| peer.to_string()),
        limit: Some(args.limit.get()),
    });
    let answer = ask(&Whom::of(args.owner.key.as_deref()), call, place, around)?;
    Ok(finish(place, &answer, |answer| {
        let rows = listed(answer, "tasks").map(|task| {
            let waits = word(task, "waitingOn");
            [
                word(task, "taskId"),
                state(task),
                word(task, "role"),
                if waits.is_empty() { "-".to_owned() } else { waits },
                word(task, "title"),
            ]
        });
        let rows: Vec<_> = rows.collect();
        if rows.is_empty() {
            return "no tasks\n".to_owned();
        }
        output::table(["TASK", "STATE", "AS", "WAITS FOR", "TITLE"], &rows)
    }))
}

pub(super) fn task(
    args: &TaskArgs,
    place: &Place,
    around: &Surroundings,
) -> Result<ExitCode, Failure> {
    let whom = Whom::of(args.owner.key.as_deref());
    let task_id = whole_id(&args.id, &whom, place, around)?;
    if let Some(out) = &args.audit {
        let out = std::path::absolute(out).unwrap_or_else(|_| out.clone());
        let out = Some(out.to_string_lossy().into_owned());
        let call = AcpCall::ExportAudit(ExportAudit { task_id, redact: args.redact, out });
        let answer = ask(&whom, call, place, around)?;
        return Ok(finish(place, &answer, |answer| format!("{}\n", word(answer, "path"))));
    }
    let call = AcpCall::TaskStatus(TaskStatus { task_id, wait_ms: None });
    let answer = ask(&whom, call, place, around)?;
    if args.draft {
        let over = answer.get("deliverable").is_some_and(|result| !result.is_null());
        if !over {
            let text = format!("there is no result of {} yet", word(&answer, "taskId"));
            let error = ApiError::new("acp_no_result", text, "wait for it: commsd acp task ID");
            return Err(Failure { error, exit: exit::FAILED });
        }
        return Ok(finish(place, &json!({ "draft": draft::page(&answer) }), |answer| {
            // What is in it is escaped where it came from others.
            answer.get("draft").and_then(Value::as_str).unwrap_or_default().to_owned()
        }));
    }
    Ok(finish(place, &answer, task_text))
}

/// A task, for people.
fn task_text(task: &Value) -> String {
    let mut rows = vec![
        ("task", word(task, "taskId")),
        ("state", state(task)),
        ("as", word(task, "role")),
        ("with", word(task, "peer")),
        ("title", word(task, "title")),
        ("log", {
            let entries = task.get("entries").and_then(Value::as_u64).unwrap_or_default();
            format!("{entries} entries, head {}", word(task, "head"))
        }),
    ];
    let waits = word(task, "waitingOn");
    if !waits.is_empty() {
        rows.push(("waits for", waits));
    }
    if let Some(failure) = task.get("failure").filter(|value| !value.is_null()) {
        rows.push(("because", format!("{}: {}", word(failure, "code"), word(failure, "message"))));
    }
    if let Some(progress) = task.get("lastProgress").filter(|value| !value.is_null()) {
        rows.push((
            "progress",
            format!("{} {}", word(progress, "step"), word(progress, "message")),
        ));
    }
    if let Some(result) = task.get("deliverable").filter(|value| !value.is_null()) {
        rows.push(("result", output::printable(&result.to_string())));
    }
    let complaint = task.get("stderr").and_then(Value::as_str).map(quoted).unwrap_or_default();
    output::fields(&rows) + &complaint
}

pub(super) fn cancel(
    args: &CancelArgs,
    place: &Place,
    around: &Surroundings,
) -> Result<ExitCode, Failure> {
    let whom = Whom::of(args.owner.key.as_deref());
    let task_id = whole_id(&args.id, &whom, place, around)?;
    let call = AcpCall::CancelTask(CancelTask { task_id, reason: (*args.reason).to_owned() });
    let answer = ask(&whom, call, place, around)?;
    Ok(finish(place, &answer, |answer| {
        format!("{} {}\n", word(answer, "taskId"), word(answer, "status"))
    }))
}

pub(super) fn approvals(
    command: &ApprovalsCommand,
    place: &Place,
    around: &Surroundings,
) -> Result<ExitCode, Failure> {
    match command {
        ApprovalsCommand::List(owner) => {
            let whom = Whom::of(owner.key.as_deref());
            let answer = ask(&whom, AcpCall::ListApprovals, place, around)?;
            Ok(finish(place, &answer, |answer| {
                let rows = listed(answer, "approvals").map(|question| {
                    [
                        word(question, "id"),
                        word(question, "gate"),
                        short_did(&word(question, "peer")),
                        word(question, "expiresAt"),
                        question_title(question),
                    ]
                });
                let rows: Vec<_> = rows.collect();
                if rows.is_empty() {
                    return "nothing waits for an answer\n".to_owned();
                }
                output::table(["ID", "GATE", "PEER", "UNTIL", "TITLE"], &rows)
            }))
        }
        ApprovalsCommand::Approve(args) => answer(args, true, place, around),
        ApprovalsCommand::Deny(args) => answer(args, false, place, around),
    }
}

/// Enough of a did to tell it from others: what all have in common is left out.
fn short_did(did: &str) -> String {
    output::short(did.strip_prefix("did:key:").unwrap_or(did))
}

/// The task's title, of a budget which limit is to be raised, and how far, and of a tool which one is
/// used.
fn question_title(question: &Value) -> String {
    let title = word(question, "title");
    if let Some(target) = question.get("target").filter(|target| target.get("resource").is_some()) {
        return format!("{title}: {} {}", word(target, "action"), word(target, "resource"));
    }
    let number = |target: &Value, name: &str| target.get(name).and_then(Value::as_u64);
    let raised = question.get("target").and_then(|target| {
        let (from, to) = (number(target, "from")?, number(target, "to")?);
        Some(format!("{} {from}→{to}", word(target, "metric")))
    });
    raised.map_or_else(|| title.clone(), |raised| format!("{title}: {raised}"))
}

fn answer(
    args: &AnswerArgs,
    approve: bool,
    place: &Place,
    around: &Surroundings,
) -> Result<ExitCode, Failure> {
    let (id, reason) = (args.id.clone(), (*args.reason).to_owned());
    let call = AcpCall::Answer(Answer { id, approve, reason });
    let answer = ask(&Whom::of(args.owner.key.as_deref()), call, place, around)?;
    Ok(finish(place, &answer, |answer| {
        format!("{} {}\n", word(answer, "id"), word(answer, "decision"))
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_beginning_of_an_id_names_one_task() {
        let tasks = json!({ "tasks": [{ "taskId": "task_abcdefgh1" },
            { "taskId": "task_abcdefgh22" }, { "taskId": "task_abcdefgh2" }] });
        let found = |id| begun_by(id, &tasks).map_err(|failure| failure.exit);
        assert_eq!(found("task_abcdefgh"), Err(exit::USAGE));
        assert_eq!(found("task_abcdefgh1"), Ok("task_abcdefgh1".into()));
        assert_eq!(found("task_abcdefgh2"), Ok("task_abcdefgh2".into()));
        assert_eq!(found("task_zzzzzzzz"), Ok("task_zzzzzzzz".into()));
        assert_eq!(
            begun_by("task_abcd", &json!({ "tasks": [{ "taskId": "task_abcdefgh" }] })).ok(),
            Some("task_abcdefgh".into())
        );
    }

    #[test]
    fn a_fork_is_seen_beside_the_state() {
        let mut task = json!({ "status": "IN_PROGRESS", "failure": null });
        assert_eq!(state(&task), "IN_PROGRESS");
        task["failure"] = json!({ "code": "DEADLINE_PASSED", "message": "late" });
        assert_eq!(state(&task), "IN_PROGRESS");
        task["failure"] = json!({ "code": "AUDIT_FORK", "message": "two" });
        assert_eq!(state(&task), "IN_PROGRESS (AUDIT_FORK)");
    }

    #[test]
    fn what_is_asked_is_told_with_the_title() {
        let mut question = json!({ "title": "t", "target": { "gate": "contract_acceptance" } });
        assert_eq!(question_title(&question), "t");
        question["target"] = json!({ "gate": "budget_overrun", "metric": "maxTotalTokens",
            "from": 300, "to": 600 });
        assert_eq!(question_title(&question), "t: maxTotalTokens 300→600");
        question["target"] =
            json!({ "gate": "external_send", "action": "read", "resource": "mcp:a" });
        assert_eq!(question_title(&question), "t: read mcp:a");
        assert_eq!(short_did("did:key:z6MkhaXgBZDvotDkL5257"), "z6MkhaXgBZDv");
    }

    #[test]
    fn a_strangers_words_cannot_move_the_cursor() {
        let task = json!({ "taskId": "task_1", "title": "a\u{1b}[2Jb", "status": "PROPOSED",
            "deliverable": { "x": "\u{202e}" }, "entries": 3 });
        let mut task = task;
        task["stderr"] = json!("one\n\u{1b}[2J\u{202e}two");
        let text = task_text(&task);
        assert!(text.contains("\n│ one\n│ "), "{text}");
        assert!(!text.contains('\u{1b}') && !text.contains('\u{202e}'), "{text}");
    }
}
