//! Claims to the coordinator role and which of two holds. Who claims when, and what the holder
//! does, is decided elsewhere.

use std::cmp::Ordering;

use crate::codec::cbor::MAX_SAFE_INTEGER;
use crate::identity::device::DeviceId;

/// The highest valid term: one more could not be written as a safe integer by whoever raises it.
pub const MAX_TERM: u64 = MAX_SAFE_INTEGER - 1;

/// A claim to the role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// Higher wins.
    pub term: u64,
    /// Of equal terms the lower id wins.
    pub coordinator: DeviceId,
    /// How many peers the coordinator would carry; says nothing about who wins.
    pub capacity_hint: Option<u64>,
}

/// What becomes of an incoming claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Evaluation {
    /// It supersedes the incumbent.
    Accepted,
    /// The incumbent stays; the same device at the same term counts so too.
    Retained,
    /// Its term is so high that nothing could supersede it: not compared, answered or passed on.
    Rejected,
}

impl Claim {
    /// What becomes of this claim where `incumbent` is known.
    #[must_use]
    pub fn evaluate(&self, incumbent: Option<&Self>) -> Evaluation {
        if self.term > MAX_TERM {
            return Evaluation::Rejected;
        }
        match incumbent {
            Some(incumbent) if !self.supersedes(incumbent) => Evaluation::Retained,
            _ => Evaluation::Accepted,
        }
    }

    /// Whether this claim wins against `other`; a claim does not win against itself.
    #[must_use]
    pub fn supersedes(&self, other: &Self) -> bool {
        match self.term.cmp(&other.term) {
            Ordering::Greater => true,
            Ordering::Equal => self.coordinator < other.coordinator,
            Ordering::Less => false,
        }
    }

    /// The claim with which `device` would supersede `incumbent`: term 0, or one more than the
    /// incumbent's. `None` when the incumbent's term cannot be raised.
    #[must_use]
    pub fn raised_by(device: DeviceId, incumbent: Option<&Self>) -> Option<Self> {
        let term = match incumbent {
            None => 0,
            Some(incumbent) if incumbent.term < MAX_TERM => incumbent.term + 1,
            Some(_) => return None,
        };
        Some(Self { term, coordinator: device, capacity_hint: None })
    }
}
