//! A local socket with a fake daemon behind it: the test itself takes the inputs and answers.

use std::path::{Path, PathBuf};
use std::time::Duration;

use commsd::api::types::{Request, RequestId};
use commsd::runtime::local_socket::{
    Claim, CloseReason, ConnId, LocalInput, LocalServer, SocketClaim, SocketLimits, claim,
};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

/// Nothing in these tests takes this long unless it hangs.
pub const HANG: Duration = Duration::from_secs(20);

pub async fn soon<T>(what: impl Future<Output = T>) -> T {
    timeout(HANG, what).await.expect("nothing happened in time")
}

/// A socket in its own directory, and the daemon's end of it.
pub struct Bench {
    _dir: tempfile::TempDir,
    pub path: PathBuf,
    pub server: LocalServer,
    pub inputs: mpsc::Receiver<LocalInput>,
    pub stop: CancellationToken,
}

impl Bench {
    pub fn start(limits: SocketLimits) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/commsd.sock");
        let listener = ours(&path).bind().unwrap();
        let (sender, inputs) = mpsc::channel(16);
        let stop = CancellationToken::new();
        let server = listener.serve(limits, sender, stop.clone());
        Self { _dir: dir, path, server, inputs, stop }
    }

    pub async fn input(&mut self) -> LocalInput {
        soon(self.inputs.recv()).await.expect("the server has stopped")
    }

    pub async fn connected(&mut self) -> ConnId {
        match self.input().await {
            LocalInput::Connected { conn, .. } => conn,
            other => panic!("{other:?}"),
        }
    }

    pub async fn request(&mut self) -> (ConnId, RequestId, Request) {
        match self.input().await {
            LocalInput::Request { conn, id, request } => (conn, id, request),
            other => panic!("{other:?}"),
        }
    }

    pub async fn disconnected(&mut self) -> (ConnId, CloseReason) {
        match self.input().await {
            LocalInput::Disconnected { conn, reason } => (conn, reason),
            other => panic!("{other:?}"),
        }
    }
}

pub fn ours(path: &Path) -> SocketClaim {
    match claim(path).unwrap() {
        Claim::Ours(claim) => claim,
        Claim::Theirs(holder) => panic!("{holder:?}"),
    }
}
