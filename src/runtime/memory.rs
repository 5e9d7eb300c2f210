//! Keeps a process that runs for days small while it has little to do. Not a limit, and nothing that
//! anybody waits for.

use std::time::Duration;

use super::sys;

/// After the start, which uses more of the program than everything later.
const AFTER_START: Duration = Duration::from_secs(2);
/// What was used once since is let go again. Mapping it anew costs about a millisecond.
const EVERY: Duration = Duration::from_secs(600);
/// The thread has nothing but a list of mappings.
const STACK: usize = 64 * 1024;

/// Lets go of what was needed once, from now on until the process ends.
pub fn stay_small() {
    let keeper = std::thread::Builder::new().name("commsd-memory".into()).stack_size(STACK);
    // Without the thread, or where the system tells nothing of its mappings, the process is larger
    // and works as well.
    let _ = keeper.spawn(|| {
        std::thread::sleep(AFTER_START);
        while sys::release_program().is_ok() {
            std::thread::sleep(EVERY);
        }
    });
}
