//! Invites and worker cards as introductions (design 12): text form, whether one may be used, how
//! often it was. An introduction is no authority: accepting still needs the gate.

use std::collections::BTreeMap;

use data_encoding::BASE64URL_NOPAD;
use serde::{Deserialize, Serialize};

use super::code::{Code, Error, Result};
use super::json::canonical;
use super::objects::{Invite, RevocationTarget, WorkerCard};
use super::revocation::RevocationRegistry;
use super::sign::Signed as _;
use super::value::{InviteId, read_bytes};
use crate::codec::time::UnixMillis;

/// Bytes of an invite as text.
pub const MAX_INVITE: usize = 8 * 1024;

/// How long an invite may be good, ms.
pub const MAX_INVITE_LIFE_MS: u64 = 30 * 24 * 3_600_000;

/// How long a card may be good, ms.
pub const MAX_CARD_LIFE_MS: u64 = 24 * 3_600_000;

const SHORT: &str = "acp-invite:";
const LONG: &str = "acp://invite?token=";

/// What helps with a text that is no invite.
const WHOLE: &str = "give the whole line that `commsd acp invite create` printed, acp-invite:…";

fn bad(message: &str) -> Error {
    Error::new(Code::BadInvite, message)
}

/// The text form that is handed to people.
///
/// # Errors
/// As [`canonical`].
pub fn invite_text(invite: &Invite) -> Result<String> {
    Ok(format!("{SHORT}{}", BASE64URL_NOPAD.encode(&canonical(invite)?)))
}

/// Whether a text says that it is an invite.
#[must_use]
pub fn is_invite(text: &str) -> bool {
    text.starts_with(SHORT) || text.starts_with(LONG)
}

/// Reads either text form and checks the signature. Times and uses are [`check_invite`]'s.
///
/// # Errors
/// `BAD_INVITE` whatever is wrong with the form; `BAD_SIGNATURE` and its like for the rest.
pub fn read_invite(text: &str) -> Result<Invite> {
    if text.len() > MAX_INVITE {
        return Err(bad("more than 8 KiB").with_todo(WHOLE));
    }
    let text = text.trim();
    let token = text
        .strip_prefix(SHORT)
        .or_else(|| text.strip_prefix(LONG))
        .ok_or_else(|| bad("neither acp-invite:… nor acp://invite?token=…").with_todo(WHOLE))?;
    let cut = |what: &str| bad(&format!("the text of the invite is cut or changed: {what}"));
    let bytes = BASE64URL_NOPAD
        .decode(token.as_bytes())
        .map_err(|_| cut("no base64url").with_todo(WHOLE))?;
    let invite: Invite =
        read_bytes(&bytes, MAX_INVITE).map_err(|e| cut(&e.to_string()).with_todo(WHOLE))?;
    if canonical(&invite)? != bytes {
        return Err(cut("not canonical JSON").with_todo(WHOLE));
    }
    invite.verify()?;
    Ok(invite)
}

/// Whether an invite is good at `now`.
///
/// # Errors
/// `INVITE_EXPIRED`, `INVITE_REVOKED`, `BAD_INVITE` for one that lives too long.
pub fn check_invite(
    invite: &Invite,
    revocations: &RevocationRegistry,
    now: UnixMillis,
) -> Result<()> {
    if invite.expires_at > invite.issued_at.plus(MAX_INVITE_LIFE_MS) {
        return Err(bad("good for more than 30 days"));
    }
    if invite.expires_at.is_over(now) || !invite.issued_at.has_come(now) {
        return Err(Error::new(Code::InviteExpired, "the invite is over, or from the future"));
    }
    let kind = RevocationTarget::Invite;
    if revocations.is_revoked(invite.issuer_did, kind, invite.invite_id.as_str(), now) {
        return Err(Error::new(Code::InviteRevoked, "the invite was taken back"));
    }
    Ok(())
}

/// Whether a card is good at `now`.
///
/// # Errors
/// Signature codes, `INVITE_EXPIRED`, `INVITE_REVOKED`.
pub fn check_card(
    card: &WorkerCard,
    revocations: &RevocationRegistry,
    now: UnixMillis,
) -> Result<()> {
    card.verify()?;
    let too_long = card.expires_at > card.issued_at.plus(MAX_CARD_LIFE_MS);
    if too_long || card.expires_at.is_over(now) || !card.issued_at.has_come(now) {
        return Err(Error::new(
            Code::InviteExpired,
            "the card is over, or good for more than a day",
        ));
    }
    let kind = RevocationTarget::Card;
    if revocations.is_revoked(card.did, kind, card.card_id.as_str(), now) {
        return Err(Error::new(Code::InviteRevoked, "the card was taken back"));
    }
    Ok(())
}

/// The record of a use: stored before ACCEPT leaves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct InviteUsed {
    /// Which.
    pub invite_id: InviteId,
    /// How often by now.
    pub uses: u64,
}

/// The invites that a worker has issued, and how often each was used.
#[derive(Clone, Debug, Default)]
pub struct InviteBook {
    issued: BTreeMap<InviteId, (Invite, u64)>,
}

impl InviteBook {
    /// No invite.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Notes an invite of one's own.
    pub fn issued(&mut self, invite: Invite) {
        self.issued.entry(invite.invite_id.clone()).or_insert((invite, 0));
    }

    /// Whether an invite was issued here.
    #[must_use]
    pub fn knows(&self, id: &InviteId) -> bool {
        self.issued.contains_key(id)
    }

    /// How often an invite that was issued here was used.
    #[must_use]
    pub fn uses(&self, id: &InviteId) -> Option<u64> {
        self.issued.get(id).map(|(_, uses)| *uses)
    }

    /// Takes a use back from the store.
    pub fn restore(&mut self, used: &InviteUsed) {
        if let Some((_, uses)) = self.issued.get_mut(&used.invite_id) {
            *uses = (*uses).max(used.uses);
        }
    }

    /// Uses an invite for one ACCEPT.
    ///
    /// # Errors
    /// `BAD_INVITE` for one that was never issued here, `INVITE_EXHAUSTED`, and as [`check_invite`].
    pub fn use_once(
        &mut self,
        id: &InviteId,
        revocations: &RevocationRegistry,
        now: UnixMillis,
    ) -> Result<InviteUsed> {
        let (invite, uses) = self.issued.get_mut(id).ok_or_else(|| bad("not issued here"))?;
        check_invite(invite, revocations, now)?;
        if *uses >= invite.max_uses.get() {
            return Err(Error::new(Code::InviteExhausted, "used as often as it may be"));
        }
        *uses += 1;
        Ok(InviteUsed { invite_id: id.clone(), uses: *uses })
    }

    /// Whether an invite may be used, without using it: for admitting a proposal.
    ///
    /// # Errors
    /// As [`Self::use_once`].
    pub fn may_use(
        &self,
        id: &InviteId,
        revocations: &RevocationRegistry,
        now: UnixMillis,
    ) -> Result<&Invite> {
        let (invite, uses) = self.issued.get(id).ok_or_else(|| bad("not issued here"))?;
        check_invite(invite, revocations, now)?;
        if *uses >= invite.max_uses.get() {
            return Err(Error::new(Code::InviteExhausted, "used as often as it may be"));
        }
        Ok(invite)
    }
}
