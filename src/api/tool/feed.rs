//! Incoming events as a model sees them: one frame for each message, which its content cannot leave
//! or forge, one line for each piece of news; within a budget of bytes (`surfaces.md` 10, D17, D20;
//! `field-reports.md`). Whether what was shown has arrived is for who shows it to know.

use serde_json::{Map, Value};

use super::render::device;
use crate::api::types::Event;
use crate::codec::text::{escape_untrusted, truncate_chars};

/// The tool that waits for messages.
pub const WAIT: &str = "wait_for_messages";
/// Bytes of one batch: about three thousand tokens, so that a full mailbox does not bury the answer
/// that it comes with.
pub const MAX_BATCH: usize = 12 * 1024;
/// Bytes of a message for which no batch is begun any more: its frame comes first in the next one.
const MIN_PART: usize = 1024;
/// Characters of a name, path or reason within a line.
const MAX_WORD: usize = 256;
/// Message ids named in one line.
const MAX_IDS: usize = 8;
/// What every line of content begins with.
const BAR: &str = "│ ";

/// `content` below `head`, each of its lines behind a bar: whatever it says, it cannot look like a
/// head. Line ends and tabs stay, all else that is hidden is escaped.
#[must_use]
pub fn frame(head: &str, content: &str) -> String {
    let mut out = String::with_capacity(head.len() + content.len() + 16);
    out.push_str(head);
    for line in content.split('\n') {
        out.push('\n');
        out.push_str(BAR);
        let line = line.strip_suffix('\r').unwrap_or(line);
        for (at, cell) in line.split('\t').enumerate() {
            if at > 0 {
                out.push('\t');
            }
            out.push_str(&escape_untrusted(cell));
        }
    }
    out
}

/// How soon a model should see an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Urgency {
    /// With whatever comes next.
    Info,
    /// When its running task is done.
    FollowUp,
    /// At its next decision.
    Steer,
}

impl Urgency {
    /// The least urgent first.
    pub const ALL: [Self; 3] = [Self::Info, Self::FollowUp, Self::Steer];

    /// As `streamingBehavior` spells it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Steer => "steer",
            Self::FollowUp => "followUp",
            Self::Info => "info",
        }
    }
}

/// Whether an event is about the agent that it comes to.
pub(crate) fn is_own(event: &Event) -> bool {
    event.body.get("own") == Some(&Value::Bool(true))
}

/// What an event is to a model: messages by their sender's hint; without one a direct message, a
/// question, and a room's message that speaks to the agent at once; everything else is news
/// (`rooms.md` 5.3, decision 142).
#[must_use]
pub fn urgency(event: &Event) -> Urgency {
    match event.kind() {
        kind @ ("dm" | "room_message") => match text(message(event), "streamingBehavior") {
            "followUp" => Urgency::FollowUp,
            "info" => Urgency::Info,
            // What one says to oneself wakes nobody.
            _ if is_own(event) => Urgency::Info,
            // A room informs; who is spoken to is woken.
            "" if kind == "room_message"
                && event.body.get("addressed") != Some(&Value::Bool(true)) =>
            {
                Urgency::Info
            }
            _ => Urgency::Steer,
        },
        "room_invite" | "room_join_request" | "capability_request" => Urgency::Steer,
        _ => Urgency::Info,
    }
}

fn message(event: &Event) -> Option<&Map<String, Value>> {
    event.body.get("message").and_then(Value::as_object)
}

fn text<'a>(members: Option<&'a Map<String, Value>>, key: &str) -> &'a str {
    members.and_then(|members| members.get(key)).and_then(Value::as_str).unwrap_or_default()
}

/// One of an event's own members, on one line.
fn word(event: &Event, key: &str) -> String {
    escape_untrusted(truncate_chars(text(Some(&event.body), key), MAX_WORD))
}

/// The head of a message's frame: everything a model needs to answer it.
fn head(event: &Event) -> String {
    let message = message(event);
    let mut out = String::from("📬 ");
    match text(message, "streamingBehavior") {
        "steer" => out.push_str("[STEER] "),
        "followUp" => out.push_str("[FOLLOWUP] "),
        _ => {}
    }
    if event.kind() == "dm" {
        out.push_str("DM");
    } else {
        let room = escape_untrusted(truncate_chars(text(message, "room"), MAX_WORD));
        out.push_str(&format!("[{room}]"));
    }
    let name = event.body.get("fromName").and_then(Value::as_str);
    out.push_str(&format!(" from {}{}", device(name, text(message, "from")), whose(event)));
    for (label, key) in [("id", "id"), ("answers", "replyTo"), ("at", "timestamp")] {
        let value = text(message, key);
        if !value.is_empty() {
            out.push_str(&format!(
                " {label} {}",
                escape_untrusted(truncate_chars(value, MAX_WORD))
            ));
        }
    }
    out
}

/// What sets whoever writes or asks apart from the agents of the reader's own user on this machine.
#[must_use]
pub(crate) fn whose(event: &Event) -> String {
    let member = |key| event.body.get(key).and_then(Value::as_str);
    whose_is(member("fromMachine"), member("fromUser"))
}

/// The same of a request that waits.
#[must_use]
pub(crate) fn whose_is(machine: Option<&str>, user: Option<&str>) -> String {
    match (machine, user) {
        (Some(machine), _) if !machine.is_empty() => {
            format!(" (on machine \"{}\")", escape_untrusted(truncate_chars(machine, MAX_WORD)))
        }
        (_, None | Some("")) => String::new(),
        (_, Some("other")) => " (another user's)".to_owned(),
        _ => " (whose it is, nobody can say)".to_owned(),
    }
}

/// News and questions: one line.
fn line(event: &Event) -> String {
    let get = |key: &str| word(event, key);
    let named = |key: &str, name: &str| {
        let name = event.body.get(name).and_then(Value::as_str);
        device(name, text(Some(&event.body), key))
    };
    match event.kind() {
        "room_invite" => {
            let description = get("roomDescription");
            format!(
                "📬 {}{} invites you to {}{}{} (join_room, or decline_invite with a reason)",
                named("from", "fromName"),
                whose(event),
                get("room"),
                if description.is_empty() { "" } else { ", which says of itself: " },
                if description.is_empty() { String::new() } else { format!("\"{description}\"") }
            )
        }
        "room_join_request" => {
            let requester = text(Some(&event.body), "requesterId");
            let room = get("room");
            let what = if is_conversation(&room) {
                "to write to you".to_owned()
            } else {
                format!("to join {room}")
            };
            format!(
                "📬 {}{} asks {what} (room_accept or room_reject with room {room} and requesterId {})",
                device(event.body.get("requesterName").and_then(Value::as_str), requester),
                whose(event),
                escape_untrusted(truncate_chars(requester, MAX_WORD))
            )
        }
        "connection_request" => format!(
            "📬 machine {} asks to connect (mesh_accept or mesh_reject with connectionId {})",
            named("peerId", "name"),
            get("connectionId")
        ),
        "capability_request" => format!(
            "📬 {}{} asks for the permission {} on {} (ask your user, then capability_accept or \
             capability_reject with requestId {})",
            named("requesterDevice", "requesterName"),
            whose(event),
            get("capability"),
            get("scopePath"),
            get("requestId")
        ),
        "capability_outcome" => {
            if event.body.get("accepted").and_then(Value::as_bool) == Some(true) {
                format!("· you have the permission {} on {}", get("capability"), get("scopePath"))
            } else {
                format!(
                    "· you do not get the permission {} on {} ({}) {}",
                    get("capability"),
                    get("scopePath"),
                    get("code"),
                    get("reason")
                )
            }
        }
        "member_joined" => format!("· {} joined {}", named("agent", "agentName"), get("room")),
        // Only its owner ends an agent's stay without its own wish.
        "member_left" if is_own(event) => {
            format!("· you are no longer in {}: its owner put you out", get("room"))
        }
        "member_left" => format!("· {} left {}", named("agent", "agentName"), get("room")),
        "member_status" => {
            format!("· {} is {} ({})", named("agent", "agentName"), get("status"), get("room"))
        }
        "room_members" => {
            let members: Vec<String> = event
                .body
                .get("members")
                .and_then(Value::as_array)
                .into_iter()
                .flatten()
                .filter_map(Value::as_object)
                .take(MAX_MEMBERS)
                .map(|member| {
                    let name = member.get("name").and_then(Value::as_str);
                    let status = escape_untrusted(text(Some(member), "status"));
                    format!("{} ({status})", device(name, text(Some(member), "id")))
                })
                .collect();
            format!("· in {}: {}", get("room"), members.join(", "))
        }
        "delivery_status" => {
            let delivery = event.body.get("delivery").and_then(Value::as_object);
            let state = match text(delivery, "status") {
                "queued" => format!(
                    "is queued ({}), not delivered yet",
                    escape_untrusted(text(delivery, "reason"))
                ),
                "refused" => format!(
                    "was refused ({})",
                    escape_untrusted(truncate_chars(text(delivery, "code"), MAX_WORD))
                ),
                "dropped" | "expired" => {
                    format!("{}: never delivered", escape_untrusted(text(delivery, "status")))
                }
                other => format!("was {}", escape_untrusted(other)),
            };
            format!(
                "· your message {} to {} {state}",
                get("messageId"),
                named("agent", "agentName")
            )
        }
        "messages_read" => {
            let ids = event.body.get("messageIds").and_then(Value::as_array);
            let ids = ids.map(Vec::as_slice).unwrap_or_default();
            let shown: Vec<String> = ids
                .iter()
                .take(MAX_IDS)
                .filter_map(Value::as_str)
                .map(|id| escape_untrusted(truncate_chars(id, MAX_WORD)).to_string())
                .collect();
            let more = match ids.len().saturating_sub(MAX_IDS) {
                0 => String::new(),
                more => format!(" and {more} more"),
            };
            format!(
                "· {} read {} of your messages: {}{more}",
                named("agent", "agentName"),
                ids.len(),
                shown.join(", ")
            )
        }
        "invite_declined" => format!(
            "· {} declined your invitation to {}: \"{}\"",
            named("agent", "agentName"),
            get("room"),
            get("reason")
        ),
        "name_changed" => format!(
            "· {} was called \"{}\"",
            device(Some(text(Some(&event.body), "newName")), text(Some(&event.body), "agent")),
            get("oldName")
        ),
        "join_outcome" => {
            if event.body.get("accepted").and_then(Value::as_bool) == Some(true) {
                match get("reason") {
                    reason if reason.is_empty() => format!("· you are in {}", get("room")),
                    reason => format!("· you are in {}: {reason}", get("room")),
                }
            } else if get("code") == "destroyed" {
                format!("· {} is no more: {}", get("room"), get("reason"))
            } else {
                format!(
                    "· you were not let into {} ({}) {}",
                    get("room"),
                    get("code"),
                    get("reason")
                )
            }
        }
        other => format!("· {}", escape_untrusted(truncate_chars(other, MAX_WORD))),
    }
}

/// Members named in one line.
const MAX_MEMBERS: usize = 50;

/// Whether a path is that of a conversation between two agents: `<id>+<id>`, not `<id>/<name>`.
fn is_conversation(path: &str) -> bool {
    !path.contains('/') && path.contains('+')
}

/// A message's frame, or a question's or piece of news' line.
#[must_use]
pub fn block(event: &Event) -> String {
    match message(event) {
        Some(message) => frame(&head(event), text(Some(message), "content")),
        None => line(event),
    }
}

/// What goes with one answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// For the model.
    pub text: String,
    /// Whether it leaves something for the next one.
    pub more: bool,
}

impl Batch {
    /// As the model sees it.
    #[must_use]
    pub fn incoming(&self) -> String {
        let more = if self.more { format!("\n(more wait: call {WAIT})") } else { String::new() };
        format!("📬 Incoming messages:\n{}{more}", self.text)
    }
}

/// How far one model has been shown its events.
#[derive(Clone, Debug, Default)]
pub struct Feed {
    /// Everything up to here is in an answer that has been given.
    shown: u64,
    /// Of the next event's content, so many bytes as well.
    offset: usize,
}

impl Feed {
    /// Everything up to here has been shown.
    #[must_use]
    pub fn shown(&self) -> u64 {
        self.shown
    }

    /// Everything up to `through` has come to the model in another way.
    pub fn skip(&mut self, through: u64) {
        if through > self.shown {
            self.restart(through);
        }
    }

    /// A new connection, or an agent whose numbers begin again: shows what is not acknowledged.
    pub fn restart(&mut self, acknowledged: u64) {
        *self = Self { shown: acknowledged, offset: 0 };
    }

    /// The most urgent of what is new among unacknowledged `events`; `None` when nothing is.
    #[must_use]
    pub fn urgency(&self, events: &[Event]) -> Option<Urgency> {
        events.iter().filter(|event| event.seq > self.shown).map(urgency).max()
    }

    /// The next batch out of unacknowledged `events` (oldest first); `None` when nothing is new.
    /// `more` says that the mailbox holds more than these.
    pub fn batch(&mut self, events: &[Event], more: bool, budget: usize) -> Option<Batch> {
        let mut out = String::new();
        let mut more = more;
        for event in events.iter().filter(|event| event.seq > self.shown).collect::<Vec<_>>() {
            let room = budget.saturating_sub(out.len());
            let content = message(event).map(|message| text(Some(message), "content"));
            let whole = match content {
                Some(content) => self.part(event, content, room.max(MIN_PART)),
                None => Some(line(event)),
            };
            let Some(block) = whole else {
                // Only a part of it fits, and that goes first in a batch of its own.
                more = true;
                if out.is_empty() {
                    out = self.cut(event, content.unwrap_or_default(), budget.max(MIN_PART));
                }
                break;
            };
            if !out.is_empty() && out.len() + 1 + block.len() > budget {
                more = true;
                break;
            }
            if !out.is_empty() {
                out.push('\n');
            }
            out.push_str(&block);
            self.shown = event.seq;
            self.offset = 0;
        }
        (!out.is_empty()).then_some(Batch { text: out, more })
    }

    /// What is left of a message, when it fits.
    fn part(&self, event: &Event, content: &str, room: usize) -> Option<String> {
        let rest = content.get(self.offset..).unwrap_or(content);
        let mut head = head(event);
        if self.offset > 0 {
            head.push_str(&format!(" (rest, from byte {} of {})", self.offset, content.len()));
        }
        let block = frame(&head, rest);
        (block.len() <= room).then_some(block)
    }

    /// As much of a message as fits, cut between characters.
    fn cut(&mut self, event: &Event, content: &str, room: usize) -> String {
        let rest = content.get(self.offset..).unwrap_or(content);
        let mut head = head(event);
        head.push_str(&format!(
            " (a part, from byte {} of {}; the rest comes with the next call)",
            self.offset,
            content.len()
        ));
        // Escaping makes text longer: halve until it fits.
        let mut length = rest.floor_char_boundary(room.saturating_sub(head.len()));
        loop {
            let block = frame(&head, rest.get(..length).unwrap_or_default());
            if block.len() <= room || length < 64 {
                self.offset += length;
                return block;
            }
            length = rest.floor_char_boundary(length / 2);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn event(seq: u64, body: Value) -> Event {
        let Value::Object(body) = body else { unreachable!() };
        Event { seq, body }
    }

    fn dm(seq: u64, content: &str) -> Event {
        event(
            seq,
            json!({"type": "dm", "fromName": "Ann", "message": {"id": format!("m{seq}"),
                "from": "ab".repeat(32), "content": content,
                "timestamp": "2026-01-02T03:04:05.678Z"}}),
        )
    }

    #[test]
    fn a_message_says_who_when_and_what_to_answer() {
        assert_eq!(
            block(&dm(1, "hello")),
            "📬 DM from \"Ann\" abababababab id m1 at 2026-01-02T03:04:05.678Z\n│ hello"
        );
    }

    #[test]
    fn who_is_not_of_ones_own_user_is_said_to_be_so() {
        let shown = |member: &str, value: &str| {
            let mut event = dm(1, "hello");
            event.body.insert(member.to_owned(), json!(value));
            let shown = block(&event);
            let (_, rest) = shown.split_once("abababababab").unwrap();
            rest.split_once(" id m1").unwrap().0.to_owned()
        };
        assert_eq!(shown("fromUser", "other"), " (another user's)");
        assert_eq!(shown("fromUser", "unknown"), " (whose it is, nobody can say)");
        assert_eq!(shown("fromMachine", "box"), " (on machine \"box\")");
        assert_eq!(shown("fromMachine", "a\nb"), " (on machine \"a\\u{a}b\")");
    }

    #[test]
    fn questions_name_what_answers_them() {
        let ask = event(
            1,
            json!({"type": "room_join_request", "room": format!("{}/den", "cd".repeat(32)),
                "requesterId": "ab".repeat(32)}),
        );
        let shown = block(&ask);
        assert!(shown.contains("room_accept") && shown.contains(&"ab".repeat(32)), "{shown}");
    }

    #[test]
    fn the_most_urgent_of_what_is_new_counts_until_all_of_it_is_shown() {
        let news = event(1, json!({"type": "member_joined"}));
        let events = [news, dm(2, &"x".repeat(2 * MAX_BATCH))];
        let mut feed = Feed::default();
        assert_eq!(feed.urgency(&events[..1]), Some(Urgency::Info));
        let mut parts = 0;
        while feed.urgency(&events).is_some() {
            assert_eq!(feed.urgency(&events), Some(Urgency::Steer));
            assert!(feed.batch(&events, false, MAX_BATCH).is_some());
            parts += 1;
        }
        assert!(parts > 2, "{parts}");
    }

    #[test]
    fn a_batch_ends_before_what_does_not_fit_and_goes_on_there() {
        let events = [dm(1, &"a".repeat(600)), dm(2, &"b".repeat(600)), dm(3, "c")];
        let mut feed = Feed::default();
        let first = feed.batch(&events, false, 1000).unwrap();
        assert!(first.more && first.text.contains('a') && !first.text.contains("bbb"));
        assert_eq!(feed.shown(), 1);
        let second = feed.batch(&events[1..], false, 1000).unwrap();
        assert!(!second.more && second.text.contains("bbb") && second.text.contains("│ c"));
        assert_eq!(feed.shown(), 3);
        assert_eq!(feed.batch(&events, false, 1000), None);
    }

    #[test]
    fn a_message_longer_than_a_batch_comes_in_parts_and_arrives_with_the_last() {
        let content: String = (0..4000).map(|n| char::from_u32(0x4e00 + n).unwrap()).collect();
        let events = [dm(7, &content)];
        let mut feed = Feed::default();
        let mut seen = String::new();
        for round in 0.. {
            assert!(round < 50, "it never ends");
            let batch = feed.batch(&events, false, 2000).unwrap();
            seen.push_str(batch.text.split_once("\n│ ").unwrap().1);
            if !batch.more {
                break;
            }
            assert_eq!(feed.shown(), 0, "not whole yet");
        }
        assert_eq!(seen, content);
        assert_eq!(feed.shown(), 7);
    }

    #[test]
    fn hints_say_how_soon() {
        let with = |hint: &str| {
            let mut event = dm(1, "x");
            event.body["message"]["streamingBehavior"] = hint.into();
            urgency(&event)
        };
        assert_eq!(urgency(&dm(1, "x")), Urgency::Steer);
        assert_eq!(
            [with("steer"), with("followUp"), with("info")],
            [Urgency::Steer, Urgency::FollowUp, Urgency::Info]
        );
        let mut left = event(1, json!({"type": "member_left", "agent": "a1", "room": "r"}));
        assert_eq!(urgency(&left), Urgency::Info);
        assert_eq!(block(&left), "· a1 left r");
        left.body.insert("own".into(), true.into());
        assert_eq!(block(&left), "· you are no longer in r: its owner put you out");
        let mut own = dm(1, "x");
        own.body.insert("own".into(), true.into());
        assert_eq!(urgency(&own), Urgency::Info);
        let post = |addressed: bool, hint: Option<&str>| {
            let mut message = json!({"content": "x", "room": "r"});
            if let Some(hint) = hint {
                message["streamingBehavior"] = hint.into();
            }
            let body = json!({"type": "room_message", "message": message, "addressed": addressed});
            urgency(&event(1, body))
        };
        assert_eq!([post(false, None), post(true, None)], [Urgency::Info, Urgency::Steer]);
        assert_eq!(post(false, Some("steer")), Urgency::Steer);
        assert_eq!(post(true, Some("info")), Urgency::Info);
    }

    proptest! {
        #[test]
        fn no_content_leaves_its_frame(content in any::<String>()) {
            let shown = block(&dm(1, &content));
            let mut lines = shown.split('\n');
            prop_assert!(lines.next().unwrap().starts_with("📬 DM"));
            for line in lines {
                prop_assert!(line.starts_with(BAR));
                let hidden = |c: char| (c.is_control() && c != '\t') || c == '\u{2028}';
                prop_assert!(!line.chars().any(hidden));
            }
        }

        #[test]
        fn no_member_of_an_event_leaves_its_line(
            kind in prop::sample::select(vec![
                "room_invite", "room_join_request", "connection_request", "member_joined",
                "member_left", "member_status", "delivery_status", "messages_read",
                "invite_declined",
                "name_changed", "join_outcome", "capability_request", "capability_outcome",
                "something_new",
            ]),
            word in any::<String>(),
        ) {
            let body = json!({"type": kind, "room": word, "from": word, "fromName": word,
                "agent": word, "agentName": word, "reason": word, "oldName": word,
                "newName": word, "status": word, "requesterId": word, "name": word,
                "peerId": word, "connectionId": word, "code": word, "capability": word, "scopePath": word,
                "roomDescription": word, "messageId": word, "messageIds": [word],
                "delivery": {"status": word, "reason": word, "code": word}});
            let shown = block(&event(1, body));
            let breaks = shown.contains(['\n', '\r', '\u{2028}']);
            prop_assert!(!breaks, "{:?}", shown);
        }
    }
}
