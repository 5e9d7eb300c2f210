//! The requester's tools: what is granted, asked for, refused and forgotten.

use super::*;

#[test]
fn a_tool_of_the_requester_is_used_within_its_grant_and_asked_for() {
    let mut town = Town::new(&[(1, &[]), (2, ACCEPT)]);
    let capability = Capability {
        resource: Resource::parse("mcp:docs/**").unwrap(),
        actions: Seq::new(vec![Verb::parse("read").unwrap()]).unwrap(),
        args_schemas: Seq::default(),
        max_bytes_per_use: None,
    };
    let grant = Grant { capabilities: vec![capability], max_uses: 2, max_depth: 0 };
    let (task, job) = working(&mut town, |order| order.grants = vec![grant]);
    let request = |resource: &str| ToolRequest {
        call_id: None,
        resource: Resource::parse(resource).unwrap(),
        action: Verb::parse("read").unwrap(),
        arguments: json!({ "page": 1 }),
    };
    let now = UnixMillis(town.now);
    let Town { sides, entropy, .. } = &mut town;
    let bob = &mut sides.get_mut(&did(2)).unwrap().owner;
    let refused = bob.request_tool(&task, request("mcp:other/a"), now, entropy).unwrap_err();
    assert_eq!(refused.code(), Code::CapabilityNotGranted);
    let ask = |town: &mut Town| {
        town.with(2, |owner, now, entropy| {
            owner.request_tool(&task, request("mcp:docs/a"), now, entropy).unwrap()
        })
    };
    let first = ask(&mut town);
    town.settle_down(&mut echo);
    assert_eq!(town.question(1).1, Gate::ExternalSend);
    let about = town.owner(1).questions().next().unwrap().about.clone();
    assert_eq!(about, ["arguments (10 bytes): {\"page\":1}"]);
    // Sent again while the owner thinks: one question, one run.
    town.now += 6000;
    town.poll(2);
    town.settle_down(&mut echo);
    town.answer(1, Decision::Approved);
    let calls = |town: &mut Town| {
        let calls = town.side(1).actions.iter().filter_map(|action| match action {
            Action::CallTool { call, .. } => Some((**call).clone()),
            _ => None,
        });
        calls.collect::<Vec<_>>()
    };
    let asked = calls(&mut town);
    assert_eq!(asked.len(), 1);
    town.with(1, |owner, now, entropy| {
        ((), owner.tool_done(&task, &asked[0], Ok(json!("page")), now, entropy).unwrap())
    });
    town.settle_down(&mut echo);
    let answers = |town: &mut Town| {
        let answers = town.side(2).actions.iter().filter_map(|action| match action {
            Action::ToolAnswered { call, result, .. } => {
                Some((call.clone(), result.clone().map_err(|e| e.code())))
            }
            _ => None,
        });
        answers.collect::<Vec<(CallId, Result<Value, Code>)>>()
    };
    assert_eq!(answers(&mut town), [(first, Ok(json!("page")))]);
    let second = ask(&mut town);
    town.settle_down(&mut echo);
    town.answer(1, Decision::Denied);
    town.settle_down(&mut echo);
    assert_eq!(answers(&mut town)[1], (second, Err(Code::ApprovalDenied)));
    // A no has cost no use; there is one left, and then nobody is asked any more.
    ask(&mut town);
    town.settle_down(&mut echo);
    town.answer(1, Decision::Approved);
    assert_eq!(calls(&mut town).len(), 2);
    let fourth = ask(&mut town);
    town.settle_down(&mut echo);
    assert_eq!(answers(&mut town)[2], (fourth, Err(Code::UsesExhausted)));
    end(&mut town, &task, &job, Ended::Output(json!({ "n": 2 })));
    assert_eq!(town.state(2, &task), State::Settled);
}

/// The worker's end of a task in the hands of somebody who sends calls as they like.
struct Hostile {
    gateway: Gateway,
    task: Digest,
}

impl Hostile {
    /// Of a task that grants `mcp:docs/**:read`.
    fn new(town: &mut Town, uses: u64, change: impl FnOnce(&mut Order)) -> (Self, Job) {
        let capability = ToolName::parse("mcp:docs/**:read").unwrap().capability().unwrap();
        let grant = Grant { capabilities: vec![capability], max_uses: uses, max_depth: 0 };
        let (task, job) = working(town, |order| {
            order.grants = vec![grant];
            change(order);
        });
        let bob = town.side(2);
        let records = bob.disk.iter().filter_map(|stored| match &stored.record {
            OwnerRecord::Task { record } if stored.task == Some(task) => Some(record.clone()),
            _ => None,
        });
        let mut gateway = Gateway::new(person(2).secret(), None);
        gateway.restore_task(records.collect(), bob.keys.clone()).unwrap();
        (Self { gateway, task }, job)
    }

    /// Signs a call that is as it should be but for `change`, and sends it.
    fn call(&mut self, town: &mut Town, n: u64, change: impl FnOnce(&mut ToolCall)) -> ToolCall {
        let view = town.view(2, &self.task);
        let at = Time::from(UnixMillis(town.now));
        let mut call = ToolCall {
            call_id: CallId::draw(&mut town.entropy),
            task_id: view.task_id().clone(),
            contract_digest: view.contract_digest().unwrap(),
            caller_did: did(2),
            chain: Seq::new(vec![view.grants()[0].object.clone()]).unwrap(),
            resource: Resource::parse("mcp:docs/a").unwrap(),
            action: Verb::parse("read").unwrap(),
            arguments: json!({ "n": n }),
            issued_at: at,
            expires_at: at.plus(600_000),
            nonce: Nonce::draw(&mut town.entropy),
            signature: Signature::blank(Role::Worker, did(2)),
        };
        change(&mut call);
        let call = call.signed(&person(2).secret(), UnixMillis(town.now)).unwrap();
        self.send(town, &call);
        call
    }

    fn send(&mut self, town: &mut Town, call: &ToolCall) {
        let (task, now) = (self.task, UnixMillis(town.now));
        let sent = self
            .gateway
            .send_tool(&task, Some(call.clone()), None, now, &mut town.entropy)
            .unwrap();
        for envelope in sent.envelopes {
            let bytes = canonical(&envelope).unwrap();
            town.with(1, |owner, now, entropy| {
                ((), owner.receive(&bytes, &Route::Local, now, entropy).unwrap())
            });
        }
    }

    /// What came back since the last time: the calls, and why they were refused.
    fn heard(&mut self, town: &mut Town) -> Vec<(CallId, Option<Code>)> {
        let mut heard = Vec::new();
        for (to, bytes) in std::mem::take(&mut town.mail) {
            assert_eq!(to, did(2));
            let now = UnixMillis(town.now);
            let output = self.gateway.receive(&bytes, now, &mut town.entropy).unwrap().unwrap();
            heard.extend(output.effects.into_iter().filter_map(|effect| match effect {
                Effect::ToolResult(result) => {
                    Some((result.call_id.clone(), result.error.map(|error| error.code)))
                }
                _ => None,
            }));
        }
        heard
    }
}

fn tools_run(town: &mut Town) -> Vec<CallId> {
    let calls = town.side(1).actions.iter().filter_map(|action| match action {
        Action::CallTool { call, .. } => Some(call.call_id.clone()),
        _ => None,
    });
    calls.collect()
}

#[test]
fn questions_about_tools_keep_no_other_gate_from_asking_and_go_with_the_work() {
    let mut town = Town::new(&[(1, &[]), (2, ACCEPT)]);
    let (mut bob, job) = Hostile::new(&mut town, 1000, |order| {
        order.auto_approve = false;
        order.budget.max_total_tokens = Some(Count::clamped(100));
    });
    let task = bob.task;
    for n in 0..40 {
        bob.call(&mut town, n, |_| {});
    }
    let tools = gates(&town, 1)["external_send"];
    assert_eq!(tools, 32);
    let refused = bob.heard(&mut town);
    assert_eq!(refused.len(), 8);
    assert!(refused.iter().all(|(_, code)| *code == Some(Code::RateLimited)));
    // The budget's gate asks although the tools' is full.
    spend(&mut town, &task, 100);
    town.answer(2, Decision::Approved);
    town.settle_down(&mut echo);
    spend(&mut town, &task, 100);
    assert_eq!(gates(&town, 1), BTreeMap::from([("budget_overrun", 1), ("external_send", 32)]));
    approve(&mut town, 1, Gate::BudgetOverrun);
    town.settle_down(&mut echo);
    assert_eq!(gates(&town, 1), BTreeMap::from([("external_send", 32)]));
    // What is delivered is judged; the calls of that work are nobody's any more.
    end(&mut town, &task, &job, Ended::Output(json!({ "n": 2 })));
    assert_eq!(town.question(1).1, Gate::FinalAcceptance);
    town.answer(1, Decision::Approved);
    town.settle_down(&mut echo);
    assert_eq!(town.state(2, &task), State::Settled);
    assert!(tools_run(&mut town).is_empty());
    // Cancelled work asks for nothing either.
    let (mut bob, _) = Hostile::new(&mut town, 1000, |_| {});
    bob.call(&mut town, 1, |_| {});
    assert_eq!(town.question(1).1, Gate::ExternalSend);
    town.with(1, |owner, now, entropy| ((), owner.cancel(&bob.task, "", now, entropy).unwrap()));
    // While the worker does not say that it knows, nothing comes of a question that is over, and
    // nothing is due for it.
    town.mail.clear();
    town.now += 601_000;
    town.poll(1);
    assert!(town.owner(1).next_poll().unwrap().0 > town.now);
    town.settle_down(&mut echo);
    assert_eq!(town.state(1, &bob.task), State::Cancelling);
    assert_eq!(town.owner(1).questions().count(), 0);
}

#[test]
fn a_question_about_a_call_is_about_that_call_and_goes_with_it() {
    let mut town = Town::new(&[(1, &[]), (2, ACCEPT)]);
    let (mut bob, _) = Hostile::new(&mut town, 10, |_| {});
    let first = bob.call(&mut town, 1, |_| {});
    let (id, _) = town.question(1);
    // Its id is its own; the same again is the same.
    for n in 2..40 {
        bob.call(&mut town, n, |call| call.call_id = first.call_id.clone());
    }
    bob.send(&mut town, &first);
    let refused = bob.heard(&mut town);
    assert_eq!(refused, vec![(first.call_id.clone(), Some(Code::CallIdReused)); 38]);
    assert_eq!(town.question(1).0, id);
    town.answer(1, Decision::Approved);
    assert_eq!(tools_run(&mut town), std::slice::from_ref(&first.call_id));
    // One yes, one use; the same arguments are asked about anew, once for two calls.
    let twins = [1, 1].map(|n| bob.call(&mut town, n, |_| {}).call_id);
    assert_eq!(town.question(1).0, id);
    assert_eq!(tools_run(&mut town).len(), 1);
    town.answer(1, Decision::Approved);
    assert_eq!((tools_run(&mut town).len(), town.question(1).0), (2, id.clone()));
    town.answer(1, Decision::Denied);
    let refused = bob.heard(&mut town);
    let [(denied, Some(Code::ApprovalDenied))] = &refused[..] else { panic!("{refused:?}") };
    assert!(twins.contains(denied) && !tools_run(&mut town).contains(denied));
    // A call that is over takes its question along, before that is over, and a yes comes too late.
    let short = bob.call(&mut town, 3, |call| call.expires_at = call.issued_at.plus(1000));
    let (id, _) = town.question(1);
    let due = town.owner(1).next_poll().unwrap();
    assert!(due.0 > town.now && due.0 <= short.expires_at.plus(SKEW_MS).millis().0, "{due:?}");
    town.now = short.expires_at.plus(SKEW_MS).millis().0;
    town.poll(1);
    assert_eq!(bob.heard(&mut town), [(short.call_id.clone(), Some(Code::TokenExpired))]);
    let now = UnixMillis(town.now);
    let Town { sides, entropy, .. } = &mut town;
    let alice = &mut sides.get_mut(&did(1)).unwrap().owner;
    let yes = Given::Word(Decision::Approved, String::new());
    assert_eq!(alice.answer(&id, yes, now, entropy).unwrap_err().code(), Code::BadId);
    bob.call(&mut town, 3, |_| {});
    assert_eq!(town.question(1).0, id, "asked about again");
    assert_eq!(tools_run(&mut town).len(), 2);
}

#[test]
fn the_owner_is_not_asked_about_what_can_never_be_allowed() {
    type Change<'a> = &'a dyn Fn(&mut ToolCall);
    let mut town = Town::new(&[(1, &[]), (2, ACCEPT)]);
    let (mut bob, _) = Hostile::new(&mut town, 1, |_| {});
    let forged = |call: &mut ToolCall| {
        let mut token = call.chain[0].clone();
        token.limits.max_uses = Int::new(1000).unwrap();
        call.chain = Seq::new(vec![token]).unwrap();
    };
    let own = |call: &mut ToolCall| {
        let mut token = call.chain[0].clone();
        token.issuer_did = did(2);
        let token = token.signed(&person(2).secret(), UnixMillis(START)).unwrap();
        call.chain = Seq::new(vec![token]).unwrap();
    };
    let never: [(Change<'_>, Code); 8] = [
        (&|call| call.resource = Resource::parse("mcp:x/a").unwrap(), Code::CapabilityNotGranted),
        (&|call| call.action = Verb::parse("write").unwrap(), Code::CapabilityNotGranted),
        (
            &|call| call.resource = Resource::parse("mcp:docs/**").unwrap(),
            Code::CapabilityNotGranted,
        ),
        (&forged, Code::BadSignature),
        (&own, Code::UntrustedIssuer),
        (&|call| call.expires_at = Time::from(UnixMillis(START - 500_000)), Code::TokenExpired),
        (&|call| call.expires_at = call.expires_at.plus(1), Code::TokenExpired),
        (&|call| call.contract_digest = Digest::of(&1).unwrap(), Code::DigestMismatch),
    ];
    for (change, code) in never {
        let call = bob.call(&mut town, 1, change);
        assert_eq!(town.owner(1).questions().count(), 0, "{code:?}");
        assert_eq!(bob.heard(&mut town), [(call.call_id, Some(code))]);
    }
    // None of it was counted. Of two that wait for the one use, a yes to both lets one run.
    let two = [1, 2].map(|n| bob.call(&mut town, n, |_| {}).call_id);
    assert_eq!(gates(&town, 1)["external_send"], 2);
    approve(&mut town, 1, Gate::ExternalSend);
    let ran = tools_run(&mut town);
    let [ran] = &ran[..] else { panic!("{ran:?}") };
    let other = two.into_iter().find(|id| id != ran).unwrap();
    assert_eq!(bob.heard(&mut town), [(other, Some(Code::UsesExhausted))]);
    let more = bob.call(&mut town, 3, |_| {});
    assert_eq!(town.owner(1).questions().count(), 0);
    assert_eq!(bob.heard(&mut town), [(more.call_id, Some(Code::UsesExhausted))]);
}

#[test]
fn a_flood_of_refused_calls_is_answered_and_leaves_little_in_the_journal() {
    let mut town = Town::new(&[(1, &[]), (2, ACCEPT)]);
    let (mut bob, _) = Hostile::new(&mut town, 1, |_| {});
    let stored = town.side(1).disk.len();
    for n in 0..300 {
        bob.call(&mut town, n, |call| call.resource = Resource::parse("mcp:x/a").unwrap());
    }
    assert_eq!(bob.heard(&mut town).len(), 300);
    let journal = town.side(1).disk[stored..].iter().map(|stored| match &stored.record {
        OwnerRecord::Journal { entry } => (**entry).clone(),
        other => panic!("{other:?}"),
    });
    let journal: Vec<_> = journal.collect();
    // The first 64, the 128th and the 256th.
    assert_eq!(journal.len(), 66);
    assert!(journal.iter().all(|entry| &*entry.event == "CALL_REFUSED"));
    verify_journal(&GatewayGenesis { did: did(1) }, &journal).unwrap();
}
