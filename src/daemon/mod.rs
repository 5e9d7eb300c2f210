//! Composition: configuration, then identities, store, node, transport and the local socket; the
//! signals that end it. `owner` is the one task that holds the state; the other rooms serve it.

pub mod acp;
pub mod acp_relay;
mod advice;
mod codes;
pub mod config;
mod discovery;
mod health;
mod hooks;
mod hygiene;
mod identities;
mod keeping;
mod listeners;
pub mod logging;
mod lookup;
mod names;
mod owner;
mod pages;
mod pending;
mod project_rooms;
pub mod relay_hub;
mod requests;
mod trust;
mod vaults;
mod views;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use self::acp::Mesh;
use self::acp::resident::Resident;
use self::config::Config;
use self::health::{Health, condition};
use self::hooks::Sessions;
use self::hygiene::Hygiene;
use self::identities::{Identities, SlotRequest};
use self::keeping::Keeper;
use self::logging::{emit, event};
use self::owner::{Owner, Sources};
use self::pages::Pages;
use self::trust::TrustFile;
use self::vaults::Desk;
use crate::acp::value::Name;
use crate::api::types::{ApiError, PROGRAM_VERSION, Severity};
use crate::identity::entropy::OsEntropy;
use crate::identity::files::BaseDir;
use crate::identity::issuer::{IssuerFile, IssuerKind};
use crate::mesh::node::{HubConfig, Input, Node, NodeConfig};
use crate::runtime::clock::{Clock, unix_now};
use crate::runtime::hub::{Hub, HubOptions, TransportLimits};
use crate::runtime::local_socket::{self, Claim, Holder, SocketLimits};
use crate::runtime::sys;
use crate::store::StoreError;

/// Harness of agents that shells and scripts use with `--as`.
pub(crate) const CLI_HARNESS: &str = "cli";
/// Slot of the daemon's own device.
const DAEMON_HARNESS: &str = "commsd";
const DAEMON_KEY: &str = "daemon";
/// Requests from clients that may wait for the owner; connections wait when it is full.
const LOCAL_QUEUE: usize = 1024;
/// Threads for everything that does not block: one for the owner of the state, and one for what
/// goes on beside it, cryptography above all. More would cost memory and gain nothing.
const WORKERS: usize = 2;
/// Reports of identity changes on disk; the thread waits when it is full.
const SAVED_QUEUE: usize = 1024;
/// Attaches whose slots are being opened.
const OPENING_QUEUE: usize = 256;
/// Bytes of events or messages in one answer: fits a line with room for escapes.
pub(crate) const MAX_ANSWER_BYTES: usize = 512 * 1024;

/// Why the daemon did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The local socket.
    #[error(transparent)]
    Socket(#[from] local_socket::SocketError),
    /// The identity directory.
    #[error(transparent)]
    Files(#[from] crate::identity::files::FilesError),
    /// The user's or the machine's identity.
    #[error(transparent)]
    Issuer(#[from] crate::identity::issuer::IssuerError),
    /// The daemon's own identity.
    #[error("the daemon's own identity cannot be opened: {0}")]
    Identity(String),
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A listener.
    #[error(transparent)]
    Listener(#[from] crate::runtime::hub::AddDeviceError),
    /// Randomness.
    #[error(transparent)]
    Entropy(#[from] crate::identity::entropy::EntropyError),
    /// Something the operating system refused.
    #[error("cannot {what}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
}

impl StartError {
    /// Stable code.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Socket(error) => error.code(),
            Self::Files(error) => error.code(),
            Self::Issuer(error) => error.code(),
            Self::Identity(_) => "daemon_identity",
            Self::Store(error) => error.code(),
            Self::Listener(error) => error.code(),
            Self::Entropy(error) => error.code(),
            Self::Io { .. } => "start_io",
        }
    }

    /// What to do about it.
    #[must_use]
    pub fn todo(&self) -> String {
        match self {
            Self::Socket(error) => error.todo(),
            Self::Files(_) | Self::Issuer(_) | Self::Identity(_) => {
                "mend the file or directory that is named, or choose another with --agent-comms-dir"
                    .into()
            }
            Self::Store(error) => {
                format!("{}; or start with --ephemeral, which leaves it alone", error.todo())
            }
            Self::Entropy(_) => "check the system's random source".into(),
            Self::Listener(_) => "free the address or choose another with --listen".into(),
            Self::Io { .. } => "check limits and permissions; see `commsd run --check`".into(),
        }
    }

    /// Whether another configuration would mend it: not damage, and not what the system is short of.
    #[must_use]
    pub fn is_configuration(&self) -> bool {
        use crate::identity::{files::FilesError, issuer::IssuerError};
        match self {
            Self::Store(error) => error.is_configuration(),
            Self::Socket(local_socket::SocketError::Io { source, .. })
            | Self::Files(FilesError::Io { source, .. })
            | Self::Issuer(IssuerError::Files(FilesError::Io { source, .. })) => {
                !is_shortage(source)
            }
            Self::Socket(_) | Self::Files(_) | Self::Issuer(_) | Self::Listener(_) => true,
            Self::Identity(_) | Self::Entropy(_) | Self::Io { .. } => false,
        }
    }

    fn io(what: &'static str) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Io { what, source }
    }
}

impl From<StartError> for ApiError {
    fn from(error: StartError) -> Self {
        Self::new(error.code(), error.to_string(), error.todo())
    }
}

/// How a run ended.
#[derive(Debug)]
pub enum Ran {
    /// It was told to stop and did.
    Stopped,
    /// Another daemon serves this home.
    AlreadyRunning(Holder),
}

/// Whether the disk is full or damaged, or the system is short of something.
fn is_shortage(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{OutOfMemory, QuotaExceeded, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded | OutOfMemory)
        || error.raw_os_error() == Some(rustix::io::Errno::IO.raw_os_error())
        || is_descriptor_error(error)
}

/// Whether the system is out of descriptors.
pub(crate) fn is_descriptor_error(error: &std::io::Error) -> bool {
    use rustix::io::Errno;
    error.raw_os_error().is_some_and(|code| {
        code == Errno::MFILE.raw_os_error() || code == Errno::NFILE.raw_os_error()
    })
}

/// Runs the daemon until it is told to stop by SIGTERM, SIGINT or SIGHUP; a second signal ends the
/// process at once. For a second daemon of the same socket it only tells whose it is. `started` is
/// called once the socket answers.
///
/// # Errors
/// What keeps it from starting; nothing is left bound then.
pub fn run(
    config: &Config,
    started: impl FnOnce(&Config) + Send + 'static,
) -> Result<Ran, StartError> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .enable_all()
        .thread_name("commsd")
        .build()
        .map_err(StartError::io("start the runtime"))?;
    let ran = runtime.block_on(async {
        let stop = CancellationToken::new();
        watch_signals(stop.clone())?;
        // Not on this thread: between tasks of the same worker a wake-up costs no system call.
        let served = tokio::spawn(serve(config.clone(), stop, started));
        served.await.unwrap_or_else(|ended| match ended.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(ended) => Err(StartError::Io { what: "go on", source: ended.into() }),
        })
    });
    // Reads of the identity files may still be under way; nothing waits for them.
    runtime.shutdown_background();
    ran
}

/// Runs the daemon until `stop` is cancelled.
///
/// # Errors
/// As [`run`].
pub async fn serve(
    config: Config,
    stop: CancellationToken,
    started: impl FnOnce(&Config) + Send,
) -> Result<Ran, StartError> {
    let clock = Clock::start();
    let claim = match local_socket::claim(&config.socket)? {
        Claim::Ours(claim) => claim,
        Claim::Theirs(holder) => {
            // A unit of Type=notify counts an end without it as a failure and starts again.
            notify(&[sd_notify::NotifyState::Ready]);
            return Ok(Ran::AlreadyRunning(holder));
        }
    };
    let ring = logging::init(config.log, &config.log_filter);
    emit(
        &event("starting")
            .with("version", PROGRAM_VERSION)
            .with("pid", std::process::id())
            .with("socket", config.socket.display())
            .with("port", config.port)
            .with(
                "state",
                match config.ephemeral {
                    true => "memory".into(),
                    false => config.store_dir().display().to_string(),
                },
            ),
    );
    // Before anything that others would notice.
    let opening = config.clone();
    let (store, stored, records) = tokio::task::spawn_blocking(move || Keeper::open(&opening))
        .await
        .map_err(|ended| StartError::Io { what: "open the store", source: ended.into() })??;
    let mut health = Health::default();
    let descriptors = match sys::raise_descriptor_limit() {
        Ok(limit) => limit.soft,
        Err(error) => {
            health.lasting.push(condition(
                "descriptors_not_raised",
                Severity::Warning,
                format!("the descriptor limit could not be raised: {error}"),
                "raise it before the start (LimitNOFILE= or ulimit -n)",
            ));
            sys::descriptor_limit().soft
        }
    };
    let mut entropy = OsEntropy::open()?;
    let base = BaseDir::open(&config.agent_comms_dir)?;
    let now = unix_now();
    let (user, _) = IssuerFile::open(&base, IssuerKind::User, now, &mut entropy)?;
    let (machine, _) = IssuerFile::open(&base, IssuerKind::Machine, now, &mut entropy)?;
    let (saved_tickets, saved) = mpsc::channel(SAVED_QUEUE);
    let (identities, identities_thread) =
        Identities::start(base.clone(), OsEntropy::open()?, saved_tickets)
            .map_err(StartError::io("start the identities thread"))?;
    let own = identities
        .open(SlotRequest {
            harness: DAEMON_HARNESS.into(),
            key: DAEMON_KEY.into(),
            ephemeral: false,
            in_use: Vec::new(),
        })
        .await
        .map_err(|_| StartError::Identity("the identities thread ended".into()))?
        .map_err(|error| StartError::Identity(error.message))?;
    if let Some(reason) = &own.reason {
        health.lasting.push(condition(
            "daemon_ephemeral",
            Severity::Warning,
            format!("the daemon's own identity is in use: {reason}"),
            "end the other daemon, or give this one a --home of its own",
        ));
    }
    let (hub, mesh) = Hub::new(HubOptions {
        daemon: own.key.id(),
        port: config.port,
        relay: config.hub_url(),
        limits: TransportLimits::with_descriptors(descriptors),
    });
    let data_port = hub.add_device(&own.key, &own.certificate)?;
    let mut network_listener = None;
    if let Some(listen) = &config.listen {
        let address = std::net::SocketAddr::new(listen.ip, listen.port.unwrap_or(0));
        let bound = hub.listen_network(address)?;
        network_listener = Some(bound);
        emit(&event("listening").with("what", "network").with("address", bound));
    }
    let mut node = Node::new(
        NodeConfig {
            port: config.port,
            first_contact: config.first_contact,
            network_port: network_listener.map(|at| at.port()),
            version: PROGRAM_VERSION.to_owned(),
            pid: std::process::id(),
            user: Some(user.key().clone()),
            machine: Some(machine.key().clone()),
            machine_name: machine.display_name().map(str::to_owned),
            consent: config.consent,
            hub: config.hub.clone().map(|url| HubConfig { url, names: config.hub_names }),
        },
        own.key,
        data_port,
        Box::new(entropy),
        clock.now(),
    );
    node.limit_histories(config.history());
    if let Some(records) = records {
        node.recover(records, clock.now())
            .map_err(|error| StoreError::Corrupt(error.to_string()))?;
    }
    let listener = claim.bind()?;
    let (local_inputs, local) = mpsc::channel(LOCAL_QUEUE);
    let socket_stop = CancellationToken::new();
    let server = listener.serve(
        SocketLimits::with_descriptors(descriptors),
        local_inputs,
        socket_stop.clone(),
    );
    emit(&event("listening").with("what", "socket").with("address", config.socket.display()));
    let (opening, opened) = mpsc::channel(OPENING_QUEUE);
    if config.first_contact
        && let Err(error) = hub.start_first_contact(config.first_contact_port, config.broadcast)
    {
        emit(&event("first_contact_unavailable").with("reason", &error));
        health.lasting.push(condition(
            "first_contact_unavailable",
            Severity::Warning,
            error.to_string(),
            "peers are found by the port alone; free the UDP port to mend it",
        ));
    }
    let (desk, vaults) = Desk::new();
    let (way, acp_asked) = Mesh::new(config.acp_admit.peers);
    let acp_name = Name::lossy(machine.display_name().unwrap_or("commsd"));
    let acp = Resident::start(&config, acp_name, way);
    let device = node.daemon();
    let config = Arc::new(config);
    let owner = Owner {
        config: Arc::clone(&config),
        stop: stop.clone(),
        node,
        hub,
        store,
        store_error: None,
        identities,
        trust: TrustFile::new(base.clone()),
        listeners: Vec::new(),
        network_listener,
        base,
        local: server.handle.clone(),
        ring,
        clock,
        health,
        clients: HashMap::new(),
        followers: BTreeMap::new(),
        watchers: BTreeSet::new(),
        pages: Pages::default(),
        hosted: BTreeMap::new(),
        opening,
        opening_slots: Vec::new(),
        attach_later: Vec::new(),
        replies: HashMap::new(),
        actions: HashMap::new(),
        waiting: Vec::new(),
        sessions: Sessions::default(),
        hygiene: Hygiene::default(),
        news: BTreeSet::new(),
        desk,
        acp,
        acp_asks: HashMap::new(),
        next_op: 0,
        change_seq: 0,
        inputs: VecDeque::from([Input::Start]),
        shutdown_ready: false,
        machine: Some(machine.key().id()),
        principal: Some(user.key().id()),
    };
    emit(&event("ready").with("device", device));
    notify(&[sd_notify::NotifyState::Ready]);
    started(&config);
    let owner = owner
        .run(Sources { mesh, local, opened, saved, stored, vaults, acp: acp_asked, stop })
        .await;
    notify(&[sd_notify::NotifyState::Stopping]);
    emit(&event("stopping").with("reason", "asked"));
    socket_stop.cancel();
    // The socket's own deadline bounds this.
    let _ = server.task.await;
    let uptime = clock.now().mono;
    owner.finish(uptime).await;
    // Releases every lock it still holds.
    let _ = tokio::task::spawn_blocking(move || identities_thread.join()).await;
    Ok(Ran::Stopped)
}

fn notify(states: &[sd_notify::NotifyState<'_>]) {
    // Without systemd there is nobody to tell.
    let _ = sd_notify::notify(states);
}

/// Feeds systemd's watchdog from the owner's own loop, so that a stuck owner is noticed.
pub(crate) struct Watchdog {
    every: Option<tokio::time::Interval>,
}

pub(crate) fn watchdog() -> Watchdog {
    let every = sd_notify::watchdog_enabled().map(|limit| tokio::time::interval(limit / 2));
    Watchdog { every }
}

impl Watchdog {
    /// Completes when the watchdog has been fed; never without one.
    pub(crate) async fn due(&mut self) {
        match &mut self.every {
            Some(every) => {
                every.tick().await;
                notify(&[sd_notify::NotifyState::Watchdog]);
            }
            None => std::future::pending().await,
        }
    }
}

/// First signal: stop in order. Second: at once.
fn watch_signals(stop: CancellationToken) -> Result<(), StartError> {
    /// Exit status of a process that was interrupted.
    const INTERRUPTED: i32 = 130;
    let listen = |kind| signal(kind).map_err(StartError::io("listen for signals"));
    let mut terminate = listen(SignalKind::terminate())?;
    let mut interrupt = listen(SignalKind::interrupt())?;
    let mut hangup = listen(SignalKind::hangup())?;
    tokio::spawn(async move {
        loop {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
                _ = hangup.recv() => {}
            }
            if stop.is_cancelled() {
                std::process::exit(INTERRUPTED);
            }
            stop.cancel();
        }
    });
    Ok(())
}
