//! Frames after their signatures have been checked: what session tasks do in parallel, so that
//! the node reads only verified adverts and revocations, and tokens whose signatures are known.

use std::sync::Arc;

use super::wire::advert::PeerAdvert;
use super::wire::claim::Claim;
use super::wire::cose::CoseSign1;
use super::wire::frame::{Frame, Outcome};
use super::wire::revocation::RevocationEntry;
use super::wire::scope::Scope;
use super::wire::token::{ParsedToken, TokenCache};
use crate::codec::cbor::Value;

/// A frame whose signatures have been checked.
#[derive(Clone, Debug)]
pub enum Checked {
    /// Adverts that verify; the others are left out.
    Gossip(Vec<PeerAdvert>),
    /// Revocations that verify; the others are left out.
    Revocations(Vec<RevocationEntry>),
    /// A claim to the coordinator role (unsigned by design).
    Claim(Claim),
    /// A request, its token's chain decoded and signatures checked.
    Request {
        /// Id for the answer.
        id: u64,
        /// Outer verb.
        verb: String,
        /// Params with the inner verb.
        params: Value,
        /// Scope.
        scope: Scope,
        /// The token, parsed.
        token: Option<Arc<ParsedToken>>,
        /// The token as it came.
        raw_token: Option<CoseSign1>,
    },
    /// An answer.
    Response {
        /// Id of the request.
        id: u64,
        /// The outcome.
        outcome: Outcome,
    },
    /// A ping, which we answer though plain sessions need not.
    Ping,
    /// Nothing that a peer session acts on.
    Ignored,
}

impl Checked {
    /// Checks a frame. `tokens` remembers tokens seen on this session.
    #[must_use]
    pub fn check(frame: Frame, tokens: &mut TokenCache) -> Self {
        match frame {
            Frame::Gossip { peers } => {
                Self::Gossip(peers.into_iter().filter(|advert| advert.verify().is_ok()).collect())
            }
            Frame::RevocationAnnounce { entries } => Self::Revocations(
                entries.iter().filter_map(|entry| RevocationEntry::parse(entry).ok()).collect(),
            ),
            Frame::Coordinator { term, coordinator, .. } => {
                // The hint says nothing about who wins; without it equal claims compare equal.
                Self::Claim(Claim { term, coordinator, capacity_hint: None })
            }
            Frame::ManageRequest(request) => Self::Request {
                id: request.request_id,
                verb: request.command.verb,
                params: request.command.params,
                scope: request.scope,
                token: request.token.as_ref().map(|token| tokens.get_or_parse(token)),
                raw_token: request.token,
            },
            Frame::ManageResponse(response) => {
                Self::Response { id: response.request_id, outcome: response.outcome }
            }
            Frame::Ping => Self::Ping,
            _ => Self::Ignored,
        }
    }
}
