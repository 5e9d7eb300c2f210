use super::*;

const T0: UnixMillis = UnixMillis(1_000_000);

fn key(n: u8) -> DeviceKey {
    DeviceKey::from_scalar(&[n; 32]).unwrap()
}

fn ephemeral(n: u8) -> Ephemeral {
    Ephemeral { key: key(n), nonce: [n; 16] }
}

fn unused() -> Ephemeral {
    panic!("no answer was due")
}

/// Whether what one end seals the other opens.
fn talk(from: &mut SecurePeer, to: &mut SecurePeer) -> bool {
    let Frame::SecureData { counter, ciphertext } = from.seal(&Frame::Ping).unwrap() else {
        panic!("not secure-data")
    };
    to.open(counter, &ciphertext).is_ok_and(|encoded| encoded == Frame::Ping.encode())
}

struct Pair {
    a: DeviceKey,
    b: DeviceKey,
    at_a: SecurePeer,
    at_b: SecurePeer,
}

fn pair() -> Pair {
    let (a, b) = (key(1), key(2));
    let (at_a, at_b) = (SecurePeer::new(b.id()), SecurePeer::new(a.id()));
    Pair { a, b, at_a, at_b }
}

impl Pair {
    /// One side starts, the other answers, both talk.
    fn establish(&mut self) {
        let hello = self.at_a.start(&self.a, ephemeral(10), T0);
        let answer = self.at_b.receive_hello(&self.b, &hello, T0, || ephemeral(20)).unwrap();
        let nothing = self.at_a.receive_hello(&self.a, &answer.unwrap(), T0, unused).unwrap();
        assert_eq!(nothing, None);
        assert!(talk(&mut self.at_a, &mut self.at_b) && talk(&mut self.at_b, &mut self.at_a));
    }
}

#[test]
fn one_hello_each_way() {
    let mut pair = pair();
    assert_eq!(pair.at_a.seal(&Frame::Ping), Err(ChannelError::NotOpen));
    pair.establish();
}

#[test]
fn both_may_start_at_once() {
    let Pair { a, b, mut at_a, mut at_b } = pair();
    let from_a = at_a.start(&a, ephemeral(10), T0);
    let from_b = at_b.start(&b, ephemeral(20), T0);
    assert_eq!(at_b.receive_hello(&b, &from_a, T0.plus(60_000), unused), Ok(None));
    assert_eq!(at_a.receive_hello(&a, &from_b, T0.plus(60_000), unused), Ok(None));
    assert!(talk(&mut at_a, &mut at_b) && talk(&mut at_b, &mut at_a));
}

#[test]
fn frames_open_once_and_in_order() {
    let mut pair = pair();
    pair.establish();
    let frames: Vec<_> = (0..3).map(|_| pair.at_a.seal(&Frame::Pong).unwrap()).collect();
    let mut open = |frame: &Frame| {
        let Frame::SecureData { counter, ciphertext } = frame else { panic!("not secure-data") };
        pair.at_b.open(*counter, ciphertext).map(|_| ())
    };
    assert_eq!(open(&frames[1]), Ok(()));
    assert_eq!(open(&frames[1]), Err(ChannelError::OldCounter));
    assert_eq!(open(&frames[0]), Err(ChannelError::OldCounter));
    let Frame::SecureData { counter, mut ciphertext } = frames[2].clone() else { panic!() };
    ciphertext[0] ^= 1;
    let changed = Frame::SecureData { counter, ciphertext };
    assert_eq!(open(&changed), Err(ChannelError::DoesNotOpen));
    assert_eq!(open(&frames[2]), Ok(()));
}

#[test]
fn a_restarted_peer_is_let_in_again() {
    let mut pair = pair();
    pair.establish();
    let later = T0.plus(HELLO_INTERVAL_MS);
    let mut restarted = SecurePeer::new(pair.b.id());
    let hello = restarted.start(&pair.a, ephemeral(11), later);
    let answer = pair.at_b.receive_hello(&pair.b, &hello, later, || ephemeral(21)).unwrap();
    restarted.receive_hello(&pair.a, &answer.unwrap(), later, unused).unwrap();
    assert!(talk(&mut restarted, &mut pair.at_b) && talk(&mut pair.at_b, &mut restarted));
}

#[test]
fn bad_hellos_change_nothing() {
    let mut pair = pair();
    pair.establish();
    let stranger = key(3);
    let later = T0.plus(60_000);
    let mut receive = |hello: &SecureHello| pair.at_b.receive_hello(&pair.b, hello, later, unused);
    let hello = ephemeral(11).hello(&stranger, pair.b.id());
    assert_eq!(receive(&hello), Err(ChannelError::WrongSender));
    let hello = ephemeral(11).hello(&pair.a, stranger.id());
    assert_eq!(receive(&hello), Err(ChannelError::WrongRecipient));
    let mut hello = ephemeral(11).hello(&pair.a, pair.b.id());
    hello.nonce[0] ^= 1;
    assert_eq!(receive(&hello), Err(ChannelError::BadSignature));
    let again = ephemeral(10).hello(&pair.a, pair.b.id());
    assert_eq!(receive(&again), Err(ChannelError::RepeatedHello));
    let mut odd = ephemeral(11).hello(&pair.a, pair.b.id());
    odd.ephemeral_key = [4; 65];
    odd.signature = pair.a.sign(&odd.signing_input()).to_vec();
    let result = pair.at_b.receive_hello(&pair.b, &odd, later, || ephemeral(21));
    assert_eq!(result, Err(ChannelError::UnusableKey));
    assert!(talk(&mut pair.at_a, &mut pair.at_b) && talk(&mut pair.at_b, &mut pair.at_a));
}

/// The other end as the reference behaves: any hello while its channel is up starts it over.
struct Reference {
    end: SecurePeer,
    key: DeviceKey,
    drawn: u8,
}

impl Reference {
    fn receive(&mut self, hello: &SecureHello, now: UnixMillis) -> Option<SecureHello> {
        let answer = if self.end.is_opening() {
            None
        } else {
            self.drawn += 1;
            Some(self.end.start(&self.key, ephemeral(self.drawn), now))
        };
        self.end.receive_hello(&self.key, hello, now, unused).unwrap();
        answer
    }
}

#[test]
fn a_replayed_hello_starts_no_storm() {
    let Pair { a, b, mut at_b, .. } = pair();
    let mut reference = Reference { end: SecurePeer::new(b.id()), key: a, drawn: 100 };
    // An old hello of the reference's, from an earlier link.
    let old = ephemeral(50).hello(&reference.key, b.id());
    let hello = reference.end.start(&reference.key, ephemeral(10), T0);
    let answer = at_b.receive_hello(&b, &hello, T0, || ephemeral(20)).unwrap().unwrap();
    assert_eq!(reference.receive(&answer, T0), None);
    assert!(talk(&mut reference.end, &mut at_b) && talk(&mut at_b, &mut reference.end));

    // The relay replays it: at once, which is ignored …
    let result = at_b.receive_hello(&b, &old, T0.plus(100), unused);
    assert_eq!(result, Err(ChannelError::RepeatedHello));
    // … and later, which is answered: it could be a restart.
    let now = T0.plus(HELLO_INTERVAL_MS);
    let mut hellos = 0;
    let mut drawn = 20;
    let mut in_flight = Some(old);
    while let Some(hello) = in_flight {
        hellos += 1;
        assert!(hellos < 10, "a storm");
        let answer = at_b.receive_hello(&b, &hello, now, || {
            drawn += 1;
            ephemeral(drawn)
        });
        in_flight = answer.unwrap().and_then(|answer| reference.receive(&answer, now));
    }
    assert_eq!(hellos, 2);
    assert!(talk(&mut reference.end, &mut at_b) && talk(&mut at_b, &mut reference.end));
}
