//! Conditions on a token: a list of nodes of a three-valued logic, each of which has to be
//! definitely true.
//!
//! Understood are the node kinds that occur in vectors (`not`, `and`, `compare` for equality,
//! `delegate`, `booleanLiteral`); a list with any other is invalid, so it never lets anybody in.

use crate::codec::cbor::{Value, decode};
use crate::identity::device::DeviceId;

/// What a condition is judged against: the token that a `manage:grant` token authorised.
pub(super) struct Subject<'a> {
    pub bearer: DeviceId,
    pub capability: &'a str,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Condition {
    Literal(bool),
    /// A question to a named system.
    Delegate(System),
    Not(Box<Condition>),
    And(Box<Condition>, Box<Condition>),
    Equal(Box<Condition>, Box<Condition>),
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum System {
    /// Whether the bearer is this device, in lower-case hex.
    GranteeIs(String),
    /// Whether the capability is this one.
    GrantedCapabilityIs(String),
    /// A system, or a payload for one, that nobody here can answer for.
    Unknown,
}

/// The conditions in a claim; `None` when they cannot be read.
pub(super) fn parse(encoded: &[u8]) -> Option<Vec<Condition>> {
    match decode(encoded).ok()? {
        Value::Array(nodes) => nodes.iter().map(Condition::from_value).collect(),
        _ => None,
    }
}

/// Whether all of `conditions` are definitely true.
pub(super) fn all_hold(conditions: &[Condition], subject: Option<&Subject<'_>>) -> bool {
    conditions.iter().all(|condition| condition.holds(subject) == Some(true))
}

impl Condition {
    fn from_value(node: &Value) -> Option<Self> {
        let operand = |name| Some(Box::new(Self::from_value(node.get(name)?)?));
        Some(match node.get("kind")?.as_text()? {
            "booleanLiteral" => Self::Literal(node.get("value")?.as_bool()?),
            "delegate" => Self::Delegate(System::from_node(node)?),
            "not" => Self::Not(operand("operand")?),
            "and" => Self::And(operand("left")?, operand("right")?),
            "compare" if node.get("op")?.as_text()? == "eq" => {
                Self::Equal(operand("left")?, operand("right")?)
            }
            _ => return None,
        })
    }

    /// `None` is "unknown".
    fn holds(&self, subject: Option<&Subject<'_>>) -> Option<bool> {
        match self {
            Self::Literal(value) => Some(*value),
            Self::Delegate(system) => system.answer(subject?),
            Self::Not(operand) => operand.holds(subject).map(|value| !value),
            Self::And(left, right) => match (left.holds(subject), right.holds(subject)) {
                (Some(false), _) | (_, Some(false)) => Some(false),
                (Some(true), Some(true)) => Some(true),
                _ => None,
            },
            Self::Equal(left, right) => Some(left.holds(subject)? == right.holds(subject)?),
        }
    }
}

impl System {
    fn from_node(node: &Value) -> Option<Self> {
        let payload = node.get("payload").and_then(Value::as_text).map(ToOwned::to_owned);
        Some(match (node.get("system")?.as_text()?, payload) {
            ("grantee-is", Some(device)) => Self::GranteeIs(device),
            ("granted-capability-is", Some(verb)) => Self::GrantedCapabilityIs(verb),
            _ => Self::Unknown,
        })
    }

    fn answer(&self, subject: &Subject<'_>) -> Option<bool> {
        match self {
            Self::GranteeIs(device) => Some(*device == subject.bearer.hex()),
            Self::GrantedCapabilityIs(verb) => Some(verb == subject.capability),
            Self::Unknown => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn delegate(system: &str, payload: &str) -> Value {
        Value::map([("kind", "delegate"), ("system", system), ("payload", payload)])
    }

    fn is_true(node: Value) -> Value {
        let literal =
            Value::map([("kind", Value::from("booleanLiteral")), ("value", Value::from(true))]);
        Value::map([
            ("kind", Value::from("compare")),
            ("op", Value::from("eq")),
            ("left", node),
            ("right", literal),
        ])
    }

    fn not(node: Value) -> Value {
        Value::map([("kind", Value::from("not")), ("operand", node)])
    }

    fn verdict(node: Value, subject: Option<&Subject<'_>>) -> Option<bool> {
        let conditions = parse(&Value::Array(vec![node]).encode()).unwrap();
        conditions[0].holds(subject)
    }

    #[test]
    fn unknown_is_never_true() {
        let device = DeviceId([7; 32]);
        let subject = Subject { bearer: device, capability: "exec:pty" };
        let grantee = is_true(delegate("grantee-is", &device.hex()));
        assert_eq!(verdict(grantee.clone(), Some(&subject)), Some(true));
        assert_eq!(verdict(not(grantee.clone()), Some(&subject)), Some(false));
        assert_eq!(verdict(grantee.clone(), None), None);
        assert_eq!(verdict(not(grantee), None), None);
        let pty = is_true(delegate("granted-capability-is", "exec:pty"));
        assert_eq!(verdict(pty, Some(&subject)), Some(true));
        let other = is_true(delegate("granted-capability-is", "exec:proc"));
        assert_eq!(verdict(other, Some(&subject)), Some(false));
        let unknown = is_true(delegate("no-such", "x"));
        assert_eq!(verdict(not(unknown.clone()), Some(&subject)), None);
        let and = |left, right| {
            Value::map([("kind", Value::from("and")), ("left", left), ("right", right)])
        };
        let no =
            Value::map([("kind", Value::from("booleanLiteral")), ("value", Value::from(false))]);
        assert_eq!(verdict(and(unknown.clone(), no), Some(&subject)), Some(false));
        let yes =
            Value::map([("kind", Value::from("booleanLiteral")), ("value", Value::from(true))]);
        assert_eq!(verdict(and(yes, unknown), Some(&subject)), None);
    }

    #[test]
    fn an_unknown_node_makes_the_list_invalid() {
        let or = Value::map([("kind", "perhaps")]);
        assert_eq!(parse(&Value::Array(vec![or]).encode()), None);
        assert_eq!(parse(&[0xff]), None);
        assert_eq!(parse(&[0xa0]), None);
        assert_eq!(parse(&[0x80]), Some(vec![]));
    }
}
