//! UDP first contact as values: beacons and probes, and the advertisements that share their port
//! (`transport.md` 4). Sends nothing itself.

use std::net::Ipv4Addr;

use serde::{Deserialize, Serialize};

use crate::identity::device::DeviceId;
use crate::identity::names;

/// Multicast group, joined on loopback.
pub const GROUP: Ipv4Addr = Ipv4Addr::new(239, 255, 19, 77);
/// Time between beacons.
pub const BEACON_INTERVAL_MS: u64 = 30_000;
/// Largest datagram looked at. A beacon is about 160 bytes.
pub const MAX_DATAGRAM: usize = 1024;

/// What a datagram says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Datagram {
    /// A peer and its data port.
    Beacon {
        /// Device.
        peer: DeviceId,
        /// Data port; 0 announces presence only.
        port: u16,
    },
    /// Asks every hearer for its beacon.
    Probe,
    /// A name and a port that somebody wants to be found by (`transport.md` 4.3).
    Advert {
        /// The name; empty where it cannot be shown.
        name: String,
        /// The port.
        port: u16,
    },
}

/// Without `peerId` a beacon is an advertisement; first contact ignores it.
#[derive(Serialize, Deserialize)]
#[serde(tag = "type")]
enum Json {
    #[serde(rename = "agent-comms-beacon", rename_all = "camelCase")]
    Beacon {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        peer_id: Option<String>,
        port: u64,
        name: String,
    },
    #[serde(rename = "agent-comms-probe")]
    Probe,
}

/// An advertisement as it is written: its members in the reference's order.
#[derive(Serialize)]
#[serde(tag = "type", rename = "agent-comms-beacon")]
struct Advert<'a> {
    name: &'a str,
    port: u16,
    policies: [&'static str; 1],
}

impl Datagram {
    /// Reads a datagram; `None` for anything that is not first contact (other types of beacon
    /// share the port).
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        if bytes.len() > MAX_DATAGRAM {
            return None;
        }
        match serde_json::from_slice(bytes).ok()? {
            Json::Beacon { peer_id: Some(peer_id), port, .. } => Some(Self::Beacon {
                peer: DeviceId::parse(&peer_id)?,
                port: u16::try_from(port).ok()?,
            }),
            Json::Beacon { peer_id: None, port, name } => {
                let name = if names::is_clean(&name) { name } else { String::new() };
                Some(Self::Advert { name, port: u16::try_from(port).ok()? })
            }
            Json::Probe => Some(Self::Probe),
        }
    }

    /// The bytes to send: UTF-8 JSON without newline.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let json = match self {
            Self::Beacon { peer, port } => {
                let peer_id = peer.hex();
                let name = beacon_name(peer);
                Json::Beacon { peer_id: Some(peer_id), port: u64::from(*port), name }
            }
            Self::Probe => Json::Probe,
            Self::Advert { name, port } => {
                // The reference's word; whoever comes is held until allowed, whatever it says.
                let advert = Advert { name, port: *port, policies: ["full"] };
                return serde_json::to_vec(&advert).unwrap_or_default();
            }
        };
        serde_json::to_vec(&json).unwrap_or_default()
    }
}

/// The name in a device's beacon.
#[must_use]
pub fn beacon_name(peer: &DeviceId) -> String {
    format!("agent-comms-{}", &peer.hex()[..8])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn datagrams_have_the_reference_form() {
        let peer = DeviceId([0xab; 32]);
        let bytes = Datagram::Beacon { peer, port: 40001 }.encode();
        let text = String::from_utf8(bytes.clone()).unwrap();
        assert_eq!(
            text,
            format!(
                r#"{{"type":"agent-comms-beacon","peerId":"{peer}","port":40001,"name":"agent-comms-abababab"}}"#
            )
        );
        assert_eq!(Datagram::parse(&bytes), Some(Datagram::Beacon { peer, port: 40001 }));
        assert_eq!(Datagram::Probe.encode(), br#"{"type":"agent-comms-probe"}"#);
        let advert = Datagram::Advert { name: "der \"Laden\"".into(), port: 19876 };
        let bytes = advert.encode();
        assert_eq!(
            String::from_utf8(bytes.clone()).unwrap(),
            r#"{"type":"agent-comms-beacon","name":"der \"Laden\"","port":19876,"policies":["full"]}"#
        );
        assert_eq!(Datagram::parse(&bytes), Some(advert));
    }

    #[test]
    fn what_an_advertisement_calls_itself_is_shown_or_left_out() {
        let named = |name: &str| {
            let json = serde_json::json!({
                "type": "agent-comms-beacon", "name": name, "port": 1, "policies": ["name-only"],
            });
            Datagram::parse(&serde_json::to_vec(&json).unwrap())
        };
        let advert = |name: &str| Some(Datagram::Advert { name: name.into(), port: 1 });
        assert_eq!(named("shop"), advert("shop"));
        for odd in ["", " shop", "a\nb", "\u{1b}[31m", &"x".repeat(65)] {
            assert_eq!(named(odd), advert(""), "{odd:?}");
        }
    }

    #[test]
    fn other_traffic_on_the_port_is_ignored() {
        for odd in [
            &b"hello"[..],
            br#"{"type":"agent-comms-web-beacon","peerId":"x","webPort":1}"#,
            br#"{"type":"agent-comms-beacon","name":"x","port":-1}"#,
            br#"{"type":"agent-comms-beacon","name":"x","port":65536,"policies":["full"]}"#,
            br#"{"type":"agent-comms-beacon","port":19876,"policies":["full"]}"#,
            br#"{"type":"agent-comms-beacon","peerId":"zz","port":1,"name":"x"}"#,
            br#"{"type":"agent-comms-beacon","peerId":"abababababababababababababababababababababababababababababababab","port":70000,"name":"x"}"#,
        ] {
            assert_eq!(Datagram::parse(odd), None, "{}", String::from_utf8_lossy(odd));
        }
        assert_eq!(Datagram::parse(&vec![b' '; MAX_DATAGRAM + 1]), None);
    }
}
