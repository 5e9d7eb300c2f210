//! What the daemon and the supervisor of a run say to each other over the supervisor's stdin and
//! stdout: length-delimited frames of postcard. The end of the supervisor's stdin means that the
//! daemon is gone.

use std::io;
use std::path::PathBuf;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio_util::bytes::Bytes;
use tokio_util::codec::LengthDelimitedCodec;

/// Most bytes of one frame; a chunk of output is [`CHUNK`], an order to start holds the environment
/// and the arguments, which the kernel bounds at about 2 MiB.
const MAX_FRAME: usize = 4 << 20;

/// Most bytes of input or output in one frame.
pub(super) const CHUNK: usize = 64 << 10;

/// What the daemon asks for.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Order {
    /// Start the run; the first order, and only once.
    Start(Box<Start>),
    /// Bytes for the command's stdin.
    Input(#[serde(with = "serde_bytes")] Vec<u8>),
    /// No more input.
    EndInput,
    /// Stop (SIGSTOP) or continue (SIGCONT) every process of the run.
    Hold(bool),
    /// End the run: SIGTERM, then SIGKILL.
    Stop,
}

/// What is to be run and watched.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Start {
    /// Program and arguments of the next stage.
    pub argv: Vec<String>,
    /// Its whole environment.
    pub env: Vec<(String, String)>,
    /// Its working directory.
    pub cwd: PathBuf,
    /// Where the record of the run's processes is written.
    pub record: PathBuf,
    /// The FIFO that the command writes its progress to.
    pub progress: PathBuf,
    /// The directory whose size is watched.
    pub disk: PathBuf,
    /// The container engine and the container's name, where there is one.
    pub container: Option<(String, String)>,
    /// What is watched.
    pub watch: Watch,
}

/// Limits that the supervisor watches itself; none where the kernel or an engine keeps them, or the
/// level does not promise them.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct Watch {
    /// Time since the start without the time held, ms.
    pub wall_ms: u64,
    /// Bytes of stdout.
    pub output_bytes: u64,
    /// Processor time of all processes together, ms.
    pub cpu_ms: Option<u64>,
    /// Resident bytes of all processes together.
    pub memory_bytes: Option<u64>,
    /// Processes at one time.
    pub pids: Option<u64>,
    /// Bytes on disk.
    pub disk_bytes: Option<u64>,
}

/// What the supervisor tells.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Told {
    /// Bytes of the command's stdout.
    Output(#[serde(with = "serde_bytes")] Vec<u8>),
    /// Bytes of its stderr.
    Stderr(#[serde(with = "serde_bytes")] Vec<u8>),
    /// The end of its stderr, where not all of it was told.
    StderrEnd(#[serde(with = "serde_bytes")] Vec<u8>),
    /// A line of progress.
    Progress(#[serde(with = "serde_bytes")] Vec<u8>),
    /// No process of the run is left; the last frame.
    Ended(Report),
}

/// How the run ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Report {
    /// Exit code of the command.
    pub code: Option<i32>,
    /// Signal that ended it.
    pub signal: Option<i32>,
    /// Why the supervisor ended it, if it did.
    pub cause: Option<Cause>,
    /// Processor time of all processes, ms.
    pub cpu_ms: u64,
    /// Time held, ms.
    pub held_ms: u64,
    /// Why nothing ran, if nothing did.
    pub not_started: Option<String>,
}

/// Why a run was ended before its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Cause {
    /// It was told to stop, or the daemon is gone.
    Stopped,
    /// Its time was over.
    Wall,
    /// It used too much processor time.
    Cpu,
    /// It used too much memory.
    Memory,
    /// It had too many processes.
    Processes,
    /// It wrote too much to disk.
    Disk,
    /// It wrote too much to stdout.
    Output,
}

impl Cause {
    /// The word for it in an attestation.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Stopped => "stopped",
            Self::Wall => "wall_time",
            Self::Cpu => "cpu_time",
            Self::Memory => "memory",
            Self::Processes => "pids",
            Self::Disk => "disk",
            Self::Output => "output",
        }
    }
}

/// How frames are told apart.
pub(super) fn codec() -> LengthDelimitedCodec {
    LengthDelimitedCodec::builder().max_frame_length(MAX_FRAME).new_codec()
}

/// The bytes of a frame.
pub(super) fn encode<T: Serialize>(value: &T) -> io::Result<Bytes> {
    postcard::to_stdvec(value).map(Bytes::from).map_err(io::Error::other)
}

/// The value of a frame.
pub(super) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> io::Result<T> {
    postcard::from_bytes(bytes).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_heard() {
        let report = Report { code: Some(3), cause: Some(Cause::Disk), ..Report::default() };
        let bytes = encode(&Told::Ended(report.clone())).unwrap();
        assert!(matches!(decode(&bytes).unwrap(), Told::Ended(told) if told == report));
        assert!(decode::<Order>(&[9, 9]).is_err());
    }
}
