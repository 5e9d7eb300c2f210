//! How many steps a schema of a stranger takes for a value, before anybody takes them: references and
//! combinations of schemas multiply, and a few hundred bytes can ask for more steps than there is
//! time. Judges nothing; a schema whose price is too high is not used.

use std::collections::HashMap;

use serde_json::{Map, Value};

/// Steps that are taken: a second's work at the most.
pub const MAX_STEPS: u64 = 1_000_000;

/// Pairs of a subschema and a place in the value that are looked at to find the price.
const MAX_PAIRS: usize = 200_000;

/// Subschemas within each other at one moment: what the stack of whoever takes the steps bears.
const MAX_NESTING: usize = 500;

/// Keywords whose subschema is for the same place.
const HERE: [&str; 4] = ["not", "if", "then", "else"];
/// Keywords with a list of subschemas for the same place.
const HERE_EACH: [&str; 3] = ["allOf", "anyOf", "oneOf"];
/// Keywords whose subschema is for every element.
const ELEMENTS: [&str; 3] = ["items", "contains", "unevaluatedItems"];
/// Keywords whose subschema is for every member.
const MEMBERS: [&str; 2] = ["additionalProperties", "unevaluatedProperties"];

/// A schema with what its references lead to.
#[derive(Debug)]
pub struct Priced {
    schema: Value,
    /// Pointers of subschemas by their anchors; a dynamic one may stand more than once.
    anchors: HashMap<String, Vec<String>>,
}

/// The price is more than anybody pays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooDear;

/// Steps for a pair; zero while they are being counted.
type Known = HashMap<(*const Value, *const Value), u64>;

impl Priced {
    /// Prepares a schema; references are within it only.
    #[must_use]
    pub fn new(schema: &Value) -> Self {
        let mut anchors = HashMap::new();
        find_anchors(schema, &mut String::new(), &mut anchors);
        Self { schema: schema.clone(), anchors }
    }

    /// The steps that `value` takes at most, by this schema.
    ///
    /// # Errors
    /// [`TooDear`]: more than [`MAX_STEPS`], endlessly many, or too deep.
    pub fn of(&self, value: &Value) -> Result<u64, TooDear> {
        self.steps(&self.schema, value, 0, &mut Known::new())
    }

    fn steps(
        &self,
        schema: &Value,
        value: &Value,
        depth: usize,
        known: &mut Known,
    ) -> Result<u64, TooDear> {
        let Value::Object(rules) = schema else { return Ok(1) };
        let pair = (std::ptr::from_ref(schema), std::ptr::from_ref(value));
        match known.get(&pair) {
            // It leads to itself at the same place.
            Some(0) => return Err(TooDear),
            Some(steps) => return Ok(*steps),
            None if known.len() >= MAX_PAIRS || depth >= MAX_NESTING => return Err(TooDear),
            None => known.insert(pair, 0),
        };
        let mut sum = Sum::new(rules.len());
        let mut add = |schema: &Value, value: &Value, known: &mut Known| {
            sum.add(self.steps(schema, value, depth + 1, known)?)
        };
        for name in HERE {
            if let Some(rule) = rules.get(name) {
                add(rule, value, known)?;
            }
        }
        for rule in HERE_EACH.iter().filter_map(|name| rules.get(*name)?.as_array()).flatten() {
            add(rule, value, known)?;
        }
        for rule in rules.get("dependentSchemas").and_then(Value::as_object).into_iter().flatten() {
            add(rule.1, value, known)?;
        }
        for target in self.targets(rules) {
            add(target, value, known)?;
        }
        match value {
            Value::Array(elements) => {
                let first = rules.get("prefixItems").and_then(Value::as_array);
                for (rule, element) in first.into_iter().flatten().zip(elements) {
                    add(rule, element, known)?;
                }
                for rule in ELEMENTS.iter().filter_map(|name| rules.get(*name)) {
                    for element in elements {
                        add(rule, element, known)?;
                    }
                }
            }
            Value::Object(members) => {
                for (name, member) in members {
                    let own = rules.get("properties").and_then(|own| own.get(name));
                    let patterns = rules.get("patternProperties").and_then(Value::as_object);
                    let patterns = patterns.into_iter().flat_map(Map::values);
                    let others = MEMBERS.iter().filter_map(|name| rules.get(*name));
                    for rule in own.into_iter().chain(patterns).chain(others) {
                        add(rule, member, known)?;
                    }
                }
                if let Some(rule) = rules.get("propertyNames") {
                    // A name is a text, and no part of the value: its price is counted once for all.
                    let name = Value::String(String::new());
                    let each = self.steps(rule, &name, depth + 1, &mut Known::new())?;
                    sum.add(each.saturating_mul(members.len() as u64))?;
                }
            }
            _ => {}
        }
        known.insert(pair, sum.0);
        Ok(sum.0)
    }

    /// What the references of a subschema lead to. One that leads nowhere does not compile.
    fn targets<'s>(&'s self, rules: &'s Map<String, Value>) -> impl Iterator<Item = &'s Value> {
        let names = ["$ref", "$dynamicRef"].into_iter();
        let references = names.filter_map(|name| rules.get(name)?.as_str()?.strip_prefix('#'));
        references.flat_map(|target| {
            let pointers = match self.anchors.get(target) {
                Some(pointers) => pointers.clone(),
                None => vec![
                    percent_encoding::percent_decode_str(target).decode_utf8_lossy().into_owned(),
                ],
            };
            pointers.into_iter().filter_map(|pointer| self.schema.pointer(&pointer))
        })
    }
}

/// Steps so far.
struct Sum(u64);

impl Sum {
    fn new(keywords: usize) -> Self {
        Self(1 + keywords as u64)
    }

    fn add(&mut self, steps: u64) -> Result<(), TooDear> {
        self.0 = self.0.saturating_add(steps);
        if self.0 > MAX_STEPS { Err(TooDear) } else { Ok(()) }
    }
}

fn find_anchors(schema: &Value, at: &mut String, anchors: &mut HashMap<String, Vec<String>>) {
    let step = |name: &str, inner: &Value, at: &mut String, anchors: &mut HashMap<_, _>| {
        let length = at.len();
        at.push('/');
        at.push_str(&name.replace('~', "~0").replace('/', "~1"));
        find_anchors(inner, at, anchors);
        at.truncate(length);
    };
    match schema {
        Value::Object(members) => {
            for name in ["$anchor", "$dynamicAnchor"] {
                if let Some(anchor) = members.get(name).and_then(Value::as_str) {
                    anchors.entry(anchor.to_owned()).or_default().push(at.clone());
                }
            }
            for (name, inner) in members {
                step(name, inner, at, anchors);
            }
        }
        Value::Array(items) => {
            for (number, inner) in items.iter().enumerate() {
                step(&number.to_string(), inner, at, anchors);
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn price(schema: &Value, value: &Value) -> Result<u64, TooDear> {
        Priced::new(schema).of(value)
    }

    #[test]
    fn ordinary_schemas_are_cheap() {
        let schema = json!({
            "type": "object", "required": ["a"],
            "properties": { "a": { "type": "array", "items": { "$ref": "#/$defs/x" } } },
            "$defs": { "x": { "type": "object", "properties": { "n": { "type": "integer" } } } },
        });
        let items: Vec<Value> = (0..1000).map(|n| json!({ "n": n })).collect();
        assert!(price(&schema, &json!({ "a": items })).unwrap() < 10_000);
        // A tree that refers to itself, as long as the value is one.
        let tree = json!({ "$anchor": "tree", "properties": {
            "left": { "$ref": "#tree" }, "right": { "$ref": "#tree" } } });
        let leaf = json!({ "left": {}, "right": {} });
        assert!(price(&tree, &json!({ "left": leaf, "right": leaf })).unwrap() < 100);
        assert_eq!(price(&json!(true), &json!({})), Ok(1));
    }

    #[test]
    fn what_doubles_at_each_reference_is_too_dear() {
        let mut defs = Map::new();
        for n in 0..30 {
            let next = json!({ "$ref": format!("#/$defs/d{}", n + 1) });
            defs.insert(format!("d{n}"), json!({ "allOf": [next, next] }));
        }
        defs.insert("d30".into(), json!({ "type": "object" }));
        let schema = json!({ "$defs": defs, "$ref": "#/$defs/d0" });
        assert_eq!(price(&schema, &json!({ "x": 1 })), Err(TooDear));
    }

    #[test]
    fn what_multiplies_with_the_depth_of_the_value_is_too_dear() {
        let list = json!({ "type": "array", "items": { "$ref": "#/$defs/n" } });
        let schema = json!({ "$defs": { "n": { "anyOf": [list, list, list, list, list] } },
            "$ref": "#/$defs/n" });
        let mut value = json!(1);
        for _ in 0..9 {
            value = json!([value]);
        }
        assert_eq!(price(&schema, &value), Err(TooDear));
        assert!(price(&schema, &json!([[1]])).is_ok());
    }

    #[test]
    fn what_leads_to_itself_at_one_place_has_no_end() {
        for schema in [
            json!({ "$ref": "#" }),
            json!({ "$dynamicAnchor": "a", "anyOf": [{ "$dynamicRef": "#a" }] }),
            json!({ "allOf": [{ "$ref": "#/allOf/0" }] }),
            json!({ "not": { "$ref": "#" } }),
        ] {
            assert_eq!(price(&schema, &json!({})), Err(TooDear), "{schema}");
        }
    }
}
