//! What waits for a yes or no, as clients see it, and which of it they mean.

use super::advice::todo;
use super::lookup::MAX_CANDIDATES;
use super::owner::{Origin, Owner};
use super::requests::some_text;
use crate::api::types::{ApiError, PendingKind, PendingRef, PendingRequest, Time};
use crate::identity::device::DeviceId;
use crate::mesh::node::PendingView;
use crate::mesh::wire::capability;
use crate::mesh::wire::room_path::{self, RoomPath};

/// In the place of a room: the conversation with whoever is named after it.
const DM: &str = "dm";

impl Owner {
    /// What waits for an agent, or for the operator.
    pub(super) fn pending(&self, agent: Option<&DeviceId>) -> Vec<PendingRequest> {
        let pending = match agent {
            Some(agent) => self.node.pending(agent),
            None => self.node.pending_for_anybody(),
        };
        let now = self.now();
        let shown = |view: PendingView| {
            let origin = Origin::of(&self.node, &view.requester, now);
            PendingRequest {
                id: view.id,
                kind: match view.kind {
                    "dm" => PendingKind::Dm,
                    "room" => PendingKind::Room,
                    "invite" => PendingKind::Invite,
                    "capability" => PendingKind::Capability,
                    _ => PendingKind::Mesh,
                },
                room: view.room,
                capability: view.share.as_ref().map(|(_, write)| {
                    let verb =
                        if *write { capability::VAULT_WRITE } else { capability::VAULT_READ };
                    verb.to_owned()
                }),
                share: view.share.map(|(name, _)| name),
                requester: view.requester.hex(),
                requester_name: some_text(&view.requester_name),
                from_machine: origin.from_machine,
                from_user: origin.from_user.map(str::to_owned),
                at: Time(view.at),
            }
        };
        pending.into_iter().map(shown).collect()
    }

    /// The request that an agent means.
    pub(super) fn find_pending(
        &self,
        which: PendingRef<'_>,
        agent: &DeviceId,
    ) -> Result<PendingRequest, ApiError> {
        match which {
            PendingRef::Id(text) => self.pending_named(text, Some(agent)),
            PendingRef::Asked { room, requester } => {
                let requests = self.pending(Some(agent));
                let requester = self.find_requester(requester, agent, &requests)?;
                let path = self.find_room(room, agent).map(|path| path.to_string()).ok();
                // A conversation has no name but that of the other end.
                let other = self.find_requester(room, agent, &requests).ok();
                let is_meant = |request: &&PendingRequest| {
                    let of_room = request.room.as_deref() == Some(room)
                        || (path.is_some() && request.room == path);
                    let of_dm = request.kind == PendingKind::Dm
                        && (other == Some(requester) || room.eq_ignore_ascii_case(DM));
                    request.requester == requester.hex() && (of_room || of_dm)
                };
                requests.iter().find(is_meant).cloned().ok_or_else(|| not_pending(Some(agent)))
            }
        }
    }

    /// The request of this id, or the only one of the agent or room that is meant; without an agent
    /// the operator's. A permission, and a machine, are answered by their id alone: a name must not
    /// be a yes to more than its giver had in mind.
    pub(super) fn pending_named(
        &self,
        text: &str,
        agent: Option<&DeviceId>,
    ) -> Result<PendingRequest, ApiError> {
        let requests = self.pending(agent);
        if let Some(request) = by_id(&requests, text) {
            return Ok(request);
        }
        let viewer = agent.copied().unwrap_or(self.node.daemon());
        let requester = self.find_requester(text, &viewer, &requests);
        let of_requester = |request: &&PendingRequest| {
            requester.as_ref().is_ok_and(|requester| requester.hex() == request.requester)
        };
        let (by_name, by_id_alone): (Vec<&PendingRequest>, Vec<_>) = requests
            .iter()
            .filter(|request| of_requester(request) || is_for_room(request, text))
            .partition(|request| {
                !matches!(request.kind, PendingKind::Capability | PendingKind::Mesh)
            });
        match (&by_name[..], &by_id_alone[..], requester) {
            ([one], _, _) => Ok((*one).clone()),
            ([], [], Err(error)) if error.code == "ambiguous_agent" => Err(error),
            ([], [], _) => Err(not_pending(agent)),
            ([], several, _) => Err(ApiError::new(
                "id_needed",
                format!("what {text:?} asks for is answered by its id alone: {}", ids(several)),
                "look at what it is, and give the id",
            )),
            (several, _, _) => Err(ApiError::new(
                "ambiguous_request",
                format!("{text:?} stands for more than one thing: {}", ids(several)),
                "give the id of one of them",
            )),
        }
    }

    /// Who asks may be hidden from lists, and is looked for with those that are in them.
    fn find_requester(
        &self,
        text: &str,
        agent: &DeviceId,
        requests: &[PendingRequest],
    ) -> Result<DeviceId, ApiError> {
        let asking = requests.iter().filter_map(|request| {
            let name = request.requester_name.clone().unwrap_or_default();
            Some((DeviceId::parse(&request.requester)?, name))
        });
        self.find_among(text, agent, &asking.collect::<Vec<_>>())
    }
}

/// The request of this id. A machine's request is also known by the machine, as its event names it.
fn by_id(requests: &[PendingRequest], id: &str) -> Option<PendingRequest> {
    let is_meant = |request: &&PendingRequest| {
        request.id == id || (request.kind == PendingKind::Mesh && request.requester == id)
    };
    requests.iter().find(is_meant).cloned()
}

/// Whether a text names the room that somebody asks to join, or invites to.
fn is_for_room(request: &PendingRequest, text: &str) -> bool {
    let path = request.room.as_deref().and_then(|room| RoomPath::parse(room).ok());
    let slug = room_path::slug(text);
    path.is_some_and(|path| {
        let shown = path.local_name();
        // A secret room's has a mark before it.
        [shown, shown.strip_prefix('_').unwrap_or(shown)]
            .into_iter()
            .any(|name| !name.is_empty() && (name == text || Some(name) == slug.as_deref()))
    })
}

fn ids(requests: &[&PendingRequest]) -> String {
    let named = requests.iter().take(MAX_CANDIDATES);
    named.map(|request| format!("{} {}", request.kind, request.id)).collect::<Vec<_>>().join(", ")
}

/// Nothing that is meant waits for the agent; without one, for the operator.
pub(super) fn not_pending(agent: Option<&DeviceId>) -> ApiError {
    match agent {
        Some(_) => ApiError::new(
            "not_pending",
            "nothing like that waits for this agent",
            todo("not_pending").unwrap_or_default(),
        ),
        None => ApiError::new(
            "not_pending",
            "nothing like that waits for the user",
            "to answer what an agent is asked, say --as NAME; `commsd pending`, with the same --as, \
             lists what waits",
        ),
    }
}

/// The room that the agent itself is invited to: a yes is its joining, a no its leaving.
pub(super) fn invited_to(request: &PendingRequest) -> Option<RoomPath> {
    let room = request.room.as_deref().filter(|_| request.kind == PendingKind::Invite)?;
    RoomPath::parse(room).ok()
}
