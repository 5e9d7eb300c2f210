//! Settings of the Agent Collaboration Protocol: who may propose work, and what it is done with.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize, Serializer};

use crate::acp::did::Did;
use crate::acp::gateway::Admission;
use crate::acp::objects::{Gate, GatePolicy, Isolation};
use crate::acp::tool::ToolName;
use crate::daemon::acp::{MAX_TOOLS, Tool};
use crate::runtime::adapter::{AdapterKind, AdapterOptions, HostKeys};

/// Dids that one setting names: people write them by hand.
const MAX_DIDS: usize = 256;

/// Who may propose work without an invite: `"none"`, `"peers"`, dids, or a list of those.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Words")]
pub struct AcpAdmit {
    /// Peers of the mesh whom this user has let in, and the user's own.
    pub peers: bool,
    /// These, by whatever way they come.
    pub dids: Vec<Did>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Words {
    One(String),
    Many(Vec<String>),
}

impl TryFrom<Words> for AcpAdmit {
    type Error = String;

    fn try_from(words: Words) -> Result<Self, Self::Error> {
        let words = match words {
            Words::One(word) if word == "none" => Vec::new(),
            Words::One(word) => vec![word],
            Words::Many(words) => words,
        };
        let mut admit = Self::default();
        for word in words {
            match word.as_str() {
                "peers" => admit.peers = true,
                did => admit.dids.push(Did::parse(did).map_err(|_| {
                    format!("{word:?} is neither a did (did:key:z6Mk…) nor \"peers\"")
                })?),
            }
        }
        if admit.dids.len() > MAX_DIDS {
            return Err(format!("{MAX_DIDS} dids at most"));
        }
        Ok(admit)
    }
}

impl AcpAdmit {
    /// Whom an office lets propose from the beginning; peers are let in when they come.
    #[must_use]
    pub fn admission(&self) -> Admission {
        match self.dids.as_slice() {
            [] => Admission::Invited,
            dids => Admission::Known(dids.to_vec()),
        }
    }
}

impl fmt::Display for AcpAdmit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let peers = self.peers.then(|| "peers".to_owned());
        let words: Vec<_> = peers.into_iter().chain(self.dids.iter().map(Did::to_string)).collect();
        f.write_str(if words.is_empty() { "none".into() } else { words.join(" ") }.as_str())
    }
}

/// An adapter by its word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct AdapterWord(pub AdapterKind);

impl TryFrom<String> for AdapterWord {
    type Error = String;

    fn try_from(word: String) -> Result<Self, Self::Error> {
        AdapterKind::parse(&word).map(Self).ok_or_else(|| {
            let all: Vec<_> = AdapterKind::ALL.iter().map(|kind| kind.as_str()).collect();
            format!("{word:?} is none of {}", all.join(", "))
        })
    }
}

impl Serialize for AdapterWord {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(self.0.as_str())
    }
}

/// A level of isolation by its word.
#[derive(Debug, Deserialize)]
#[serde(try_from = "String")]
pub(super) struct Level(pub Isolation);

impl TryFrom<String> for Level {
    type Error = String;

    fn try_from(word: String) -> Result<Self, Self::Error> {
        Isolation::parse(&word).map(Self).ok_or_else(|| {
            let all: Vec<_> = Isolation::ALL.iter().map(|level| level.as_str()).collect();
            format!("{word:?} is none of {}", all.join(", "))
        })
    }
}

/// Tools that the daemon may grant to workers: `RESOURCE:ACTION` and the command that does it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(try_from = "BTreeMap<String, String>")]
pub struct AcpTools(pub Vec<Tool>);

impl TryFrom<BTreeMap<String, String>> for AcpTools {
    type Error = String;

    fn try_from(table: BTreeMap<String, String>) -> Result<Self, Self::Error> {
        if table.len() > MAX_TOOLS {
            return Err(format!("{MAX_TOOLS} tools at most"));
        }
        let read = |(name, command): (String, String)| {
            ToolName::parse(&name)
                .and_then(|name| Tool::new(name, &command))
                .map_err(|error| format!("{name:?}: {}", error.message()))
        };
        table.into_iter().map(read).collect::<Result<_, _>>().map(Self)
    }
}

impl Serialize for AcpTools {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_map(self.0.iter().map(|tool| (tool.name.to_string(), &tool.command)))
    }
}

impl fmt::Display for AcpTools {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.0.iter().map(|tool| tool.name.to_string()).collect();
        f.write_str(if names.is_empty() { "none".into() } else { names.join(" ") }.as_str())
    }
}

/// What this owner has laid down for gates (design 9.4): `"ask"`, `"auto"` or `"deny"`. Nothing else
/// opens the gates but those of contracts and results, for which commands have flags.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(try_from = "BTreeMap<String, String>")]
pub struct AcpGates(pub BTreeMap<Gate, GatePolicy>);

impl AcpGates {
    /// The gates with this policy.
    #[must_use]
    pub fn with(&self, policy: GatePolicy) -> Vec<Gate> {
        let with = self.0.iter().filter(|(_, given)| **given == policy);
        with.map(|(gate, _)| *gate).collect()
    }
}

impl TryFrom<BTreeMap<String, String>> for AcpGates {
    type Error = String;

    fn try_from(table: BTreeMap<String, String>) -> Result<Self, Self::Error> {
        let one_of = |word: &str, all: Vec<&str>| format!("{word:?} is none of {}", all.join(", "));
        let read = |(gate, policy): (String, String)| {
            let gates = || Gate::ALL.iter().map(|gate| gate.as_str()).collect();
            let policies = || GatePolicy::ALL.iter().map(|policy| policy.as_str()).collect();
            Ok((
                Gate::parse(&gate).ok_or_else(|| one_of(&gate, gates()))?,
                GatePolicy::parse(&policy).ok_or_else(|| one_of(&policy, policies()))?,
            ))
        };
        table.into_iter().map(read).collect::<Result<_, String>>().map(Self)
    }
}

impl Serialize for AcpGates {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_map(self.0.iter().map(|(gate, policy)| (gate.as_str(), policy.as_str())))
    }
}

impl fmt::Display for AcpGates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("ask at all");
        }
        let pairs =
            self.0.iter().map(|(gate, policy)| format!("{}={}", gate.as_str(), policy.as_str()));
        f.write_str(&pairs.collect::<Vec<_>>().join(" "))
    }
}

/// What the daemon does work for others with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AcpWork {
    /// The adapter.
    pub adapter: AdapterWord,
    /// Its command, MCP server or JavaScript.
    pub cmd: Option<String>,
    /// The tool of an MCP server.
    pub tool: Option<String>,
    /// The model.
    pub model: Option<String>,
    /// The one level of isolation; every usable one without it.
    pub isolation: Option<Isolation>,
    /// Contracts are accepted without asking the owner.
    pub auto_accept: bool,
}

impl AcpWork {
    /// The key that is not there and without which this adapter does nothing, with the adapter.
    pub(super) fn missing(&self) -> Option<(&'static str, &'static str)> {
        let kind = self.adapter.0;
        let needs_cmd =
            matches!(kind, AdapterKind::Command | AdapterKind::Mcp | AdapterKind::Sandbox);
        let key = match kind {
            _ if needs_cmd && self.cmd.is_none() => "acp-worker-cmd",
            AdapterKind::Mcp if self.tool.is_none() => "acp-worker-tool",
            AdapterKind::Openai if self.model.is_none() => "acp-worker-model",
            _ => return None,
        };
        Some((key, kind.as_str()))
    }

    /// The adapter's options. Keys of providers come from the daemon's environment, as for a worker of
    /// the command line.
    #[must_use]
    pub fn options(&self) -> AdapterOptions {
        AdapterOptions {
            cmd: self.cmd.clone(),
            tool: self.tool.clone(),
            model: self.model.clone(),
            isolation: self.isolation,
            keys: HostKeys::from_env(),
            // The office has its own place for runs.
            ..AdapterOptions::new(self.adapter.0, PathBuf::new())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DID: &str = "did:key:z6MkiTBz1ymuepAQ4HEHYSF1H8quG5GLVVQR3djdX3mDooWp";

    fn admit(value: &str) -> Result<AcpAdmit, toml::de::Error> {
        #[derive(Deserialize)]
        struct Keys {
            admit: AcpAdmit,
        }
        toml::from_str::<Keys>(&format!("admit = {value}")).map(|keys| keys.admit)
    }

    #[test]
    fn who_may_propose_is_nobody_unless_it_is_said() {
        for nobody in ["\"none\"", "[]"] {
            let none = admit(nobody).unwrap();
            assert_eq!((none.admission(), none.peers), (Admission::Invited, false), "{nobody}");
            assert_eq!(none.to_string(), "none");
        }
        let peers = admit("\"peers\"").unwrap();
        assert_eq!((peers.admission(), peers.peers), (Admission::Invited, true));
        let did = Did::parse(DID).unwrap();
        let one = admit(&format!("\"{DID}\"")).unwrap();
        assert_eq!((one.admission(), one.peers), (Admission::Known(vec![did]), false));
        let both = admit(&format!("[\"peers\", \"{DID}\"]")).unwrap();
        assert_eq!((both.admission(), both.peers), (Admission::Known(vec![did]), true));
        assert_eq!(both.to_string(), format!("peers {DID}"));
        for bad in ["\"all\"", "\"\"", "[\"none\"]", "true", "[\"did:web:a\"]"] {
            assert!(admit(bad).is_err(), "{bad}");
        }
        let many = vec![format!("\"{DID}\""); MAX_DIDS + 1].join(", ");
        assert!(admit(&format!("[{many}]")).is_err());
    }
}
