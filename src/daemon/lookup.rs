//! What a text of a client names: agents by id, beginning of an id, petname or name, rooms by path or
//! name. It finds what is known and changes nothing.

use std::collections::BTreeSet;

use super::advice::todo;
use super::owner::Owner;
use crate::api::types::ApiError;
use crate::identity::device::DeviceId;
use crate::identity::names::is_id_or_prefix;
use crate::mesh::records;
use crate::mesh::wire::room_path::{self, RoomPath};

/// Candidates listed when a name is ambiguous.
pub(super) const MAX_CANDIDATES: usize = 8;

impl Owner {
    pub(super) fn find_agent(&self, text: &str, viewer: &DeviceId) -> Result<DeviceId, ApiError> {
        self.find_among(text, viewer, &[])
    }

    /// The agent that is meant by an id, the beginning of one, or a name: of those that the viewer
    /// sees listed, and `others`, with their own names. What reads as an id means no name but a
    /// petname: else whoever calls himself by another's id would get what is meant for that one.
    pub(super) fn find_among(
        &self,
        text: &str,
        viewer: &DeviceId,
        others: &[(DeviceId, String)],
    ) -> Result<DeviceId, ApiError> {
        if let Some(id) = DeviceId::parse(text) {
            return Ok(id);
        }
        let now = self.now();
        let petnames = self.petnames();
        let named = |wanted: &dyn Fn(&DeviceId, &str) -> bool| -> BTreeSet<DeviceId> {
            let others = others.iter().map(|(id, name)| (*id, name.as_str()));
            let known = self.node.listed(Some(viewer)).chain(others);
            known.filter(|(id, name)| wanted(id, name)).map(|(id, _)| id).collect()
        };
        let by_petname =
            named(&|id, _| petnames.as_ref().and_then(|names| names.get(id)) == Some(text));
        let hex = is_id_or_prefix(text);
        let prefix = text.to_ascii_lowercase();
        let by_prefix =
            if hex { named(&|id, _| id.hex().starts_with(&prefix)) } else { BTreeSet::new() };
        let by_name = if hex { BTreeSet::new() } else { named(&|_, name| name == text) };
        // Who is here goes before who was: a restarted agent with a new id keeps its name.
        let here: BTreeSet<DeviceId> = by_name
            .iter()
            .copied()
            .filter(|id| {
                let view = self.node.agent_by_id(id, now);
                view.is_some_and(|view| view.record.status != records::AgentStatus::Offline)
            })
            .collect();
        for found in [by_petname, by_prefix, here, by_name] {
            match (found.first(), found.len()) {
                (None, _) => {}
                (Some(one), 1) => return Ok(*one),
                (_, many) => {
                    let list: Vec<String> =
                        found.iter().take(MAX_CANDIDATES).map(DeviceId::hex).collect();
                    return Err(ApiError::new(
                        "ambiguous_agent",
                        format!("{many} agents are meant by {text:?}: {}", list.join(", ")),
                        "give the full id",
                    ));
                }
            }
        }
        if hex {
            let mut daemons = self.daemons().filter(|id| id.hex().starts_with(&prefix));
            if let (Some(daemon), None) = (daemons.next(), daemons.next()) {
                return Ok(daemon);
            }
        }
        Err(ApiError::new(
            "agent_not_found",
            format!("no agent is called {text:?}"),
            todo("agent_not_found").unwrap_or_default(),
        ))
    }

    /// The daemons of the mesh that are connected, and this one: they have shares, and no names.
    fn daemons(&self) -> impl Iterator<Item = DeviceId> {
        let peers = self.node.status().peers.into_iter().map(|peer| peer.device);
        // Others' devices are agents, of which some are hidden.
        let daemons = peers.filter(|device| self.node.daemon_of(device) == Some(*device));
        daemons.chain([self.node.daemon()])
    }

    /// Whether a text names this agent. One need not be known any more, or be seen, where the beginning
    /// of its id is given.
    pub(super) fn is_called(&self, id: &DeviceId, text: &str, viewer: &DeviceId) -> bool {
        let prefix = is_id_or_prefix(text) && id.hex().starts_with(&text.to_ascii_lowercase());
        prefix || self.find_agent(text, viewer).is_ok_and(|found| found == *id)
    }

    /// The room that an agent means. Of several, one that it is in: a stranger can give its own
    /// room any name.
    pub(super) fn find_room(&self, text: &str, viewer: &DeviceId) -> Result<RoomPath, ApiError> {
        self.room_called(text, viewer, true)
    }

    /// The room that an agent wants to get into.
    pub(super) fn find_room_to_join(
        &self,
        text: &str,
        viewer: &DeviceId,
    ) -> Result<RoomPath, ApiError> {
        self.room_called(text, viewer, false)
    }

    fn room_called(
        &self,
        text: &str,
        viewer: &DeviceId,
        prefer_joined: bool,
    ) -> Result<RoomPath, ApiError> {
        if let Ok(path) = RoomPath::parse(text) {
            return Ok(path);
        }
        // Rooms are listed by what their names were made into.
        let slug = room_path::slug(text);
        let spells = |name: &str| name == text || Some(name) == slug.as_deref();
        // Or by their owner and that: lists in text show the beginning of its id.
        let of_owner =
            text.split_once('/').map(|(owner, name)| (owner, name, room_path::slug(name)));
        let owned = |name: &str, path: &RoomPath| {
            of_owner.as_ref().is_some_and(|(owner, text, slug)| {
                (name == *text || Some(name) == slug.as_deref())
                    && path.owner().is_some_and(|id| self.is_called(&id, owner, viewer))
            })
        };
        // A conversation has a path and no name, and is nobody's room by none.
        // A secret room's path has a mark before the name, and is what lists show.
        let is_meant = |name: &str, path: &RoomPath| {
            let named = |name: &str| spells(name) || owned(name, path);
            !name.is_empty() && (named(name) || named(path.local_name()))
        };
        let (mut joined, mut others) = (Vec::new(), Vec::new());
        for view in self.node.rooms(Some(viewer)) {
            if let Ok(path) = RoomPath::parse(&view.record.id)
                && is_meant(&view.record.name, &path)
            {
                let list = if prefer_joined && view.joined { &mut joined } else { &mut others };
                list.push(path);
            }
        }
        // Rooms it was invited to are known by their tokens alone.
        for path in self.node.token_paths(viewer) {
            let known = joined.contains(&path) || others.contains(&path);
            if is_meant(path.local_name().trim_start_matches('_'), &path) && !known {
                others.push(path);
            }
        }
        let found = match joined.len() {
            0 => others,
            1 => joined,
            _ => self.settled_of(viewer, &joined).map_or(joined, |one| vec![one]),
        };
        match found.as_slice() {
            [] => Err(no_room(text)),
            [one] => Ok(one.clone()),
            many => {
                let list: Vec<String> =
                    many.iter().take(MAX_CANDIDATES).map(ToString::to_string).collect();
                Err(ApiError::new(
                    "ambiguous_room",
                    format!("{} rooms are called {text:?}: {}", many.len(), list.join(", ")),
                    "give the full path",
                ))
            }
        }
    }
}

pub(super) fn no_room(text: &str) -> ApiError {
    ApiError::new(
        "room_not_found",
        format!("no room is called {text:?}"),
        todo("room_not_found").unwrap_or_default(),
    )
}
