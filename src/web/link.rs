//! The page's connections to the daemon, one as the agent and one as the operator: kept, and made
//! again when one of them breaks. What the daemon tells goes on the board, for all open pages.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hyper::StatusCode;
use hyper::body::Bytes;
use parking_lot::Mutex;
use serde::Serialize;
use serde_json::{Value, json};
use tokio::time::sleep;

use super::News;
use super::calls::{PageCall, Role, answered};
use crate::api::client::{Client, Notification, Notifications, disconnected};
use crate::api::types::{
    ApiError, Attached, EventsSubscribeParams, Label, WatchParams, WebAnnounceParams,
};
use crate::runtime::page_server::{Board, Desk};

/// What the daemon is told this program is.
const PROGRAM: &str = "commsd-web";
/// First pause before connecting again; it doubles.
const RETRY_FIRST: Duration = Duration::from_millis(20);
/// Longest pause.
const RETRY_MAX: Duration = Duration::from_secs(2);

/// The daemon, as long as it is there.
struct Connected {
    agent: Client,
    operator: Client,
    attached: Attached,
}

/// What comes from it without being asked for.
pub(super) struct Streams {
    agent: Notifications,
    /// Of interest is its end alone.
    operator: Notifications,
}

pub(super) struct Link {
    socket: PathBuf,
    agent: Label,
    url: String,
    board: Arc<Board>,
    /// Or why it is not there.
    state: Mutex<Result<Arc<Connected>, ApiError>>,
}

impl Link {
    /// Connects.
    ///
    /// # Errors
    /// As [`Client::connect`] and [`Client::act_as`].
    pub(super) async fn open(
        socket: PathBuf,
        agent: Label,
        url: String,
        board: Arc<Board>,
    ) -> Result<(Self, Streams), ApiError> {
        let state = Mutex::new(Err(disconnected(None)));
        let link = Self { socket, agent, url, board, state };
        let streams = link.connect().await?;
        Ok((link, streams))
    }

    async fn connect(&self) -> Result<Streams, ApiError> {
        let (agent, of_agent) = Client::connect(&self.socket, PROGRAM).await?;
        let (operator, of_operator) = Client::connect(&self.socket, PROGRAM).await?;
        let attached = agent.act_as(&self.agent).await?;
        operator.call(WebAnnounceParams { url: self.url.clone() }).await?;
        agent.call(WatchParams { after: None }).await?;
        // Last: what waits in the mailbox comes behind the answer.
        agent.call(EventsSubscribeParams { after: None }).await?;
        *self.state.lock() = Ok(Arc::new(Connected { agent, operator, attached }));
        Ok(Streams { agent: of_agent, operator: of_operator })
    }

    /// Passes on what the daemon tells, and connects again whenever it has gone. Never ends.
    pub(super) async fn keep(&self, mut streams: Streams, told: impl Fn(News<'_>)) {
        loop {
            let error = self.pass_on(streams).await;
            told(News::Lost(&error));
            *self.state.lock() = Err(error);
            self.board.tell("state", &self.state());
            let mut pause = RETRY_FIRST;
            streams = loop {
                match self.connect().await {
                    Ok(streams) => break streams,
                    Err(error) => *self.state.lock() = Err(error),
                }
                sleep(pause).await;
                pause = (pause * 2).min(RETRY_MAX);
            };
            self.board.tell("state", &self.state());
            told(News::Back);
        }
    }

    /// Until either connection ends; says why.
    async fn pass_on(&self, streams: Streams) -> ApiError {
        let Streams { mut agent, mut operator } = streams;
        let mut reason = None;
        loop {
            let told = tokio::select! {
                told = agent.recv() => told,
                told = operator.recv() => told,
            };
            match told {
                Some(Notification::Event(event)) => self.tell("event", &event),
                Some(Notification::Change(change)) => self.tell("change", &change),
                Some(Notification::Closing(why)) => reason = Some(why),
                // Not asked for.
                Some(Notification::Log(_) | Notification::Acp(_)) => {}
                None => return disconnected(reason.as_deref()),
            }
        }
    }

    fn tell(&self, kind: &str, what: &impl Serialize) {
        if let Ok(json) = serde_json::to_string(what) {
            self.board.tell(kind, &json);
        }
    }

    async fn pass(&self, call: PageCall) -> Result<Value, ApiError> {
        let connected = self.state.lock().clone()?;
        let client = match call.role {
            Role::Agent => &connected.agent,
            Role::Operator => &connected.operator,
        };
        client.call_value(&call.method, &Value::Object(call.params)).await
    }
}

impl Desk for Link {
    async fn ask(&self, body: Bytes) -> (StatusCode, Vec<u8>) {
        match PageCall::read(&body) {
            Ok(call) => (StatusCode::OK, answered(self.pass(call).await)),
            Err((status, error)) => (status, answered(Err(error))),
        }
    }

    fn state(&self) -> String {
        let state = match &*self.state.lock() {
            Ok(connected) => json!({
                "connected": true,
                "agent": connected.attached.agent,
                "name": connected.attached.name,
                "version": connected.agent.hello().version,
            }),
            Err(error) => json!({ "connected": false, "error": error }),
        };
        state.to_string()
    }
}
