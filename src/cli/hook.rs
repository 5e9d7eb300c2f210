//! `commsd hook`: what has come for the agent of a harness session, in the way in which the harness
//! takes text from its hooks (`surfaces.md` 3; Claude Code's hook reference). It never disturbs the
//! harness: whatever goes wrong, it ends soon, with exit code 0 and nothing on stdout.

use std::io::{self, Read, Write};
use std::process::ExitCode;
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::timeout;

use super::{Endpoint, exit};
use crate::api::client::Client;
use crate::api::tool::feed::{Batch, Feed, WAIT};
use crate::api::types::{HookMoment, HookShownParams, HookTakeParams, HookTaken, Label, WaitSecs};
use crate::identity::process;

/// What the daemon is told this program is.
const PROGRAM: &str = "commsd-hook";
/// How long the daemon may take: a harness waits for its hooks.
const PATIENCE: Duration = Duration::from_secs(2);
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
    fn moment(&self) -> Option<(HookMoment, Way)> {
        if self.agent_id.is_some() {
            return None;
        }
        match self.hook_event_name.as_str() {
            "PostToolUse" => Some((HookMoment::Step, Way::Block)),
            "Stop" if !self.stop_hook_active => Some((HookMoment::End, Way::Block)),
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
    let Some((moment, way)) = input.as_ref().and_then(Input::moment) else {
        return exit::DONE.into();
    };
    let session = input.as_ref().and_then(|input| input.session_id.clone());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let Ok(runtime) = runtime else { return exit::DONE.into() };
    let params = HookTakeParams {
        harness,
        // In the background there is no person who has just written.
        moment: if wait.is_some() { HookMoment::End } else { moment },
        processes: process::ancestors().into_iter().map(|ancestor| ancestor.id).collect(),
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
    let brought = runtime.block_on(bring(params, endpoint, print));
    let code = if brought && wait.is_some() { WAKES } else { exit::DONE };
    runtime.shutdown_background();
    code.into()
}

/// What the harness says; `None` when it is nothing that can be read.
fn read(stdin: impl Read) -> Option<Input> {
    serde_json::from_reader(io::BufReader::new(stdin.take(MAX_INPUT))).ok()
}

/// Takes what there is and prints it. True when there was something, and it is printed.
async fn bring(params: HookTakeParams, endpoint: &Endpoint, print: impl Fn(&str) -> bool) -> bool {
    let patience = PATIENCE + Duration::from_secs(params.wait.map_or(0, WaitSecs::get));
    let connected = timeout(PATIENCE, Client::connect(&endpoint.socket, PROGRAM)).await;
    let Ok(Ok((client, _notifications))) = connected else { return false };
    let taken = timeout(patience, client.call_waiting(params, patience)).await;
    let Ok(Ok(taken)) = taken else { return false };
    let Some(text) = text(&taken) else { return false };
    if !print(&text) {
        return false;
    }
    // Without it the daemon hands it out again.
    let _again = timeout(PATIENCE, client.call(HookShownParams {})).await;
    true
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
        assert_eq!(of("PostToolUse").moment(), Some((HookMoment::Step, Way::Block)));
        assert_eq!(of("Stop").moment(), Some((HookMoment::End, Way::Block)));
        for name in ["UserPromptSubmit", "SessionStart"] {
            let hook = of(name);
            assert_eq!(hook.moment(), Some((HookMoment::Start, Way::Context)));
            let out = hook.output(Way::Context, "a\nb");
            assert_eq!(out["hookSpecificOutput"]["hookEventName"], name);
            assert_eq!(out["hookSpecificOutput"]["additionalContext"], "a\nb");
        }
        for name in ["SubagentStop", "PreToolUse", "Notification", ""] {
            assert_eq!(of(name).moment(), None, "{name}");
        }
    }

    #[test]
    fn a_model_that_goes_on_for_us_may_end_and_helpers_get_nothing() {
        let stop = json!({"hook_event_name": "Stop", "stop_hook_active": true});
        assert_eq!(input(&stop).moment(), None);
        let helper = json!({"hook_event_name": "PostToolUse", "agent_id": "a1"});
        assert_eq!(input(&helper).moment(), None);
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
