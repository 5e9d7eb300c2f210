//! `acp mcp-server`: the tools over MCP on stdio, with `--key` of an office in this process, whose key
//! signs what the tools approve; without it of the daemon's.

use std::process::ExitCode;

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::worker::serve_at;
use super::{Place, Surroundings};
use crate::acp::value::Name;
use crate::api::acp::{AcpCall, AcpNews};
use crate::cli::acp::Failure;
use crate::cli::acp::args::McpServerArgs;
use crate::daemon::acp::service::{Service, Teller, refusal};
use crate::daemon::acp::{OfficeError, owner_dir};
use crate::mcp::acp::{Asked, Backend, Daemon, serve};

impl Backend for Service {
    fn call(&self, call: AcpCall, told: mpsc::Sender<AcpNews>) -> Asked<'_> {
        Box::pin(async move {
            let tell = |news| {
                // Full: the client is behind, and the next news say more.
                let _ = told.try_send(news);
            };
            self.serve(call, &Teller(tell)).await.map_err(|error| refusal(&error))
        })
    }
}

pub(super) fn run(
    args: &McpServerArgs,
    place: &Place,
    around: &Surroundings,
) -> Result<ExitCode, Failure> {
    let Some(key) = &args.key else {
        let socket = around.socket.clone();
        return place.block_on(async {
            serve(Daemon(socket)).await;
            Ok(ExitCode::SUCCESS)
        });
    };
    let mut options = place.office(key)?;
    options.relays = args.relay.iter().cloned().collect();
    options.endpoints = args.access.policy();
    place.block_on(async {
        let stop = CancellationToken::new();
        let dir = owner_dir(&place.state_dir, options.key.did());
        let transports = options.transports()?;
        let (office, mut task) = options.open(transports.clone(), stop.clone()).await?;
        let service = Service { office, transports, name: Name::lossy("a commsd owner") };
        serve_at(&dir, service.clone(), &stop);
        tokio::select! {
            () = serve(service) => {}
            // Without its office nothing can be served; why is said below.
            ended = &mut task => {
                ended.map_err(OfficeError::from)??;
                return Ok(ExitCode::SUCCESS);
            }
        }
        stop.cancel();
        task.await.map_err(OfficeError::from)??;
        Ok(ExitCode::SUCCESS)
    })
}
