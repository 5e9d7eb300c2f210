//! An office as a program of its own: its runtime, its log, its signals. The daemon has these
//! already.

use std::future::Future;
use std::io::IsTerminal as _;

use tokio_util::sync::CancellationToken;

use crate::daemon::config::LogFormat;
use crate::daemon::{StartError, WORKERS, logging, watch_signals};

/// Runs `work` to its end. Events of level `filter` and worse go to stderr, as text where that is a
/// terminal.
///
/// # Errors
/// What the operating system refuses.
pub fn block_on<T>(filter: &str, work: impl Future<Output = T>) -> Result<T, StartError> {
    let terminal = std::io::stderr().is_terminal();
    let format = if terminal { LogFormat::Text } else { LogFormat::Json };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .enable_all()
        .thread_name("commsd-acp")
        .build()
        .map_err(StartError::io("start the runtime"))?;
    let done = runtime.block_on(async {
        // Nobody asks this process for its latest events.
        drop(logging::init(format, filter));
        work.await
    });
    // A read of stdin that is under way holds nothing up.
    runtime.shutdown_background();
    Ok(done)
}

/// A wish to stop, by the first signal; the second ends the process at once.
///
/// # Errors
/// What the operating system refuses.
pub fn stop_signals() -> Result<CancellationToken, StartError> {
    let stop = CancellationToken::new();
    watch_signals(stop.clone())?;
    Ok(stop)
}
