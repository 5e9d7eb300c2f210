//! `commsd stop`: has the daemon end, and waits until it has. It does not start one again.
//!
//! A daemon of another version of the local API (after an upgrade, an older one may still serve) takes
//! no request from this program. It is ended by the signal that a service manager would send.

use std::path::Path;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde::Serialize;
use tokio::net::UnixStream;
use tokio::time::{sleep, timeout};

use super::client::{Done, Failure, PROGRAM};
use super::output::{json_line, write_out};
use super::{Endpoint, exit};
use crate::api::client::{Client, Notifications};
use crate::api::types::{ApiError, DaemonStopParams};
use crate::identity::process::{Liveness, Processes as _, SystemProcesses};

/// How long a daemon may take to end: more than it gives itself for peers, links and the store; and
/// the pause between two looks.
const STOP_WITHIN: Duration = Duration::from_secs(20);
const STOP_POLL: Duration = Duration::from_millis(20);

/// What has ended.
#[derive(Serialize)]
struct Stopped {
    pid: u32,
    /// Unknown of one that took no request.
    version: Option<String>,
}

/// Asks the daemon to end and waits until it has: a new one can be started then.
pub(super) async fn run(endpoint: &Endpoint, json: bool) -> Done {
    let stopped = match Client::connect(&endpoint.socket, PROGRAM).await {
        Ok((client, notifications)) => by_request(&client, notifications).await?,
        Err(error) if error.code == ApiError::API_VERSION => {
            by_signal(&endpoint.socket, error).await?
        }
        Err(error) => return Err(error.into()),
    };
    write_out(&if json {
        json_line(&stopped)
    } else {
        let version = stopped.version.as_deref().unwrap_or("of another version");
        format!("commsd {version}, process {}, has stopped\n", stopped.pid)
    })?;
    Ok(exit::DONE)
}

async fn by_request(client: &Client, mut notifications: Notifications) -> Result<Stopped, Failure> {
    let stopping = client.call(DaemonStopParams {}).await?;
    // Behind its last word it writes the store's.
    let ended = async {
        while notifications.recv().await.is_some() {}
        end_of(stopping.pid).await;
    };
    in_time(stopping.pid, ended).await?;
    Ok(Stopped { pid: stopping.pid, version: Some(stopping.version) })
}

/// Ends the process at the other end of the socket, if it is our user's; `refusal` is what it answered.
async fn by_signal(socket: &Path, refusal: ApiError) -> Result<Stopped, Failure> {
    let peer = match UnixStream::connect(socket).await {
        Ok(stream) => stream.peer_cred().ok(),
        Err(_) => None,
    };
    let ours = peer.filter(|peer| peer.uid() == rustix::process::geteuid().as_raw());
    let process = ours.and_then(|peer| Pid::from_raw(peer.pid()?));
    let Some((process, pid)) =
        process.and_then(|process| Some((process, u32::try_from(process.as_raw_pid()).ok()?)))
    else {
        return Err(refusal.into());
    };
    if let Err(error) = kill_process(process, Signal::TERM) {
        return Err(Failure::Api(ApiError::new(
            "cannot_signal",
            format!("{}; and it cannot be ended: {error}", refusal.message),
            format!("end process {pid} yourself"),
        )));
    }
    in_time(pid, end_of(pid)).await?;
    Ok(Stopped { pid, version: None })
}

async fn end_of(pid: u32) {
    while SystemProcesses.probe(pid) != Liveness::Dead {
        sleep(STOP_POLL).await;
    }
}

async fn in_time(pid: u32, ended: impl Future<Output = ()>) -> Result<(), ApiError> {
    timeout(STOP_WITHIN, ended).await.map_err(|_| {
        ApiError::new(
            "still_stopping",
            format!("the daemon, process {pid}, has not ended within {} s", STOP_WITHIN.as_secs()),
            "see its log; a second signal (kill PID, twice) ends it at once",
        )
    })
}
