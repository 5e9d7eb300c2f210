//! Words for tests: frames of raw peers, what nodes agree on, common steps.

use std::collections::{BTreeMap, BTreeSet};

use commsd::codec::cbor::Value;
use commsd::identity::device::DeviceId;
use commsd::mesh::message::MeshMessage;
use commsd::mesh::records::AgentStatus;
use commsd::mesh::wire::claim::Claim;
use commsd::mesh::wire::frame::{Frame, ManageResponse, Outcome};

use super::world::World;

/// The bare answer ok.
pub fn ok_response(request_id: u64) -> Frame {
    Frame::ManageResponse(ManageResponse {
        request_id,
        outcome: Outcome::Ok(Value::map([("result", Value::from("ok"))])),
    })
}

/// The claim that a host accepts.
pub fn claim(world: &World, host: usize) -> Option<Claim> {
    world.node(host).status().claim
}

/// Whether all running hosts accept one claim, whose holder is served by exactly one of them,
/// which knows it.
pub fn has_one_coordinator(world: &World) -> bool {
    let running = world.running();
    let claims: BTreeSet<Option<DeviceId>> =
        running.iter().map(|host| claim(world, *host).map(|claim| claim.coordinator)).collect();
    let terms: BTreeSet<Option<u64>> =
        running.iter().map(|host| claim(world, *host).map(|claim| claim.term)).collect();
    let holders: Vec<&usize> =
        running.iter().filter(|host| world.node(**host).status().role_held).collect();
    let Some(holder) = claims.first().copied().flatten() else { return false };
    claims.len() == 1
        && terms.len() == 1
        && holders.len() == 1
        && serves(world, *holders[0], &holder)
}

/// Whether a device is a host's daemon or one of its agents in service.
pub fn serves(world: &World, host: usize, device: &DeviceId) -> bool {
    world.device(host) == *device
        || world.slots.get(device).is_some_and(|slot| slot.host == host && slot.in_service)
}

/// Agents that are not offline, as a host sees them.
pub fn present(world: &World, host: usize) -> BTreeMap<DeviceId, (String, AgentStatus)> {
    world
        .node(host)
        .agents(None, world.clock(host))
        .into_iter()
        .filter(|view| view.record.status != AgentStatus::Offline)
        .map(|view| (view.record.id, (view.record.name, view.record.status)))
        .collect()
}

/// Agents in service on running hosts.
pub fn in_service(world: &World) -> BTreeSet<DeviceId> {
    world
        .slots
        .iter()
        .filter(|(_, slot)| slot.in_service && world.is_up(slot.host))
        .map(|(id, _)| *id)
        .collect()
}

/// Whether every running host sees exactly the agents in service, each alike.
pub fn all_see_all(world: &World) -> bool {
    let expected = in_service(world);
    let views: Vec<_> = world.running().iter().map(|host| present(world, *host)).collect();
    views.iter().all(|view| view.keys().copied().collect::<BTreeSet<_>>() == expected)
        && views.windows(2).all(|pair| pair[0] == pair[1])
}

/// Data sessions that a host has with another host's daemon, by kind.
pub fn peer_devices(world: &World, host: usize) -> BTreeSet<DeviceId> {
    world.node(host).status().peers.into_iter().map(|peer| peer.device).collect()
}

/// Whether the hosts that run are fully connected: every device to every device elsewhere.
pub fn is_full_mesh(world: &World) -> bool {
    let running = world.running();
    running.iter().all(|host| {
        let peers = peer_devices(world, *host);
        running.iter().filter(|other| *other != host).all(|other| {
            peers.contains(&world.device(*other))
                && world
                    .slots
                    .iter()
                    .filter(|(_, slot)| slot.host == *other && slot.in_service)
                    .all(|(id, _)| peers.contains(id))
        })
    })
}

/// The mesh message of a frame, if it is one.
pub fn message(frame: &Frame) -> Option<MeshMessage> {
    match frame {
        Frame::ManageRequest(request) => match MeshMessage::parse(&request.command.params) {
            MeshMessage::Unknown => None,
            message => Some(message),
        },
        _ => None,
    }
}

/// A word for each kind of mesh message.
pub fn word(message: &MeshMessage) -> &'static str {
    match message {
        MeshMessage::Introduce { .. } => "introduce",
        MeshMessage::PeerList(_) => "peer_list",
        MeshMessage::PeerJoined(_) => "peer_joined",
        MeshMessage::BecomeCoordinator(_) => "become_coordinator",
        MeshMessage::ConnectRequest { .. } => "connect_request",
        MeshMessage::StateSync(_) => "state_sync",
        MeshMessage::StateUpdate(_) => "state_update",
        MeshMessage::Release { .. } => "release",
        MeshMessage::Unknown => "unknown",
    }
}

/// The mesh messages seen between two hosts, in order.
pub fn words(world: &World, from: usize, to: usize) -> Vec<&'static str> {
    world
        .seen
        .iter()
        .filter(|seen| seen.from == from && seen.to == to)
        .filter_map(|seen| message(&seen.frame))
        .map(|message| word(&message))
        .collect()
}

/// A mesh of daemons with one agent each, formed and with a coordinator.
pub fn formed(world: &mut World, hosts: usize) -> (Vec<usize>, Vec<DeviceId>) {
    let hosts: Vec<usize> = (0..hosts).map(|_| world.daemon()).collect();
    let agents: Vec<DeviceId> =
        hosts.iter().map(|host| world.agent(*host, &format!("agent-{host}"))).collect();
    world.run_until(20_000, "a formed mesh", |world| {
        is_full_mesh(world) && all_see_all(world) && has_one_coordinator(world)
    });
    (hosts, agents)
}
