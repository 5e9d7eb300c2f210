//! The connection to the daemon, kept for as long as the harness session lasts: started, attached,
//! subscribed, and made again when it breaks. Calls wait a while for it.

use std::ffi::OsString;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::process::{Child, Command};
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::{Instant, sleep, timeout};

use super::Options;
use crate::api::client::{Client, Notification, Notifications};
use crate::api::types::{ApiError, AttachParams, Attached, Call, Event, EventsSubscribeParams};
use crate::identity::process;

/// What the daemon is told this program is.
const PROGRAM: &str = "commsd-mcp";
/// How long a call waits for the connection: a daemon starts within a fraction of it.
const PATIENCE: Duration = Duration::from_secs(10);
/// First pause before connecting again; it doubles.
const RETRY_FIRST: Duration = Duration::from_millis(20);
/// Longest pause.
const RETRY_MAX: Duration = Duration::from_secs(2);
/// A daemon that is started gets so long before another one is.
const START_EVERY: Duration = Duration::from_secs(5);

/// How a daemon is started.
#[derive(Clone, Debug)]
pub struct Start {
    /// This program.
    pub program: std::path::PathBuf,
    /// What makes it run the daemon that the socket belongs to.
    pub args: Vec<OsString>,
}

/// An event, and when it came.
pub struct Come {
    pub event: Event,
    pub at: Instant,
}

/// The agent as it is attached at present.
#[derive(Clone)]
pub struct Connected {
    pub client: Arc<Client>,
    pub attached: Arc<Attached>,
    /// Newest event when it was attached.
    pub head: u64,
}

pub struct Link {
    options: Options,
    cwd: String,
    /// The process of the harness session, by which its hooks find the agent.
    harness_pid: Option<u32>,
    state: watch::Sender<Option<Connected>>,
    /// Why there is no connection.
    problem: Mutex<Option<ApiError>>,
    /// Something has come into the mailbox.
    news: Notify,
    push: mpsc::Sender<Come>,
}

impl Link {
    pub fn new(options: Options, cwd: String, push: mpsc::Sender<Come>) -> Self {
        Self {
            options,
            cwd,
            harness_pid: process::harness(&process::ancestors()),
            state: watch::Sender::new(None),
            problem: Mutex::new(None),
            news: Notify::new(),
            push,
        }
    }

    /// Where the daemon is.
    pub fn socket(&self) -> &std::path::Path {
        &self.options.socket
    }

    /// Where the harness works.
    pub fn cwd(&self) -> &str {
        &self.cwd
    }

    /// Keeps the connection until the task is ended.
    pub async fn keep(&self) {
        let mut pause = RETRY_FIRST;
        let mut started: Option<(Instant, Child)> = None;
        loop {
            match self.connect().await {
                Ok((connected, notifications)) => {
                    pause = RETRY_FIRST;
                    *self.problem.lock() = None;
                    self.state.send_replace(Some(connected));
                    self.news.notify_waiters();
                    self.pass_on(notifications).await;
                    self.state.send_replace(None);
                }
                Err(error) => {
                    let nobody = error.code == ApiError::NO_DAEMON;
                    let mut problem = error;
                    if nobody && let Some(start) = &self.options.start {
                        let due =
                            started.as_ref().is_none_or(|(at, _)| at.elapsed() >= START_EVERY);
                        if due {
                            match start_daemon(start) {
                                Ok(child) => started = Some((Instant::now(), child)),
                                Err(error) => {
                                    problem.message = format!(
                                        "{}; it could not be started: {error}",
                                        problem.message
                                    );
                                }
                            }
                        }
                    }
                    if let Some((_, child)) = &mut started
                        && let Ok(Some(status)) = child.try_wait()
                        && !status.success()
                    {
                        problem.message = format!("the daemon did not start ({status})");
                        problem.todo = Some("run `commsd run` in a terminal to see why".into());
                    }
                    *self.problem.lock() = Some(problem);
                }
            }
            sleep(pause).await;
            pause = (pause * 2).min(RETRY_MAX);
        }
    }

    async fn connect(&self) -> Result<(Connected, Notifications), ApiError> {
        let (client, notifications) = Client::connect(&self.options.socket, PROGRAM).await?;
        let attached = client
            .call(AttachParams {
                harness: self.options.harness.clone(),
                cwd: self.cwd.clone(),
                pid: std::process::id(),
                key: None,
                name: self.options.name.clone(),
                ephemeral: None,
                project_room: Some(true),
                harness_pid: self.harness_pid,
            })
            .await?;
        let subscribed = client.call(EventsSubscribeParams { after: Some(u64::MAX) }).await?;
        let connected = Connected {
            client: Arc::new(client),
            attached: Arc::new(attached),
            head: subscribed.head,
        };
        Ok((connected, notifications))
    }

    /// Until the connection ends.
    async fn pass_on(&self, mut notifications: Notifications) {
        while let Some(notification) = notifications.recv().await {
            if let Notification::Event(event) = notification {
                self.news.notify_waiters();
                // Full: the harness does not take its pushes; the event is in the mailbox.
                let _ = self.push.try_send(Come { event, at: Instant::now() });
            }
        }
    }

    /// The connection, once there is one.
    pub async fn connected(&self) -> Result<Connected, ApiError> {
        let mut state = self.state.subscribe();
        let found = timeout(PATIENCE, state.wait_for(Option::is_some)).await;
        if let Ok(Ok(state)) = found
            && let Some(connected) = state.clone()
        {
            return Ok(connected);
        }
        Err(self.problem.lock().clone().unwrap_or_else(|| {
            ApiError::new(
                ApiError::NO_DAEMON,
                "the daemon does not answer",
                "see `commsd status` and `commsd doctor`",
            )
        }))
    }

    /// The connection, if there is one just now.
    pub fn at_once(&self) -> Option<Connected> {
        self.state.borrow().clone()
    }

    /// Asks the daemon.
    pub async fn call<P: Call>(&self, params: P) -> Result<P::Output, ApiError> {
        self.connected().await?.client.call(params).await
    }

    /// Completes when something comes into the mailbox, or the connection is made again.
    pub fn news(&self) -> tokio::sync::futures::Notified<'_> {
        self.news.notified()
    }

    /// Ends the connection.
    pub fn close(&self) {
        self.state.send_replace(None);
    }
}

/// Starts a daemon of its own process group, which outlives this process and hears none of its
/// terminal's signals.
fn start_daemon(start: &Start) -> std::io::Result<Child> {
    Command::new(&start.program)
        .args(&start.args)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
}
