//! The requester's tools as a run's program finds them (design 9.2): `GET /v1/tools` says what was
//! granted, `POST /v1/tools/call` uses it. Where that is, and the run's token, stand in the program's
//! environment; a level with a network of its own shows a socket in the place of a port.
//!
//! What is asked goes on to the gateway as it is: whether it is allowed, and whether it was run before,
//! is judged there and by the requester.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use http_body_util::{BodyExt as _, Limited};
use hyper::body::Incoming;
use hyper::header::{self, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{mpsc, watch};
use tokio_util::task::AbortOnDropHandle;

use super::Control;
use super::local_http::{self, Answer, Handler, Token, whole};
use crate::acp::code::{Code, Error};
use crate::acp::json::parse;
use crate::acp::objects::{Action, CapabilityToken, Resource};
use crate::acp::owner::ToolRequest;
use crate::acp::run::Job;
use crate::acp::value::{CallId, Count, Digest};
use crate::runtime::sandbox;

/// Bytes of a call's body: with its signatures it still fits into an envelope.
const CALL_MAX: usize = 512 << 10;
/// For the body of a call.
const BODY_WITHIN: Duration = Duration::from_secs(30);
/// Calls of a run that are under way or can be asked for again by their id; an answer has 512 KiB at
/// most.
const CALLS_KEPT: usize = 32;

/// What became of a call.
type Answered = Option<Result<Value, Error>>;

/// A run's program uses a tool. Whoever takes it answers it.
#[derive(Debug)]
pub struct ToolUse {
    /// What is asked.
    pub request: ToolRequest,
    answer: watch::Sender<Answered>,
    ran: Arc<AtomicU64>,
}

impl ToolUse {
    /// Answers it.
    pub fn answer(self, result: Result<Value, Error>) {
        if result.is_ok() {
            self.ran.fetch_add(1, Ordering::Relaxed);
        }
        self.answer.send_replace(Some(result));
    }
}

/// The tools of one run; no longer there when this is dropped.
#[derive(Debug)]
pub(super) struct Tools {
    desk: Arc<Desk>,
    /// The port on 127.0.0.1; none where the run has a network of its own.
    pub port: Option<u16>,
    listening: Option<AbortOnDropHandle<()>>,
}

#[derive(Debug)]
struct Desk {
    token: Token,
    /// What was granted, as it is told.
    granted: Value,
    uses: mpsc::Sender<ToolUse>,
    hold: watch::Receiver<bool>,
    calls: Mutex<VecDeque<Made>>,
    ran: Arc<AtomicU64>,
}

/// A call that was made.
#[derive(Debug)]
struct Made {
    id: Option<CallId>,
    /// Digest of what was asked.
    asked: Digest,
    answer: watch::Receiver<Answered>,
}

impl Tools {
    /// The tools of `job`; none where nothing was granted.
    pub async fn open(job: &Job, control: &Control) -> std::io::Result<Option<Self>> {
        if job.grants.is_empty() {
            return Ok(None);
        }
        let desk = Arc::new(Desk {
            token: Token::draw()?,
            granted: granted(&job.grants),
            uses: control.tools.clone(),
            hold: control.hold.clone(),
            calls: Mutex::default(),
            ran: Arc::default(),
        });
        if sandbox::in_box(job.isolation) {
            return Ok(Some(Self { desk, port: None, listening: None }));
        }
        let listener = TcpListener::bind((std::net::Ipv4Addr::LOCALHOST, 0)).await?;
        let port = Some(listener.local_addr()?.port());
        let listening = Some(local_http::serve(listener, Arc::clone(&desk)));
        Ok(Some(Self { desk, port, listening }))
    }

    /// Answers at the socket that a box shows.
    pub fn listen(&mut self, socket: UnixListener) {
        self.listening = Some(local_http::serve(socket, Arc::clone(&self.desk)));
    }

    /// Variables that lead the program here.
    pub fn environment(&self) -> Vec<(String, String)> {
        let place = match self.port {
            Some(port) => vec![("TASK_TOOLS_URL", format!("http://127.0.0.1:{port}"))],
            None => vec![
                ("TASK_TOOLS_URL", "http://localhost".to_owned()),
                ("TASK_TOOLS_SOCKET", sandbox::SOCKET_INSIDE.to_owned()),
            ],
        };
        let token = ("TASK_TOOLS_TOKEN", self.desk.token.text().to_owned());
        place.into_iter().chain([token]).map(|(name, value)| (name.to_owned(), value)).collect()
    }

    /// Calls that ran, as far as is known here.
    pub fn ran(&self) -> Count {
        Count::clamped(self.desk.ran.load(Ordering::Relaxed))
    }
}

/// What a program is told of its grants: of each token what it allows, how often and until when.
fn granted(tokens: &[CapabilityToken]) -> Value {
    let grants = tokens
        .iter()
        .map(|token| json!({ "capabilities": token.capabilities, "limits": token.limits }));
    json!({ "grants": grants.collect::<Vec<_>>() })
}

/// The body of a call.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Asked {
    #[serde(default)]
    call_id: Option<CallId>,
    resource: Resource,
    action: Action,
    #[serde(default)]
    arguments: Value,
}

/// A request that is none of the two, or that cannot be taken.
struct Refused(StatusCode, Error);

fn refused(status: StatusCode, code: Code, text: &str) -> Refused {
    Refused(status, Error::new(code, text))
}

fn told(error: &Error) -> Value {
    json!({ "error": { "code": error.code(), "message": error.message() } })
}

impl Handler for Desk {
    async fn answer(&self, request: Request<Incoming>) -> Answer {
        let (status, said) = match self.serve(request).await {
            Ok(said) => (StatusCode::OK, said),
            Err(Refused(status, error)) => (status, told(&error)),
        };
        let mut answer = Response::new(whole(said.to_string()));
        *answer.status_mut() = status;
        let json = HeaderValue::from_static("application/json");
        answer.headers_mut().insert(header::CONTENT_TYPE, json);
        answer
    }
}

impl Desk {
    async fn serve(&self, request: Request<Incoming>) -> Result<Value, Refused> {
        if !self.token.is_shown(request.headers()) {
            let text = "show TASK_TOOLS_TOKEN as Authorization: Bearer";
            return Err(refused(StatusCode::UNAUTHORIZED, Code::AuthMissing, text));
        }
        match (request.uri().path(), request.method()) {
            ("/v1/tools", &Method::GET) => Ok(self.granted.clone()),
            ("/v1/tools/call", &Method::POST) => self.call(request.into_body()).await,
            ("/v1/tools" | "/v1/tools/call", _) => {
                let text = "GET /v1/tools, POST /v1/tools/call";
                Err(refused(StatusCode::METHOD_NOT_ALLOWED, Code::BadField, text))
            }
            _ => {
                let text = "there are /v1/tools and /v1/tools/call";
                Err(refused(StatusCode::NOT_FOUND, Code::BadField, text))
            }
        }
    }

    /// One call. However the requester answers it, it was answered.
    async fn call(&self, body: Incoming) -> Result<Value, Refused> {
        let request = read(body).await?;
        // At the end of a budget calls wait (decision 46).
        let gone = || refused(StatusCode::SERVICE_UNAVAILABLE, Code::Cancelled, "the run ends");
        let mut hold = self.hold.clone();
        hold.wait_for(|held| !held).await.map_err(|_| gone())?;
        let mut answer = match self.make(request) {
            Ok(answer) => answer,
            Err(error) => return Ok(told(&error)),
        };
        let answered = answer.wait_for(Option::is_some).await.map_err(|_| gone())?.clone();
        match answered {
            Some(Ok(output)) => Ok(json!({ "output": output })),
            Some(Err(error)) => Ok(told(&error)),
            None => Err(gone()),
        }
    }

    /// Makes a call, or finds the one that was made with its id: a program that did not wait for the
    /// answer gets it by asking again.
    fn make(&self, request: ToolRequest) -> Result<watch::Receiver<Answered>, Error> {
        let asked = [json!(request.resource), json!(request.action), request.arguments.clone()];
        let asked = Digest::of(&asked)?;
        let mut calls = self.calls.lock();
        let known = request.call_id.as_ref();
        let known = known.and_then(|id| calls.iter().find(|made| made.id.as_ref() == Some(id)));
        if let Some(known) = known {
            return if known.asked == asked {
                Ok(known.answer.clone())
            } else {
                Err(Error::new(Code::CallIdReused, "another call has this id"))
            };
        }
        let busy = || Error::new(Code::RateLimited, "too many calls wait for an answer");
        if calls.len() >= CALLS_KEPT {
            let over = calls.iter().position(|made| made.answer.borrow().is_some());
            calls.remove(over.ok_or_else(busy)?);
        }
        let (tell, answer) = watch::channel(None);
        let id = request.call_id.clone();
        let used = ToolUse { request, answer: tell, ran: Arc::clone(&self.ran) };
        self.uses.try_send(used).map_err(|_| busy())?;
        calls.push_back(Made { id, asked, answer: answer.clone() });
        Ok(answer)
    }
}

async fn read(body: Incoming) -> Result<ToolRequest, Refused> {
    let body = tokio::time::timeout(BODY_WITHIN, Limited::new(body, CALL_MAX).collect()).await;
    let late =
        |_| refused(StatusCode::REQUEST_TIMEOUT, Code::PeerTimeout, "the body does not come");
    let large = |_| refused(StatusCode::PAYLOAD_TOO_LARGE, Code::TooLarge, "more than 512 KiB");
    let body = body.map_err(late)?.map_err(large)?.to_bytes();
    let bad = |error| Refused(StatusCode::BAD_REQUEST, error);
    let value = parse(&body, CALL_MAX).map_err(bad)?;
    let Asked { call_id, resource, action, arguments } =
        serde_json::from_value(value).map_err(|error| {
            let text = format!("not {{ callId?, resource, action, arguments }}: {error}");
            refused(StatusCode::BAD_REQUEST, Code::BadField, &text)
        })?;
    Ok(ToolRequest { call_id, resource, action, arguments })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn so_many_calls_are_kept_and_the_first_answered_one_makes_room() {
        let (uses, mut used) = mpsc::channel(CALLS_KEPT + 1);
        let desk = Desk {
            token: Token::draw().unwrap(),
            granted: Value::Null,
            uses,
            hold: watch::channel(false).1,
            calls: Mutex::default(),
            ran: Arc::default(),
        };
        let request = |n: usize, arguments: Value| ToolRequest {
            call_id: Some(CallId::parse(&format!("call_{n:08}")).unwrap()),
            resource: Resource::parse("mcp:docs/a").unwrap(),
            action: Action::parse("read").unwrap(),
            arguments,
        };
        let code =
            |made: Result<watch::Receiver<Answered>, Error>| made.map_err(|e| e.code()).err();
        for n in 0..CALLS_KEPT {
            assert_eq!(code(desk.make(request(n, json!(n)))), None);
        }
        assert_eq!(code(desk.make(request(99, json!(1)))), Some(Code::RateLimited));
        // One that was made is found, also now.
        assert_eq!(code(desk.make(request(3, json!(3)))), None);
        assert_eq!(code(desk.make(request(3, json!(4)))), Some(Code::CallIdReused));
        used.try_recv().unwrap().answer(Ok(json!(0)));
        assert_eq!(code(desk.make(request(99, json!(1)))), None);
        assert_eq!(desk.calls.lock().len(), CALLS_KEPT);
        let first = desk.calls.lock().front().and_then(|made| made.id.clone());
        assert_eq!(first, request(1, json!(1)).call_id);
        assert_eq!(desk.ran.load(Ordering::Relaxed), 1);
    }
}
