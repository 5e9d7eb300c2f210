//! Hubs over real loopback sockets, without a node: each test reads the inputs itself.

use super::*;
use crate::codec::cbor::Value;
use crate::codec::time::UnixMillis;
use crate::identity::certificate::self_signed;
use crate::mesh::checked::Checked;
use crate::mesh::wire::frame::{Command, Frame, ManageRequest, ManageResponse, Outcome};
use crate::mesh::wire::scope::Scope;

/// Longest wait for anything that must come; only a failing test waits so long.
const PATIENCE: Duration = Duration::from_secs(20);
/// Some moment at which certificates are made.
const NOW: UnixMillis = UnixMillis(1_795_989_097_142);

fn device(seed: u8) -> (DeviceKey, Certificate) {
    let key = DeviceKey::from_scalar(&[seed; 32]).unwrap();
    let certificate = self_signed(&key, NOW, &[seed; 16]).unwrap();
    (key, certificate)
}

/// A hub with one device.
struct End {
    hub: Hub,
    inputs: Inputs,
    id: DeviceId,
    port: u16,
}

impl End {
    fn new(seed: u8) -> Self {
        Self::with(seed, TransportLimits::default())
    }

    fn with(seed: u8, limits: TransportLimits) -> Self {
        let (key, certificate) = device(seed);
        let (hub, inputs) = Hub::new(HubOptions { daemon: key.id(), port: 0, limits });
        let port = hub.add_device(&key, &certificate).unwrap();
        Self { hub, inputs, id: key.id(), port }
    }

    async fn next(&mut self) -> Input {
        timeout(PATIENCE, self.inputs.recv()).await.expect("nothing came").unwrap()
    }

    fn dial(&self, port: u16) {
        let target = DialTarget::Loopback(port);
        let dial = Output::Dial { dial: DialId(1), local: self.id, target, expect: None };
        assert!(self.hub.execute(dial).is_none());
    }

    fn send(&self, session: SessionId, frame: Frame) {
        assert!(self.hub.execute(Output::Send { session, frame }).is_none());
    }

    fn close(&self, session: SessionId, reason: &'static str) {
        assert!(self.hub.execute(Output::Close { session, reason }).is_none());
    }

    fn admit(&self, session: SessionId) {
        assert!(self.hub.execute(Output::Admitted { session }).is_none());
    }

    async fn accepted(&mut self) -> (SessionId, DeviceId, SessionKind, Origin) {
        match self.next().await {
            Input::Accepted { session, local, remote, kind, origin } => {
                assert_eq!(local, self.id);
                (session, remote, kind, origin)
            }
            other => panic!("{}", name(&other)),
        }
    }

    async fn dialled(&mut self) -> (SessionId, DeviceId, Origin) {
        match self.next().await {
            Input::Dialled { dial: DialId(1), session, remote, origin } => {
                (session, remote, origin)
            }
            other => panic!("{}", name(&other)),
        }
    }

    async fn frame(&mut self) -> (SessionId, Checked) {
        match self.next().await {
            Input::Frame { session, frame } => (session, frame),
            other => panic!("{}", name(&other)),
        }
    }

    async fn closed(&mut self) -> (SessionId, &'static str) {
        match self.next().await {
            Input::Closed { session, reason } => (session, reason),
            other => panic!("{}", name(&other)),
        }
    }

    async fn dial_failed(&mut self) -> &'static str {
        match self.next().await {
            Input::DialFailed { dial: DialId(1), reason } => reason,
            other => panic!("{}", name(&other)),
        }
    }
}

fn name(input: &Input) -> String {
    match input {
        Input::Accepted { .. } => "Accepted".into(),
        Input::Dialled { .. } => "Dialled".into(),
        Input::DialFailed { reason, .. } => format!("DialFailed {reason}"),
        Input::Frame { frame, .. } => format!("Frame {frame:?}"),
        Input::Closed { reason, .. } => format!("Closed {reason}"),
        Input::PortBound => "PortBound".into(),
        Input::PortBindFailed { in_use } => format!("PortBindFailed {in_use}"),
        Input::Datagram { .. } => "Datagram".into(),
        Input::LocalAddresses(_) => "LocalAddresses".into(),
        _ => "another input".into(),
    }
}

/// Two hubs with a link from the first to the second.
async fn linked(limits: TransportLimits) -> (End, SessionId, End, SessionId) {
    let (mut a, mut b) = (End::with(1, limits.clone()), End::with(2, limits));
    a.dial(b.port);
    let (a_session, remote, origin) = a.dialled().await;
    assert_eq!((remote, origin), (b.id, Origin::SameUser));
    let (b_session, remote, kind, origin) = b.accepted().await;
    assert_eq!((remote, kind, origin), (a.id, SessionKind::DataAccepted, Origin::SameUser));
    (a, a_session, b, b_session)
}

fn request(id: u64, text: String) -> Frame {
    Frame::ManageRequest(ManageRequest {
        request_id: id,
        command: Command {
            verb: "room:member".into(),
            params: Value::map([("text", Value::Text(text))]),
        },
        scope: Scope { kind: "room".into(), path: None },
        token: None,
    })
}

fn text_of(frame: Checked) -> (u64, String) {
    match frame {
        Checked::Request { id, params, .. } => {
            (id, params.get("text").unwrap().as_text().unwrap().to_owned())
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn two_hubs_exchange_frames() {
    let (mut a, a_session, mut b, b_session) = linked(TransportLimits::default()).await;
    a.send(a_session, request(7, "hello".into()));
    let (session, frame) = b.frame().await;
    assert_eq!(session, b_session);
    assert_eq!(text_of(frame), (7, "hello".to_owned()));
    let outcome = Outcome::error("no", None);
    b.send(b_session, Frame::ManageResponse(ManageResponse { request_id: 7, outcome }));
    let (session, frame) = a.frame().await;
    assert_eq!(session, a_session);
    let Checked::Response { id: 7, outcome: Outcome::Error { code, .. } } = frame else {
        panic!("{frame:?}")
    };
    assert_eq!(code, "no");
    b.close(b_session, "enough");
    assert_eq!(b.closed().await, (b_session, "enough"));
    assert_eq!(a.closed().await, (a_session, "peer_closed"));
    assert_eq!(a.hub.status().links, 0);
    a.hub.shutdown(PATIENCE).await;
    b.hub.shutdown(PATIENCE).await;
}
