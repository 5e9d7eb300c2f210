//! The transport against Node's own TLS and UDP, which the reference is built on. Skipped visibly
//! where there is no `node`.
#![allow(clippy::print_stderr)]

use std::net::Ipv4Addr;
use std::process::Stdio;
use std::time::{Duration, Instant};

use commsd::codec::cbor::Value;
use commsd::codec::time::UnixMillis;
use commsd::identity::certificate::{Certificate, self_signed};
use commsd::identity::device::{DeviceId, DeviceKey};
use commsd::mesh::checked::Checked;
use commsd::mesh::node::{DialId, DialTarget, Input, Output};
use commsd::mesh::session::{Origin, SessionId, SessionKind};
use commsd::mesh::wire::frame::{Command, Frame, ManageRequest, ManageResponse, Outcome};
use commsd::mesh::wire::scope::Scope;
use commsd::runtime::hub::{Hub, HubOptions, TransportLimits};
use commsd::runtime::link::Inputs;
use tokio::io::{AsyncBufReadExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout};
use tokio::time::timeout;

/// Longest wait for anything that must come; only a failing test waits so long.
const PATIENCE: Duration = Duration::from_secs(30);
/// Requests and answers, one after the other.
const ROUNDS: u64 = 25;
/// A frame held back by Nagle's algorithm until a delayed acknowledgement takes 40 ms; that many
/// rounds without any stay well below.
const PROMPT: Duration = Duration::from_millis(ROUNDS * 20);

fn device(seed: u8) -> (DeviceKey, Certificate) {
    let key = DeviceKey::from_scalar(&[seed; 32]).unwrap();
    let certificate = self_signed(&key, UnixMillis(1_795_989_097_142), &[seed; 16]).unwrap();
    (key, certificate)
}

struct End {
    hub: Hub,
    inputs: Inputs,
    id: DeviceId,
    port: u16,
}

impl End {
    fn new() -> Self {
        let (key, certificate) = device(1);
        let limits = TransportLimits::default();
        let (hub, inputs) = Hub::new(HubOptions { daemon: key.id(), port: 0, relay: None, limits });
        let port = hub.add_device(&key, &certificate).unwrap();
        Self { hub, inputs, id: key.id(), port }
    }

    async fn next(&mut self) -> Input {
        timeout(PATIENCE, self.inputs.recv()).await.expect("nothing came").unwrap()
    }

    fn send(&self, session: SessionId, frame: Frame) {
        assert!(self.hub.execute(Output::Send { session, frame }).is_none());
    }

    async fn frame(&mut self) -> Checked {
        match self.next().await {
            Input::Frame { frame, .. } => frame,
            Input::Closed { reason, .. } => panic!("closed: {reason}"),
            _ => panic!("no frame"),
        }
    }
}

struct Node {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    // Its end tells the script to leave.
    stdin: Option<ChildStdin>,
}

/// Runs a script with the variables `key` and `cert` (device 2's, PEM) and `arg`; `None` where there
/// is no `node`.
fn node(script: &str, arg: &str) -> Option<Node> {
    let (key, certificate) = device(2);
    let prelude = "const key=process.env.NODE_KEY,cert=process.env.NODE_CERT,arg=process.env.NODE_ARG;\
                   const say=(x)=>console.log(JSON.stringify(x));\
                   process.stdin.on('end',()=>process.exit()).resume();";
    let spawned = tokio::process::Command::new("node")
        .args(["-e", &format!("{prelude}{script}")])
        .env("NODE_KEY", key.to_pkcs8_pem().unwrap().as_str())
        .env("NODE_CERT", certificate.pem())
        .env("NODE_ARG", arg)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn();
    let Ok(mut child) = spawned else {
        eprintln!("skipped: there is no node here");
        return None;
    };
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let stdin = child.stdin.take();
    Some(Node { child, lines, stdin })
}

impl Node {
    async fn says(&mut self) -> serde_json::Value {
        let line = timeout(PATIENCE, self.lines.next_line()).await.expect("node says nothing");
        serde_json::from_str(&line.unwrap().expect("node has ended")).unwrap()
    }

    async fn leave(mut self) {
        drop(self.stdin.take());
        assert!(timeout(PATIENCE, self.child.wait()).await.unwrap().unwrap().success());
    }
}

fn request(id: u64) -> Frame {
    Frame::ManageRequest(ManageRequest {
        request_id: id,
        command: Command {
            verb: "room:member".into(),
            params: Value::map([("text", Value::Text("x".repeat(1024)))]),
        },
        scope: Scope { kind: "room".into(), path: None },
        token: None,
    })
}

/// Length and body written apart, as the reference does, with Nagle's algorithm on.
const WRITE_FRAME: &str = "
    const frame=(s,body)=>{const l=Buffer.alloc(4);l.writeUInt32BE(body.length);s.write(l);s.write(body)};
    const frames=(s,got)=>{let b=Buffer.alloc(0);s.on('data',(d)=>{b=Buffer.concat([b,d]);
        while(b.length>=4&&b.length>=4+b.readUInt32BE(0)){const n=b.readUInt32BE(0);
            const body=b.subarray(4,4+n);b=b.subarray(4+n);got(Buffer.from(body))}})};
    const id=(c)=>require('crypto').createHash('sha256').update(c.pubkey).digest('hex');";

#[tokio::test]
async fn nodes_tls_client_is_let_in_and_its_split_frames_are_not_waited_for() {
    let mut end = End::new();
    let script = format!(
        "{WRITE_FRAME}
        const [port,hex]=arg.split(' ');const body=Buffer.from(hex,'hex');
        const s=require('tls').connect({{host:'127.0.0.1',port:+port,key,cert,rejectUnauthorized:false}},()=>{{
            say({{peer:id(s.getPeerCertificate()),protocol:s.getProtocol()}});frame(s,body)}});
        let left={ROUNDS};
        frames(s,()=>{{if(--left)frame(s,body);else say({{done:true}})}});"
    );
    let body = data_encoding::HEXLOWER.encode(&request(5).encode());
    let Some(mut node) = node(&script, &format!("{} {body}", end.port)) else { return };
    let Input::Accepted { session, local, remote, kind, origin } = end.next().await else {
        panic!("not accepted")
    };
    assert_eq!((local, remote), (end.id, device(2).0.id()));
    assert_eq!((kind, origin), (SessionKind::DataAccepted, Origin::SameUser));
    let hello = node.says().await;
    assert_eq!(hello["peer"], end.id.hex());
    assert_eq!(hello["protocol"], "TLSv1.3");
    let mut begun = Instant::now();
    for round in 0..ROUNDS {
        let Checked::Request { id: 5, .. } = end.frame().await else { panic!("no request") };
        if round == 0 {
            begun = Instant::now();
        }
        let outcome = Outcome::ok();
        end.send(session, Frame::ManageResponse(ManageResponse { request_id: 5, outcome }));
    }
    assert_eq!(node.says().await["done"], true);
    let took = begun.elapsed();
    if cfg!(target_os = "linux") {
        assert!(took < PROMPT, "{took:?}");
    }
    node.leave().await;
    let Input::Closed { reason: "peer_closed", .. } = end.next().await else {
        panic!("not closed")
    };
}

#[tokio::test]
async fn nodes_tls_server_is_dialled_and_its_split_answers_are_not_waited_for() {
    let mut end = End::new();
    let script = format!(
        "{WRITE_FRAME}
        const server=require('tls').createServer({{key,cert,requestCert:true,rejectUnauthorized:false}},(s)=>{{
            say({{peer:id(s.getPeerCertificate())}});
            frames(s,(body)=>frame(s,body));s.on('end',()=>say({{ended:true}}))}});
        server.listen(0,'127.0.0.1',()=>say({{port:server.address().port}}));"
    );
    let Some(mut node) = node(&script, "") else { return };
    let port = u16::try_from(node.says().await["port"].as_u64().unwrap()).unwrap();
    let target = DialTarget::Loopback(port);
    end.hub.execute(Output::Dial { dial: DialId(3), local: end.id, target, expect: None });
    let Input::Dialled { dial: DialId(3), session, remote, origin } = end.next().await else {
        panic!("not dialled")
    };
    assert_eq!((remote, origin), (device(2).0.id(), Origin::SameUser));
    assert_eq!(node.says().await["peer"], end.id.hex());
    let begun = Instant::now();
    for round in 0..ROUNDS {
        end.send(session, request(round));
        let Checked::Request { id, .. } = end.frame().await else { panic!("no echo") };
        assert_eq!(id, round);
    }
    let took = begun.elapsed();
    if cfg!(target_os = "linux") {
        assert!(took < PROMPT, "{took:?}");
    }
    end.hub.execute(Output::Close { session, reason: "enough" });
    assert_eq!(node.says().await["ended"], true);
    let Input::Closed { reason: "enough", .. } = end.next().await else { panic!("not closed") };
    node.leave().await;
}

#[tokio::test]
async fn first_contact_shares_its_port_with_nodes_sockets() {
    let mut end = End::new();
    let port = end.hub.start_first_contact(0, false).unwrap();
    if !end.hub.status().multicast {
        eprintln!("skipped: no multicast on loopback here");
        return;
    }
    let Input::LocalAddresses(_) = end.next().await else { panic!("no addresses") };
    let script = "
        const u=require('dgram').createSocket({type:'udp4',reuseAddr:true});
        u.on('error',(e)=>say({error:String(e)}));
        u.on('message',(m,from)=>say({text:m.toString(),from:from.address}));
        u.bind(+arg,'0.0.0.0',()=>{u.setBroadcast(true);u.addMembership('239.255.19.77','127.0.0.1');
            u.setMulticastInterface('127.0.0.1');u.setMulticastLoopback(true);
            say({bound:true});});
        process.stdin.on('data',()=>u.send(JSON.stringify({type:'agent-comms-probe'}),+arg,'239.255.19.77'));";
    let Some(mut first) = node(script, &port.to_string()) else { return };
    assert_eq!(first.says().await["bound"], true);
    // Ours joins a port that a reference peer has as well as the other way round.
    let mut late = End::new();
    assert_eq!(late.hub.start_first_contact(port, false).unwrap(), port);
    let Input::LocalAddresses(_) = late.next().await else { panic!("no addresses") };
    let probe = br#"{"type":"agent-comms-probe"}"#.to_vec();
    end.hub.execute(Output::Datagram { group: probe.clone(), broadcast: Vec::new() });
    let heard = first.says().await;
    assert_eq!(
        (&heard["text"], &heard["from"]),
        (&r#"{"type":"agent-comms-probe"}"#.into(), &"127.0.0.1".into())
    );
    for own in [&mut end, &mut late] {
        let Input::Datagram { from, bytes } = own.next().await else { panic!("no datagram") };
        assert_eq!((from, &bytes), (Ipv4Addr::LOCALHOST.into(), &probe));
    }
    use tokio::io::AsyncWriteExt as _;
    first.stdin.as_mut().unwrap().write_all(b"probe\n").await.unwrap();
    assert_eq!(first.says().await["text"], r#"{"type":"agent-comms-probe"}"#);
    for own in [&mut end, &mut late] {
        let Input::Datagram { bytes, .. } = own.next().await else { panic!("no datagram") };
        assert_eq!(bytes, probe);
    }
    first.leave().await;
}
