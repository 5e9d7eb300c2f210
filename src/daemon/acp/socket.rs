//! The socket of an office that runs as a program of its own, in its state directory: so that its
//! owner can list tasks, answer questions and cancel from another terminal. One call a line, one
//! answer a line, the same calls as the daemon's local API.

use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use super::service::{Service, Teller};
use crate::acp::code::{Code, Error, Result};
use crate::api::acp::AcpCall;
use crate::daemon::logging::{emit, event};
use crate::runtime::sys;

const FILE: &str = "office.sock";

/// Bytes of a call or an answer: a bundle of a long task has several MiB.
const MAX_LINE: u64 = 64 << 20;

/// Callers at one time: a few terminals.
const MAX_CALLERS: usize = 16;

/// How long an answer may take: the longest wait that a call may ask for, and some.
const ANSWER_TIME: Duration = Duration::from_secs(660);

/// An answer on the wire.
#[derive(Debug, Serialize, Deserialize)]
#[serde(untagged)]
enum Reply {
    Refused { error: Refusal },
    Done { result: Value },
}

#[derive(Debug, Serialize, Deserialize)]
struct Refusal {
    code: Code,
    message: String,
    todo: String,
}

/// Where the socket of an owner is.
#[must_use]
pub fn path_in(owner_dir: &Path) -> PathBuf {
    owner_dir.join(FILE)
}

/// Serves calls at the socket in `owner_dir` until `stop`. The directory is the owner's alone, and
/// its store is locked: a socket that is there is left over.
///
/// # Errors
/// When it cannot be bound, e.g. for a path that is too long.
pub fn serve(owner_dir: &Path, service: Service, stop: CancellationToken) -> io::Result<()> {
    let path = path_in(owner_dir);
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(&path)?;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
    let callers = Arc::new(Semaphore::new(MAX_CALLERS));
    tokio::spawn(async move {
        loop {
            let accepted = tokio::select! {
                () = stop.cancelled() => break,
                accepted = listener.accept() => accepted,
            };
            let Ok((stream, _)) = accepted else {
                // Out of descriptors, most likely: they come back.
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            };
            let ours = stream.peer_cred().is_ok_and(|peer| peer.uid() == sys::uid());
            let Some(place) = Arc::clone(&callers).try_acquire_owned().ok().filter(|_| ours) else {
                emit(&event("acp_caller_refused").with("ours", ours));
                continue;
            };
            let (service, stop) = (service.clone(), stop.clone());
            tokio::spawn(async move {
                tokio::select! {
                    () = stop.cancelled() => {}
                    // A caller that goes away needs no answer.
                    _ = answer_all(stream, &service) => {}
                }
                drop(place);
            });
        }
        // The next office removes what is left; a failure here changes nothing.
        let _ = std::fs::remove_file(&path);
    });
    Ok(())
}

async fn answer_all(stream: UnixStream, service: &Service) -> io::Result<()> {
    let (read, mut write) = stream.into_split();
    let mut read = BufReader::new(read);
    let mut line = Vec::new();
    loop {
        line.clear();
        if (&mut read).take(MAX_LINE).read_until(b'\n', &mut line).await? == 0 {
            return Ok(());
        }
        let called = serde_json::from_slice::<AcpCall>(&line)
            .map_err(|error| Error::new(Code::BadJson, format!("no call: {error}")));
        let answered = match called {
            Ok(call) => service.serve(call, &Teller(|_| {})).await,
            Err(error) => Err(error),
        };
        let reply = match answered {
            Ok(result) => Reply::Done { result },
            Err(error) => Reply::Refused {
                error: Refusal {
                    code: error.code(),
                    message: error.message().to_owned(),
                    todo: error.todo().to_owned(),
                },
            },
        };
        let mut bytes = serde_json::to_vec(&reply).map_err(io::Error::other)?;
        bytes.push(b'\n');
        write.write_all(&bytes).await?;
    }
}

/// Asks the office whose state is in `owner_dir`; `None` when none is running.
///
/// # Errors
/// What the office says; `RELAY_UNREACHABLE` when it does not answer.
pub async fn ask(owner_dir: &Path, call: &AcpCall) -> Result<Option<Value>> {
    let failed = |_: io::Error| {
        Error::new(Code::RelayUnreachable, "the office of this key does not answer")
            .with_todo("look at the process that works with this key, and try again")
    };
    let Ok(mut stream) = UnixStream::connect(path_in(owner_dir)).await else { return Ok(None) };
    let mut bytes = serde_json::to_vec(call).map_err(io::Error::other).map_err(failed)?;
    bytes.push(b'\n');
    let asked = async {
        stream.write_all(&bytes).await?;
        let mut line = Vec::new();
        BufReader::new(stream).take(MAX_LINE).read_until(b'\n', &mut line).await?;
        io::Result::Ok(line)
    };
    let answered = tokio::time::timeout(ANSWER_TIME, asked).await;
    let line = answered.map_err(|_| failed(io::ErrorKind::TimedOut.into()))?.map_err(failed)?;
    match serde_json::from_slice(&line) {
        Ok(Reply::Done { result }) => Ok(Some(result)),
        Ok(Reply::Refused { error: Refusal { code, message, todo } }) => {
            Err(Error::new(code, message).with_todo(todo))
        }
        Err(_) => Err(failed(io::ErrorKind::InvalidData.into())),
    }
}
