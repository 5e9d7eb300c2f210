//! Two copies of one log side by side (design 7.1: what both sides sealed alone is never rewritten,
//! only told).

use super::AuditLog;
use crate::acp::code::{Code, Error, Result};

/// How two copies stand to each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Comparison {
    /// The same entries.
    Equal,
    /// One has more at its end.
    Prefix {
        /// Whether the first copy is the shorter one.
        first_is_shorter: bool,
        /// Entries in both.
        common: usize,
    },
    /// Both sides ended the task alone, each its own way: `DIVERGED_UNILATERAL`.
    Diverged {
        /// The first entry that differs.
        seq: u64,
    },
    /// One side signed two entries at one place, or both copies claim both signatures: `AUDIT_FORK`.
    Forked {
        /// The first entry that differs.
        seq: u64,
    },
}

impl Comparison {
    /// The code of a difference that is nobody's lag.
    #[must_use]
    pub const fn code(&self) -> Option<Code> {
        match self {
            Self::Equal | Self::Prefix { .. } => None,
            Self::Diverged { .. } => Some(Code::DivergedUnilateral),
            Self::Forked { .. } => Some(Code::AuditFork),
        }
    }
}

/// Compares two logs, both verified before.
///
/// # Errors
/// `UNKNOWN_TASK` for logs of different tasks.
pub fn compare(first: &AuditLog, second: &AuditLog) -> Result<Comparison> {
    if first.genesis != second.genesis {
        return Err(Error::new(Code::UnknownTask, "logs of different tasks or sides"));
    }
    for (seq, (one, two)) in (0_u64..).zip(first.entries.iter().zip(&second.entries)) {
        if one.entry.digest()? == two.entry.digest()? {
            continue;
        }
        let alone = |c: &crate::acp::log::Committed| c.entry.countersignature().is_none();
        let apart = alone(one) && alone(two) && one.entry.actor_role != two.entry.actor_role;
        return Ok(if apart { Comparison::Diverged { seq } } else { Comparison::Forked { seq } });
    }
    let (one, two) = (first.entries.len(), second.entries.len());
    Ok(if one == two {
        Comparison::Equal
    } else {
        Comparison::Prefix { first_is_shorter: one < two, common: one.min(two) }
    })
}
