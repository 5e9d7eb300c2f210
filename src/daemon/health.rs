//! Health conditions: what is not as it should be, with a code, how much it matters and what to
//! do. `status`, `doctor` and the log speak from this one set.

use std::collections::BTreeMap;

use super::acp::resident::MAX_CALLS;
use super::config::Config;
use super::logging::{emit, event};
use super::owner::Owner;
use crate::api::types::{self, Severity, Time};
use crate::codec::time::UnixMillis;
use crate::identity::petnames::Petnames;
use crate::mesh::formation::PortState;
use crate::mesh::{delivery, directory, discovery, formation, node, replica, session};
use crate::runtime::{link, local_socket, sys};

/// Failed rounds at the port after which it counts as occupied.
const PORT_ROUNDS: u32 = 2;
/// Share of the descriptors in use, in percent, above which it is worth a word.
const DESCRIPTORS_HIGH: u64 = 80;
/// Age of a waiting message that is worth a word.
const BACKLOG_OLD_MS: u64 = 3_600_000;

/// What was wrong at the last look, and facts that were found at the start.
#[derive(Default)]
pub(super) struct Health {
    known: BTreeMap<String, Severity>,
    /// Conditions of the start that stay.
    pub(super) lasting: Vec<types::Health>,
}

/// A condition.
pub(super) fn condition(
    code: &str,
    severity: Severity,
    text: impl Into<String>,
    todo: &str,
) -> types::Health {
    types::Health { code: code.into(), severity, text: text.into(), todo: Some(todo.into()) }
}

impl Owner {
    /// The conditions of this moment; tells the log what began and what ended.
    pub(super) fn look_at_health(&mut self) -> Vec<types::Health> {
        let now = self.now();
        let status = self.node.status();
        let mut found = self.health.lasting.clone();
        if status.port_failures >= PORT_ROUNDS {
            let todo = if self.hub.status().first_contact {
                "see what holds it (ss -ltnp) and end it; peers are found by first contact meanwhile"
            } else {
                "see what holds it (ss -ltnp) and end it: without first contact no peer is found \
                 meanwhile (it is off, by --no-first-contact or first-contact = false, or has no port)"
            };
            found.push(condition(
                "port_occupied",
                Severity::Warning,
                format!(
                    "port {} can be neither bound nor joined: something that is no peer has it",
                    self.config.port
                ),
                todo,
            ));
        }
        found.extend(self.store_conditions());
        found.extend(self.trust_conditions());
        found.extend(self.discovery_condition());
        found.extend(self.acp.problem());
        let transport = self.hub.status();
        if transport.first_contact && !transport.multicast {
            found.push(condition(
                "multicast_unavailable",
                Severity::Warning,
                "loopback multicast cannot be joined: peers are found by the port and by broadcast",
                "allow multicast on the loopback interface",
            ));
        }
        if transport.origin_blind {
            found.push(condition(
                "origin_unknown",
                Severity::Info,
                "the system does not tell whose a local connection is: all count as this user's",
                "nothing to do; do not run commsd on a machine shared with people you do not trust",
            ));
        }
        if let (Some(open), limit) = (sys::open_descriptors(), sys::descriptor_limit())
            && limit.soft > 0
            && open * 100 / limit.soft >= DESCRIPTORS_HIGH
        {
            found.push(condition(
                "descriptors_high",
                Severity::Warning,
                format!("{open} of {} descriptors are in use", limit.soft),
                "detach agents, or raise the limit (LimitNOFILE= or ulimit -n)",
            ));
        }
        if let Some(age) = status.oldest.map(|at| now.unix.since(at))
            && age >= BACKLOG_OLD_MS
        {
            found.push(condition(
                "backlog_old",
                Severity::Info,
                format!("a message or event has waited for {} minutes", age / 60_000),
                "see `commsd status`; an agent may not be reading its inbox",
            ));
        }
        match Petnames::read(&self.base) {
            Err(error) => found.push(condition(
                "petnames_unreadable",
                Severity::Warning,
                error.to_string(),
                "mend or move the file; no petnames are shown meanwhile",
            )),
            Ok(names) if names.loose() => found.push(condition(
                "petnames_loose",
                Severity::Warning,
                "petnames.json can be changed by other users",
                "chmod 600 it",
            )),
            Ok(_) => {}
        }
        let before = std::mem::take(&mut self.health.known);
        for health in &found {
            if !before.contains_key(&health.code) {
                emit(&event("health_raised").with("code", &health.code));
            }
            self.health.known.insert(health.code.clone(), health.severity);
        }
        for code in before.keys().filter(|code| !self.health.known.contains_key(*code)) {
            emit(&event("health_cleared").with("code", code));
        }
        found
    }

    pub(super) fn status_view(&mut self, limits: bool) -> types::Status {
        let health = self.look_at_health();
        let now = self.now();
        let status = self.node.status();
        let started = now.unix.0.saturating_sub(now.mono);
        types::Status {
            version: types::PROGRAM_VERSION.to_owned(),
            pid: std::process::id(),
            uptime_ms: now.mono,
            device: self.node.daemon().hex(),
            port: types::PortStatus {
                number: self.config.port,
                held: status.port == PortState::Holding,
            },
            coordinator: types::CoordinatorStatus {
                holder: status.claim.map(|claim| claim.coordinator.hex()),
                term: status.claim.map_or(0, |claim| claim.term),
                held: status.role_held,
            },
            peers: status
                .peers
                .into_iter()
                .map(|peer| types::PeerStatus {
                    device: peer.device.hex(),
                    address: peer.address.unwrap_or_default(),
                    sessions: peer.sessions as u64,
                    machine_local: peer.machine_local,
                    since: Time(UnixMillis(started + peer.since)),
                    version: peer.version,
                })
                .collect(),
            agents: self.hosted.len() as u64,
            queues: types::QueueStatus {
                outgoing: status.outgoing as u64,
                inbound: status.inbound as u64,
                oldest_ms: status.oldest.map(|at| now.unix.since(at)),
            },
            health,
            limits: limits.then(|| limit_list(&self.config)),
            hub: self.node.hub_view().map(|hub| types::HubStatus {
                url: hub.url,
                wanted: hub.wanted,
                since: hub.since.map(|since| Time(UnixMillis(started + since))),
                devices: hub.devices as u64,
                failures: hub.failures.into(),
            }),
            settings: None,
        }
    }
}

/// The daemon's bounds with their names, as `status --limits` shows them: those that hold with this
/// configuration.
fn limit_list(config: &Config) -> Vec<types::LimitInfo> {
    let history = config.history();
    let limit = |name: &str, value: u64, unit: &str, text: &str| types::LimitInfo {
        name: name.into(),
        value,
        unit: unit.into(),
        text: text.into(),
    };
    let count = |value: usize| value as u64;
    let own = [
        limit(
            "mesh.sessions",
            count(node::MAX_SESSIONS),
            "entries",
            "peer sessions of this daemon",
        ),
        limit(
            "mesh.pending",
            count(session::MAX_PENDING_REQUESTS),
            "entries",
            "open requests of one session",
        ),
        limit("mesh.peers", count(formation::MAX_PEERS), "entries", "peers in the table"),
        limit("mesh.dials", count(formation::MAX_DIALS_IN_FLIGHT), "entries", "dials in flight"),
        limit(
            "mesh.directory",
            count(directory::MAX_DEVICES),
            "entries",
            "devices remembered from gossip",
        ),
        limit("mesh.heard", count(discovery::MAX_HEARD), "entries", "whose beacons are remembered"),
        limit("mesh.adverts", count(node::MAX_ADVERTS), "entries", "what is announced by beacons"),
        limit("mesh.agents", count(replica::MAX_AGENTS), "entries", "agent records"),
        limit("mesh.rooms", count(replica::MAX_ROOMS), "entries", "room records"),
        limit(
            "mesh.history",
            count(history.messages),
            "entries",
            "messages kept per room (history-messages)",
        ),
        limit(
            "mesh.history_bytes",
            count(history.bytes),
            "bytes",
            "text kept per room (history-mb)",
        ),
        limit(
            "mesh.history_age",
            history.age_ms,
            "ms",
            "how long a message is kept (history-days)",
        ),
        limit(
            "mesh.histories_bytes",
            count(history.all_bytes),
            "bytes",
            "text kept of all rooms together",
        ),
        limit("store.bytes", count(config.store_bytes()), "bytes", "what is on disk (store-mb)"),
        limit("peer.frame", u64::from(link::MAX_FRAME), "bytes", "a frame of a peer"),
        limit(
            "peer.frame_quarantined",
            u64::from(link::MAX_FRAME_QUARANTINED),
            "bytes",
            "a frame of a peer that is not let in yet",
        ),
        limit(
            "delivery.mailbox",
            count(delivery::MAX_MAILBOX_EVENTS),
            "entries",
            "unread events of one agent",
        ),
        limit(
            "delivery.mailbox_bytes",
            count(delivery::MAX_MAILBOX_BYTES),
            "bytes",
            "unread events of one agent",
        ),
        limit(
            "delivery.queued",
            count(delivery::MAX_QUEUED),
            "entries",
            "messages waiting for one recipient",
        ),
        limit(
            "delivery.queued_age",
            delivery::MAX_QUEUED_MS,
            "ms",
            "age at which a waiting message expires",
        ),
        limit(
            "delivery.copies",
            count(delivery::MAX_COPIES),
            "entries",
            "copies held for one absent recipient",
        ),
        limit(
            "requests.deadline",
            session::REQUEST_TIMEOUT_MS,
            "ms",
            "an ordinary request to a peer",
        ),
        limit(
            "requests.approval",
            session::APPROVAL_WINDOW_MS,
            "ms",
            "a request that waits for a decision",
        ),
        limit("vault.shares", count(node::MAX_SHARES), "entries", "vaults shared with peers"),
        limit(
            "vault.grants",
            count(node::MAX_GRANTS),
            "entries",
            "permissions kept for one shared vault",
        ),
        limit(
            "vault.asks",
            count(node::MAX_ASKS),
            "entries",
            "requests for permissions that wait for a decision",
        ),
        limit("vault.calls", count(node::MAX_CALLS), "entries", "commands of peers under way"),
        limit("vault.deadline", node::SERVICE_DEADLINE_MS, "ms", "a command of a peer"),
        limit(
            "acp.calls",
            count(MAX_CALLS),
            "entries",
            "calls of the Agent Collaboration Protocol under way",
        ),
        limit(
            "logs.kept",
            count(super::logging::MAX_KEPT_EVENTS),
            "entries",
            "events that `logs` can show",
        ),
        limit(
            "logs.kept_bytes",
            count(super::logging::MAX_KEPT_BYTES),
            "bytes",
            "events that `logs` can show",
        ),
    ];
    local_socket::SocketLimits::default().list().into_iter().chain(own).collect()
}
