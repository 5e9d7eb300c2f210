//! The mesh as a way to others, without a relay: peers are found by the names that `commsd dm` takes,
//! their bindings say which dids they are, envelopes go to them and come from them. [`Mesh`] is the
//! office's end, which asks the owner's task by a queue; the other end is below. Which device speaks,
//! and who is heard at all, is the node's (`mesh::node::acp`).

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};

use super::orders::Worker;
use super::service::Service;
use crate::acp::binding::DeviceBinding;
use crate::acp::code::{Code, Error, Result};
use crate::acp::json::canonical;
use crate::acp::owner::Route;
use crate::api::types::ApiError;
use crate::codec::cbor::Value;
use crate::codec::time::UnixMillis;
use crate::daemon::advice::todo;
use crate::daemon::owner::Owner;
use crate::daemon::vaults::word;
use crate::identity::device::{DeviceId, DeviceKey};
use crate::mesh::node::{
    AcpAsk, AcpRequest, CallId, CommandError, CommandResult, Input, OpId, SERVICE_DEADLINE_MS,
    ServiceOutcome,
};
use crate::runtime::clock::unix_now;

/// What may wait for the owner's task; whoever asks waits when it is full.
const QUEUE: usize = 256;

/// How long a binding that is given away is good, ms: it is made anew for whoever asks.
const BINDING_LIFE_MS: u64 = 24 * 3_600_000;

/// How long a peer's binding is believed here, ms: a daemon may get another identity.
const BELIEVED_MS: u64 = 10 * 60_000;

/// Bindings that are kept.
const MAX_BELIEVED: usize = 1024;

/// How long a peer has to say who it is: callers wait for that, and so does a peer's mail where its
/// binding decides whether it is let in.
const BINDING_WAIT: Duration = Duration::from_secs(5);

/// Within what an envelope is stored, before the node answers for us.
const STORE_WITHIN: Duration = Duration::from_millis(SERVICE_DEADLINE_MS - 3_000);

/// What helps with a name that leads nowhere.
const NAMES: &str =
    "`commsd agents` lists who is there; --to takes an id, its beginning, or a name";

type Answered = std::result::Result<CommandResult, CommandError>;

/// The device that a name means, and that of its daemon, where it is reached.
#[derive(Clone, Copy)]
pub(in crate::daemon) struct Found {
    device: DeviceId,
    daemon: Option<DeviceId>,
}

/// What the owner's task is asked.
pub(in crate::daemon) enum MeshAsk {
    /// Which device a name means.
    Find(String, oneshot::Sender<std::result::Result<Found, ApiError>>),
    /// To ask a device something.
    Ask(DeviceId, AcpAsk, oneshot::Sender<Answered>),
    /// To answer a peer.
    Answer(CallId, ServiceOutcome),
}

/// The way into the mesh.
#[derive(Clone)]
pub struct Mesh {
    asks: mpsc::Sender<MeshAsk>,
    /// By device, and until when they are believed.
    bindings: Arc<Mutex<BTreeMap<DeviceId, (DeviceBinding, UnixMillis)>>>,
    /// Whether peers of this user may propose without an invite.
    admit_peers: bool,
}

impl Mesh {
    /// The way, and what the owner's task takes from it.
    pub(in crate::daemon) fn new(admit_peers: bool) -> (Self, mpsc::Receiver<MeshAsk>) {
        let (asks, asked) = mpsc::channel(QUEUE);
        (Self { asks, bindings: Arc::default(), admit_peers }, asked)
    }

    /// The worker behind a petname, the id of a device or its beginning, or an agent's name.
    ///
    /// # Errors
    /// `BAD_FIELD` for a name of nobody, or of several; as [`Self::binding`].
    pub async fn worker(&self, name: &str) -> Result<Worker> {
        let (tell, told) = oneshot::channel();
        let find = MeshAsk::Find(name.to_owned(), tell);
        self.asks.send(find).await.map_err(|_| closed())?;
        let found = told.await.map_err(|_| closed())?;
        let found = found.map_err(|error| {
            let todo = error.todo.unwrap_or_else(|| NAMES.to_owned());
            Error::new(Code::BadField, error.message).with_todo(todo)
        })?;
        let did = self.binding(found.device).await?.did;
        let device = match found.daemon {
            // It outlasts its agents, if it is the same did's.
            Some(daemon) if self.binding(daemon).await.is_ok_and(|of| of.did == did) => daemon,
            _ => found.device,
        };
        let route = Route::Mesh { device: device.hex() };
        Ok(Worker { did, key: None, invite: None, route })
    }

    /// The binding of a device, from itself.
    ///
    /// # Errors
    /// `RELAY_UNREACHABLE` for one that is not connected or has none, `RATE_LIMITED` for one that is
    /// busy, `PEER_TIMEOUT`, and as [`DeviceBinding::read_checked`].
    pub async fn binding(&self, device: DeviceId) -> Result<DeviceBinding> {
        let now = unix_now();
        if let Some((binding, until)) = self.bindings.lock().get(&device)
            && now < *until
        {
            return Ok(binding.clone());
        }
        let asked = tokio::time::timeout(BINDING_WAIT, self.ask(device, AcpAsk::Binding));
        let late = |_| {
            Error::new(Code::PeerTimeout, "the peer did not say who it is in time")
                .with_todo("look whether its daemon runs, and try again")
        };
        let answer = asked.await.map_err(late)??;
        let text = answer.get("binding").and_then(Value::as_text).unwrap_or_default();
        let now = unix_now();
        let binding = DeviceBinding::read_checked(text.as_bytes(), device, now)
            .map_err(|error| error.inside("binding"))?;
        let until = now.plus(BELIEVED_MS).min(binding.expires_at.millis());
        let mut bindings = self.bindings.lock();
        bindings.retain(|_, (_, until)| now < *until);
        if bindings.len() < MAX_BELIEVED {
            bindings.insert(device, (binding.clone(), until));
        }
        Ok(binding)
    }

    /// Hands an envelope to a device, by its id.
    ///
    /// # Errors
    /// `BAD_FIELD` for no device id, `RELAY_UNREACHABLE`, `RATE_LIMITED`.
    pub async fn post(&self, device: &str, envelope: Vec<u8>) -> Result<()> {
        let device = DeviceId::parse(device)
            .ok_or_else(|| Error::new(Code::BadField, "no device id in a stored route"))?;
        self.ask(device, AcpAsk::Envelope(envelope)).await.map(drop)
    }

    async fn ask(&self, device: DeviceId, ask: AcpAsk) -> Result<Value> {
        let (tell, told) = oneshot::channel();
        self.asks.send(MeshAsk::Ask(device, ask, tell)).await.map_err(|_| closed())?;
        match told.await.map_err(|_| closed())? {
            Ok(CommandResult::Served(answer)) => Ok(answer),
            Ok(CommandResult::Refused { code, .. }) if code == "busy" => {
                Err(Error::new(Code::RateLimited, "the peer is busy"))
            }
            Ok(CommandResult::Refused { code, .. }) => {
                let text = format!("the peer takes part in no tasks ({})", word(code));
                let todo = "its user has to open an office there: acp-worker in the configuration of its \
                            daemon (docs/acp.md), or any `commsd acp` command for the first time";
                Err(Error::new(Code::RelayUnreachable, text).with_todo(todo))
            }
            Ok(_) => {
                let error = Error::new(Code::RelayUnreachable, "the peer's answer cannot be used");
                Err(error.with_todo("update commsd there and here"))
            }
            Err(error) => {
                let text = format!("the peer: {}", error.message);
                let todo = todo(error.code).unwrap_or(NAMES);
                Err(Error::new(Code::RelayUnreachable, text).with_todo(todo))
            }
        }
    }

    /// Does what a peer asks, with the office that is open, and answers it.
    pub(in crate::daemon) async fn serve(
        self,
        service: Option<Service>,
        request: AcpRequest,
        key: Option<DeviceKey>,
    ) {
        let call = request.call;
        let outcome = match (service, key) {
            (Some(service), Some(key)) => {
                let served = self.serve_with(&service, request, key);
                tokio::time::timeout(STORE_WITHIN, served).await.unwrap_or_else(|_| Err(busy()))
            }
            _ => Err(("unavailable".to_owned(), "no tasks are worked on here".to_owned())),
        };
        // An owner's task that has ended waits for nothing.
        let _ = self.asks.send(MeshAsk::Answer(call, outcome)).await;
    }

    async fn serve_with(
        &self,
        service: &Service,
        request: AcpRequest,
        key: DeviceKey,
    ) -> ServiceOutcome {
        let office = &service.office;
        match request.ask {
            AcpAsk::Binding => {
                let bound = office
                    .look(move |owner| {
                        let now = unix_now();
                        canonical(&DeviceBinding::issue(owner.key(), &key, BINDING_LIFE_MS, now)?)
                    })
                    .await;
                let text = bound.ok().and_then(|bytes| String::from_utf8(bytes).ok());
                let text = text.ok_or_else(busy)?;
                Ok(vec![("binding".to_owned(), Value::Text(text))])
            }
            AcpAsk::Envelope(envelope) => {
                if self.admit_peers && request.is_peer {
                    self.vouch(service, request.from).await;
                }
                let via = Route::Mesh { device: request.from.hex() };
                office.mail(envelope, via).await.map(|()| Vec::new()).map_err(|_| busy())
            }
        }
    }

    /// Lets the did of a peer propose for as long as its binding is believed. Whose binding does not
    /// hold proposes as a stranger does.
    async fn vouch(&self, service: &Service, device: DeviceId) {
        if let Ok(binding) = self.binding(device).await {
            let until = unix_now().plus(BELIEVED_MS);
            // An office that is closed takes no mail either.
            let _ = service.office.vouch(binding.did, until).await;
        }
    }
}

fn closed() -> Error {
    Error::new(Code::RelayUnreachable, "the daemon is going down")
        .with_todo("try again when it is back: `commsd status`")
}

fn busy() -> (String, String) {
    ("busy".to_owned(), "it cannot be stored just now; try again".to_owned())
}

/// Questions to peers that are not answered yet; the node answers each within its deadline.
pub(in crate::daemon) type Open = HashMap<OpId, oneshot::Sender<Answered>>;

impl Owner {
    pub(in crate::daemon) fn mesh_asked(&mut self, ask: MeshAsk) {
        match ask {
            MeshAsk::Find(name, tell) => {
                // Whoever has gone needs no answer.
                let found = self.find_agent(&name, &self.node.daemon());
                let _ = tell.send(found.map(|device| {
                    let daemon = self.node.daemon_of(&device);
                    Found { device, daemon }
                }));
            }
            MeshAsk::Ask(to, ask, tell) => {
                self.next_op += 1;
                let op = OpId(self.next_op);
                self.acp_asks.insert(op, tell);
                self.inputs.push_back(Input::Acp { op, to, ask });
            }
            MeshAsk::Answer(call, outcome) => {
                self.inputs.push_back(Input::ServiceAnswered { call, outcome });
            }
        }
    }

    /// A peer has answered, or will not.
    pub(in crate::daemon) fn mesh_answered(&mut self, op: OpId, result: Answered) {
        if let Some(tell) = self.acp_asks.remove(&op) {
            let _ = tell.send(result);
        }
    }

    /// A peer asks; it is served off this task.
    pub(in crate::daemon) fn mesh_serves(&self, request: AcpRequest) {
        let key = self.node.device_key(&request.to).cloned();
        self.acp.serve_peer(request, key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::acp::did::Secret;

    const DAY: u64 = 24 * 3_600_000;

    fn device(n: u8) -> DeviceKey {
        DeviceKey::from_scalar(&[n; 32]).unwrap()
    }

    fn owner(n: u8) -> Secret {
        Secret::from_seed(&[n; 32]).unwrap()
    }

    fn bound(binding: &DeviceBinding) -> Answered {
        let text = String::from_utf8(canonical(binding).unwrap()).unwrap();
        Ok(CommandResult::Served(Value::map([("binding", Value::Text(text))])))
    }

    /// An owner's task that knows one name, for device 2, and has these answers, one each.
    fn peer(answers: Vec<Answered>) -> Mesh {
        peer_of(None, answers)
    }

    /// As [`peer`], and this is the device of its daemon.
    fn peer_of(daemon: Option<DeviceId>, answers: Vec<Answered>) -> Mesh {
        let (mesh, mut asked) = Mesh::new(false);
        tokio::spawn(async move {
            let mut answers = answers.into_iter();
            while let Some(ask) = asked.recv().await {
                match ask {
                    MeshAsk::Find(name, tell) if name == "bob" => {
                        let _ = tell.send(Ok(Found { device: device(2).id(), daemon }));
                    }
                    MeshAsk::Find(_, tell) => {
                        let _ = tell.send(Err(ApiError::plain("agent_not_found", "who?")));
                    }
                    MeshAsk::Ask(_, _, tell) => {
                        let _ = answers.next().map(|answer| tell.send(answer));
                    }
                    MeshAsk::Answer(..) => {}
                }
            }
        });
        mesh
    }

    async fn code(mesh: &Mesh, name: &str) -> Code {
        mesh.worker(name).await.unwrap_err().code()
    }

    #[tokio::test]
    async fn a_worker_is_whom_its_binding_names_and_is_asked_once() {
        let now = unix_now();
        let mesh =
            peer(vec![bound(&DeviceBinding::issue(&owner(1), &device(2), DAY, now).unwrap())]);
        assert_eq!(code(&mesh, "nobody").await, Code::BadField);
        for _ in 0..2 {
            let worker = mesh.worker("bob").await.unwrap();
            assert_eq!(worker.did, owner(1).did());
            assert_eq!(worker.route, Route::Mesh { device: device(2).id().hex() });
            assert_eq!((worker.key, worker.invite), (None, None));
        }
    }

    #[tokio::test]
    async fn the_daemons_device_carries_the_mail_if_it_is_the_same_dids() {
        let now = unix_now();
        let issue =
            |n, key| bound(&DeviceBinding::issue(&owner(n), &device(key), DAY, now).unwrap());
        let daemon = device(5).id();
        let gone = Err(CommandError::new("not_connected", "it is not connected"));
        for (answer, carrier) in [(issue(1, 5), 5), (issue(4, 5), 2), (issue(1, 6), 2), (gone, 2)] {
            let mesh = peer_of(Some(daemon), vec![issue(1, 2), answer]);
            let worker = mesh.worker("bob").await.unwrap();
            assert_eq!(worker.did, owner(1).did());
            assert_eq!(worker.route, Route::Mesh { device: device(carrier).id().hex() });
        }
    }

    #[tokio::test]
    async fn a_forged_binding_names_nobody() {
        let now = unix_now();
        let issue =
            |device: &DeviceKey, now| DeviceBinding::issue(&owner(1), device, DAY, now).unwrap();
        let of_another = issue(&device(3), now);
        let mut stolen = issue(&device(2), now);
        stolen.did = owner(4).did();
        let mut resigned = stolen.clone();
        resigned.signature.signer_did = owner(4).did();
        let over = issue(&device(2), UnixMillis(now.0 - 2 * DAY));
        let nothing =
            Ok(CommandResult::Served(Value::map([("binding", Value::Text("{}".into()))])));
        let mesh = peer(vec![
            bound(&of_another),
            bound(&stolen),
            bound(&resigned),
            bound(&over),
            nothing,
            bound(&issue(&device(2), now)),
        ]);
        for wanted in [
            Code::WrongSigner,
            Code::WrongSigner,
            Code::BadSignature,
            Code::TokenExpired,
            Code::MissingMember,
        ] {
            assert_eq!(code(&mesh, "bob").await, wanted);
        }
        mesh.worker("bob").await.unwrap();
    }

    #[tokio::test]
    async fn what_a_peer_refuses_is_told_in_words_of_ours() {
        let refused = |code: &str| {
            let (code, message) = (code.to_owned(), "\u{1b}[2J their words".to_owned());
            Ok(CommandResult::Refused { code, message })
        };
        let gone = Err(CommandError::new("not_connected", "it is not connected"));
        let mesh = peer(vec![refused("busy"), refused("\u{1b}[2J"), gone, Ok(CommandResult::Done)]);
        let device = "0a".repeat(32);
        let post = || mesh.post(&device, vec![1]);
        assert_eq!(post().await.unwrap_err().code(), Code::RateLimited);
        let error = post().await.unwrap_err();
        assert_eq!(error.code(), Code::RelayUnreachable);
        assert_eq!(error.message(), "the peer takes part in no tasks (refused)");
        for _ in 0..2 {
            assert_eq!(post().await.unwrap_err().code(), Code::RelayUnreachable);
        }
        assert_eq!(mesh.post("nowhere", vec![1]).await.unwrap_err().code(), Code::BadField);
    }
}
