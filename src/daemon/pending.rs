//! What waits for a yes or no, as clients see it, and which of it they mean.

use super::advice::todo;
use super::owner::Owner;
use super::requests::some_text;
use crate::api::types::{ApiError, PendingKind, PendingRef, PendingRequest, Time};
use crate::identity::device::DeviceId;
use crate::mesh::wire::capability;
use crate::mesh::wire::room_path::RoomPath;

impl Owner {
    /// What waits for an agent, or for the operator.
    pub(super) fn pending(&self, agent: Option<&DeviceId>) -> Vec<PendingRequest> {
        let pending = match agent {
            Some(agent) => self.node.pending(agent),
            None => self.node.pending_for_anybody(),
        };
        pending
            .into_iter()
            .map(|view| PendingRequest {
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
                at: Time(view.at),
            })
            .collect()
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
                    let of_dm = request.kind == PendingKind::Dm && other == Some(requester);
                    request.requester == requester.hex() && (of_room || of_dm)
                };
                requests.iter().find(is_meant).cloned().ok_or_else(not_pending)
            }
        }
    }

    /// The request of this id, or the only one of whoever is meant; without an agent the
    /// operator's.
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
        let requester = match self.find_requester(text, &viewer, &requests) {
            Ok(requester) => requester.hex(),
            Err(error) if error.code == "ambiguous_agent" => return Err(error),
            Err(_) => return Err(not_pending()),
        };
        let mut of_requester = requests.iter().filter(|request| request.requester == requester);
        match (of_requester.next(), of_requester.next()) {
            (Some(one), None) => Ok(one.clone()),
            (None, _) => Err(not_pending()),
            (Some(_), Some(_)) => Err(ApiError::new(
                "ambiguous_request",
                format!("{text:?} asks for more than one thing"),
                "give the request's id: room_pending, or `commsd pending`, lists them",
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

pub(super) fn not_pending() -> ApiError {
    ApiError::new(
        "not_pending",
        "nothing like that waits for this agent",
        todo("not_pending").unwrap_or_default(),
    )
}

/// The room that the agent itself is invited to: a yes is its joining, a no its leaving.
pub(super) fn invited_to(request: &PendingRequest) -> Option<RoomPath> {
    let room = request.room.as_deref().filter(|_| request.kind == PendingKind::Invite)?;
    RoomPath::parse(room).ok()
}
