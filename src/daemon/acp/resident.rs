//! The daemon's own side of the protocol: one identity, made when it is first needed, and its
//! office, which is opened at the start when there is an identity or work is taken, else at the first call. An office
//! that cannot be opened, or has failed, is a health condition, and is opened again some time later.
//! Each call of the local API is served in a task of its own and ends with its client.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use super::mesh::Mesh;
use super::service::{Service, Teller, refusal};
use super::{OfficeError, OfficeOptions, OfficeTask, read_key};
use crate::acp::did::Secret;
use crate::acp::objects::{Gate, GatePolicy};
use crate::acp::value::Name;
use crate::api::acp::{AcpCall, AcpNews};
use crate::api::types::{self, AcpTold, ApiError, RequestId, notification};
use crate::daemon::config::Config;
use crate::daemon::logging::{emit, event};
use crate::identity::device::DeviceKey;
use crate::identity::entropy::OsEntropy;
use crate::identity::files::BaseDir;
use crate::mesh::node::AcpRequest;
use crate::runtime::clock::unix_now;
use crate::runtime::local_socket::{ConnId, LocalHandle};

/// The identity, in [`Config::acp_dir`].
pub const IDENTITY: &str = "identity.json";

/// Calls under way. Most of them wait for a worker, and hold nothing but their task.
pub(in crate::daemon) const MAX_CALLS: usize = 128;

/// Runs at one time, as of a worker of the command line.
const MAX_RUNS: usize = 4;

/// When an office that has failed is opened again: at first, and at most. A caller need not wait for
/// that, but has it tried no more often than at first.
const RETRY_FIRST: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_secs(60);
/// How long an office has to last until its next failure counts as a first one. One that opens and then
/// cannot store (a full disk) fails sooner than that.
const STEADY: Duration = Duration::from_secs(120);

type Ask = oneshot::Sender<Result<Service, ApiError>>;

/// What the owner's task holds of it.
pub struct Resident {
    /// `None` in a daemon that keeps nothing.
    asks: Option<mpsc::Sender<Ask>>,
    problem: watch::Receiver<Option<ApiError>>,
    /// The office, while it is open: peers open none.
    opened: watch::Receiver<Option<Service>>,
    mesh: Mesh,
    places: Arc<Semaphore>,
    /// Of each client that has a call under way: ends its calls.
    clients: HashMap<ConnId, CancellationToken>,
    stop: CancellationToken,
    keeper: JoinHandle<()>,
}

impl Resident {
    /// Begins; nothing is opened yet. `name` is who invites are from, `mesh` the
    /// way to peers.
    #[must_use]
    pub fn start(config: &Config, name: Name, mesh: Mesh) -> Self {
        let stop = CancellationToken::new();
        let (told, problem) = watch::channel(None);
        let (open, opened) = watch::channel(None);
        let (asks, keeper) = if config.ephemeral {
            (None, tokio::spawn(async {}))
        } else {
            let (asks, waiting) = mpsc::channel(MAX_CALLS);
            let (config, mesh, stop) = (config.clone(), mesh.clone(), stop.clone());
            let keeper = Keeper { config, name, mesh, told, open, stop };
            (Some(asks), tokio::spawn(keeper.keep(waiting)))
        };
        let places = Arc::new(Semaphore::new(MAX_CALLS));
        Self { asks, problem, opened, mesh, places, clients: HashMap::new(), stop, keeper }
    }

    /// Serves a peer's request to the device with `key`, off this task; the node bounds how many there
    /// are. Nothing is opened or made for peers.
    pub fn serve_peer(&self, request: AcpRequest, key: Option<DeviceKey>) {
        let service = self.opened.borrow().clone();
        tokio::spawn(self.mesh.clone().serve(service, request, key));
    }

    /// Serves a call, off this task. The client is answered through `local`.
    pub fn call(&mut self, local: &LocalHandle, conn: ConnId, id: RequestId, call: AcpCall) {
        let Some(asks) = self.asks.clone() else {
            let error = ApiError::new(
                "acp_ephemeral",
                "a daemon with --ephemeral keeps nothing, and a task is worth nothing without its log",
                "start the daemon without --ephemeral, or use --key FILE",
            );
            local.refuse(conn, &id, error);
            return;
        };
        let Ok(place) = Arc::clone(&self.places).try_acquire_owned() else {
            let what = format!("{MAX_CALLS} calls are under way");
            local.refuse(conn, &id, ApiError::new("busy", what, "try again in a moment"));
            return;
        };
        let gone = self.clients.entry(conn).or_insert_with(|| self.stop.child_token()).clone();
        let local = local.clone();
        tokio::spawn(async move {
            tokio::select! {
                () = gone.cancelled() => {}
                answer = serve(asks, call, &local, conn, &id) => match answer {
                    Ok(answer) => local.reply(conn, &id, &answer),
                    Err(error) => local.refuse(conn, &id, error),
                },
            }
            drop(place);
        });
    }

    /// A client has gone: its calls end.
    pub fn gone(&mut self, conn: ConnId) {
        if let Some(calls) = self.clients.remove(&conn) {
            calls.cancel();
        }
    }

    /// What is wrong with the office.
    #[must_use]
    pub fn problem(&self) -> Option<types::Health> {
        let problem = self.problem.borrow();
        let problem = problem.as_ref()?;
        Some(types::Health {
            code: "acp_office".into(),
            severity: types::Severity::Error,
            text: format!("no tasks go on: {} ({})", problem.message, problem.code),
            todo: problem.todo.clone(),
        })
    }

    /// Ends calls, then the office, in order.
    pub async fn close(self) {
        self.stop.cancel();
        // Nothing is to be done about one that did not end well: its store is the truth.
        let _ = self.keeper.await;
    }
}

async fn serve(
    asks: mpsc::Sender<Ask>,
    call: AcpCall,
    local: &LocalHandle,
    conn: ConnId,
    id: &RequestId,
) -> Result<serde_json::Value, ApiError> {
    let closed = || {
        let todo = "try again when it is back; `commsd run` starts one";
        ApiError::new(ApiError::SHUTTING_DOWN, "the daemon is going down", todo)
    };
    let (ask, opened) = oneshot::channel();
    asks.send(ask).await.map_err(|_| closed())?;
    let service = opened.await.map_err(|_| closed())??;
    let tell = |news: AcpNews| {
        // Whoever is gone, or does not read, goes without.
        let _ = local.notify(conn, notification::ACP, &AcpTold { request: id.clone(), news });
    };
    service.serve(call, &Teller(tell)).await.map_err(|error| refusal(&error))
}

/// Opens the office, and opens it again.
struct Keeper {
    config: Config,
    name: Name,
    mesh: Mesh,
    told: watch::Sender<Option<ApiError>>,
    open: watch::Sender<Option<Service>>,
    stop: CancellationToken,
}

struct Open {
    service: Service,
    task: OfficeTask,
}

/// The pauses before an office that has failed is opened again.
struct Pauses {
    next: Duration,
}

impl Pauses {
    const fn new() -> Self {
        Self { next: RETRY_FIRST }
    }

    /// The pause after one that was open for so long.
    fn after(&mut self, lasted: Duration) -> Duration {
        if lasted >= STEADY {
            self.next = RETRY_FIRST;
        }
        let doubled = (self.next * 2).min(RETRY_MAX);
        std::mem::replace(&mut self.next, doubled)
    }
}

impl Keeper {
    async fn keep(self, mut asks: mpsc::Receiver<Ask>) {
        let mut pauses = Pauses::new();
        let there = self.config.acp_work.is_some()
            || self.config.acp_dir().join(IDENTITY).symlink_metadata().is_ok();
        // When it is opened without being asked for; and why it was not, the last time.
        let mut due = there.then(Instant::now);
        let mut failed: Option<(Instant, ApiError)> = None;
        loop {
            let asked = tokio::select! {
                biased;
                () = self.stop.cancelled() => return,
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => None,
                Some(ask) = asks.recv() => Some(ask),
            };
            if let (Some((at, _)), Some(_)) = (&failed, &asked)
                && at.elapsed() < RETRY_FIRST
            {
                answer(asked, failed.as_ref().map(|(_, error)| error));
                continue;
            }
            let (error, lasted) = match self.open().await {
                Ok(open) => {
                    let opened_at = Instant::now();
                    self.told.send_replace(None);
                    if let Some(asked) = asked {
                        let _ = asked.send(Ok(open.service.clone()));
                    }
                    match self.work(open, &mut asks).await {
                        Ok(()) => return,
                        Err(error) => (error, opened_at.elapsed()),
                    }
                }
                Err(error) => {
                    answer(asked, Some(&error));
                    (error, Duration::ZERO)
                }
            };
            let pause = pauses.after(lasted);
            emit(
                &event("acp_office_failed")
                    .with("code", &error.code)
                    .with("message", &error.message)
                    .with("retry_ms", pause.as_millis()),
            );
            self.told.send_replace(Some(error.clone()));
            failed = Some((Instant::now(), error));
            due = Some(Instant::now() + pause);
        }
    }

    /// Gives the office to who asks for it, until it fails; `Ok` when the daemon stops.
    async fn work(&self, open: Open, asks: &mut mpsc::Receiver<Ask>) -> Result<(), ApiError> {
        let Open { service, mut task } = open;
        self.open.send_replace(Some(service.clone()));
        let ended = self.hand_out(&service, &mut task, asks).await;
        self.open.send_replace(None);
        ended
    }

    async fn hand_out(
        &self,
        service: &Service,
        mut task: &mut OfficeTask,
        asks: &mut mpsc::Receiver<Ask>,
    ) -> Result<(), ApiError> {
        loop {
            tokio::select! {
                ended = &mut task => {
                    let ended = ended.map_err(OfficeError::from).and_then(|ended| ended);
                    return match ended {
                        Ok(()) => Ok(()),
                        Err(error) => Err(error.into()),
                    };
                }
                Some(ask) = asks.recv() => {
                    let _ = ask.send(Ok(service.clone()));
                }
            }
        }
    }

    async fn open(&self) -> Result<Open, ApiError> {
        let config = self.config.clone();
        let key = tokio::task::spawn_blocking(move || identity(&config)).await;
        let key = key.map_err(OfficeError::from)??;
        let mut options = OfficeOptions::new(key, self.config.acp_dir());
        options.relays.clone_from(&self.config.acp_relays);
        options.endpoints = self.config.acp_endpoints();
        options.mesh = Some(self.mesh.clone());
        options.admission = self.config.acp_admit.admission();
        options.tools.clone_from(&self.config.acp_tools.0);
        options.auto = self.config.acp_gates.with(GatePolicy::Auto);
        options.deny = self.config.acp_gates.with(GatePolicy::Deny);
        if let Some(work) = &self.config.acp_work {
            options.work = Some((work.options(), MAX_RUNS));
            options.auto.extend(work.auto_accept.then_some(Gate::ContractAcceptance));
        }
        let transports = options.transports()?;
        // Not the daemon's own: an office that has failed stops its listeners with its token.
        let stop = self.stop.child_token();
        let ends_with_it = stop.clone().drop_guard();
        let (office, task) = options.open(transports.clone(), stop).await?;
        emit(
            &event("acp_office_opened")
                .with("did", office.did())
                .with("relays", self.config.acp_relays.len()),
        );
        // What listens for the office ends when its task does, however that ends.
        let task = tokio::spawn(async move {
            let ended = task.await;
            drop(ends_with_it);
            ended?
        });
        let name = self.name.clone();
        Ok(Open { service: Service { office, transports, name }, task })
    }
}

fn answer(asked: Option<Ask>, error: Option<&ApiError>) {
    if let (Some(asked), Some(error)) = (asked, error) {
        // Whoever has gone needs no answer.
        let _ = asked.send(Err(error.clone()));
    }
}

/// The daemon's identity; made when there is none.
fn identity(config: &Config) -> Result<Secret, ApiError> {
    let files = |error: crate::identity::files::FilesError| {
        ApiError::new(error.code(), error.to_string(), "mend what is named; it is tried again")
    };
    let dir = BaseDir::open(&config.acp_dir()).map_err(files)?;
    let path = dir.file(IDENTITY);
    if path.symlink_metadata().is_err() {
        let mut entropy = OsEntropy::open().map_err(OfficeError::from)?;
        let key = Secret::draw(&mut entropy).map_err(OfficeError::from)?;
        if dir.create(IDENTITY, &key.to_key_file(unix_now())).map_err(files)? {
            emit(&event("acp_identity_created").with("did", key.did()));
        }
    }
    read_key(&path).map_err(|error| {
        let todo = "mend it, or move it away: a new identity is made then, and the tasks of this one \
                    stay where they are";
        ApiError::new(error.code(), error.to_string(), todo)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_until_an_office_has_lasted() {
        let mut pauses = Pauses::new();
        let mut after = |lasted: u64| pauses.after(Duration::from_secs(lasted)).as_secs();
        // That it can be opened is no sign that it works.
        let waits: Vec<u64> = [0, 1, 0, 30, 119, 0, 0, 0].into_iter().map(&mut after).collect();
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!(after(120), 1);
        assert_eq!(after(0), 2);
    }
}
