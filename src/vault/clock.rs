//! Time as the engine asks for it, so that tests can turn it.

use std::time::{Duration, Instant, SystemTime};

use jiff::tz::TimeZone;
use jiff::{Timestamp, ZonedDateTime};

/// Where times come from.
pub trait Clock: Send + Sync {
    /// Wall-clock time.
    fn now(&self) -> SystemTime;
    /// Time since some fixed moment, never set back.
    fn elapsed(&self) -> Duration;
    /// Waits.
    fn sleep(&self, time: Duration);
    /// The zone in which people read times here.
    fn zone(&self) -> TimeZone;
}

/// The machine's clock and zone.
#[derive(Debug)]
pub struct SystemClock(Instant);

impl Default for SystemClock {
    fn default() -> Self {
        Self(Instant::now())
    }
}

impl Clock for SystemClock {
    fn now(&self) -> SystemTime {
        SystemTime::now()
    }

    fn elapsed(&self) -> Duration {
        self.0.elapsed()
    }

    fn sleep(&self, time: Duration) {
        std::thread::sleep(time);
    }

    fn zone(&self) -> TimeZone {
        TimeZone::system()
    }
}

/// The clock's time in its zone. Times beyond year 9999 count as 1970.
pub fn zoned(clock: &dyn Clock) -> ZonedDateTime {
    Timestamp::try_from(clock.now())
        .unwrap_or(Timestamp::UNIX_EPOCH)
        .to_zoned_datetime(clock.zone())
}
