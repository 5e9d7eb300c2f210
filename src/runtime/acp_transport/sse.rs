//! Server-sent events as they are read (WHATWG HTML, 9.2.6): bytes in, whole events out. Bounded;
//! `retry` is passed over, since the waits are ours.

/// Bytes of one line, and of one event: the largest envelope that a relay may take, as JSON.
const MAX_EVENT: usize = (4 << 20) + 4096;

/// One event.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Event {
    /// Its name; empty where none was given.
    pub(super) name: String,
    /// The newest id, which may be that of an earlier event.
    pub(super) id: String,
    /// Its data.
    pub(super) data: String,
}

/// A line or an event is too long, or not UTF-8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Unreadable;

/// Reads a stream in pieces.
#[derive(Debug, Default)]
pub(super) struct Parser {
    line: Vec<u8>,
    event: Event,
    has_data: bool,
    /// The last byte was a carriage return: a line feed right behind it is part of it.
    after_return: bool,
    /// Whether the first line has been read; before it there may be a byte order mark.
    begun: bool,
}

impl Parser {
    /// Takes a piece; the events that end in it.
    ///
    /// # Errors
    /// [`Unreadable`], after which the stream is over.
    pub(super) fn feed(&mut self, mut piece: &[u8]) -> Result<Vec<Event>, Unreadable> {
        let mut events = Vec::new();
        if std::mem::take(&mut self.after_return) {
            piece = piece.strip_prefix(b"\n").unwrap_or(piece);
        }
        while let Some(end) = memchr::memchr2(b'\r', b'\n', piece) {
            let (head, rest) = piece.split_at(end);
            self.push(head)?;
            events.extend(self.end_line()?);
            piece = match rest {
                [b'\r', b'\n', rest @ ..] => rest,
                [b'\r'] => {
                    self.after_return = true;
                    &[]
                }
                [_, rest @ ..] => rest,
                [] => &[],
            };
        }
        self.push(piece)?;
        Ok(events)
    }

    fn push(&mut self, bytes: &[u8]) -> Result<(), Unreadable> {
        if self.line.len() + bytes.len() > MAX_EVENT {
            return Err(Unreadable);
        }
        self.line.extend_from_slice(bytes);
        Ok(())
    }

    fn end_line(&mut self) -> Result<Option<Event>, Unreadable> {
        let line = std::mem::take(&mut self.line);
        let mut line = std::str::from_utf8(&line).map_err(|_| Unreadable)?;
        if !std::mem::replace(&mut self.begun, true) {
            line = line.strip_prefix('\u{feff}').unwrap_or(line);
        }
        if line.is_empty() {
            return Ok(self.dispatch());
        }
        let (field, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "event" => value.clone_into(&mut self.event.name),
            "data" => {
                if self.event.data.len() + value.len() > MAX_EVENT {
                    return Err(Unreadable);
                }
                if std::mem::replace(&mut self.has_data, true) {
                    self.event.data.push('\n');
                }
                self.event.data.push_str(value);
            }
            "id" if !value.contains('\0') => value.clone_into(&mut self.event.id),
            // A comment, or a field that is not known.
            _ => {}
        }
        Ok(None)
    }

    /// The event that an empty line ends; without data it is none.
    fn dispatch(&mut self) -> Option<Event> {
        let next = Event { id: self.event.id.clone(), ..Event::default() };
        let event = std::mem::replace(&mut self.event, next);
        std::mem::take(&mut self.has_data).then_some(event)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(name: &str, id: &str, data: &str) -> Event {
        Event { name: name.into(), id: id.into(), data: data.into() }
    }

    const STREAM: &str = "\u{feff}: hello\n\nevent: envelope\nid: 1\ndata: {\"a\":1}\n\n\
        event:envelope\r\nid:2\r\ndata: x\r\ndata:  y\r\ndata\r\n\r\nid: 3\rdata: é\r\r\
        retry: 1\nevent: nothing\n\nid: a\0b\ndata: last\n\ndata: torn";

    fn expected() -> Vec<Event> {
        vec![
            event("envelope", "1", "{\"a\":1}"),
            event("envelope", "2", "x\n y\n"),
            event("", "3", "é"),
            event("", "3", "last"),
        ]
    }

    #[test]
    fn events_are_the_same_however_they_are_torn() {
        let bytes = STREAM.as_bytes();
        assert_eq!(Parser::default().feed(bytes).unwrap(), expected());
        for size in 1..bytes.len() {
            let mut parser = Parser::default();
            let pieces = bytes.chunks(size).flat_map(|piece| parser.feed(piece).unwrap());
            assert_eq!(pieces.collect::<Vec<_>>(), expected(), "{size}");
        }
    }

    #[test]
    fn lines_and_events_are_bounded() {
        let mut parser = Parser::default();
        assert_eq!(parser.feed(&vec![b'x'; MAX_EVENT]), Ok(vec![]));
        assert_eq!(parser.feed(b"x"), Err(Unreadable));
        let mut parser = Parser::default();
        let line = format!("data: {}\n", "x".repeat(MAX_EVENT / 2));
        assert_eq!(parser.feed(line.as_bytes()), Ok(vec![]));
        assert_eq!(parser.feed(line.as_bytes()), Ok(vec![]));
        assert_eq!(parser.feed(line.as_bytes()), Err(Unreadable));
        assert_eq!(Parser::default().feed(b"data: \xff\n"), Err(Unreadable));
    }
}
