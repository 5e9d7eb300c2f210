//! The client commands: one request each (two with `--as`, three where printing acknowledges), and
//! how their results look to a person.

use std::io::{self, Read};
use std::pin::Pin;
use std::time::Duration;

use serde::Serialize;

use super::args::{
    AsAgent, ChangeArgs, ClientCommand, RoomAgentArgs, RoomArgs, RoomCommand, SeenBy, WhichRequest,
};
use super::output::{
    duration, event_text, fields, json_line, message_lines, room_label, short, table, write_out,
};
use super::trust::{CodeCommand, TrustCommand};
use super::{Endpoint, doctor, exit, stop};
use crate::api::client::{Client, Notification, Notifications, disconnected};
use crate::api::tool::feed::whose_is;
use crate::api::tool::render::device;
use crate::api::types::{
    AcceptParams, Acked, ActionParams, AgentInfo, AgentList, AgentStatus, AgentsParams, Answered,
    ApiError, Call, DeliveryStatus, DmParams, EventsAckParams, EventsSubscribeParams, History,
    Inbox, InboxParams, Label, Logs, LogsParams, MAX_TEXT_BYTES, PendingKind, PendingList,
    PendingParams, PendingRequest, RejectParams, Room, RoomCreateParams, RoomDestroyParams,
    RoomHistoryParams, RoomInfo, RoomInviteParams, RoomJoinParams, RoomKickParams, RoomLeaveParams,
    RoomList, RoomMembersParams, RoomsParams, SendParams, SendResult, Status, StatusParams, Text,
    UpdateParams, Whoami, WhoamiParams,
};
use crate::codec::text::{escape_untrusted, truncate_chars};
use crate::codec::time::UnixMillis;

/// What the daemon is told this program is.
pub(super) const PROGRAM: &str = "commsd-cli";

/// Why a command did not get done.
#[derive(Debug)]
pub(super) enum Failure {
    /// The daemon, or the way to it.
    Api(ApiError),
    /// Our stdout.
    Output(io::Error),
}

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Self {
        Self::Api(error)
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Output(error)
    }
}

pub(super) type Done = Result<u8, Failure>;

/// Puts what stdin says in the place of a message or call that is `-`, and looks whether the daemon
/// could take it at all.
///
/// # Errors
/// `stdin`; `invalid_params` for what cannot be sent, as it would be without a daemon.
pub(super) fn with_stdin(
    mut command: ClientCommand,
    stdin: impl Read,
) -> Result<ClientCommand, ApiError> {
    match &mut command {
        ClientCommand::Send { message, .. } | ClientCommand::Dm { message, .. } => {
            if message.text == "-" {
                message.text = read_text(stdin)?;
            }
            text(message.text.clone())?;
        }
        ClientCommand::Action { call, .. } => {
            if call == "-" {
                *call = read_text(stdin)?;
            }
            tool_call(call)?;
        }
        ClientCommand::Trust(TrustCommand::Code(CodeCommand::Redeem { code, .. }))
            if code == "-" =>
        {
            *code = read_text(stdin)?;
        }
        _ => {}
    }
    Ok(command)
}

/// One message from a stream, without its last line feed.
fn read_text(stdin: impl Read) -> Result<String, ApiError> {
    let unreadable = |error: io::Error| {
        ApiError::new("stdin", format!("cannot read the message from stdin: {error}"), "send text")
    };
    let mut text = String::new();
    // Two more than allowed: a line feed that is taken off, and one byte that shows there is more.
    let limit = MAX_TEXT_BYTES as u64 + 2;
    stdin.take(limit).read_to_string(&mut text).map_err(unreadable)?;
    if text.ends_with('\n') {
        text.pop();
    }
    if text.len() > MAX_TEXT_BYTES {
        return Err(ApiError::new(
            ApiError::INVALID_PARAMS,
            format!("the message on stdin is longer than {MAX_TEXT_BYTES} bytes"),
            "write it to a file and send its path",
        ));
    }
    Ok(text)
}

/// Carries out one command.
pub(super) async fn execute(command: ClientCommand, endpoint: &Endpoint, json: bool) -> Done {
    match command {
        ClientCommand::Doctor => return doctor::run(endpoint, json).await,
        ClientCommand::Stop => return stop::run(endpoint, json).await,
        _ => {}
    }
    let (client, notifications) = Client::connect(&endpoint.socket, PROGRAM).await?;
    let session = Session { client, json };
    match command {
        ClientCommand::Status { limits } => {
            let params = StatusParams { limits: limits.then_some(true), settings: None };
            session.show(params, show_status).await
        }
        ClientCommand::Whoami { agent } => {
            session.show_as(&agent, WhoamiParams {}, show_whoami).await
        }
        ClientCommand::Agents(SeenBy { name }) => {
            session.attach_if(name).await?;
            session.show(AgentsParams {}, show_agents).await
        }
        ClientCommand::Rooms { agent: SeenBy { name }, long } => {
            session.attach_if(name).await?;
            session.show(RoomsParams {}, |list| show_rooms(list, long)).await
        }
        ClientCommand::Room(command) => session.room(command).await,
        ClientCommand::Send { agent, room, message } => {
            let text = text(message.text)?;
            session.attach(&agent).await?;
            let params =
                SendParams { room, text, timing: message.timing, reply_to: message.reply_to };
            session.sent(session.client.call(params).await?)
        }
        ClientCommand::Dm { agent, to, message, wait } => {
            let text = text(message.text)?;
            session.attach(&agent).await?;
            let params = DmParams {
                agent: to,
                text,
                timing: message.timing,
                reply_to: message.reply_to,
                wait,
            };
            let waiting = Duration::from_secs(wait.map_or(0, |wait| wait.get()));
            session.sent(session.client.call_waiting(params, waiting).await?)
        }
        ClientCommand::Pending { agent } => {
            session.attach_if(agent.name).await?;
            session.show(PendingParams {}, show_pending).await
        }
        ClientCommand::Accept { agent, which, terms } => {
            let (id, room, requester) = named(which);
            let terms = terms.terms(now());
            session.attach_if(agent.name).await?;
            session.show(AcceptParams { id, room, requester, terms }, show_answered).await
        }
        ClientCommand::Reject { agent, which, reason } => {
            let (id, room, requester) = named(which);
            session.attach_if(agent.name).await?;
            session.show(RejectParams { id, room, requester, reason }, show_answered).await
        }
        ClientCommand::Inbox { agent, wait, max, peek } => {
            session.attach(&agent).await?;
            let waiting = Duration::from_secs(wait.map_or(0, |wait| wait.get()));
            let params = InboxParams { wait, max, peek: peek.then_some(true) };
            let inbox = session.client.call_waiting(params, waiting).await?;
            session.print(&inbox, show_inbox)?;
            if let (Some(last), false) = (inbox.events.last(), peek) {
                session.client.call(EventsAckParams { seq: last.seq }).await?;
            }
            Ok(exit::DONE)
        }
        ClientCommand::Listen { agent } => {
            session.attach(&agent).await?;
            session.client.call(EventsSubscribeParams { after: None }).await?;
            listen(&session.client, notifications).await
        }
        ClientCommand::Update { agent, change: ChangeArgs { status, visibility, consent } } => {
            let params = UpdateParams { status, visibility, name: None, tags: None, consent };
            session.show_as(&agent, params, show_whoami).await
        }
        ClientCommand::Action { agent, call } => session.action(&agent, &call).await,
        ClientCommand::Trust(command) => session.trust(command).await,
        ClientCommand::Logs { follow } => session.logs(follow, notifications).await,
        ClientCommand::Doctor | ClientCommand::Stop => Ok(exit::DONE),
    }
}

/// The time on the clock.
pub(super) fn now() -> UnixMillis {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    UnixMillis(since.map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX)))
}

fn text(text: String) -> Result<Text, ApiError> {
    Text::try_from(text).map_err(|what| ApiError::invalid_params("TEXT", what))
}

/// A call of the tool as JSON.
fn tool_call(call: &str) -> Result<ActionParams, ApiError> {
    serde_json::from_str(call).map(ActionParams).map_err(|error| {
        ApiError::new(
            ApiError::INVALID_PARAMS,
            format!("the call is no JSON object: {error}"),
            "e.g. commsd action --as NAME '{\"action\": \"whoami\"}'",
        )
    })
}

/// `(id, room, requester)`: one argument is an id, two are a room and who asks.
fn named(which: WhichRequest) -> (Option<String>, Option<String>, Option<String>) {
    match which.requester {
        None => (Some(which.id_or_room), None, None),
        some => (None, Some(which.id_or_room), some),
    }
}

/// A connection and how to print.
pub(super) struct Session {
    pub(super) client: Client,
    pub(super) json: bool,
}

impl Session {
    /// Makes the connection the agent, or fails: acting as somebody else would be worse.
    /// Answers its id.
    pub(super) async fn attach(&self, agent: &AsAgent) -> Result<String, Failure> {
        Ok(self.client.act_as(&agent.name).await?.agent)
    }

    async fn attach_if(&self, name: Option<Label>) -> Result<(), Failure> {
        match name {
            None => Ok(()),
            Some(name) => self.attach(&AsAgent { name }).await.map(drop),
        }
    }

    /// Asks, and prints the answer.
    pub(super) async fn show<P: Call>(
        &self,
        params: P,
        human: impl FnOnce(&P::Output) -> String,
    ) -> Done {
        let result = self.client.call(params).await?;
        self.print(&result, human)?;
        Ok(exit::DONE)
    }

    /// The same as an agent.
    pub(super) async fn show_as<P: Call>(
        &self,
        agent: &AsAgent,
        params: P,
        human: impl FnOnce(&P::Output) -> String,
    ) -> Done {
        self.attach(agent).await?;
        self.show(params, human).await
    }

    pub(super) fn print<T: Serialize>(
        &self,
        result: &T,
        human: impl FnOnce(&T) -> String,
    ) -> Result<(), Failure> {
        let text = if self.json { json_line(result) } else { human(result) };
        Ok(write_out(&text)?)
    }

    /// The tool, word for word; what was not done is exit code 1.
    async fn action(&self, agent: &AsAgent, call: &str) -> Done {
        let call = tool_call(call)?;
        self.attach(agent).await?;
        let result = self.client.call(call).await?;
        self.print(&result, |result| {
            let end = if result.content.ends_with('\n') { "" } else { "\n" };
            format!("{}{end}", result.content)
        })?;
        Ok(if result.is_error { exit::FAILED } else { exit::DONE })
    }

    /// A message that somebody refused, or that is lost, is a failure; a waiting one is not.
    fn sent(&self, result: SendResult) -> Done {
        self.print(&result, show_sent)?;
        let lost = result.deliveries.iter().any(|delivery| {
            matches!(
                delivery.status,
                DeliveryStatus::Refused | DeliveryStatus::Dropped | DeliveryStatus::Expired
            )
        });
        Ok(if lost { exit::FAILED } else { exit::DONE })
    }

    async fn room(&self, command: RoomCommand) -> Done {
        match command {
            RoomCommand::Create { agent, name, kind, description } => {
                let asked = name.clone();
                let params = RoomCreateParams { name, r#type: kind, description };
                self.show_as(&agent, params, |room| show_created(room, &asked)).await
            }
            RoomCommand::Join(RoomArgs { agent, room }) => {
                self.show_as(&agent, RoomJoinParams { room }, show_room).await
            }
            RoomCommand::Leave(RoomArgs { agent, room }) => {
                let me = self.attach(&agent).await?;
                self.show(RoomLeaveParams { room, reason: None }, |room| show_left(room, &me)).await
            }
            RoomCommand::Members(RoomArgs { agent, room }) => {
                self.show_as(&agent, RoomMembersParams { room }, show_room).await
            }
            RoomCommand::Destroy(RoomArgs { agent, room }) => {
                self.show_as(&agent, RoomDestroyParams { room }, show_destroyed).await
            }
            RoomCommand::History { room: RoomArgs { agent, room }, since, limit } => {
                let params = RoomHistoryParams { room, since, limit };
                self.show_as(&agent, params, show_history).await
            }
            RoomCommand::Invite(RoomAgentArgs { room: RoomArgs { agent, room }, target }) => {
                let did = format!("invited {}", escape_untrusted(&target));
                let params = RoomInviteParams { room, agent: target };
                self.show_as(&agent, params, |room| format!("{did}\n\n{}", show_room(room))).await
            }
            RoomCommand::Kick(RoomAgentArgs { room: RoomArgs { agent, room }, target }) => {
                let did = format!("removed {}", escape_untrusted(&target));
                let params = RoomKickParams { room, agent: target };
                self.show_as(&agent, params, |room| format!("{did}\n\n{}", show_room(room))).await
            }
        }
    }

    /// Prints everything that the daemon keeps, and then what comes.
    async fn logs(&self, follow: bool, mut notifications: Notifications) -> Done {
        let mut after = None;
        loop {
            let params = LogsParams { follow: follow.then_some(true), after, max: None };
            let Logs { events, more } = self.client.call(params).await?;
            for event in &events {
                write_out(&json_line(event))?;
            }
            after = events.last().map(|event| event.seq).or(after);
            // Following, what comes behind this answer arrives by itself.
            if follow || !more || events.is_empty() {
                break;
            }
        }
        if !follow {
            return Ok(exit::DONE);
        }
        let mut reason = None;
        while let Some(notification) = notifications.recv().await {
            match notification {
                Notification::Log(event) => write_out(&json_line(&event))?,
                Notification::Closing(why) => reason = Some(why),
                Notification::Event(_) | Notification::Change(_) | Notification::Acp(_) => {}
            }
        }
        Err(disconnected(reason.as_deref()).into())
    }
}

/// Prints events until the connection ends and acknowledges what has been printed. One
/// acknowledgement is on its way at a time, and covers all events printed before it.
async fn listen(client: &Client, mut notifications: Notifications) -> Done {
    type Acking<'a> = Pin<Box<dyn Future<Output = Result<Acked, ApiError>> + 'a>>;
    let (mut printed, mut asked) = (0, 0);
    let mut acking: Option<Acking<'_>> = None;
    let mut reason = None;
    loop {
        let answered = async {
            match &mut acking {
                Some(answer) => answer.await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            answer = answered => {
                answer?;
                acking = None;
            }
            notification = notifications.recv() => match notification {
                None => return Err(disconnected(reason.as_deref()).into()),
                Some(Notification::Event(event)) => {
                    write_out(&json_line(&event))?;
                    printed = event.seq;
                }
                Some(Notification::Closing(why)) => reason = Some(why),
                Some(Notification::Change(_) | Notification::Log(_) | Notification::Acp(_)) => {}
            },
        }
        if acking.is_none() && printed > asked {
            asked = printed;
            acking = Some(Box::pin(client.call(EventsAckParams { seq: printed })));
        }
    }
}

// ---------------------------------------------------------------------------------------------
// For people

/// The table, or a line that says there is nothing.
fn table_or<const N: usize>(header: [&str; N], rows: &[[String; N]], none: &str) -> String {
    if rows.is_empty() { format!("{none}\n") } else { table(header, rows) }
}

fn show_status(status: &Status) -> String {
    let held = |held: bool| if held { "held by this daemon" } else { "not held by this daemon" };
    let coordinator = match &status.coordinator.holder {
        None => "none".into(),
        Some(holder) => {
            let coordinator = &status.coordinator;
            format!("{}, term {}, {}", short(holder), coordinator.term, held(coordinator.held))
        }
    };
    let oldest = status.queues.oldest_ms.map(|ms| format!(", oldest {}", duration(ms)));
    let mut rows = vec![
        ("version", status.version.clone()),
        ("pid", status.pid.to_string()),
        ("up", duration(status.uptime_ms)),
        ("device", status.device.clone()),
        ("port", format!("{}, {}", status.port.number, held(status.port.held))),
        ("coordinator", coordinator),
        ("agents", status.agents.to_string()),
        (
            "queues",
            format!(
                "{} outgoing, {} inbound{}",
                status.queues.outgoing,
                status.queues.inbound,
                oldest.unwrap_or_default()
            ),
        ),
    ];
    if let Some(hub) = &status.hub {
        let state = match (&hub.since, hub.wanted) {
            (Some(_), _) => format!("connected, {} trusted devices heard of", hub.devices),
            (None, false) => "not dialled: nobody is trusted".into(),
            (None, true) => format!("not connected, {} failures", hub.failures),
        };
        rows.push(("hub", format!("{}, {state}", hub.url)));
    }
    let mut out = fields(&rows);
    let peers: Vec<_> = status
        .peers
        .iter()
        .map(|peer| {
            let place = if peer.machine_local { "this machine" } else { "elsewhere" };
            [
                short(&peer.device),
                peer.address.clone(),
                peer.sessions.to_string(),
                place.into(),
                peer.since.0.iso(),
            ]
        })
        .collect();
    out += "\n";
    out += &table_or(["PEER", "ADDRESS", "SESSIONS", "PLACE", "SINCE"], &peers, "no peers");
    out += "\n";
    if status.health.is_empty() {
        out += "healthy\n";
    }
    // Sentences, which no column would hold.
    for health in &status.health {
        let line = format!("{} {}: {}", health.severity, health.code, health.text);
        out += &format!("{}\n", escape_untrusted(&line));
        if let Some(todo) = &health.todo {
            out += &format!("  -> {}\n", escape_untrusted(todo));
        }
    }
    if let Some(limits) = &status.limits {
        let limits: Vec<_> = limits
            .iter()
            .map(|limit| {
                let value = format!("{} {}", limit.value, limit.unit);
                [limit.name.clone(), value, limit.text.clone()]
            })
            .collect();
        out += "\n";
        out += &table_or(["LIMIT", "VALUE", "WHAT"], &limits, "no limits");
    }
    out
}

fn show_whoami(whoami: &Whoami) -> String {
    let optional = |value: &Option<String>| value.clone().unwrap_or_else(|| "unknown".into());
    let list = |values: &[String]| match values {
        [] => "none".into(),
        values => values.join(", "),
    };
    fields(&[
        ("id", whoami.id.clone()),
        ("name", whoami.name.clone()),
        ("harness", whoami.harness.clone()),
        ("cwd", whoami.cwd.clone()),
        ("status", whoami.status.to_string()),
        ("visibility", whoami.visibility.to_string()),
        ("tags", list(&whoami.tags)),
        ("consent", whoami.consent.to_string()),
        ("rooms", list(&whoami.rooms.iter().map(|path| room_label(path)).collect::<Vec<_>>())),
        ("principal", optional(&whoami.principal)),
        ("machine", optional(&whoami.machine)),
        ("version", whoami.version.clone()),
    ])
}

fn show_agents(list: &AgentList) -> String {
    let place = |agent: &AgentInfo| match (agent.local, &agent.machine, &agent.names.machine) {
        (true, ..) => "this daemon".into(),
        (false, _, Some(name)) => name.clone(),
        (false, Some(machine), None) => short(machine),
        (false, None, None) => "not proven".into(),
    };
    let rows: Vec<_> = list
        .agents
        .iter()
        .map(|agent| {
            [
                short(&agent.id),
                agent.name.clone(),
                agent.harness.clone(),
                agent.status.to_string(),
                place(agent),
                agent.cwd.clone().unwrap_or_else(|| "not shared".into()),
            ]
        })
        .collect();
    table_or(["ID", "NAME", "HARNESS", "STATUS", "MACHINE", "CWD"], &rows, "no agents")
}

fn show_rooms(list: &RoomList, long: bool) -> String {
    let mark = |room: &RoomInfo| if room.joined { "*".into() } else { String::new() };
    if long {
        let row = |room: &RoomInfo| {
            let (kind, members) = (room.r#type.to_string(), room.members.to_string());
            [mark(room), kind, members, room.path.clone(), room.description.clone()]
        };
        let rows: Vec<_> = list.rooms.iter().map(row).collect();
        return table_or(["IN", "TYPE", "MEMBERS", "PATH", "DESCRIPTION"], &rows, "no rooms");
    }
    let row = |room: &RoomInfo| {
        let (kind, members) = (room.r#type.to_string(), room.members.to_string());
        let description = brief(&room.description);
        [mark(room), kind, room.name.clone(), members, short(&room.owner), description]
    };
    let rows: Vec<_> = list.rooms.iter().map(row).collect();
    table_or(["IN", "TYPE", "NAME", "MEMBERS", "OWNER", "DESCRIPTION"], &rows, "no rooms")
}

/// The beginning of a description, so that a row stays a line.
fn brief(text: &str) -> String {
    const MAX: usize = 24;
    let cut = truncate_chars(text, MAX);
    if cut.len() < text.len() { format!("{cut}…") } else { text.to_owned() }
}

/// A new room: also that it is not called as was asked.
fn show_created(room: &Room, asked: &str) -> String {
    let mut out = show_room(room);
    if room.name != asked {
        let asked = escape_untrusted(asked);
        out += &format!("\n\"{asked}\" became \"{}\", as names of rooms are made", room.name);
    }
    out
}

fn show_room(room: &Room) -> String {
    if let Some(status) = room.status {
        let waits = "the owner has to decide; a join_outcome event will tell";
        return fields(&[
            ("room", room.name.clone()),
            ("status", status.to_string()),
            ("", waits.into()),
        ]);
    }
    let owner = room.members.iter().find(|member| member.id == room.owner);
    let mut out = fields(&[
        ("name", room.name.clone()),
        ("type", room.r#type.to_string()),
        ("owner", device(owner.and_then(|owner| owner.name.as_deref()), &room.owner)),
        ("description", room.description.clone()),
    ]);
    let members: Vec<_> = room
        .members
        .iter()
        .map(|member| {
            [
                short(&member.id),
                member.name.clone().unwrap_or_default(),
                member.status.map_or("unknown", AgentStatus::as_str).into(),
            ]
        })
        .collect();
    out += "\n";
    out += &table_or(["MEMBER", "NAME", "STATUS"], &members, "no members");
    out
}

/// What leaving has done; `me` has left.
fn show_left(room: &Room, me: &str) -> String {
    let mut out = format!("left {}\n", escape_untrusted(&room.name));
    match (room.owner == me, room.members.is_empty()) {
        (false, _) => {}
        (true, true) => out += "nobody else was in it, so the room has ended\n",
        (true, false) => out += "the others stay in it, and it is still yours\n",
    }
    out
}

fn show_destroyed(room: &Room) -> String {
    format!("destroyed {}\n", escape_untrusted(&room.name))
}

fn show_history(history: &History) -> String {
    let lines = history.messages.iter().map(|message| {
        let author = device(message.from_name.as_deref(), &message.from);
        let head = format!("{}  {}  {author}: ", message.seq, message.at.0.iso());
        message_lines(&head, &message.text)
    });
    let mut out: String = lines.collect();
    if history.messages.is_empty() {
        out += "no messages\n";
    }
    if let (true, Some(last)) = (history.more, history.messages.last()) {
        out += &format!("more follow: --since {}\n", last.seq);
    }
    out
}

fn show_sent(sent: &SendResult) -> String {
    let mut out = fields(&[("message", sent.message_id.clone())]);
    let rows: Vec<_> = sent
        .deliveries
        .iter()
        .map(|delivery| {
            let why = delivery.code.as_ref().or(delivery.reason.as_ref());
            [
                short(&delivery.agent),
                delivery.agent_name.clone().unwrap_or_default(),
                delivery.status.to_string(),
                why.cloned().unwrap_or_default(),
            ]
        })
        .collect();
    out += &table_or(["AGENT", "NAME", "DELIVERY", "WHY"], &rows, "nobody to deliver to");
    out
}

/// What a request is for: a conversation, a room, this machine, or a permission on a share.
fn wanted(request: &PendingRequest) -> String {
    let name = request.requester_name.clone().unwrap_or_else(|| short(&request.requester));
    match (request.kind, &request.room) {
        (PendingKind::Dm, _) => format!("DM with {name}"),
        (PendingKind::Mesh, _) => "this machine".into(),
        (_, Some(room)) => room_label(room),
        (_, None) => match (&request.capability, &request.share) {
            (Some(capability), Some(share)) => format!("{capability} {share}"),
            _ => String::new(),
        },
    }
}

/// Whose the agent is that asks.
fn asker(request: &PendingRequest) -> String {
    whose_is(request.from_machine.as_deref(), request.from_user.as_deref())
}

fn show_pending(list: &PendingList) -> String {
    let rows: Vec<_> = list
        .requests
        .iter()
        .map(|request| {
            [
                request.id.clone(),
                request.kind.to_string(),
                short(&request.requester),
                format!(
                    "{}{}",
                    request.requester_name.as_deref().unwrap_or_default(),
                    asker(request)
                ),
                request.at.0.iso(),
                wanted(request),
            ]
        })
        .collect();
    table_or(["ID", "KIND", "REQUESTER", "NAME", "AT", "FOR"], &rows, "nothing is waiting")
}

fn show_answered(answered: &Answered) -> String {
    let verb = if answered.accepted { "accepted" } else { "rejected" };
    let request = &answered.request;
    let mut rows = vec![
        (verb, request.id.clone()),
        ("kind", request.kind.to_string()),
        (
            "requester",
            device(request.requester_name.as_deref(), &request.requester) + &asker(request),
        ),
        ("for", wanted(request)),
    ];
    if answered.accepted && request.kind == PendingKind::Mesh {
        rows.push(("until", "this daemon ends; the machine then has to ask again".into()));
    }
    fields(&rows)
}

fn show_inbox(inbox: &Inbox) -> String {
    let mut out: String = inbox.events.iter().map(event_text).collect();
    if inbox.events.is_empty() {
        out += "no events\n";
    }
    if inbox.more {
        out += "more events are waiting\n";
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stdin_is_read_only_for_a_dash_and_within_bounds() {
        let send = |text: &str| {
            let args = ["commsd", "send", "--as", "a", "room", text];
            match <super::super::Invocation as clap::Parser>::parse_from(args).command {
                super::super::Command::Client(command) => command,
                other => panic!("{other:?}"),
            }
        };
        let said = |command: ClientCommand, stdin: &[u8]| match with_stdin(command, stdin)? {
            ClientCommand::Send { message, .. } => Ok::<_, ApiError>(message.text),
            other => panic!("{other:?}"),
        };
        assert_eq!(said(send("hi"), b"unread").unwrap(), "hi");
        assert_eq!(said(send("-"), b"two\nlines\n").unwrap(), "two\nlines");
        assert_eq!(said(send("-"), b"-").unwrap(), "-");
        let mut long = vec![b'x'; MAX_TEXT_BYTES];
        long.push(b'\n');
        assert_eq!(said(send("-"), &long).unwrap().len(), MAX_TEXT_BYTES);
        long.push(b'x');
        assert_eq!(said(send("-"), &long).unwrap_err().code, ApiError::INVALID_PARAMS);
        assert_eq!(said(send("-"), &[0xff]).unwrap_err().code, "stdin");
        // What is no message is told before anybody is asked.
        assert_eq!(said(send("-"), b"").unwrap_err().code, ApiError::INVALID_PARAMS);
        assert_eq!(said(send(""), b"").unwrap_err().code, ApiError::INVALID_PARAMS);
    }
}
