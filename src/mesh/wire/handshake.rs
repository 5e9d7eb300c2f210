//! The handshake frame and what two of them agree on.

use super::capability::{DOMAIN_AGENT_COMMS, DOMAIN_FEDERATION, is_domain_id};
use super::fields::{Fields, ShapeError, array, open_map, text, uint};
use crate::codec::cbor::Value;

/// The protocol version that is offered.
pub const PROTOCOL_VERSION: u64 = 1;

/// `handshake`: sent once by each side, without waiting for the other.
#[derive(Clone, Debug, PartialEq)]
pub struct Handshake {
    /// Highest protocol version spoken.
    pub version: u64,
    /// Domain ids.
    pub domains: Vec<String>,
    /// Parameters, a map with text keys.
    pub params: Option<Value>,
}

/// What two handshakes agree on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Negotiation {
    /// The smaller of the two versions.
    pub version: u64,
    /// Domains in both, in the local order.
    pub shared_domains: Vec<String>,
}

impl Negotiation {
    /// Whether the sides can talk: version 1 or higher and a common domain.
    #[must_use]
    pub fn succeeded(&self) -> bool {
        self.version >= 1 && !self.shared_domains.is_empty()
    }
}

impl Handshake {
    /// The handshake of an agent-comms peer.
    #[must_use]
    pub fn agent_comms() -> Self {
        Self {
            version: PROTOCOL_VERSION,
            domains: vec![DOMAIN_AGENT_COMMS.to_owned()],
            params: None,
        }
    }

    /// What this side and `remote` agree on. The retired federation domain is never agreed on.
    #[must_use]
    pub fn negotiate(&self, remote: &Self) -> Negotiation {
        Negotiation {
            version: self.version.min(remote.version),
            shared_domains: self
                .domains
                .iter()
                .filter(|d| *d != DOMAIN_FEDERATION && remote.domains.contains(d))
                .cloned()
                .collect(),
        }
    }

    pub(super) fn from_fields(fields: &mut Fields) -> Result<Self, ShapeError> {
        let domain = |value| text(value).filter(|domain| is_domain_id(domain));
        Ok(Self {
            version: fields.required("version", uint)?,
            domains: fields.required("domains", |value| array(value, domain))?,
            params: fields.optional("params", open_map)?,
        })
    }

    pub(super) fn members(&self) -> Vec<(&'static str, Option<Value>)> {
        let domains = self.domains.iter().map(|d| Value::from(d.as_str())).collect::<Vec<_>>();
        vec![
            ("version", Some(Value::from(self.version))),
            ("domains", Some(Value::from(domains))),
            ("params", self.params.clone()),
        ]
    }
}
