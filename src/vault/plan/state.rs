//! The local state `.echoes-vault/state.json`: taken over from what is there, never trusted, written
//! anew by every writer (specification, section 10).

use serde::Serialize;
use serde_json::Value;

use super::engine::ENGINE;
use super::json::{self, Json};
use super::marker::PROTOCOL;

/// Version of the state's shape.
pub const VERSION: u64 = 4;

/// The state, members in the order of the specification.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct State {
    version: u64,
    protocol_version: &'static str,
    engine_version: &'static str,
    /// Whether a vault has been set up here.
    pub initialized: bool,
    /// The session.
    pub session: Session,
    /// Counts, taken anew.
    pub stats: Stats,
    /// Who wrote last.
    pub last_writer: Writer,
}

/// The session's members; whatever an older file held is kept as it is.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Session {
    /// Whether one has been started.
    pub started: Json,
    /// Whether it has been saved.
    pub saved: Json,
    /// When it was started: local time with offset, or null.
    pub last_start: Json,
    /// When one was saved last.
    pub last_save: Json,
}

/// Counts over the vault.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Stats {
    /// Pages on disk.
    pub total_pages: usize,
    /// Daily entries on disk.
    pub total_daily_logs: usize,
    /// Pages whose status is `deprecated`.
    pub deprecated_pages: usize,
}

/// Who wrote.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Writer {
    /// Its normalised name.
    pub agent: Option<String>,
    /// What it says of its version.
    pub adapter_version: Option<String>,
}

impl Default for State {
    fn default() -> Self {
        Self {
            version: VERSION,
            protocol_version: PROTOCOL,
            engine_version: ENGINE,
            initialized: false,
            session: Session {
                started: false.into(),
                saved: false.into(),
                last_start: Json::Null,
                last_save: Json::Null,
            },
            stats: Stats::default(),
            last_writer: Writer::default(),
        }
    }
}

/// Where a state can come from, in the order in which they are asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// `.echoes-vault/state.json`.
    Own,
    /// The old OpenCode plugin's.
    OpenCode,
    /// The old Codex plugin's.
    Codex,
}

impl Source {
    /// All, first asked first.
    pub const ALL: [Self; 3] = [Self::Own, Self::OpenCode, Self::Codex];

    /// Its path from the workspace's root.
    pub fn path(self) -> &'static str {
        match self {
            Self::Own => ".echoes-vault/state.json",
            Self::OpenCode => ".opencode/echoes-state.json",
            Self::Codex => ".codex/echoes-vault-state.json",
        }
    }

    fn legacy_agent(self) -> Option<&'static str> {
        match self {
            Self::Own => None,
            Self::OpenCode => Some("opencode"),
            Self::Codex => Some("codex"),
        }
    }
}

fn text_member(value: &Json, member: &str) -> Option<String> {
    value.get(member).and_then(Json::as_str).filter(|text| !text.is_empty()).map(str::to_owned)
}

/// The state that a file's value means. A value that is no object means nothing.
pub fn import(source: Source, value: &Json) -> State {
    let mut state = State::default();
    if !value.is_object() {
        return state;
    }
    state.initialized = value.get("initialized").is_some_and(json::truthy);
    if let Some(session) = value.get("session").filter(|session| session.is_object()) {
        let take = |member: &str, into: &mut Json| {
            if let Some(value) = session.get(member) {
                *into = value.clone();
            }
        };
        take("started", &mut state.session.started);
        take("saved", &mut state.session.saved);
        take("lastStart", &mut state.session.last_start);
        take("lastSave", &mut state.session.last_save);
    }
    state.last_writer = match (value.get("lastWriter"), source.legacy_agent()) {
        (Some(writer), _) if writer.is_object() => Writer {
            agent: text_member(writer, "agent"),
            adapter_version: text_member(writer, "adapterVersion"),
        },
        (_, Some(agent)) => Writer {
            agent: Some(agent.to_owned()),
            adapter_version: text_member(value, "pluginVersion"),
        },
        _ => Writer::default(),
    };
    state
}

/// What is wrong with the own state file's value; `None` if nothing is.
pub fn fault(value: &Json) -> Option<&'static str> {
    let is = |member: &str, should: Value| {
        value.get(member).is_some_and(|value| json::equal(value, &should.into()))
    };
    if !value.is_object() {
        Some("the state is not a JSON object")
    } else if !is("version", VERSION.into()) {
        Some("the state has another version")
    } else if !is("protocolVersion", PROTOCOL.into()) {
        Some("the state belongs to another protocol")
    } else if !is("engineVersion", ENGINE.into()) {
        Some("the state was written by another engine version")
    } else if !value.get("lastWriter").is_some_and(Json::is_object) {
        Some("the state does not say who wrote last")
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn old_states_are_taken_over_member_by_member() {
        let old = json!({"initialized": 1, "session": {"started": "yes", "x": 1}, "pluginVersion": "0.9"});
        let state = import(Source::Codex, &old.clone().into());
        assert!(state.initialized);
        assert_eq!(state.session.started, json!("yes").into());
        assert_eq!(state.session.saved, json!(false).into());
        assert_eq!(state.last_writer.agent.as_deref(), Some("codex"));
        assert_eq!(state.last_writer.adapter_version.as_deref(), Some("0.9"));
        assert_eq!(import(Source::Own, &old.into()).last_writer, Writer::default());
        assert_eq!(import(Source::Own, &json!([]).into()), State::default());
    }

    #[test]
    fn faults_come_in_their_order() {
        let fault = |value: &Value| super::fault(&value.clone().into());
        let good: Value = serde_json::from_str(&json::pretty(&State::default())).unwrap();
        assert_eq!(fault(&good), None);
        let mut old = good.clone();
        old["version"] = json!(3);
        assert!(fault(&old).is_some());
        let mut float = good;
        float["version"] = json!(4.0);
        assert_eq!(fault(&float), None);
    }
}
