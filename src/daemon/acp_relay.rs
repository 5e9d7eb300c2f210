//! `commsd acp relay start`: the ACP relay as a process of its own, beside no daemon. Bounds, logging,
//! signals; serving is `runtime::acp_relay`'s.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use tokio_util::sync::CancellationToken;

use super::config::LogFormat;
use super::logging::{self, emit, event};
use super::{StartError, WORKERS, notify, watch_signals};
use crate::acp::relay::Limits;
use crate::api::types::{ApiError, PROGRAM_VERSION};
use crate::runtime::acp_relay::{AcpRelayServer, ServerError, ServerLimits, ServerOptions};
use crate::runtime::clock::Clock;
use crate::runtime::sys;

/// Descriptors that are not connections: listener, log, signals, store.
const OTHER_DESCRIPTORS: u64 = 64;

/// How the relay is run.
#[derive(Clone, Debug)]
pub struct RelayOptions {
    /// Address to listen on.
    pub host: IpAddr,
    /// Port; 0 for any.
    pub port: u16,
    /// Directory of the store; made when missing.
    pub state: PathBuf,
    /// Whether tokens are taken from the query `auth`.
    pub query_auth: bool,
    /// Bytes in one mailbox; without, as `limits` says.
    pub max_mailbox_bytes: Option<u64>,
    /// By which origins clients reach it.
    pub origins: Vec<String>,
    /// A proxy in front tells in `X-Forwarded-For` whom it speaks for.
    pub behind_proxy: bool,
    /// Bounds of what is kept, and of how often somebody may ask.
    pub limits: Limits,
    /// Connections of one address at the same time; without, 128.
    pub per_source: Option<usize>,
    /// Certificate chain and key, PEM.
    pub tls: Option<(PathBuf, PathBuf)>,
    /// How events are written.
    pub log: LogFormat,
    /// Which.
    pub log_filter: String,
}

/// Why the relay did not start.
#[derive(Debug, thiserror::Error)]
pub enum RelayError {
    /// Something the operating system refused.
    #[error(transparent)]
    Start(#[from] StartError),
    /// Address, certificate, store or limits.
    #[error(transparent)]
    Server(#[from] ServerError),
}

impl RelayError {
    /// Stable code.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Start(error) => error.code(),
            Self::Server(error) => error.code(),
        }
    }

    /// Whether another command line would mend it, and not the disk or the system.
    #[must_use]
    pub fn is_configuration(&self) -> bool {
        match self {
            Self::Start(_) | Self::Server(ServerError::Thread(_)) => false,
            Self::Server(ServerError::Store(error)) => error.is_configuration(),
            Self::Server(_) => true,
        }
    }
}

impl From<RelayError> for ApiError {
    fn from(error: RelayError) -> Self {
        let todo = match &error {
            RelayError::Start(error) => error.todo(),
            RelayError::Server(error) => error.todo(),
        };
        Self::new(error.code(), error.to_string(), todo)
    }
}

/// Runs the relay until it is told to stop by SIGTERM, SIGINT or SIGHUP; a second signal ends the
/// process at once. `started` is called once it takes requests, with the address and
/// whether it is open beyond this machine without TLS.
///
/// # Errors
/// What keeps it from starting; nothing is left bound then.
pub fn run(
    options: RelayOptions,
    started: impl FnOnce(SocketAddr, bool),
) -> Result<(), RelayError> {
    let descriptors = sys::raise_descriptor_limit().unwrap_or_else(|_| sys::descriptor_limit());
    let most = descriptors.soft.saturating_sub(OTHER_DESCRIPTORS).max(1);
    let mut limits = ServerLimits { tables: options.limits, ..ServerLimits::default() };
    limits.connections = limits.connections.min(usize::try_from(most).unwrap_or(usize::MAX));
    limits.per_source = options.per_source.unwrap_or(limits.per_source);
    if let Some(bytes) = options.max_mailbox_bytes {
        limits.tables.mailbox_bytes = bytes;
    }
    let tls = options.tls.is_some();
    // A proxy in front has the certificate.
    let encrypted = tls || options.behind_proxy;
    let server = ServerOptions {
        state: options.state,
        tls: options.tls,
        origins: options.origins,
        no_query_auth: !options.query_auth,
        behind_proxy: options.behind_proxy,
        version: PROGRAM_VERSION,
        limits,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .enable_all()
        .thread_name("commsd-acp-relay")
        .build()
        .map_err(StartError::io("start the runtime"))?;
    runtime.block_on(async {
        let clock = Clock::start();
        let stop = CancellationToken::new();
        watch_signals(stop.clone())?;
        let server = AcpRelayServer::bind(SocketAddr::new(options.host, options.port), server)?;
        let address = server.address();
        // Nobody asks the relay for its latest events; they are on stderr.
        drop(logging::init(options.log, &options.log_filter));
        emit(
            &event("acp_relay_ready")
                .with("version", PROGRAM_VERSION)
                .with("pid", std::process::id())
                .with("address", address)
                .with("origin", server.origin())
                .with("tls", tls),
        );
        let plaintext = !encrypted && !address.ip().is_loopback();
        if plaintext {
            emit(&event("acp_relay_plaintext").with("address", address));
        }
        notify(&[sd_notify::NotifyState::Ready]);
        started(address, plaintext);
        server.serve(stop).await;
        notify(&[sd_notify::NotifyState::Stopping]);
        emit(&event("acp_relay_stopped").with("uptime_ms", clock.now().mono));
        Ok(())
    })
}
