//! The person at the terminal: shown what happens, asked what the gates ask. Where there is no
//! terminal, questions wait for `acp approvals`.

use std::io::{BufRead as _, IsTerminal as _, Write as _};
use std::path::PathBuf;
use std::sync::mpsc::{SyncSender, sync_channel};

use tokio::sync::mpsc;

use crate::acp::objects::{Decision, Gate, Target};
use crate::acp::owner::{Given, Question};
use crate::api::acp::AcpNews;
use crate::codec::text::escape_untrusted;
use crate::daemon::acp::Office;
use crate::daemon::acp::delegation::{Standing, Watcher};

/// Questions that wait for the person; a flood of them is answered from `acp approvals`.
const MAX_WAITING: usize = 32;

/// What is shown, and how questions are put.
pub(super) struct Terminal {
    questions: Option<SyncSender<Question>>,
    /// The key, as it was named: for the hint how to answer elsewhere.
    key: PathBuf,
    progress: bool,
}

/// Prints a line on stderr; a closed one is no reason to stop.
pub(super) fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Shows what the daemon tells of a task that is waited for: questions, and with `progress` its
/// course.
pub(super) fn told(news: &AcpNews, progress: bool) {
    match news {
        AcpNews::Moved { task_id, status, percent, step, message } if progress => {
            let percent = percent.map(|percent| format!(" {percent}%")).unwrap_or_default();
            let words = [task_id, status, step, message].map(|word| escape_untrusted(word));
            let [id, status, step, message] = words;
            say(format!("{id} {status}{percent} {step} {message}").trim_end());
        }
        AcpNews::Moved { .. } => {}
        AcpNews::Asked { id, gate, peer, title, expires_at, .. } => {
            let [id, gate, peer, title] =
                [id, gate, peer, title].map(|word| escape_untrusted(word));
            say(&format!(
                "waits for your answer until {expires_at}: {gate} of \"{title}\" ({peer})\n  \
                 commsd acp approvals approve {id}\n  commsd acp approvals deny {id}"
            ));
        }
    }
}

impl Terminal {
    /// A terminal whose answers go to `office`.
    pub(super) fn new(office: &Office, key: PathBuf, progress: bool) -> Self {
        let there = std::io::stdin().is_terminal() && std::io::stderr().is_terminal();
        let questions = there.then(|| ask_from_now_on(office.clone()));
        Self { questions, key, progress }
    }

    /// Asks nobody: with `--auto-accept` or from a pipe.
    pub(super) fn silent(key: PathBuf, progress: bool) -> Self {
        Self { questions: None, key, progress }
    }
}

impl Watcher for Terminal {
    fn moved(&self, standing: &Standing) {
        if !self.progress {
            return;
        }
        let told = standing.progress.as_ref().filter(|_| !standing.is_over());
        let progress = told.map(|progress| {
            let percent = progress.percent.map(|percent| format!(" {}%", percent.get()));
            let words = [&*progress.step, &*progress.message].map(escape_untrusted);
            format!("{} {}", percent.unwrap_or_default(), words.join(" ").trim())
        });
        let id = standing.task_id.as_str();
        say(format!("{id} {}{}", standing.status(), progress.unwrap_or_default()).trim_end());
    }

    fn asked(&self, question: &Question) {
        if let Some(questions) = &self.questions
            && questions.try_send(question.clone()).is_ok()
        {
            return;
        }
        say(&format!(
            "waits for your answer until {}: {}\n  commsd acp approvals approve {id} --key {key}\n  \
             commsd acp approvals deny {id} --key {key}",
            question.expires_at.iso(),
            sentence(question),
            id = question.id(),
            key = escape_untrusted(&self.key.to_string_lossy()),
        ));
    }
}

/// What a question asks, in a line. Titles are another owner's words.
pub(super) fn sentence(question: &Question) -> String {
    let title = escape_untrusted(&question.title);
    let peer = question.peer;
    match (&question.target, question.gate()) {
        (Target::BudgetOverrun { metric, from, to, .. }, _) => {
            format!("raise {metric} of \"{title}\" from {from} to {to}? ({peer})")
        }
        (Target::ExternalSend { resource, action, .. }, _) => {
            format!("let {peer} use {action} on {resource} for \"{title}\"?")
        }
        (_, Gate::ContractAcceptance) => format!("accept the task \"{title}\" of {peer}?"),
        (_, Gate::FinalAcceptance) => {
            format!("take the result of \"{title}\", which has passed its checks? ({peer})")
        }
        (_, gate) => format!("{} for \"{title}\"? ({peer})", gate.as_str()),
    }
}

/// A thread that puts one question after the other: reading a terminal cannot be given up.
fn ask_from_now_on(office: Office) -> SyncSender<Question> {
    let (ask, questions) = sync_channel::<Question>(MAX_WAITING);
    let (say_so, mut said) = mpsc::channel::<(Question, Given)>(1);
    std::thread::spawn(move || {
        while let Ok(question) = questions.recv() {
            let mut stderr = std::io::stderr();
            let _ = write!(stderr, "{} [y/N] ", sentence(&question));
            let _ = stderr.flush();
            let mut line = String::new();
            // The end of the input is no yes.
            let yes = std::io::stdin().lock().read_line(&mut line).is_ok()
                && matches!(line.trim(), "y" | "Y" | "yes");
            let decision = if yes { Decision::Approved } else { Decision::Denied };
            let given = Given::Word(decision, "at the terminal".into());
            if say_so.blocking_send((question, given)).is_err() {
                return;
            }
        }
    });
    tokio::spawn(async move {
        while let Some((question, given)) = said.recv().await {
            let id = question.id();
            let answered = office.act(move |owner, now, entropy| {
                owner.answer(&id, given, now, entropy).map(|out| ((), out))
            });
            if answered.await.is_err() {
                say("too late: the question is not open any more");
            }
        }
    });
    ask
}
