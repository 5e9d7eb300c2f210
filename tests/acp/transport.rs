//! The relay's client against the relay itself, over loopback: all three ways to receive, through a
//! restart of the relay.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use commsd::acp::code::Code;
use commsd::acp::did::Secret;
use commsd::acp::endpoint::EndpointPolicy;
use commsd::acp::envelope::KeyRef;
use commsd::acp::json::canonical;
use commsd::acp::objects::Envelope;
use commsd::acp::value::{Read as _, Word};
use commsd::identity::entropy::SeededEntropy;
use commsd::runtime::acp_relay::AcpRelayServer;
use commsd::runtime::acp_transport::{CardFilter, Delivery, Form, RelayClient};
use commsd::runtime::clock::unix_now;
use tokio::sync::mpsc::Receiver;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::relay_support::{HANG, card, notice, options};
use crate::support::{Person, person};

const PRIVATE: EndpointPolicy = EndpointPolicy { allow_private: true, allow_insecure: false };

struct Relay {
    address: SocketAddr,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

fn start(state: &Path, address: &str) -> Relay {
    let server = AcpRelayServer::bind(address.parse().unwrap(), options(state)).unwrap();
    let (address, stop) = (server.address(), CancellationToken::new());
    let task = tokio::spawn(server.serve(stop.clone()));
    Relay { address, stop, task }
}

impl Relay {
    async fn end(self) {
        self.stop.cancel();
        timeout(HANG, self.task).await.expect("an end").unwrap();
    }

    fn client(&self, who: &Person) -> Arc<RelayClient> {
        let url = format!("http://{}", self.address);
        Arc::new(RelayClient::new(&url, PRIVATE, Arc::new(who.secret())).unwrap())
    }
}

/// Envelopes that differ, from one to the other.
struct Sender {
    key: Secret,
    to: Secret,
    entropy: SeededEntropy,
}

impl Sender {
    fn next(&mut self) -> Envelope {
        let to = self.to.did();
        let key = (&KeyRef::Identity, to.encryption_key());
        Envelope::seal(&self.key, to, key, b"{}", unix_now(), 600_000, &mut self.entropy).unwrap()
    }
}

/// Receives until what was sent has come, in order; what comes again is passed over.
async fn expect(
    deliveries: &mut Receiver<Delivery>,
    client: &RelayClient,
    sent: &[Envelope],
    all: &[Envelope],
) {
    let known: Vec<Vec<u8>> = all.iter().map(|envelope| canonical(envelope).unwrap()).collect();
    let mut missing: Vec<Vec<u8>> = sent.iter().map(|e| canonical(e).unwrap()).rev().collect();
    while !missing.is_empty() {
        let Delivery { envelope, cursor } =
            timeout(HANG, deliveries.recv()).await.expect("a delivery").expect("no end");
        assert!(known.contains(&envelope));
        if missing.last() == Some(&envelope) {
            missing.pop();
        }
        client.ack(&cursor).await.unwrap();
    }
}

async fn through_a_restart(form: Form) {
    let state = tempfile::tempdir().unwrap();
    let relay = start(state.path(), "127.0.0.1:0");
    let (alice, bob) = (person(1), person(2));
    let (sending, receiving) = (relay.client(&alice), relay.client(&bob));
    let entropy = SeededEntropy::new(form as u64);
    let mut sender = Sender { key: alice.secret(), to: bob.secret(), entropy };
    let mut all = Vec::new();
    for _ in 0..20 {
        let envelope = sender.next();
        assert!(!sending.post(&envelope).await.unwrap().repeated);
        all.push(envelope);
    }
    assert!(sending.post(&all[0]).await.unwrap().repeated);

    let cancel = CancellationToken::new();
    let mut deliveries = Arc::clone(&receiving).receive(form, cancel.clone());
    expect(&mut deliveries, &receiving, &all, &all).await;
    // While it listens.
    let later = sender.next();
    sending.post(&later).await.unwrap();
    all.push(later.clone());
    expect(&mut deliveries, &receiving, &[later], &all).await;

    let address = relay.address.to_string();
    relay.end().await;
    let last = sender.next();
    let refused = sending.post(&last).await.unwrap_err();
    assert_eq!((refused.code(), refused.is_retryable()), (Code::RelayUnreachable, true));
    let relay = start(state.path(), &address);
    sending.post(&last).await.unwrap();
    all.push(last.clone());
    expect(&mut deliveries, &receiving, &[last], &all).await;
    cancel.cancel();
    while timeout(HANG, deliveries.recv()).await.expect("the end").is_some() {}
    relay.end().await;
}

#[tokio::test]
async fn polls_go_through_a_restart() {
    through_a_restart(Form::Poll).await;
}

#[tokio::test]
async fn server_sent_events_go_through_a_restart() {
    through_a_restart(Form::Sse).await;
}

#[tokio::test]
async fn websockets_go_through_a_restart() {
    through_a_restart(Form::WebSocket).await;
}

#[tokio::test]
async fn cards_and_revocations_are_published_found_and_taken_back() {
    let state = tempfile::tempdir().unwrap();
    let relay = start(state.path(), "127.0.0.1:0");
    let (alice, bob, now) = (person(1), person(2), unix_now());
    let client = relay.client(&bob);
    let read = |value| commsd::acp::objects::WorkerCard::read(value).unwrap();
    let own = read(card(&bob, "1", now, &["x y"]));
    client.put_card(&own).await.unwrap();
    relay.client(&alice).put_card(&read(card(&alice, "2", now, &[]))).await.unwrap();
    let any = CardFilter::default();
    assert_eq!(client.cards(&any, None).await.unwrap().cards.len(), 2);
    let skilled = CardFilter { skill: Some(Word::parse("x y").unwrap()), adapter: None };
    let page = client.cards(&skilled, None).await.unwrap();
    assert_eq!((page.cards, page.refused, page.next), (vec![own.clone()], 0, None));
    assert_eq!(client.card(bob.secret().did()).await.unwrap(), Some(own.clone()));

    let taken_back = notice(&bob, "card", &own.card_id.to_string(), now);
    let taken_back = commsd::acp::objects::RevocationNotice::read(taken_back).unwrap();
    client.remove_card(&taken_back).await.unwrap();
    assert_eq!(client.card(bob.secret().did()).await.unwrap(), None);
    let invite = notice(&bob, "invite", "inv_example001", now);
    let invite = commsd::acp::objects::RevocationNotice::read(invite).unwrap();
    client.post_revocation(&invite).await.unwrap();
    let page = client.revocations(bob.secret().did(), None).await.unwrap();
    assert!(page.notices.contains(&invite) && page.refused == 0);
    let next = page.next.expect("a place to go on from");
    let rest = client.revocations(bob.secret().did(), Some(&next)).await.unwrap();
    assert_eq!((rest.notices.len(), rest.next), (0, None));
    assert!(client.revocations(alice.secret().did(), None).await.unwrap().notices.is_empty());

    let info = client.info().await.unwrap();
    assert_eq!(info.relay_origin, client.origin());
    assert!(info.features.iter().any(|feature| feature == "websocket"));
    relay.end().await;
}
