//! What is asked of an office that runs: tasks, answers, invites, revocations. With `--key` of the
//! office of that key, or, when none runs, of one that is opened for the moment; without it of the
//! daemon's.

use std::path::Path;
use std::process::ExitCode;

use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::draft;
use super::terminal::say;
use super::{Place, Surroundings, protocol};
use crate::acp::endpoint::EndpointPolicy;
use crate::acp::objects::RevocationTarget;
use crate::acp::value::Name;
use crate::api::acp::{
    AcpCall, Answer, CancelTask, CreateInvite, ExportAudit, ListTasks, Revocable, RevokeToken,
    TaskStatus,
};
use crate::api::types::ApiError;
use crate::cli::acp::Failure;
use crate::cli::acp::args::{
    AnswerArgs, ApprovalsCommand, CancelArgs, InviteCreateArgs, RevokeArgs, Side, TaskArgs,
    TasksArgs,
};
use crate::cli::{exit, output};
use crate::codec::text::escape_untrusted;
use crate::daemon::acp::service::{Service, Teller};
use crate::daemon::acp::{OfficeError, owner_dir, read_key, socket};

/// Whose office is asked, and by which relays it may talk when it is opened for this call.
struct Whom<'a> {
    key: Option<&'a Path>,
    relays: &'a [String],
    endpoints: Option<EndpointPolicy>,
}

impl<'a> Whom<'a> {
    const fn of(key: Option<&'a Path>) -> Self {
        Self { key, relays: &[], endpoints: None }
    }
}

fn ask(
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

fn finish(place: &Place, answer: &Value, text: impl FnOnce(&Value) -> String) -> ExitCode {
    if place.json {
        output::print(&output::json_line(answer))
    } else {
        output::print(&text(answer))
    }
}

fn word(value: &Value, name: &str) -> String {
    escape_untrusted(value.get(name).and_then(Value::as_str).unwrap_or_default())
}

fn millis(time: std::time::Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

pub(super) fn invite(
    args: &InviteCreateArgs,
    place: &Place,
    around: &Surroundings,
) -> Result<ExitCode, Failure> {
    let call = AcpCall::CreateInvite(CreateInvite {
        name: args.name.as_ref().map(|name| (**name).to_owned()),
        relay_urls: args.relays.clone(),
        expires_in_ms: Some(millis(args.expires_in)),
        max_uses: Some(args.max_uses),
    });
    let answer = ask(&Whom::of(args.key.as_deref()), call, place, around)?;
    Ok(finish(place, &answer, |answer| format!("{}\n", word(answer, "invite"))))
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
        let rows = answer.as_array().into_iter().flatten().map(|task| {
            let waits = word(task, "waitingOn");
            [
                word(task, "taskId"),
                word(task, "status"),
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
    let (task_id, whom) = (args.id.as_str().to_owned(), Whom::of(args.owner.key.as_deref()));
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
            let text = format!("there is no result of {} yet", args.id.as_str());
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
        ("state", word(task, "status")),
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
    output::fields(&rows)
}

pub(super) fn cancel(
    args: &CancelArgs,
    place: &Place,
    around: &Surroundings,
) -> Result<ExitCode, Failure> {
    let call = AcpCall::CancelTask(CancelTask {
        task_id: args.id.as_str().to_owned(),
        reason: (*args.reason).to_owned(),
    });
    let answer = ask(&Whom::of(args.owner.key.as_deref()), call, place, around)?;
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
                let rows = answer.as_array().into_iter().flatten().map(|question| {
                    [
                        word(question, "id"),
                        word(question, "gate"),
                        word(question, "taskId"),
                        word(question, "expiresAt"),
                        word(question, "title"),
                    ]
                });
                let rows: Vec<_> = rows.collect();
                if rows.is_empty() {
                    return "nothing waits for an answer\n".to_owned();
                }
                output::table(["ID", "GATE", "TASK", "UNTIL", "TITLE"], &rows)
            }))
        }
        ApprovalsCommand::Approve(args) => answer(args, true, place, around),
        ApprovalsCommand::Deny(args) => answer(args, false, place, around),
    }
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
    fn a_strangers_words_cannot_move_the_cursor() {
        let task = json!({ "taskId": "task_1", "title": "a\u{1b}[2Jb", "status": "PROPOSED",
            "deliverable": { "x": "\u{202e}" }, "entries": 3 });
        let text = task_text(&task);
        assert!(!text.contains('\u{1b}') && !text.contains('\u{202e}'), "{text}");
    }
}
