//! Tokens in the answers of model APIs: OpenAI's Chat Completions and Responses, Anthropic's Messages,
//! each whole or streamed as server-sent events. Shapes as their public documentation gives them.

use serde_json::Value;

use super::dialogue::{Lines, count};
use crate::acp::json;
use crate::acp::value::Name;

/// Most bytes of an answer that is looked into as a whole.
const ANSWER_MAX: usize = 16 << 20;

/// What one answer says it took, so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Seen {
    /// Tokens read, those from a cache included.
    pub input: u64,
    /// Tokens written.
    pub output: u64,
    /// Whether the answer says anything of tokens.
    pub told: bool,
    /// The model that answered.
    pub model: Option<Name>,
}

impl Seen {
    /// Takes an answer, or an event of one. Numbers within an answer are cumulative.
    pub fn take(&mut self, value: &Value) {
        // Messages' first event and Responses' last one hold the answer in a member.
        let inner = ["message", "response"].into_iter().filter_map(|name| value.get(name));
        for part in std::iter::once(value).chain(inner) {
            if self.model.is_none() {
                let model = part.get("model").and_then(Value::as_str);
                self.model = model.and_then(|model| Name::parse(model).ok());
            }
            let Some(usage) = part.get("usage").filter(|usage| usage.is_object()) else { continue };
            let sum = |names: &[&str]| {
                names.iter().fold(0_u64, |sum, name| sum.saturating_add(count(usage, name)))
            };
            let read = ["cache_creation_input_tokens", "cache_read_input_tokens"];
            let input = sum(&["input_tokens", "prompt_tokens"]).saturating_add(sum(&read));
            self.told = true;
            self.input = self.input.max(input);
            self.output = self.output.max(sum(&["output_tokens", "completion_tokens"]));
        }
    }
}

/// Reads an answer as it passes.
#[derive(Debug)]
pub(super) enum Reader {
    /// Events, one a `data:` line.
    Events(Lines, Seen),
    /// One JSON text; none once it is too large to be looked into.
    Whole(Option<Vec<u8>>),
}

impl Reader {
    /// For an answer of this content type.
    pub fn new(content_type: &str) -> Self {
        if content_type.starts_with("text/event-stream") {
            Self::Events(Lines::default(), Seen::default())
        } else {
            Self::Whole(Some(Vec::new()))
        }
    }

    /// Takes bytes; what is known now, if that may be new.
    pub fn take(&mut self, bytes: &[u8]) -> Option<Seen> {
        match self {
            Self::Whole(whole) => {
                let fits = |read: &Vec<u8>| read.len().saturating_add(bytes.len()) <= ANSWER_MAX;
                *whole = whole.take().filter(fits);
                if let Some(whole) = whole {
                    whole.extend_from_slice(bytes);
                }
                None
            }
            Self::Events(lines, seen) => {
                for line in lines.take(bytes) {
                    let data = line.strip_prefix(b"data:").unwrap_or_default();
                    if let Ok(event) = json::parse(data.trim_ascii(), ANSWER_MAX) {
                        seen.take(&event);
                    }
                }
                Some(seen.clone())
            }
        }
    }

    /// What is known at the end.
    pub fn finish(self) -> Seen {
        match self {
            Self::Events(_, seen) => seen,
            Self::Whole(whole) => {
                let mut seen = Seen::default();
                if let Ok(answer) = json::parse(&whole.unwrap_or_default(), ANSWER_MAX) {
                    seen.take(&answer);
                }
                seen
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(content_type: &str, text: &str) -> (u64, u64, Option<String>) {
        let mut reader = Reader::new(content_type);
        for piece in text.as_bytes().chunks(11) {
            reader.take(piece);
        }
        let seen = reader.finish();
        (seen.input, seen.output, seen.model.map(|model| model.to_string()))
    }

    #[test]
    fn every_documented_shape_is_counted() {
        let json = "application/json";
        let events = "text/event-stream; charset=utf-8";
        let chat = r#"{"id":"chatcmpl-1","object":"chat.completion","model":"gpt-x",
            "choices":[{"index":0,"message":{"role":"assistant","content":"{}"},"finish_reason":"stop"}],
            "usage":{"prompt_tokens":19,"completion_tokens":10,"total_tokens":29,
                     "prompt_tokens_details":{"cached_tokens":5}}}"#;
        assert_eq!(read(json, chat), (19, 10, Some("gpt-x".into())));
        let chat_stream = "data: {\"model\":\"gpt-x\",\"choices\":[{\"delta\":{\"content\":\"a\"}}],\"usage\":null}\n\n\
             data: {\"model\":\"gpt-x\",\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":3}}\n\n\
             data: [DONE]\n\n";
        assert_eq!(read(events, chat_stream), (7, 3, Some("gpt-x".into())));
        let messages = r#"{"id":"msg_1","type":"message","role":"assistant","model":"claude-x",
            "content":[{"type":"text","text":"{}"}],"stop_reason":"end_turn",
            "usage":{"input_tokens":12,"cache_creation_input_tokens":3,"cache_read_input_tokens":5,"output_tokens":6}}"#;
        assert_eq!(read(json, messages), (20, 6, Some("claude-x".into())));
        let message_stream = "event: message_start\r\ndata: {\"type\":\"message_start\",\"message\":{\"model\":\"claude-x\",\"usage\":{\"input_tokens\":25,\"output_tokens\":1}}}\r\n\r\n\
             event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"delta\":{\"text\":\"usage\"}}\n\n\
             event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{},\"usage\":{\"output_tokens\":15}}\n\n";
        assert_eq!(read(events, message_stream), (25, 15, Some("claude-x".into())));
        let responses = "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"model\":\"gpt-y\",\"usage\":{\"input_tokens\":36,\"output_tokens\":87,\"total_tokens\":123}}}\n\n";
        assert_eq!(read(events, responses), (36, 87, Some("gpt-y".into())));
    }

    #[test]
    fn an_answer_without_numbers_says_so() {
        let mut reader = Reader::new("application/json");
        reader.take(b"{\"error\":{\"message\":\"no\"}}");
        assert_eq!(reader.finish(), Seen::default());
        let mut large = Reader::new("application/json");
        large.take(&vec![b' '; ANSWER_MAX]);
        large.take(b"{\"usage\":{\"input_tokens\":1}}");
        assert!(!large.finish().told);
    }
}
