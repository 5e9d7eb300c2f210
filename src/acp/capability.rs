//! CapabilityGuard (design 9.1): whether a chain of tokens allows a call, in ten steps; the code of
//! the first that fails. Counting uses is the eleventh thing a caller does: durably, before the tool.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::code::{Code, Error, Result};
use super::did::Did;
use super::objects::{Action, Capability, CapabilityToken, Resource, RevocationTarget};
use super::revocation::RevocationRegistry;
use super::schema::UserSchema;
use super::sign::Signed as _;
use super::value::Digest;
use crate::codec::time::UnixMillis;

/// Tokens in a chain.
pub const MAX_CHAIN: usize = 8;

/// What is about to be done. Nothing has a default.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// With what.
    pub resource: &'a Resource,
    /// What.
    pub action: &'a Action,
    /// How.
    pub arguments: &'a Value,
    /// Bytes that it moves, as far as they are known before.
    pub bytes: u64,
}

/// How often each token was used, by its object digest (decision 40).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UseCounters(BTreeMap<Digest, u64>);

impl UseCounters {
    /// No use yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Uses of a token.
    #[must_use]
    pub fn uses(&self, token: &Digest) -> u64 {
        self.0.get(token).copied().unwrap_or(0)
    }

    /// Takes counts back from the store; a count never falls.
    pub fn restore(&mut self, counted: &Counted) {
        for (token, uses) in &counted.0 {
            let known = self.0.entry(*token).or_default();
            *known = (*known).max(*uses);
        }
    }

    /// Forgets tokens that are over; the caller knows when.
    pub fn forget(&mut self, token: &Digest) {
        self.0.remove(token);
    }
}

/// The new counts of a use: one record, stored before the tool runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counted(pub Vec<(Digest, u64)>);

/// A chain that allows a call.
#[derive(Clone, Debug, PartialEq)]
pub struct Granted {
    /// Object digests of the chain, root first.
    links: Vec<(Digest, u64)>,
}

/// Whose resources, who is calling, and what is known.
#[derive(Clone, Copy, Debug)]
pub struct Guard<'a> {
    /// This gateway: only its own grants count.
    pub owner: Did,
    /// Who asks, as the signatures of call and envelope prove.
    pub caller: Did,
    /// Clock.
    pub now: UnixMillis,
    /// What was taken back.
    pub revocations: &'a RevocationRegistry,
}

fn violation(message: &str) -> Error {
    Error::new(Code::AttenuationViolation, message)
}

impl Guard<'_> {
    /// Steps 1 to 9 for `call` on `chain`, root first.
    ///
    /// # Errors
    /// The code of the first step that fails, with the number of the token as its path.
    pub fn check(&self, chain: &[CapabilityToken], call: &Call<'_>) -> Result<Granted> {
        if chain.is_empty() || chain.len() > MAX_CHAIN {
            return Err(Error::new(Code::ChainBroken, "a chain has 1 to 8 tokens"));
        }
        each(chain, |_, token| token.verify())?;
        let digests = chain.iter().map(Digest::of).collect::<Result<Vec<_>>>()?;
        self.check_root(chain)?;
        check_links(chain, &digests)?;
        check_depth(chain)?;
        if chain.last().is_none_or(|leaf| leaf.audience_did != self.caller) {
            return Err(Error::new(Code::WrongAudience, "granted to somebody else"));
        }
        self.check_time(chain)?;
        each_pair(chain, narrower_limits)?;
        each_pair(chain, narrower_capabilities)?;
        check_call(chain, call)?;
        let limits = chain.iter().map(|token| token.limits.max_uses.get());
        Ok(Granted { links: digests.into_iter().zip(limits).collect() })
    }

    fn check_root(&self, chain: &[CapabilityToken]) -> Result<()> {
        let untrusted = |message: &str| Error::new(Code::UntrustedIssuer, message);
        let root = chain.first().ok_or_else(|| untrusted("no root"))?;
        if root.issuer_did != self.owner {
            return Err(untrusted("not granted by the owner of this gateway"));
        }
        if root.depth.get() != 0 || root.parent_digest.is_some() {
            return Err(untrusted("the first token is not a root"));
        }
        Ok(())
    }

    fn check_time(&self, chain: &[CapabilityToken]) -> Result<()> {
        each(chain, |_, token| {
            let id = token.token_id.as_str();
            let kind = RevocationTarget::Capability;
            if self.revocations.is_revoked(token.issuer_did, kind, id, self.now) {
                return Err(Error::new(Code::TokenRevoked, "taken back by its issuer"));
            }
            Ok(())
        })?;
        each(chain, |_, token| {
            if token.limits.expires_at.is_over(self.now) {
                return Err(Error::new(Code::TokenExpired, "over"));
            }
            if !token.limits.not_before.has_come(self.now) {
                return Err(Error::new(Code::TokenNotYetValid, "not valid yet"));
            }
            Ok(())
        })
    }
}

impl Granted {
    /// Step 10: counts one use of every link. The result is stored before the tool runs; a tool that
    /// then fails has used its turn.
    ///
    /// # Errors
    /// `USES_EXHAUSTED`; then nothing was counted.
    pub fn count(&self, counters: &mut UseCounters) -> Result<Counted> {
        let mut counted = Vec::with_capacity(self.links.len());
        for (token, limit) in &self.links {
            let uses = counters.uses(token).saturating_add(1);
            if uses > *limit {
                return Err(Error::new(Code::UsesExhausted, "used as often as it may be"));
            }
            counted.push((*token, uses));
        }
        let counted = Counted(counted);
        counters.restore(&counted);
        Ok(counted)
    }
}

fn each(
    chain: &[CapabilityToken],
    check: impl Fn(usize, &CapabilityToken) -> Result<()>,
) -> Result<()> {
    chain
        .iter()
        .enumerate()
        .try_for_each(|(at, token)| check(at, token).map_err(|e| e.inside(&at.to_string())))
}

fn each_pair(
    chain: &[CapabilityToken],
    check: impl Fn(&CapabilityToken, &CapabilityToken) -> Result<()>,
) -> Result<()> {
    chain.iter().zip(chain.iter().skip(1)).enumerate().try_for_each(|(at, (parent, child))| {
        check(parent, child).map_err(|e| e.inside(&(at + 1).to_string()))
    })
}

fn check_links(chain: &[CapabilityToken], digests: &[Digest]) -> Result<()> {
    let broken = |message: &str| Error::new(Code::ChainBroken, message);
    let pairs = chain.iter().zip(digests).zip(chain.iter().skip(1));
    for (at, ((parent, digest), child)) in (1_u64..).zip(pairs) {
        let check = || {
            if child.issuer_did != parent.audience_did {
                return Err(broken("not issued by whom the token before was for"));
            }
            if child.parent_digest != Some(*digest) {
                return Err(broken("narrows another token"));
            }
            if child.depth.get() != at {
                return Err(broken("not this deep"));
            }
            if child.task_id != parent.task_id {
                return Err(broken("of another task"));
            }
            Ok(())
        };
        check().map_err(|error| error.inside(&at.to_string()))?;
    }
    Ok(())
}

fn check_depth(chain: &[CapabilityToken]) -> Result<()> {
    let allowed = chain.iter().map(|token| token.limits.max_depth.get()).min().unwrap_or(0);
    if chain.last().is_some_and(|leaf| leaf.depth.get() > allowed) {
        return Err(Error::new(Code::DepthExceeded, "passed on more often than a link allows"));
    }
    Ok(())
}

fn narrower_limits(parent: &CapabilityToken, child: &CapabilityToken) -> Result<()> {
    let (outer, inner) = (&parent.limits, &child.limits);
    if inner.not_before < outer.not_before || inner.expires_at > outer.expires_at {
        return Err(violation("valid for longer than the token before"));
    }
    if inner.max_uses > outer.max_uses || inner.max_depth > outer.max_depth {
        return Err(violation("for more uses or further than the token before"));
    }
    Ok(())
}

fn narrower_capabilities(parent: &CapabilityToken, child: &CapabilityToken) -> Result<()> {
    for capability in child.capabilities.iter() {
        sorted(capability)?;
        let mut within = false;
        // One of the parent's covers all of it; no piecing together.
        for outer in parent.capabilities.iter() {
            within |= is_within(capability, outer)?;
        }
        if !within {
            return Err(violation("no capability of the token before covers it"));
        }
    }
    parent.capabilities.iter().try_for_each(sorted)
}

/// Actions are sorted and each once.
fn sorted(capability: &Capability) -> Result<()> {
    let pairs = capability.actions.iter().zip(capability.actions.iter().skip(1));
    if pairs.into_iter().all(|(one, next)| one < next) {
        Ok(())
    } else {
        Err(Error::new(Code::BadField, "actions are not sorted, each once"))
    }
}

fn schema_digests(capability: &Capability) -> Result<Vec<Digest>> {
    capability.args_schemas.iter().map(Digest::of).collect()
}

fn is_within(inner: &Capability, outer: &Capability) -> Result<bool> {
    let bytes = match (inner.max_bytes_per_use, outer.max_bytes_per_use) {
        (_, None) => true,
        (None, Some(_)) => false,
        (Some(inner), Some(outer)) => inner <= outer,
    };
    let schemas = schema_digests(inner)?;
    Ok(bytes
        && inner.resource.is_within(&outer.resource)
        && inner.actions.iter().all(|action| outer.actions.contains(action))
        && schema_digests(outer)?.iter().all(|schema| schemas.contains(schema)))
}

/// Whether one capability of `token` covers all of `wanted`: what is handed on is never more.
///
/// # Errors
/// As [`Digest::of`].
pub fn covers(token: &CapabilityToken, wanted: &Capability) -> Result<bool> {
    let covering = token.capabilities.iter().map(|outer| is_within(wanted, outer));
    Ok(covering.collect::<Result<Vec<_>>>()?.contains(&true))
}

/// Step 9: some capability of the leaf names the call, and every link agrees with arguments and size.
fn check_call(chain: &[CapabilityToken], call: &Call<'_>) -> Result<()> {
    let refused = |message: &str| Error::new(Code::CapabilityNotGranted, message);
    if !call.resource.is_exact() {
        return Err(refused("a call names one resource, no pattern"));
    }
    for (at, token) in chain.iter().enumerate() {
        let mut reason = refused("this resource or action is not granted");
        let mut granted = false;
        for capability in token.capabilities.iter() {
            sorted(capability)?;
            let named = call.resource.is_within(&capability.resource)
                && capability.actions.contains(call.action);
            if !named {
                continue;
            }
            match fits(capability, call) {
                Ok(()) => granted = true,
                Err(error) => reason = error,
            }
        }
        if !granted {
            return Err(reason.inside(&at.to_string()));
        }
    }
    Ok(())
}

fn fits(capability: &Capability, call: &Call<'_>) -> Result<()> {
    let refused = |message: &str| Error::new(Code::CapabilityNotGranted, message);
    if capability.max_bytes_per_use.is_some_and(|limit| call.bytes > limit.get()) {
        return Err(refused("more bytes than a use may move"));
    }
    for schema in capability.args_schemas.iter() {
        UserSchema::compile(&schema.0)
            .and_then(|schema| schema.check(call.arguments))
            .map_err(|_| refused("the arguments do not fit what was granted"))?;
    }
    Ok(())
}
