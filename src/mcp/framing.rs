//! The two framings of MCP on stdio: a JSON text a line, and `Content-Length` heads before bodies, as
//! language servers have them. Each message may have either; the first one decides how answers are
//! framed. Inside, there are only lines: what reads and writes them stays as it is.
//!
//! A line passes through as it came. A head that cannot be used ends the input, since nobody knows
//! where the next message would begin; before that, a line that is no JSON stands for it, so that it
//! is answered.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Bytes of a body: as of a line.
const MAX_BODY: usize = super::transport::MAX_LINE;
/// Bytes of a head: two lines, and room for what some client adds.
const MAX_HEAD: usize = 4096;
/// A body that is too large is passed over up to this; a head that says more is nonsense.
const MAX_SKIPPED: usize = 1 << 30;
/// What heads begin with, and no JSON text does.
const HEAD: &[u8] = b"content-";
/// What is read at once; a buffered reader asks for as much.
const READ: usize = 8 * 1024;

/// How messages are told apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// A line each.
    Lines,
    /// A head with `Content-Length` each.
    Heads,
}

#[derive(Debug)]
enum State {
    /// Between messages.
    Start,
    /// So many bytes of a message agree with [`HEAD`]; they are held back.
    Held(Vec<u8>),
    /// In a line.
    Line,
    /// In a head.
    Head(Vec<u8>),
    /// In a body, of which so much is left.
    Body(usize),
    /// In a body that is not taken.
    Skipped(usize),
    /// Nothing more is read.
    Over,
}

/// Turns bytes of both framings into lines. Knows no JSON.
#[derive(Debug)]
pub struct Decoder {
    state: State,
    form: Option<Form>,
}

impl Default for Decoder {
    fn default() -> Self {
        Self { state: State::Start, form: None }
    }
}

impl Decoder {
    /// The framing of the first message, once it has begun.
    #[must_use]
    pub const fn form(&self) -> Option<Form> {
        self.form
    }

    /// Whether the input is over because a head could not be used.
    #[must_use]
    pub const fn is_over(&self) -> bool {
        matches!(self.state, State::Over)
    }

    /// Takes bytes in, and adds to `out` the lines that they make, whole or in part.
    pub fn feed(&mut self, mut input: &[u8], out: &mut Vec<u8>) {
        while let Some((&first, rest)) = input.split_first() {
            match &mut self.state {
                State::Start if first.is_ascii_whitespace() => {
                    out.push(first);
                    input = rest;
                }
                State::Start => self.state = State::Held(Vec::new()),
                State::Held(held) => {
                    if HEAD.get(held.len()) == Some(&first.to_ascii_lowercase()) {
                        held.push(first);
                        input = rest;
                        if held.len() == HEAD.len() {
                            let head = std::mem::take(held);
                            self.begin(Form::Heads, State::Head(head));
                        }
                    } else {
                        out.append(held);
                        self.begin(Form::Lines, State::Line);
                    }
                }
                State::Line => {
                    let end = memchr::memchr(b'\n', input).map(|at| at + 1);
                    let (line, rest) = input.split_at(end.unwrap_or(input.len()));
                    out.extend_from_slice(line);
                    if end.is_some() {
                        self.state = State::Start;
                    }
                    input = rest;
                }
                State::Head(head) => {
                    head.push(first);
                    input = rest;
                    if head.ends_with(b"\n\r\n") || head.ends_with(b"\n\n") {
                        self.state = body(head, out);
                    } else if head.len() == MAX_HEAD {
                        self.state = refuse("a head of more than 4096 bytes", out);
                    }
                }
                State::Body(left) => {
                    let (part, rest) = input.split_at(input.len().min(*left));
                    // Line ends are only between the tokens of a JSON text, where blanks may be.
                    let blank =
                        |byte: &u8| if matches!(byte, b'\n' | b'\r') { b' ' } else { *byte };
                    out.extend(part.iter().map(blank));
                    *left -= part.len();
                    if *left == 0 {
                        out.push(b'\n');
                        self.state = State::Start;
                    }
                    input = rest;
                }
                State::Skipped(left) => {
                    let (part, rest) = input.split_at(input.len().min(*left));
                    *left -= part.len();
                    if *left == 0 {
                        self.state = State::Start;
                    }
                    input = rest;
                }
                State::Over => return,
            }
        }
    }

    /// The input has ended: what was held back is the end of a line, and a head that is not whole
    /// cannot be used.
    pub fn finish(&mut self, out: &mut Vec<u8>) {
        match &mut self.state {
            State::Held(held) => out.append(held),
            State::Head(_) => {
                refuse("a head without an end", out);
            }
            _ => {}
        }
        self.state = State::Over;
    }

    fn begin(&mut self, form: Form, state: State) {
        self.form.get_or_insert(form);
        self.state = state;
    }
}

/// What follows a head.
fn body(head: &[u8], out: &mut Vec<u8>) -> State {
    match content_length(head) {
        Err(reason) => refuse(reason, out),
        Ok(length) if length > MAX_SKIPPED => refuse("a body of more than 1 GiB", out),
        Ok(length) if length > MAX_BODY => {
            refuse("a body of more than 16 MiB", out);
            State::Skipped(length)
        }
        Ok(0) => State::Start,
        Ok(length) => State::Body(length),
    }
}

/// Says in a line that is no JSON why a message is not taken.
fn refuse(reason: &str, out: &mut Vec<u8>) -> State {
    out.extend_from_slice(b"Content-Length refused: ");
    out.extend_from_slice(reason.as_bytes());
    out.push(b'\n');
    State::Over
}

/// The one `Content-Length` of a head; other fields are passed over.
fn content_length(head: &[u8]) -> Result<usize, &'static str> {
    let head = std::str::from_utf8(head).map_err(|_| "a head that is no text")?;
    let mut length = None;
    for line in head.lines().filter(|line| !line.is_empty()) {
        let (name, value) = line.split_once(':').ok_or("a line in a head without a colon")?;
        if !name.eq_ignore_ascii_case("content-length") {
            continue;
        }
        let value = value.trim_matches([' ', '\t']);
        let digits = !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit());
        let number = digits.then(|| value.parse().ok()).flatten();
        let number = number.ok_or("a Content-Length that is no number")?;
        if length.replace(number).is_some() {
            return Err("two Content-Lengths");
        }
    }
    length.ok_or("a head without Content-Length")
}

/// Both directions of one client: what it sends as lines, and lines as it wants them.
#[must_use]
pub fn framed<R, W>(input: R, output: W) -> (FrameReader<R>, FrameWriter<W>) {
    let form = Arc::new(OnceLock::new());
    let reader = FrameReader {
        input,
        decoder: Decoder::default(),
        form: Arc::clone(&form),
        buffer: vec![0; READ].into(),
        ready: Vec::new(),
        given: 0,
        ended: false,
    };
    let writer = FrameWriter { output, form, line: Vec::new(), frame: Vec::new(), written: 0 };
    (reader, writer)
}

/// Reads lines, whatever their framing was.
#[derive(Debug)]
pub struct FrameReader<R> {
    input: R,
    decoder: Decoder,
    form: Arc<OnceLock<Form>>,
    buffer: Box<[u8]>,
    /// Decoded, and given out up to `given`.
    ready: Vec<u8>,
    given: usize,
    ended: bool,
}

impl<R: AsyncRead + Unpin> AsyncRead for FrameReader<R> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        loop {
            let ready = this.ready.get(this.given..).unwrap_or_default();
            if !ready.is_empty() || buf.remaining() == 0 {
                let part = ready.get(..buf.remaining()).unwrap_or(ready);
                buf.put_slice(part);
                this.given += part.len();
                return Poll::Ready(Ok(()));
            }
            if this.ended {
                return Poll::Ready(Ok(()));
            }
            (this.given, this.ready) = (0, std::mem::take(&mut this.ready));
            this.ready.clear();
            // No more than there is room for: then a line is given out by the read that brought it.
            let most = this.buffer.len().min(buf.remaining());
            let mut fresh = ReadBuf::new(this.buffer.get_mut(..most).unwrap_or_default());
            ready!(Pin::new(&mut this.input).poll_read(cx, &mut fresh))?;
            if fresh.filled().is_empty() {
                this.decoder.finish(&mut this.ready);
            } else {
                this.decoder.feed(fresh.filled(), &mut this.ready);
            }
            this.ended = this.decoder.is_over();
            if let Some(form) = this.decoder.form() {
                let _ = this.form.set(form);
            }
        }
    }
}

/// Writes lines in the framing of the client's first message.
#[derive(Debug)]
pub struct FrameWriter<W> {
    output: W,
    form: Arc<OnceLock<Form>>,
    /// A line whose end has not come.
    line: Vec<u8>,
    /// A message with its head, written up to `written`.
    frame: Vec<u8>,
    written: usize,
}

impl<W: AsyncWrite + Unpin> FrameWriter<W> {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while let Some(rest) = self.frame.get(self.written..).filter(|rest| !rest.is_empty()) {
            let written = ready!(Pin::new(&mut self.output).poll_write(cx, rest))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.written += written;
        }
        self.frame.clear();
        self.written = 0;
        Poll::Ready(Ok(()))
    }
}

impl<W: AsyncWrite + Unpin> AsyncWrite for FrameWriter<W> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        // What is written before anything was read is a line, too.
        if this.form.get() != Some(&Form::Heads) {
            return Pin::new(&mut this.output).poll_write(cx, bytes);
        }
        ready!(this.poll_frame(cx))?;
        let end = memchr::memchr(b'\n', bytes);
        this.line.extend_from_slice(bytes.get(..end.unwrap_or(bytes.len())).unwrap_or(bytes));
        let Some(end) = end else { return Poll::Ready(Ok(bytes.len())) };
        let head = format!("Content-Length: {}\r\n\r\n", this.line.len());
        this.frame.extend_from_slice(head.as_bytes());
        this.frame.append(&mut this.line);
        Poll::Ready(Ok(end + 1))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        ready!(this.poll_frame(cx))?;
        Pin::new(&mut this.output).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        ready!(this.poll_frame(cx))?;
        Pin::new(&mut this.output).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};

    use super::*;

    /// The lines of an input that comes in pieces of `size`, whether it was over, and its form.
    fn decode(input: &[u8], size: usize) -> (String, bool, Option<Form>) {
        let (mut decoder, mut out) = (Decoder::default(), Vec::new());
        input.chunks(size).for_each(|piece| decoder.feed(piece, &mut out));
        let over = decoder.is_over();
        decoder.finish(&mut out);
        (String::from_utf8(out).unwrap(), over, decoder.form())
    }

    fn everywhere(input: &str, lines: &str, over: bool, form: Option<Form>) {
        for size in 1..=input.len().clamp(1, 64) {
            let expected = (lines.to_owned(), over, form);
            assert_eq!(decode(input.as_bytes(), size), expected, "{input:?} by {size}");
        }
    }

    #[test]
    fn messages_of_both_framings_become_lines() {
        use Form::{Heads, Lines};
        for (input, lines, form) in [
            ("", "", None),
            ("\r\n\n ", "\r\n\n ", None),
            ("{\"a\":1}\n{}\r\n\n{", "{\"a\":1}\n{}\r\n\n{", Some(Lines)),
            ("Content-Length: 2\r\n\r\n{}", "{}\n", Some(Heads)),
            ("content-LENGTH:2 \n\n{}", "{}\n", Some(Heads)),
            ("Content-Type: x; y=utf-8\r\nContent-Length:\t3\r\n\r\n[1]", "[1]\n", Some(Heads)),
            ("Content-Length: 8\r\n\r\n{\r\n\"a\":1", "{  \"a\":1\n", Some(Heads)),
            ("Content-Length: 0\r\n\r\n{}\n", "{}\n", Some(Heads)),
            ("Content-Length: 0000000002\r\n\r\n{}", "{}\n", Some(Heads)),
            // Mixed, with and without line ends between.
            (
                "{}\nContent-Length: 4\r\n\r\n{\n1}[]\n\r\nContent-Length: 1\n\n7",
                "{}\n{ 1}\n[]\n\r\n7\n",
                Some(Lines),
            ),
            ("Content-Length: 2\r\n\r\n{}{}\n", "{}\n{}\n", Some(Heads)),
            // Looks like a head and is none.
            ("cont\nContent", "cont\nContent", Some(Lines)),
            ("c", "c", None),
            // Cut off.
            ("Content-Length: 5\r\n\r\n{}", "{}", Some(Heads)),
            (
                "Content-Length: 5\r\n",
                "Content-Length refused: a head without an end\n",
                Some(Heads),
            ),
            ("\u{feff}{}\n", "\u{feff}{}\n", Some(Lines)),
        ] {
            everywhere(input, lines, false, form);
        }
        // The length counts bytes.
        everywhere("Content-Length: 4\r\n\r\n\"é\"x\n", "\"é\"\nx\n", false, Some(Heads));
    }

    #[test]
    fn heads_that_cannot_be_used_end_the_input() {
        for head in [
            "Content-Type: x\r\n\r\n",
            "Content-Length: \r\n\r\n",
            "Content-Length: -1\r\n\r\n",
            "Content-Length: +1\r\n\r\n",
            "Content-Length: 0x2\r\n\r\n",
            "Content-Length: 2, 2\r\n\r\n",
            "Content-Length: 2\r\nContent-Length: 2\r\n\r\n",
            "Content-Length: 99999999999999999999999999\r\n\r\n",
            "Content-Length: 1073741825\r\n\r\n",
            "Content-Length: 2\r\njunk\r\n\r\n",
            "Content-é\n\n",
        ] {
            let (lines, over, form) = decode(format!("{head}{{}}\n{{}}\n").as_bytes(), 5);
            assert!(over && form == Some(Form::Heads), "{head}");
            assert!(lines.starts_with("Content-Length refused: "), "{head}: {lines}");
            assert_eq!(lines.matches('\n').count(), 1, "{head}: {lines}");
        }
        let long = format!("Content-Length: 2\r\nX: {}\r\n\r\n{{}}", "x".repeat(MAX_HEAD));
        assert!(decode(long.as_bytes(), 100).1);
        let fits = "x".repeat(MAX_HEAD - "Content-Length: 2\r\nX: \r\n\r\n".len());
        everywhere(
            &format!("Content-Length: 2\r\nX: {fits}\r\n\r\n{{}}"),
            "{}\n",
            false,
            Some(Form::Heads),
        );
        let endless = "Content-".repeat(MAX_HEAD);
        assert!(decode(endless.as_bytes(), 1000).1);
    }

    #[test]
    fn large_bodies_are_passed_over() {
        let large = "x".repeat(MAX_BODY + 1);
        let input =
            format!("Content-Length: {}\r\n\r\n{large}Content-Length: 2\r\n\r\n{{}}", large.len());
        let (lines, over, _) = decode(input.as_bytes(), 1 << 20);
        assert!(!over && lines.ends_with("16 MiB\n{}\n") && lines.len() < 100, "{lines}");
        let most = &large[1..];
        let input = format!("Content-Length: {MAX_BODY}\r\n\r\n{most}");
        assert_eq!(decode(input.as_bytes(), 1 << 20).0, format!("{most}\n"));
    }

    async fn read_some(reader: &mut (impl AsyncRead + Unpin), end: &str) -> String {
        let mut text = Vec::new();
        while !text.ends_with(end.as_bytes()) {
            let mut part = [0; 5];
            let read = reader.read(&mut part).await.unwrap();
            assert!(read > 0, "{text:?}");
            text.extend_from_slice(&part[..read]);
        }
        String::from_utf8(text).unwrap()
    }

    #[tokio::test]
    async fn answers_have_the_framing_of_the_first_message() {
        let head = "Content-Length: 2\r\n\r\n{}";
        for (first, second, answer) in [
            ("{}\n", head, "{\"é\":1}\n[2]\n"),
            (head, "{}\n", "Content-Length: 8\r\n\r\n{\"é\":1}Content-Length: 3\r\n\r\n[2]"),
        ] {
            // Less than a frame fits into the pipe.
            let (client, server) = duplex(7);
            let (mut from_server, mut to_server) = tokio::io::split(client);
            let (input, output) = tokio::io::split(server);
            let (mut reader, mut writer) = framed(input, output);
            let talk = async {
                to_server.write_all(first.as_bytes()).await.unwrap();
                let text = read_some(&mut from_server, &answer[answer.len() - 4..]).await;
                to_server.write_all(second.as_bytes()).await.unwrap();
                to_server.shutdown().await.unwrap();
                text
            };
            let serve = async {
                assert_eq!(read_some(&mut reader, "{}\n").await, "{}\n");
                for part in ["{\"é\"", ":1}\n[2", "]\n"] {
                    writer.write_all(part.as_bytes()).await.unwrap();
                }
                writer.flush().await.unwrap();
                assert_eq!(read_some(&mut reader, "{}\n").await, "{}\n");
                assert_eq!(reader.read(&mut [0; 1]).await.unwrap(), 0);
            };
            let (text, ()) = tokio::join!(talk, serve);
            assert_eq!(text, answer);
        }
    }

    #[tokio::test]
    async fn the_end_of_a_refused_input_is_an_end() {
        let input = &b"Content-Length: x\r\n\r\n{}\n"[..];
        let (mut reader, _) = framed(input, tokio::io::sink());
        let mut text = String::new();
        reader.read_to_string(&mut text).await.unwrap();
        assert_eq!(text, "Content-Length refused: a Content-Length that is no number\n");
    }
}
