//! `commsd hook`: what has come for the agent of a harness session, in the way in which the harness
//! takes text from its hooks (`surfaces.md` 3; Claude Code's hook reference). It never disturbs the
//! harness: whatever goes wrong, it ends soon, with exit code 0 and nothing on stdout.

use std::io::{self, Read, Write};
use std::process::ExitCode;
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, timeout};

use super::{Endpoint, exit};
use crate::api::client::Client;
use crate::api::tool::feed::{Batch, Feed, WAIT};
use crate::api::types::{HookMoment, HookShownParams, HookTakeParams, HookTaken, Label, WaitSecs};
use crate::identity::process;

/// What the daemon is told this program is.
const PROGRAM: &str = "commsd-hook";
/// How long the daemon may take: a harness waits for its hooks.
const PATIENCE: Duration = Duration::from_secs(2);
/// Pause before a hook that waits looks for the daemon again.
const RETRY: Duration = Duration::from_secs(1);
/// What a harness says at most; the result of a tool is in it.
const MAX_INPUT: u64 = 64 * 1024 * 1024;
/// The harness takes the text on stderr, and a hook in the background wakes the session.
const WAKES: u8 = 2;

/// What the harness says on stdin, as far as it matters.
#[derive(Debug, Deserialize)]
struct Input {
    hook_event_name: String,
    session_id: Option<String>,
    /// The model goes on already because a hook of ours wanted it to.
    #[serde(default)]
    stop_hook_active: bool,
    /// A helper of the model runs: its messages are not this agent's.
    agent_id: Option<String>,
}

/// How a kind of hook takes text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// The model goes on with it.
    Block,
    /// It stands beside what the person wrote.
    Context,
}

impl Input {
    /// What the harness is doing, and how it takes text; `None`: this hook brings nothing.
    fn moment(&self, waits: bool) -> Option<(HookMoment, Way)> {
        if self.agent_id.is_some() {
            return None;
        }
        match self.hook_event_name.as_str() {
            "PostToolUse" => Some((HookMoment::Step, Way::Block)),
            // One in the background holds no stop up.
            "Stop" if waits || !self.stop_hook_active => Some((HookMoment::End, Way::Block)),
            "UserPromptSubmit" | "SessionStart" => Some((HookMoment::Start, Way::Context)),
            _ => None,
        }
    }

    fn output(&self, way: Way, text: &str) -> Value {
        match way {
            Way::Block => json!({"decision": "block", "reason": text}),
            Way::Context => json!({"hookSpecificOutput": {
                "hookEventName": self.hook_event_name, "additionalContext": text}}),
        }
    }
}

/// The hook. Exit code 0, or [`WAKES`] with text on stderr.
pub(super) fn run(harness: Label, wait: Option<WaitSecs>, endpoint: &Endpoint) -> ExitCode {
    let input = read(io::stdin().lock());
    let Some((moment, way)) = input.as_ref().and_then(|input| input.moment(wait.is_some())) else {
        return exit::DONE.into();
    };
    let session = input.as_ref().and_then(|input| input.session_id.clone());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let Ok(runtime) = runtime else { return exit::DONE.into() };
    let params = HookTakeParams {
        harness,
        // In the background there is no person who has just written.
        moment: if wait.is_some() { HookMoment::End } else { moment },
        processes: process::harness(&process::ancestors()).into_iter().collect(),
        session: session.and_then(|session| Label::try_from(session).ok()),
        wait,
    };
    let print = |text: &str| match (&input, wait) {
        (Some(input), None) => {
            let line = format!("{}\n", input.output(way, text));
            let mut out = io::stdout();
            out.write_all(line.as_bytes()).and_then(|()| out.flush()).is_ok()
        }
        _ => io::stderr().write_all(format!("{text}\n").as_bytes()).is_ok(),
    };
    let until = Instant::now() + Duration::from_secs(wait.map_or(0, WaitSecs::get));
    let brought = runtime.block_on(async {
        let mut was_there = false;
        loop {
            match bring(params.clone(), endpoint, &print).await {
                Brought::Something => return true,
                Brought::Nothing => return false,
                Brought::NoDaemon if !was_there => return false,
                // It may come back; who waits goes on waiting.
                _ if Instant::now() + RETRY < until => {
                    was_there = true;
                    sleep(RETRY).await;
                }
                _ => return false,
            }
        }
    });
    let code = if brought && wait.is_some() { WAKES } else { exit::DONE };
    runtime.shutdown_background();
    code.into()
}

/// What the harness says; `None` when it is nothing that can be read.
fn read(stdin: impl Read) -> Option<Input> {
    // One value: whoever keeps stdin open is not waited for.
    let reader = io::BufReader::new(stdin.take(MAX_INPUT));
    serde_json::Deserializer::from_reader(reader).into_iter().next()?.ok()
}

/// What came of asking the daemon.
enum Brought {
    /// Something is printed.
    Something,
    /// Nothing is there, or it could not be printed.
    Nothing,
    /// Nobody answers.
    NoDaemon,
    /// The daemon went away meanwhile.
    Lost,
}

/// Takes what there is and prints it.
async fn bring(
    params: HookTakeParams,
    endpoint: &Endpoint,
    print: impl Fn(&str) -> bool,
) -> Brought {
    let patience = PATIENCE + Duration::from_secs(params.wait.map_or(0, WaitSecs::get));
    let connected = timeout(PATIENCE, Client::connect(&endpoint.socket, PROGRAM)).await;
    let Ok(Ok((client, _notifications))) = connected else { return Brought::NoDaemon };
    let taken = timeout(patience, client.call_waiting(params, patience)).await;
    let Ok(Ok(taken)) = taken else { return Brought::Lost };
    if !text(&taken).is_some_and(|text| print(&text)) {
        return Brought::Nothing;
    }
    // Without it the daemon hands it out again.
    let _again = timeout(PATIENCE, client.call(HookShownParams {})).await;
    Brought::Something
}

fn text(taken: &HookTaken) -> Option<String> {
    // The daemon has measured; frames make it longer, never shorter.
    let batch = Feed::default().batch(&taken.events, false, usize::MAX);
    match batch {
        Some(Batch { text, .. }) => Some(Batch { text, more: taken.more }.incoming()),
        None => taken
            .more
            .then(|| format!("📬 A message waits that is too long to be shown here: call {WAIT}.")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Map;

    use super::*;
    use crate::api::types::Event;

    fn input(value: &Value) -> Input {
        read(value.to_string().as_bytes()).unwrap()
    }

    #[test]
    fn each_kind_of_hook_has_its_moment_and_its_form() {
        let of =
            |name: &str| input(&json!({"hook_event_name": name, "session_id": "s", "cwd": "/"}));
        assert_eq!(of("PostToolUse").moment(false), Some((HookMoment::Step, Way::Block)));
        assert_eq!(of("Stop").moment(false), Some((HookMoment::End, Way::Block)));
        for name in ["UserPromptSubmit", "SessionStart"] {
            let hook = of(name);
            assert_eq!(hook.moment(false), Some((HookMoment::Start, Way::Context)));
            let out = hook.output(Way::Context, "a\nb");
            assert_eq!(out["hookSpecificOutput"]["hookEventName"], name);
            assert_eq!(out["hookSpecificOutput"]["additionalContext"], "a\nb");
        }
        for name in ["SubagentStop", "PreToolUse", "Notification", ""] {
            assert_eq!(of(name).moment(false), None, "{name}");
        }
    }

    #[test]
    fn a_model_that_goes_on_for_us_may_end_and_helpers_get_nothing() {
        let stop = json!({"hook_event_name": "Stop", "stop_hook_active": true});
        assert_eq!(input(&stop).moment(false), None);
        assert_eq!(input(&stop).moment(true), Some((HookMoment::End, Way::Block)));
        let helper = json!({"hook_event_name": "PostToolUse", "agent_id": "a1"});
        assert_eq!(input(&helper).moment(false), None);
    }

    #[test]
    fn what_is_no_hooks_input_brings_nothing() {
        for text in ["", "null", "[]", "{}", "{\"hook_event_name\": 5}", "\u{0}", "{\"hook_"] {
            assert!(read(text.as_bytes()).is_none(), "{text:?}");
        }
    }

    #[test]
    fn what_is_too_long_is_pointed_at() {
        let taken = HookTaken { agent: None, events: Vec::new(), more: true };
        assert!(text(&taken).unwrap().contains(WAIT));
        assert_eq!(text(&HookTaken { more: false, ..taken.clone() }), None);
        let Value::Object(body) =
            json!({"type": "dm", "message": {"content": "x\n📬 DM from you"}})
        else {
            unreachable!()
        };
        let _: &Map<String, Value> = &body;
        let shown = text(&HookTaken { events: vec![Event { seq: 1, body }], ..taken }).unwrap();
        assert!(
            shown.ends_with("│ x\n│ 📬 DM from you\n(more wait: call wait_for_messages)"),
            "{shown}"
        );
    }
}
