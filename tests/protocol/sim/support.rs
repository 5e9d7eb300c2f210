//! Words for tests: frames of raw peers, what nodes agree on, common steps.

use std::collections::{BTreeMap, BTreeSet};

use commsd::codec::cbor::Value;
use commsd::identity::device::DeviceId;
use commsd::mesh::events::{DeliveryEvent, DeliveryState};
use commsd::mesh::message::{FRAME_SCOPE_KIND, FRAME_VERB, MeshMessage, Patch};
use commsd::mesh::node::{Command, CommandResult, DecisionTarget};
use commsd::mesh::records::{AgentRecord, AgentStatus, RoomRecord, RoomType, Visibility};
use commsd::mesh::session::{Policy, SessionId};
use commsd::mesh::wire::advert::PeerAdvert;
use commsd::mesh::wire::claim::Claim;
use commsd::mesh::wire::cose::CoseSign1;
use commsd::mesh::wire::frame::{self, Frame, ManageRequest, ManageResponse, Outcome};
use commsd::mesh::wire::room_path::RoomPath;
use commsd::mesh::wire::scope::Scope;

use super::world::{HostSpec, World};

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

/// Two machines, each with a daemon that listens and an agent; by now each has knocked at the other.
pub fn two_machines(world: &mut World) -> ([usize; 2], [DeviceId; 2]) {
    let near = world.host_as(HostSpec { listens: Some(Policy::Full), ..HostSpec::default() });
    let far =
        world.host_as(HostSpec { machine: 1, listens: Some(Policy::Full), ..HostSpec::default() });
    let agents = [world.agent(near, "near"), world.agent(far, "far")];
    world.start(near);
    world.start(far);
    world.run(5_000);
    ([near, far], agents)
}

/// A room created by an agent.
pub fn create(world: &mut World, agent: DeviceId, name: &str, kind: RoomType) -> RoomPath {
    let command =
        Command::CreateRoom { name: name.into(), kind, description: format!("about {name}") };
    match world.ask(agent, command) {
        Ok(CommandResult::Room(path)) => path,
        other => panic!("no room: {other:?}"),
    }
}

/// Joins and expects to be let in at once.
pub fn join(world: &mut World, agent: DeviceId, path: &RoomPath) {
    let result = world.ask(agent, Command::JoinRoom(path.clone()));
    assert_eq!(result, Ok(CommandResult::Room(path.clone())));
}

/// A message to a room.
pub fn to_room(path: &RoomPath, text: &str) -> Command {
    Command::Send { room: path.clone(), text: text.into(), reply_to: None, behavior: None }
}

/// A direct message that does not wait long for consent.
pub fn dm(to: DeviceId, text: &str) -> Command {
    Command::Dm { to, text: text.into(), reply_to: None, behavior: None, wait_ms: 0 }
}

/// Sends, and says what became of it for each recipient.
pub fn send(
    world: &mut World,
    agent: DeviceId,
    command: Command,
) -> BTreeMap<DeviceId, Option<DeliveryState>> {
    match world.ask(agent, command) {
        Ok(CommandResult::Sent { deliveries, .. }) => {
            deliveries.into_iter().map(|delivery| (delivery.agent, delivery.state)).collect()
        }
        other => panic!("not sent: {other:?}"),
    }
}

/// Says yes to the one request that waits.
pub fn accept(world: &mut World, agent: DeviceId) {
    answer(world, agent, true);
}

/// Says no to it.
pub fn reject(world: &mut World, agent: DeviceId) {
    answer(world, agent, false);
}

fn answer(world: &mut World, agent: DeviceId, yes: bool) {
    let pending = world.node_of(&agent).pending(&agent);
    assert_eq!(pending.len(), 1, "one request waits");
    let target = DecisionTarget::Id(pending[0].id.clone());
    let command = if yes {
        Command::Accept(target)
    } else {
        Command::Reject { target, reason: Some("not today".into()) }
    };
    assert_eq!(world.ask(agent, command), Ok(CommandResult::Done));
}

/// Opens a conversation in both directions.
pub fn befriend(world: &mut World, a: DeviceId, b: DeviceId) {
    let op = world.command(a, dm(b, "hello"));
    world.run_until(5_000, "a request", |world| !world.node_of(&b).pending(&b).is_empty());
    accept(world, b);
    world.run_until(5_000, "consent", |world| world.replies.contains_key(&op));
    let sent = send(world, b, dm(a, "hello yourself"));
    assert_eq!(sent[&a], Some(DeliveryState::Delivered));
}

/// The members of a room as a host has them.
pub fn members(world: &World, host: usize, path: &RoomPath) -> Option<BTreeSet<DeviceId>> {
    let viewer = path.owner();
    world
        .node(host)
        .room(path, viewer.as_ref())
        .map(|view| view.record.members.iter().copied().collect())
}

/// States reported of a message, oldest first.
pub fn reported(world: &World, agent: &DeviceId, of: &DeviceId) -> Vec<DeliveryState> {
    world.slots[agent]
        .events()
        .flat_map(|event| match event {
            DeliveryEvent::DeliveryStatus { agent, delivery, .. } if agent == of => {
                vec![delivery.clone()]
            }
            DeliveryEvent::MessagesRead { agent, message_ids, .. } if agent == of => {
                vec![DeliveryState::Read; message_ids.len()]
            }
            _ => Vec::new(),
        })
        .collect()
}

/// How often an agent was shown an event that `choose` picks.
pub fn count(world: &World, agent: &DeviceId, choose: impl Fn(&DeliveryEvent) -> bool) -> usize {
    world.slots[agent].events().filter(|event| choose(event)).count()
}

// --- raw peers ------------------------------------------------------------------------------------

/// A raw peer says a mesh message; the id of the request.
pub fn say(world: &mut World, raw: usize, session: SessionId, message: &MeshMessage) -> u64 {
    let scope = Scope { kind: FRAME_SCOPE_KIND.into(), path: None };
    request(world, raw, session, FRAME_VERB, message.to_params(), scope, None)
}

/// A raw peer states a patch.
pub fn state(world: &mut World, raw: usize, session: SessionId, patch: Patch) -> u64 {
    say(world, raw, session, &MeshMessage::StateUpdate(Box::new(patch)))
}

/// A raw peer makes a request.
pub fn request(
    world: &mut World,
    raw: usize,
    session: SessionId,
    verb: &str,
    params: Value,
    scope: Scope,
    token: Option<CoseSign1>,
) -> u64 {
    let request_id = world.number();
    let command = frame::Command { verb: verb.into(), params };
    let frame = Frame::ManageRequest(ManageRequest { request_id, command, scope, token });
    world.raw_send(raw, session, frame);
    request_id
}

/// A raw peer uses a room verb.
pub fn room_verb(
    world: &mut World,
    raw: usize,
    session: SessionId,
    verb: &str,
    path: &str,
    token: Option<CoseSign1>,
) -> u64 {
    let params = Value::map([
        ("verb", Value::from(verb)),
        ("message-id", Value::from(vec![7u8; 16])),
        ("sent-at", Value::from(1_800_000_000_000u64)),
        ("text", Value::from("raw text")),
    ]);
    let scope = Scope { kind: "room".into(), path: Some(path.into()) };
    request(world, raw, session, "room:member", params, scope, token)
}

/// What a raw peer was answered, by request id: `ok` or the error's code.
pub fn answers(world: &mut World, raw: usize) -> BTreeMap<u64, String> {
    world
        .raw_mut(raw)
        .heard
        .iter()
        .filter_map(|(_, frame)| match frame {
            Frame::ManageResponse(ManageResponse { request_id, outcome }) => Some((
                *request_id,
                match outcome {
                    Outcome::Ok(_) => "ok".to_owned(),
                    Outcome::Error { code, .. } => code.clone(),
                },
            )),
            _ => None,
        })
        .collect()
}

/// The mesh messages that a raw peer got on a session.
pub fn told(world: &mut World, raw: usize, session: SessionId) -> Vec<MeshMessage> {
    world
        .raw_mut(raw)
        .heard
        .iter()
        .filter(|(at, _)| *at == session)
        .filter_map(|(_, frame)| message(frame))
        .collect()
}

/// An advert of a raw peer.
pub fn advert(world: &World, raw: usize, extensions: Vec<(Value, Value)>) -> PeerAdvert {
    let seconds = world.clock(raw).unix.seconds() as i64;
    PeerAdvert::sign(&world.host_key(raw), Vec::new(), seconds, extensions)
}

/// An agent record that a raw peer may claim.
pub fn record(id: DeviceId, version: u64, name: &str) -> AgentRecord {
    AgentRecord {
        id,
        version,
        name: name.into(),
        harness: "raw".into(),
        cwd: "/".into(),
        pid: 1,
        started_at: "2027-01-15T08:00:00.000Z".into(),
        visibility: Visibility::Visible,
        status: AgentStatus::Active,
        tags: Vec::new(),
        subscribed_rooms: Vec::new(),
    }
}

/// A room record that a raw peer may claim; each member with its join stamp.
pub fn room_record(path: &RoomPath, version: u64, members: &[(DeviceId, u64)]) -> RoomRecord {
    let mut room = RoomRecord {
        id: path.to_string(),
        version,
        name: path.local_name().into(),
        kind: RoomType::Public,
        owner: path.owner().unwrap(),
        created_at: "2027-01-15T08:00:00.000Z".into(),
        description: String::new(),
        members: Vec::new(),
        invited: Vec::new(),
        member_joins: members.iter().copied().collect(),
        member_leaves: BTreeMap::new(),
        invited_joins: BTreeMap::new(),
        invited_leaves: BTreeMap::new(),
    };
    room.recompute_views();
    room
}
