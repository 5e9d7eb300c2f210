//! The replicated records of the mesh as values: agents, rooms, messages, peers
//! (`rooms.md` section 1, `transport.md` section 1.2). No merge rules here (see `replica`).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::codec::time::UnixMillis;
use crate::identity::device::DeviceId;

/// Versions above this are refused: a record at the top of the number range could never be
/// superseded by its owner (decision 6).
pub const MAX_VERSION: u64 = 1 << 48;

/// Who may see an agent in listings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Visibility {
    /// Listed for everybody.
    #[default]
    Visible,
    /// Absent from listings, reachable by id.
    Hidden,
    /// Seen by itself only; direct messages are refused.
    Ghost,
}

/// What an agent says it is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AgentStatus {
    /// Working or ready.
    #[default]
    Active,
    /// Nothing to do.
    Idle,
    /// Should not be disturbed.
    Busy,
    /// Not running.
    Offline,
}

impl AgentStatus {
    /// The word used on the wire.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Idle => "idle",
            Self::Busy => "busy",
            Self::Offline => "offline",
        }
    }

    /// Reads the wire word.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        Some(match text {
            "active" => Self::Active,
            "idle" => Self::Idle,
            "busy" => Self::Busy,
            "offline" => Self::Offline,
            _ => return None,
        })
    }
}

/// Bytes of text in one message, in and out: with every byte escaped it still fits a line of the
/// local API.
pub const MAX_TEXT_BYTES: usize = 128 * 1024;

const fn version_one() -> u64 {
    1
}

/// An agent as its own device describes it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AgentRecord {
    /// Device id = peer id = agent id.
    pub id: DeviceId,
    /// Revision; 0 marks a record made from gossip alone.
    #[serde(default = "version_one")]
    pub version: u64,
    /// Self-chosen name (untrusted text).
    pub name: String,
    /// Harness it runs in.
    pub harness: String,
    /// Working directory; empty when not shared.
    #[serde(default)]
    pub cwd: String,
    /// Process id; 0 when not shared.
    #[serde(default)]
    pub pid: i64,
    /// ISO time its store started.
    #[serde(default)]
    pub started_at: String,
    /// Listing rule.
    #[serde(default)]
    pub visibility: Visibility,
    /// Presence.
    #[serde(default)]
    pub status: AgentStatus,
    /// Free labels.
    #[serde(default)]
    pub tags: Vec<String>,
    /// Rooms it says it takes part in.
    #[serde(default)]
    pub subscribed_rooms: Vec<String>,
}

/// Who may join a room and who learns of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RoomType {
    /// Listed, admits at once.
    #[default]
    Public,
    /// By invitation or by the owner's decision; record and history for members only.
    Private,
    /// As private, and in no advert at all.
    Secret,
}

impl RoomType {
    /// The word used on the wire.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Public => "public",
            Self::Private => "private",
            Self::Secret => "secret",
        }
    }
}

/// A room record. `members` and `invited` are views derived from the four operation maps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RoomRecord {
    /// Room path.
    pub id: String,
    /// Revision.
    #[serde(default = "version_one")]
    pub version: u64,
    /// Name as shown (no leading `_` for secret rooms).
    pub name: String,
    /// Public, private or secret.
    #[serde(rename = "type", default)]
    pub kind: RoomType,
    /// Owning device.
    pub owner: DeviceId,
    /// ISO time.
    #[serde(default)]
    pub created_at: String,
    /// Free text.
    #[serde(default)]
    pub description: String,
    /// Derived: agents whose join stamp is greater than their leave stamp.
    #[serde(default)]
    pub members: Vec<DeviceId>,
    /// Derived in the same way from the invitation stamps.
    #[serde(default)]
    pub invited: Vec<DeviceId>,
    /// Room revision at which an agent last joined.
    #[serde(default)]
    pub member_joins: BTreeMap<DeviceId, u64>,
    /// Room revision at which an agent last left or was removed.
    #[serde(default)]
    pub member_leaves: BTreeMap<DeviceId, u64>,
    /// Room revision at which an agent was last invited.
    #[serde(default)]
    pub invited_joins: BTreeMap<DeviceId, u64>,
    /// Room revision at which an invitation last ended.
    #[serde(default)]
    pub invited_leaves: BTreeMap<DeviceId, u64>,
}

impl RoomRecord {
    /// Whether `agent` is a member by the stamps.
    #[must_use]
    pub fn is_member(&self, agent: &DeviceId) -> bool {
        stamp(&self.member_joins, agent) > stamp(&self.member_leaves, agent)
    }

    /// Whether the record has no place for one more agent.
    #[must_use]
    pub fn is_full(&self, agent: &DeviceId) -> bool {
        [&self.member_joins, &self.invited_joins].into_iter().any(|stamps| {
            stamps.len() >= super::replica::MAX_ROOM_STAMPS && !stamps.contains_key(agent)
        })
    }

    /// Whether `agent` has an open invitation by the stamps.
    #[must_use]
    pub fn is_invited(&self, agent: &DeviceId) -> bool {
        stamp(&self.invited_joins, agent) > stamp(&self.invited_leaves, agent)
    }

    /// Recomputes the two views from the stamps, keeping the order of entries that stay.
    pub fn recompute_views(&mut self) {
        self.members = view(&self.members, &self.member_joins, &self.member_leaves);
        self.invited = view(&self.invited, &self.invited_joins, &self.invited_leaves);
    }

    /// Records a join: the room's version is raised first and becomes the stamp (`rooms.md` 1.8).
    pub fn record_join(&mut self, agent: DeviceId) {
        self.version += 1;
        self.member_joins.insert(agent, self.version);
        if self.is_invited(&agent) {
            self.invited_leaves.insert(agent, self.version);
        }
        self.recompute_views();
    }

    /// Records a leave of membership and of any invitation.
    pub fn record_leave(&mut self, agent: DeviceId) {
        self.version += 1;
        self.member_leaves.insert(agent, self.version);
        if self.is_invited(&agent) {
            self.invited_leaves.insert(agent, self.version);
        }
        self.recompute_views();
    }

    /// Records an invitation.
    pub fn record_invite(&mut self, agent: DeviceId) {
        self.version += 1;
        self.invited_joins.insert(agent, self.version);
        self.recompute_views();
    }
}

fn stamp(map: &BTreeMap<DeviceId, u64>, agent: &DeviceId) -> u64 {
    map.get(agent).copied().unwrap_or(0)
}

fn view(
    old: &[DeviceId],
    joins: &BTreeMap<DeviceId, u64>,
    leaves: &BTreeMap<DeviceId, u64>,
) -> Vec<DeviceId> {
    let inside = |agent: &DeviceId| stamp(joins, agent) > stamp(leaves, agent);
    let mut now: Vec<DeviceId> = old.iter().copied().filter(|agent| inside(agent)).collect();
    // Members are few; the linear test keeps the order in which they joined.
    for agent in joins.keys().filter(|agent| inside(agent)) {
        if !now.contains(agent) {
            now.push(*agent);
        }
    }
    now
}

/// How urgently the receiving harness should show a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StreamingBehavior {
    /// React at the next decision point.
    #[serde(rename = "steer")]
    Steer,
    /// Wait until the running task is done.
    #[serde(rename = "followUp")]
    FollowUp,
    /// Any convenient moment.
    #[serde(rename = "info")]
    Info,
}

impl StreamingBehavior {
    /// The word used on the wire.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Steer => "steer",
            Self::FollowUp => "followUp",
            Self::Info => "info",
        }
    }

    /// Reads the wire word; anything else is no hint.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        Some(match text {
            "steer" => Self::Steer,
            "followUp" => Self::FollowUp,
            "info" => Self::Info,
            _ => return None,
        })
    }
}

/// A message in a named room.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RoomMessage {
    /// Lower-case hex of the wire message id.
    pub id: String,
    /// Author.
    pub from: DeviceId,
    /// Room path.
    pub room: String,
    /// Text (untrusted).
    pub content: String,
    /// ISO time the author gave.
    pub timestamp: String,
    /// Message id this one answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reply_to: Option<String>,
    /// Who has consumed it; begins with the author.
    #[serde(default)]
    pub read_by: Vec<DeviceId>,
    /// Delivery timing hint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub streaming_behavior: Option<StreamingBehavior>,
}

/// A direct message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DmMessage {
    /// Lower-case hex of the wire message id.
    pub id: String,
    /// Author.
    pub from: DeviceId,
    /// Recipient.
    pub to: DeviceId,
    /// Text (untrusted).
    pub content: String,
    /// ISO time the author gave.
    pub timestamp: String,
    /// Message id this one answers: ours, reference peers drop it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reply_to: Option<String>,
    /// Who has consumed it; begins with the author.
    #[serde(default)]
    pub read_by: Vec<DeviceId>,
    /// Delivery timing hint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub streaming_behavior: Option<StreamingBehavior>,
}

/// Where a peer can be dialled.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PeerInfo {
    /// Device id.
    pub id: DeviceId,
    /// Its data port.
    pub port: u16,
    /// ISO time the announcing side first met it; decides who succeeds at the port.
    #[serde(default)]
    pub started_at: String,
    /// Address it was heard from; absent means 127.0.0.1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
}

/// Who may begin a conversation with an agent of ours. What it has agreed to stays so, and a grant
/// (`rooms.md` 3.12) always opens one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ConsentPolicy {
    /// Whoever the agent, or its user, says yes to.
    #[default]
    Ask,
    /// Agents of the same user without a question; others ask.
    SamePrincipal,
    /// Everybody.
    Open,
    /// Nobody.
    Closed,
}

/// A moment as the protocol sees it: a monotonic reading for deadlines and the wall clock for
/// everything that other machines judge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Now {
    /// Milliseconds on a clock that never goes back (may stand still during a suspend).
    pub mono: u64,
    /// Wall clock.
    pub unix: UnixMillis,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(n: u8) -> DeviceId {
        DeviceId([n; 32])
    }

    fn room() -> RoomRecord {
        RoomRecord {
            id: format!("{}/r", id(1)),
            version: 1,
            name: "r".into(),
            kind: RoomType::Public,
            owner: id(1),
            created_at: String::new(),
            description: String::new(),
            members: vec![],
            invited: vec![],
            member_joins: BTreeMap::from([(id(1), 1)]),
            member_leaves: BTreeMap::new(),
            invited_joins: BTreeMap::new(),
            invited_leaves: BTreeMap::new(),
        }
    }

    #[test]
    fn equal_stamps_mean_left() {
        let mut room = room();
        room.member_leaves.insert(id(1), 1);
        room.recompute_views();
        assert!(room.members.is_empty());
        assert!(!room.is_member(&id(1)));
    }

    #[test]
    fn joining_ends_the_invitation() {
        let mut room = room();
        room.record_invite(id(2));
        assert_eq!((room.version, room.invited.clone()), (2, vec![id(2)]));
        room.record_join(id(2));
        assert_eq!((room.version, room.members.clone()), (3, vec![id(1), id(2)]));
        assert!(room.invited.is_empty());
        room.record_leave(id(2));
        assert_eq!(room.members, vec![id(1)]);
    }
}
