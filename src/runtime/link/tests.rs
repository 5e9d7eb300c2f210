//! Links over in-memory streams, with paused time: deadlines are exact and nothing sleeps.

use proptest::prelude::*;
use tokio::io::{DuplexStream, duplex};
use tokio::task::JoinHandle;

use super::*;
use crate::mesh::wire::frame::{Command, ManageRequest};
use crate::mesh::wire::scope::Scope;

const ID: SessionId = SessionId(9);

struct Rig {
    /// The peer's end.
    peer: DuplexStream,
    link: Arc<Link>,
    inputs: Inputs,
    running: JoinHandle<ClosedReason>,
}

impl Rig {
    /// A link whose stream holds `pipe` bytes each way. The announcement has been handled.
    async fn start(limits: LinkLimits, pipe: usize) -> Self {
        let mut rig = Self::unheard(limits, pipe);
        assert!(matches!(rig.inputs.recv().await, Some(Input::Tick)));
        rig
    }

    /// As [`Rig::start`], with the announcement still in the queue.
    fn unheard(limits: LinkLimits, pipe: usize) -> Self {
        let shared = Arc::new(LinkShared::new(limits));
        Self::on(&shared, pipe)
    }

    fn on(shared: &Arc<LinkShared>, pipe: usize) -> Self {
        let (peer, stream) = duplex(pipe);
        let link = Arc::new(Link::new(ID, true, shared));
        let (sender, inputs) = inputs(64);
        let running = {
            let link = Arc::clone(&link);
            tokio::spawn(async move { run(stream, &link, Input::Tick, &sender).await })
        };
        Self { peer, link, inputs, running }
    }

    async fn frame(&mut self) -> Checked {
        match self.inputs.recv().await {
            Some(Input::Frame { session: ID, frame }) => frame,
            _ => panic!("no frame"),
        }
    }

    async fn ended(self) -> ClosedReason {
        self.running.await.unwrap()
    }
}

fn request(id: u64, bytes: usize) -> Frame {
    Frame::ManageRequest(ManageRequest {
        request_id: id,
        command: Command {
            verb: "room:member".into(),
            params: Value::map([("text", Value::Text("x".repeat(bytes)))]),
        },
        scope: Scope { kind: "room".into(), path: None },
        token: None,
    })
}

fn id_of(frame: &Checked) -> u64 {
    match frame {
        Checked::Request { id, .. } => *id,
        other => panic!("{other:?}"),
    }
}

fn encoded(frame: &Frame) -> Vec<u8> {
    let body = frame.encode();
    [&u32::try_from(body.len()).unwrap().to_be_bytes()[..], &body].concat()
}

fn announced(length: u32) -> [u8; 4] {
    length.to_be_bytes()
}

#[tokio::test(start_paused = true)]
async fn a_length_over_the_limit_ends_the_link_without_being_read() {
    let mut rig = Rig::start(LinkLimits::default(), 64).await;
    rig.peer.write_all(&announced(MAX_FRAME_QUARANTINED + 1)).await.unwrap();
    assert!(rig.inputs.recv().await.is_none());
    assert_eq!(rig.ended().await, ClosedReason::FrameTooLarge);

    let mut rig = Rig::start(LinkLimits::default(), 64).await;
    rig.link.admit();
    rig.peer.write_all(&announced(MAX_FRAME + 1)).await.unwrap();
    assert_eq!(rig.ended().await, ClosedReason::FrameTooLarge);
}

#[tokio::test(start_paused = true)]
async fn a_long_first_frame_waits_for_the_verdict_on_its_sender() {
    let first = request(1, 100_000);
    for admitted in [true, false] {
        let mut rig = Rig::unheard(LinkLimits::default(), 1 << 20);
        rig.peer.write_all(&encoded(&first)).await.unwrap();
        assert!(matches!(rig.inputs.recv().await, Some(Input::Tick)));
        // The link has had every chance to look at the length by now.
        tokio::time::sleep(Duration::from_secs(3600)).await;
        assert!(!rig.running.is_finished());
        if admitted {
            rig.link.admit();
            assert_eq!(id_of(&rig.frame().await), 1);
        } else {
            assert!(rig.inputs.recv().await.is_none());
            assert_eq!(rig.ended().await, ClosedReason::FrameTooLarge);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn empty_frames_and_what_is_not_canonical_end_the_link_after_the_frames_before() {
    for bad in [&b"\0\0\0\0"[..], b"\0\0\0\x02\xbf\xff", b"\0\0\0\x03abc", b"\0\0\0\x01\xff"] {
        let mut rig = Rig::start(LinkLimits::default(), 4096).await;
        rig.peer.write_all(&encoded(&request(5, 10))).await.unwrap();
        rig.peer.write_all(bad).await.unwrap();
        assert_eq!(id_of(&rig.frame().await), 5);
        assert!(rig.inputs.recv().await.is_none());
        assert_eq!(rig.ended().await, ClosedReason::NotCanonical, "{bad:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn unknown_and_malformed_frames_are_counted_and_passed_over() {
    let mut rig = Rig::start(LinkLimits::default(), 4096).await;
    for odd in [
        Value::map([("type", Value::Text("hologram".into()))]),
        Value::map([("type", Value::Text("gossip".into()))]),
        Value::Uint(7),
    ] {
        let body = odd.encode();
        let length = u32::try_from(body.len()).unwrap();
        rig.peer.write_all(&[&announced(length)[..], &body].concat()).await.unwrap();
    }
    rig.peer.write_all(&encoded(&request(6, 1))).await.unwrap();
    assert_eq!(id_of(&rig.frame().await), 6);
    assert_eq!(rig.link.shared.frames_dropped(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_frame_once_begun_must_go_on_but_silence_between_frames_is_free() {
    let stall = LinkLimits::default().read_stall;
    let frame = encoded(&request(1, 1000));
    for cut in [1, 3, 4, 500, frame.len() - 1] {
        let mut rig = Rig::start(LinkLimits::default(), 4096).await;
        tokio::time::sleep(Duration::from_secs(86_400)).await;
        assert!(!rig.running.is_finished());
        let begun = Instant::now();
        rig.peer.write_all(&frame[..cut]).await.unwrap();
        assert!(rig.inputs.recv().await.is_none());
        assert_eq!(begun.elapsed().as_secs(), stall.as_secs(), "cut at {cut}");
        assert_eq!(rig.ended().await, ClosedReason::SlowFrame);
    }
}

#[tokio::test(start_paused = true)]
async fn a_frame_that_trickles_is_ended_by_its_speed() {
    let limits = LinkLimits { read_rate: 1000, ..LinkLimits::default() };
    let stall = limits.read_stall;
    let mut rig = Rig::start(limits, 4096).await;
    let begun = Instant::now();
    rig.peer.write_all(&announced(60_000)).await.unwrap();
    // A byte a second never stalls, but would take 60,000 s.
    while rig.peer.write_all(b"x").await.is_ok() {
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert_eq!(rig.ended().await, ClosedReason::SlowFrame);
    let took = begun.elapsed();
    let allowed = stall + Duration::from_secs(60);
    assert!(took >= allowed && took <= allowed + Duration::from_secs(2), "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn only_a_few_large_frames_are_read_at_the_same_time() {
    let mut rigs = Vec::new();
    let shared = Arc::new(LinkShared::new(LinkLimits::default()));
    for _ in 0..20 {
        let mut rig = Rig::on(&shared, 256);
        rig.link.admit();
        rig.peer.write_all(&announced(MAX_FRAME)).await.unwrap();
        rigs.push(rig);
    }
    let finished = |rigs: &[Rig]| rigs.iter().filter(|rig| rig.running.is_finished()).count();
    tokio::time::sleep(LinkLimits::default().read_stall / 2).await;
    assert_eq!(shared.large_same_user.available_permits(), 0);
    assert_eq!(finished(&rigs), 0);
    // Those that were read are ended for not going on; the others have waited without blame.
    tokio::time::sleep(LinkLimits::default().read_stall).await;
    assert_eq!(finished(&rigs), LARGE_FRAMES_SAME_USER);
}

#[test]
fn memory_follows_what_has_come_not_what_was_announced() {
    let mut body = Vec::new();
    for came in 0..1_000_000 {
        make_room(&mut body, 1 << 26);
        assert!(body.capacity() <= 2 * came + FIRST_RESERVE, "{} for {came}", body.capacity());
        body.push(0);
    }
    let mut short = Vec::new();
    make_room(&mut short, 100);
    assert_eq!(short.capacity(), 100);
}

#[tokio::test(start_paused = true)]
async fn a_flooding_peer_is_read_no_faster_than_the_node_handles() {
    let limits = LinkLimits { frames_ahead: 4, ..LinkLimits::default() };
    let mut rig = Rig::start(limits, 1024).await;
    let peer = tokio::spawn(async move {
        for id in 0..500 {
            rig.peer.write_all(&encoded(&request(id, 100))).await.unwrap();
        }
        rig.peer
    });
    for id in 0..500 {
        let frame = rig.inputs.recv().await;
        let Some(Input::Frame { frame, .. }) = frame else { panic!("no frame") };
        assert_eq!(id_of(&frame), id);
        // Everything else has come to rest.
        tokio::time::sleep(Duration::from_millis(1)).await;
        assert!(rig.inputs.waiting() <= 3, "{}", rig.inputs.waiting());
    }
    drop(peer.await.unwrap());
    assert!(rig.inputs.recv().await.is_none());
    assert_eq!(rig.running.await.unwrap(), ClosedReason::PeerClosed);
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_does_not_read_is_closed_when_too_much_waits() {
    let limits = LinkLimits { queued_frames: 10, ..LinkLimits::default() };
    let rig = Rig::start(limits, 64).await;
    for id in 0..1000 {
        rig.link.send(request(id, 100_000));
    }
    assert_eq!(rig.link.shared.queued_bytes(), 0);
    assert_eq!(rig.ended().await, ClosedReason::SlowConsumer);
}

#[tokio::test(start_paused = true)]
async fn memory_is_bounded_per_peer_and_for_all_together() {
    let limits = LinkLimits {
        queued_bytes: 50_000,
        queued_bytes_total: 60_000,
        queued_share: 5_000,
        ..LinkLimits::default()
    };
    let shared = Arc::new(LinkShared::new(limits));
    let links: Vec<_> = (0..3).map(|id| Link::new(SessionId(id), true, &shared)).collect();
    for id in 0..4 {
        links[0].send(request(id, 10_000));
    }
    assert!(links[0].queue.lock().closing.is_none());
    // Not much waits for the second, though all together have too much.
    links[1].send(request(0, 10_000));
    links[1].send(request(1, 4_000));
    links[2].send(request(1, 4_000));
    assert!(links[2].queue.lock().closing.is_none());
    links[1].send(request(2, 10_000));
    assert_eq!(links[1].queue.lock().closing, Some(ClosedReason::SlowConsumer));
    links[0].send(request(9, 10_000));
    assert_eq!(links[0].queue.lock().closing, Some(ClosedReason::SlowConsumer));
    drop(links);
    assert_eq!(shared.queued_bytes(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_stops_reading_is_closed_after_a_while() {
    let limits = LinkLimits::default();
    let stall = limits.write_stall;
    let rig = Rig::start(limits, 64).await;
    let begun = Instant::now();
    rig.link.send(request(1, 1000));
    let Rig { peer, running, .. } = rig;
    assert_eq!(running.await.unwrap(), ClosedReason::SlowConsumer);
    assert_eq!(begun.elapsed().as_secs(), stall.as_secs());
    drop(peer);
}

#[tokio::test(start_paused = true)]
async fn closing_writes_what_was_queued_and_then_ends_the_stream() {
    let mut rig = Rig::start(LinkLimits::default(), 512).await;
    let mut expected = Vec::new();
    for id in 0..300 {
        let frame = request(id, 700);
        expected.extend(encoded(&frame));
        rig.link.send(frame);
    }
    rig.link.close(ClosedReason::Requested("enough"));
    rig.link.close(ClosedReason::Requested("too late"));
    rig.link.send(request(999, 1));
    let mut read = Vec::new();
    rig.peer.read_to_end(&mut read).await.unwrap();
    assert!(read == expected);
    drop(rig.peer);
    assert_eq!(rig.running.await.unwrap(), ClosedReason::Requested("enough"));
}

#[tokio::test(start_paused = true)]
async fn last_words_are_written_even_when_nobody_hears_the_peer_any_more() {
    let rig = Rig::start(LinkLimits::default(), 512).await;
    let Rig { mut peer, link, inputs, running } = rig;
    drop(inputs);
    peer.write_all(&encoded(&request(1, 10))).await.unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let last = request(2, 5000);
    link.send(last.clone());
    link.close(ClosedReason::Shutdown);
    let mut read = Vec::new();
    peer.read_to_end(&mut read).await.unwrap();
    assert!(read == encoded(&last));
    drop(peer);
    assert_eq!(running.await.unwrap(), ClosedReason::Shutdown);
}

#[tokio::test(start_paused = true)]
async fn closing_does_not_wait_for_a_peer_that_has_stopped() {
    let limits = LinkLimits::default();
    let patience = limits.close;
    let rig = Rig::start(limits, 64).await;
    rig.link.send(request(1, 10_000));
    let begun = Instant::now();
    rig.link.close(ClosedReason::Requested("enough"));
    let Rig { peer, running, .. } = rig;
    assert_eq!(running.await.unwrap(), ClosedReason::Requested("enough"));
    assert_eq!(begun.elapsed().as_secs(), patience.as_secs());
    drop(peer);
}

#[tokio::test(start_paused = true)]
async fn queued_frames_leave_together_and_whole() {
    let mut rig = Rig::start(LinkLimits::default(), 1 << 20).await;
    let frames: Vec<_> = (0..32).map(|id| request(id, 1024)).collect();
    let all: Vec<u8> = frames.iter().flat_map(encoded).collect();
    for frame in frames {
        rig.link.send(frame);
    }
    let mut read = vec![0; all.len() + 1];
    // One read takes one write of the other end.
    let count = rig.peer.read(&mut read).await.unwrap();
    assert!(read[..count] == all);
}

#[tokio::test(start_paused = true)]
async fn large_frames_give_their_place_back() {
    let mut rig = Rig::start(LinkLimits::default(), 1 << 20).await;
    rig.link.admit();
    let peer = tokio::spawn(async move {
        for id in 0..20 {
            rig.peer.write_all(&encoded(&request(id, 300_000))).await.unwrap();
        }
        rig.peer
    });
    for id in 0..20 {
        let frame = rig.inputs.recv().await;
        let Some(Input::Frame { frame, .. }) = frame else { panic!("no frame") };
        assert_eq!(id_of(&frame), id);
    }
    drop(peer.await.unwrap());
    assert!(rig.inputs.recv().await.is_none());
    assert_eq!(rig.link.shared.large_same_user.available_permits(), LARGE_FRAMES_SAME_USER);
}

#[test]
fn a_closed_reason_has_a_word() {
    assert_eq!(ClosedReason::Requested("own_device").as_str(), "own_device");
    let of = |kind: std::io::ErrorKind| ClosedReason::of_error(&kind.into()).as_str();
    assert_eq!(of(std::io::ErrorKind::UnexpectedEof), "peer_closed");
    assert_eq!(of(std::io::ErrorKind::InvalidData), "tls_failed");
    assert_eq!(of(std::io::ErrorKind::StorageFull), "io_error");
}

fn paused() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap()
}

proptest! {
    /// However the stream is cut, the same frames come out.
    #[test]
    fn cuts_do_not_matter(
        sizes in prop::collection::vec(0usize..3000, 1..20),
        cuts in prop::collection::vec(1usize..2000, 1..50),
    ) {
        paused().block_on(async {
            let all: Vec<u8> = sizes
                .iter()
                .zip(0..)
                .flat_map(|(size, id)| encoded(&request(id, *size)))
                .collect();
            let mut rig = Rig::start(LinkLimits::default(), 1 << 20).await;
            let mut rest = all.as_slice();
            for cut in cuts.iter().cycle() {
                let (now, later) = rest.split_at((*cut).min(rest.len()));
                rig.peer.write_all(now).await.unwrap();
                rest = later;
                if rest.is_empty() {
                    break;
                }
                tokio::task::yield_now().await;
            }
            for (size, id) in sizes.iter().zip(0..) {
                let Checked::Request { id: found, params, .. } = rig.frame().await else {
                    panic!("no request")
                };
                assert_eq!(found, id);
                assert_eq!(params.get("text").unwrap().as_text().unwrap().len(), *size);
            }
        });
    }

    /// Any bytes end in a reason, never in a panic or a hang.
    #[test]
    fn any_bytes_come_to_an_end(
        bytes in prop::collection::vec(any::<u8>(), 0..300),
        admitted: bool,
    ) {
        let reason = paused().block_on(async {
            let mut rig = Rig::unheard(LinkLimits::default(), 1 << 20);
            if admitted {
                rig.link.admit();
            }
            rig.peer.write_all(&bytes).await.unwrap();
            let Rig { peer, mut inputs, running, .. } = rig;
            drop(peer);
            while inputs.recv().await.is_some() {}
            running.await.unwrap()
        });
        prop_assert!(matches!(
            reason,
            ClosedReason::PeerClosed | ClosedReason::NotCanonical | ClosedReason::FrameTooLarge
        ));
    }
}
