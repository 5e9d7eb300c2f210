//! How often somebody may do something (decision 49): an allowance of a minute's worth at once, given
//! back evenly. Time is a monotonic count of milliseconds.

use std::collections::HashMap;
use std::hash::Hash;

use crate::acp::code::{Code, Error, Result};

const MINUTE_US: u64 = 60_000_000;

/// Names that are told apart; beyond it those whose allowance is whole again are dropped, and when
/// there are none, newcomers have to wait.
const MAX_NAMES: usize = 65_536;

/// The allowances of many.
#[derive(Debug)]
pub struct Allowance<K> {
    /// What one use costs, in microseconds of the minute.
    cost: u64,
    /// When each will have its whole allowance again, in microseconds.
    whole_at: HashMap<K, u64>,
}

impl<K: Eq + Hash> Allowance<K> {
    /// `per_minute` uses a minute for each.
    #[must_use]
    pub fn new(per_minute: u64) -> Self {
        Self { cost: MINUTE_US / per_minute.max(1), whole_at: HashMap::new() }
    }

    /// Uses one.
    ///
    /// # Errors
    /// `RATE_LIMITED`.
    pub fn take(&mut self, name: K, mono_ms: u64) -> Result<()> {
        let now = mono_ms.saturating_mul(1000);
        if self.whole_at.len() >= MAX_NAMES && !self.whole_at.contains_key(&name) {
            self.whole_at.retain(|_, whole_at| *whole_at > now);
            if self.whole_at.len() >= MAX_NAMES {
                return Err(Error::new(Code::RateLimited, "too many at the same time"));
            }
        }
        let whole_at = self.whole_at.entry(name).or_insert(0);
        let after = (*whole_at).max(now) + self.cost;
        if after > now.saturating_add(MINUTE_US) {
            return Err(Error::new(Code::RateLimited, "too often; slow down"));
        }
        *whole_at = after;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_minutes_worth_at_once_and_then_evenly() {
        let mut rates = Allowance::new(1_200);
        let mut taken = |name, at| rates.take(name, at).is_ok();
        assert!((0..1_200).all(|_| taken("a", 7)));
        assert!(!taken("a", 7) && taken("b", 7));
        assert!(!taken("a", 7 + 49));
        assert!(taken("a", 7 + 50) && !taken("a", 7 + 50));
        assert!((0..1_200).all(|_| taken("a", 7 + 50 + 60_000)));
        assert!(!taken("a", 7 + 50 + 60_000));
    }

    #[test]
    fn names_are_bounded_and_idle_ones_make_room() {
        let mut rates = Allowance::new(60);
        assert!((0..MAX_NAMES).all(|n| rates.take(n, 0).is_ok()));
        assert!(rates.take(MAX_NAMES, 999).is_err());
        assert!(rates.take(3, 999).is_ok());
        assert!(rates.take(MAX_NAMES, 1_000).is_ok());
        // The one that was used twice is still remembered.
        assert_eq!(rates.whole_at.len(), 2);
    }
}
