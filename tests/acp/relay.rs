//! What a relay decides, with a clock of the test's own: tokens, mailboxes, cards, notices, and that
//! all of it comes back from what was stored.

use commsd::acp::code::Code;
use commsd::acp::did::Did;
use commsd::acp::objects::{RelayAction, RelayAuth, RevocationNotice, WorkerCard};
use commsd::acp::relay::{CardFilter, Cursor, Limits, Parcel, Record, Relay, auth};
use commsd::acp::value::Read as _;
use commsd::codec::time::UnixMillis;
use commsd::store::acp_relay::RelayDisk;
use serde_json::Value;

use crate::relay_support::{DAY, card, envelope, notice, parcel, token};
use crate::support::{Person, jcs, person};

const NOW: UnixMillis = UnixMillis(1_796_083_200_000);
const HERE: &str = "http://127.0.0.1:8787";
const WINDOW: u64 = 300_000;

fn did(of: &Person) -> Did {
    Did::parse(&of.did).unwrap()
}

fn at(ms: u64) -> UnixMillis {
    UnixMillis(NOW.0 + ms)
}

/// A token, checked up to its nonce as a server does.
fn checked(of: &Person, issued: UnixMillis, nonce: u32, now: UnixMillis) -> RelayAuth {
    let token = token(of, "receive", HERE, issued, nonce);
    auth::check(&token, did(of), RelayAction::Receive, &[HERE.to_owned()], now).unwrap()
}

fn code<T: std::fmt::Debug>(result: Result<T, commsd::acp::code::Error>) -> Code {
    result.unwrap_err().code()
}

/// A relay with its records, which stand for the disk.
struct Bench {
    relay: Relay,
    records: Vec<Record>,
}

impl Bench {
    fn new(limits: Limits) -> Self {
        Self { relay: Relay::new(limits), records: Vec::new() }
    }

    fn admit(&mut self, auth: &RelayAuth, now: UnixMillis) -> Result<(), Code> {
        self.relay.admit(auth, now, &mut self.records).map_err(|e| e.code())
    }

    /// Takes an envelope and says that it is stored.
    fn send(&mut self, parcel: Parcel, now: UnixMillis) -> Result<(u64, bool), Code> {
        let taken = self.relay.accept(parcel, now, &mut self.records).map_err(|e| e.code())?;
        self.relay.stored();
        Ok((taken.cursor.0, taken.fresh))
    }

    fn ack(&mut self, of: &Person, up_to: u64, now: UnixMillis) {
        self.relay.acknowledge(did(of), Cursor(up_to), now, &mut self.records);
    }

    fn waiting(&self, of: &Person, now: UnixMillis) -> Vec<u64> {
        let all = self.relay.waiting(did(of), None, usize::MAX, u64::MAX, now);
        all.into_iter().map(|waiting| waiting.cursor.0).collect()
    }

    /// The relay that comes back after the records were stored and the process was killed.
    fn again(&self) -> Self {
        let home = tempfile::tempdir().unwrap();
        let disk = RelayDisk::open(home.path(), |_| Ok(())).unwrap();
        disk.commit(&self.records).unwrap();
        drop(disk);
        let mut relay = Relay::new(self.relay.limits().clone());
        let mut records = Vec::new();
        RelayDisk::open(home.path(), |record| {
            records.push(record.clone());
            relay.restore(record).map_err(|e| e.to_string())
        })
        .unwrap();
        relay.stored();
        Self { relay, records }
    }
}

fn bench() -> Bench {
    Bench::new(Limits::default())
}

#[test]
fn a_replay_is_refused_until_the_token_is_stale_at_the_exact_boundary() {
    let bob = person(2);
    let mut bench = bench();
    let auth = checked(&bob, NOW, 1, NOW);
    assert_eq!(bench.admit(&auth, NOW), Ok(()));
    for later in [0, 1, WINDOW - 1, WINDOW] {
        bench.relay.prune(at(later), &mut bench.records);
        assert_eq!(bench.admit(&auth, at(later)), Err(Code::AuthReplayed), "{later}");
    }
    assert_eq!(bench.admit(&auth, at(WINDOW + 1)), Err(Code::AuthStale));
    // The same nonce of somebody else is another one.
    assert_eq!(bench.admit(&checked(&person(3), NOW, 1, NOW), NOW), Ok(()));
}

#[test]
fn a_future_dated_token_is_remembered_for_as_long_as_it_could_pass() {
    let bob = person(2);
    let mut bench = bench();
    let auth = checked(&bob, at(WINDOW), 1, NOW);
    assert_eq!(bench.admit(&auth, NOW), Ok(()));
    // Receipt time and the window have gone by; its own have not.
    for later in [WINDOW, WINDOW + 1, 2 * WINDOW] {
        bench.relay.prune(at(later), &mut bench.records);
        assert_eq!(bench.admit(&auth, at(later)), Err(Code::AuthReplayed), "{later}");
    }
    assert_eq!(bench.admit(&auth, at(2 * WINDOW + 1)), Err(Code::AuthStale));
}

#[test]
fn a_flood_pushes_no_nonce_out() {
    let limits = Limits { nonces_of_did: 40, nonces: 60, ..Limits::default() };
    let (bob, eve, third) = (person(2), person(3), person(4));
    let mut bench = Bench::new(limits);
    let captured = checked(&bob, NOW, 0, NOW);
    assert_eq!(bench.admit(&captured, NOW), Ok(()));
    for nonce in 1..40 {
        assert_eq!(bench.admit(&checked(&bob, NOW, nonce, NOW), NOW), Ok(()));
    }
    let one_more = checked(&bob, NOW, 40, NOW);
    assert_eq!(bench.admit(&one_more, NOW), Err(Code::AuthCacheFull));
    assert_eq!(bench.admit(&captured, NOW), Err(Code::AuthReplayed));
    // Others have room, until there is none in all; and still nothing is forgotten.
    for nonce in 0..20 {
        assert_eq!(bench.admit(&checked(&eve, NOW, nonce, NOW), NOW), Ok(()));
    }
    let of_third = checked(&third, NOW, 0, NOW);
    assert_eq!(bench.admit(&of_third, NOW), Err(Code::AuthCacheFull));
    assert_eq!(bench.admit(&captured, at(WINDOW)), Err(Code::AuthReplayed));
    // What was refused was not used up.
    let fresh = checked(&bob, at(1), 41, at(WINDOW + 1));
    assert_eq!(bench.admit(&fresh, at(WINDOW + 1)), Ok(()));
}

#[test]
fn a_clock_that_goes_back_brings_no_token_back() {
    let bob = person(2);
    let mut bench = bench();
    let auth = checked(&bob, NOW, 1, NOW);
    assert_eq!(bench.admit(&auth, NOW), Ok(()));
    bench.relay.prune(at(WINDOW + 1), &mut bench.records);
    assert_eq!(bench.admit(&auth, NOW), Err(Code::AuthStale));
}

#[test]
fn a_restart_does_not_forget_nonces() {
    let bob = person(2);
    let mut bench = bench();
    let auth = checked(&bob, NOW, 1, NOW);
    assert_eq!(bench.admit(&auth, NOW), Ok(()));
    let mut again = bench.again();
    assert_eq!(again.admit(&auth, at(WINDOW)), Err(Code::AuthReplayed));
    assert_eq!(again.admit(&checked(&bob, NOW, 2, NOW), NOW), Ok(()));
    // What is over leaves the disk, too.
    again.relay.prune(at(WINDOW + 1), &mut again.records);
    assert_eq!(again.again().records, []);
}

#[test]
fn an_id_is_known_with_its_bytes_also_after_it_was_fetched_and_after_a_restart() {
    let (alice, bob) = (person(1), person(2));
    let mut bench = bench();
    assert_eq!(bench.send(parcel(&alice, &bob.did, "1", NOW, 10), NOW), Ok((0, true)));
    assert_eq!(bench.send(parcel(&alice, &bob.did, "1", NOW, 10), at(5)), Ok((0, false)));
    let other = |bytes| parcel(&alice, &bob.did, "1", NOW, bytes);
    assert_eq!(bench.send(other(11), NOW), Err(Code::EnvelopeIdReused));
    // Another sender may have the same id.
    assert_eq!(bench.send(parcel(&bob, &bob.did, "1", NOW, 10), NOW), Ok((1, true)));
    assert_eq!(bench.waiting(&bob, NOW), [0, 1]);
    bench.ack(&bob, 1, NOW);
    assert!(bench.waiting(&bob, NOW).is_empty());
    let mut again = bench.again();
    for bench in [&mut bench, &mut again] {
        assert_eq!(bench.send(other(10), at(6)), Ok((0, false)));
        assert_eq!(bench.send(other(11), at(6)), Err(Code::EnvelopeIdReused));
        assert!(bench.waiting(&bob, NOW).is_empty());
    }
    // Until it is over.
    let over = at(DAY + 60_000);
    again.relay.prune(over, &mut again.records);
    assert_eq!(again.send(other(10), over), Err(Code::EnvelopeExpired));
    let next = parcel(&alice, &bob.did, "1", over, 10);
    assert_eq!(again.send(next, over), Ok((2, true)));
}

#[test]
fn no_cursor_is_given_out_twice() {
    let (alice, bob) = (person(1), person(2));
    let mut bench = bench();
    for n in 0..3 {
        let sent = bench.send(parcel(&alice, &bob.did, &n.to_string(), NOW, 1), NOW);
        assert_eq!(sent, Ok((n, true)));
    }
    bench.ack(&bob, 2, NOW);
    let mut again = bench.again();
    assert_eq!(again.send(parcel(&alice, &bob.did, "9", NOW, 1), NOW), Ok((3, true)));
    // Not even one whose record could not be stored.
    let mut rebuilt = bench.again();
    rebuilt.relay.begin_at(Cursor(7));
    assert_eq!(rebuilt.send(parcel(&alice, &bob.did, "9", NOW, 1), NOW), Ok((7, true)));
}

#[test]
fn nothing_is_shown_or_deleted_before_it_is_stored() {
    let (alice, bob) = (person(1), person(2));
    let mut bench = bench();
    bench.relay.accept(parcel(&alice, &bob.did, "1", NOW, 1), NOW, &mut bench.records).unwrap();
    assert!(bench.waiting(&bob, NOW).is_empty());
    bench.ack(&bob, u64::MAX, NOW);
    bench.relay.stored();
    assert_eq!(bench.waiting(&bob, NOW), [0]);
}

#[test]
fn an_acknowledgement_deletes_up_to_and_including_and_only_ones_own() {
    let (alice, bob, eve) = (person(1), person(2), person(3));
    let mut bench = bench();
    for (n, to) in [&bob, &eve, &bob, &bob].into_iter().enumerate() {
        bench.send(parcel(&alice, &to.did, &n.to_string(), NOW, 1), NOW).unwrap();
    }
    bench.ack(&eve, 0, NOW);
    assert_eq!((bench.waiting(&bob, NOW), bench.waiting(&eve, NOW)), (vec![0, 2, 3], vec![1]));
    bench.ack(&bob, 2, NOW);
    assert_eq!((bench.waiting(&bob, NOW), bench.waiting(&eve, NOW)), (vec![3], vec![1]));
    let after = bench.relay.waiting(did(&bob), Some(Cursor(3)), 10, u64::MAX, NOW);
    assert_eq!(after, []);
    let again = bench.again();
    assert_eq!((again.waiting(&bob, NOW), again.waiting(&eve, NOW)), (vec![3], vec![1]));
    assert_eq!(again.relay.load(), bench.relay.load());
}

#[test]
fn a_page_is_bounded_by_count_and_bytes_and_never_empty_for_its_size() {
    let (alice, bob) = (person(1), person(2));
    let mut bench = bench();
    for n in 0..5 {
        bench.send(parcel(&alice, &bob.did, &n.to_string(), NOW, 1_000), NOW).unwrap();
    }
    let page = |limit, bytes| bench.relay.waiting(did(&bob), None, limit, bytes, NOW).len();
    let one = bench.relay.waiting(did(&bob), None, 1, 0, NOW)[0].bytes;
    assert_eq!(
        (page(3, u64::MAX), page(9, 2 * one), page(9, 2 * one - 1), page(9, 0)),
        (3, 2, 1, 1)
    );
}

#[test]
fn a_sender_has_its_share_of_a_mailbox() {
    let (alice, bob, eve) = (person(1), person(2), person(3));
    let limits = Limits { sender_envelopes: 3, sender_bytes: 20_000, ..Limits::default() };
    let mut bench = Bench::new(limits);
    for n in 0..3 {
        bench.send(parcel(&eve, &bob.did, &n.to_string(), NOW, 1), NOW).unwrap();
    }
    let more = || parcel(&eve, &bob.did, "9", NOW, 1);
    assert_eq!(bench.send(more(), NOW), Err(Code::MailboxFull));
    assert!(bench.send(parcel(&alice, &bob.did, "9", NOW, 1), NOW).is_ok());
    assert!(bench.send(parcel(&eve, &alice.did, "8", NOW, 1), NOW).is_ok());
    // By bytes.
    let large = |id| parcel(&alice, &eve.did, id, NOW, 10_000);
    assert!(bench.send(large("5"), NOW).is_ok());
    assert_eq!(bench.send(large("6"), NOW), Err(Code::MailboxFull));
    // What was fetched makes room.
    bench.ack(&bob, 0, NOW);
    assert!(bench.send(more(), NOW).is_ok());
}

#[test]
fn half_of_a_mailbox_is_for_those_its_owner_has_written_to() {
    let (bob, friend) = (person(2), person(9));
    let limits = Limits { mailbox_envelopes: 8, ..Limits::default() };
    let mut bench = Bench::new(limits);
    let stranger = |n: u8| parcel(&person(10 + n), &bob.did, "1", NOW, 1);
    for n in 0..4 {
        bench.send(stranger(n), NOW).unwrap();
    }
    assert_eq!(bench.send(stranger(5), NOW), Err(Code::MailboxFull));
    let of_friend = |id: &str| parcel(&friend, &bob.did, id, NOW, 1);
    assert_eq!(bench.send(of_friend("1"), NOW), Err(Code::MailboxFull));
    bench.send(parcel(&bob, &friend.did, "1", NOW, 1), NOW).unwrap();
    // It stays so after a restart.
    let mut bench = bench.again();
    for id in ["1", "2", "3"] {
        bench.send(of_friend(id), NOW).unwrap();
    }
    assert_eq!(bench.send(stranger(6), NOW), Err(Code::MailboxFull));
    bench.send(of_friend("4"), NOW).unwrap();
    assert_eq!(bench.send(of_friend("5"), NOW), Err(Code::MailboxFull));
    // One's own mailbox is one's own.
    let mut own = Bench::new(Limits { mailbox_envelopes: 4, ..Limits::default() });
    for n in 0..4 {
        own.send(parcel(&bob, &bob.did, &n.to_string(), NOW, 1), NOW).unwrap();
    }
}

#[test]
fn a_mailbox_and_the_relay_are_bounded_by_bytes() {
    let (alice, bob) = (person(1), person(2));
    let size = parcel(&alice, &bob.did, "1", NOW, 1_000).json.len() as u64;
    let mut bench = Bench::new(Limits { mailbox_bytes: 2 * size, ..Limits::default() });
    bench.send(parcel(&bob, &alice.did, "0", NOW, 1_000), NOW).unwrap();
    for (id, expected) in [("1", true), ("2", true), ("3", false)] {
        let sent = bench.send(parcel(&alice, &bob.did, id, NOW, 1_000), NOW);
        assert_eq!(sent.is_ok(), expected, "{id} {sent:?}");
    }
    let mut bench = Bench::new(Limits { bytes: 2 * size, envelopes: 9, ..Limits::default() });
    for (n, expected) in [(1_u8, true), (2, true), (3, false)] {
        let parcel = parcel(&alice, &person(20 + n).did, &n.to_string(), NOW, 1_000);
        let sent = bench.send(parcel, NOW);
        assert_eq!(sent.is_ok(), expected, "{n} {sent:?}");
    }
}

#[test]
fn envelopes_leave_when_their_time_is_over() {
    let (alice, bob) = (person(1), person(2));
    let limits = Limits { mailbox_ms: 1_000, ..Limits::default() };
    let mut bench = Bench::new(limits);
    bench.send(parcel(&alice, &bob.did, "1", NOW, 1), NOW).unwrap();
    assert_eq!(bench.waiting(&bob, at(999)), [0]);
    // Not shown from the moment on, and gone with the next look.
    assert!(bench.waiting(&bob, at(1_000)).is_empty());
    bench.relay.prune(at(1_000), &mut bench.records);
    assert_eq!((bench.relay.load(), bench.again().relay.load()), ((0, 0), (0, 0)));
    // Its sender's clock may be ahead, but not its life longer.
    let mut early = envelope(&alice, &bob.did, "2", at(60_000), 1);
    early["expiresAt"] = at(60_000 + 7 * DAY).iso().into();
    let early = alice.sign(early, "envelope", "sender");
    let early = Parcel::read(&jcs(&early), 1 << 20, NOW).unwrap();
    assert_eq!(early.until, at(7 * DAY + 60_000));
}

fn worker_card(value: &Value) -> WorkerCard {
    WorkerCard::read(value.clone()).unwrap()
}

fn revocation(value: &Value) -> RevocationNotice {
    RevocationNotice::read(value.clone()).unwrap()
}

impl Bench {
    fn publish(&mut self, value: &Value, now: UnixMillis) -> Result<(), Code> {
        let card = worker_card(value);
        self.relay.publish(card, now, &mut self.records).map_err(|e| e.code())
    }

    fn revoke(&mut self, value: &Value, now: UnixMillis) -> Result<(), Code> {
        self.relay.revoke(revocation(value), now, &mut self.records).map_err(|e| e.code())
    }

    fn listed(&self, filter: &CardFilter, now: UnixMillis) -> usize {
        self.relay.cards(filter, None, 100, now).items.len()
    }
}

#[test]
fn the_newest_card_stays_and_no_older_one_comes_back() {
    let bob = person(2);
    let mut bench = bench();
    let (old, new) = (card(&bob, "1", NOW, &[]), card(&bob, "2", at(10), &["rust"]));
    assert_eq!(bench.publish(&new, at(10)), Ok(()));
    assert_eq!(bench.publish(&new, at(10)), Ok(()), "the same again is no change");
    assert_eq!(bench.publish(&old, at(10)), Err(Code::BadTime));
    let mut forged = card(&bob, "3", at(20), &[]);
    forged["name"] = "changed".into();
    assert_eq!(bench.publish(&forged, at(20)), Err(Code::BadSignature));
    assert_eq!(bench.relay.card(did(&bob), at(20)).unwrap(), jcs(&new));
    // Taken back: hidden, and neither it nor an older one can be put in again.
    let taken_back = notice(&bob, "card", "card_00000002", at(30));
    assert_eq!(bench.revoke(&taken_back, at(30)), Ok(()));
    for mut bench in [bench.again(), bench] {
        assert_eq!(bench.relay.card(did(&bob), at(30)), None);
        assert_eq!(bench.listed(&CardFilter::default(), at(30)), 0);
        assert_eq!(bench.publish(&new, at(30)), Err(Code::InviteRevoked));
        assert_eq!(bench.publish(&old, at(30)), Err(Code::BadTime));
        assert_eq!(bench.publish(&card(&bob, "4", at(40), &[]), at(40)), Ok(()));
    }
}

#[test]
fn cards_are_filtered_paged_bounded_and_end() {
    let people: Vec<Person> = (1..=5).map(person).collect();
    let mut bench = Bench::new(Limits { cards: 5, ..Limits::default() });
    for (n, of) in people.iter().enumerate() {
        let skills: &[&str] = if n % 2 == 0 { &["rust", "prose"] } else { &["prose"] };
        bench.publish(&card(of, "1", NOW, skills), NOW).unwrap();
    }
    assert_eq!(bench.publish(&card(&person(6), "1", NOW, &[]), NOW), Err(Code::RateLimited));
    let filter = |adapter: Option<&str>, skill: Option<&str>| CardFilter {
        adapter: adapter.map(str::to_owned),
        skill: skill.map(str::to_owned),
    };
    let listed = |filter| bench.listed(&filter, NOW);
    assert_eq!(listed(filter(None, Some("rust"))), 3);
    assert_eq!(listed(filter(Some("command"), Some("prose"))), 5);
    assert_eq!(listed(filter(Some("claude"), None)), 0);
    assert_eq!(listed(filter(None, Some("rus"))), 0);
    // Pages, each beginning where the one before ended.
    let (mut seen, mut after) = (std::collections::BTreeSet::new(), None);
    for _ in 0..3 {
        let page = bench.relay.cards(&CardFilter::default(), after, 2, NOW);
        assert!(page.items.len() <= 2);
        seen.extend(page.items);
        after = page.next.map(|next| Did::parse(&next).unwrap());
    }
    assert_eq!((seen.len(), after), (5, None));
    let over = at(DAY + 60_000);
    assert_eq!(bench.listed(&CardFilter::default(), over), 0);
    bench.relay.prune(over, &mut bench.records);
    assert_eq!(bench.again().records, []);
}

#[test]
fn notices_are_kept_in_the_order_in_which_they_came() {
    let (bob, eve) = (person(2), person(3));
    let mut bench = bench();
    bench.revoke(&notice(&bob, "invite", "inv_00000001", at(5)), at(5)).unwrap();
    bench.revoke(&notice(&eve, "capability", "cap_00000001", at(6)), at(6)).unwrap();
    bench.revoke(&notice(&bob, "capability", "cap_00000002", at(7)), at(7)).unwrap();
    // Known already, and no sooner.
    bench.revoke(&notice(&bob, "invite", "inv_00000001", at(8)), at(8)).unwrap();
    // The same target, sooner: it takes the place of the other, and is news.
    bench.revoke(&notice(&bob, "invite", "inv_00000001", at(1)), at(9)).unwrap();
    let mut stranger = notice(&eve, "card", "card_00000009", at(9));
    stranger["issuerDid"] = bob.did.clone().into();
    assert_eq!(bench.revoke(&stranger, at(9)), Err(Code::WrongSigner));
    for bench in [bench.again(), bench] {
        let list = |issuer, after, limit| bench.relay.notices(issuer, after, limit).unwrap();
        let targets = |items: &[Vec<u8>]| -> Vec<String> {
            let read = |item: &Vec<u8>| serde_json::from_slice::<Value>(item).unwrap();
            items.iter().map(|item| read(item)["targetId"].as_str().unwrap().to_owned()).collect()
        };
        let all = list(None, None, 100);
        assert_eq!(targets(&all.items), ["cap_00000001", "cap_00000002", "inv_00000001"]);
        let first = list(None, None, 1);
        let after = Cursor::parse(&first.next.unwrap()).unwrap();
        assert_eq!(targets(&list(None, Some(after), 100).items), ["cap_00000002", "inv_00000001"]);
        let end = Cursor::parse(&all.next.unwrap()).unwrap();
        let nothing = list(None, Some(end), 100);
        assert_eq!((nothing.items.len(), nothing.next), (0, Some(end.to_string())));
        assert_eq!(targets(&list(Some(did(&eve)), None, 100).items), ["cap_00000001"]);
    }
}

#[test]
fn a_relay_whose_records_were_all_stored_comes_back_the_same() {
    let people: Vec<Person> = (1..=4).map(person).collect();
    let mut bench = bench();
    let mut seed = 7_u64;
    let mut draw = |most: u64| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (seed >> 33) % most
    };
    let pick = |n: u64| &people[usize::try_from(n).unwrap()];
    for step in 0..400_u64 {
        let now = at(step * 1_000_000);
        let (from, to) = (pick(draw(4)), pick(draw(4)));
        match draw(6) {
            0..=2 => {
                let _ = bench.send(parcel(from, &to.did, &step.to_string(), now, 10), now);
            }
            3 => {
                let shown = bench.waiting(to, now);
                if let Some(cursor) = shown.get(usize::try_from(draw(3)).unwrap()) {
                    bench.ack(to, *cursor, now);
                }
            }
            4 => {
                let nonce = u32::try_from(step).unwrap();
                bench.admit(&checked(from, now, nonce, now), now).unwrap();
            }
            _ => bench.relay.prune(now, &mut bench.records),
        }
        if step % 100 == 99 {
            let again = bench.again();
            for of in &people {
                assert_eq!(again.waiting(of, now), bench.waiting(of, now), "{step}");
            }
            assert_eq!(again.relay.load(), bench.relay.load());
            assert_eq!(again.relay.next(), bench.relay.next());
        }
    }
}

#[test]
fn limits_stay_below_their_ceilings() {
    assert_eq!(Limits::default().fault(), None);
    assert_eq!(Limits::ceiling().fault(), None);
    let over = Limits { mailbox_bytes: (1 << 30) + 1, ..Limits::default() };
    assert_eq!(over.fault(), Some("mailbox_bytes"));
    assert_eq!(Limits { cards: 0, ..Limits::default() }.fault(), Some("cards"));
    let over = Limits { did_per_minute: 1_000_001, ..Limits::default() };
    assert_eq!(over.fault(), Some("did_per_minute"));
}

#[test]
fn an_envelope_that_is_not_its_senders_or_not_whole_is_refused() {
    let (alice, bob, eve) = (person(1), person(2), person(3));
    let good = envelope(&alice, &bob.did, "1", NOW, 10);
    let read = |value: &Value| Parcel::read(&jcs(value), 1 << 20, NOW);
    // Spaces are no difference: what is kept is the canonical form.
    let spaced = serde_json::to_vec_pretty(&good).unwrap();
    assert_eq!(Parcel::read(&spaced, 1 << 20, NOW).unwrap().json, jcs(&good));
    for (pointer, value, expected) in [
        ("/from", Value::from(eve.did.clone()), Code::WrongSigner),
        ("/to", eve.did.clone().into(), Code::BadSignature),
        ("/ciphertext", "AAAA".into(), Code::BadSignature),
        ("/signature/role", "recipient".into(), Code::WrongRole),
        ("/expiresAt", at(8 * DAY).iso().into(), Code::BadTime),
        ("/expiresAt", NOW.iso().into(), Code::BadTime),
        ("/sentAt", at(60_001).iso().into(), Code::BadTime),
        ("/version", "1.1".into(), Code::UnsupportedVersion),
        ("/to", "did:key:z6MkeTG3bFFSLYVU7VqhgZxqr6YzpaGrQtFMh1uvqGy1vDnP".into(), Code::BadDid),
        ("/envelopeId", "env_1".into(), Code::BadId),
    ] {
        let mut changed = good.clone();
        *changed.pointer_mut(pointer).unwrap() = value;
        assert_eq!(code(read(&changed)), expected, "{pointer}");
    }
    let old = envelope(&alice, &bob.did, "1", UnixMillis(NOW.0 - DAY - 60_000), 10);
    assert_eq!(code(read(&old)), Code::EnvelopeExpired);
    assert_eq!(code(Parcel::read(&jcs(&good), 100, NOW)), Code::TooLarge);
}
