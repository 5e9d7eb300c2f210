//! Drives one run of a program: a session of the sandbox on one side, the adapter's dialogue and the
//! caller's control on the other.

use std::time::{Duration, Instant};

use super::dialogue::{Dialogue, Step, progress, source};
use super::{Adapter, Control, Ended, Job, Ran, RunFacts};
use crate::acp::code::{Code, Error};
use crate::acp::json;
use crate::acp::objects::{Denial, Exit, ExitKind, Isolation, SandboxPolicy, Usage};
use crate::acp::value::{Count, Digest, Text};
use crate::runtime::clock::unix_now;
use crate::runtime::sandbox::{self, Cause, End, Event, SandboxError, Session};

/// A run may be held for so long in all (decision 46); then it goes on, and its time runs.
const HOLD_MAX: Duration = Duration::from_secs(600);
/// How long a program may take to end once its result is there.
const FAREWELL: Duration = Duration::from_secs(5);
/// What a supervisor may take beyond the time of the run before it counts as lost: the grace of 5 s,
/// and what the kernel and a container engine need.
const SLACK: Duration = Duration::from_secs(45);

/// Makes one run of `adapter`.
pub(super) async fn run(adapter: &Adapter, job: Job, control: Control) -> Ran {
    let started_at = unix_now();
    let began = Instant::now();
    let mut metrics = super::dialogue::unknown();
    let mut model = None;
    let (result, end) = match adapter.launch(&job) {
        Err(error) => (Err(error), None),
        Ok((launch, mut dialogue)) => {
            let wall = Duration::from_millis(launch.max_wall_ms);
            let (end, cancelled) = match adapter.sandbox.start(launch).await {
                Ok(session) => converse(session, dialogue.as_mut(), control, wall).await,
                Err(error) => (Err(error), false),
            };
            metrics = dialogue.metrics();
            let result = match &end {
                _ if cancelled => Err(Error::new(Code::Cancelled, "the run was cancelled")),
                Err(error) => Err(Error::new(Code::SandboxFailed, error.to_string())),
                Ok(end) => judge(end, dialogue.as_mut()).and_then(|done| {
                    metrics = done.metrics.unwrap_or_else(|| dialogue.metrics());
                    model = done.model;
                    fits(&done.output, job.max_output_bytes).map(|()| done.output)
                }),
            };
            (result, end.ok())
        }
    };
    let held_ms = end.as_ref().map_or(0, |end| end.held_ms);
    let elapsed = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
    let output_bytes = match &result {
        Ok(output) => json::canonical(output).map_or(0, |bytes| bytes.len()),
        Err(_) => 0,
    };
    let known = |number: u64| Some(Count::clamped(number));
    Ran {
        usage: Usage {
            input_tokens: metrics.input_tokens,
            output_tokens: metrics.output_tokens,
            total_tokens: metrics.total_tokens,
            tool_calls: metrics.tool_calls,
            wall_time_ms: known(elapsed.saturating_sub(held_ms)),
            cpu_time_ms: end.as_ref().and_then(|end| known(end.cpu_ms)),
            output_bytes: known(u64::try_from(output_bytes).unwrap_or(u64::MAX)),
        },
        source: source(&metrics),
        model,
        started_at,
        ended_at: unix_now(),
        run: facts(adapter, job.isolation, sandbox::applied(&job.policy, job.isolation), end),
        ended: match result {
            Ok(output) => Ended::Output(output),
            Err(error) if error.code() == Code::Cancelled => Ended::Cancelled,
            Err(error) => Ended::Failed { code: error.code(), message: error.message().to_owned() },
        },
    }
}

/// Carries a run to its end; how it ended, and whether the caller cancelled it.
async fn converse(
    mut session: Session,
    dialogue: &mut dyn Dialogue,
    control: Control,
    wall: Duration,
) -> (Result<End, SandboxError>, bool) {
    let Control { cancel, mut hold, progress: told } = control;
    let tell = |progress| {
        // A slow reader misses some; the next one says how far the run is then.
        let _missed = told.try_send(progress);
    };
    let (mut cancelled, mut watching) = (false, true);
    let lost = Instant::now() + wall + HOLD_MAX + SLACK;
    let mut held_until = None;
    let mut farewell_until = None;
    let mut steps = dialogue.open();
    // A run may begin held.
    hold.mark_changed();
    loop {
        for step in steps.drain(..) {
            match step {
                Step::Tell(progress) => tell(progress),
                Step::Send(bytes) => session.send(&bytes).await,
                Step::Close => session.end_input().await,
            }
        }
        if dialogue.is_done() {
            farewell_until.get_or_insert_with(|| Instant::now() + FAREWELL);
        }
        tokio::select! {
            event = session.next() => match event {
                Ok(Event::Output(bytes)) => steps = dialogue.take(&bytes),
                Ok(Event::Progress(line)) => steps.extend(progress(&line).map(Step::Tell)),
                Ok(Event::Ended(end)) => return (Ok(end), cancelled),
                Err(error) => return (Err(error), cancelled),
            },
            () = cancel.cancelled(), if !cancelled => {
                cancelled = true;
                session.stop().await;
            }
            changed = hold.changed(), if watching => {
                watching = changed.is_ok();
                let held = watching && *hold.borrow_and_update();
                held_until = held.then(|| Instant::now() + HOLD_MAX);
                session.hold(held).await;
            }
            () = until(held_until) => {
                (watching, held_until) = (false, None);
                session.hold(false).await;
            }
            () = until(farewell_until) => {
                farewell_until = Some(lost);
                session.stop().await;
            }
            () = until(Some(lost)) => {
                session.abandon();
                return (Err(SandboxError::Lost), cancelled);
            }
        }
    }
}

/// Waits until the time; without one, for ever.
async fn until(time: Option<Instant>) {
    match time {
        Some(time) => tokio::time::sleep_until(time.into()).await,
        None => std::future::pending().await,
    }
}

/// What an end means for the result.
fn judge(end: &End, dialogue: &mut dyn Dialogue) -> Result<super::dialogue::Done, Error> {
    let fail = |code, message: String| Err(Error::new(code, message));
    match end.cause {
        _ if dialogue.is_done() => dialogue.finish(),
        Some(Cause::Output) => fail(Code::OutputTooLarge, "the output is too large".into()),
        Some(Cause::Wall) => fail(Code::BudgetExceeded, "the run's time is over".into()),
        Some(cause) => {
            fail(Code::SandboxFailed, format!("the run was ended for its {}", cause.word()))
        }
        None => match (end.code, end.signal) {
            (Some(0), _) => dialogue.finish(),
            (Some(code), _) => {
                fail(Code::AdapterFailed, format!("the program ended with exit code {code}"))
            }
            (None, signal) => fail(
                Code::AdapterFailed,
                format!("the program was ended by signal {}", signal.unwrap_or(0)),
            ),
        },
    }
}

fn fits(output: &serde_json::Value, max_bytes: u64) -> Result<(), Error> {
    let bytes = json::canonical(output)?.len();
    if u64::try_from(bytes).is_ok_and(|bytes| bytes <= max_bytes) {
        Ok(())
    } else {
        Err(Error::new(Code::OutputTooLarge, "the output is too large"))
    }
}

fn facts(
    adapter: &Adapter,
    effective: Isolation,
    limits: SandboxPolicy,
    end: Option<End>,
) -> RunFacts {
    let kind = match &end {
        None => ExitKind::SpawnFailed,
        Some(End { cause: Some(Cause::Wall), .. }) => ExitKind::Timeout,
        Some(End { cause: Some(Cause::Stopped), .. }) => ExitKind::Cancelled,
        Some(End { code: Some(_), .. }) => ExitKind::Exited,
        Some(_) => ExitKind::Signalled,
    };
    let end = end.unwrap_or(End {
        code: None,
        signal: None,
        cause: None,
        cpu_ms: 0,
        held_ms: 0,
        stderr: Vec::new(),
    });
    let denial = |cause: Cause| Denial {
        kind: Text::lossy(cause.word()),
        detail: Text::lossy("the run was ended at this limit"),
    };
    RunFacts {
        effective,
        runtime: adapter.sandbox.runtime(effective),
        limits,
        exit: Exit { kind, code: end.code.map(i64::from), signal: end.signal.map(i64::from) },
        stderr_digest: (!end.stderr.is_empty()).then(|| Digest::of_bytes(&end.stderr)),
        denials: end.cause.filter(|c| *c != Cause::Stopped).map(denial).into_iter().collect(),
    }
}
