//! MCP's lines on stdin and stdout: what is no message is answered here, with its id where it has
//! one; everything else goes to `rmcp`. Notes for `Given` what was read and written when.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use rmcp::RoleServer;
use rmcp::model::{
    ClientJsonRpcMessage, ClientNotification, ClientRequest, ErrorCode, GetExtensions as _,
    JsonRpcMessage, RequestId, ServerJsonRpcMessage,
};
use rmcp::transport::Transport;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Map, Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncRead, AsyncWrite, AsyncWriteExt as _, BufReader};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::given::{Read, Refused, SharedGiven};
use crate::runtime::sys;

/// Bytes of a line; the text of a message has 128 KiB at most, a file's content may be longer.
pub(super) const MAX_LINE: usize = 16 << 20;
/// Answers that wait to be written; those who bring more wait.
const MAX_WAITING: usize = 16;
/// Answers that are not written, with those that wait for room among the former: nothing more is read
/// until there are fewer. As many as calls may be under way.
const MAX_UNWRITTEN: usize = 256;
/// What is ahead of a text that some editors write; RFC 8259 8.1 lets a reader pass over it.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";
/// The methods of this server that take parameters or may: one of them with others is no unknown
/// method.
const METHODS: [&str; 7] = [
    "initialize",
    "ping",
    "resources/list",
    "resources/read",
    "resources/templates/list",
    "tools/call",
    "tools/list",
];

/// A line to be written, and the call that it answers.
struct Outgoing {
    line: Vec<u8>,
    answers: Option<RequestId>,
}

pub(super) struct Stdio<R> {
    input: BufReader<R>,
    /// The line so far.
    line: Vec<u8>,
    /// The read that brought its first byte.
    begun: Read,
    read: Read,
    /// The line is too long, and passed over up to its end.
    skipping: bool,
    /// An answer of ours that has found no room yet.
    reply: Option<Outgoing>,
    output: Option<mpsc::Sender<Outgoing>>,
    /// How many lines are to be written, queued or not.
    unwritten: Arc<watch::Sender<usize>>,
    given: Arc<SharedGiven>,
    ended: CancellationToken,
}

enum Next {
    Line,
    TooLong,
    End,
}

impl<R: AsyncRead + Send + Unpin> Stdio<R> {
    /// `ended` is told when the client can say or hear nothing more. The task is done once the
    /// transport is gone, and everything is written that waited, or cannot be.
    pub fn new<W>(
        input: R,
        output: W,
        given: Arc<SharedGiven>,
        ended: CancellationToken,
    ) -> (Self, JoinHandle<()>)
    where
        W: AsyncWrite + Send + Unpin + 'static,
    {
        let (queue, waiting) = mpsc::channel(MAX_WAITING);
        let unwritten = Arc::new(watch::Sender::new(0));
        let writing =
            write(output, waiting, Arc::clone(&unwritten), Arc::clone(&given), ended.clone());
        let transport = Self {
            input: BufReader::new(input),
            line: Vec::new(),
            begun: Read::default(),
            read: Read::default(),
            skipping: false,
            reply: None,
            output: Some(queue),
            unwritten,
            given,
            ended,
        };
        (transport, tokio::spawn(writing))
    }

    /// Reads on to the end of a line. May be dropped and called again: nothing is lost.
    async fn next_line(&mut self) -> Next {
        loop {
            let fresh = self.input.buffer().is_empty();
            let Ok(bytes) = self.input.fill_buf().await else { return Next::End };
            if bytes.is_empty() {
                return Next::End;
            }
            if fresh {
                self.read = self.given.lock().read();
            }
            let end = memchr::memchr(b'\n', bytes);
            let piece = bytes.get(..end.unwrap_or(bytes.len())).unwrap_or(bytes);
            let taken = piece.len() + usize::from(end.is_some());
            if self.line.is_empty() && !self.skipping {
                self.begun = self.read;
            }
            if self.line.len() + piece.len() > MAX_LINE {
                self.skipping = true;
                self.line = Vec::new();
            }
            if !self.skipping {
                self.line.extend_from_slice(piece);
            }
            self.input.consume(taken);
            if end.is_some() {
                return if std::mem::take(&mut self.skipping) { Next::TooLong } else { Next::Line };
            }
        }
    }

    /// What a whole line is: a message, or an answer to what is none.
    fn message(&mut self) -> Option<ClientJsonRpcMessage> {
        let line = std::mem::take(&mut self.line);
        let message = match parse(&line) {
            Ok(message) => message?,
            Err(reply) => {
                self.reply = Some(reply);
                return None;
            }
        };
        self.noted(message)
    }

    /// Notes calls and cancellations in the order in which they come.
    fn noted(&mut self, mut message: ClientJsonRpcMessage) -> Option<ClientJsonRpcMessage> {
        match &mut message {
            JsonRpcMessage::Request(request) => {
                let refused = match self.given.lock().called(&request.id) {
                    Ok(()) => {
                        request.request.extensions_mut().insert(self.begun);
                        return Some(message);
                    }
                    Err(refused) => refused,
                };
                // An answer under an id that is in use would be taken for the other call's.
                self.reply = Some(match refused {
                    Refused::IdInUse => reply(
                        Value::Null,
                        ErrorCode::INVALID_REQUEST,
                        "a call with this id is under way: give each call an id of its own",
                    ),
                    Refused::TooMany => reply(
                        json!(request.id),
                        ErrorCode::INTERNAL_ERROR,
                        "too many calls are under way: wait for answers",
                    ),
                });
                None
            }
            JsonRpcMessage::Notification(notification) => {
                if let ClientNotification::CancelledNotification(cancelled) =
                    &notification.notification
                    && let Some(call) = &cancelled.params.request_id
                {
                    self.given.lock().cancelled(call);
                }
                Some(message)
            }
            JsonRpcMessage::Response(_) | JsonRpcMessage::Error(_) => Some(message),
        }
    }
}

impl<R: AsyncRead + Send + Unpin> Transport<RoleServer> for Stdio<R> {
    type Error = io::Error;

    fn send(
        &mut self,
        item: ServerJsonRpcMessage,
    ) -> impl Future<Output = io::Result<()>> + Send + 'static {
        let answers = match &item {
            JsonRpcMessage::Response(response) => Some(response.id.clone()),
            JsonRpcMessage::Error(error) => error.id.clone(),
            JsonRpcMessage::Request(_) | JsonRpcMessage::Notification(_) => None,
        };
        if let Some(call) = &answers {
            self.given.lock().answered(call);
        }
        let line = serde_json::to_vec(&item).map_err(io::Error::other);
        let output = self.output.clone();
        if line.is_ok() {
            self.unwritten.send_modify(|lines| *lines += 1);
        }
        async move {
            let gone = || io::Error::from(io::ErrorKind::BrokenPipe);
            let outgoing = Outgoing { line: line?, answers };
            output.ok_or_else(gone)?.send(outgoing).await.map_err(|_| gone())
        }
    }

    async fn receive(&mut self) -> Option<ClientJsonRpcMessage> {
        loop {
            if self.reply.is_some() {
                let room = self.output.as_ref()?.reserve().await.ok()?;
                if let Some(reply) = self.reply.take() {
                    self.unwritten.send_modify(|lines| *lines += 1);
                    room.send(reply);
                }
            }
            // What it does not read is not asked for by more.
            let few = |lines: &usize| *lines < MAX_UNWRITTEN;
            self.unwritten.subscribe().wait_for(few).await.ok()?;
            match self.next_line().await {
                Next::Line => {
                    if let Some(message) = self.message() {
                        return Some(message);
                    }
                }
                Next::TooLong => {
                    let what = format!("a line has at most {MAX_LINE} bytes");
                    self.reply = Some(reply(Value::Null, ErrorCode::INVALID_REQUEST, &what));
                }
                Next::End => {
                    self.ended.cancel();
                    return None;
                }
            }
        }
    }

    async fn close(&mut self) -> io::Result<()> {
        drop(self.output.take());
        Ok(())
    }
}

/// Writes lines out until there are no more, or nobody reads them.
async fn write<W: AsyncWrite + Unpin>(
    mut output: W,
    mut waiting: mpsc::Receiver<Outgoing>,
    unwritten: Arc<watch::Sender<usize>>,
    given: Arc<SharedGiven>,
    ended: CancellationToken,
) {
    while let Some(Outgoing { mut line, answers }) = waiting.recv().await {
        line.push(b'\n');
        let written = match output.write_all(&line).await {
            Ok(()) => output.flush().await,
            failed => failed,
        };
        if written.is_err() {
            ended.cancel();
            return;
        }
        unwritten.send_modify(|lines| *lines -= 1);
        given.lock().wrote(answers.as_ref());
    }
}

/// Tells `ended` when nobody can say anything more on `stdin` and nothing moves for `patience`: what
/// stands before the end is not read where its answers find no reader. Where the system does not tell
/// of the end (of a file, say), reading has to come to it.
pub(super) async fn abandoned(
    stdin: impl AsFd,
    given: &SharedGiven,
    ended: &CancellationToken,
    patience: Duration,
) {
    if sys::hung_up(stdin).await.is_err() {
        return std::future::pending().await;
    }
    let mut before = given.lock().moved();
    loop {
        sleep(patience).await;
        let now = given.lock().moved();
        if now == before {
            return ended.cancel();
        }
        before = now;
    }
}

/// An error under `id`, which is written even when it is null (JSON-RPC 2.0, 5).
fn reply(id: Value, code: ErrorCode, what: &str) -> Outgoing {
    let error = json!({"code": code, "message": what});
    let line = json!({"jsonrpc": "2.0", "id": id, "error": error}).to_string().into_bytes();
    Outgoing { line, answers: None }
}

/// The message of a line; `None` for what is neither to be handled nor to be answered.
fn parse(line: &[u8]) -> Result<Option<ClientJsonRpcMessage>, Outgoing> {
    let line = line.strip_prefix(BYTE_ORDER_MARK).unwrap_or(line);
    if line.trim_ascii().is_empty() {
        return Ok(None);
    }
    let value: Value = match serde_json::from_slice(line) {
        Ok(value) => value,
        Err(error) => return unreadable(line, &error).map_or(Ok(None), Err),
    };
    let invalid = |id: &Value, what: &str| reply(id.clone(), ErrorCode::INVALID_REQUEST, what);
    let Value::Object(mut members) = value else {
        return Err(invalid(&Value::Null, "a line is one message, an object"));
    };
    // Answers are not answered, whatever is wrong with them.
    if !members.contains_key("method")
        && (members.contains_key("result") || members.contains_key("error"))
    {
        return Ok(serde_json::from_value(Value::Object(members)).ok());
    }
    let id = members.get("id").cloned();
    let known = id.clone().filter(|id| id.is_string() || id.is_i64()).unwrap_or(Value::Null);
    let Some(method) = members.get("method").and_then(Value::as_str).map(str::to_owned) else {
        return Err(invalid(&known, "`method` is missing or not text"));
    };
    if id.is_some() && known.is_null() {
        return Err(invalid(&known, "`id` is neither text nor a whole number"));
    }
    let wrong = request(&mut members, &method);
    match (wrong, id) {
        (Ok(message), _) => Ok(Some(message)),
        (Err((code, what)), Some(_)) => Err(reply(known, code, &what)),
        // Nor are notifications.
        (Err(_), None) => Ok(None),
    }
}

/// The answer to a line that cannot be read, if it gets one. A JSON text may hold what no value here
/// can be made of: half of a surrogate pair, as of a text that was cut, or more levels than the parser
/// goes down. Whoever waits for an answer to it has to get one under its id.
fn unreadable(line: &[u8], error: &serde_json::Error) -> Option<Outgoing> {
    /// What is passed over is checked for its grammar alone.
    #[derive(Deserialize)]
    struct Envelope {
        id: Option<RequestId>,
        method: Option<IgnoredAny>,
        result: Option<IgnoredAny>,
        error: Option<IgnoredAny>,
    }
    // A list would be taken for the members in their order.
    let object = line.trim_ascii_start().starts_with(b"{");
    let Some(envelope) = object.then(|| serde_json::from_slice::<Envelope>(line).ok()).flatten()
    else {
        let what = format!("the line is not JSON, or has no id that can be used: {error}");
        return Some(reply(Value::Null, ErrorCode::PARSE_ERROR, &what));
    };
    let is_answer = envelope.result.is_some() || envelope.error.is_some();
    let id = envelope.id.filter(|_| envelope.method.is_some() || !is_answer)?;
    let what = format!(
        "the message is JSON that cannot be read: {error}. Texts have whole characters (\\ud800 to \
         \\udfff only in pairs), and values nest at most 127 deep"
    );
    Some(reply(json!(id), ErrorCode::INVALID_PARAMS, &what))
}

/// What has a method, as its type; or what is wrong with it.
fn request(
    members: &mut Map<String, Value>,
    method: &str,
) -> Result<ClientJsonRpcMessage, (ErrorCode, String)> {
    if members.get("jsonrpc").and_then(Value::as_str) != Some("2.0") {
        return Err((ErrorCode::INVALID_REQUEST, "`jsonrpc` is not \"2.0\"".into()));
    }
    let unfit = || {
        let method = crate::codec::text::escape_untrusted(method);
        (ErrorCode::INVALID_PARAMS, format!("the parameters of {method} are missing or do not fit"))
    };
    match members.get("params") {
        None | Some(Value::Object(_)) => {}
        // As good as none.
        Some(Value::Null) => {
            members.remove("params");
        }
        Some(Value::Array(_)) => return Err(unfit()),
        Some(_) => return Err((ErrorCode::INVALID_REQUEST, "`params` is not an object".into())),
    }
    let message = serde_json::from_value(Value::Object(std::mem::take(members)));
    match message {
        // The last resort of the parser, for methods that it does not know.
        Ok(JsonRpcMessage::Request(request))
            if matches!(request.request, ClientRequest::CustomRequest(_))
                && METHODS.contains(&method) =>
        {
            Err(unfit())
        }
        Ok(message) => Ok(message),
        Err(_) => Err(unfit()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The answer to a line that is no message.
    fn refused(line: &str) -> (Value, i64) {
        let reply = parse(line.as_bytes()).unwrap_err();
        let value: Value = serde_json::from_slice(&reply.line).unwrap();
        assert!(value.get("id").is_some() && value["jsonrpc"] == "2.0", "{value}");
        (value["id"].clone(), value["error"]["code"].as_i64().unwrap())
    }

    fn deep(bracket: &str) -> String {
        bracket.repeat(10_000)
    }

    #[test]
    fn every_line_that_is_no_message_is_answered_with_its_id() {
        for (line, id, code) in [
            ("garbage", json!(null), -32700),
            ("{\"jsonrpc\"", json!(null), -32700),
            (&"[".repeat(100_000), json!(null), -32700),
            ("[]", json!(null), -32600),
            ("5", json!(null), -32600),
            ("{}", json!(null), -32600),
            (r#"{"jsonrpc":"2.0","id":"a"}"#, json!("a"), -32600),
            (r#"{"id":"a","method":"ping"}"#, json!("a"), -32600),
            (r#"{"jsonrpc":"2.0","id":1.5,"method":"ping"}"#, json!(null), -32600),
            (r#"{"jsonrpc":"2.0","id":null,"method":"ping"}"#, json!(null), -32600),
            (r#"{"jsonrpc":"2.0","id":7,"method":"tools/call","params":5}"#, json!(7), -32600),
            (r#"{"jsonrpc":"2.0","id":7,"method":"tools/call","params":[]}"#, json!(7), -32602),
            (r#"{"jsonrpc":"2.0","id":7,"method":"tools/call"}"#, json!(7), -32602),
            (
                r#"{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"x","arguments":[]}}"#,
                json!(7),
                -32602,
            ),
            (
                r#"{"jsonrpc":"2.0","id":7,"method":"resources/read","params":{"uri":5}}"#,
                json!(7),
                -32602,
            ),
            // JSON, but with half a character or too many levels.
            (
                r#"{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"x":"\ud83d"}}"#,
                json!(7),
                -32602,
            ),
            (r#"{"params":["\udc00 \ud800\n"],"id":"a","method":"x"}"#, json!("a"), -32602),
            (
                &format!(r#"{{"id":7,"method":"x","params":{}{}}}"#, deep("["), deep("]")),
                json!(7),
                -32602,
            ),
            (r#"{"id":"\ud800","method":"x"}"#, json!(null), -32700),
            (r#"{"id":7,"method":"x","params":"\ud800""#, json!(null), -32700),
            (r#"[7, "x", "\ud800"]"#, json!(null), -32700),
        ] {
            assert_eq!(refused(line), (id, code), "{}", line.get(..80).unwrap_or(line));
        }
    }

    #[test]
    fn messages_pass_and_answers_and_notifications_are_never_answered() {
        for line in [
            r#"{"jsonrpc":"2.0","id":1,"method":"ping","params":null}"#,
            r#"{"jsonrpc":"2.0","id":1,"method":"prompts/list"}"#,
            r#"{"jsonrpc":"2.0","id":"x","method":"of/tomorrow","params":{"a":1}}"#,
            "\u{feff}{\"jsonrpc\":\"2.0\",\"method\":\"notifications/initialized\"}\r",
        ] {
            assert!(matches!(parse(line.as_bytes()), Ok(Some(_))), "{line}");
        }
        for line in [
            "",
            "\r",
            r#"{"jsonrpc":"2.0","id":null,"error":{"code":1,"message":"x"}}"#,
            r#"{"jsonrpc":"2.0","id":[],"result":5}"#,
            r#"{"jsonrpc":"1.0","method":"notifications/initialized"}"#,
            r#"{"jsonrpc":"2.0","method":"notifications/x","params":5}"#,
            r#"{"jsonrpc":"2.0","method":"notifications/x","params":["\ud800"]}"#,
            r#"{"jsonrpc":"2.0","id":5,"result":["\ud800"]}"#,
        ] {
            assert!(
                matches!(parse(line.as_bytes()), Ok(None | Some(JsonRpcMessage::Error(_)))),
                "{line}"
            );
        }
    }
}
