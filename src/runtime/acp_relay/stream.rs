//! A mailbox as server-sent events (design 11.1): each envelope an event with its cursor as id, a
//! comment when nothing else was said for a while. Reading deletes nothing.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use futures_util::stream::{Stream, unfold};
use hyper::body::{Bytes, Frame};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use super::feed::Feed;
use crate::acp::relay::Cursor;

/// Silence after which a comment is sent (design 11.1).
const COMMENT_EVERY: Duration = Duration::from_secs(15);

struct Events {
    feed: Feed,
    ready: VecDeque<Bytes>,
    ends: Instant,
    stop: CancellationToken,
}

fn comment() -> Bytes {
    Bytes::from_static(b":\n\n")
}

/// Canonical JSON has no line feed, so an envelope is one line.
fn event(cursor: Cursor, envelope: &[u8]) -> Bytes {
    let head = format!("event: envelope\nid: {cursor}\ndata: ").into_bytes();
    [head.as_slice(), envelope, b"\n\n"].concat().into()
}

/// The body of the answer. It ends at `ends`, when the relay stops, and when it cannot read its store.
pub(super) fn events(
    feed: Feed,
    ends: Instant,
    stop: CancellationToken,
) -> impl Stream<Item = Result<Frame<Bytes>, Infallible>> {
    // The first comment shows that the stream is there.
    let events = Events { feed, ready: VecDeque::from([comment()]), ends, stop };
    unfold(events, async |mut events| {
        if events.ready.is_empty() {
            let quiet_until = Instant::now() + COMMENT_EVERY;
            let page = tokio::select! {
                () = events.stop.cancelled() => return None,
                () = sleep_until(events.ends) => return None,
                () = sleep_until(quiet_until) => None,
                page = events.feed.next() => Some(page.ok()?),
            };
            match page {
                Some(page) => events.ready.extend(page.iter().map(|(c, json)| event(*c, json))),
                None => events.ready.push_back(comment()),
            }
        }
        let next = events.ready.pop_front()?;
        Some((Ok(Frame::data(next)), events))
    })
}
