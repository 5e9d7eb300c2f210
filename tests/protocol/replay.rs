//! Recorded conversations of real peers, with our node in the place of one of them: it gets the
//! recorded key, clock and frames of the others, its agent does what the recorded agent did, and
//! what it answers is compared by meaning with what the recorded peer answered.
//!
//! | compared | how |
//! | --- | --- |
//! | answers | result and code of every request that the recorded peer answered |
//! | openings | the introductions, peer lists and snapshots that the recorded peer sent to each other peer, ours sends too |
//! | messages | every room message and DM shown to the recorded agent is shown to ours, once |
//! | claims | the accepted holder and term at each recorded state, where somebody else holds the role |
//!
//! Where ours answers otherwise, [`DIFFERENCES`] says what and why; a difference that is not listed
//! fails, and so does a listed one that no longer occurs. The other side is frozen: it cannot react
//! to ours, so ids of our own requests are matched with the recorded ones by what they ask.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use commsd::codec::time::UnixMillis;
use commsd::identity::device::{DeviceId, DeviceKey};
use commsd::identity::entropy::SeededEntropy;
use commsd::mesh::checked::Checked;
use commsd::mesh::events::DeliveryEvent;
use commsd::mesh::node::{
    AddDevice, AgentSpec, Command, DecisionTarget, Input, Node, NodeConfig, OpId, Output,
};
use commsd::mesh::records::{
    AgentStatus, ConsentPolicy, Now, RoomType, StreamingBehavior, Visibility,
};
use commsd::mesh::session::{Origin, SessionId, SessionKind};
use commsd::mesh::wire::frame::{Frame, ManageRequest, ManageResponse, Outcome};
use commsd::mesh::wire::room_path::RoomPath;
use commsd::mesh::wire::token::TokenCache;
use serde_json::Value;

/// Recording, peer played, request, what we answer instead, and why that is right.
const DIFFERENCES: &[(&str, &str, &str, &str, &str)] = &[
    ("07", "A", "room.join", "ok instead of denied", "a public room admits at once"),
    (
        "22",
        "B",
        "room.join",
        "no answer instead of timeout",
        "the recording's approval window was shortened; ours is the real five minutes",
    ),
    (
        "27",
        "C",
        "introduce",
        "no answer instead of ok",
        "a daemon that is leaving takes no new sessions, so the newcomer goes on to the next holder",
    ),
];

fn text<'v>(value: &'v Value, key: &str) -> &'v str {
    value[key].as_str().unwrap_or_default()
}

fn hex(text: &str) -> Vec<u8> {
    data_encoding::HEXLOWER.decode(text.as_bytes()).unwrap()
}

/// What a request asks, apart from ids, times and texts.
fn asks(request: &ManageRequest) -> String {
    let params = &request.command.params;
    let part = |value: Option<&commsd::codec::cbor::Value>| {
        value.and_then(|v| v.as_text()).unwrap_or_default().to_owned()
    };
    match params.get("message") {
        Some(message) => {
            let method = part(message.get("method"));
            match message.get("patch") {
                Some(patch) => format!("{method}:{}", part(patch.get("type"))),
                None => method,
            }
        }
        None => part(params.get("verb")),
    }
}

fn outcome(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Ok(_) => "ok".to_owned(),
        Outcome::Error { code, .. } => code.clone(),
    }
}

struct Replay {
    peer: String,
    node: Node,
    device: DeviceId,
    t0: u64,
    sessions: BTreeMap<String, SessionId>,
    names: BTreeMap<SessionId, String>,
    /// Our open requests per connection: id and what they ask.
    asked: BTreeMap<String, Vec<(u64, String)>>,
    /// Who is at the other end.
    others: BTreeMap<SessionId, String>,
    /// What ours asked of each other peer.
    sent: BTreeMap<String, BTreeSet<String>>,
    /// Our answers: connection and request id to the outcome.
    answered: BTreeMap<(String, u64), String>,
    shown: Vec<(String, String)>,

    next_op: u64,
    now: Now,
}

impl Replay {
    fn new(recording: &Value, peer: &str) -> Self {
        let about = &recording["peers"][peer];
        let key = DeviceKey::from_pkcs8_pem(text(about, "private_key_pkcs8_pem")).unwrap();
        let device = key.id();
        assert_eq!(device.hex(), text(about, "device_id"));
        let user = DeviceKey::from_pkcs8_pem(text(about, "principal_private_key_pkcs8_pem"));
        let t0 = recording["clock_t0_unix_ms"].as_u64().unwrap();
        let now = Now { mono: 0, unix: UnixMillis(t0) };
        let config = NodeConfig {
            port: 1,
            // Without it a holder of the port would claim at once.
            first_contact: true,
            network_port: None,
            version: "0".into(),
            pid: 1,
            user,
            machine: None,
            machine_name: None,
            consent: ConsentPolicy::Ask,
            hub: None,
        };
        // The daemon's own device takes no part: nothing is ever connected to it.
        let daemon = DeviceKey::from_scalar(&[0x5a; 32]).unwrap();
        let mut node = Node::new(config, daemon, 2, Box::new(SeededEntropy::new(7)), now);
        let port = about["data_ports"][0].as_u64().unwrap_or(3);
        let agent = AgentSpec {
            name: peer.to_owned(),
            harness: text(about, "harness").to_owned(),
            cwd: text(about, "cwd").to_owned(),
            key: text(about, "cwd").to_owned(),
            ephemeral: false,
            resumed: false,
            tokens: Vec::new(),
            services: Vec::new(),
            grants: Vec::new(),
        };
        let add = AddDevice { key, data_port: u16::try_from(port).unwrap(), agent: Some(agent) };
        node.handle(Input::AddDevice(Box::new(add)), now);
        let mut replay = Self {
            peer: peer.to_owned(),
            node,
            device,
            t0,
            sessions: BTreeMap::new(),
            names: BTreeMap::new(),
            others: BTreeMap::new(),
            asked: BTreeMap::new(),
            sent: BTreeMap::new(),
            answered: BTreeMap::new(),
            shown: Vec::new(),
            next_op: 0,
            now,
        };
        replay.drain();
        replay
    }

    fn input(&mut self, input: Input) {
        self.node.handle(input, self.now);
        self.drain();
    }

    fn drain(&mut self) {
        while let Some(output) = self.node.poll_output() {
            match output {
                Output::Commit { ticket, .. } => {
                    self.node.handle(Input::Committed(ticket), self.now);
                }
                Output::SaveIdentity { ticket, .. } => {
                    self.node.handle(Input::IdentitySaved(ticket), self.now);
                }
                Output::Send { session, frame } => self.frame_sent(session, frame),
                Output::AgentEvent { event, .. } => match &*event {
                    DeliveryEvent::Dm { message } => {
                        self.shown.push(("dm".into(), message.content.clone()));
                    }
                    DeliveryEvent::RoomMessage { message } => {
                        self.shown.push(("room_message".into(), message.content.clone()));
                    }
                    _ => {}
                },
                _ => {}
            }
        }
    }

    fn frame_sent(&mut self, session: SessionId, frame: Frame) {
        // Everything we send must be what a real peer can read.
        let frame = Frame::decode(&frame.encode()).unwrap();
        let Some(conn) = self.names.get(&session).cloned() else { return };
        match frame {
            Frame::ManageRequest(request) => {
                let asks = asks(&request);
                let other = self.others.get(&session).cloned().unwrap_or_default();
                self.sent.entry(other).or_default().insert(asks.clone());
                self.asked.entry(conn).or_default().push((request.request_id, asks));
            }
            Frame::ManageResponse(response) => {
                let answer = outcome(&response.outcome);
                self.answered.insert((conn, response.request_id), answer);
            }
            _ => {}
        }
    }

    fn at(&mut self, t: f64) {
        let mono = t.max(0.0) as u64;
        // Deadlines and gossip come due in between, as they would.
        while self.now.mono + 100 < mono {
            let mono = self.now.mono + 100;
            self.now = Now { mono, unix: UnixMillis(self.t0 + mono) };
            self.input(Input::Tick);
        }
        self.now = Now { mono, unix: UnixMillis(self.t0 + mono) };
    }

    /// `introduces`: the dialler introduces itself there, so it is a well-known port.
    fn open(&mut self, conn: &str, about: &Value, remote: DeviceId, introduces: bool) {
        let dialler = text(about, "dialler") == self.peer;
        let port = introduces || text(about, "kind") == "well-known port";
        let kind = match (port, dialler) {
            (true, true) => SessionKind::PortDialled,
            (true, false) => SessionKind::PortAccepted,
            (_, true) => SessionKind::DataDialled,
            (_, false) => SessionKind::DataAccepted,
        };
        let session = SessionId(self.sessions.len() as u64 + 1);
        self.sessions.insert(conn.to_owned(), session);
        self.names.insert(session, conn.to_owned());
        let other = if dialler { text(about, "acceptor") } else { text(about, "dialler") };
        self.others.insert(session, other.to_owned());
        let (local, origin) = (self.device, Origin::SameUser);
        self.input(Input::Accepted { session, local, remote, kind, origin });
    }

    fn frame_heard(
        &mut self,
        conn: &str,
        bytes: &[u8],
        recorded: &BTreeMap<(String, u64), String>,
    ) {
        let Some(session) = self.sessions.get(conn).copied() else { return };
        let Ok(frame) = Frame::decode(bytes) else { return };
        let frame = match frame {
            Frame::ManageResponse(response) => {
                // An answer to a recorded request: hand it to ours that asks the same.
                let Some(asks) = recorded.get(&(conn.to_owned(), response.request_id)) else {
                    return;
                };
                let open = self.asked.entry(conn.to_owned()).or_default();
                let Some(at) = open.iter().position(|(_, ours)| ours == asks) else { return };
                let (request_id, _) = open.remove(at);
                Frame::ManageResponse(ManageResponse { request_id, outcome: response.outcome })
            }
            other => other,
        };
        let frame = Checked::check(frame, &mut TokenCache::default());
        self.input(Input::Frame { session, frame });
    }

    /// What the recorded agent did, as a command of ours.
    fn step(&mut self, did: &Value) {
        if did == "graceful shutdown" {
            self.input(Input::Shutdown);
            return;
        }
        let room = || RoomPath::parse(text(did, "room")).ok();
        let target = text(did, "target");
        let behavior = StreamingBehavior::parse(text(did, "streamingBehavior"));
        let device = |key: &str| DeviceId::parse(text(did, key));
        let command = match text(did, "action") {
            "create_room" => Some(Command::CreateRoom {
                name: text(did, "room").to_owned(),
                kind: match text(did, "type") {
                    "private" => RoomType::Private,
                    "secret" => RoomType::Secret,
                    _ => RoomType::Public,
                },
                description: text(did, "description").to_owned(),
            }),
            "join_room" => room().map(Command::JoinRoom),
            "leave_room" | "decline_invite" => {
                room().map(|room| Command::LeaveRoom { room, reason: None })
            }
            "destroy_room" => room().map(Command::DestroyRoom),
            "invite" => {
                room().zip(device("agent")).map(|(room, agent)| Command::Invite { room, agent })
            }
            "kick" => {
                room().zip(device("agent")).map(|(room, agent)| Command::Kick { room, agent })
            }
            "send" => RoomPath::parse(target).ok().map(|room| Command::Send {
                room,
                text: text(did, "content").to_owned(),
                reply_to: None,
                behavior,
            }),
            "dm" => DeviceId::parse(target).map(|to| Command::Dm {
                to,
                text: text(did, "content").to_owned(),
                reply_to: None,
                behavior,
                wait_ms: 0,
            }),
            action @ ("room_accept" | "room_reject") => {
                room().zip(device("requesterId")).map(|(room, requester)| {
                    let target = DecisionTarget::Pair(room, requester);
                    if action == "room_accept" {
                        Command::Accept(target)
                    } else {
                        let reason = did["reason"].as_str().map(str::to_owned);
                        Command::Reject { target, reason }
                    }
                })
            }
            "mesh_accept" => {
                device("connectionId").map(|id| Command::Accept(DecisionTarget::Connection(id)))
            }
            "mesh_reject" => device("connectionId").map(|id| Command::Reject {
                target: DecisionTarget::Connection(id),
                reason: did["reason"].as_str().map(str::to_owned),
            }),
            "update" => Some(Command::Update {
                name: did["name"].as_str().map(str::to_owned),
                status: AgentStatus::parse(text(did, "status")),
                visibility: match text(did, "visibility") {
                    "visible" => Some(Visibility::Visible),
                    "hidden" => Some(Visibility::Hidden),
                    "ghost" => Some(Visibility::Ghost),
                    _ => None,
                },
                tags: None,
                consent: None,
            }),
            _ => None,
        };
        if let Some(command) = command {
            self.next_op += 1;
            let (op, agent) = (OpId(self.next_op), self.device);
            self.input(Input::Command { op, agent, command });
        }
    }
}

/// Moments of a recording in order.
enum Moment<'r> {
    Open(&'r str),
    Close(&'r str),
    Frame(&'r Value),
    Step(&'r Value),
    State(&'r Value),
}

fn moments(recording: &Value) -> Vec<(f64, u8, Moment<'_>)> {
    let mut all = Vec::new();
    let frames = recording["frames"].as_array().unwrap();
    for (conn, about) in recording["connections"].as_object().unwrap() {
        let first = frames.iter().find(|frame| text(frame, "conn") == conn);
        let first = first.and_then(|frame| frame["t_ms"].as_f64()).unwrap_or(f64::MAX);
        let opened = about["opened_ms"].as_f64().unwrap_or(first);
        all.push((opened.min(first), 0, Moment::Open(conn)));
        if let Some(closed) = about["first_close_ms"].as_f64().or(about["closed_ms"].as_f64()) {
            all.push((closed, 3, Moment::Close(conn)));
        }
    }
    for frame in frames {
        all.push((frame["t_ms"].as_f64().unwrap(), 2, Moment::Frame(frame)));
    }
    for step in recording["steps"].as_array().unwrap() {
        all.push((step["t_ms"].as_f64().unwrap(), 1, Moment::Step(step)));
    }
    let t0 = recording["clock_t0_unix_ms"].as_u64().unwrap();
    for state in recording["states"].as_array().into_iter().flatten() {
        let at = state["t"].as_u64().unwrap_or(t0).saturating_sub(t0);
        all.push((at as f64, 4, Moment::State(state)));
    }
    all.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    all
}

/// Plays one peer of one recording; returns what differs.
fn play(recording: &Value, peer: &str) -> Vec<(String, String)> {
    let mut replay = Replay::new(recording, peer);
    let peers = recording["peers"].as_object().unwrap();
    let id_of = |peer: &str| DeviceId::parse(text(&peers[peer], "device_id")).unwrap();
    // Recorded requests of the played peer, and the answers it gave.
    let mut its_requests: BTreeMap<(String, u64), String> = BTreeMap::new();
    let mut its_answers: Vec<(String, u64, String, String)> = Vec::new();
    let mut its_openings: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut to_it: BTreeMap<(String, u64), String> = BTreeMap::new();
    let mut ended = f64::MAX;
    let mut claims = Vec::new();
    for step in recording["steps"].as_array().unwrap() {
        let did = step["did"].as_str().unwrap_or_default();
        if text(step, "peer") == peer && (did.starts_with("kill") || did.starts_with("SIGSTOP")) {
            ended = ended.min(step["t_ms"].as_f64().unwrap());
        }
    }
    for (t, _, moment) in moments(recording) {
        if t >= ended {
            break;
        }
        replay.at(t);
        match moment {
            Moment::Open(conn) => {
                let about = &recording["connections"][conn];
                let (dialler, acceptor) = (text(about, "dialler"), text(about, "acceptor"));
                let introduces = recording["frames"].as_array().unwrap().iter().any(|frame| {
                    text(frame, "conn") == conn
                        && frame["decoded"]["command"]["params"]["message"]["method"] == "introduce"
                });
                if dialler == peer && peers.contains_key(acceptor) {
                    replay.open(conn, about, id_of(acceptor), introduces);
                } else if acceptor == peer && peers.contains_key(dialler) {
                    replay.open(conn, about, id_of(dialler), introduces);
                }
            }
            Moment::Close(conn) => {
                if let Some(session) = replay.sessions.get(conn).copied() {
                    replay.input(Input::Closed { session, reason: "peer_closed" });
                }
            }
            Moment::Step(step) if text(step, "peer") == peer => replay.step(&step["did"]),
            Moment::Step(_) => {}
            Moment::State(state) => {
                let claim = &state["peers"][peer]["claim"];
                let holder = text(claim, "holder");
                // A role of its own is claimed after a wait that the recordings shortened.
                if holder != peer && peers.contains_key(holder) {
                    let ours = replay.node.status().claim;
                    let ours = ours.map(|claim| (claim.term, claim.coordinator));
                    let recorded = (claim["term"].as_u64().unwrap(), id_of(holder));
                    if ours != Some(recorded) {
                        let when = text(state, "when");
                        claims.push(("claim".to_owned(), format!("{when}: another holder")));
                    }
                }
            }
            Moment::Frame(frame) => {
                let conn = text(frame, "conn").to_owned();
                let bytes = hex(text(frame, "hex"));
                let decoded = Frame::decode(&bytes);
                if text(frame, "from") == peer {
                    match decoded {
                        Ok(Frame::ManageRequest(request)) => {
                            let asks = asks(&request);
                            its_openings
                                .entry(text(frame, "to").to_owned())
                                .or_default()
                                .insert(asks.clone());
                            its_requests.insert((conn, request.request_id), asks);
                        }
                        Ok(Frame::ManageResponse(response)) => {
                            let asks = to_it.get(&(conn.clone(), response.request_id)).cloned();
                            its_answers.push((
                                conn,
                                response.request_id,
                                asks.unwrap_or_default(),
                                outcome(&response.outcome),
                            ));
                        }
                        // What it revoked is revoked: ours has issued other tokens under the same
                        // key, so it learns of these as anybody would.
                        Ok(Frame::RevocationAnnounce { .. }) => {
                            replay.frame_heard(&conn, &bytes, &its_requests);
                        }
                        _ => {}
                    }
                } else if text(frame, "to") == peer {
                    if let Ok(Frame::ManageRequest(request)) = &decoded {
                        to_it.insert((conn.clone(), request.request_id), asks(request));
                    }
                    replay.frame_heard(&conn, &bytes, &its_requests);
                }
            }
        }
    }
    replay.at(replay.now.mono as f64 + 1000.0);
    replay.input(Input::Tick);

    let mut differences = claims;
    for (conn, id, asks, recorded) in &its_answers {
        match replay.answered.get(&(conn.clone(), *id)) {
            Some(ours) if ours == recorded => {}
            Some(ours) => {
                differences.push((asks.clone(), format!("{ours} instead of {recorded}")));
            }
            None => differences.push((asks.clone(), format!("no answer instead of {recorded}"))),
        }
    }
    let spontaneous = ["introduce", "peer_list", "state_sync"];
    for (other, openings) in &its_openings {
        for opening in openings.iter().filter(|o| spontaneous.contains(&o.as_str())) {
            if !replay.sent.get(other).is_some_and(|sent| sent.contains(opening)) {
                differences.push((opening.clone(), format!("not sent to {other}")));
            }
        }
    }
    let mut expected: BTreeMap<(String, String), usize> = BTreeMap::new();
    for event in recording["events"].as_array().unwrap() {
        let inner = if event["event"].is_object() { &event["event"] } else { event };
        let kind = text(inner, "type");
        if text(event, "peer") == peer
            && ["dm", "room_message"].contains(&kind)
            && event["t_ms"].as_f64().unwrap_or(0.0) < ended
        {
            let content = inner["message"]["content"].as_str().unwrap_or_default();
            // Whatever the recorded peer showed twice, we show once.
            expected.insert((kind.to_owned(), content.to_owned()), 1);
        }
    }
    let mut shown: BTreeMap<(String, String), usize> = BTreeMap::new();
    for message in &replay.shown {
        *shown.entry(message.clone()).or_default() += 1;
    }
    for (message, times) in &expected {
        if shown.get(message) != Some(times) {
            let found = shown.get(message).copied().unwrap_or(0);
            differences.push((message.0.clone(), format!("shown {found} times: {}", message.1)));
        }
    }
    differences
}

#[test]
fn recorded_peers_would_not_notice_us() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors/lab");
    let mut names: Vec<String> = fs::read_dir(&dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.starts_with(|c: char| c.is_ascii_digit()) && !name.starts_with("23"))
        .collect();
    names.sort();
    assert_eq!(names.len(), 31);
    let mut found: BTreeSet<(String, String, String, String)> = BTreeSet::new();
    let mut answers = 0;
    for name in &names {
        let recording: Value =
            serde_json::from_str(&fs::read_to_string(dir.join(name)).unwrap()).unwrap();
        for peer in recording["peers"].as_object().unwrap().keys() {
            for (what, how) in play(&recording, peer) {
                found.insert((name[..2].to_owned(), peer.clone(), what, how));
            }
            answers += 1;
        }
    }
    assert!(answers > 60, "{answers} peers were played");
    let listed: BTreeSet<(String, String, String, String)> = DIFFERENCES
        .iter()
        .map(|(recording, peer, what, how, _)| {
            ((*recording).into(), (*peer).into(), (*what).into(), (*how).into())
        })
        .collect();
    let new: Vec<_> = found.difference(&listed).collect();
    let gone: Vec<_> = listed.difference(&found).collect();
    assert!(new.is_empty() && gone.is_empty(), "not listed: {new:#?}\nlisted and gone: {gone:#?}");
}

/// Strangers of recording 23: case, request, what we answer instead, and why.
const STRANGER_DIFFERENCES: &[(&str, u64, &str, &str)] = &[(
    "data port: room.send with a malformed path",
    1,
    "malformed_scope_path instead of unauthorized",
    "a path that does not parse has a code of its own, whatever the token",
)];

#[test]
fn strangers_are_answered_as_recorded_or_better() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors/lab/23-stranger.json");
    let recording: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    let mut found: BTreeSet<(String, u64, String)> = BTreeSet::new();
    let mut compared = 0;
    for case in recording["cases"].as_array().unwrap() {
        let name = text(case, "name");
        let Some(client) = DeviceId::parse(text(case, "client_device_id")) else { continue };
        let mut replay = Replay::new(&recording, "A");
        let kind = if text(case, "port") == "well-known" {
            SessionKind::PortAccepted
        } else {
            SessionKind::DataAccepted
        };
        let session = SessionId(1);
        replay.names.insert(session, "c".into());
        replay.sessions.insert("c".into(), session);
        let (local, origin) = (replay.device, Origin::SameUser);
        replay.input(Input::Accepted { session, local, remote: client, kind, origin });
        let sent = case["sent"].as_array().unwrap();
        // The stream as a whole: frames may share a write, and be cut anywhere.
        let mut bytes = sent.iter().flat_map(|sent| hex(text(sent, "bytes_hex")));
        loop {
            let length: Vec<u8> = bytes.by_ref().take(4).collect();
            let Ok(length) = <[u8; 4]>::try_from(length) else { break };
            let length = u32::from_be_bytes(length) as usize;
            let body: Vec<u8> = bytes.by_ref().take(length).collect();
            if body.len() < length || length == 0 {
                break;
            }
            replay.frame_heard("c", &body, &BTreeMap::new());
        }
        for received in case["received"].as_array().unwrap() {
            let Ok(Frame::ManageResponse(recorded)) = Frame::decode(&hex(text(received, "hex")))
            else {
                continue;
            };
            compared += 1;
            let id = recorded.request_id;
            let recorded = outcome(&recorded.outcome);
            let ours = replay.answered.get(&("c".to_owned(), id)).cloned();
            let ours = ours.unwrap_or_else(|| "no answer".into());
            if ours != recorded {
                found.insert((name.to_owned(), id, format!("{ours} instead of {recorded}")));
            }
        }
    }
    assert!(compared > 20, "{compared} answers were compared");
    let listed: BTreeSet<(String, u64, String)> = STRANGER_DIFFERENCES
        .iter()
        .map(|(name, id, how, _)| ((*name).to_owned(), *id, (*how).to_owned()))
        .collect();
    let new: Vec<_> = found.difference(&listed).collect();
    let gone: Vec<_> = listed.difference(&found).collect();
    assert!(new.is_empty() && gone.is_empty(), "not listed: {new:#?}\nlisted and gone: {gone:#?}");
}
