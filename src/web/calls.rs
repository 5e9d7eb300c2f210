//! What the page may ask of the daemon, and as whom: an explicit list. Everything else of the local
//! API stays the command line's.

use hyper::StatusCode;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::api::types::ApiError;

/// As whom the page asks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Role {
    /// The agent that the page was started for. The daemon stamps what it says with its name.
    #[default]
    Agent,
    /// The user of this machine, who decides on permissions, machines and work.
    Operator,
}

/// What may be asked, by the methods' canonical names.
const ALLOWED: &[(Role, &str)] = &[
    (Role::Agent, "watch"),
    (Role::Agent, "whoami"),
    (Role::Agent, "room.members"),
    (Role::Agent, "room.history"),
    (Role::Agent, "room.join"),
    (Role::Agent, "room.leave"),
    (Role::Agent, "send"),
    (Role::Agent, "dm.send"),
    (Role::Agent, "inbox"),
    (Role::Agent, "events.ack"),
    (Role::Agent, "pending.list"),
    (Role::Agent, "accept"),
    (Role::Agent, "reject"),
    (Role::Operator, "status.get"),
    (Role::Operator, "pending.list"),
    (Role::Operator, "accept"),
    (Role::Operator, "reject"),
    (Role::Operator, "acp"),
];

/// Of `acp`, what the page may do: see what waits for the owner, and answer.
const ALLOWED_ACP: &[&str] = &["list_approvals", "answer"];

/// Something that the page asks.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PageCall {
    /// A method of the local API.
    pub(super) method: String,
    /// Its parameters, which the daemon judges.
    #[serde(default)]
    pub(super) params: Map<String, Value>,
    /// As whom.
    #[serde(default, rename = "as")]
    pub(super) role: Role,
}

impl PageCall {
    /// Reads one that is allowed.
    ///
    /// # Errors
    /// What to answer instead.
    pub(super) fn read(body: &[u8]) -> Result<Self, (StatusCode, ApiError)> {
        let call: Self = serde_json::from_slice(body).map_err(|error| {
            let what = format!("a call is {{\"method\", \"params\", \"as\"}}: {error}");
            (StatusCode::BAD_REQUEST, ApiError::plain(ApiError::INVALID_REQUEST, what))
        })?;
        let listed = ALLOWED.contains(&(call.role, call.method.as_str()));
        let op = call.params.get("op").and_then(Value::as_str).unwrap_or_default();
        let op_listed = call.method != "acp" || ALLOWED_ACP.contains(&op);
        // What waits takes a place of the connection, for up to a day; the page is told instead.
        if listed && op_listed && !call.params.contains_key("wait") {
            return Ok(call);
        }
        let what = "the page does not do that";
        let error = ApiError::new("not_for_the_page", what, "use the command line");
        Err((StatusCode::FORBIDDEN, error))
    }
}

/// Whether a method is listed for anybody.
#[cfg(test)]
pub(super) fn names(method: &str) -> bool {
    ALLOWED.iter().any(|(_, allowed)| *allowed == method)
}

/// An answer as the local API gives it: `{result}` or `{error {code, message, todo}}`.
pub(super) fn answered(answer: Result<Value, ApiError>) -> Vec<u8> {
    let answer = match answer {
        Ok(result) => json!({ "result": result }),
        Err(error) => json!({ "error": error }),
    };
    answer.to_string().into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::types::Request;

    fn status(call: &Value) -> u16 {
        PageCall::read(call.to_string().as_bytes()).map_or_else(|(s, _)| s.as_u16(), |_| 200)
    }

    #[test]
    fn the_list_names_methods_by_their_canonical_names() {
        for (_, method) in ALLOWED {
            assert!(Request::METHODS.contains(method), "{method}");
        }
    }

    #[test]
    fn what_is_not_listed_is_not_passed_on() {
        for (_, allowed) in ALLOWED.iter().filter(|(role, _)| *role == Role::Agent) {
            assert_eq!(status(&json!({"method": allowed})), 200, "{allowed}");
        }
        let listed = |role, method| ALLOWED.contains(&(role, method));
        for method in Request::METHODS {
            for (role, name) in [(Role::Agent, "agent"), (Role::Operator, "operator")] {
                if !listed(role, *method) {
                    let call = json!({"method": method, "as": name});
                    assert_eq!(status(&call), 403, "{method} as {name}");
                }
            }
        }
        for waiting in ["inbox", "dm.send"] {
            let call = json!({"method": waiting, "params": {"wait": 1}});
            assert_eq!(status(&call), 403, "{waiting}");
        }
        // Other spellings of what is listed are not looked up.
        for alias in ["dm", "pending", "rooms.join", "SEND", "send ", ""] {
            assert_eq!(status(&json!({"method": alias})), 403, "{alias}");
        }
    }

    #[test]
    fn of_work_for_others_only_what_waits_for_the_owner() {
        let acp = |params: Value| json!({"method": "acp", "as": "operator", "params": params});
        assert_eq!(status(&acp(json!({"op": "list_approvals"}))), 200);
        assert_eq!(status(&acp(json!({"op": "answer", "id": "x", "approve": true}))), 200);
        for op in [json!("delegate_task"), json!("export_audit"), json!(null), json!(["answer"])] {
            assert_eq!(status(&acp(json!({"op": op}))), 403, "{op}");
        }
        assert_eq!(status(&acp(json!({}))), 403);
    }

    #[test]
    fn what_is_no_call_is_said_to_be_none() {
        for body in [
            "",
            "{",
            "[]",
            "null",
            "{\"method\": 1}",
            "{\"method\": \"send\", \"as\": \"root\"}",
            "{\"method\": \"send\", \"params\": []}",
            "{\"method\": \"send\", \"from\": \"bob\"}",
            "{\"method\": \"send\", \"method\": \"daemon.stop\"}",
        ] {
            let (status, error) = PageCall::read(body.as_bytes()).unwrap_err();
            assert_eq!((status.as_u16(), error.code.as_str()), (400, "invalid_request"), "{body}");
        }
    }
}
