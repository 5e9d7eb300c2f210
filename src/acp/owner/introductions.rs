//! How this owner is found and takes things back: invites, worker cards, revocations, and the
//! journal of what happens outside tasks.

use serde_json::Value;

use super::{Action, Owner, OwnerRecord, Turn};
use crate::acp::audit::journal_entry;
use crate::acp::code::{Code, Error, Result};
use crate::acp::invite::{MAX_CARD_LIFE_MS, MAX_INVITE_LIFE_MS};
use crate::acp::objects::{Invite, RevocationNotice, RevocationTarget, WorkerCard};
use crate::acp::sign::{Role, Signature, Signed as _};
use crate::acp::value::{
    CardId, Int, InviteId, Key32, Name, Nonce, NoticeId, Prose, Seq, Time, UrlText, Word,
};
use crate::codec::time::UnixMillis;
use crate::identity::entropy::Entropy;

/// What an invite says.
#[derive(Clone, Debug)]
pub struct InviteTerms {
    /// Name of the worker.
    pub name: Name,
    /// Where it is reached.
    pub relay_urls: Vec<UrlText>,
    /// A key for proposals, whose secret is declared.
    pub encryption_key: Option<Key32>,
    /// What it can do.
    pub skills: Vec<Word>,
    /// How often it may be used.
    pub max_uses: u64,
    /// How long it is good, ms.
    pub life_ms: u64,
}

/// What a card says.
#[derive(Clone, Debug)]
pub struct CardTerms {
    /// Its id: the same at each renewal.
    pub card_id: CardId,
    /// Name of the worker.
    pub name: Name,
    /// What it is.
    pub description: Prose,
    /// Where it is reached.
    pub relay_urls: Vec<UrlText>,
    /// A key for proposals, whose secret is declared.
    pub encryption_key: Option<Key32>,
    /// What it can do.
    pub skills: Vec<Word>,
}

impl Owner {
    fn adapters(&self) -> Vec<Word> {
        self.profile.iter().map(|profile| profile.adapter.clone()).collect()
    }

    /// Issues an invite.
    ///
    /// # Errors
    /// `BAD_FIELD` for terms out of bounds.
    pub fn invite(
        &mut self,
        terms: InviteTerms,
        now: UnixMillis,
        entropy: &mut dyn Entropy,
    ) -> Result<(Invite, super::Outcome)> {
        let mut turn = Turn::new(now, entropy);
        if !(1..=MAX_INVITE_LIFE_MS).contains(&terms.life_ms) {
            return Err(Error::new(Code::BadField, "an invite is good for up to 30 days"));
        }
        let at = Time::from(now);
        let invite = Invite {
            invite_id: InviteId::draw(turn.entropy),
            issuer_did: self.did(),
            name: terms.name,
            relay_urls: Seq::new(terms.relay_urls)?,
            encryption_key: terms.encryption_key,
            adapters: Seq::new(self.adapters())?,
            skills: Seq::new(terms.skills)?,
            max_uses: Int::new(terms.max_uses)?,
            issued_at: at,
            expires_at: at.plus(terms.life_ms),
            nonce: Nonce::draw(turn.entropy),
            signature: Signature::blank(Role::Issuer, self.did()),
        }
        .signed(&self.key, now)?;
        self.gateway.invites.issued(invite.clone());
        turn.out.own(OwnerRecord::InviteIssued { invite: Box::new(invite.clone()) });
        let about = [serde_json::json!({ "inviteId": invite.invite_id })];
        self.journalize("INVITE_ISSUED", &about, &mut turn)?;
        Ok((invite, turn.out))
    }

    /// A card, good for a day.
    ///
    /// # Errors
    /// `BAD_FIELD` for terms out of bounds.
    pub fn card(&self, terms: CardTerms, now: UnixMillis) -> Result<WorkerCard> {
        let at = Time::from(now);
        let levels = self.profile.as_ref().map(|profile| profile.levels.clone());
        WorkerCard {
            card_id: terms.card_id,
            did: self.did(),
            name: terms.name,
            description: terms.description,
            adapters: Seq::new(self.adapters())?,
            skills: Seq::new(terms.skills)?,
            isolation: Seq::new(levels.unwrap_or_default())?,
            relay_urls: Seq::new(terms.relay_urls)?,
            encryption_key: terms.encryption_key,
            issued_at: at,
            expires_at: at.plus(MAX_CARD_LIFE_MS),
            signature: Signature::blank(Role::Worker, self.did()),
        }
        .signed(&self.key, now)
    }

    /// Takes an invite, a token or a card of this owner's back.
    ///
    /// # Errors
    /// `BAD_FIELD` for an id out of bounds.
    pub fn revoke(
        &mut self,
        target_type: RevocationTarget,
        target_id: &str,
        reason: &str,
        now: UnixMillis,
        entropy: &mut dyn Entropy,
    ) -> Result<(RevocationNotice, super::Outcome)> {
        let mut turn = Turn::new(now, entropy);
        let notice = RevocationNotice {
            notice_id: NoticeId::draw(turn.entropy),
            issuer_did: self.did(),
            target_type,
            target_id: Name::parse(target_id)?,
            reason: Prose::lossy(reason),
            issued_at: Time::from(now),
            effective_at: Time::from(now),
            signature: Signature::blank(Role::Issuer, self.did()),
        }
        .signed(&self.key, now)?;
        if self.gateway.revocations.add(notice.clone(), now)? {
            turn.out.own(OwnerRecord::Revoked { notice: Box::new(notice.clone()) });
            let about = serde_json::json!({ "noticeId": notice.notice_id });
            self.journalize("REVOKED", &[about], &mut turn)?;
        }
        turn.out.actions.push(Action::Publish(Box::new(notice.clone())));
        Ok((notice, turn.out))
    }

    /// Takes a notice in that came from elsewhere.
    ///
    /// # Errors
    /// As [`crate::acp::revocation::RevocationRegistry::add`].
    pub fn learn_revocation(
        &mut self,
        notice: RevocationNotice,
        now: UnixMillis,
    ) -> Result<super::Outcome> {
        let mut out = super::Outcome::default();
        if self.gateway.revocations.add(notice.clone(), now)? {
            out.own(OwnerRecord::Revoked { notice: Box::new(notice) });
        }
        Ok(out)
    }

    /// Notes something in the journal.
    pub(super) fn journalize(
        &mut self,
        event: &str,
        payload: &[Value],
        turn: &mut Turn<'_>,
    ) -> Result<()> {
        let entry = journal_entry(self.journal.as_ref(), event, payload, &self.key, turn.now)?;
        self.journal = Some(entry.clone());
        turn.out.own(OwnerRecord::Journal { entry: Box::new(entry) });
        Ok(())
    }
}
