//! `commsd hub`: the relay hub as a process of its own, beside no daemon. Bounds, logging, signals;
//! serving is `runtime::relay_server`'s.

use std::net::SocketAddr;

use tokio_util::sync::CancellationToken;

use super::config::LogFormat;
use super::logging::{self, emit, event};
use super::{StartError, WORKERS, notify, watch_signals};
use crate::api::types::{ApiError, PROGRAM_VERSION};
use crate::runtime::clock::Clock;
use crate::runtime::relay_server::{RelayServer, ServerError, ServerOptions};
use crate::runtime::sys;

/// Descriptors that are not links: listener, log, signals, certificates, handshakes.
const OTHER_DESCRIPTORS: u64 = 256;

/// How the hub is run.
#[derive(Clone, Debug)]
pub struct HubOptions {
    /// Where it listens.
    pub listen: SocketAddr,
    /// How it serves. Fewer links than are asked for are taken when the system allows fewer
    /// descriptors.
    pub server: ServerOptions,
    /// How events are written.
    pub log: LogFormat,
    /// Which.
    pub log_filter: String,
}

/// Why the hub did not start.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// Something the operating system refused.
    #[error(transparent)]
    Start(#[from] StartError),
    /// Address or certificate.
    #[error(transparent)]
    Server(#[from] ServerError),
}

impl HubError {
    /// Stable code.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Start(error) => error.code(),
            Self::Server(error) => error.code(),
        }
    }

    /// Whether another command line would mend it.
    #[must_use]
    pub const fn is_configuration(&self) -> bool {
        matches!(self, Self::Server(_))
    }
}

impl From<HubError> for ApiError {
    fn from(error: HubError) -> Self {
        let todo = match &error {
            HubError::Start(error) => error.todo(),
            HubError::Server(ServerError::Bind(_)) => {
                "free the address or choose another with --listen".into()
            }
            HubError::Server(_) => {
                "give a PEM certificate chain with --tls-cert and its key with --tls-key".into()
            }
        };
        Self::new(error.code(), error.to_string(), todo)
    }
}

/// Runs the hub until it is told to stop by SIGTERM, SIGINT or SIGHUP; a second signal ends the
/// process at once. `started` is called once it takes links, with the address and
/// whether it is open beyond this machine without TLS.
///
/// # Errors
/// What keeps it from starting; nothing is left bound then.
pub fn run(
    mut options: HubOptions,
    started: impl FnOnce(SocketAddr, bool),
) -> Result<(), HubError> {
    let descriptors = sys::raise_descriptor_limit().unwrap_or_else(|_| sys::descriptor_limit());
    let most = descriptors.soft.saturating_sub(OTHER_DESCRIPTORS).max(1);
    let limits = &mut options.server.limits;
    limits.links = limits.links.min(usize::try_from(most).unwrap_or(usize::MAX));
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .enable_all()
        .thread_name("commsd-hub")
        .build()
        .map_err(StartError::io("start the runtime"))?;
    runtime.block_on(async {
        let clock = Clock::start();
        let stop = CancellationToken::new();
        watch_signals(stop.clone())?;
        let tls = options.server.tls.is_some();
        // A proxy in front has the certificate.
        let encrypted = tls || options.server.behind_proxy;
        let server = RelayServer::bind(options.listen, options.server)?;
        let address = server.address();
        // Nobody asks the hub for its latest events; they are on stderr.
        drop(logging::init(options.log, &options.log_filter));
        emit(
            &event("hub_ready")
                .with("version", PROGRAM_VERSION)
                .with("pid", std::process::id())
                .with("address", address)
                .with("tls", tls),
        );
        let plaintext = !encrypted && !address.ip().is_loopback();
        if plaintext {
            emit(&event("hub_plaintext").with("address", address));
        }
        notify(&[sd_notify::NotifyState::Ready]);
        started(address, plaintext);
        server.serve(stop).await;
        notify(&[sd_notify::NotifyState::Stopping]);
        emit(&event("hub_stopped").with("uptime_ms", clock.now().mono));
        Ok(())
    })
}
