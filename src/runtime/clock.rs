//! The one place that reads clocks. Everything below the runtime gets the time as a value.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use crate::codec::time::UnixMillis;
use crate::mesh::records::Now;

/// A clock that began when the daemon did.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    began: Instant,
}

impl Clock {
    /// Begins now.
    #[must_use]
    pub fn start() -> Self {
        Self { began: Instant::now() }
    }

    /// This moment.
    #[must_use]
    pub fn now(&self) -> Now {
        let mono = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        Now { mono, unix: unix_now() }
    }

    /// The instant at which the monotonic reading will be `mono`.
    #[must_use]
    pub fn instant(&self, mono: u64) -> tokio::time::Instant {
        // A deadline that never comes is a day away: the caller looks again then.
        let far = 24 * 3600 * 1000;
        let ahead = mono.saturating_sub(self.now().mono).min(far);
        tokio::time::Instant::now() + std::time::Duration::from_millis(ahead)
    }
}

/// The wall clock.
#[must_use]
pub fn unix_now() -> UnixMillis {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    UnixMillis(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}
