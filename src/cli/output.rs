//! What reaches the terminal: JSON or plain text on stdout, complaints on stderr. Everything that a
//! stranger may have written passes an escape here.

use std::io::{self, Write as _};
use std::process::ExitCode;

use serde::Serialize;
use serde_json::{Value, json};

use super::exit;
use crate::api::tool::feed::{is_own, whose};
use crate::api::tool::render::device;
use crate::api::types::{ApiError, Event};
use crate::codec::text::escape_untrusted;

/// Writes a text to stdout as it is. A reader that has gone is no failure.
#[must_use]
pub fn print(text: &str) -> ExitCode {
    match write_out(text) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => exit::FAILED.into(),
        _ => exit::DONE.into(),
    }
}

/// Tells on stderr what went wrong, and returns `code` as the exit code.
#[must_use]
pub fn report(error: &ApiError, json: bool, code: u8) -> ExitCode {
    let ApiError { code: name, message, todo } = error;
    let text = if json {
        json_line(&json!({"error": {"code": name, "message": message, "todo": todo}}))
    } else {
        let todo = todo.as_ref().map(|todo| format!("{}\n", escape_untrusted(todo)));
        format!("commsd: {}\n{}", escape_untrusted(message), todo.unwrap_or_default())
    };
    complain(&text, code)
}

/// Tells on stderr how the command line should look. Only the lines are ours, what stands in them may
/// be an argument.
pub(super) fn report_usage(text: &str, code: u8) -> ExitCode {
    let lines: Vec<_> = text.trim_end().lines().map(escape_untrusted).collect();
    complain(&format!("commsd: {}\n", lines.join("\n")), code)
}

/// Writes a complaint to stderr as it is, and returns `code` as the exit code.
pub(super) fn complain(text: &str, code: u8) -> ExitCode {
    // There is nobody left to tell when stderr is gone.
    let _ = io::stderr().write_all(text.as_bytes());
    code.into()
}

/// Writes to stdout and flushes, so that what counts as printed is printed.
pub(super) fn write_out(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// One line of JSON, with the line feed. Characters that act on a terminal are written as `\u` escapes,
/// which JSON readers turn back.
pub(super) fn json_line(value: &impl Serialize) -> String {
    let mut out = printable(&serde_json::to_string(value).unwrap_or_else(|_| "null".into()));
    out.push('\n');
    out
}

/// JSON text with the characters that act on a terminal written as `\u` escapes.
pub(super) fn printable(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 1);
    let mut utf16 = [0; 2];
    for c in text.chars() {
        let alone = c.encode_utf8(&mut [0; 4]).to_owned();
        // Below DEL, JSON has already escaped what acts; such characters occur only inside texts.
        if c >= '\u{7f}' && escape_untrusted(&alone) != alone {
            for unit in c.encode_utf16(&mut utf16) {
                out.push_str(&format!("\\u{unit:04x}"));
            }
        } else {
            out.push(c);
        }
    }
    out
}

/// Columns of equal width, two spaces apart; nothing for no rows. Cells are escaped.
pub(super) fn table<const N: usize>(header: [&str; N], rows: &[[String; N]]) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let header = header.map(str::to_owned);
    let escaped: Vec<[String; N]> = std::iter::once(&header)
        .chain(rows)
        .map(|row| row.each_ref().map(|cell| escape_untrusted(cell)))
        .collect();
    let mut widths = [0; N];
    for row in &escaped {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut out = String::new();
    for row in &escaped {
        let mut line = String::new();
        for (width, cell) in widths.iter().zip(row) {
            line.push_str(&format!("{cell:<width$}  "));
        }
        out.push_str(line.trim_end());
        out.push('\n');
    }
    out
}

/// `label  value` lines, values escaped.
pub(super) fn fields(rows: &[(&str, String)]) -> String {
    let width = rows.iter().map(|(label, _)| label.len()).max().unwrap_or(0);
    rows.iter()
        .map(|(label, value)| {
            let line = format!("{label:<width$}  {}", escape_untrusted(value));
            format!("{}\n", line.trim_end())
        })
        .collect()
}

/// The first 12 digits of an id, as names are shown beside them.
pub(super) fn short(id: &str) -> String {
    id.chars().take(12).collect()
}

/// A duration in its two largest units.
pub(super) fn duration(ms: u64) -> String {
    let seconds = ms / 1000;
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3_600 % 24, seconds / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds} s"),
        (0, 0, m) => format!("{m} min {} s", seconds % 60),
        (0, h, m) => format!("{h} h {m} min"),
        (d, h, _) => format!("{d} d {h} h"),
    }
}

/// A room as people name it: the part behind the owner's id.
pub(super) fn room_label(path: &str) -> String {
    path.split_once('/').map_or_else(|| path.to_owned(), |(_, name)| name.to_owned())
}

/// What every line of a message but the first begins with: whatever it says, it cannot look like the
/// beginning of another message.
const CONTINUED: &str = "   │ ";
/// What a tab in a message is shown as.
const TAB: &str = "    ";

/// Somebody's words behind `head`, with the line feed at the end. Line ends are kept, each behind a
/// mark, tabs become blanks, and everything else that acts on a terminal is written out.
pub(super) fn message_lines(head: &str, content: &str) -> String {
    let mut out = escape_untrusted(head);
    for (at, line) in content.split('\n').enumerate() {
        if at > 0 {
            out.push('\n');
            out.push_str(CONTINUED);
        }
        let line = line.strip_suffix('\r').unwrap_or(line);
        out.push_str(&escape_untrusted(&line.replace('\t', TAB)));
    }
    out.push('\n');
    out
}

/// A mailbox event for people: one line, or a message with its own. Members of types that are not
/// known here follow as `name=value`.
pub(super) fn event_text(event: &Event) -> String {
    let text = |value: Option<&Value>| match value {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    };
    let member = |name: &str| text(event.body.get(name));
    let who = |id: &str, name: &str| device(Some(&member(name)), &member(id));
    let asking = |id: &str, name: &str| format!("{}{}", who(id, name), whose(event));
    let room = || room_label(&member("room"));
    let message = |name: &str| text(event.body.get("message").and_then(|m| m.get(name)));
    let delivery = |name: &str| text(event.body.get("delivery").and_then(|d| d.get(name)));
    let prefix = match message("streamingBehavior").as_str() {
        "steer" => "[STEER] ",
        "followUp" => "[FOLLOWUP] ",
        _ => "",
    };
    let line = match event.kind() {
        kind @ ("room_message" | "dm") => {
            let place = match kind {
                "dm" => "DM".to_owned(),
                _ => format!("[{}]", room_label(&message("room"))),
            };
            let author = device(Some(&member("fromName")), &message("from"));
            let head = format!("{}  {prefix}{place} {author}{}: ", event.seq, whose(event));
            return message_lines(&head, &message("content"));
        }
        "room_invite" => format!(
            "{} invites to \"{}\" {}",
            asking("from", "fromName"),
            room(),
            member("roomDescription")
        ),
        "member_joined" => format!("{} joined {}", who("agent", "agentName"), room()),
        "member_left" if is_own(event) => {
            format!("no longer in {}: its owner put this agent out", room())
        }
        "member_left" => format!("{} left {}", who("agent", "agentName"), room()),
        "member_status" => {
            format!("{} is {} in {}", who("agent", "agentName"), member("status"), room())
        }
        "delivery_status" => {
            let detail = [delivery("reason"), delivery("code")];
            let detail: Vec<_> = detail.into_iter().filter(|part| !part.is_empty()).collect();
            format!(
                "message {} to {}: {} {}",
                member("messageId"),
                who("agent", "agentName"),
                delivery("status"),
                detail.join(" ")
            )
        }
        "messages_read" => {
            let ids = event.body.get("messageIds").and_then(Value::as_array);
            format!("{} messages read by {}", ids.map_or(0, Vec::len), who("agent", "agentName"))
        }
        "invite_declined" => format!(
            "{} declined the invite to {}: \"{}\"",
            who("agent", "agentName"),
            room(),
            member("reason")
        ),
        "name_changed" => {
            format!("{} was called \"{}\"", who("agent", "newName"), member("oldName"))
        }
        "room_join_request" if member("room").contains('+') => {
            format!("{} asks to send you direct messages", asking("requesterId", "requesterName"))
        }
        "room_join_request" => {
            format!("{} asks to join {}", asking("requesterId", "requesterName"), room())
        }
        "room_members" => {
            let members = event.body.get("members").and_then(Value::as_array);
            let names: Vec<String> = members
                .into_iter()
                .flatten()
                .map(|member| {
                    let part = |name| text(member.get(name));
                    format!("{} ({})", device(Some(&part("name")), &part("id")), part("status"))
                })
                .collect();
            format!("in {}: {}", room(), names.join(", "))
        }
        "join_outcome" if event.body.get("accepted") == Some(&Value::Bool(true)) => {
            match member("reason") {
                reason if reason.is_empty() => format!("you are in {}", room()),
                reason => format!("you are in {}: {reason}", room()),
            }
        }
        "join_outcome" if member("code") == "destroyed" => {
            format!("{} is no more: {}", room(), member("reason"))
        }
        "join_outcome" => format!("you are not let into {}: {}", room(), member("reason")),
        "capability_request" => format!(
            "{} asks for \"{}\" on {} (request {})",
            asking("requesterDevice", "requesterName"),
            member("capability"),
            member("scopePath"),
            member("requestId")
        ),
        "capability_outcome" if event.body.get("accepted") == Some(&Value::Bool(true)) => {
            format!("you have \"{}\" on {}", member("capability"), member("scopePath"))
        }
        "capability_outcome" => format!(
            "you do not get \"{}\" on {}: {} {}",
            member("capability"),
            member("scopePath"),
            member("code"),
            member("reason")
        ),
        "connection_request" => {
            let machine = who("peerId", "name");
            match member("fingerprint") {
                none if none.is_empty() => format!("machine {machine} asks to be let in"),
                given => format!("machine {machine} (fingerprint {given}) asks to be let in"),
            }
        }
        kind => {
            let rest = event.body.iter().filter(|(name, _)| *name != "type");
            rest.fold(kind.to_owned(), |line, (name, value)| {
                format!("{line} {name}={}", text(Some(value)))
            })
        }
    };
    escape_untrusted(&format!("{}  {}", event.seq, line.trim_end())) + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_lines_are_inert_on_a_terminal_and_read_back() {
        let value = json!({"name": "a\u{9b}31m\u{202e}\u{e0041}é\n\u{1b}[2J\"👍"});
        let line = json_line(&value);
        assert!(line.ends_with('\n'));
        let shown = line.trim_end();
        assert!(!shown.chars().any(|c| c.is_control() || c == '\u{202e}' || c == '\u{e0041}'));
        assert!(shown.contains("é") && shown.contains("👍"));
        assert_eq!(serde_json::from_str::<Value>(shown).unwrap(), value);
    }

    #[test]
    fn tables_are_aligned_and_escaped() {
        let rows = [["a".to_owned(), "x\u{1b}[1m".to_owned()], ["ééé".to_owned(), String::new()]];
        assert_eq!(table(["ID", "NAME"], &rows), "ID   NAME\na    x\\u{1b}[1m\nééé\n");
        assert_eq!(table(["ID", "NAME"], &[]), "");
        assert_eq!(
            fields(&[("id", "1".into()), ("name", "a\nb".into())]),
            "id    1\nname  a\\u{a}b\n"
        );
    }

    #[test]
    fn durations_have_two_units() {
        for (ms, text) in
            [(999, "0 s"), (61_000, "1 min 1 s"), (3_600_000, "1 h 0 min"), (90_000_000, "1 d 1 h")]
        {
            assert_eq!(duration(ms), text);
        }
    }

    #[test]
    fn events_name_agents_and_nothing_they_say_looks_like_another_event() {
        let event = |json: Value| -> Event { serde_json::from_value(json).unwrap() };
        let id = "ab".repeat(32);
        let dm = event(json!({"seq": 4, "type": "dm", "fromName": "ann\" ba: 5  DM",
            "message": {"id": "1", "from": id, "streamingBehavior": "steer",
                        "content": "fn f() {\r\n\tx\n}\n5  DM eve: trust me\u{1b}[2J\u{202e}"}}));
        assert_eq!(
            event_text(&dm),
            "4  [STEER] DM \"ann\\\" ba: 5  DM\" abababababab: fn f() {\n   │     x\n   │ }\n   \
             │ 5  DM eve: trust me\\u{1b}[2J\\u{202e}\n"
        );
        let status = event(json!({"seq": 5, "type": "delivery_status", "messageId": "m",
            "agent": id, "agentName": "ann", "delivery": {"status": "queued", "reason": "timeout"}}));
        assert_eq!(event_text(&status), "5  message m to \"ann\" abababababab: queued timeout\n");
        let read = event(json!({"seq": 7, "type": "messages_read", "messageIds": ["m", "n"],
            "agent": id, "agentName": "ann"}));
        assert_eq!(event_text(&read), "7  2 messages read by \"ann\" abababababab\n");
        let ended = event(json!({"seq": 8, "type": "join_outcome", "room": "ab/general",
            "accepted": false, "code": "destroyed", "reason": "its owner has ended the room"}));
        let shown = event_text(&ended);
        assert!(shown.ends_with("is no more: its owner has ended the room\n"), "{shown}");
        let machine = |fingerprint: &str| {
            event_text(&event(json!({"seq": 9, "type": "connection_request", "peerId": id,
                "name": "ann", "fingerprint": fingerprint})))
        };
        assert_eq!(machine(""), "9  machine \"ann\" abababababab asks to be let in\n");
        assert!(machine("ab:cd").contains(" (fingerprint ab:cd) asks "));
        let unknown = event(json!({"seq": 6, "type": "new_thing", "a": "x\ny", "b": 2}));
        assert_eq!(event_text(&unknown), "6  new_thing a=x\\u{a}y b=2\n");
        // Whoever an event is about is named.
        for (kind, id_key, name_key) in [
            ("room_invite", "from", "fromName"),
            ("member_joined", "agent", "agentName"),
            ("member_left", "agent", "agentName"),
            ("member_status", "agent", "agentName"),
            ("invite_declined", "agent", "agentName"),
            ("name_changed", "agent", "newName"),
            ("room_join_request", "requesterId", "requesterName"),
            ("capability_request", "requesterDevice", "requesterName"),
            ("connection_request", "peerId", "name"),
        ] {
            let event = event(json!({"seq": 7, "type": kind, id_key: id, name_key: "ann",
                                     "room": "ab/general"}));
            let shown = event_text(&event);
            assert!(shown.contains("\"ann\" abababababab"), "{kind}: {shown}");
            assert_eq!(shown.lines().count(), 1, "{kind}: {shown}");
        }
    }
}
