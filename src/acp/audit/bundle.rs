//! The bundle (design 8.3): a log in one signed object.

use super::AuditLog;
use crate::acp::code::{Code, Error, Result};
use crate::acp::did::Secret;
use crate::acp::log::{Committed, rules};
use crate::acp::objects::{AuditBundle, BundleEntry, BundleObjects};
use crate::acp::sign::{Role, Signature, Signed as _};
use crate::acp::value::{Digest, Seq, Time};
use crate::codec::time::UnixMillis;

/// The bundle of a log, signed by `key`.
///
/// # Errors
/// `BAD_FIELD` for more than 64 objects in one entry.
pub fn to_bundle(log: &AuditLog, key: &Secret, now: UnixMillis) -> Result<AuditBundle> {
    let entries = log.entries.iter().map(|committed| {
        let payload = Seq::new(committed.payload.clone())?;
        Ok(BundleEntry { entry: committed.entry.clone(), payload })
    });
    let last = log.entries.last();
    AuditBundle {
        genesis: log.genesis.clone(),
        entries: Seq::new(entries.collect::<Result<_>>()?)?,
        objects: BundleObjects(log.objects.clone()),
        head: log.head()?,
        sealed: last.is_some_and(|committed| rules::is_terminal(committed.entry.to_state)),
        exported_at: Time::from(now),
        exporter_did: key.did(),
        signature: Signature::blank(Role::Exporter, key.did()),
    }
    .signed(key, now)
}

/// The log of a bundle; its own signature and summary are checked here, the log is not.
///
/// # Errors
/// The codes of a signature; `DIGEST_MISMATCH` for another head, `AUDIT_INVALID` for a wrong
/// `sealed` or an object that nobody names.
pub fn from_bundle(bundle: AuditBundle) -> Result<AuditLog> {
    bundle.verify()?;
    let entries: Vec<Committed> = bundle
        .entries
        .into_vec()
        .into_iter()
        .map(|entry| Committed { entry: entry.entry, payload: entry.payload.into_vec() })
        .collect();
    let log = AuditLog {
        genesis: bundle.genesis,
        entries,
        objects: bundle.objects.0,
        checkpoints: Vec::new(),
        torn: false,
    };
    if log.head()? != bundle.head {
        return Err(
            Error::new(Code::DigestMismatch, "the head is not the last entry").inside("head")
        );
    }
    let last = log.entries.last();
    if last.is_some_and(|last| rules::is_terminal(last.entry.to_state)) != bundle.sealed {
        return Err(Error::new(Code::AuditInvalid, "not what the last entry says").inside("sealed"));
    }
    let named = |digest: &Digest| log.entries.iter().any(|entry| entry.payload.contains(digest));
    if !log.objects.keys().all(named) {
        return Err(Error::new(Code::AuditInvalid, "an object that nobody names").inside("objects"));
    }
    Ok(log)
}
