//! Discovery: who was heard, for whoever looks; advertisements; and how far beacons make this machine
//! known (`transport.md` 4, decision 180).

use std::collections::BTreeMap;
use std::net::IpAddr;

use super::super::discovery::{Found, Heard, Side, Sides, Visibility};
use super::super::first_contact::{BEACON_INTERVAL_MS, Datagram};
use super::super::journal::Record;
use super::super::log::LogEvent;
use super::super::records::Now;
use super::{CommandError, CommandResult, Node, OpId, Output};
use crate::identity::entropy;
use crate::identity::names;

/// How long somebody who looks waits for beacons (the reference's).
pub const LOOK_MS: u64 = 5_000;
/// Those who look at a time; more are told to try again.
pub const MAX_LOOKING: usize = 64;
/// Advertisements: each is one datagram to everybody in half a minute.
pub const MAX_ADVERTS: usize = 16;
/// Characters of an advertisement's id, as the reference's have.
const ID_CHARS: usize = 21;

/// What is asked about discovery.
#[derive(Clone, Debug)]
pub enum DiscoveryCommand {
    /// Who can be heard? Answered after [`LOOK_MS`].
    Look,
    /// Announce a name and a port, to one side or both.
    Advertise {
        /// What others see.
        name: String,
        /// The port.
        port: u16,
        /// To whom.
        side: Option<Side>,
    },
    /// Announce it no longer.
    Withdraw(String),
    /// How far this machine is to be known, to one side or both.
    SetVisibility {
        /// How far.
        visibility: Visibility,
        /// To whom.
        side: Option<Side>,
    },
}

struct Advert {
    datagram: Vec<u8>,
    side: Option<Side>,
}

/// What discovery remembers.
#[derive(Default)]
pub(super) struct Discovery {
    visibility: Sides<Visibility>,
    /// Who has asked since the last beacon.
    asked: Sides<bool>,
    heard: Heard,
    looking: Vec<(OpId, u64)>,
    adverts: BTreeMap<String, Advert>,
    /// When they are sent again; without any, never.
    adverts_at: Option<u64>,
}

impl Discovery {
    /// When something is due.
    pub(super) fn deadline(&self) -> u64 {
        let looking = self.looking.iter().map(|(_, until)| *until);
        looking.chain(self.adverts_at).min().unwrap_or(u64::MAX)
    }
}

impl Node {
    pub(super) fn discovery_command(&mut self, op: OpId, command: DiscoveryCommand, now: Now) {
        let result = match command {
            DiscoveryCommand::Look if self.discovery.looking.len() >= MAX_LOOKING => {
                Err(CommandError::new("busy", "too many are looking already"))
            }
            DiscoveryCommand::Look => {
                self.discovery.looking.push((op, now.mono + LOOK_MS));
                self.ask_for_beacons();
                return;
            }
            DiscoveryCommand::Advertise { name, port, side } => {
                self.advertise(&name, port, side, now)
            }
            DiscoveryCommand::Withdraw(id) => {
                let gone = self.discovery.adverts.remove(&id).is_some();
                if self.discovery.adverts.is_empty() {
                    self.discovery.adverts_at = None;
                }
                Ok(CommandResult::Withdrawn(gone))
            }
            DiscoveryCommand::SetVisibility { visibility, side } => {
                self.set_mesh_visibility(visibility, side, now);
                Ok(CommandResult::Done)
            }
        };
        self.outputs.push_back(Output::Reply { op, result });
    }

    /// How far this machine makes itself known.
    #[must_use]
    pub fn mesh_visibility(&self) -> Sides<Visibility> {
        self.discovery.visibility
    }

    fn advertise(
        &mut self,
        name: &str,
        port: u16,
        side: Option<Side>,
        now: Now,
    ) -> Result<CommandResult, CommandError> {
        let name = names::own(name).ok_or_else(|| {
            let text = "a name has 1 to 64 characters, something to see and nothing hidden";
            CommandError::new("invalid_name", text)
        })?;
        if self.discovery.adverts.len() >= MAX_ADVERTS {
            let text = format!("{MAX_ADVERTS} are announced already; withdraw one");
            return Err(CommandError::new("too_many_adverts", text));
        }
        let id = entropy::draw_id::<ID_CHARS>(&mut *self.entropy);
        let datagram = Datagram::Advert { name: name.to_owned(), port }.encode();
        self.discovery.adverts.insert(id.clone(), Advert { datagram, side });
        self.log(LogEvent::new("advertised").with("id", &id).with("port", port));
        self.send_adverts(now);
        Ok(CommandResult::Advertised(id))
    }

    fn set_mesh_visibility(&mut self, visibility: Visibility, side: Option<Side>, now: Now) {
        let before = self.discovery.visibility;
        self.discovery.visibility.set(side, visibility);
        let held = self.discovery.visibility;
        if held == before {
            return;
        }
        self.keep(Record::MeshVisibility { visibility: held });
        let word = |visibility| format!("{visibility:?}").to_lowercase();
        self.log(
            LogEvent::new("mesh_visibility")
                .with("loopback", word(held.loopback))
                .with("network", word(held.network)),
        );
        // Whoever may know of this machine again is told at once, and asked.
        if self.config.first_contact && self.shutting_down.is_none() {
            self.send_beacon(now);
            self.ask_for_beacons();
            self.send_adverts(now);
        }
    }

    /// As it was before a restart.
    pub(super) fn restore_mesh_visibility(&mut self, visibility: Sides<Visibility>) {
        self.discovery.visibility = visibility;
    }

    /// The record that a store holds of it.
    pub(super) fn mesh_visibility_record(&self) -> Record {
        Record::MeshVisibility { visibility: self.discovery.visibility }
    }

    /// Which side a datagram is from.
    pub(super) fn side_of(&self, from: IpAddr) -> Side {
        match self.formation.network_host(Some(from)) {
            Some(_) => Side::Network,
            None => Side::Loopback,
        }
    }

    /// Whether nothing is sent to a side, or taken up that comes from there.
    pub(super) fn is_dark(&self, side: Side) -> bool {
        self.discovery.visibility.of(side) == Visibility::Dark
    }

    pub(super) fn note_heard(&mut self, from: IpAddr, datagram: &Datagram, now: Now) {
        let host = self.formation.network_host(Some(from));
        self.discovery.heard.note(host, datagram, now.mono);
    }

    /// Somebody asks for beacons.
    pub(super) fn beacons_asked_for(&mut self, side: Side) {
        self.discovery.asked.set(Some(side), true);
    }

    /// Sends a beacon to the sides that may have one now: announced, or asked for.
    pub(super) fn beacon_to(&mut self, group: Vec<u8>, broadcast: Vec<u8>) {
        let asked = std::mem::take(&mut self.discovery.asked);
        let visibility = self.discovery.visibility;
        let may = |side| match visibility.of(side) {
            Visibility::Discoverable => true,
            Visibility::Quiet => asked.of(side),
            Visibility::Dark => false,
        };
        self.datagram_to(group, broadcast, may);
    }

    /// Asks for the beacons of others. A probe names nobody, so a quiet machine may ask.
    pub(super) fn ask_for_beacons(&mut self) {
        let probe = Datagram::Probe.encode();
        let visibility = self.discovery.visibility;
        self.datagram_to(probe.clone(), probe, |side| visibility.of(side) != Visibility::Dark);
    }

    fn send_adverts(&mut self, now: Now) {
        let visibility = self.discovery.visibility;
        let adverts: Vec<_> = self
            .discovery
            .adverts
            .values()
            .map(|advert| (advert.datagram.clone(), advert.side))
            .collect();
        for (datagram, to) in &adverts {
            self.datagram_to(datagram.clone(), datagram.clone(), |side| {
                to.is_none_or(|to| to == side) && visibility.of(side) == Visibility::Discoverable
            });
        }
        let next = (!adverts.is_empty()).then_some(now.mono + BEACON_INTERVAL_MS);
        self.discovery.adverts_at = next;
    }

    fn datagram_to(&mut self, group: Vec<u8>, broadcast: Vec<u8>, may: impl Fn(Side) -> bool) {
        let group = if may(Side::Loopback) { group } else { Vec::new() };
        let broadcast = if may(Side::Network) { broadcast } else { Vec::new() };
        if !(group.is_empty() && broadcast.is_empty()) {
            self.outputs.push_back(Output::Datagram { group, broadcast });
        }
    }

    pub(super) fn discovery_upkeep(&mut self, now: Now) {
        if self.discovery.adverts_at.is_some_and(|at| at <= now.mono) {
            match self.shutting_down {
                None => self.send_adverts(now),
                Some(_) => self.discovery.adverts_at = None,
            }
        }
        let due: Vec<(OpId, u64)> =
            self.discovery.looking.extract_if(.., |(_, until)| *until <= now.mono).collect();
        if due.is_empty() {
            return;
        }
        let found: Vec<Found> = self.discovery.heard.list(now.mono);
        for (op, _) in due {
            let result = Ok(CommandResult::Discovered(found.clone()));
            self.outputs.push_back(Output::Reply { op, result });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::records::ConsentPolicy;
    use super::super::{Input, NodeConfig};
    use super::*;
    use crate::codec::time::UnixMillis;
    use crate::identity::device::{DeviceId, DeviceKey};
    use crate::identity::entropy::{SeededEntropy, draw_key};

    fn key(seed: u64) -> DeviceKey {
        draw_key(&mut SeededEntropy::new(seed)).unwrap()
    }

    fn node() -> Node {
        let config = NodeConfig {
            port: 19876,
            first_contact: true,
            network_port: Some(4000),
            version: "0".into(),
            pid: 1,
            user: None,
            machine: None,
            machine_name: None,
            consent: ConsentPolicy::Ask,
            hub: None,
        };
        Node::new(config, key(1), 3000, Box::new(SeededEntropy::new(2)), at(0))
    }

    fn at(ms: u64) -> Now {
        Now { mono: ms, unix: UnixMillis(1_795_989_097_991 + ms) }
    }

    /// What has been sent to each side since the last look.
    #[derive(Debug, Default, PartialEq)]
    struct Sent {
        group: Vec<Datagram>,
        network: Vec<Datagram>,
    }

    /// Feeds the node and collects what it sends; other outputs go to `others`.
    fn feed(node: &mut Node, input: Input, ms: u64, others: &mut Vec<Output>) -> Sent {
        node.handle(input, at(ms));
        let mut sent = Sent::default();
        while let Some(output) = node.poll_output() {
            match output {
                Output::Datagram { group, broadcast } => {
                    sent.group.extend(Datagram::parse(&group));
                    sent.network.extend(Datagram::parse(&broadcast));
                }
                other => others.push(other),
            }
        }
        sent
    }

    fn sent(node: &mut Node, input: Input, ms: u64) -> Sent {
        feed(node, input, ms, &mut Vec::new())
    }

    fn beacons(node: &Node) -> Sent {
        let peer = node.daemon();
        Sent {
            group: vec![Datagram::Beacon { peer, port: 3000 }],
            network: vec![Datagram::Beacon { peer, port: 4000 }],
        }
    }

    fn set(visibility: Visibility, side: Option<Side>) -> Input {
        let command = DiscoveryCommand::SetVisibility { visibility, side };
        Input::Discovery { op: OpId(1), command }
    }

    fn datagram(from: [u8; 4], datagram: &Datagram) -> Input {
        Input::Datagram { from: from.into(), bytes: datagram.encode() }
    }

    const HERE: [u8; 4] = [127, 0, 0, 1];
    const THERE: [u8; 4] = [192, 0, 2, 7];

    #[test]
    fn a_discoverable_machine_announces_itself_and_answers() {
        let mut node = node();
        let started = sent(&mut node, Input::Start, 0);
        assert_eq!(started.group[0], beacons(&node).group[0]);
        assert_eq!(started.group[1], Datagram::Probe);
        assert_eq!(sent(&mut node, Input::Tick, BEACON_INTERVAL_MS), beacons(&node));
        let now = BEACON_INTERVAL_MS + 1_000;
        assert_eq!(sent(&mut node, datagram(HERE, &Datagram::Probe), now), beacons(&node));
    }

    #[test]
    fn a_quiet_one_only_answers_and_only_the_side_that_asks() {
        let mut node = node();
        sent(&mut node, set(Visibility::Quiet, None), 0);
        let started = sent(&mut node, Input::Start, 0);
        assert_eq!(started, Sent { group: vec![Datagram::Probe], network: vec![Datagram::Probe] });
        for n in 1..10 {
            let said = sent(&mut node, Input::Tick, n * BEACON_INTERVAL_MS);
            assert_eq!(said, Sent::default(), "{n}");
        }
        let (now, all) = (20 * BEACON_INTERVAL_MS, beacons(&node));
        let said = sent(&mut node, datagram(HERE, &Datagram::Probe), now);
        assert_eq!(said, Sent { group: all.group, ..Sent::default() });
        let said = sent(&mut node, datagram(THERE, &Datagram::Probe), now + 1_000);
        assert_eq!(said, Sent { network: all.network, ..Sent::default() });
        // And that once.
        assert_eq!(sent(&mut node, Input::Tick, now + 2_000), Sent::default());
    }

    #[test]
    fn a_dark_one_says_nothing_and_follows_nobody() {
        let mut node = node();
        sent(&mut node, set(Visibility::Dark, None), 0);
        assert_eq!(sent(&mut node, Input::Start, 0), Sent::default());
        let other = Datagram::Beacon { peer: key(9).id(), port: 5000 };
        for from in [HERE, THERE] {
            let mut others = Vec::new();
            for heard in [&Datagram::Probe, &other] {
                let said = feed(&mut node, datagram(from, heard), 1_000, &mut others);
                assert_eq!(said, Sent::default());
            }
            assert_eq!(sent(&mut node, Input::Tick, 2_000), Sent::default());
            assert!(!others.iter().any(|output| matches!(output, Output::Dial { .. })));
        }
        // Known again, it says so at once, and dials whom it hears.
        let said = sent(&mut node, set(Visibility::Discoverable, Some(Side::Loopback)), 3_000);
        let group = vec![beacons(&node).group.remove(0), Datagram::Probe];
        assert_eq!(said, Sent { group, ..Sent::default() });
        let mut others = Vec::new();
        feed(&mut node, datagram(HERE, &other), 4_000, &mut others);
        assert!(others.iter().any(|output| matches!(output, Output::Dial { .. })));
    }

    #[test]
    fn adverts_go_out_at_once_and_every_half_minute_where_the_machine_is_discoverable() {
        let mut node = node();
        let mut others = Vec::new();
        let advertise = |side| {
            let command = DiscoveryCommand::Advertise { name: "shop".into(), port: 9, side };
            Input::Discovery { op: OpId(2), command }
        };
        let shop = || vec![Datagram::Advert { name: "shop".into(), port: 9 }];
        let said = feed(&mut node, advertise(Some(Side::Network)), 0, &mut others);
        assert_eq!(said, Sent { network: shop(), ..Sent::default() });
        let id = others.iter().find_map(|output| match output {
            Output::Reply { result: Ok(CommandResult::Advertised(id)), .. } => Some(id.clone()),
            _ => None,
        });
        let id = id.unwrap();
        assert_eq!(id.len(), 21);
        assert_eq!(node.next_deadline().min(BEACON_INTERVAL_MS), node.next_deadline());
        let again = sent(&mut node, Input::Tick, BEACON_INTERVAL_MS);
        assert_eq!(again.network, shop());
        sent(&mut node, set(Visibility::Quiet, Some(Side::Network)), BEACON_INTERVAL_MS + 1);
        let hushed = sent(&mut node, Input::Tick, 3 * BEACON_INTERVAL_MS);
        assert!(!hushed.network.contains(&shop()[0]) && !hushed.group.contains(&shop()[0]));
        let back = set(Visibility::Discoverable, Some(Side::Network));
        assert!(sent(&mut node, back, 3 * BEACON_INTERVAL_MS + 1).network.contains(&shop()[0]));
        let withdraw = Input::Discovery { op: OpId(3), command: DiscoveryCommand::Withdraw(id) };
        sent(&mut node, withdraw, 3 * BEACON_INTERVAL_MS + 2);
        let gone = sent(&mut node, Input::Tick, 5 * BEACON_INTERVAL_MS);
        assert!(!gone.network.contains(&shop()[0]));
        // They are few, and have a name.
        let mut codes = Vec::new();
        for n in 0..=MAX_ADVERTS {
            let name = if n == 0 { " \u{200b}".to_owned() } else { format!("n{n}") };
            let command = DiscoveryCommand::Advertise { name, port: 9, side: None };
            let input = Input::Discovery { op: OpId(4), command };
            let mut others = Vec::new();
            feed(&mut node, input, 6 * BEACON_INTERVAL_MS, &mut others);
            codes.extend(others.iter().filter_map(|output| match output {
                Output::Reply { result: Err(error), .. } => Some(error.code),
                _ => None,
            }));
        }
        assert_eq!(codes, ["invalid_name"]);
        feed(&mut node, advertise(None), 6 * BEACON_INTERVAL_MS, &mut others);
        assert!(matches!(
            others.last(),
            Some(Output::Reply { result: Err(error), .. }) if error.code == "too_many_adverts"
        ));
    }

    #[test]
    fn who_looks_is_told_after_five_seconds_whom_it_could_hear() {
        let mut node = node();
        let mut others = Vec::new();
        let look = || Input::Discovery { op: OpId(7), command: DiscoveryCommand::Look };
        let asked = feed(&mut node, look(), 0, &mut others);
        assert_eq!(asked, Sent { group: vec![Datagram::Probe], network: vec![Datagram::Probe] });
        let other = DeviceId([0xcd; 32]);
        let own = Datagram::Beacon { peer: node.daemon(), port: 3000 };
        let heard = [
            (HERE, own),
            (THERE, Datagram::Beacon { peer: other, port: 5000 }),
            (HERE, Datagram::Advert { name: "shop".into(), port: 19876 }),
        ];
        for (n, (from, said)) in heard.iter().enumerate() {
            feed(&mut node, datagram(*from, said), 1_000 + n as u64, &mut others);
        }
        let found = |others: &[Output]| {
            others.iter().find_map(|output| match output {
                Output::Reply { op: OpId(7), result: Ok(CommandResult::Discovered(found)) } => {
                    Some(found.clone())
                }
                _ => None,
            })
        };
        feed(&mut node, Input::Tick, LOOK_MS - 1, &mut others);
        assert_eq!(found(&others), None);
        feed(&mut node, Input::Tick, LOOK_MS, &mut others);
        let list = found(&others).unwrap();
        let seen: Vec<_> = list.iter().map(|f| (f.host.to_string(), f.port, f.device)).collect();
        assert_eq!(
            seen,
            [("127.0.0.1".to_owned(), 19876, None), ("192.0.2.7".to_owned(), 5000, Some(other))]
        );
        let mut others = Vec::new();
        for _ in 0..=MAX_LOOKING {
            feed(&mut node, look(), 2 * LOOK_MS, &mut others);
        }
        let refused: Vec<_> = others
            .iter()
            .filter_map(|output| match output {
                Output::Reply { result: Err(error), .. } => Some(error.code),
                _ => None,
            })
            .collect();
        assert_eq!(refused, ["busy"]);
    }

    #[test]
    fn it_is_kept_and_what_could_not_be_stored_is_owed_as_it_is_now() {
        let mut node = node();
        node.recover(Vec::new(), at(0)).unwrap();
        let stored = |others: &[Output]| -> Vec<Record> {
            let batches = others.iter().filter_map(|output| match output {
                Output::Commit { records, .. } => Some(records.clone()),
                _ => None,
            });
            batches.flatten().filter(|r| matches!(r, Record::MeshVisibility { .. })).collect()
        };
        let mut others = Vec::new();
        feed(&mut node, set(Visibility::Dark, Some(Side::Network)), 0, &mut others);
        let first = stored(&others);
        let visibility = Sides { loopback: Visibility::Discoverable, network: Visibility::Dark };
        assert_eq!(first, [Record::MeshVisibility { visibility }]);
        let mut again = super::tests::node();
        again.recover(first.clone(), at(0)).unwrap();
        assert_eq!(again.mesh_visibility(), visibility);
        // The old word comes back from a store that failed: the new one is what it gets.
        let ticket = others.iter().find_map(|output| match output {
            Output::Commit { ticket, .. } => Some(*ticket),
            _ => None,
        });
        let mut others = Vec::new();
        feed(&mut node, set(Visibility::Quiet, None), 1, &mut others);
        let mut others = Vec::new();
        let failed = Input::CommitFailed { ticket: ticket.unwrap(), records: first };
        feed(&mut node, failed, 2, &mut others);
        feed(&mut node, Input::Tick, 10_000, &mut others);
        let visibility = Sides { loopback: Visibility::Quiet, network: Visibility::Quiet };
        assert_eq!(stored(&others), [Record::MeshVisibility { visibility }]);
    }
}
