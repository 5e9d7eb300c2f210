//! One tool of an MCP server over stdio: initialize, one `tools/call` with the input as arguments,
//! and the result. A client of one call needs a dozen lines of JSON-RPC, not a client library.

use serde_json::{Value, json};

use super::Progress;
use super::dialogue::{Dialogue, Done, Lines, Step, parse_answer, unknown};
use super::{bounded, json as strict};
use crate::acp::code::{Code, Error};
use crate::acp::objects::Metrics;
use crate::acp::value::Count;

/// The revision that is asked for: the newest with a handshake. A server answers with one that it
/// speaks, and `tools/call` is the same in all of them.
const REVISION: &str = "2025-11-25";
const INITIALIZE: u64 = 1;
const CALL: u64 = 2;
/// Most bytes of a message that is looked into.
const MESSAGE_MAX: usize = 8 << 20;

/// One call of one tool.
#[derive(Debug)]
pub(super) struct Call {
    tool: String,
    arguments: Value,
    lines: Lines,
    called: bool,
    result: Option<Result<Value, Error>>,
}

impl Call {
    /// Of `tool` with `arguments`.
    pub fn new(tool: String, arguments: Value) -> Self {
        Self { tool, arguments, lines: Lines::default(), called: false, result: None }
    }

    fn message(&mut self, message: &Value) -> Vec<Step> {
        let id = message.get("id").cloned().unwrap_or(Value::Null);
        match message.get("method").and_then(Value::as_str) {
            Some("notifications/progress") => {
                return message.get("params").map(told).into_iter().collect();
            }
            Some("ping") => return vec![send(&json!({"jsonrpc": "2.0", "id": id, "result": {}}))],
            // It asks for something that this client did not offer.
            Some(_) if !id.is_null() => {
                let error = json!({"code": -32601, "message": "not offered"});
                return vec![send(&json!({"jsonrpc": "2.0", "id": id, "error": error}))];
            }
            Some(_) => return Vec::new(),
            None => {}
        }
        match (id.as_u64(), message.get("result")) {
            (Some(INITIALIZE), Some(_)) if !self.called => {
                self.called = true;
                let params = json!({
                    "name": self.tool,
                    "arguments": self.arguments.take(),
                    "_meta": {"progressToken": CALL},
                });
                let ready = json!({"jsonrpc": "2.0", "method": "notifications/initialized"});
                let call =
                    json!({"jsonrpc": "2.0", "id": CALL, "method": "tools/call", "params": params});
                vec![send(&ready), send(&call)]
            }
            (Some(CALL), Some(result)) if self.called && self.result.is_none() => {
                self.result = Some(output(result));
                vec![Step::Close]
            }
            (Some(INITIALIZE | CALL), None) if self.result.is_none() => {
                let error = Error::new(Code::AdapterFailed, "the MCP server answers with an error");
                self.result = Some(Err(error));
                vec![Step::Close]
            }
            _ => Vec::new(),
        }
    }
}

fn send(message: &Value) -> Step {
    Step::Send(format!("{message}\n").into_bytes())
}

/// A progress notification; `total` makes a percentage of it.
fn told(params: &Value) -> Step {
    let number = |name: &str| params.get(name).and_then(Value::as_f64);
    let share = number("progress").zip(number("total")).filter(|(_, total)| *total > 0.0);
    // Truncating is meant: what is out of range is moved into it first.
    let percent = share.map(|(done, total)| (done / total * 100.0).clamp(0.0, 100.0) as u8);
    let message = params.get("message").and_then(Value::as_str).unwrap_or_default();
    let (step, message) = ("tool".to_owned(), bounded(message));
    Step::Tell(Progress { percent, step, message, metrics: unknown() })
}

/// The output of a tool's result: its structured content, else the JSON of its one text.
fn output(result: &Value) -> Result<Value, Error> {
    if result.get("isError").and_then(Value::as_bool) == Some(true) {
        return Err(Error::new(Code::AdapterFailed, "the tool reports an error"));
    }
    if let Some(content) = result.get("structuredContent").filter(|content| !content.is_null()) {
        return Ok(content.clone());
    }
    let content = result.get("content").and_then(Value::as_array);
    match content.map(Vec::as_slice) {
        Some([only]) => parse_answer(only.get("text").and_then(Value::as_str).unwrap_or_default()),
        _ => Err(Error::new(Code::OutputNotJson, "the tool's result is not one JSON text")),
    }
}

impl Dialogue for Call {
    fn open(&mut self) -> Vec<Step> {
        let client = json!({"name": "commsd", "version": env!("CARGO_PKG_VERSION")});
        let params = json!({"protocolVersion": REVISION, "capabilities": {}, "clientInfo": client});
        vec![send(
            &json!({"jsonrpc": "2.0", "id": INITIALIZE, "method": "initialize", "params": params}),
        )]
    }

    fn take(&mut self, bytes: &[u8]) -> Vec<Step> {
        let lines = self.lines.take(bytes);
        let read = lines.iter().filter_map(|line| strict::parse(line, MESSAGE_MAX).ok());
        read.collect::<Vec<_>>().iter().flat_map(|message| self.message(message)).collect()
    }

    fn is_done(&self) -> bool {
        self.result.is_some()
    }

    fn finish(&mut self) -> Result<Done, Error> {
        let ended =
            || Err(Error::new(Code::AdapterFailed, "the MCP server ended without a result"));
        let output = self.result.take().unwrap_or_else(ended)?;
        Ok(Done { output, ..Done::default() })
    }

    fn metrics(&self) -> Metrics {
        Metrics { tool_calls: Some(Count::clamped(u64::from(self.called))), ..unknown() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent(steps: Vec<Step>) -> Vec<Value> {
        let line = |step| match step {
            Step::Send(bytes) => serde_json::from_slice(&bytes).unwrap(),
            other => panic!("{other:?}"),
        };
        steps.into_iter().map(line).collect()
    }

    #[test]
    fn one_call_is_made_and_its_result_taken() {
        let mut call = Call::new("sum".into(), json!({"a": 1}));
        let opening = sent(call.open());
        assert_eq!(opening[0]["method"], "initialize");
        assert!(
            call.take(b"noise\n{\"jsonrpc\":\"2.0\",\"method\":\"notifications/x\"}\n").is_empty()
        );
        let answer = br#"{"jsonrpc":"2.0","id":1,"result":{"protocolVersion":"2025-06-18"}}"#;
        let calls = sent(call.take(&[answer.as_slice(), b"\n"].concat()));
        assert_eq!(calls[0]["method"], "notifications/initialized");
        assert_eq!(calls[1]["params"]["name"], "sum");
        assert_eq!(calls[1]["params"]["arguments"], json!({"a": 1}));
        let asked =
            sent(call.take(b"{\"jsonrpc\":\"2.0\",\"id\":\"x\",\"method\":\"roots/list\"}\n"));
        assert_eq!(asked[0]["error"]["code"], -32601);
        let progress = br#"{"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":2,"progress":1,"total":4,"message":"half\u0007"}}"#;
        let steps = call.take(&[progress.as_slice(), b"\n"].concat());
        assert!(matches!(&steps[..], [Step::Tell(told)]
            if told.percent == Some(25) && told.message == "half "));
        assert!(!call.is_done());
        let result = br#"{"jsonrpc":"2.0","id":2,"result":{"content":[{"type":"text","text":"{\"s\":2}"}]}}"#;
        assert_eq!(call.take(&[result.as_slice(), b"\n"].concat()), [Step::Close]);
        assert!(call.is_done());
        assert_eq!(call.finish().unwrap().output, json!({"s": 2}));
        assert_eq!(call.metrics().tool_calls, Some(Count::clamped(1)));
    }

    #[test]
    fn errors_of_the_server_and_of_the_tool_are_failures() {
        for line in [
            r#"{"jsonrpc":"2.0","id":1,"error":{"code":-1,"message":"no"}}"#,
            r#"{"jsonrpc":"2.0","id":2,"error":{"code":-1,"message":"no"}}"#,
            r#"{"jsonrpc":"2.0","id":2,"result":{"isError":true,"content":[]}}"#,
        ] {
            let mut call = Call::new("sum".into(), json!({}));
            call.called = line.contains("\"id\":2");
            assert_eq!(call.take(format!("{line}\n").as_bytes()), [Step::Close], "{line}");
            assert_eq!(call.finish().unwrap_err().code(), Code::AdapterFailed);
        }
        assert_eq!(output(&json!({"structuredContent": {"x": 1}})).unwrap(), json!({"x": 1}));
        assert_eq!(output(&json!({"content": []})).unwrap_err().code(), Code::OutputNotJson);
        let mut silent = Call::new("sum".into(), json!({}));
        assert_eq!(silent.finish().unwrap_err().code(), Code::AdapterFailed);
    }
}
