//! What an agent can find out about the mesh: a device's version, the way to it and how long it
//! takes, and who is connected with whom (`rooms.md` 3.14 and 5, `transport.md` 6).

use std::collections::{BTreeMap, BTreeSet};

use super::super::records::Now;
use super::super::session::REQUEST_TIMEOUT_MS;
use super::super::wire::capability::{PATH_TRACE, VERSION_GET};
use super::super::wire::scope::Scope;
use super::gossip::WIRE_MESH_VERSION;
use super::rooms::refusal;
use super::{CommandError, CommandResult, Node, OpId, OutRequest, Outcome, Output, Purpose};
use crate::codec::cbor::Value;
use crate::codec::text::truncate_chars;
use crate::identity::device::DeviceId;

/// Longest time that a trace may be given.
pub const MAX_TRACE_MS: u64 = 60_000;
/// Characters of a peer's version or address that are passed on.
const MAX_WORD_CHARS: usize = 128;

/// A question that every wire-mesh session answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Question {
    /// Which version it runs.
    Version,
    /// Which way the request has come.
    Trace,
}

/// Devices and the connections between them, as their adverts state them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MeshGraph {
    /// Everybody named.
    pub nodes: BTreeSet<DeviceId>,
    /// Direct connections, each once, the smaller id first.
    pub edges: BTreeSet<(DeviceId, DeviceId)>,
}

impl Node {
    /// Asks a device; answered with what it says, or with an error.
    pub(super) fn ask_device(
        &mut self,
        agent: DeviceId,
        device: DeviceId,
        question: Question,
        timeout_ms: Option<u64>,
        op: OpId,
        now: Now,
    ) {
        if self.is_hosted(&device) {
            let result = match question {
                Question::Version => CommandResult::Version(WIRE_MESH_VERSION.into()),
                Question::Trace => {
                    CommandResult::Traced { rtt_ms: 0, relayed: Some(false), hub: None }
                }
            };
            self.outputs.push_back(Output::Reply { op, result: Ok(result) });
            return;
        }
        let (outer, inner) = match question {
            Question::Version => (VERSION_GET, "version.get"),
            Question::Trace => (PATH_TRACE, "path.trace"),
        };
        let request = OutRequest {
            verb: outer.into(),
            params: Value::map([("verb", Value::Text(inner.into()))]),
            scope: Scope { kind: "node".into(), path: None },
            token: None,
        };
        let patience = timeout_ms.unwrap_or(REQUEST_TIMEOUT_MS).min(MAX_TRACE_MS);
        let purpose = Purpose::Insight { question, op, begun: now.mono };
        self.request(agent, device, request, purpose, Some(now.mono + patience));
    }

    pub(super) fn insight_ended(
        &mut self,
        question: Question,
        op: OpId,
        begun: u64,
        outcome: &Outcome,
        now: Now,
    ) {
        let word = |answer: &Value, name: &str| {
            let text = answer.get(name).and_then(Value::as_text)?;
            Some(truncate_chars(text, MAX_WORD_CHARS).to_owned())
        };
        let result = match (outcome, question) {
            (Outcome::Ok(answer), Question::Version) => match word(answer, "version") {
                Some(version) => Ok(CommandResult::Version(version)),
                None => Err(CommandError::new("malformed_response", "it named no version")),
            },
            (Outcome::Ok(answer), Question::Trace) => Ok(CommandResult::Traced {
                rtt_ms: now.mono.saturating_sub(begun),
                relayed: answer.get("relayed").and_then(Value::as_bool),
                hub: word(answer, "hub-address"),
            }),
            (Outcome::Timeout, _) => {
                Err(CommandError::new("timeout", "the device did not answer in time"))
            }
            (failed, _) => {
                let (code, message) = refusal(failed);
                let message = message.map(|message| format!(": {message}")).unwrap_or_default();
                let text = format!("the device could not be asked ({code}){message}");
                Err(CommandError::new("not_connected", text))
            }
        };
        self.outputs.push_back(Output::Reply { op, result });
    }

    /// Who is connected with whom, as far as adverts say; our own devices by our sessions.
    #[must_use]
    pub fn graph(&self) -> MeshGraph {
        let mut graph = MeshGraph::default();
        let mut told: BTreeMap<DeviceId, Vec<DeviceId>> =
            self.directory.iter().map(|(device, entry)| (*device, entry.direct.clone())).collect();
        let peers = self.sessions.values().filter(|s| s.is_admitted() && !self.is_hub(s.id));
        for session in peers {
            told.entry(session.local).or_default().push(session.remote);
        }
        graph.nodes.extend(self.devices.keys());
        for (device, peers) in told {
            graph.nodes.insert(device);
            for peer in peers.into_iter().filter(|peer| *peer != device) {
                graph.nodes.insert(peer);
                graph.edges.insert((device.min(peer), device.max(peer)));
            }
        }
        graph
    }
}
