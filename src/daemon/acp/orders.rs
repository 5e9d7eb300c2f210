//! An order out of what a caller asks for: whom, by which way, what, within which bounds. What the
//! caller leaves out gets a default here, and nowhere else.

use serde_json::{Map, Value, json};

use crate::acp::code::{Code, Error, Result};
use crate::acp::did::Did;
use crate::acp::invite::{check_invite, is_invite, read_invite};
use crate::acp::objects::{
    Budget, Isolation, SandboxPolicy, SchemaText, TaskManifest, Verification, VerificationMethod,
    VerificationMode,
};
use crate::acp::owner::{Grant, Order, Owner, Route};
use crate::acp::steps;
use crate::acp::tool::ToolName;
use crate::acp::value::{
    Digest, InviteId, Key32, Labels, Name, Prose, Read as _, Seq, TaskId, Time,
};
use crate::api::acp::Work;
use crate::codec::time::UnixMillis;

/// How long work may take unless the order says otherwise, ms.
const DEADLINE_MS: u64 = 3_600_000;

/// How long this side may take to judge a delivery: an owner may have to be asked, twice.
const VERIFY_MS: u64 = 3_600_000;

/// How often granted tools may be used unless the order says otherwise: enough for a task that looks
/// things up, and few enough for somebody who answers each time.
const TOOL_USES: u64 = 100;

/// A worker as it was named.
#[derive(Clone, Debug, PartialEq)]
pub struct Worker {
    /// Who.
    pub did: Did,
    /// The key that its invite declares.
    pub key: Option<Key32>,
    /// By which invite.
    pub invite: Option<InviteId>,
    /// The way there.
    pub route: Route,
}

/// Whether `to` is neither an invite nor a did, but may be somebody of the mesh.
#[must_use]
pub fn names_peer(to: &str) -> bool {
    let to = to.trim();
    !to.starts_with("did:") && !is_invite(to)
}

/// The error for a call that needs a relay where none is named.
#[must_use]
pub fn no_relay(text: &str) -> Error {
    Error::new(Code::BadField, text).with_todo(
        "name one in the call (--relay URL; `relay` or `relayUrls` of the tools), or in the daemon's \
         configuration: acp-relays = [\"URL\"]; `commsd acp relay start` runs one. Agents of the mesh are \
         given work by their names, without a relay",
    )
}

/// Reads a worker as a caller names it: an invite, or a did with the relays where it is looked for.
///
/// # Errors
/// `BAD_INVITE` and its like; `BAD_DID` for something else; `BAD_FIELD` for a did without a relay.
pub fn worker(owner: &Owner, to: &str, relays: &[String], now: UnixMillis) -> Result<Worker> {
    let to = to.trim();
    if to.starts_with("did:") {
        if relays.is_empty() {
            return Err(no_relay("a worker that is named by its did is reached by a relay"));
        }
        let (did, route) = (Did::parse(to)?, Route::Relays { urls: relays.to_vec() });
        return Ok(Worker { did, key: None, invite: None, route });
    }
    if names_peer(to) {
        // Where peers have names, they were looked up before.
        let text = "this is neither an invite nor a did";
        let todo = "give the whole text of an invite (acp-invite:…), or a did with its relay; \
                    agents of the mesh are named to the daemon, without --key";
        return Err(Error::new(Code::BadInvite, text).with_todo(todo));
    }
    let invite = read_invite(to)?;
    check_invite(&invite, &owner.gateway().revocations, now)?;
    Ok(Worker {
        did: invite.issuer_did,
        key: invite.encryption_key,
        invite: Some(invite.invite_id.clone()),
        route: Route::Relays {
            urls: invite.relay_urls.iter().map(|url| (**url).to_owned()).collect(),
        },
    })
}

/// A task of this owner's that work is a part of: its key, and what was laid down for it.
pub type Parent = (Digest, Box<TaskManifest>);

/// The task that `work` is a part of, if it names one.
///
/// # Errors
/// `UNKNOWN_TASK`, `BAD_ID`.
pub fn parent(owner: &Owner, work: &Work) -> Result<Option<Parent>> {
    let Some(id) = &work.parent_task_id else { return Ok(None) };
    let find = || {
        let task = owner.find(&TaskId::parse(id)?)?;
        let contract = owner.task(&task).and_then(|log| log.view().contract());
        let text = "that task was not proposed yet";
        let contract = contract.ok_or_else(|| Error::new(Code::UnknownTask, text))?;
        Ok(Some((task, contract.manifest.clone())))
    };
    find().map_err(|error: Error| error.inside("parentTaskId"))
}

/// The order of `work` from `worker`. What the work says nothing of is as it was for its `parent`.
///
/// # Errors
/// The code of what is out of bounds, with its member as the path.
pub fn order(
    work: &Work,
    worker: Worker,
    parent: Option<&Parent>,
    now: UnixMillis,
) -> Result<Order> {
    let inside = |name: &'static str| move |error: Error| error.inside(name);
    let schema = |value: &Option<Value>| SchemaText(value.clone().unwrap_or(Value::Bool(true)));
    let deadline = match &work.deadline_at {
        None => now.plus(DEADLINE_MS),
        Some(text) => Time::parse(text).map_err(inside("deadlineAt"))?.millis(),
    };
    let outer = parent.map(|(_, manifest)| &**manifest);
    let deadline = outer.map_or(deadline, |outer| deadline.min(outer.deadline_at.millis()));
    Ok(Order {
        worker: worker.did,
        worker_key: worker.key,
        invite: worker.invite,
        route: worker.route,
        title: Name::parse(&work.title).map_err(inside("title"))?,
        description: Prose::parse(&work.description).map_err(inside("description"))?,
        input: work.input.clone(),
        input_schema: schema(&work.input_schema),
        output_schema: schema(&work.output_schema),
        deadline,
        verify_within_ms: VERIFY_MS,
        verification: Verification {
            method: VerificationMethod::Schema,
            checks: Seq::default(),
            mode: VerificationMode::All,
        },
        budget: budget(work.budget.as_ref(), outer).map_err(inside("budget"))?,
        sandbox: sandbox(work.sandbox_policy.as_ref(), outer).map_err(inside("sandboxPolicy"))?,
        attested: true,
        max_revisions: 0,
        grants: grants(work)?,
        redelegation: work.redelegation.unwrap_or(0),
        parent: parent.map(|(task, _)| *task),
        auto_approve: work.auto_approve,
        group: None,
        labels: Labels::default(),
    })
}

/// The tools that `work` may use.
///
/// # Errors
/// `BAD_FIELD` for a name that is none.
pub fn tools(work: &Work) -> Result<Vec<ToolName>> {
    let names = work.tools.iter().map(|name| ToolName::parse(name));
    names.collect::<Result<_>>().map_err(|error| error.inside("tools"))
}

/// One token for all of them, so that they are counted together.
fn grants(work: &Work) -> Result<Vec<Grant>> {
    let tools = tools(work)?;
    if tools.is_empty() {
        return Ok(Vec::new());
    }
    let capabilities = tools.iter().map(ToolName::capability).collect::<Result<_>>()?;
    let max_uses = work.tool_uses.unwrap_or(TOOL_USES);
    Ok(vec![Grant { capabilities, max_uses, max_depth: 0 }])
}

/// The members that the caller gives, over the defaults.
fn over(defaults: Value, given: Option<&Value>) -> Result<Value> {
    let mut members = match defaults {
        Value::Object(members) => members,
        _ => Map::new(),
    };
    match given {
        None => {}
        Some(Value::Object(given)) => members.extend(given.clone()),
        Some(_) => return Err(Error::new(Code::BadField, "not an object")),
    }
    Ok(Value::Object(members))
}

fn budget(given: Option<&Value>, outer: Option<&TaskManifest>) -> Result<Budget> {
    let default = outer.map_or_else(steps::unlimited, |outer| outer.budget.clone());
    Budget::read(over(json!(default), given)?)
}

/// As strict as machines commonly allow, with a weaker level where the worker has no such one. Who
/// names a level gets that level, or better, unless it says that a weaker one will do.
fn sandbox(given: Option<&Value>, outer: Option<&TaskManifest>) -> Result<SandboxPolicy> {
    if let Some(outer) = outer {
        return SandboxPolicy::read(over(json!(outer.sandbox_policy), given)?);
    }
    let named = given.is_some_and(|given| given.get("isolation").is_some());
    let default =
        SandboxPolicy { allow_subprocess_fallback: !named, ..steps::sandbox(Isolation::Kernel) };
    SandboxPolicy::read(over(json!(default), given)?)
}

/// Whether results of this schema may hold text that nothing bounds: workers will not agree on it byte
/// for byte (design 13).
#[must_use]
pub fn has_free_text(schema: &Value) -> bool {
    match schema {
        Value::Bool(any) => *any,
        Value::Object(members) => {
            let bounded =
                ["enum", "const", "pattern"].iter().any(|name| members.contains_key(*name));
            let kind = members.get("type");
            let text = kind.is_none_or(|kind| {
                kind == "string"
                    || kind.as_array().is_some_and(|kinds| kinds.contains(&"string".into()))
            });
            let shape = ["properties", "items", "prefixItems", "anyOf", "oneOf", "allOf", "$ref"]
                .iter()
                .any(|name| members.contains_key(*name));
            let inner = members.iter().any(|(name, value)| match (name.as_str(), value) {
                ("properties" | "$defs", Value::Object(all)) => all.values().any(has_free_text),
                ("anyOf" | "oneOf" | "allOf" | "prefixItems", Value::Array(all)) => {
                    all.iter().any(has_free_text)
                }
                ("items", item) => has_free_text(item),
                _ => false,
            });
            !bounded && (inner || (text && !shape))
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_text_is_noticed() {
        for free in [
            json!(true),
            json!({}),
            json!({ "type": "string" }),
            json!({ "properties": { "a": { "type": ["string", "null"] } } }),
            json!({ "type": "array", "items": { "type": "string" } }),
        ] {
            assert!(has_free_text(&free), "{free}");
        }
        for narrow in [
            json!({ "type": "integer" }),
            json!({ "enum": ["a", "b"] }),
            json!({ "type": "object", "properties": { "a": { "type": "string", "enum": ["x"] } } }),
            json!({ "type": "array", "items": { "type": "integer" } }),
        ] {
            assert!(!has_free_text(&narrow), "{narrow}");
        }
    }

    #[test]
    fn what_is_left_out_has_a_default_and_what_is_named_holds() {
        let sandbox = |given: Option<&Value>| sandbox(given, None);
        let default = sandbox(None).unwrap();
        assert_eq!(
            (default.isolation, default.allow_subprocess_fallback),
            (Isolation::Kernel, true)
        );
        let named = sandbox(Some(&json!({ "isolation": "oci" }))).unwrap();
        assert_eq!((named.isolation, named.allow_subprocess_fallback), (Isolation::Oci, false));
        let smaller = sandbox(Some(&json!({ "pidsMax": 3 }))).unwrap();
        assert_eq!((smaller.pids_max.get(), smaller.allow_subprocess_fallback), (3, true));
        assert_eq!(sandbox(Some(&json!({ "x": 1 }))).unwrap_err().code(), Code::UnknownMember);
        assert_eq!(sandbox(Some(&json!(3))).unwrap_err().code(), Code::BadField);
        let budget = super::budget(Some(&json!({ "maxTotalTokens": 5 })), None).unwrap();
        assert_eq!(budget.max_total_tokens.map(|count| count.get()), Some(5));
        assert_eq!(budget.max_tool_calls, None);
    }
}
