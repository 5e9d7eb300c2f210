//! Work that is handed on (design 6.1, 9.4): a worker orders a part of a task from another worker. The
//! child's manifest loosens nothing of the parent's, its tools are of those that were granted here, and
//! this side's owner is asked with the exact child contract before it is offered.

use super::gates::Answer;
use super::requester::Prepared;
use super::{Order, Owner, Turn};
use crate::acp::code::{Code, Error, Result};
use crate::acp::log::View;
use crate::acp::objects::{Party, State, Target};
use crate::acp::value::Digest;
use crate::acp::{capability, sign, steps, verify};
use crate::codec::time::UnixMillis;
use crate::identity::entropy::Entropy;

/// Children of one task that wait for the owner, or whose fate can be asked for.
const MAX_HANDED_ON: usize = 16;

/// A child of a task.
#[derive(Clone, Debug)]
pub(super) enum Child {
    /// The owner is asked.
    Waits(Box<(Order, Prepared)>),
    /// It was offered, as this task.
    Begun(Digest),
    /// It was not.
    Refused(Error),
}

impl Owner {
    /// Hands a part of the task `order.parent` on, once this side's owner has agreed. The digest of the
    /// child's contract comes back, by which [`Self::handed_on`] tells what became of it.
    ///
    /// # Errors
    /// What makes the order impossible, as for [`Self::order`]; `ATTENUATION_VIOLATION` for one that
    /// loosens what was laid down for the parent; `ILLEGAL_TRANSITION` when the parent is not work in
    /// progress here; `RATE_LIMITED`.
    pub fn hand_on(
        &mut self,
        mut order: Order,
        now: UnixMillis,
        entropy: &mut dyn Entropy,
    ) -> Result<(Digest, super::Outcome)> {
        let mut turn = Turn::new(now, entropy);
        let parent = order.parent.ok_or_else(super::unknown)?;
        let log = self.gateway.task(&parent).ok_or_else(super::unknown)?;
        if log.me() != Party::Worker || log.view().state() != Some(State::InProgress) {
            let text = "only work that is in progress here can be handed on";
            return Err(Error::new(Code::IllegalTransition, text));
        }
        let view = log.view().clone();
        narrow(&view, &mut order)?;
        let prepared = self.prepare(&order, &mut turn)?;
        let outer = &super::contract(&view)?.manifest;
        verify::check_redelegated(outer, &prepared.contract.manifest)?;
        let child = sign::body_digest(&prepared.contract)?;
        let file = self.files.entry(parent).or_default();
        if file.children.len() >= MAX_HANDED_ON {
            file.children.retain(|_, child| matches!(child, Child::Waits(_)));
        }
        if file.children.len() >= MAX_HANDED_ON {
            return Err(Error::new(Code::RateLimited, "too many parts wait for the owner"));
        }
        file.children.insert(child, Child::Waits(Box::new((order, prepared))));
        self.consider(parent, &mut turn);
        Ok((child, turn.out))
    }

    /// What became of a child of `parent`: its task, `None` while the owner is asked.
    ///
    /// # Errors
    /// Why it was not offered: `APPROVAL_DENIED`, and what kept it from being ordered.
    pub fn handed_on(&self, parent: &Digest, child: &Digest) -> Result<Option<Digest>> {
        let found = self.files.get(parent).and_then(|file| file.children.get(child));
        match found.ok_or_else(super::unknown)? {
            Child::Waits(_) => Ok(None),
            Child::Begun(task) => Ok(Some(*task)),
            Child::Refused(error) => Err(error.clone()),
        }
    }

    /// Asks about the children that wait, and offers those that the owner has agreed to; whether the
    /// fate of one was decided.
    pub(super) fn offer_children(
        &mut self,
        parent: Digest,
        view: &View,
        turn: &mut Turn<'_>,
    ) -> bool {
        let Some(file) = self.files.get(&parent) else { return false };
        let mut decided = false;
        let waits =
            |(child, kept): (&Digest, &Child)| matches!(kept, Child::Waits(_)).then_some(*child);
        let waiting: Vec<Digest> = file.children.iter().filter_map(waits).collect();
        for child in waiting {
            let became = match self.offer_child(parent, child, view, turn) {
                Ok(None) => continue,
                Ok(Some(task)) => Child::Begun(task),
                Err(error) => Child::Refused(error),
            };
            self.files.entry(parent).or_default().children.insert(child, became);
            decided = true;
        }
        decided
    }

    fn offer_child(
        &mut self,
        parent: Digest,
        child: Digest,
        view: &View,
        turn: &mut Turn<'_>,
    ) -> Result<Option<Digest>> {
        let contract_digest = view.contract_digest().ok_or_else(super::unknown)?;
        let target = Target::Redelegation { contract_digest, child_contract_digest: child };
        let receipt = match self.gate(parent, view, &target, turn)? {
            Answer::Wait => return Ok(None),
            Answer::No(_) => {
                return Err(Error::new(Code::ApprovalDenied, "the owner does not hand this on"));
            }
            Answer::Yes(receipt) => receipt,
        };
        let file = self.files.entry(parent).or_default();
        let Some(Child::Waits(waited)) = file.children.remove(&child) else {
            return Err(super::unknown());
        };
        let (order, prepared) = *waited;
        self.act(parent, steps::approve(&receipt, &target)?, turn)?;
        self.propose(order, prepared, turn).map(|(task, _)| Some(task))
    }

    /// The parent is over: what waits is not offered any more.
    pub(super) fn drop_children(&mut self, parent: Digest) {
        let Some(file) = self.files.get_mut(&parent) else { return };
        for child in file.children.values_mut() {
            if matches!(child, Child::Waits(_)) {
                let text = "the task that this is a part of is over";
                *child = Child::Refused(Error::new(Code::IllegalTransition, text));
            }
        }
    }
}

/// What is granted to a child is within one token of its parent, and for no more uses.
fn narrow(view: &View, order: &mut Order) -> Result<()> {
    for grant in &mut order.grants {
        for wanted in &grant.capabilities {
            let mut covering = None;
            for token in view.grants() {
                if capability::covers(&token.object, wanted)? {
                    covering = Some(token.object.limits.max_uses.get());
                    break;
                }
            }
            let uses = covering.ok_or_else(|| {
                let text = "a tool that was not granted to the task that this is a part of";
                Error::new(Code::AttenuationViolation, text)
            })?;
            grant.max_uses = grant.max_uses.min(uses);
        }
    }
    Ok(())
}
