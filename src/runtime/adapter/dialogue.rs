//! What an adapter makes of a program's output, sans-I/O: bytes in; progress, bytes for its stdin and
//! in the end a result out.

use serde_json::Value;

use super::{Progress, bounded};
use crate::acp::code::{Code, Error};
use crate::acp::json;
use crate::acp::objects::{Metrics, UsageSource};
use crate::acp::value::{Count, Name};

/// Most bytes of a program's stdout where the output is only a part of it: events of a long run, with
/// everything that its commands printed.
pub(super) const STREAM_MAX: u64 = 64 << 20;
/// Most bytes of one line of it. A longer line is passed over.
const LINE_MAX: usize = 8 << 20;

/// What is to be done next.
#[derive(Debug, PartialEq)]
pub(super) enum Step {
    /// Tell the progress.
    Tell(Progress),
    /// Send to the program's stdin.
    Send(Vec<u8>),
    /// Close its stdin.
    Close,
}

/// A result and what is known of how it came about.
#[derive(Debug, Default)]
pub(super) struct Done {
    /// The output.
    pub output: Value,
    /// Tokens and tool calls.
    pub metrics: Option<Metrics>,
    /// The model.
    pub model: Option<Name>,
}

/// One run's conversation.
pub(super) trait Dialogue: Send {
    /// What is done at the start.
    fn open(&mut self) -> Vec<Step>;

    /// Takes bytes of the program's stdout.
    fn take(&mut self, bytes: &[u8]) -> Vec<Step>;

    /// Whether the result is there, however the program ends.
    fn is_done(&self) -> bool {
        false
    }

    /// The result, once the program has ended.
    fn finish(&mut self) -> Result<Done, Error>;

    /// What was used until now, also by a run that failed.
    fn metrics(&self) -> Metrics {
        unknown()
    }
}

/// No metric known.
pub(super) const fn unknown() -> Metrics {
    Metrics { input_tokens: None, output_tokens: None, total_tokens: None, tool_calls: None }
}

/// Where the numbers come from.
pub(super) fn source(metrics: &Metrics) -> UsageSource {
    match metrics.total_tokens {
        Some(_) => UsageSource::Provider,
        None => UsageSource::Metered,
    }
}

/// Tokens in and out.
pub(super) fn tokens(input: u64, output: u64) -> Metrics {
    Metrics {
        input_tokens: Some(Count::clamped(input)),
        output_tokens: Some(Count::clamped(output)),
        total_tokens: Some(Count::clamped(input.saturating_add(output))),
        tool_calls: None,
    }
}

/// The member `name` as a count, 0 if there is none.
pub(super) fn count(value: &Value, name: &str) -> u64 {
    value.get(name).and_then(Value::as_u64).unwrap_or(0)
}

/// A strict JSON text.
pub(super) fn parse(bytes: &[u8]) -> Result<Value, Error> {
    json::parse(bytes, usize::try_from(STREAM_MAX).unwrap_or(usize::MAX))
        .map_err(|_| Error::new(Code::OutputNotJson, "the output is not one JSON text"))
}

/// The JSON text of a model's answer, which may stand in a fence of Markdown.
pub(super) fn parse_answer(answer: &str) -> Result<Value, Error> {
    let text = answer.trim();
    let fenced = || {
        let inner = text.strip_prefix("```")?.strip_suffix("```")?;
        Some(inner.strip_prefix("json").unwrap_or(inner))
    };
    parse(fenced().unwrap_or(text).as_bytes())
}

/// A line of progress: { percent?, step?, message?, metrics? { inputTokens?, … } }. What does not fit
/// is left out; a line that is no object is none.
pub(super) fn progress(line: &[u8]) -> Option<Progress> {
    /// A line is at most 4 KiB already.
    const MOST: usize = 8 << 10;
    let value = json::parse(line, MOST).ok().filter(Value::is_object)?;
    let text = |name: &str| bounded(value.get(name).and_then(Value::as_str).unwrap_or_default());
    let metric = |name: &str| {
        let number = value.get("metrics")?.get(name)?.as_u64()?;
        Some(Count::clamped(number))
    };
    let percent = value.get("percent").and_then(Value::as_u64);
    Some(Progress {
        percent: percent.and_then(|percent| u8::try_from(percent.min(100)).ok()),
        step: text("step"),
        message: text("message"),
        metrics: Metrics {
            input_tokens: metric("inputTokens"),
            output_tokens: metric("outputTokens"),
            total_tokens: metric("totalTokens"),
            tool_calls: metric("toolCalls"),
        },
    })
}

/// Splits a stream into lines; one that is too long is dropped as a whole.
#[derive(Debug, Default)]
pub(super) struct Lines {
    partial: Vec<u8>,
    dropping: bool,
}

impl Lines {
    /// Takes bytes, gives the lines that they complete.
    pub fn take(&mut self, bytes: &[u8]) -> Vec<Vec<u8>> {
        let mut lines = Vec::new();
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            let (text, ends) = match piece.strip_suffix(b"\n") {
                Some(text) => (text, true),
                None => (piece, false),
            };
            if self.partial.len().saturating_add(text.len()) > LINE_MAX {
                self.dropping = true;
                self.partial = Vec::new();
            }
            if !self.dropping {
                self.partial.extend_from_slice(text);
            }
            if ends {
                let line = std::mem::take(&mut self.partial);
                if !std::mem::take(&mut self.dropping) {
                    lines.push(line);
                }
            }
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_split_wherever_the_bytes_are() {
        let mut lines = Lines::default();
        assert_eq!(lines.take(b"one\ntw"), vec![b"one".to_vec()]);
        assert_eq!(lines.take(b"o\n\nthr"), vec![b"two".to_vec(), Vec::new()]);
        lines.take(&vec![b'x'; LINE_MAX]);
        assert_eq!(lines.take(b"end of it\nfour\n"), vec![b"four".to_vec()]);
    }

    #[test]
    fn progress_is_bounded_and_what_does_not_fit_left_out() {
        let line = format!(
            r#"{{"percent":250,"step":"a\u001b[31m","message":"{}","metrics":{{"inputTokens":7,"toolCalls":-1}}}}"#,
            "m".repeat(2_000)
        );
        let told = progress(line.as_bytes()).unwrap();
        assert_eq!((told.percent, told.step.as_str()), (Some(100), "a [31m"));
        assert_eq!(told.message.len(), TEXT);
        assert_eq!(told.metrics.input_tokens, Some(Count::clamped(7)));
        assert_eq!(told.metrics.tool_calls, None);
        assert_eq!(progress(b"[1]"), None);
        assert_eq!(progress(b"50%"), None);
    }

    const TEXT: usize = super::super::TEXT_MAX;

    #[test]
    fn an_answer_may_stand_in_a_fence() {
        assert_eq!(parse_answer(" {\"a\":1}\n").unwrap(), serde_json::json!({"a": 1}));
        assert_eq!(parse_answer("```json\n[1]\n```").unwrap(), serde_json::json!([1]));
        assert_eq!(parse_answer("```\n2\n```\n").unwrap(), serde_json::json!(2));
        for text in ["Here it is: {}", "", "```json {} ``` and more", "{} {}"] {
            assert_eq!(parse_answer(text).unwrap_err().code(), Code::OutputNotJson, "{text}");
        }
    }
}
