//! Codex CLI: `codex exec --json -`, the prompt on stdin. It prints one event a line; the output is
//! the text of the last `agent_message`, the tokens those of the `turn.completed` events. Shapes as
//! its documentation of the non-interactive mode shows them.

use serde_json::Value;

use super::broker::Broker;
use super::dialogue::{Dialogue, Done, Lines, Step, count, parse_answer, tokens, unknown};
use super::{AdapterOptions, Progress, bounded};
use crate::acp::code::{Code, Error};
use crate::acp::json;
use crate::acp::objects::Metrics;
use crate::acp::value::Count;

/// Most bytes of an event that is looked into.
const EVENT_MAX: usize = 8 << 20;

/// Variable that holds the run's token.
const TOKEN: &str = "OPENAI_API_KEY";

/// Arguments after the program.
pub(super) fn arguments(options: &AdapterOptions, broker: Option<&Broker>) -> Vec<String> {
    let mut arguments: Vec<String> =
        ["exec", "--json", "--skip-git-repo-check"].map(str::to_owned).into();
    if let Some(model) = &options.model {
        arguments.extend(["--model".to_owned(), model.clone()]);
    }
    if let Some(broker) = broker {
        // A provider of its own, as its configuration describes them; the token stays out of here.
        let provider = format!(
            "model_providers.commsd={{name=\"commsd\",base_url=\"{}\",env_key=\"{TOKEN}\",wire_api=\"responses\"}}",
            broker.url()
        );
        arguments.extend(["-c", "model_provider=\"commsd\"", "-c", &provider].map(str::to_owned));
    }
    arguments.extend(options.extra_args.iter().cloned());
    arguments.push("-".to_owned());
    arguments
}

/// The run's token in the place of a key.
pub(super) fn environment(broker: Option<&Broker>) -> Option<(String, String)> {
    broker.map(|broker| (TOKEN.to_owned(), broker.token.text().to_owned()))
}

/// One run.
#[derive(Debug)]
pub(super) struct Codex {
    prompt: Vec<u8>,
    lines: Lines,
    answer: Option<String>,
    failed: bool,
    input_tokens: u64,
    output_tokens: u64,
    tool_calls: u64,
    turns: u64,
}

impl Codex {
    /// With this prompt.
    pub fn new(prompt: Vec<u8>) -> Self {
        Self {
            prompt,
            lines: Lines::default(),
            answer: None,
            failed: false,
            input_tokens: 0,
            output_tokens: 0,
            tool_calls: 0,
            turns: 0,
        }
    }

    fn event(&mut self, event: &Value) -> Option<Step> {
        let text = |value: &Value, name: &str| {
            value.get(name).and_then(Value::as_str).unwrap_or_default().to_owned()
        };
        let kind = text(event, "type");
        match kind.as_str() {
            "turn.completed" => {
                let usage = event.get("usage")?;
                self.turns += 1;
                self.input_tokens = self.input_tokens.saturating_add(count(usage, "input_tokens"));
                self.output_tokens =
                    self.output_tokens.saturating_add(count(usage, "output_tokens"));
                Some(self.tell("turn", ""))
            }
            // An error event may be one that it recovers from; a failed turn is the end.
            "turn.failed" => {
                self.failed = true;
                None
            }
            "item.completed" => {
                let item = event.get("item")?;
                let kind = text(item, "type");
                match kind.as_str() {
                    "agent_message" => {
                        self.answer = Some(text(item, "text"));
                        None
                    }
                    "command_execution" | "mcp_tool_call" | "web_search" | "file_change" => {
                        self.tool_calls = self.tool_calls.saturating_add(1);
                        // What it runs is its business and the owner's, not the requester's.
                        Some(self.tell(&kind, ""))
                    }
                    "reasoning" => Some(self.tell(&kind, "")),
                    _ => None,
                }
            }
            _ => None,
        }
    }

    fn tell(&self, step: &str, message: &str) -> Step {
        Step::Tell(Progress {
            percent: None,
            step: bounded(step),
            message: bounded(message),
            metrics: self.metrics(),
        })
    }
}

impl Dialogue for Codex {
    fn open(&mut self) -> Vec<Step> {
        vec![Step::Send(std::mem::take(&mut self.prompt)), Step::Close]
    }

    fn take(&mut self, bytes: &[u8]) -> Vec<Step> {
        let lines = self.lines.take(bytes);
        let events = lines.iter().filter_map(|line| json::parse(line, EVENT_MAX).ok());
        events.collect::<Vec<_>>().iter().filter_map(|event| self.event(event)).collect()
    }

    fn finish(&mut self) -> Result<Done, Error> {
        if self.failed {
            return Err(Error::new(Code::AdapterFailed, "Codex reports a failed turn"));
        }
        let answer = self.answer.as_deref().unwrap_or_default();
        Ok(Done { output: parse_answer(answer)?, ..Done::default() })
    }

    fn metrics(&self) -> Metrics {
        let known =
            if self.turns == 0 { unknown() } else { tokens(self.input_tokens, self.output_tokens) };
        Metrics { tool_calls: Some(Count::clamped(self.tool_calls)), ..known }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVENTS: &str = r#"{"type":"thread.started","thread_id":"0199a213-81c0-7800-8aa1-bbab2a035a53"}
{"type":"turn.started"}
{"type":"item.completed","item":{"id":"item_0","type":"reasoning","text":"**Looking**"}}
{"type":"item.started","item":{"id":"item_1","type":"command_execution","command":"bash -lc ls","aggregated_output":"","exit_code":null,"status":"in_progress"}}
{"type":"item.completed","item":{"id":"item_1","type":"command_execution","command":"bash -lc ls","aggregated_output":"docs\n","exit_code":0,"status":"completed"}}
{"type":"item.completed","item":{"id":"item_3","type":"agent_message","text":"{\"ok\":true}"}}
{"type":"turn.completed","usage":{"input_tokens":24763,"cached_input_tokens":24448,"output_tokens":122}}
"#;

    #[test]
    fn the_last_message_is_the_output_and_turns_have_tokens() {
        let mut codex = Codex::new(Vec::new());
        let mut steps = Vec::new();
        for piece in EVENTS.as_bytes().chunks(7) {
            steps.extend(codex.take(piece));
        }
        let told: Vec<String> = steps
            .iter()
            .map(|step| match step {
                Step::Tell(progress) => progress.step.clone(),
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(told, ["reasoning", "command_execution", "turn"]);
        assert_eq!(codex.finish().unwrap().output, serde_json::json!({"ok": true}));
        let Metrics { input_tokens, output_tokens, total_tokens, tool_calls } = codex.metrics();
        let counts = [input_tokens, output_tokens, total_tokens, tool_calls];
        assert_eq!(counts.map(|count| count.unwrap().get()), [24763, 122, 24885, 1]);
    }

    #[test]
    fn a_failed_turn_and_no_message_are_failures() {
        let mut codex = Codex::new(Vec::new());
        codex.take(b"{\"type\":\"turn.failed\",\"error\":{\"message\":\"quota\"}}\n");
        assert_eq!(codex.finish().unwrap_err().code(), Code::AdapterFailed);
        assert_eq!(codex.metrics().total_tokens, None);
        assert_eq!(Codex::new(Vec::new()).finish().unwrap_err().code(), Code::OutputNotJson);
    }
}
