//! The worker's side: whether an offer is taken, when the work runs, what becomes of its result.

use super::gates::Answer;
use super::{Action, Owner, OwnerRecord, Profile, Run, Turn, contract};
use crate::acp::approval::ASK_TIMEOUT_MS;
use crate::acp::code::{Code, Error, Result};
use crate::acp::log::{TaskLog, View, Wish};
use crate::acp::objects::{
    Event, Isolation, Network, Party, SandboxPolicy, State, Target, TaskContract, Usage,
    UsageReceipt, UsageSource,
};
use crate::acp::quota::Alarm;
use crate::acp::run::{Ended, Job, Progress, Ran};
use crate::acp::value::{Digest, Time};
use crate::acp::{steps, verify};
use crate::codec::time::UnixMillis;
use crate::identity::entropy::Entropy;

/// How long a run may take unless the budget allows less, ms (design 17).
const MAX_WALL_MS: u64 = 600_000;

/// Bytes of an output unless the budget allows fewer (design 17).
pub(super) const MAX_OUTPUT_BYTES: u64 = 512 * 1024;

/// The level that `policy` gets from a worker of this profile (design 10.2): the one asked for, a
/// stronger one, or, where that is allowed, the strongest that there is from `subprocess` up.
///
/// # Errors
/// `ISOLATION_UNAVAILABLE`.
pub fn choose_level(
    profile: &Profile,
    policy: &SandboxPolicy,
    required: bool,
) -> Result<Isolation> {
    let lowest = match (profile.foreign_code, policy.allow_subprocess_fallback) {
        (false, _) => Isolation::None,
        (true, true) => Isolation::Subprocess,
        (true, false) => Isolation::Kernel,
    };
    let (usable, out) = match policy.network {
        Network::None => (&profile.levels, ""),
        Network::Allowlist => (&profile.levels_with_hosts, " with a way to listed hosts"),
    };
    let levels = || usable.iter().copied().filter(|level| level.is_at_least(lowest));
    // The weakest of those that are strong enough: what was asked for, if it is there.
    if let Some(level) = levels().filter(|level| level.is_at_least(policy.isolation)).max() {
        return Ok(level);
    }
    let fallback = policy.allow_subprocess_fallback || !required;
    levels().min().filter(|level| fallback && level.is_at_least(Isolation::Subprocess)).ok_or_else(
        || {
            let has: Vec<&str> = levels().map(Isolation::as_str).collect();
            let text = format!(
                "the order asks for isolation {}{out}, and this worker has {}",
                policy.isolation.as_str(),
                if has.is_empty() { "none that it may use for it".into() } else { has.join(", ") },
            );
            Error::new(Code::IsolationUnavailable, text)
        },
    )
}

impl Owner {
    /// A run says how far it is.
    ///
    /// # Errors
    /// A fault of this program.
    pub fn run_progress(
        &mut self,
        task: &Digest,
        progress: Progress,
        now: UnixMillis,
        entropy: &mut dyn Entropy,
    ) -> Result<super::Outcome> {
        let mut turn = Turn::new(now, entropy);
        if let Some(file) = self.files.get_mut(task)
            && matches!(file.run, Run::Running { .. })
        {
            file.meter.progress(&progress.metrics);
            // The newest counts: one that nobody has seen yet is replaced.
            file.progress = Some(progress);
            self.consider(*task, &mut turn);
        }
        Ok(turn.out)
    }

    /// A run is over.
    ///
    /// # Errors
    /// A fault of this program.
    pub fn run_ended(
        &mut self,
        task: &Digest,
        ran: Ran,
        now: UnixMillis,
        entropy: &mut dyn Entropy,
    ) -> Result<super::Outcome> {
        let mut turn = Turn::new(now, entropy);
        let ended = self.gateway.task(task).is_none_or(TaskLog::is_over);
        if let Some(file) = self.files.get_mut(task) {
            file.progress = None;
            if let Some(text) = ran.complaint.clone() {
                file.complaint = Some(text.clone());
                turn.out.of(*task, OwnerRecord::Complaint { text });
            }
            file.run = if ended { Run::None } else { Run::Over(Box::new(ran)) };
        }
        self.consider(*task, &mut turn);
        self.fill_places(&mut turn);
        Ok(turn.out)
    }

    /// Runs of this process.
    #[must_use]
    pub fn running(&self) -> usize {
        self.files.keys().filter(|task| self.is_running(task)).count()
    }

    /// Whether a task has a run of this process.
    pub(super) fn is_running(&self, task: &Digest) -> bool {
        self.files.get(task).is_some_and(|file| matches!(file.run, Run::Running { .. }))
    }

    pub(super) fn worker_step(
        &mut self,
        task: Digest,
        view: &View,
        state: State,
        idle: bool,
        turn: &mut Turn<'_>,
    ) -> Result<bool> {
        match state {
            State::Proposed if idle => self.consider_offer(task, view, turn),
            State::Accepted if idle => self.consider_start(task, turn),
            State::InProgress => {
                if self.offer_children(task, view, turn) {
                    return Ok(true);
                }
                self.go_on(task, view, idle, turn)
            }
            State::Cancelling => self.stop_or_confirm(task, view, idle, turn),
            _ => Ok(false),
        }
    }

    /// Whether this worker can do what is asked, before any person is.
    fn judge(&self, log: &TaskLog, contract: &TaskContract, now: UnixMillis) -> Result<Isolation> {
        if let Some(invite) = &contract.invite_id {
            self.gateway.invites.may_use(invite, &self.gateway.revocations, now)?;
        }
        verify::check_manifest(&contract.manifest)?;
        let manifest = &contract.manifest;
        let input = log.input().ok_or_else(super::unknown)?;
        verify::check_input(manifest, input)?;
        self.level_for(contract)
    }

    fn level_for(&self, contract: &TaskContract) -> Result<Isolation> {
        let profile = self.profile.as_ref();
        let profile =
            profile.ok_or_else(|| Error::new(Code::WorkerBusy, "no work is taken here"))?;
        let manifest = &contract.manifest;
        let (policy, required) = (&manifest.sandbox_policy, manifest.require_execution_attestation);
        choose_level(profile, policy, required)
    }

    fn consider_offer(&mut self, task: Digest, view: &View, turn: &mut Turn<'_>) -> Result<bool> {
        let contract = contract(view)?.clone();
        let log = self.gateway.task(&task).ok_or_else(super::unknown)?;
        let key = self.key.clone();
        let refuse = |error: &Error, turn: &mut Turn<'_>| {
            steps::reject(&Self::cx(&key, turn), view, error.code(), error.message())
        };
        let target = steps::acceptance_target(view)?;
        let wish = match self.judge(log, &contract, turn.now) {
            Err(error) => refuse(&error, turn)?,
            Ok(level) => match self.gate(task, view, &target, turn)? {
                Answer::Wait => return Ok(false),
                Answer::No(receipt) => {
                    refuse(&Error::new(Code::ApprovalDenied, receipt.reason.to_string()), turn)?
                }
                Answer::Yes(receipt) => {
                    let used = contract.invite_id.as_ref().map(|invite| {
                        let gateway = &mut self.gateway;
                        gateway.invites.use_once(invite, &gateway.revocations, turn.now)
                    });
                    match used.transpose() {
                        Err(error) => refuse(&error, turn)?,
                        Ok(used) => {
                            if let Some(used) = used {
                                turn.out.own(OwnerRecord::InviteUsed { used });
                            }
                            self.files.entry(task).or_default().level = Some(level);
                            steps::accept(&Self::cx(&key, turn), view, &receipt)?
                        }
                    }
                }
            },
        };
        let accepts = wish.event == Event::Accept;
        self.act(task, wish, turn)?;
        // START goes behind ACCEPT in the same breath, where there is a place.
        if accepts && self.has_place() {
            self.act(task, steps::start(), turn)?;
        }
        Ok(true)
    }

    /// Whether another run may begin: those that are about to begin count.
    fn has_place(&self) -> bool {
        let taken = self.gateway.tasks().filter(|(task, log)| {
            let over = self.files.get(task).is_some_and(|file| matches!(file.run, Run::Over(_)));
            let takes = match log.view().state() {
                Some(State::InProgress) => !over,
                Some(State::Proposed | State::Accepted) => !log.is_idle(),
                _ => false,
            };
            log.me() == Party::Worker && takes && !log.is_over()
        });
        self.profile.as_ref().is_some_and(|profile| taken.count() < profile.max_runs)
    }

    /// Accepted tasks that waited for a place get one.
    pub(super) fn fill_places(&mut self, turn: &mut Turn<'_>) {
        let waits = |log: &TaskLog| {
            log.me() == Party::Worker
                && log.view().state() == Some(State::Accepted)
                && log.is_idle()
                && !log.is_over()
        };
        let waiting = self.gateway.tasks().filter(|(_, log)| waits(log));
        let waiting: Vec<Digest> = waiting.map(|(task, _)| *task).collect();
        for task in waiting {
            if !self.has_place() {
                break;
            }
            self.consider(task, turn);
        }
    }

    fn consider_start(&mut self, task: Digest, turn: &mut Turn<'_>) -> Result<bool> {
        if !self.has_place() {
            return Ok(false);
        }
        self.act(task, steps::start(), turn)?;
        Ok(true)
    }

    fn go_on(
        &mut self,
        task: Digest,
        view: &View,
        idle: bool,
        turn: &mut Turn<'_>,
    ) -> Result<bool> {
        let run = self.files.get(&task).map(|file| file.run.clone()).unwrap_or_default();
        match run {
            Run::None if idle => self.begin(task, view, turn),
            Run::Lost if idle => {
                let text = "the program ended while the work was running";
                self.give_up(task, view, (Code::SandboxFailed, text), None, turn)
            }
            Run::Over(ran) if idle => self.hand_over(task, view, &ran, turn),
            Run::Running { held, stopping } if !stopping => {
                if self.watch_budget(task, view, held, turn)? {
                    return Ok(true);
                }
                if idle { self.tell_progress(task, view, turn) } else { Ok(false) }
            }
            _ => Ok(false),
        }
    }

    fn begin(&mut self, task: Digest, view: &View, turn: &mut Turn<'_>) -> Result<bool> {
        let contract = contract(view)?;
        let manifest = &contract.manifest;
        let log = self.gateway.task(&task).ok_or_else(super::unknown)?;
        let input = log.input().cloned().ok_or_else(super::unknown)?;
        let level = match self.files.get(&task).and_then(|file| file.level) {
            Some(level) => level,
            // Chosen before a restart: what is there now decides. That it was taken stands.
            None => match self.level_for(contract) {
                Ok(level) => level,
                Err(error) => {
                    let why = (error.code(), error.message());
                    return self.give_up(task, view, why, None, turn);
                }
            },
        };
        let left = manifest.deadline_at.millis().0.saturating_sub(turn.now.0);
        let limit = |value: Option<crate::acp::value::Count>, default: u64| {
            value.map_or(default, |count| count.get().min(default))
        };
        let job = Job {
            task_id: contract.task_id.clone(),
            title: manifest.title.to_string(),
            description: manifest.description.to_string(),
            output_schema: manifest.output_schema.0.clone(),
            input,
            policy: manifest.sandbox_policy.clone(),
            isolation: level,
            max_wall_ms: limit(manifest.budget.max_wall_time_ms, MAX_WALL_MS).min(left),
            max_output_bytes: limit(manifest.budget.max_output_bytes, MAX_OUTPUT_BYTES),
            grants: view.grants().iter().map(|kept| kept.object.clone()).collect(),
        };
        let file = self.files.entry(task).or_default();
        file.run = Run::Running { held: false, stopping: false };
        turn.out.of(task, OwnerRecord::RunBegun { revision: view.revision() });
        turn.out.actions.push(Action::Run { task, job: Box::new(job) });
        Ok(false)
    }

    fn tell_progress(&mut self, task: Digest, view: &View, turn: &mut Turn<'_>) -> Result<bool> {
        let file = self.files.entry(task).or_default();
        if file.progress.is_none() || turn.now < view.progress_from() {
            return Ok(false);
        }
        let Some(progress) = file.progress.take() else { return Ok(false) };
        let key = self.key.clone();
        let wish = steps::progress(
            &Self::cx(&key, turn),
            view,
            progress.percent.map(u64::from),
            &progress.step,
            &progress.message,
            progress.metrics,
            None,
        )?;
        self.act(task, wish, turn)?;
        Ok(false)
    }

    /// A run at the end of its budget is held until both owners have raised it (decision 46).
    fn watch_budget(
        &mut self,
        task: Digest,
        view: &View,
        held: bool,
        turn: &mut Turn<'_>,
    ) -> Result<bool> {
        let file = self.files.entry(task).or_default();
        let exceeded = file.meter.alarms(view).into_iter().find_map(exceeded);
        let Some((metric, limit)) = exceeded else {
            if held {
                file.run = Run::Running { held: false, stopping: false };
                file.held_until = None;
                turn.out.actions.push(Action::Hold { task, held: false });
            }
            return Ok(false);
        };
        if !held {
            file.run = Run::Running { held: true, stopping: false };
            file.held_until = Some(turn.now.plus(ASK_TIMEOUT_MS));
            turn.out.actions.push(Action::Hold { task, held: true });
        }
        let raise = self.raise(task, view, metric, limit, turn)?;
        // Denied here, or not raised by both in time: the run ends, and the task fails.
        let file = self.files.entry(task).or_default();
        let in_time = file.held_until.is_some_and(|until| turn.now < until);
        if raise == Raise::Denied || !in_time {
            file.run = Run::Running { held: true, stopping: true };
            file.over_budget = true;
            turn.out.actions.push(Action::Stop { task });
        }
        Ok(raise == Raise::Made)
    }

    fn receipt(&self, view: &View, ran: Option<&Ran>, turn: &mut Turn<'_>) -> Result<UsageReceipt> {
        let adapter = self.profile.as_ref().map_or("none", |profile| &*profile.adapter);
        let mut cx = Self::cx(&self.key, turn);
        let (usage, source, model, started) = match ran {
            Some(ran) => (ran.usage.clone(), ran.source, ran.model.clone(), ran.started_at),
            None => (Usage::unmeasured(), UsageSource::Metered, None, cx.now),
        };
        steps::usage(&mut cx, view, usage, source, (adapter, model), Time::from(started), true)
    }

    fn hand_over(
        &mut self,
        task: Digest,
        view: &View,
        ran: &Ran,
        turn: &mut Turn<'_>,
    ) -> Result<bool> {
        let over_budget = self.files.get(&task).is_some_and(|file| file.over_budget);
        let output = match &ran.ended {
            Ended::Failed { code, message } => {
                return self.give_up(task, view, (*code, message), Some(ran), turn);
            }
            Ended::Cancelled => {
                let (code, text) = if over_budget {
                    (Code::BudgetExceeded, "the budget is used up and was not raised")
                } else {
                    (Code::SandboxFailed, "the run was stopped here")
                };
                return self.give_up(task, view, (code, text), Some(ran), turn);
            }
            Ended::Output(output) => output.clone(),
        };
        let usage = self.receipt(view, Some(ran), turn)?;
        let key = self.key.clone();
        let mut cx = Self::cx(&key, turn);
        let digest = Digest::of(&output)?;
        let attestation = steps::attest(&mut cx, view, ran, Some(digest))?;
        let wish = steps::deliver(&mut cx, view, output, &usage, Some(&attestation))?;
        self.end_run(task);
        self.act_or_fail(task, view, wish, ran, turn)
    }

    /// Delivers; what cannot be delivered (too large, for instance) fails.
    fn act_or_fail(
        &mut self,
        task: Digest,
        view: &View,
        wish: Wish,
        ran: &Ran,
        turn: &mut Turn<'_>,
    ) -> Result<bool> {
        match self.act(task, wish, turn) {
            Ok(()) => Ok(true),
            Err(error) => {
                let why = (error.code(), error.message());
                self.give_up(task, view, why, Some(ran), turn)
            }
        }
    }

    fn end_run(&mut self, task: Digest) {
        if let Some(file) = self.files.get_mut(&task) {
            file.run = Run::None;
            file.progress = None;
        }
    }

    fn give_up(
        &mut self,
        task: Digest,
        view: &View,
        (code, message): (Code, &str),
        ran: Option<&Ran>,
        turn: &mut Turn<'_>,
    ) -> Result<bool> {
        let usage = self.receipt(view, ran, turn)?;
        let key = self.key.clone();
        let wish = steps::fail(&Self::cx(&key, turn), view, code, message, &usage)?;
        self.end_run(task);
        self.act(task, wish, turn)?;
        Ok(true)
    }

    /// Only after nothing of the run is left may CANCELLED be written (design 10.3).
    fn stop_or_confirm(
        &mut self,
        task: Digest,
        view: &View,
        idle: bool,
        turn: &mut Turn<'_>,
    ) -> Result<bool> {
        if self.stop(task, turn) || !idle {
            return Ok(false);
        }
        let run = self.files.get(&task).map(|file| file.run.clone()).unwrap_or_default();
        let ran = match &run {
            Run::Over(ran) => Some(&**ran),
            _ => None,
        };
        let usage = self.receipt(view, ran, turn)?;
        let key = self.key.clone();
        let attestation =
            ran.map(|ran| steps::attest(&mut Self::cx(&key, turn), view, ran, None)).transpose()?;
        let wish = steps::cancelled(&usage, attestation.as_ref())?;
        self.end_run(task);
        self.act(task, wish, turn)?;
        Ok(true)
    }

    /// Stops the run of a task; whether there is one.
    pub(super) fn stop(&mut self, task: Digest, turn: &mut Turn<'_>) -> bool {
        let Some(file) = self.files.get_mut(&task) else { return false };
        let Run::Running { held, stopping } = file.run else { return false };
        if !stopping {
            file.run = Run::Running { held, stopping: true };
            turn.out.actions.push(Action::Stop { task });
        }
        true
    }

    /// Puts this owner's approval of a raised budget into the log.
    pub(super) fn raise(
        &mut self,
        task: Digest,
        view: &View,
        metric: &'static str,
        limit: u64,
        turn: &mut Turn<'_>,
    ) -> Result<Raise> {
        let contract_digest = view.contract_digest().ok_or_else(super::unknown)?;
        // Both owners must approve the same target, so it follows from what both know: twice the limit.
        let to = limit.saturating_mul(2).max(limit.saturating_add(1));
        let target =
            Target::BudgetOverrun { contract_digest, metric: metric.to_owned(), from: limit, to };
        let digest = target.digest()?;
        if let Some(said) = self.files.get(&task).and_then(|file| file.raises.get(&digest)) {
            return Ok(*said);
        }
        let (said, now) = match self.gate(task, view, &target, turn)? {
            Answer::Wait => return Ok(Raise::Waits),
            Answer::No(_) => (Raise::Denied, Raise::Denied),
            Answer::Yes(receipt) => {
                self.act(task, steps::approve(&receipt, &target)?, turn)?;
                (Raise::Waits, Raise::Made)
            }
        };
        self.files.entry(task).or_default().raises.insert(digest, said);
        Ok(now)
    }
}

/// What has become of a raise of the budget on this side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Raise {
    /// Just put into the log.
    Made,
    /// For an owner: this one, or, once it has said yes, the other.
    Waits,
    /// This owner said no.
    Denied,
}

/// The metric that is used up, with its limit.
pub(super) fn exceeded(alarm: Alarm) -> Option<(&'static str, u64)> {
    match alarm {
        Alarm::Exceeded { metric, limit, .. } => Some((metric, limit)),
        Alarm::Warning { .. } => None,
    }
}
