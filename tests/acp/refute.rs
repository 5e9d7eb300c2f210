//! What must be refused (design 20 B): bytes made by hand, one case each, with the code. Nothing here
//! uses the library's own constructors; tokens and objects are JSON, signed by a few lines of
//! `support`.

use commsd::acp::approval::{ApprovalBook, Attempt};
use commsd::acp::capability::{Call, Guard, UseCounters};
use commsd::acp::code::Code;
use commsd::acp::did::Did;
use commsd::acp::json::parse;
use commsd::acp::objects::*;
use commsd::acp::revocation::RevocationRegistry;
use commsd::acp::sign::Signed;
use commsd::acp::value::{Read, TaskId};
use commsd::codec::time::UnixMillis;
use serde_json::{Value, json};

use crate::support::*;

/// One second into the golden hour.
const NOW: UnixMillis = UnixMillis(1_796_083_201_000);

/// A token by hand: `by` grants to `to`, narrowing `parent`.
fn token(by: u8, to: u8, parent: Option<&Value>, change: impl FnOnce(&mut Value)) -> Value {
    let mut body = json!({
        "type": "CapabilityToken", "version": "1.0",
        "tokenId": format!("cap_handmade{by}{to}{}", parent.map_or(0, |p| p["depth"].as_u64().unwrap() + 1)),
        "issuerDid": person(by).did, "audienceDid": person(to).did, "taskId": "task_example001",
        "parentDigest": parent.map(digest), "depth": parent.map_or(0, |p| p["depth"].as_u64().unwrap() + 1),
        "capabilities": [{ "resource": "mcp:docs/project/**", "actions": ["list", "read"],
            "argsSchemas": [], "maxBytesPerUse": 1000 }],
        "limits": { "notBefore": "2026-12-01T00:00:00.000Z", "expiresAt": "2026-12-01T01:00:00.000Z",
            "maxUses": 3, "maxDepth": 3 },
        "issuedAt": "2026-12-01T00:00:00.000Z", "nonce": "AAAAAAAAAAAAAAAAAAAAAA",
    });
    change(&mut body);
    person(by).sign(body, "capability-token", "issuer")
}

fn root() -> Value {
    token(1, 2, None, |_| {})
}

struct Try {
    owner: u8,
    caller: u8,
    now: UnixMillis,
    resource: &'static str,
    action: &'static str,
    arguments: Value,
    bytes: u64,
    revocations: RevocationRegistry,
}

impl Default for Try {
    fn default() -> Self {
        Self {
            owner: 1,
            caller: 2,
            now: NOW,
            resource: "mcp:docs/project/a",
            action: "read",
            arguments: json!({}),
            bytes: 10,
            revocations: RevocationRegistry::new(),
        }
    }
}

impl Try {
    fn run(&self, chain: &[Value]) -> Result<(), Code> {
        let read = |value: &Value| {
            let bytes = serde_json::to_vec(value).unwrap();
            CapabilityToken::read(parse(&bytes, 1 << 20).map_err(|e| e.code())?)
                .map_err(|e| e.code())
        };
        let chain = chain.iter().map(read).collect::<Result<Vec<_>, _>>()?;
        let guard = Guard {
            owner: Did::parse(&person(self.owner).did).unwrap(),
            caller: Did::parse(&person(self.caller).did).unwrap(),
            now: self.now,
            revocations: &self.revocations,
        };
        let (resource, action) =
            (Resource::parse(self.resource).unwrap(), Action::parse(self.action).unwrap());
        let call = Call {
            resource: &resource,
            action: &action,
            arguments: &self.arguments,
            bytes: self.bytes,
        };
        guard.check(&chain, &call).map(drop).map_err(|e| e.code())
    }
}

fn refused(chain: &[Value]) -> Code {
    Try::default().run(chain).unwrap_err()
}

/// Without this, all refusals would show nothing.
#[test]
fn the_honest_chain_passes() {
    assert_eq!(Try::default().run(&[root()]), Ok(()));
    let root = root();
    let child = token(2, 3, Some(&root), |_| {});
    assert_eq!(Try { caller: 3, ..Try::default() }.run(&[root, child]), Ok(()));
    let vectors = vectors();
    let golden = [vectors["signed"][4]["object"].clone(), vectors["signed"][5]["object"].clone()];
    let attempt = Try { caller: 1, resource: "mcp:docs/project/specs/x", ..Try::default() };
    assert_eq!(attempt.run(&golden), Ok(()));
}

/// DelegateOS 1: the token names the root as issuer and is signed by anyone.
#[test]
fn root_forgery() {
    let mut forged = root();
    forged["signature"] =
        person(3).signature(&forged, "capability-token", "issuer", "2026-12-01T00:00:00.000Z");
    assert_eq!(refused(&[forged.clone()]), Code::WrongSigner);
    // With the root's name on the signature.
    forged["signature"]["signerDid"] = json!(person(1).did);
    assert_eq!(refused(&[forged]), Code::BadSignature);
    // Truly somebody else's token.
    assert_eq!(refused(&[token(3, 2, None, |_| {})]), Code::UntrustedIssuer);
}

/// DelegateOS 2 and its neighbours.
#[test]
fn resources_are_no_text() {
    for resource in [
        "mcp:docs/projectSECRET/x",
        "mcp:docs",
        "mcp:docs/other",
        "net:docs/project/a",
        "mcp:docs/Project/a",
    ] {
        let attempt = Try { resource, ..Try::default() };
        assert_eq!(attempt.run(&[root()]), Err(Code::CapabilityNotGranted), "{resource}");
    }
    for resource in ["mcp:docs/projectSECRET/**", "mcp:docs/**", "mcp:**", "mcp:docs/*"] {
        let root = root();
        let child =
            token(2, 3, Some(&root), |t| t["capabilities"][0]["resource"] = json!(resource));
        let attempt = Try { caller: 3, ..Try::default() };
        assert_eq!(attempt.run(&[root, child]), Err(Code::AttenuationViolation), "{resource}");
    }
    for resource in [
        "mcp:docs/project/../x",
        "mcp:docs/project/./x",
        "mcp:docs//x",
        "mcp:docs/project/",
        "mcp:docs/%2e%2e/x",
        "mcp:docs/pro*/x",
    ] {
        let odd = token(1, 2, None, |t| t["capabilities"][0]["resource"] = json!(resource));
        assert_eq!(refused(&[odd]), Code::BadField, "{resource}");
    }
    // A call names one thing.
    let attempt = Try { resource: "mcp:docs/project/*", ..Try::default() };
    assert_eq!(attempt.run(&[root()]), Err(Code::CapabilityNotGranted));
}

/// DelegateOS 3: the depth of the token counts.
#[test]
fn depth_is_enforced() {
    let root = token(1, 2, None, |t| t["limits"]["maxDepth"] = json!(1));
    let child = token(2, 3, Some(&root), |t| t["limits"]["maxDepth"] = json!(1));
    let grandchild = token(3, 4, Some(&child), |t| t["limits"]["maxDepth"] = json!(1));
    let attempt = Try { caller: 4, ..Try::default() };
    assert_eq!(attempt.run(&[root.clone(), child.clone(), grandchild]), Err(Code::DepthExceeded));
    // Raised on the way.
    let child = token(2, 3, Some(&root), |t| t["limits"]["maxDepth"] = json!(2));
    let attempt = Try { caller: 3, ..Try::default() };
    assert_eq!(attempt.run(&[root, child]), Err(Code::AttenuationViolation));
    let mut nine = vec![token(1, 2, None, |t| t["limits"]["maxDepth"] = json!(8))];
    for n in 0..8 {
        let (by, to) = if n % 2 == 0 { (2, 1) } else { (1, 2) };
        let last = nine.last().unwrap().clone();
        nine.push(token(by, to, Some(&last), |t| t["limits"]["maxDepth"] = json!(8)));
    }
    assert_eq!(refused(&nine), Code::ChainBroken);
}

/// DelegateOS 4: nothing is skipped for being left out. Actions count.
#[test]
fn action_and_arguments_count() {
    let attempt = Try { action: "write", ..Try::default() };
    assert_eq!(attempt.run(&[root()]), Err(Code::CapabilityNotGranted));
    let attempt = Try { bytes: 1001, ..Try::default() };
    assert_eq!(attempt.run(&[root()]), Err(Code::CapabilityNotGranted));
    let with = |schemas: Value| move |t: &mut Value| t["capabilities"][0]["argsSchemas"] = schemas;
    let narrow = json!([{ "required": ["q"] }, { "properties": { "q": { "maxLength": 2 } } }]);
    let root = token(1, 2, None, with(narrow.clone()));
    for (arguments, good) in
        [(json!({ "q": "ab" }), true), (json!({ "q": "abc" }), false), (json!({}), false)]
    {
        let attempt = Try { arguments, ..Try::default() };
        assert_eq!(attempt.run(&[root.clone()]).is_ok(), good);
    }
    // The child leaves a schema out.
    let child = token(2, 3, Some(&root), with(json!([narrow[0]])));
    let attempt = Try { caller: 3, arguments: json!({ "q": "ab" }), ..Try::default() };
    assert_eq!(attempt.run(&[root.clone(), child]), Err(Code::AttenuationViolation));
    // The child keeps it in words but as another schema.
    let child = token(
        2,
        3,
        Some(&root),
        with(json!([narrow[0], { "properties": { "q": { "maxLength": 3 } } }])),
    );
    assert_eq!(attempt.run(&[root.clone(), child]), Err(Code::AttenuationViolation));
    // More actions, not sorted, twice.
    let child = token(2, 3, Some(&root), |t| {
        t["capabilities"][0]["actions"] = json!(["list", "read", "write"]);
        t["capabilities"][0]["argsSchemas"] = narrow.clone();
    });
    assert_eq!(attempt.run(&[root, child]), Err(Code::AttenuationViolation));
    for actions in [json!(["read", "list"]), json!(["read", "read"])] {
        let odd = token(1, 2, None, |t| t["capabilities"][0]["actions"] = actions);
        assert_eq!(refused(&[odd]), Code::BadField);
    }
    for actions in [json!([]), json!(["Read"]), json!(["*"]), json!([7])] {
        let odd = token(1, 2, None, |t| t["capabilities"][0]["actions"] = actions);
        assert_eq!(refused(&[odd]), Code::BadField);
    }
}

/// One parent capability must cover a child's; two halves do not make a whole.
#[test]
fn no_piecing_together() {
    let root = token(1, 2, None, |t| {
        t["capabilities"] = json!([
            { "resource": "mcp:docs/a", "actions": ["read"], "argsSchemas": [], "maxBytesPerUse": null },
            { "resource": "mcp:docs/b", "actions": ["write"], "argsSchemas": [], "maxBytesPerUse": null },
        ]);
    });
    for capability in [
        json!({ "resource": "mcp:docs/a", "actions": ["read", "write"], "argsSchemas": [], "maxBytesPerUse": null }),
        json!({ "resource": "mcp:docs/*", "actions": ["read"], "argsSchemas": [], "maxBytesPerUse": null }),
        json!({ "resource": "mcp:docs/b", "actions": ["read"], "argsSchemas": [], "maxBytesPerUse": null }),
    ] {
        let child = token(2, 3, Some(&root), |t| t["capabilities"] = json!([capability]));
        let attempt = Try { caller: 3, resource: "mcp:docs/a", ..Try::default() };
        assert_eq!(attempt.run(&[root.clone(), child]), Err(Code::AttenuationViolation));
    }
    // An unlimited child of a limited parent.
    let limited = self::root();
    let child =
        token(2, 3, Some(&limited), |t| t["capabilities"][0]["maxBytesPerUse"] = json!(null));
    let attempt = Try { caller: 3, ..Try::default() };
    assert_eq!(attempt.run(&[limited, child]), Err(Code::AttenuationViolation));
}

/// Biscuit 001 to 009 by analogy, and chains with a link left out, reordered or from elsewhere.
#[test]
fn chains_hold_together() {
    let root = root();
    let child = token(2, 3, Some(&root), |_| {});
    let grandchild = token(3, 4, Some(&child), |_| {});
    let attempt = Try { caller: 4, ..Try::default() };
    let run =
        |chain: &[&Value]| attempt.run(&chain.iter().map(|t| (*t).clone()).collect::<Vec<_>>());
    assert_eq!(run(&[&root, &child, &grandchild]), Ok(()));
    assert_eq!(run(&[]), Err(Code::ChainBroken));
    assert_eq!(run(&[&root, &grandchild]), Err(Code::ChainBroken));
    assert_eq!(run(&[&child, &grandchild]), Err(Code::UntrustedIssuer));
    assert_eq!(run(&[&root, &grandchild, &child]), Err(Code::ChainBroken));
    assert_eq!(run(&[&root, &child, &child, &grandchild]), Err(Code::ChainBroken));
    assert_eq!(run(&[&root, &child]), Err(Code::WrongAudience));
    // From another task; narrowing another root; with a forged place.
    let other = token(1, 2, None, |t| t["taskId"] = json!("task_example002"));
    let elsewhere = token(2, 4, Some(&other), |_| {});
    assert_eq!(run(&[&other, &elsewhere]), Err(Code::ChainBroken));
    let lying = token(2, 4, Some(&root), |t| t["parentDigest"] = json!(digest(&child)));
    assert_eq!(run(&[&root, &lying]), Err(Code::ChainBroken));
    let shallow = token(2, 4, Some(&root), |t| t["depth"] = json!(0));
    assert_eq!(run(&[&root, &shallow]), Err(Code::ChainBroken));
    let deep_root = token(1, 4, None, |t| t["depth"] = json!(1));
    assert_eq!(run(&[&deep_root]), Err(Code::UntrustedIssuer));
    // Not issued by whom the root was for.
    let stolen = token(3, 4, Some(&root), |_| {});
    assert_eq!(run(&[&root, &stolen]), Err(Code::ChainBroken));
    // A bit of a signature, and a signature of another object.
    let mut broken = root.clone();
    let value = broken["signature"]["value"].as_str().unwrap().to_owned();
    let flipped = if value.starts_with('A') { "B" } else { "A" };
    broken["signature"]["value"] = json!(format!("{flipped}{}", &value[1..]));
    assert_eq!(refused(&[broken]), Code::BadSignature);
    let mut moved = root.clone();
    moved["signature"] = child["signature"].clone();
    assert_eq!(refused(&[moved]), Code::WrongSigner);
    let mut moved = root.clone();
    moved["signature"] = other["signature"].clone();
    assert_eq!(refused(&[moved]), Code::BadSignature);
}

#[test]
fn times_and_limits() {
    let at = |ms: u64| Try { now: UnixMillis(ms), ..Try::default() }.run(&[root()]);
    let end = 1_796_086_800_000;
    assert_eq!(at(end + 59_999), Ok(()));
    assert_eq!(at(end + 60_000), Err(Code::TokenExpired));
    let start = 1_796_083_200_000;
    assert_eq!(at(start - 60_000), Ok(()));
    assert_eq!(at(start - 60_001), Err(Code::TokenNotYetValid));
    let root = root();
    for (member, value) in [
        ("notBefore", json!("2026-11-30T23:59:59.999Z")),
        ("expiresAt", json!("2026-12-01T01:00:00.001Z")),
        ("maxUses", json!(4)),
        ("maxDepth", json!(4)),
    ] {
        let child = token(2, 3, Some(&root), |t| t["limits"][member] = value);
        let attempt = Try { caller: 3, ..Try::default() };
        assert_eq!(
            attempt.run(&[root.clone(), child]),
            Err(Code::AttenuationViolation),
            "{member}"
        );
    }
    for (member, value) in [
        ("maxUses", json!(0)),
        ("maxUses", json!(1_000_001)),
        ("maxDepth", json!(9)),
        ("maxUses", json!(null)),
    ] {
        let odd = token(1, 2, None, |t| t["limits"][member] = value);
        assert_eq!(refused(&[odd]), Code::BadField, "{member}");
    }
}

/// Uses are counted for every link, and by the token's digest (decision 40).
#[test]
fn uses_are_counted() {
    let read = |value: &Value| CapabilityToken::read(value.clone()).unwrap();
    let root = root();
    let one = token(2, 3, Some(&root), |t| t["limits"]["maxUses"] = json!(2));
    let two = token(2, 3, Some(&root), |t| t["nonce"] = json!("AQEBAQEBAQEBAQEBAQEBAQ"));
    let revocations = RevocationRegistry::new();
    let (owner, caller) =
        (Did::parse(&person(1).did).unwrap(), Did::parse(&person(3).did).unwrap());
    let guard = Guard { owner, caller, now: NOW, revocations: &revocations };
    let (resource, action) =
        (Resource::parse("mcp:docs/project/a").unwrap(), Action::parse("read").unwrap());
    let arguments = json!(null);
    let call = Call { resource: &resource, action: &action, arguments: &arguments, bytes: 0 };
    let mut counters = UseCounters::new();
    let mut go = |child: &Value| {
        let chain = [read(&root), read(child)];
        guard.check(&chain, &call).unwrap().count(&mut counters).map_err(|e| e.code())
    };
    // Same id, other token: both use up the root's three.
    assert_eq!(one["tokenId"], two["tokenId"]);
    let first = go(&one).unwrap();
    assert!(go(&one).is_ok());
    assert_eq!(go(&one), Err(Code::UsesExhausted));
    assert!(go(&two).is_ok());
    assert_eq!(go(&two), Err(Code::UsesExhausted));
    // Counts come back from the store, and never fall.
    let mut restored = UseCounters::new();
    restored.restore(&first);
    assert_eq!(first.0.iter().map(|(digest, _)| restored.uses(digest)).collect::<Vec<_>>(), [1, 1]);
}

fn notice(by: u8, issuer: u8, kind: &str, target: &str, effective: &str) -> Value {
    let body = json!({
        "type": "RevocationNotice", "version": "1.0", "noticeId": "rev_handmade001",
        "issuerDid": person(issuer).did, "targetType": kind, "targetId": target, "reason": "",
        "issuedAt": "2026-12-01T00:00:00.000Z", "effectiveAt": effective,
    });
    person(by).sign(body, "revocation-notice", "issuer")
}

#[test]
fn only_issuers_revoke() {
    let (root, at) = (root(), "2026-12-01T00:00:00.000Z");
    let child = token(2, 3, Some(&root), |_| {});
    let (root_id, child_id) =
        (root["tokenId"].as_str().unwrap(), child["tokenId"].as_str().unwrap());
    let with = |notices: &[Value]| {
        let mut attempt = Try { caller: 3, ..Try::default() };
        for notice in notices {
            let notice = RevocationNotice::read(notice.clone()).unwrap();
            let _ = attempt.revocations.add(notice, NOW);
        }
        attempt.run(&[root.clone(), child.clone()])
    };
    assert_eq!(with(&[]), Ok(()));
    // Either issuer stops the chain; a notice before the token was ever seen counts.
    assert_eq!(with(&[notice(1, 1, "capability", root_id, at)]), Err(Code::TokenRevoked));
    assert_eq!(with(&[notice(2, 2, "capability", child_id, at)]), Err(Code::TokenRevoked));
    // A stranger, the audience, the parent's issuer, another kind of target: nothing happens.
    assert_eq!(with(&[notice(3, 3, "capability", root_id, at)]), Ok(()));
    assert_eq!(with(&[notice(2, 2, "capability", root_id, at)]), Ok(()));
    assert_eq!(with(&[notice(1, 1, "capability", child_id, at)]), Ok(()));
    assert_eq!(with(&[notice(1, 1, "invite", root_id, at)]), Ok(()));
    // In somebody's name.
    assert_eq!(with(&[notice(3, 1, "capability", root_id, at)]), Ok(()));
    let forged = RevocationNotice::read(notice(3, 1, "capability", root_id, at)).unwrap();
    let code = RevocationRegistry::new().add(forged, NOW).unwrap_err().code();
    assert_eq!(code, Code::WrongSigner);
    // A future effect waits; a past one is bounded.
    let later = "2026-12-01T00:00:02.000Z";
    assert_eq!(with(&[notice(1, 1, "capability", root_id, later)]), Ok(()));
    let early =
        RevocationNotice::read(notice(1, 1, "capability", root_id, "2026-11-30T23:54:59.999Z"));
    let code = RevocationRegistry::new().add(early.unwrap(), NOW).unwrap_err().code();
    assert_eq!(code, Code::BadTime);
}

fn receipt(by: u8, change: impl FnOnce(&mut Value)) -> Value {
    let mut body = json!({
        "type": "ApprovalReceipt", "version": "1.0", "receiptId": "apr_handmade001",
        "taskId": "task_example001", "gate": "contract_acceptance", "decision": "approved",
        "mode": "human", "targetDigest": digest(&json!({
            "gate": "contract_acceptance", "contractDigest": format!("sha256:{}", "1".repeat(64)),
        })),
        "approverDid": person(by).did, "policyDigest": null, "reason": "",
        "issuedAt": "2026-12-01T00:00:00.000Z", "expiresAt": "2026-12-01T00:10:00.000Z",
        "maxUses": 1, "nonce": "AAAAAAAAAAAAAAAAAAAAAA",
    });
    change(&mut body);
    person(by).sign(body, "approval-receipt", "owner")
}

fn approve(
    value: &Value,
    now: u64,
    policy: Option<&ApprovalPolicy>,
    book: &mut ApprovalBook,
) -> Result<(), Code> {
    let receipt = ApprovalReceipt::read(value.clone()).map_err(|e| e.code())?;
    let contract_digest =
        commsd::acp::value::Digest::parse(&format!("sha256:{}", "1".repeat(64))).unwrap();
    let target = Target::ContractAcceptance { contract_digest };
    let task_id = TaskId::parse("task_example001").unwrap();
    let approver = Did::parse(&person(2).did).unwrap();
    let attempt =
        Attempt { target: &target, task_id: &task_id, approver, policy, now: UnixMillis(now) };
    book.use_once(&receipt, &attempt).map(drop).map_err(|e| e.code())
}

#[test]
fn approvals_are_for_one_action_once() {
    let now = NOW.0;
    let once = |value: &Value| approve(value, now, None, &mut ApprovalBook::new());
    let good = receipt(2, |_| {});
    assert_eq!(once(&good), Ok(()));
    let mut book = ApprovalBook::new();
    assert_eq!(approve(&good, now, None, &mut book), Ok(()));
    assert_eq!(approve(&good, now, None, &mut book), Err(Code::ApprovalUsed));
    // The same id on another receipt is no second one.
    let twin = receipt(2, |r| r["nonce"] = json!("AQEBAQEBAQEBAQEBAQEBAQ"));
    assert_eq!(approve(&twin, now, None, &mut book), Err(Code::ApprovalUsed));
    for (change, code) in [
        (json!({ "taskId": "task_example002" }), Code::ApprovalMismatch),
        (json!({ "gate": "final_acceptance" }), Code::ApprovalMismatch),
        (json!({ "targetDigest": format!("sha256:{}", "2".repeat(64)) }), Code::ApprovalMismatch),
        (json!({ "decision": "denied" }), Code::ApprovalDenied),
        (json!({ "policyDigest": format!("sha256:{}", "2".repeat(64)) }), Code::ApprovalMismatch),
        (json!({ "mode": "policy" }), Code::ApprovalMismatch),
        (json!({ "maxUses": 2 }), Code::BadField),
        (json!({ "mode": "auto" }), Code::BadField),
    ] {
        let changed = receipt(2, |r| {
            for (name, value) in change.as_object().unwrap() {
                r[name] = value.clone();
            }
        });
        assert_eq!(once(&changed), Err(code), "{change}");
    }
    assert_eq!(once(&receipt(1, |_| {})), Err(Code::WrongSigner));
    let end = 1_796_083_800_000;
    assert_eq!(approve(&good, end + 59_999, None, &mut ApprovalBook::new()), Ok(()));
    assert_eq!(
        approve(&good, end + 60_000, None, &mut ApprovalBook::new()),
        Err(Code::ApprovalExpired)
    );
    // By a policy: the one in force, and only where it says auto.
    let policy = |gate: &str| {
        json!({
            "type": "ApprovalPolicy", "version": "1.0", "did": person(2).did, "createdAt": "2026-12-01T00:00:00.000Z",
            "gates": { "external_send": "ask", "contract_acceptance": gate, "budget_overrun": "ask",
                "redelegation": "ask", "final_acceptance": "ask" },
        })
    };
    let by_policy = |text: &Value| {
        receipt(2, |r| {
            r["mode"] = json!("policy");
            r["policyDigest"] = json!(digest(text));
        })
    };
    let (auto, ask) = (policy("auto"), policy("ask"));
    let read = |text: &Value| ApprovalPolicy::read(text.clone()).unwrap();
    let judge = |receipt: &Value, policy: Option<&ApprovalPolicy>| {
        approve(receipt, now, policy, &mut ApprovalBook::new())
    };
    assert_eq!(judge(&by_policy(&auto), Some(&read(&auto))), Ok(()));
    assert_eq!(judge(&by_policy(&auto), Some(&read(&ask))), Err(Code::PolicyChanged));
    assert_eq!(judge(&by_policy(&ask), Some(&read(&ask))), Err(Code::PolicyChanged));
    assert_eq!(judge(&by_policy(&auto), None), Err(Code::PolicyChanged));
}

/// Signer, role, type and place are all inside the signature.
#[test]
fn signatures_do_not_travel() {
    let vectors = vectors();
    let golden = vectors["signed"][0]["object"].clone();
    let judge = |value: &Value| {
        ApprovalReceipt::read(value.clone())
            .map_err(|e| e.code())
            .and_then(|r| r.verify().map_err(|e| e.code()))
    };
    assert_eq!(judge(&golden), Ok(()));
    // Another valid did, with that did's own good signature.
    let mut swapped = golden.clone();
    swapped["signature"] =
        person(1).signature(&golden, "approval-receipt", "owner", "2026-12-01T00:00:00.000Z");
    assert_eq!(judge(&swapped), Err(Code::WrongSigner));
    let mut role = golden.clone();
    role["signature"] =
        person(2).signature(&golden, "approval-receipt", "worker", "2026-12-01T00:00:00.000Z");
    assert_eq!(judge(&role), Err(Code::WrongRole));
    role["signature"]["role"] = json!("owner");
    assert_eq!(judge(&role), Err(Code::BadSignature));
    // Same body under another payload type.
    let mut kind = golden.clone();
    kind["signature"] =
        person(2).signature(&golden, "usage-receipt", "owner", "2026-12-01T00:00:00.000Z");
    assert_eq!(judge(&kind), Err(Code::BadSignature));
    // Signed without the encoding, over the canonical body alone.
    for alg in ["ed25519", "Ed25519ph", "none", "ES256"] {
        let mut other = golden.clone();
        other["signature"]["alg"] = json!(alg);
        assert_eq!(judge(&other), Err(Code::BadField));
    }
    for value in ["", "AAAA", &"A".repeat(87), &format!("{}=", "A".repeat(85))] {
        let mut other = golden.clone();
        other["signature"]["value"] = json!(value);
        assert_eq!(judge(&other), Err(Code::BadField));
    }
    // S plus the order of the group: the same equation, another text.
    let mut bytes = data_encoding::BASE64URL_NOPAD
        .decode(golden["signature"]["value"].as_str().unwrap().as_bytes())
        .unwrap();
    let order = data_encoding::HEXLOWER
        .decode(b"edd3f55c1a631258d69cf7a2def9de1400000000000000000000000000000010")
        .unwrap();
    let mut carry = 0_u16;
    for (byte, add) in bytes[32..].iter_mut().zip(order) {
        let sum = u16::from(*byte) + u16::from(add) + carry;
        (*byte, carry) = ((sum & 0xff) as u8, sum >> 8);
    }
    let mut malleable = golden.clone();
    malleable["signature"]["value"] = json!(data_encoding::BASE64URL_NOPAD.encode(&bytes));
    assert_eq!(judge(&malleable), Err(Code::BadSignature));
}

/// The strict reader in front of an object (DelegateOS 5).
#[test]
fn bytes_are_read_strictly() {
    let vectors = vectors();
    let text = serde_json::to_string(&vectors["signed"][0]["object"]).unwrap();
    let judge = |text: &str| {
        let value = parse(text.as_bytes(), 1 << 20).map_err(|e| e.code())?;
        ApprovalReceipt::read(value).map(drop).map_err(|e| e.code())
    };
    assert_eq!(judge(&text), Ok(()));
    let with = |from: &str, to: &str| {
        assert!(text.contains(from));
        judge(&text.replacen(from, to, 1)).unwrap_err()
    };
    assert_eq!(with("\"maxUses\":1", "\"maxUses\":1,\"maxUses\":1"), Code::DuplicateMember);
    assert_eq!(with("\"maxUses\":1", "\"maxUses\":9007199254740993"), Code::UnsafeInteger);
    assert_eq!(with("\"maxUses\":1", "\"maxUses\":1e999"), Code::BadNumber);
    assert_eq!(with("\"reason\":\"\"", "\"reason\":\"\\ud800\""), Code::BadJson);
    assert_eq!(
        with("\"reason\":\"\"", &format!("\"reason\":{}{}", "[".repeat(64), "]".repeat(64))),
        Code::TooDeep
    );
    assert_eq!(
        with("\"reason\":\"\"", &format!("\"reason\":{}{}", "[".repeat(63), "]".repeat(63))),
        Code::BadField
    );
    assert_eq!(with("\"reason\":\"\",", ""), Code::MissingMember);
    assert_eq!(with("\"reason\"", "\"Reason\""), Code::UnknownMember);
    assert_eq!(with("\"version\":\"1.0\"", "\"version\":\"1.1\""), Code::UnsupportedVersion);
    assert_eq!(
        with("\"approverDid\":\"did:key:z6Mk", "\"approverDid\":\"did:key:z6Mj"),
        Code::BadDid
    );
    assert_eq!(
        with("\"issuedAt\":\"2026-12-01T00:00:00.000Z\"", "\"issuedAt\":\"2026-12-01T00:00:00Z\""),
        Code::BadTime
    );
    assert_eq!(with("\"receiptId\":\"apr_", "\"receiptId\":\"use_"), Code::BadId);
}

/// Contracts: the same signature twice, signatures in the wrong order, over another manifest.
#[test]
fn contracts_need_both_signatures() {
    use commsd::acp::audit::{Status, read_jsonl, verify};
    let lines: Vec<Value> = golden("acp-audit-settled.v1.jsonl")
        .split(|b| *b == b'\n')
        .filter(|line| !line.is_empty())
        .map(|line| serde_json::from_slice(line).unwrap())
        .collect();
    let at = lines
        .iter()
        .position(|l| l["object"]["signatures"].as_array().is_some_and(|s| s.len() == 2))
        .unwrap();
    // The whole log is made anew around a changed contract, by hand, signed by both sides.
    let rebuild = |contract: Value| {
        let mut lines = lines.clone();
        let (old, new) = (lines[at]["digest"].as_str().unwrap().to_owned(), digest(&contract));
        lines[at]["object"] = contract;
        lines[at]["digest"] = json!(new);
        if lines.iter().filter(|line| line["digest"] == lines[at]["digest"]).count() > 1 {
            // With one signature it is the proposal's, which is there already.
            lines.remove(at);
        }
        let mut prev: Option<String> = None;
        for line in lines.iter_mut().filter(|l| l["kind"] == "entry") {
            let text = line["payload"].to_string().replace(&old, &new);
            line["payload"] = serde_json::from_str(&text).unwrap();
            let mut entry = body(&line["entry"]);
            entry["payloadDigest"] = json!(digest(&line["payload"]));
            if let Some(prev) = prev {
                entry["prev"] = json!(prev);
            }
            let (author, role, other) = if entry["actorRole"] == "requester" {
                (1, "requester", "worker")
            } else {
                (2, "worker", "requester")
            };
            let when = entry["at"].as_str().unwrap().to_owned();
            let signatures = json!([
                person(author).signature(&entry, "audit-entry", role, &when),
                person(3 - author).signature(&entry, "audit-entry", other, &when),
            ]);
            prev = Some(digest(&entry));
            line["digest"] = json!(prev);
            entry["signatures"] = signatures;
            line["entry"] = entry;
        }
        let bytes: Vec<u8> =
            lines.iter().flat_map(|line| [jcs(line), vec![b'\n']].concat()).collect();
        let report = verify(&read_jsonl(&bytes).unwrap(), None, UnixMillis(NOW.0 + 100_000));
        (report.status, report.failures.first().map(|f| (f.seq, f.code)))
    };
    let contract = lines[at]["object"].clone();
    assert_eq!(rebuild(contract.clone()), (Status::Valid, None), "the rebuilding itself is sound");
    let [first, second] = [&contract["signatures"][0], &contract["signatures"][1]];
    for (signatures, code) in [
        (json!([first, first]), Code::WrongSigner),
        (json!([second, first]), Code::WrongSigner),
        (json!([first]), Code::ContractNotCountersigned),
        (
            json!([
                first,
                person(2).signature(
                    &contract,
                    "task-contract",
                    "requester",
                    "2026-12-01T00:00:02.000Z"
                )
            ]),
            Code::WrongRole,
        ),
        (
            json!([
                first,
                person(2).signature(
                    &contract["manifest"],
                    "task-contract",
                    "worker",
                    "2026-12-01T00:00:02.000Z"
                )
            ]),
            Code::BadSignature,
        ),
    ] {
        let mut changed = contract.clone();
        changed["signatures"] = signatures;
        assert_eq!(rebuild(changed), (Status::Invalid, Some((Some(1), code))));
    }
    // Countersigned over another manifest: signed well by both, and not what was proposed.
    let mut other = contract.clone();
    other["manifest"]["title"] = json!("Another report");
    let resigned = person(1).signature(
        &other["manifest"],
        "task-manifest",
        "requester",
        "2026-12-01T00:00:00.000Z",
    );
    other["manifest"]["signature"] = resigned;
    other["manifestDigest"] = json!(digest(&other["manifest"]));
    other["signatures"] = json!([
        person(1).signature(&other, "task-contract", "requester", "2026-12-01T00:00:00.000Z"),
        person(2).signature(&other, "task-contract", "worker", "2026-12-01T00:00:02.000Z"),
    ]);
    assert_eq!(rebuild(other), (Status::Invalid, Some((Some(1), Code::DigestMismatch))));
}
