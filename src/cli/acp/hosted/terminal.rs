//! The person at the terminal: shown what happens, asked what the gates ask. Where there is no
//! terminal, questions wait for `acp approvals`.

use std::io::{IsTerminal as _, Write as _};
use std::path::Path;
use std::sync::mpsc::{SyncSender, sync_channel};

use rustix::termios::{QueueSelector, tcflush};
use tokio::sync::mpsc;

use super::{Place, Surroundings};
use crate::acp::objects::Decision;
use crate::acp::owner::{Given, Question};
use crate::api::acp::{AcpCall, AcpNews, Answer};
use crate::codec::text::escape_untrusted;
use crate::daemon::acp::Office;
use crate::daemon::acp::delegation::{Standing, Watcher};
use crate::daemon::acp::service::{asked, moved, quiet};

/// Questions that wait for the person; a flood of them is answered from `acp approvals`.
const MAX_WAITING: usize = 32;

/// How often a question is put to somebody who answers something else; then it is a no.
const MAX_ASKED: usize = 5;

/// Bytes of an answer.
const MAX_ANSWER: usize = 256;

/// The reason of an answer that was given here.
const HERE: &str = "at the terminal";

/// A question, and what it asks.
type Asked = (String, Vec<String>);

/// What is shown, and how questions are put.
pub(super) struct Terminal {
    questions: Option<SyncSender<Asked>>,
    /// What the commands that answer from elsewhere need besides.
    flags: String,
    /// What takes an offer back: `{}` is the task's id.
    takes_back: &'static str,
    progress: bool,
}

/// Prints a line on stderr; a closed one is no reason to stop.
pub(super) fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// What a program wrote before it failed, line by line behind a bar.
pub(super) fn quoted(complaint: &str) -> String {
    let lines = complaint.lines().map(|line| format!("│ {}\n", escape_untrusted(line)));
    format!("the program's last words on stderr:\n{}", lines.collect::<String>())
}

impl Terminal {
    /// A terminal whose answers go to `office`, the one of `key`.
    pub(super) fn new(office: &Office, key: &Path, place: &Place, progress: bool) -> Self {
        let (say_so, said) = mpsc::channel::<(String, bool)>(1);
        tokio::spawn(hand_in(office.clone(), said));
        let questions = ask_from_now_on(move |id, yes| {
            // An office that has ended asks nothing more.
            let _ = say_so.blocking_send((id, yes));
        });
        let path = |path: &Path| escape_untrusted(&path.to_string_lossy());
        let flags = format!(" --key {} --state-dir {}", path(key), path(&place.state_dir));
        Self { questions, flags, takes_back: "Ctrl-C", progress }
    }

    /// A terminal whose answers go to the daemon.
    pub(super) fn of_daemon(around: &Surroundings, progress: bool) -> Self {
        let around = around.clone();
        let questions = ask_from_now_on(move |id, approve| {
            let answer = Answer { id, approve, reason: HERE.into() };
            if around.ask(AcpCall::Answer(answer), |_| {}).is_err() {
                too_late();
            }
        });
        Self { questions, flags: String::new(), takes_back: "`commsd acp cancel {}`", progress }
    }

    /// Shows what has happened; puts a question.
    pub(super) fn told(&self, news: AcpNews) {
        match news {
            AcpNews::Moved { task_id, status, percent, step, message } if self.progress => {
                let percent = percent.map(|percent| format!(" {percent}%")).unwrap_or_default();
                let [id, status, step, message] =
                    [task_id, status, step, message].map(|word| escape_untrusted(&word));
                say(format!("{id} {status}{percent} {step} {message}").trim_end());
            }
            AcpNews::Moved { .. } => {}
            AcpNews::Quiet { task_id } => {
                let id = escape_untrusted(&task_id);
                let takes_back = self.takes_back.replace("{}", &id);
                say(&format!(
                    "{id} no answer yet: the worker is away, or does not know you, or its invite is \
                     used up, over or taken back. {takes_back} takes the offer back"
                ));
            }
            AcpNews::Asked { id, question, about, expires_at, .. } => {
                // Behind a bar, so that nothing of it can look like a line of ours.
                let about = about.iter().map(|line| format!("│ {}", escape_untrusted(line)));
                let question = escape_untrusted(&question);
                let lines: Vec<String> = about.chain([question]).collect();
                if let Some(questions) = &self.questions
                    && questions.try_send((id.clone(), lines.clone())).is_ok()
                {
                    return;
                }
                let (id, flags, question) = (escape_untrusted(&id), &self.flags, lines.join("\n"));
                say(&format!(
                    "waits for your answer until {expires_at}:\n{question}\n  \
                     commsd acp approvals approve {id}{flags}\n  \
                     commsd acp approvals deny {id}{flags}"
                ));
            }
        }
    }
}

impl Watcher for Terminal {
    fn moved(&self, standing: &Standing) {
        self.told(moved(standing));
        if let Some(complaint) = standing.complaint.as_ref().filter(|_| standing.over) {
            say(quoted(complaint).trim_end());
        }
    }

    fn asked(&self, question: &Question) {
        self.told(asked(question));
    }

    fn quiet(&self, standing: &Standing) {
        self.told(quiet(standing));
    }
}

fn too_late() {
    say("too late: the question is not open any more");
}

/// A thread that puts one question after the other: reading a terminal cannot be given up. `None`
/// where there is no terminal.
fn ask_from_now_on(
    mut answer: impl FnMut(String, bool) + Send + 'static,
) -> Option<SyncSender<Asked>> {
    if !std::io::stdin().is_terminal() || !std::io::stderr().is_terminal() {
        return None;
    }
    let (ask, questions) = sync_channel::<Asked>(MAX_WAITING);
    std::thread::spawn(move || {
        while let Ok((id, lines)) = questions.recv() {
            let yes = lines.split_last().is_some_and(|(question, about)| {
                about.iter().for_each(|line| say(line));
                says_yes(question)
            });
            answer(id, yes);
        }
    });
    Some(ask)
}

/// Asks until the answer is yes or no. What was typed before the question was seen is no answer to
/// it.
fn says_yes(question: &str) -> bool {
    let stdin = std::io::stdin();
    // A terminal that cannot forget is asked all the same: what it has kept shows.
    let _kept = tcflush(&stdin, QueueSelector::IFlush);
    for _ in 0..MAX_ASKED {
        let mut stderr = std::io::stderr();
        let _ = write!(stderr, "{question} [y/N] ");
        let _ = stderr.flush();
        let mut line = [0; MAX_ANSWER];
        // Read past the buffer of the standard library, which may hold older lines.
        let read = rustix::io::read(&stdin, &mut line).unwrap_or(0);
        let line = String::from_utf8_lossy(line.get(..read).unwrap_or_default());
        match line.trim() {
            "y" | "Y" | "yes" => return true,
            // The end of the input is no yes, either.
            "" | "n" | "N" | "no" => return false,
            _ => {}
        }
    }
    false
}

/// Hands answers in to an office.
async fn hand_in(office: Office, mut said: mpsc::Receiver<(String, bool)>) {
    while let Some((id, yes)) = said.recv().await {
        let decision = if yes { Decision::Approved } else { Decision::Denied };
        let given = Given::Word(decision, HERE.into());
        let answered = office.act(move |owner, now, entropy| {
            owner.answer(&id, given, now, entropy).map(|out| ((), out))
        });
        if answered.await.is_err() {
            too_late();
        }
    }
}
