//! Structured events of the mesh as values: stable names and fields, no message text, never a
//! payload or a secret. `docs/events.md` is held to [`CATALOGUE`] by a test.

use std::fmt::Display;

/// How much an operator should care.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// Something must be mended.
    Error,
    /// Something was refused or lost.
    Warn,
    /// The life of the daemon.
    Info,
    /// Traffic.
    Debug,
}

/// One event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogEvent {
    /// Stable name.
    pub name: &'static str,
    /// Its level, from the catalogue.
    pub level: Level,
    /// Stable field names with values as text.
    pub fields: Vec<(&'static str, String)>,
}

/// One line of the catalogue: name, level, fields, meaning.
pub type Spec = (&'static str, Level, &'static [&'static str], &'static str);

/// Every event the mesh emits.
pub const CATALOGUE: &[Spec] = &[
    ("port_held", Level::Info, &[], "this daemon holds the well-known port"),
    (
        "port_joined",
        Level::Info,
        &["holder"],
        "another peer holds the port and has been introduced to",
    ),
    (
        "port_unavailable",
        Level::Warn,
        &["retry_ms", "reason"],
        "the port can neither be bound nor joined; retried",
    ),
    ("port_released", Level::Info, &["successor"], "the port was handed over or given up"),
    ("peer_up", Level::Info, &["device", "kind", "origin"], "first session with a peer"),
    ("peer_down", Level::Info, &["device"], "last session with a peer ended"),
    ("peer_moved", Level::Info, &["device", "port"], "a peer came back on another port"),
    (
        "session_opened",
        Level::Debug,
        &["session", "device", "local", "kind", "origin"],
        "a session was authenticated",
    ),
    (
        "session_closed",
        Level::Info,
        &["session", "device", "local", "kind", "reason"],
        "a session ended",
    ),
    ("session_refused", Level::Warn, &["device", "reason"], "a session was not kept"),
    ("hub_up", Level::Info, &["session"], "there is a session with the relay hub"),
    (
        "hub_down",
        Level::Warn,
        &["reason", "retry_ms"],
        "the relay hub could not be dialled, or its session has ended; dialled again",
    ),
    (
        "hub_left",
        Level::Info,
        &[],
        "the relay hub is not wanted: nobody is trusted, no agent is here, or the daemon stops",
    ),
    ("dial_failed", Level::Debug, &["device", "local", "reason"], "a peer could not be reached"),
    (
        "mesh_visibility",
        Level::Info,
        &["loopback", "network"],
        "how far beacons make this machine known was changed",
    ),
    ("advertised", Level::Info, &["id", "port"], "a name and a port are announced by beacons"),
    (
        "connection_requested",
        Level::Info,
        &["device"],
        "a device from beyond the machine asks to be let in",
    ),
    ("vault_shared", Level::Info, &["share", "mode"], "a vault is shared, or shared otherwise"),
    (
        "vault_unshared",
        Level::Info,
        &["share"],
        "a vault is shared no longer; what was granted is taken back",
    ),
    (
        "capability_asked",
        Level::Info,
        &["device", "capability", "share"],
        "a peer asks to use something shared; an agent or the operator decides",
    ),
    (
        "capability_granted",
        Level::Info,
        &["device", "capability", "share", "until"],
        "a peer may use something shared",
    ),
    ("capability_refused", Level::Info, &["device", "capability", "share"], "a peer was told no"),
    (
        "capability_revoked",
        Level::Info,
        &["device", "capability", "share"],
        "what was granted to a peer was taken back",
    ),
    (
        "role_gained",
        Level::Info,
        &["device", "term"],
        "a device of this daemon holds the coordinator role",
    ),
    ("role_lost", Level::Info, &["device", "term"], "the coordinator role is elsewhere"),
    ("holder_changed", Level::Info, &["holder", "term"], "another holder was accepted"),
    ("agent_added", Level::Info, &["agent", "data_port"], "an agent came into service"),
    ("agent_removed", Level::Info, &["agent"], "an agent left service"),
    ("agent_seen", Level::Info, &["agent"], "gossip tells of an agent for the first time"),
    ("agent_offline", Level::Info, &["agent"], "the holder of the role announced a departure"),
    (
        "message_accepted",
        Level::Debug,
        &["agent", "message", "recipients"],
        "a message was taken from an agent",
    ),
    (
        "message_delivered",
        Level::Debug,
        &["agent", "recipient", "message"],
        "a recipient's device accepted a message",
    ),
    (
        "message_queued",
        Level::Info,
        &["agent", "recipient", "message", "reason"],
        "a message waits for its recipient",
    ),
    (
        "message_refused",
        Level::Info,
        &["agent", "recipient", "message", "code"],
        "a recipient refused a message",
    ),
    (
        "message_dropped",
        Level::Warn,
        &["agent", "recipient", "message"],
        "a bound pushed a queued message out",
    ),
    (
        "message_expired",
        Level::Warn,
        &["agent", "recipient", "message"],
        "a queued message grew too old",
    ),
    (
        "message_received",
        Level::Debug,
        &["agent", "sender", "message"],
        "a message entered an agent's mailbox",
    ),
    (
        "copy_held",
        Level::Debug,
        &["recipient", "author", "message"],
        "a copy is held for an absent recipient",
    ),
    (
        "copy_handed_over",
        Level::Info,
        &["recipient", "author", "message"],
        "a held copy reached its recipient",
    ),
    ("mailbox_full", Level::Warn, &["agent"], "an agent's mailbox took no more messages"),
    (
        "changes_not_stored",
        Level::Error,
        &["records"],
        "changes could not be stored; they are written again until they are",
    ),
    (
        "state_restored",
        Level::Info,
        &["agents", "mail", "outgoing", "copies", "rooms", "messages"],
        "what was stored is back",
    ),
    ("store_failed", Level::Error, &["agent"], "an event could not be stored; its sender keeps it"),
    (
        "statement_refused",
        Level::Warn,
        &["device", "what", "reason"],
        "a peer said something that is not its to say, or over a bound",
    ),
    ("claim_wait", Level::Debug, &["wait_ms"], "no holder is known; waiting before claiming"),
    (
        "clock_jumped",
        Level::Warn,
        &["ms"],
        "the wall clock jumped; every session is asked for a sign of life",
    ),
];

impl LogEvent {
    /// An event of the catalogue. A name that is not in it is shown as an error, so that a test
    /// notices.
    #[must_use]
    pub fn new(name: &'static str) -> Self {
        let level = CATALOGUE
            .iter()
            .find(|(known, ..)| *known == name)
            .map_or(Level::Error, |(_, level, ..)| *level);
        Self { name, level, fields: Vec::new() }
    }

    /// Adds a field.
    #[must_use]
    pub fn with(mut self, field: &'static str, value: impl Display) -> Self {
        self.fields.push((field, value.to_string()));
        self
    }

    /// Whether name and fields are those of the catalogue.
    #[must_use]
    pub fn is_catalogued(&self) -> bool {
        CATALOGUE.iter().any(|(name, _, fields, _)| {
            *name == self.name
                && self.fields.iter().map(|(field, _)| *field).eq(fields.iter().copied())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_events_are_held_to_the_catalogue() {
        let mut names: Vec<_> = CATALOGUE.iter().map(|(name, ..)| *name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), CATALOGUE.len());
        assert!(LogEvent::new("peer_down").with("device", 1).is_catalogued());
        assert!(!LogEvent::new("peer_down").is_catalogued());
        assert!(!LogEvent::new("peer_down").with("other", 1).is_catalogued());
    }
}
