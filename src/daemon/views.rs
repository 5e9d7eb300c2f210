//! What clients are shown of the node: themselves, agents, rooms, their histories, and the graph, each
//! within the size of an answer.

use std::collections::{HashMap, HashSet};

use super::advice::detached;
use super::lookup::no_room;
use super::owner::{Client, Owner};
use super::requests::some_text;
use crate::api::types::{self, ApiError, Time};
use crate::codec::text::truncate_chars;
use crate::identity::device::DeviceId;
use crate::mesh::node::{CommandError, RoomView};
use crate::mesh::records::{self, AgentRecord, ConsentPolicy};
use crate::mesh::wire::room_path::RoomPath;
use crate::runtime::local_socket::ConnId;

/// Characters left of a peer's text where a list is too long.
const MAX_SHORT_CHARS: usize = 64;

fn room_type(kind: records::RoomType) -> types::RoomType {
    match kind {
        records::RoomType::Public => types::RoomType::Public,
        records::RoomType::Private => types::RoomType::Private,
        records::RoomType::Secret => types::RoomType::Secret,
    }
}

fn status(status: records::AgentStatus) -> types::AgentStatus {
    match status {
        records::AgentStatus::Active => types::AgentStatus::Active,
        records::AgentStatus::Idle => types::AgentStatus::Idle,
        records::AgentStatus::Busy => types::AgentStatus::Busy,
        records::AgentStatus::Offline => types::AgentStatus::Offline,
    }
}

fn visibility(visibility: records::Visibility) -> types::Visibility {
    match visibility {
        records::Visibility::Visible => types::Visibility::Visible,
        records::Visibility::Hidden => types::Visibility::Hidden,
        records::Visibility::Ghost => types::Visibility::Ghost,
    }
}

fn consent(policy: ConsentPolicy) -> types::Consent {
    match policy {
        ConsentPolicy::Ask => types::Consent::Ask,
        ConsentPolicy::SamePrincipal => types::Consent::SamePrincipal,
        ConsentPolicy::Open => types::Consent::Open,
        ConsentPolicy::Closed => types::Consent::Closed,
    }
}

impl Owner {
    /// The graph, with the names of those that the agent may see listed.
    pub(super) fn graph(&self, viewer: &DeviceId) -> types::MeshGraph {
        let graph = self.node.graph();
        let names: HashMap<DeviceId, &str> = self.node.listed(Some(viewer)).collect();
        types::MeshGraph {
            nodes: graph
                .nodes
                .iter()
                .map(|id| types::GraphNode {
                    id: id.hex(),
                    name: names.get(id).map(|name| (*name).to_owned()),
                })
                .collect(),
            edges: graph
                .edges
                .iter()
                .map(|(from, to)| types::GraphEdge { from: from.hex(), to: to.hex() })
                .collect(),
        }
    }

    pub(super) fn whoami(&self, agent: &DeviceId) -> Result<types::Whoami, ApiError> {
        let record: &AgentRecord = self.node.own_agent(agent).ok_or_else(detached)?;
        let rooms = self
            .node
            .rooms(Some(agent))
            .into_iter()
            .filter(|view| view.joined)
            .map(|view| view.record.id)
            .collect();
        Ok(types::Whoami {
            id: agent.hex(),
            name: record.name.clone(),
            harness: record.harness.clone(),
            cwd: record.cwd.clone(),
            status: status(record.status),
            visibility: visibility(record.visibility),
            tags: record.tags.clone(),
            consent: consent(self.node.consent(agent)),
            rooms,
            principal: self.principal.map(|id| id.hex()),
            machine: self.machine.map(|id| id.hex()),
            version: types::PROGRAM_VERSION.to_owned(),
        })
    }

    pub(super) fn viewer(&self, conn: ConnId) -> Option<DeviceId> {
        self.clients.get(&conn).and_then(|client: &Client| client.agent)
    }

    pub(super) fn agents_view(&self, conn: ConnId) -> Vec<types::AgentInfo> {
        let viewer = self.viewer(conn);
        let petnames = self.petnames();
        // Secret rooms are named to those who are in them.
        let secret: HashSet<String> =
            self.node.rooms_hidden_from(viewer.as_ref()).map(|path| path.to_string()).collect();
        let agents = self
            .node
            .agents(viewer.as_ref(), self.now())
            .into_iter()
            .map(|view| {
                let mut record = view.record;
                record.subscribed_rooms.retain(|room| !secret.contains(room));
                let petname =
                    petnames.as_ref().and_then(|names| names.get(&record.id)).map(str::to_owned);
                types::AgentInfo {
                    id: record.id.hex(),
                    name: petname.clone().unwrap_or_else(|| record.name.clone()),
                    names: types::Names {
                        petname,
                        own: some_text(&record.name),
                        machine: view.machine_name,
                    },
                    harness: record.harness,
                    cwd: some_text(&record.cwd),
                    status: status(record.status),
                    visibility: visibility(record.visibility),
                    tags: record.tags,
                    rooms: record.subscribed_rooms,
                    local: view.local,
                    machine: view.machine.map(|id| id.hex()),
                }
            })
            .collect();
        fit(
            agents,
            |agent| agent.local || agent.names.petname.is_some(),
            |agent| {
                agent.cwd = None;
                agent.tags.clear();
                agent.rooms.clear();
                agent.harness = truncate_chars(&agent.harness, MAX_SHORT_CHARS).to_owned();
            },
        )
    }

    pub(super) fn rooms_view(&self, conn: ConnId) -> Vec<types::RoomInfo> {
        let viewer = self.viewer(conn);
        let rooms = self
            .node
            .rooms(viewer.as_ref())
            .into_iter()
            .map(|RoomView { record, joined }| types::RoomInfo {
                path: record.id,
                name: record.name,
                r#type: room_type(record.kind),
                owner: record.owner.hex(),
                description: record.description,
                members: record.members.len() as u64,
                joined,
            })
            .collect();
        fit(
            rooms,
            |room| room.joined,
            |room| {
                room.description.clear();
                room.name = truncate_chars(&room.name, MAX_SHORT_CHARS).to_owned();
            },
        )
    }

    pub(super) fn room_view(&self, path: &RoomPath, viewer: &DeviceId) -> Option<types::Room> {
        let view = self.node.room(path, Some(viewer))?;
        let now = self.now();
        let members = view
            .record
            .members
            .iter()
            .map(|id| {
                let agent = self.node.agent_by_id(id, now);
                types::Member {
                    id: id.hex(),
                    name: agent.as_ref().and_then(|view| some_text(&view.record.name)),
                    status: agent.map(|view| status(view.record.status)),
                }
            })
            .collect();
        Some(types::Room {
            path: view.record.id,
            name: view.record.name,
            r#type: room_type(view.record.kind),
            owner: view.record.owner.hex(),
            description: view.record.description,
            members,
            status: None,
        })
    }

    /// The room as far as the agent may know it; a room known by its path alone has no more.
    pub(super) fn room_or_path(&self, path: &RoomPath, viewer: &DeviceId) -> types::Room {
        self.room_view(path, viewer).unwrap_or_else(|| types::Room {
            path: path.to_string(),
            name: path.local_name().trim_start_matches('_').to_owned(),
            r#type: types::RoomType::Private,
            owner: path.owner().map(|owner| owner.hex()).unwrap_or_default(),
            description: String::new(),
            members: Vec::new(),
            status: None,
        })
    }

    pub(super) fn history(
        &self,
        agent: &DeviceId,
        params: &types::RoomHistoryParams,
    ) -> Result<types::History, ApiError> {
        let limit = params.limit.map_or(types::DEFAULT_PAGE, types::PageSize::get);
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        let with = |other| RoomPath::dm(*agent, other).ok_or_else(|| no_room(&params.room));
        let path = match (DeviceId::parse(&params.room), self.find_room(&params.room, agent)) {
            // Whoever it is of, however rooms are called.
            (Some(other), _) => with(other)?,
            (None, Ok(path)) => path,
            (None, Err(error)) if error.code == "room_not_found" => {
                with(self.find_agent(&params.room, agent).map_err(|_| error)?)?
            }
            (None, Err(error)) => return Err(error),
        };
        let now = self.now();
        let message = |seq: u64,
                       id: &str,
                       from: DeviceId,
                       at: &str,
                       text: &str,
                       reply_to: Option<&String>,
                       read_by: &[DeviceId]| {
            types::RoomMessage {
                seq,
                id: id.to_owned(),
                from: from.hex(),
                from_name: self
                    .node
                    .agent_by_id(&from, now)
                    .and_then(|view| some_text(&view.record.name)),
                at: Time(crate::codec::time::UnixMillis::parse_iso(at).unwrap_or_default()),
                text: text.to_owned(),
                reply_to: reply_to.cloned(),
                read_by: read_by.iter().map(DeviceId::hex).collect(),
            }
        };
        let all: Vec<types::RoomMessage> = if path.owner().is_some() {
            let messages = self.node.room_messages(&path, agent).ok_or_else(|| {
                ApiError::from(CommandError::new(
                    "not_member",
                    format!("you are not in room {path}"),
                ))
            })?;
            messages
                .map(|(seq, m)| {
                    message(
                        seq,
                        &m.id,
                        m.from,
                        &m.timestamp,
                        &m.content,
                        m.reply_to.as_ref(),
                        &m.read_by,
                    )
                })
                .collect()
        } else {
            let messages =
                self.node.dm_messages(&path, agent).ok_or_else(|| no_room(&params.room))?;
            messages
                .map(|(seq, m)| {
                    message(
                        seq,
                        &m.id,
                        m.from,
                        &m.timestamp,
                        &m.content,
                        m.reply_to.as_ref(),
                        &m.read_by,
                    )
                })
                .collect()
        };
        Ok(page(all, params.since, limit))
    }
}

/// As many entries as fit an answer. Peers say what is in them: where they are too many, those
/// that are not `ours` lose what they could do without, and then the last ones go.
fn fit<T: serde::Serialize>(
    mut entries: Vec<T>,
    ours: impl Fn(&T) -> bool,
    shorten: impl Fn(&mut T),
) -> Vec<T> {
    let size = |entry: &T| serde_json::to_vec(entry).map_or(0, |bytes| bytes.len());
    if entries.iter().map(size).sum::<usize>() <= super::MAX_ANSWER_BYTES {
        return entries;
    }
    // Ours first, each part in its order.
    entries.sort_by_key(|entry| !ours(entry));
    entries.iter_mut().filter(|entry| !ours(entry)).for_each(shorten);
    let mut bytes = 0;
    entries
        .into_iter()
        .take_while(|entry| {
            bytes += size(entry);
            bytes <= super::MAX_ANSWER_BYTES
        })
        .collect()
}

/// The messages after `since`, or the newest; within the limits of an answer.
fn page(all: Vec<types::RoomMessage>, since: Option<u64>, limit: usize) -> types::History {
    let size = |message: &types::RoomMessage| message.text.len() * 2 + 512;
    let mut bytes = 0;
    let mut fits = |message: &types::RoomMessage| {
        bytes += size(message);
        bytes <= super::MAX_ANSWER_BYTES
    };
    match since {
        Some(since) => {
            let after: Vec<_> = all.into_iter().filter(|m| m.seq > since).collect();
            let total = after.len();
            let mut first = true;
            let messages: Vec<_> = after
                .into_iter()
                .take(limit)
                .take_while(|m| std::mem::take(&mut first) | fits(m))
                .collect();
            types::History { more: messages.len() < total, messages }
        }
        None => {
            let mut newest: Vec<_> = all.into_iter().rev().take(limit).take_while(fits).collect();
            newest.reverse();
            types::History { messages: newest, more: false }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::time::UnixMillis;

    fn message(seq: u64, text: &str) -> types::RoomMessage {
        types::RoomMessage {
            seq,
            id: format!("{seq:032x}"),
            from: String::new(),
            from_name: None,
            at: types::Time(UnixMillis(0)),
            text: text.into(),
            reply_to: None,
            read_by: Vec::new(),
        }
    }

    fn seqs(messages: &[types::RoomMessage]) -> Vec<u64> {
        messages.iter().map(|message| message.seq).collect()
    }

    #[test]
    fn a_list_that_fits_stays_as_it_is() {
        let entries: Vec<String> = ["foreign", "own"].map(str::to_owned).into();
        let kept = fit(entries.clone(), |entry| entry == "own", String::clear);
        assert_eq!(kept, entries);
    }

    #[test]
    fn a_list_that_is_too_long_keeps_what_is_ours() {
        let long = "x".repeat(super::super::MAX_ANSWER_BYTES / 4);
        let mut entries: Vec<String> = (0..4).map(|n| format!("foreign {n} {long}")).collect();
        entries.push("own".into());
        // Shortened, everything fits.
        let kept = fit(entries.clone(), |entry| entry == "own", |entry| entry.truncate(9));
        assert_eq!(kept, ["own", "foreign 0", "foreign 1", "foreign 2", "foreign 3"]);
        // Where that is not enough, the last ones go.
        let kept = fit(entries, |entry| entry == "own", |_| {});
        assert_eq!(kept.len(), 4);
        assert_eq!(kept[0], "own");
        assert!(kept[3].starts_with("foreign 2"));
    }

    #[test]
    fn pages_go_on_where_the_last_one_ended() {
        let all: Vec<_> = (1..=5).map(|seq| message(seq, "t")).collect();
        let first = page(all.clone(), Some(1), 2);
        assert_eq!((seqs(&first.messages), first.more), (vec![2, 3], true));
        let last = page(all.clone(), Some(3), 2);
        assert_eq!((seqs(&last.messages), last.more), (vec![4, 5], false));
        assert_eq!(seqs(&page(all, None, 2).messages), [4, 5]);
    }

    #[test]
    fn a_page_holds_what_an_answer_can() {
        let long = "x".repeat(super::super::MAX_ANSWER_BYTES / 5);
        let all: Vec<_> = (1..=5).map(|seq| message(seq, &long)).collect();
        let first = page(all.clone(), Some(0), 5);
        assert_eq!((seqs(&first.messages), first.more), (vec![1, 2], true));
        assert_eq!(seqs(&page(all, None, 5).messages), [4, 5]);
        // One that is too long by itself is still shown: the next page begins after it.
        let huge = message(1, &long.repeat(5));
        assert_eq!(seqs(&page(vec![huge], Some(0), 5).messages), [1]);
    }
}
