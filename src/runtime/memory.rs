//! Keeps a process that runs for days small while it has little to do. Not a limit, and nothing that
//! anybody waits for.

use std::time::Duration;

use super::sys;

/// Until the first time: the start is over, which uses more of the program than everything later.
const FIRST: Duration = Duration::from_millis(500);
/// The longest pause; each is twice the one before. What is used again is mapped anew within about a
/// millisecond.
const LONGEST: Duration = Duration::from_secs(60);
/// The thread has nothing but a list of mappings.
const STACK: usize = 64 * 1024;

/// Lets go of what was needed once, from now on until the process ends.
pub fn stay_small() {
    let keeper = std::thread::Builder::new().name("commsd-memory".into()).stack_size(STACK);
    // Without the thread, or where the system tells nothing of its mappings, the process is larger
    // and works as well.
    let _ = keeper.spawn(|| {
        let mut pause = FIRST;
        loop {
            std::thread::sleep(pause);
            if sys::release_program().is_err() {
                return;
            }
            pause = (2 * pause).min(LONGEST);
        }
    });
}
