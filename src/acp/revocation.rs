//! What issuers have taken back (design 9.3). A notice is kept whether or not its target is known,
//! and applies only to targets of the same issuer: a stranger's notice does nothing, an early one is
//! not lost.

use std::collections::BTreeMap;

use super::code::{Code, Error, Result};
use super::did::Did;
use super::log::rules::TOLERANCE_MS;
use super::objects::{RevocationNotice, RevocationTarget};
use super::sign::Signed as _;
use crate::codec::time::UnixMillis;

/// Notices of one issuer.
pub const MAX_PER_ISSUER: usize = 10_000;

/// Notices in all (decision 49).
pub const MAX_NOTICES: usize = 100_000;

/// How long a notice outlives its target, or stays when nobody knows the target (decision 49), ms.
pub const KEEP_MS: u64 = 30 * 24 * 3_600_000;

/// What a notice is about: its issuer, and kind and id of the target.
pub type Key = (Did, RevocationTarget, String);

/// What `notice` is about.
#[must_use]
pub fn key_of(notice: &RevocationNotice) -> Key {
    (notice.issuer_did, notice.target_type, notice.target_id.to_string())
}

/// The notices that this gateway knows.
#[derive(Clone, Debug, Default)]
pub struct RevocationRegistry {
    notices: BTreeMap<Key, Kept>,
}

#[derive(Clone, Debug)]
struct Kept {
    notice: RevocationNotice,
    until: UnixMillis,
}

impl RevocationRegistry {
    /// A registry that knows nothing.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes a notice in. `true` when it says something new and is to be stored and passed on.
    ///
    /// # Errors
    /// The codes of a signature; `BAD_TIME` for an effect before the issue; `RATE_LIMITED` when there
    /// is no place for it.
    pub fn add(&mut self, notice: RevocationNotice, now: UnixMillis) -> Result<bool> {
        notice.verify()?;
        if notice.effective_at.plus(TOLERANCE_MS) < notice.issued_at
            || notice.issued_at.millis() > now.plus(TOLERANCE_MS)
        {
            return Err(Error::new(
                Code::BadTime,
                "in effect before it was issued, or from the future",
            ));
        }
        if self.get(&key_of(&notice)).is_none()
            && (self.notices.len() >= MAX_NOTICES
                || self.of(notice.issuer_did).count() >= MAX_PER_ISSUER)
        {
            return Err(Error::new(Code::RateLimited, "too many revocations"));
        }
        Ok(self.restore(notice, now))
    }

    /// Takes back what [`Self::add`] had taken in at `at`, from the store: nothing is checked again.
    /// `true` when it says something new.
    pub fn restore(&mut self, notice: RevocationNotice, at: UnixMillis) -> bool {
        let key = key_of(&notice);
        let until = at.max(notice.effective_at.millis()).plus(KEEP_MS);
        match self.notices.get_mut(&key) {
            // There is no way back: of two notices the one that works sooner stays.
            Some(known) if known.notice.effective_at <= notice.effective_at => false,
            Some(known) => {
                known.notice = notice;
                true
            }
            None => {
                self.notices.insert(key, Kept { notice, until });
                true
            }
        }
    }

    /// The notice that counts for a target.
    #[must_use]
    pub fn get(&self, key: &Key) -> Option<&RevocationNotice> {
        self.notices.get(key).map(|kept| &kept.notice)
    }

    /// Whether `issuer` has taken back its target by `now`.
    #[must_use]
    pub fn is_revoked(
        &self,
        issuer: Did,
        target_type: RevocationTarget,
        target_id: &str,
        now: UnixMillis,
    ) -> bool {
        self.notices
            .get(&(issuer, target_type, target_id.to_owned()))
            .is_some_and(|kept| now >= kept.notice.effective_at.millis())
    }

    /// Keeps a notice for as long as its target could be used, and then some.
    pub fn target_expires(
        &mut self,
        issuer: Did,
        target_type: RevocationTarget,
        target_id: &str,
        expires_at: UnixMillis,
    ) {
        if let Some(kept) = self.notices.get_mut(&(issuer, target_type, target_id.to_owned())) {
            kept.until = kept.until.max(expires_at.plus(KEEP_MS));
        }
    }

    /// Forgets what cannot matter any more.
    pub fn prune(&mut self, now: UnixMillis) {
        self.notices.retain(|_, kept| now < kept.until);
    }

    /// The notices of one issuer, in order of their targets.
    pub fn of(&self, issuer: Did) -> impl Iterator<Item = &RevocationNotice> {
        let from = (issuer, RevocationTarget::Invite, String::new());
        self.notices
            .range(from..)
            .take_while(move |((whose, _, _), _)| *whose == issuer)
            .map(|(_, kept)| &kept.notice)
    }

    /// All notices, to be stored.
    pub fn iter(&self) -> impl Iterator<Item = &RevocationNotice> {
        self.notices.values().map(|kept| &kept.notice)
    }
}
