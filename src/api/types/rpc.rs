//! JSON-RPC 2.0 as the local API uses it: one message a line, requests with an id only (every client
//! gets an answer), no batches. Bytes to values and back; nothing is read or written here.

use std::collections::HashSet;
use std::fmt;

use serde::de::{Error as _, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use super::{ApiError, MAX_LINE_BYTES, MAX_REQUEST_ID_BYTES, Request, RequestId};
use crate::codec::text::truncate_chars;

/// Characters left of an error's text that does not fit into a line.
const MAX_QUOTE_CHARS: usize = 1024;

/// A request as it came, its parameters not yet read.
#[derive(Clone, Debug, PartialEq)]
pub struct RawRequest {
    /// For the answer.
    pub id: RequestId,
    /// Any spelling of the method.
    pub method: String,
    /// An object, or nothing.
    pub params: Option<Value>,
}

impl RawRequest {
    /// The typed request.
    ///
    /// # Errors
    /// As [`Request::parse`].
    pub fn request(self) -> Result<(RequestId, Request), (RequestId, ApiError)> {
        match Request::parse(&self.method, self.params) {
            Ok(request) => Ok((self.id, request)),
            Err(error) => Err((self.id, error)),
        }
    }
}

/// Reads a line that a client sent. The error carries the request's id where one could be read.
///
/// # Errors
/// `parse_error`, `invalid_request`.
pub fn read_request(line: &[u8]) -> Result<RawRequest, (Option<RequestId>, ApiError)> {
    // What is as it should be is read in one pass; what is wrong is looked for when something is.
    if let Ok(Plain { jsonrpc: "2.0", id, method, params }) = serde_json::from_slice(line)
        && !matches!(&id, RequestId::Text(text) if text.len() > MAX_REQUEST_ID_BYTES)
    {
        return Ok(RawRequest { id, method, params });
    }
    let value: Value = serde_json::from_slice(line).map_err(|error| {
        let what = format!("the line is not JSON: {error}");
        (None, ApiError::new(ApiError::PARSE_ERROR, what, "send one JSON object a line"))
    })?;
    if value.is_object() && serde_json::from_slice::<Once>(line).is_err() {
        // Under no id: there may be two.
        let todo = "send every member once";
        let error = ApiError::new(ApiError::INVALID_REQUEST, "a member is there twice", todo);
        return Err((None, error));
    }
    let invalid = |what: &str| {
        let todo = "send {\"jsonrpc\":\"2.0\",\"id\":1,\"method\":…,\"params\":{…}} on one line";
        ApiError::new(ApiError::INVALID_REQUEST, what, todo)
    };
    let Value::Object(mut object) = value else {
        let what = match value {
            Value::Array(_) => "batches are not taken; send one request a line",
            _ => "a request is a JSON object",
        };
        return Err((None, invalid(what)));
    };
    let id = match object.remove("id").map(serde_json::from_value) {
        None => return Err((None, invalid("the request has no id"))),
        Some(Err(_)) => return Err((None, invalid("an id is an integer or text"))),
        Some(Ok(RequestId::Text(text))) if text.len() > MAX_REQUEST_ID_BYTES => {
            return Err((None, invalid("the id is longer than 128 bytes")));
        }
        Some(Ok(id)) => id,
    };
    if object.remove("jsonrpc").as_ref().and_then(Value::as_str) != Some("2.0") {
        return Err((Some(id), invalid("`jsonrpc` is not \"2.0\"")));
    }
    let Some(Value::String(method)) = object.remove("method") else {
        return Err((Some(id), invalid("`method` is not text")));
    };
    let params = object.remove("params").filter(|params| !params.is_null());
    if let Some(other) = object.keys().next() {
        return Err((Some(id), invalid(&format!("a request has no member {other:?}"))));
    }
    Ok(RawRequest { id, method, params })
}

/// A request with all of its members, each of them once, and no others.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Plain<'a> {
    jsonrpc: &'a str,
    id: RequestId,
    method: String,
    params: Option<Value>,
}

/// The members of an object, each of them once: [`Value`] takes the last of several.
struct Once;

impl<'de> Deserialize<'de> for Once {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Members;

        impl<'de> Visitor<'de> for Members {
            type Value = Once;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object with each member once")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Once, A::Error> {
                let mut seen = HashSet::new();
                while let Some(name) = map.next_key::<String>()? {
                    map.next_value::<IgnoredAny>()?;
                    if !seen.insert(name) {
                        return Err(A::Error::custom("a member is there twice"));
                    }
                }
                Ok(Once)
            }
        }

        deserializer.deserialize_map(Members)
    }
}

/// A line that the daemon sent, as a client reads it.
#[derive(Clone, Debug, PartialEq)]
pub enum FromDaemon {
    /// The answer to a request; no id when the daemon could not read one.
    Answer(Option<RequestId>, Result<Value, ApiError>),
    /// Something that nobody asked for.
    Notification {
        /// One of `notification::…`; a reader ignores others.
        method: String,
        /// An object.
        params: Value,
    },
}

/// Reads a line that the daemon sent.
///
/// # Errors
/// `parse_error`, `invalid_request`: whatever answers at that socket is not a commsd.
pub fn read_from_daemon(line: &[u8]) -> Result<FromDaemon, ApiError> {
    #[derive(Deserialize)]
    struct Line {
        id: Option<RequestId>,
        method: Option<String>,
        params: Option<Value>,
        // Present-but-null results exist, so absence has to stay visible.
        #[serde(default, deserialize_with = "present")]
        result: Option<Value>,
        error: Option<ErrorMember>,
    }
    fn present<'de, D: serde::Deserializer<'de>>(d: D) -> Result<Option<Value>, D::Error> {
        Value::deserialize(d).map(Some)
    }
    let line: Line = serde_json::from_slice(line).map_err(|error| {
        ApiError::new(
            ApiError::PARSE_ERROR,
            format!("the answer at the socket is not JSON-RPC: {error}"),
            "check that the socket belongs to commsd",
        )
    })?;
    match line {
        Line { method: Some(method), params, .. } => {
            Ok(FromDaemon::Notification { method, params: params.unwrap_or_default() })
        }
        Line { id, error: Some(error), .. } => Ok(FromDaemon::Answer(id, Err(error.into()))),
        Line { id, result: Some(result), .. } => Ok(FromDaemon::Answer(id, Ok(result))),
        _ => Err(ApiError::new(
            ApiError::INVALID_REQUEST,
            "the answer at the socket is neither a result, an error nor a notification",
            "check that the socket belongs to commsd",
        )),
    }
}

/// JSON-RPC's error object.
#[derive(Serialize, Deserialize)]
struct ErrorMember {
    code: i64,
    message: String,
    data: Option<ErrorData>,
}

#[derive(Serialize, Deserialize)]
struct ErrorData {
    code: String,
    todo: Option<String>,
}

impl From<ErrorMember> for ApiError {
    fn from(error: ErrorMember) -> Self {
        let (code, todo) = match error.data {
            Some(data) => (data.code, data.todo),
            None => (error.code.to_string(), None),
        };
        Self { code, message: error.message, todo }
    }
}

impl From<ApiError> for ErrorMember {
    fn from(error: ApiError) -> Self {
        Self {
            code: error.rpc_number(),
            data: Some(ErrorData { code: error.code, todo: error.todo }),
            message: error.message,
        }
    }
}

/// A line for a request.
///
/// # Errors
/// `line_too_long` when it would be longer than the daemon takes.
pub fn request_line(
    id: &RequestId,
    method: &str,
    params: &impl Serialize,
) -> Result<Vec<u8>, ApiError> {
    let mut out = Vec::new();
    match append(&mut out, &RequestLine { jsonrpc: VERSION, id, method, params }) {
        Ok(()) => Ok(out),
        Err(Unfit::Long(bytes)) => Err(ApiError::new(
            ApiError::LINE_TOO_LONG,
            format!("{method}: the request has {bytes} bytes, at most {MAX_LINE_BYTES} fit"),
            "write large values to a file and send its path",
        )),
        Err(Unfit::NoJson(error)) => Err(ApiError::invalid_params(method, error)),
    }
}

/// Appends a line for an answer. A result that does not fit into a line becomes the error
/// `result_too_large`.
pub fn answer_line(out: &mut Vec<u8>, id: Option<&RequestId>, result: &impl Serialize) {
    let error = match append(out, &AnswerLine { jsonrpc: VERSION, id, result }) {
        Ok(()) => return,
        Err(Unfit::Long(bytes)) => ApiError::new(
            ApiError::RESULT_TOO_LARGE,
            format!("the answer has {bytes} bytes, at most {MAX_LINE_BYTES} fit"),
            "ask for fewer entries",
        ),
        Err(Unfit::NoJson(error)) => ApiError::internal(format!("cannot answer: {error}")),
    };
    error_line(out, id, error);
}

/// Appends a line for a request that was not done.
pub fn error_line(out: &mut Vec<u8>, id: Option<&RequestId>, error: ApiError) {
    let mut error = ErrorMember::from(error);
    if append(out, &ErrorLine { jsonrpc: VERSION, id, error: &error }).is_err() {
        // What it quotes filled a line by itself and takes more room when it is escaped.
        error.message = truncate_chars(&error.message, MAX_QUOTE_CHARS).to_owned();
        let _fits_now = append(out, &ErrorLine { jsonrpc: VERSION, id, error: &error });
    }
}

/// Appends a line for a notification; `false`, and nothing is appended, when it does not fit.
pub fn notification_line(out: &mut Vec<u8>, method: &str, params: &impl Serialize) -> bool {
    append(out, &NotificationLine { jsonrpc: VERSION, method, params }).is_ok()
}

const VERSION: &str = "2.0";

#[derive(Serialize)]
struct RequestLine<'a, P> {
    jsonrpc: &'static str,
    id: &'a RequestId,
    method: &'a str,
    params: &'a P,
}

#[derive(Serialize)]
struct AnswerLine<'a, R> {
    jsonrpc: &'static str,
    id: Option<&'a RequestId>,
    result: &'a R,
}

#[derive(Serialize)]
struct ErrorLine<'a> {
    jsonrpc: &'static str,
    id: Option<&'a RequestId>,
    error: &'a ErrorMember,
}

#[derive(Serialize)]
struct NotificationLine<'a, P> {
    jsonrpc: &'static str,
    method: &'a str,
    params: &'a P,
}

/// Why something is no line.
enum Unfit {
    /// It has so many bytes.
    Long(usize),
    NoJson(serde_json::Error),
}

/// Appends JSON on one line, and its line feed: serde_json escapes every control character inside
/// text. Nothing is appended when it is no line.
fn append(out: &mut Vec<u8>, message: &impl Serialize) -> Result<(), Unfit> {
    let start = out.len();
    let written = serde_json::to_writer(&mut *out, message).map_err(Unfit::NoJson);
    let fits = written.and_then(|()| match out.len() - start {
        bytes if bytes > MAX_LINE_BYTES => Err(Unfit::Long(bytes)),
        _ => Ok(()),
    });
    match fits {
        Ok(()) => out.push(b'\n'),
        Err(_) => out.truncate(start),
    }
    fits
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn refused(line: &str) -> (Option<RequestId>, ApiError) {
        read_request(line.as_bytes()).unwrap_err()
    }

    #[test]
    fn requests_are_read() {
        let raw =
            read_request(br#"{"jsonrpc":"2.0","id":"a","method":"whoami","params":null}"#).unwrap();
        assert_eq!(raw.id, RequestId::Text("a".into()));
        let (id, request) = raw.request().unwrap();
        assert_eq!((id, request.method()), (RequestId::Text("a".into()), "whoami"));
    }

    #[test]
    fn faults_have_the_standard_numbers() {
        for garbage in ["", "{", "\u{0}", "nul", "{\"id\":1}}"] {
            let (id, error) = refused(garbage);
            assert_eq!((id, error.rpc_number()), (None, -32700), "{garbage:?}");
        }
        let (_, error) = read_request(b"{\"id\":\"\xff\"}").unwrap_err();
        assert_eq!(error.code, ApiError::PARSE_ERROR);
        let one = Some(RequestId::Number(1));
        for (line, id) in [
            (r#"[{"jsonrpc":"2.0","id":1,"method":"whoami"}]"#, None),
            ("7", None),
            (r#"{"jsonrpc":"2.0","method":"whoami"}"#, None),
            (r#"{"jsonrpc":"2.0","id":1.5,"method":"whoami"}"#, None),
            (r#"{"jsonrpc":"2.0","id":null,"method":"whoami"}"#, None),
            (r#"{"id":1,"method":"whoami"}"#, one.clone()),
            (r#"{"jsonrpc":"1.0","id":1,"method":"whoami"}"#, one.clone()),
            (r#"{"jsonrpc":"2.0","id":1}"#, one.clone()),
            (r#"{"jsonrpc":"2.0","id":1,"method":"whoami","x":1}"#, one.clone()),
        ] {
            let (got, error) = refused(line);
            assert_eq!((got, error.rpc_number()), (id, -32600), "{line}");
        }
        let long = "x".repeat(MAX_REQUEST_ID_BYTES + 1);
        let (id, _) = refused(&format!(r#"{{"jsonrpc":"2.0","id":"{long}","method":"whoami"}}"#));
        assert_eq!(id, None);
    }

    #[test]
    fn a_member_that_is_there_twice_is_refused_under_no_id() {
        for line in [
            r#"{"jsonrpc":"2.0","id":1,"id":2,"method":"whoami"}"#,
            r#"{"jsonrpc":"2.0","id":1,"method":"whoami","method":"detach"}"#,
            r#"{"jsonrpc":"2.0","id":1,"method":"whoami","\u006dethod":"detach"}"#,
            r#"{"jsonrpc":"2.0","id":1,"method":"whoami","params":{},"params":{}}"#,
        ] {
            let (id, error) = refused(line);
            assert_eq!((id, error.rpc_number()), (None, -32600), "{line}");
        }
    }

    #[test]
    fn deep_nesting_is_refused_not_followed() {
        let deep = format!("{}1{}", "[".repeat(100_000), "]".repeat(100_000));
        assert_eq!(refused(&deep).1.code, ApiError::PARSE_ERROR);
    }

    #[test]
    fn errors_cross_with_code_and_todo() {
        let error = ApiError::new("room_not_found", "no room", "list them");
        let mut line = Vec::new();
        error_line(&mut line, Some(&RequestId::Number(4)), error.clone());
        let value: Value = serde_json::from_slice(&line).unwrap();
        assert_eq!(
            value,
            json!({"jsonrpc": "2.0", "id": 4, "error": {"code": -32000, "message": "no room",
                   "data": {"code": "room_not_found", "todo": "list them"}}})
        );
        assert_eq!(
            read_from_daemon(&line).unwrap(),
            FromDaemon::Answer(Some(RequestId::Number(4)), Err(error))
        );
    }

    #[test]
    fn a_null_result_is_an_answer_and_nothing_is_not() {
        assert_eq!(
            read_from_daemon(br#"{"jsonrpc":"2.0","id":1,"result":null}"#).unwrap(),
            FromDaemon::Answer(Some(RequestId::Number(1)), Ok(Value::Null))
        );
        assert!(read_from_daemon(br#"{"jsonrpc":"2.0","id":1}"#).is_err());
        assert!(read_from_daemon(b"HTTP/1.1 400 Bad Request").is_err());
    }

    #[test]
    fn what_does_not_fit_a_line_is_not_written() {
        let big = Value::String("x".repeat(MAX_LINE_BYTES));
        assert_eq!(
            request_line(&RequestId::Number(1), "send", &big).unwrap_err().code,
            ApiError::LINE_TOO_LONG
        );
        let mut line = Vec::new();
        assert!(!notification_line(&mut line, "event", &big) && line.is_empty());
        answer_line(&mut line, Some(&RequestId::Number(1)), &big);
        let FromDaemon::Answer(_, Err(error)) = read_from_daemon(&line).unwrap() else {
            panic!("not an error");
        };
        assert_eq!(error.code, ApiError::RESULT_TOO_LARGE);
    }

    #[test]
    fn an_error_that_quotes_a_whole_line_still_fits_one() {
        let name = "\u{7}".repeat(MAX_LINE_BYTES / 6 - 100);
        let request = json!({"jsonrpc": "2.0", "id": 1, "method": name, "params": {}});
        let request = request.to_string();
        assert!(request.len() <= MAX_LINE_BYTES);
        let (id, error) = read_request(request.as_bytes()).unwrap().request().unwrap_err();
        let mut line = Vec::new();
        error_line(&mut line, Some(&id), error);
        assert!(line.len() <= MAX_LINE_BYTES + 1);
        let FromDaemon::Answer(Some(RequestId::Number(1)), Err(error)) =
            read_from_daemon(&line).unwrap()
        else {
            panic!("not an error");
        };
        assert_eq!(error.code, ApiError::METHOD_NOT_FOUND);
    }

    proptest! {
        #[test]
        fn no_line_makes_the_reader_panic(line in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = read_request(&line);
            let _ = read_from_daemon(&line);
        }

        #[test]
        fn the_longest_text_always_fits(text in "[\u{0}-\u{1f}\"\\\\\u{80}\u{10ffff}]{1,400}") {
            // Worst case: every byte of a full-sized text escaped like the drawn ones.
            let escaped = Value::String(text.clone()).to_string().len() - 2;
            prop_assert!(escaped <= text.len() * 6);
            prop_assert!(super::super::MAX_TEXT_BYTES * 6 < MAX_LINE_BYTES);
        }

        #[test]
        fn lines_hold_no_line_feed(text in ".*\n.*") {
            let mut line = Vec::new();
            let params = json!({"text": text});
            prop_assert!(notification_line(&mut line, "event", &params));
            prop_assert_eq!(line.iter().position(|byte| *byte == b'\n'), Some(line.len() - 1));
            let back = read_from_daemon(&line).unwrap();
            prop_assert_eq!(back, FromDaemon::Notification {
                method: "event".into(), params: json!({"text": text}) });
        }
    }
}
