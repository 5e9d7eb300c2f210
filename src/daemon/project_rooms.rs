//! The room that the agents of one directory share (`surfaces.md` 10, D11): which one it is, and how
//! those that have come to be in different ones find together. What a room is, the node knows.
//!
//! Rooms end with nobody's absence, but only an owner that is here can let somebody in. So the room
//! of a directory is the oldest whose owner is here; an agent that finds none makes one, and once an
//! older one's owner comes back, everybody moves there.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use super::owner::{Owner, Reply};
use crate::api::types::RequestId;
use crate::identity::device::DeviceId;
use crate::mesh::node::{Command, Input, MAX_ROOM_NAME_BYTES, OpId};
use crate::mesh::records::RoomType;
use crate::mesh::wire::room_path::{self, RoomPath};
use crate::runtime::local_socket::ConnId;

/// Pause between looks at who is where: an owner that comes back has its room filled within it.
pub(super) const SETTLE_EVERY: Duration = Duration::from_secs(3);

/// An agent's place in the room of its directory.
pub(super) struct Project {
    cwd: String,
    /// What the room is called.
    name: String,
    /// Rooms that it was put into or asked to be let into; whoever leaves one, or was put out, is
    /// not brought back.
    entered: BTreeSet<RoomPath>,
}

impl Project {
    pub(super) fn of(cwd: &str) -> Self {
        let base = Path::new(cwd).file_name().unwrap_or_default().to_string_lossy();
        let mut name = room_path::slug(&base).unwrap_or_else(|| "project".to_owned());
        name.truncate(name.floor_char_boundary(MAX_ROOM_NAME_BYTES));
        Self { cwd: cwd.to_owned(), name, entered: BTreeSet::new() }
    }
}

/// A room of a directory, as one of its agents sees it.
struct Candidate {
    path: RoomPath,
    /// Its owner can let somebody in.
    here: bool,
    joined: bool,
    alone: bool,
}

impl Owner {
    /// The rooms of an agent's directory, the one that everybody is to be in first.
    fn project_rooms(&self, agent: &DeviceId, project: &Project) -> Vec<Candidate> {
        let mut rooms: Vec<_> = self
            .node
            .public_rooms_called(&project.name)
            .filter(|(_, room)| {
                room.owner == *agent
                    || (self.node.is_of_our_user(&room.owner)
                        && self.node.agent_cwd(&room.owner) == Some(&project.cwd))
            })
            .map(|(path, room)| {
                let candidate = Candidate {
                    path: path.clone(),
                    here: self.node.is_reachable(&room.owner),
                    joined: self.node.is_in_room(agent, path),
                    alone: room.members.iter().all(|member| member == agent),
                };
                ((room.created_at.clone(), room.owner), candidate)
            })
            .collect();
        rooms.sort_by(|(a, one), (b, other)| (!one.here, a).cmp(&(!other.here, b)));
        rooms.into_iter().map(|(_, candidate)| candidate).collect()
    }

    /// Of rooms with one name that an agent is in, the one that its directory's agents meet in.
    pub(super) fn settled_of(&self, agent: &DeviceId, rooms: &[RoomPath]) -> Option<RoomPath> {
        let project = self.hosted.get(agent)?.project.as_ref()?;
        let best = self.project_rooms(agent, project).into_iter().next()?.path;
        rooms.contains(&best).then_some(best)
    }

    /// Puts an agent into the room of its directory. Its client is answered when that has been done
    /// or has failed, so that it can speak there at once.
    pub(super) fn enter_project_room(
        &mut self,
        agent: DeviceId,
        (conn, id, reason): (ConnId, RequestId, Option<String>),
    ) {
        let Some(project) = self.hosted.get(&agent).and_then(|hosted| hosted.project.as_ref())
        else {
            self.attach(conn, &id, agent, reason);
            return;
        };
        let rooms = self.project_rooms(&agent, project);
        // Where all owners are away, it makes none beside one that it is in.
        let place = rooms.iter().find(|room| room.here || room.joined);
        let command = match place {
            Some(room) => Command::JoinRoom(room.path.clone()),
            None => Command::CreateRoom {
                name: project.name.clone(),
                kind: RoomType::Public,
                description: format!("Project room for {}", project.cwd),
            },
        };
        self.enter(agent, place.map(|room| room.path.clone()));
        self.next_op += 1;
        let op = OpId(self.next_op);
        self.replies.insert(op, (conn, id, Reply::Attached { agent, reason }));
        self.inputs.push_back(Input::Command { op, agent, command });
        self.turn();
    }

    fn enter(&mut self, agent: DeviceId, path: Option<RoomPath>) {
        if let Some(project) = self.hosted.get_mut(&agent).and_then(|h| h.project.as_mut()) {
            project.entered.extend(path);
        }
    }

    /// Moves agents that are in different rooms of one directory to one.
    pub(super) fn settle_project_rooms(&mut self) {
        let mut moves = Vec::new();
        for (agent, hosted) in &self.hosted {
            let Some(project) = &hosted.project else { continue };
            let rooms = self.project_rooms(agent, project);
            let Some((best, others)) = rooms.split_first().filter(|(best, _)| best.here) else {
                continue;
            };
            if !best.joined {
                if !project.entered.contains(&best.path) {
                    moves.push((*agent, Command::JoinRoom(best.path.clone())));
                }
                continue;
            }
            for room in others.iter().filter(|room| room.here && room.joined) {
                // An owner's own ends when the others have gone.
                if room.path.owner() != Some(*agent) || room.alone {
                    let (room, to) = (room.path.clone(), best.path.clone());
                    moves.push((*agent, Command::MoveFromRoom { room, to }));
                }
            }
        }
        for (agent, command) in moves {
            if let Command::JoinRoom(path) = &command {
                self.enter(agent, Some(path.clone()));
            }
            // Nobody waits for the answer: what comes of it shows at the next look.
            self.next_op += 1;
            self.inputs.push_back(Input::Command { op: OpId(self.next_op), agent, command });
        }
    }
}
