//! Where events go: lines on stderr (JSON or text, filtered) and the ring that `logs` reads.
//! An event has a stable name and fields, no message text; fields of peers are escaped.

use std::collections::VecDeque;
use std::io::Write as _;
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::{Map, Value};
use tokio::sync::Notify;
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};
use tracing_subscriber::{EnvFilter, Registry};

use super::config::LogFormat;
use crate::api::types;
use crate::codec::text::{escape_untrusted, truncate_chars};
use crate::mesh::log::{Level, LogEvent};
use crate::runtime::clock::unix_now;

/// Events kept for `logs` (decision 22).
pub const MAX_KEPT_EVENTS: usize = 10_000;
/// Bytes of events kept for `logs`.
pub const MAX_KEPT_BYTES: usize = 8 * 1024 * 1024;
/// Characters of one field; what is longer is no identifier, code or number.
const MAX_FIELD_CHARS: usize = 512;

/// Events of the daemon itself, beside those of the mesh: name, level, fields, meaning.
pub const CATALOGUE: &[crate::mesh::log::Spec] = &[
    (
        "starting",
        Level::Info,
        &["version", "pid", "socket", "port", "state"],
        "configuration is read, nothing is bound yet",
    ),
    ("listening", Level::Info, &["what", "address"], "a listener is bound"),
    (
        "hub_ready",
        Level::Info,
        &["version", "pid", "address", "tls"],
        "a relay hub (`commsd hub`) takes links",
    ),
    (
        "hub_plaintext",
        Level::Warn,
        &["address"],
        "the relay hub is open beyond this machine without TLS: `--tls-cert` and `--tls-key`, or a proxy in front with `--behind-proxy`",
    ),
    ("hub_stopped", Level::Info, &["uptime_ms"], "the relay hub has ended in order"),
    (
        "acp_relay_ready",
        Level::Info,
        &["version", "pid", "address", "origin", "tls"],
        "an ACP relay (`commsd acp relay start`) takes requests",
    ),
    (
        "acp_relay_plaintext",
        Level::Warn,
        &["address"],
        "the ACP relay is open beyond this machine without TLS: `--tls-cert` and `--tls-key`, or a proxy in front with `--behind-proxy`",
    ),
    ("acp_relay_stopped", Level::Info, &["uptime_ms"], "the ACP relay has ended in order"),
    ("ready", Level::Info, &["device"], "the socket answers and the mesh is being joined"),
    (
        "first_contact_unavailable",
        Level::Warn,
        &["reason"],
        "no UDP: peers are found by the port alone",
    ),
    (
        "client_attached",
        Level::Info,
        &["conn", "agent", "slot", "ephemeral"],
        "a client acts as an agent",
    ),
    (
        "message_damped",
        Level::Warn,
        &["agent", "code"],
        "a model wrote too much to one place, or acknowledged acknowledgements: it was told, and the message did not go",
    ),
    (
        "hook_unmatched",
        Level::Info,
        &["harness", "reason"],
        "a harness hook belongs to no attached agent, or to more than one: it brings nothing",
    ),
    (
        "client_detached",
        Level::Info,
        &["conn", "agent", "reason"],
        "a client stopped acting as an agent",
    ),
    (
        "slot_opened",
        Level::Info,
        &["slot", "agent", "how"],
        "an identity was created, loaded or renewed",
    ),
    (
        "slot_kept_aside",
        Level::Error,
        &["slot", "path"],
        "an identity file held no usable key and was moved aside; the agent has a new id",
    ),
    (
        "slot_unavailable",
        Level::Warn,
        &["slot", "reason"],
        "a slot is in use elsewhere; the agent is ephemeral",
    ),
    (
        "identity_write_failed",
        Level::Error,
        &["agent", "code", "reason"],
        "a token or grant could not be stored in the identity file",
    ),
    (
        "store_unwritable",
        Level::Error,
        &["code", "reason"],
        "the store takes nothing; senders keep messages, other changes are written again",
    ),
    (
        "slot_restored",
        Level::Info,
        &["slot", "agent"],
        "an agent of the shell that something waited for came back into service",
    ),
    (
        "slot_not_restored",
        Level::Warn,
        &["slot", "reason"],
        "such an agent could not come back; it does when it is attached",
    ),
    ("store_created", Level::Info, &["path"], "there was no store: an empty one was made"),
    (
        "store_compacted",
        Level::Info,
        &["before", "after"],
        "the store's file held on to much more than is in it, and gave it back",
    ),
    ("health_raised", Level::Warn, &["code"], "a health condition began"),
    ("health_cleared", Level::Info, &["code"], "a health condition ended"),
    (
        "entropy_unavailable",
        Level::Error,
        &["message"],
        "the system gives no random bytes; the process ends",
    ),
    (
        "acp_entry",
        Level::Info,
        &["place", "entry", "state", "head", "alone", "task", "peer"],
        "an entry is in the log of a task, at this place; alone: with one signature",
    ),
    (
        "acp_countersigned",
        Level::Info,
        &["place", "task", "peer"],
        "the second signature of an entry that stood alone has come",
    ),
    (
        "acp_trouble",
        Level::Warn,
        &["entry", "code", "task", "peer"],
        "a step of a task did not come about, here or at the other side",
    ),
    (
        "acp_question",
        Level::Info,
        &["id", "gate", "task"],
        "a task waits for its owner's answer, ten minutes at most",
    ),
    (
        "acp_envelope_refused",
        Level::Warn,
        &["code"],
        "an envelope was not for this owner, not well formed, or not well signed",
    ),
    ("acp_step_failed", Level::Error, &["code"], "a fault of commsd: a step could not be taken"),
    (
        "acp_undelivered",
        Level::Warn,
        &["code", "final"],
        "mail was not handed over; unless final it is tried again soon, else by its task's log",
    ),
    (
        "acp_outbox_full",
        Level::Warn,
        &["queued"],
        "mail was dropped; its task's log sends it again",
    ),
    ("acp_forgotten", Level::Info, &["tasks"], "ended tasks were forgotten, as old or as too many"),
    ("acp_ack_failed", Level::Info, &["code"], "a relay did not take an acknowledgement"),
    (
        "acp_runs_left",
        Level::Error,
        &["runs"],
        "runs were not gone in time at the end; the next start kills what is left",
    ),
    (
        "acp_problem",
        Level::Warn,
        &["code", "message"],
        "something that stops no task: an audit file, a card at a relay",
    ),
    ("acp_identity_created", Level::Info, &["did"], "the daemon made its identity of the protocol"),
    (
        "acp_office_opened",
        Level::Info,
        &["did", "relays"],
        "the daemon's tasks go on, and its relays are listened on",
    ),
    (
        "acp_office_failed",
        Level::Error,
        &["code", "message", "retry_ms"],
        "the daemon's tasks stand still; tried again",
    ),
    ("acp_caller_refused", Level::Warn, &["ours"], "a caller of an office's socket was refused"),
    ("stopping", Level::Info, &["reason"], "peers are told and the port is handed over"),
    ("stopped", Level::Info, &["uptime_ms"], "the daemon has ended in order"),
];

/// Whether events of the level that traffic has are written.
#[must_use]
pub fn shows_traffic() -> bool {
    tracing::enabled!(target: "commsd", tracing::Level::DEBUG)
}

/// Emits an event of the mesh or the daemon.
pub fn emit(event: &LogEvent) {
    // Traffic is many events: what nobody reads is not written out.
    if event.level == Level::Debug && !shows_traffic() {
        return;
    }
    let data: Map<String, Value> =
        event.fields.iter().map(|(name, value)| ((*name).to_owned(), field_value(value))).collect();
    let data = Value::Object(data).to_string();
    let name = event.name;
    match event.level {
        Level::Error => tracing::error!(target: "commsd", event = name, data),
        Level::Warn => tracing::warn!(target: "commsd", event = name, data),
        Level::Info => tracing::info!(target: "commsd", event = name, data),
        Level::Debug => tracing::debug!(target: "commsd", event = name, data),
    }
}

/// A field as JSON: counts, durations, ports and process ids as numbers, everything else as
/// escaped text.
fn field_value(text: &str) -> Value {
    /// Digits of a number that JSON readers keep exactly.
    const MAX_DIGITS: usize = 15;
    if text.len() <= MAX_DIGITS
        && let Ok(number) = text.parse::<u64>()
    {
        return number.into();
    }
    match text {
        "true" => Value::Bool(true),
        "false" => Value::Bool(false),
        _ => Value::String(escape_untrusted(truncate_chars(text, MAX_FIELD_CHARS))),
    }
}

/// An event of the daemon's own catalogue.
#[must_use]
pub fn event(name: &'static str) -> LogEvent {
    let level = CATALOGUE
        .iter()
        .find(|(known, ..)| *known == name)
        .map_or(Level::Error, |(_, level, ..)| *level);
    LogEvent { name, level, fields: Vec::new() }
}

struct Kept {
    event: types::Event,
    bytes: usize,
}

#[derive(Default)]
struct RingState {
    next_seq: u64,
    bytes: usize,
    events: VecDeque<Kept>,
}

/// The newest events, numbered.
#[derive(Clone, Default)]
pub struct Ring {
    state: Arc<Mutex<RingState>>,
    grown: Arc<Notify>,
}

impl Ring {
    fn push(&self, body: Map<String, Value>, bytes: usize) {
        let mut state = self.state.lock();
        state.next_seq += 1;
        let seq = state.next_seq;
        state.bytes += bytes;
        state.events.push_back(Kept { event: types::Event { seq, body }, bytes });
        while state.events.len() > MAX_KEPT_EVENTS || state.bytes > MAX_KEPT_BYTES {
            let Some(old) = state.events.pop_front() else { break };
            state.bytes -= old.bytes;
        }
        drop(state);
        self.grown.notify_one();
    }

    /// Events above `after`, oldest first, at most `max`; and whether more are kept.
    #[must_use]
    pub fn read(&self, after: u64, max: usize) -> (Vec<types::Event>, bool) {
        let state = self.state.lock();
        let start = state.events.partition_point(|kept| kept.event.seq <= after);
        let events: Vec<_> =
            state.events.range(start..).take(max).map(|kept| kept.event.clone()).collect();
        let more = start + events.len() < state.events.len();
        (events, more)
    }

    /// The newest number.
    #[must_use]
    pub fn head(&self) -> u64 {
        self.state.lock().next_seq
    }

    /// Completes when an event has come since the last call.
    pub async fn grown(&self) {
        self.grown.notified().await;
    }
}

/// Collects an event's fields into JSON; `data` is spread out.
#[derive(Default)]
struct Fields {
    members: Map<String, Value>,
}

impl Fields {
    fn put(&mut self, field: &Field, value: Value) {
        self.members.insert(field.name().to_owned(), value);
    }
}

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "data"
            && let Ok(Value::Object(members)) = serde_json::from_str(value)
        {
            self.members.extend(members);
            return;
        }
        let shown = escape_untrusted(truncate_chars(value, MAX_FIELD_CHARS));
        self.put(field, Value::String(shown));
    }
    fn record_u64(&mut self, field: &Field, value: u64) {
        self.put(field, value.into());
    }
    fn record_i64(&mut self, field: &Field, value: i64) {
        self.put(field, value.into());
    }
    fn record_bool(&mut self, field: &Field, value: bool) {
        self.put(field, value.into());
    }
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        let text = format!("{value:?}");
        let shown = escape_untrusted(truncate_chars(&text, MAX_FIELD_CHARS));
        self.put(field, Value::String(shown));
    }
}

struct Output {
    format: LogFormat,
    ring: Ring,
}

impl<S: Subscriber> Layer<S> for Output {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        let mut members = fields.members;
        let level = event.metadata().level().as_str().to_ascii_lowercase();
        let name = match members.shift_remove("event") {
            Some(Value::String(name)) => name,
            _ => "message".to_owned(),
        };
        let time = unix_now().iso();
        let line = match self.format {
            LogFormat::Text => {
                let mut line = format!("{time} {level:5} {name}");
                for (field, value) in &members {
                    let text = match value {
                        Value::String(text)
                            if text.contains([' ', '"', '=']) || text.is_empty() =>
                        {
                            value.to_string()
                        }
                        Value::String(text) => text.clone(),
                        other => other.to_string(),
                    };
                    line.push_str(&format!(" {field}={text}"));
                }
                line
            }
            LogFormat::Json => {
                let mut object = Map::new();
                object.insert("time".into(), Value::String(time.clone()));
                object.insert("level".into(), Value::String(level.clone()));
                object.insert("event".into(), Value::String(name.clone()));
                object.extend(members.clone());
                Value::Object(object).to_string()
            }
        };
        let mut body = Map::new();
        body.insert("type".into(), Value::String(name));
        body.insert("at".into(), Value::String(time));
        body.insert("level".into(), Value::String(level));
        body.extend(members);
        self.ring.push(body, line.len());
        // A closed stderr must not end the daemon; the ring still has the event.
        let _ = writeln!(std::io::stderr().lock(), "{line}");
    }
}

/// Sets the process up for logging; the ring is what `logs` reads.
#[must_use]
pub fn init(format: LogFormat, filter: &str) -> Ring {
    let ring = Ring::default();
    let filter = EnvFilter::try_new(filter).unwrap_or_else(|_| EnvFilter::new("info"));
    let layer = Output { format, ring: ring.clone() }.with_filter(filter);
    // A second call (in tests) keeps the first subscriber.
    let _ = tracing::subscriber::set_global_default(Registry::default().with(layer));
    ring
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ring_is_bounded_and_numbered() {
        let ring = Ring::default();
        for _ in 0..MAX_KEPT_EVENTS + 5 {
            ring.push(Map::new(), 10);
        }
        let (events, more) = ring.read(0, 3);
        assert_eq!(events.iter().map(|e| e.seq).collect::<Vec<_>>(), vec![6, 7, 8]);
        assert!(more);
        assert_eq!(ring.read(ring.head(), 3).0.len(), 0);
        ring.push(Map::new(), MAX_KEPT_BYTES);
        assert_eq!(ring.read(0, 10).0.len(), 1);
    }
}
