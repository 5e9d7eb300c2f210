//! Drives one run of a program: a session of the sandbox on one side, the adapter's dialogue and the
//! caller's control on the other.

use std::time::{Duration, Instant};

use serde_json::Value;
use tokio::sync::watch;

use super::broker::{Broker, Taken};
use super::dialogue::{Dialogue, Done, Step, progress, source, unknown};
use super::proxy::Proxy;
use super::tools::Tools;
use super::{Adapter, AdapterKind, Control, Ended, Job, Progress, Ran, RunFacts};
use crate::acp::code::{Code, Error};
use crate::acp::json;
use crate::acp::objects::{Denial, Exit, ExitKind, Metrics, Network, Usage, UsageSource};
use crate::acp::value::{Count, Digest, Name, Text};
use crate::codec::time::UnixMillis;
use crate::runtime::clock::unix_now;
use crate::runtime::http_client::SystemResolver;
use crate::runtime::sandbox::{self, Cause, End, Event, SandboxError, Session};

/// A run may be held for so long in all (decision 46); then it goes on, and its time runs.
const HOLD_MAX: Duration = Duration::from_secs(600);
/// How long a program may take to end once its result is there.
const FAREWELL: Duration = Duration::from_secs(5);
/// What a supervisor may take beyond the time of the run before it counts as lost: the grace of 5 s,
/// and what the kernel and a container engine need.
const SLACK: Duration = Duration::from_secs(45);

/// What came of a run, before it is written down.
pub(super) struct Outcome {
    /// The result.
    pub result: Result<Done, Error>,
    /// How its processes ended, if there were any.
    pub end: Option<End>,
    /// When it started.
    pub started_at: UnixMillis,
    /// The same by the clock that is never set.
    pub began: Instant,
    /// Tokens and tool calls as counted, if the result does not say.
    pub metrics: Metrics,
    /// Where the tokens come from.
    pub source: UsageSource,
    /// The model, if the result does not say.
    pub model: Option<Name>,
}

/// Makes one run of `adapter` that starts a program.
pub(super) async fn run(adapter: &Adapter, job: Job, control: Control) -> Ran {
    let (started_at, began) = (unix_now(), Instant::now());
    let nothing = |error| Outcome {
        result: Err(error),
        end: None,
        started_at,
        began,
        metrics: unknown(),
        source: UsageSource::Metered,
        model: None,
    };
    let broker = match &adapter.provider {
        Some(provider) => match Broker::start(provider.clone(), control.hold.clone()).await {
            Ok(broker) => Some(broker),
            Err(error) => {
                let message = format!("no broker for the provider's key can be made ({error})");
                return ran(adapter, &job, nothing(Error::new(Code::SandboxFailed, message)));
            }
        },
        None => None,
    };
    let mut tools = match Tools::open(&job, &control).await {
        Ok(tools) => tools,
        Err(error) => {
            let message = format!("the requester's tools cannot be offered ({error})");
            return ran(adapter, &job, nothing(Error::new(Code::SandboxFailed, message)));
        }
    };
    let policy = sandbox::applied(&job.policy, job.isolation);
    let private = adapter.options.private_hosts;
    let proxy = match Proxy::open(&policy, private, Box::new(SystemResolver)).await {
        Ok(proxy) => proxy,
        Err(error) => {
            let message = format!("no way to the listed hosts can be made ({error})");
            return ran(adapter, &job, nothing(Error::new(Code::SandboxFailed, message)));
        }
    };
    let launched = adapter.launch(&job, broker.as_ref(), tools.as_ref(), proxy.as_ref());
    let (launch, mut dialogue) = match launched {
        Ok(made) => made,
        Err(error) => return ran(adapter, &job, nothing(error)),
    };
    let wall = Duration::from_millis(launch.max_wall_ms);
    let taken = broker.as_ref().map(|broker| broker.taken.clone());
    let (end, cancelled) = match adapter.sandbox.start(launch).await {
        Ok(mut session) => {
            if let (Some(tools), Some(socket)) = (&mut tools, session.socket()) {
                tools.listen(socket);
            }
            converse(session, dialogue.as_mut(), control, wall, taken).await
        }
        Err(error) => (Err(error), false),
    };
    let result = match &end {
        _ if cancelled => Err(Error::new(Code::Cancelled, "the run was cancelled")),
        Err(error) => Err(Error::new(Code::SandboxFailed, error.to_string())),
        Ok(end) => judge(end, dialogue.as_mut()),
    };
    let told = result.as_ref().ok().and_then(|done| done.metrics.clone());
    let mut metrics = told.unwrap_or_else(|| dialogue.metrics());
    let (mut source, mut model) = (source(&metrics), None);
    if let Some(taken) = broker.as_ref().map(|broker| broker.taken.borrow().clone())
        && taken.metrics() != unknown()
    {
        // What passed the broker is the provider's word, the program's is only its own.
        metrics = Metrics { tool_calls: metrics.tool_calls, ..taken.metrics() };
        (source, model) = (taken.source(), taken.model);
    }
    // The program may have used tools of its own as well, and says so.
    metrics.tool_calls = metrics.tool_calls.max(tools.as_ref().map(Tools::ran));
    ran(adapter, &job, Outcome { result, end: end.ok(), started_at, began, metrics, source, model })
}

/// Writes down what came of a run.
pub(super) fn ran(adapter: &Adapter, job: &Job, outcome: Outcome) -> Ran {
    let Outcome { result, end, started_at, began, metrics, source, mut model } = outcome;
    let result = result.and_then(|done| {
        model = model.take().or(done.model);
        let bytes = size(&done.output, job.max_output_bytes)?;
        Ok((done.output, bytes))
    });
    let held_ms = end.as_ref().map_or(0, |end| end.held_ms);
    let elapsed = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
    let known = |number: u64| Some(Count::clamped(number));
    Ran {
        usage: Usage {
            input_tokens: metrics.input_tokens,
            output_tokens: metrics.output_tokens,
            total_tokens: metrics.total_tokens,
            tool_calls: metrics.tool_calls,
            wall_time_ms: known(elapsed.saturating_sub(held_ms)),
            cpu_time_ms: end.as_ref().and_then(|end| known(end.cpu_ms)),
            output_bytes: known(result.as_ref().map_or(0, |(_, bytes)| *bytes)),
        },
        source,
        model,
        started_at,
        ended_at: unix_now(),
        complaint: end.as_ref().filter(|_| failed(&result)).and_then(complaint),
        run: facts(adapter, job, end, result.is_ok()),
        ended: match result {
            Ok((output, _)) => Ended::Output(output),
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
    mut taken: Option<watch::Receiver<Taken>>,
) -> (Result<End, SandboxError>, bool) {
    let Control { cancel, mut hold, progress: told, tools: _ } = control;
    let tell = |progress| {
        // A slow reader misses some; the next one says how far the run is then.
        let _missed = told.try_send(progress);
    };
    let (mut cancelled, mut watching) = (false, true);
    let lost = Instant::now() + wall + HOLD_MAX + SLACK;
    let (mut held_since, mut may_hold) = (None::<Instant>, HOLD_MAX);
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
                if let Some(since) = held_since.take() {
                    may_hold = may_hold.saturating_sub(since.elapsed());
                }
                let held = watching && *hold.borrow_and_update() && !may_hold.is_zero();
                held_since = held.then(Instant::now);
                session.hold(held).await;
            }
            metrics = counted(&mut taken) => tell(Progress {
                percent: None,
                step: "model".to_owned(),
                message: String::new(),
                metrics,
            }),
            () = until(held_since.map(|since| since + may_hold)) => {
                (held_since, may_hold) = (None, Duration::ZERO);
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

/// The tokens that a broker has counted, when there are more; without a broker never.
async fn counted(taken: &mut Option<watch::Receiver<Taken>>) -> Metrics {
    if let Some(receiver) = taken
        && receiver.changed().await.is_ok()
    {
        return receiver.borrow_and_update().metrics();
    }
    std::future::pending().await
}

/// What an end means for the result.
fn judge(end: &End, dialogue: &mut dyn Dialogue) -> Result<Done, Error> {
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

fn failed<T>(result: &Result<T, Error>) -> bool {
    result.as_ref().is_err_and(|error| error.code() != Code::Cancelled)
}

/// The end of stderr as text, if there is any.
fn complaint(end: &End) -> Option<String> {
    let text = String::from_utf8_lossy(&end.stderr_end);
    let text = text.trim();
    (!text.is_empty()).then(|| text.to_owned())
}

/// Bytes of an output's canonical form, if they are no more than `max_bytes`.
fn size(output: &Value, max_bytes: u64) -> Result<u64, Error> {
    let bytes = u64::try_from(json::canonical(output)?.len()).unwrap_or(u64::MAX);
    if bytes <= max_bytes {
        Ok(bytes)
    } else {
        Err(Error::new(Code::OutputTooLarge, "the output is too large"))
    }
}

fn facts(adapter: &Adapter, job: &Job, end: Option<End>, succeeded: bool) -> RunFacts {
    let kind = match &end {
        None if adapter.kind() == AdapterKind::Openai => ExitKind::Exited,
        None => ExitKind::SpawnFailed,
        Some(End { cause: Some(Cause::Wall), .. }) => ExitKind::Timeout,
        Some(End { cause: Some(Cause::Stopped), .. }) => ExitKind::Cancelled,
        Some(End { code: Some(_), .. }) => ExitKind::Exited,
        Some(_) => ExitKind::Signalled,
    };
    // Where no program runs, success is the exit code that a program would have.
    let no_program = || (kind == ExitKind::Exited && succeeded).then_some(0);
    let denial = |cause: Cause| Denial {
        kind: Text::lossy(cause.word()),
        detail: Text::lossy("the run was ended at this limit"),
    };
    let ended = end.as_ref();
    let cause = ended.and_then(|end| end.cause).filter(|cause| *cause != Cause::Stopped);
    let stderr = ended.map(|end| end.stderr.as_slice()).filter(|stderr| !stderr.is_empty());
    let limits = sandbox::applied(&job.policy, job.isolation);
    // The broker's, the tools' and the proxy's.
    let has_ports = adapter.provider.is_some()
        || !job.grants.is_empty()
        || limits.network == Network::Allowlist;
    RunFacts {
        effective: job.isolation,
        runtime: adapter.runtime(job.isolation, has_ports),
        limits,
        exit: Exit {
            kind,
            code: ended.map_or_else(no_program, |end| end.code).map(i64::from),
            signal: ended.and_then(|end| end.signal).map(i64::from),
        },
        stderr_digest: stderr.map(Digest::of_bytes),
        denials: cause.map(denial).into_iter().collect(),
    }
}
