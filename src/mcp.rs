//! The MCP server for a harness (`commsd mcp`): the tools `agent_comms`, `echoes_vault` and `acp_*`, waiting
//! for messages, and resources, on stdio (`surfaces.md` 2, 3). One process per harness session, thin: `link` is its
//! connection to the daemon, `server` what the harness sees. Nothing but MCP is ever written to
//! stdout, and the handshake waits for nobody.

pub mod acp;
pub mod framing;
mod given;
mod link;
mod server;
mod transport;
mod vault;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use rmcp::transport::io::stdio_pipes;
use rmcp::{ServerHandler, ServiceExt as _};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

pub use link::Start;

use crate::api::types::{ApiError, Label};
use given::SharedGiven;
use link::Link;
use server::Server;
use transport::Stdio;

/// Events that wait to be pushed to the harness; each is in the mailbox as well.
const PUSHES: usize = 64;
/// Calls that are under way when stdin ends get so long to be answered (`printf … | commsd mcp`);
/// waiting ones get nothing. The next session of the harness wants this one's agent.
const LAST_ANSWERS: Duration = Duration::from_millis(300);

/// What the server is started for.
#[derive(Clone, Debug)]
pub struct Options {
    /// The daemon's socket.
    pub socket: PathBuf,
    /// How to start a daemon when none answers; `None`: not at all.
    pub start: Option<Start>,
    /// The harness, half of the agent's slot.
    pub harness: Label,
    /// The name asked for.
    pub name: Option<String>,
    /// Whether the tools `acp_*` are there: nine schemas that a model reads.
    pub acp: bool,
}

/// Serves MCP on stdin and stdout until stdin ends or a signal comes; the agent goes offline then.
///
/// # Errors
/// When the runtime cannot be started or the working directory is gone.
pub fn run(options: Options) -> Result<ExitCode, ApiError> {
    let cwd = std::env::current_dir().map_err(|error| {
        let what = format!("cannot tell the working directory: {error}");
        ApiError::new("cwd", what, "change into a directory that exists")
    })?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| ApiError::no_runtime(&error))?;
    let code = runtime.block_on(serve(options, cwd.to_string_lossy().into_owned()));
    // A read of stdin that is under way holds nothing up.
    runtime.shutdown_background();
    Ok(code)
}

async fn serve(options: Options, cwd: String) -> ExitCode {
    let (push, pushed) = mpsc::channel(PUSHES);
    let (harness, acp) = (options.harness.clone(), options.acp);
    let link = Arc::new(Link::new(options, cwd, push));
    let keeping = tokio::spawn({
        let link = Arc::clone(&link);
        async move { link.keep().await }
    });
    let (given, ended) = (Arc::default(), CancellationToken::new());
    let server =
        Server::new(Arc::clone(&link), harness, acp, pushed, Arc::clone(&given), ended.clone());
    let (input, output) = stdio_pipes();
    let (input, output) = framing::framed(input, output);
    converse(server, input, output, given, ended).await;
    // The daemon takes the agent out of service when its connection ends.
    keeping.abort();
    link.close();
    ExitCode::SUCCESS
}

/// Serves one client, until it is gone and has what waits for it, or a signal comes.
async fn converse<R, W>(
    server: impl ServerHandler,
    input: R,
    output: W,
    given: Arc<SharedGiven>,
    ended: CancellationToken,
) where
    R: AsyncRead + Send + Unpin + 'static,
    W: AsyncWrite + Send + Unpin + 'static,
{
    let (transport, writing) = Stdio::new(input, output, Arc::clone(&given), ended.clone());
    let session = async {
        // A client that goes away during the handshake has simply gone.
        if let Ok(running) = server.serve(transport).await {
            let _ended = running.waiting().await;
        }
        // A failure to write is an end as well.
        let _ended = writing.await;
    };
    let cut_off = async {
        let stdin = std::io::stdin();
        tokio::select! {
            () = ended.cancelled() => {}
            () = transport::abandoned(stdin, &given, &ended, LAST_ANSWERS) => {}
        }
        sleep(LAST_ANSWERS).await;
    };
    tokio::select! {
        () = session => {}
        () = cut_off => {}
        () = stopped() => {}
    }
}

/// Completes at a signal that ends a process.
pub(crate) async fn stopped() {
    let wait = |kind| async move {
        match signal(kind) {
            Ok(mut signal) => {
                signal.recv().await;
            }
            // Without a handler the signal ends the process by itself.
            Err(_) => std::future::pending().await,
        }
    };
    tokio::select! {
        () = wait(SignalKind::terminate()) => {}
        () = wait(SignalKind::interrupt()) => {}
        () = wait(SignalKind::hangup()) => {}
    }
}
