//! The client commands: one request each (two with `--as`, three where printing acknowledges), and
//! how their results look to a person.

use std::io::{self, Read};
use std::pin::Pin;
use std::time::Duration;

use serde::Serialize;

use super::args::{
    AsAgent, ChangeArgs, ClientCommand, RoomAgentArgs, RoomArgs, RoomCommand, SeenBy, WhichRequest,
};
use super::output::{duration, event_line, fields, json_line, short, table, write_out};
use super::{Endpoint, doctor, exit};
use crate::api::client::{Client, Notification, Notifications};
use crate::api::types::{
    AcceptParams, Acked, ActionParams, AgentInfo, AgentList, AgentStatus, AgentsParams, Answered,
    ApiError, AttachParams, Call, DeliveryStatus, DmParams, EventsAckParams, EventsSubscribeParams,
    History, Inbox, InboxParams, Label, Logs, LogsParams, MAX_TEXT_BYTES, PendingList,
    PendingParams, PendingRequest, RejectParams, Room, RoomCreateParams, RoomDestroyParams,
    RoomHistoryParams, RoomInviteParams, RoomJoinParams, RoomKickParams, RoomLeaveParams, RoomList,
    RoomMembersParams, RoomsParams, SendParams, SendResult, Status, StatusParams, Text,
    UpdateParams, Whoami, WhoamiParams,
};
use crate::codec::time::UnixMillis;

/// What the daemon is told this program is.
pub(super) const PROGRAM: &str = "commsd-cli";
/// The harness of agents that shells and scripts use.
const HARNESS: &str = "cli";

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

type Done = Result<u8, Failure>;

/// Puts what stdin says in the place of a message or call that is `-`.
pub(super) fn with_stdin(
    mut command: ClientCommand,
    stdin: impl Read,
) -> Result<ClientCommand, ApiError> {
    let text = match &mut command {
        ClientCommand::Send { message, .. } | ClientCommand::Dm { message, .. } => {
            &mut message.text
        }
        ClientCommand::Action { call, .. } => call,
        _ => return Ok(command),
    };
    if text == "-" {
        *text = read_text(stdin)?;
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
    if matches!(command, ClientCommand::Doctor) {
        return doctor::run(endpoint, json).await;
    }
    let (client, notifications) = Client::connect(&endpoint.socket, PROGRAM).await?;
    let session = Session { client, json };
    match command {
        ClientCommand::Status { limits } => {
            let params = StatusParams { limits: limits.then_some(true) };
            session.show(params, show_status).await
        }
        ClientCommand::Whoami { agent } => {
            session.show_as(&agent, WhoamiParams {}, show_whoami).await
        }
        ClientCommand::Agents(SeenBy { name }) => {
            session.attach_if(name).await?;
            session.show(AgentsParams {}, show_agents).await
        }
        ClientCommand::Rooms(SeenBy { name }) => {
            session.attach_if(name).await?;
            session.show(RoomsParams {}, show_rooms).await
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
        ClientCommand::Update { agent, change: ChangeArgs { status, visibility } } => {
            let params = UpdateParams { status, visibility, name: None, tags: None };
            session.show_as(&agent, params, show_whoami).await
        }
        ClientCommand::Action { agent, call } => session.action(&agent, &call).await,
        ClientCommand::Logs { follow } => session.logs(follow, notifications).await,
        ClientCommand::Doctor => Ok(exit::DONE),
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
    pub(super) async fn attach(&self, agent: &AsAgent) -> Result<(), Failure> {
        let cwd = std::env::current_dir().map_err(|error| {
            let what = format!("cannot tell the working directory: {error}");
            ApiError::new("cwd", what, "change into a directory that exists")
        })?;
        let harness = HARNESS
            .parse()
            .map_err(|what: String| ApiError::invalid_params(AttachParams::METHOD, what))?;
        let params = AttachParams {
            harness,
            cwd: cwd.to_string_lossy().into_owned(),
            pid: std::process::id(),
            key: Some(agent.name.clone()),
            name: Some(agent.name.to_string()),
            ephemeral: None,
            project_room: None,
        };
        let attached = self.client.call(params).await?;
        match attached.reason {
            None => Ok(()),
            Some(reason) => Err(Failure::Api(ApiError::new(
                "agent_in_use",
                format!("cannot act as {}: {reason}", agent.name),
                "end the other client, or use another name",
            ))),
        }
    }

    async fn attach_if(&self, name: Option<Label>) -> Result<(), Failure> {
        match name {
            None => Ok(()),
            Some(name) => self.attach(&AsAgent { name }).await,
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
    async fn show_as<P: Call>(
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

    /// A message that somebody refused, or that is lost, is a failure; a waiting one is not.
    /// The tool, word for word; what was not done is exit code 1.
    async fn action(&self, agent: &AsAgent, call: &str) -> Done {
        let call = serde_json::from_str(call).map_err(|error| {
            ApiError::new(
                ApiError::INVALID_PARAMS,
                format!("the call is no JSON object: {error}"),
                "e.g. commsd action --as NAME '{\"action\": \"whoami\"}'",
            )
        })?;
        self.attach(agent).await?;
        let result = self.client.call(ActionParams(call)).await?;
        self.print(&result, |result| result.content.clone())?;
        Ok(if result.is_error { exit::FAILED } else { exit::DONE })
    }

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
                let params = RoomCreateParams { name, r#type: kind, description };
                self.show_as(&agent, params, show_room).await
            }
            RoomCommand::Join(RoomArgs { agent, room }) => {
                self.show_as(&agent, RoomJoinParams { room }, show_room).await
            }
            RoomCommand::Leave(RoomArgs { agent, room }) => {
                self.show_as(&agent, RoomLeaveParams { room, reason: None }, show_room).await
            }
            RoomCommand::Members(RoomArgs { agent, room }) => {
                self.show_as(&agent, RoomMembersParams { room }, show_room).await
            }
            RoomCommand::Destroy(RoomArgs { agent, room }) => {
                self.show_as(&agent, RoomDestroyParams { room }, show_room).await
            }
            RoomCommand::History { room: RoomArgs { agent, room }, since, limit } => {
                let params = RoomHistoryParams { room, since, limit };
                self.show_as(&agent, params, show_history).await
            }
            RoomCommand::Invite(RoomAgentArgs { room: RoomArgs { agent, room }, target }) => {
                let params = RoomInviteParams { room, agent: target };
                self.show_as(&agent, params, show_room).await
            }
            RoomCommand::Kick(RoomAgentArgs { room: RoomArgs { agent, room }, target }) => {
                let params = RoomKickParams { room, agent: target };
                self.show_as(&agent, params, show_room).await
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
                Notification::Event(_) | Notification::Change(_) => {}
            }
        }
        Err(ended(reason))
    }
}

fn ended(reason: Option<String>) -> Failure {
    let why = reason.map(|why| format!(" ({why})")).unwrap_or_default();
    Failure::Api(ApiError::new(
        ApiError::DISCONNECTED,
        format!("the daemon closed the connection{why}"),
        "run the command again; nothing that was not printed is lost",
    ))
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
                None => return Err(ended(reason)),
                Some(Notification::Event(event)) => {
                    write_out(&json_line(&event))?;
                    printed = event.seq;
                }
                Some(Notification::Closing(why)) => reason = Some(why),
                Some(Notification::Change(_) | Notification::Log(_)) => {}
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
            format!("{holder}, term {}, {}", coordinator.term, held(coordinator.held))
        }
    };
    let oldest = status.queues.oldest_ms.map(|ms| format!(", oldest {}", duration(ms)));
    let mut out = fields(&[
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
    ]);
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
    let health: Vec<_> = status
        .health
        .iter()
        .map(|health| {
            [
                health.severity.to_string(),
                health.code.clone(),
                health.text.clone(),
                health.todo.clone().unwrap_or_default(),
            ]
        })
        .collect();
    out += "\n";
    out += &table_or(["SEVERITY", "CONDITION", "WHAT", "TO DO"], &health, "healthy");
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
        ("rooms", list(&whoami.rooms)),
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

fn show_rooms(list: &RoomList) -> String {
    let rows: Vec<_> = list
        .rooms
        .iter()
        .map(|room| {
            [
                if room.joined { "*".into() } else { String::new() },
                room.r#type.to_string(),
                room.name.clone(),
                room.members.to_string(),
                room.path.clone(),
                room.description.clone(),
            ]
        })
        .collect();
    table_or(["IN", "TYPE", "NAME", "MEMBERS", "PATH", "DESCRIPTION"], &rows, "no rooms")
}

fn show_room(room: &Room) -> String {
    if let Some(status) = room.status {
        let waits = "the owner has to decide; a join_outcome event will tell";
        return fields(&[
            ("path", room.path.clone()),
            ("status", status.to_string()),
            ("", waits.into()),
        ]);
    }
    let mut out = fields(&[
        ("path", room.path.clone()),
        ("name", room.name.clone()),
        ("type", room.r#type.to_string()),
        ("owner", room.owner.clone()),
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

fn show_history(history: &History) -> String {
    let rows: Vec<_> = history
        .messages
        .iter()
        .map(|message| {
            [
                message.seq.to_string(),
                message.at.0.iso(),
                short(&message.from),
                message.from_name.clone().unwrap_or_default(),
                message.text.clone(),
            ]
        })
        .collect();
    let mut out = table_or(["SEQ", "AT", "FROM", "NAME", "TEXT"], &rows, "no messages");
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
            [short(&delivery.agent), delivery.status.to_string(), why.cloned().unwrap_or_default()]
        })
        .collect();
    out += &table_or(["AGENT", "DELIVERY", "WHY"], &rows, "nobody to deliver to");
    out
}

fn show_pending(list: &PendingList) -> String {
    let rows: Vec<_> = list
        .requests
        .iter()
        .map(|request| {
            [
                request.id.clone(),
                request.kind.to_string(),
                request.requester.clone(),
                request.requester_name.clone().unwrap_or_default(),
                request.at.0.iso(),
                request.room.clone().or_else(|| asked_for(request)).unwrap_or_default(),
            ]
        })
        .collect();
    let header = ["ID", "KIND", "REQUESTER", "NAME", "AT", "ROOM OR PERMISSION"];
    table_or(header, &rows, "nothing is waiting")
}

/// `x-commsd-vault:read notes`
fn asked_for(request: &PendingRequest) -> Option<String> {
    Some(format!("{} {}", request.capability.as_ref()?, request.share.as_ref()?))
}

fn show_answered(answered: &Answered) -> String {
    let verb = if answered.accepted { "accepted" } else { "rejected" };
    let request = &answered.request;
    fields(&[
        (verb, request.id.clone()),
        ("kind", request.kind.to_string()),
        ("requester", request.requester.clone()),
        ("for", request.room.clone().or_else(|| asked_for(request)).unwrap_or_default()),
    ])
}

fn show_inbox(inbox: &Inbox) -> String {
    let mut out: String = inbox.events.iter().map(event_line).collect();
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
        // Never more than it must.
        assert!(said(send("-"), b"").unwrap().is_empty());
    }
}
