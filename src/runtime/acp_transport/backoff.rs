//! When to connect again: the waits between tries that failed. Time and chance come in.

use std::time::Duration;

/// The wait after the first failure; each further one doubles it (design 18).
const FIRST: Duration = Duration::from_millis(500);
/// The longest wait of our own.
const LONGEST: Duration = Duration::from_secs(60);

/// Failures in a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Backoff {
    failures: u32,
}

impl Backoff {
    /// Something has worked.
    pub(super) const fn reset(&mut self) {
        self.failures = 0;
    }

    /// How long to wait after one more failure: the doubled wait and up to half of it more, by
    /// `chance`, so that a relay that comes back is not met by all its clients at once; or what the
    /// relay asked for, when that is longer.
    pub(super) fn next(&mut self, chance: u16, asked: Option<Duration>) -> Duration {
        let doubled = FIRST.saturating_mul(1 << self.failures.min(7)).min(LONGEST);
        self.failures = self.failures.saturating_add(1);
        let own = doubled + (doubled / 2).mul_f64(f64::from(chance) / f64::from(u16::MAX));
        own.max(asked.unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_and_are_bounded() {
        let mut backoff = Backoff::default();
        let waits: Vec<u128> = (0..10).map(|_| backoff.next(0, None).as_millis()).collect();
        assert_eq!(waits, [500, 1000, 2000, 4000, 8000, 16_000, 32_000, 60_000, 60_000, 60_000]);
        assert_eq!(backoff.next(u16::MAX, None).as_millis(), 90_000);
        backoff.reset();
        assert_eq!(backoff.next(u16::MAX, None).as_millis(), 750);
        // What the relay asks for counts when it is longer.
        assert_eq!(backoff.next(0, Some(Duration::from_secs(7))).as_millis(), 7000);
        assert_eq!(backoff.next(0, Some(Duration::from_millis(1))).as_millis(), 2000);
    }
}
