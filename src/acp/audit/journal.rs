//! A gateway's journal (design 8.1): a chain of its own, with one signature an entry, for what
//! happens outside a task: keys, invites, revocations, refused calls, policies.

use serde_json::Value;

use crate::acp::code::{Code, Error, Result};
use crate::acp::did::Secret;
use crate::acp::objects::{GatewayEntry, GatewayGenesis};
use crate::acp::sign::{Role, Signature, Signed as _, body_digest};
use crate::acp::value::{Count, Digest, Time, Word};
use crate::codec::time::UnixMillis;

/// The next entry of a journal, after `last` (the genesis when there is none). Objects by digest.
///
/// # Errors
/// `BAD_FIELD` for an event that is no short name.
pub fn journal_entry(
    last: Option<&GatewayEntry>,
    event: &str,
    payload: &[Value],
    key: &Secret,
    now: UnixMillis,
) -> Result<GatewayEntry> {
    let digests = payload.iter().map(Digest::of).collect::<Result<Vec<_>>>()?;
    GatewayEntry {
        did: key.did(),
        seq: Count::new(last.map_or(0, |last| last.seq.get() + 1))?,
        prev: match last {
            Some(last) => body_digest(last)?,
            None => Digest::of(&GatewayGenesis { did: key.did() })?,
        },
        event: Word::parse(event)?,
        at: Time::from(now),
        payload_digest: Digest::of(&digests)?,
        signature: Signature::blank(Role::Owner, key.did()),
    }
    .signed(key, now)
}

/// Verifies a journal from its beginning.
///
/// # Errors
/// The code of the first entry that is wrong, with its number as the path.
pub fn verify_journal(genesis: &GatewayGenesis, entries: &[GatewayEntry]) -> Result<()> {
    let mut prev = Digest::of(genesis)?;
    for (seq, entry) in (0_u64..).zip(entries) {
        let check = || {
            if entry.did != genesis.did {
                return Err(Error::new(Code::WrongSigner, "another gateway's entry"));
            }
            if entry.seq.get() != seq || entry.prev != prev {
                return Err(Error::new(Code::AuditInvalid, "does not follow the entry before"));
            }
            entry.verify()
        };
        check().map_err(|error| error.inside(&seq.to_string()))?;
        prev = body_digest(entry)?;
    }
    Ok(())
}
