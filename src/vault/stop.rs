//! Calling a writer off from another thread, so that an interrupted command still gives its lock back.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::error::VaultError;

/// A handle to call writers off with; copies are one handle.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<Flags>);

#[derive(Debug, Default)]
struct Flags {
    wanted: AtomicBool,
    working: AtomicUsize,
}

/// A writer that has, or waits for, the lock.
pub(super) struct Working<'a>(&'a Stop);

impl Stop {
    /// Calls off all writers with this handle: none of them begins another file. Whether there are any
    /// is what [`Stop::is_working`] says from then on.
    pub fn request(&self) {
        self.0.wanted.store(true, Ordering::SeqCst);
    }

    /// Whether a writer has, or waits for, the lock.
    #[must_use]
    pub fn is_working(&self) -> bool {
        self.0.working.load(Ordering::SeqCst) > 0
    }

    /// Refuses to go on if it has been called off.
    pub(super) fn check(&self) -> Result<(), VaultError> {
        if self.0.wanted.load(Ordering::SeqCst) { Err(VaultError::Interrupted) } else { Ok(()) }
    }

    /// Counts a writer until the value goes.
    pub(super) fn working(&self) -> Result<Working<'_>, VaultError> {
        self.0.working.fetch_add(1, Ordering::SeqCst);
        let working = Working(self);
        // Asked after counting: who calls off sees the writer, or the writer sees that.
        self.check()?;
        Ok(working)
    }
}

impl Drop for Working<'_> {
    fn drop(&mut self) {
        self.0.0.working.fetch_sub(1, Ordering::SeqCst);
    }
}
