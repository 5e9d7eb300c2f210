//! Our entry in a JSON file that people edit: comments and trailing commas are read as the harnesses
//! read them. The parser says where things are; what is not the entry is never written anew.

use std::borrow::Cow;
use std::ops::Range;

use jsonc_parser::ast::{Object, ObjectProp, Value};
use jsonc_parser::common::Ranged as _;
use jsonc_parser::{CollectOptions, ParseOptions, parse_to_ast};
use serde_json::json;

use super::edit::{EditError, Entry, Format, NAME, newline, spliced, split_bom};

/// What is read: JSON with comments and trailing commas. Anything looser no harness reads.
const OPTIONS: ParseOptions = ParseOptions {
    allow_comments: true,
    allow_loose_object_property_names: false,
    allow_trailing_commas: true,
    allow_missing_commas: false,
    allow_single_quoted_strings: false,
    allow_hexadecimal_numbers: false,
    allow_unary_plus_numbers: false,
    allow_bare_decimal_point_numbers: false,
    allow_non_finite_numbers: false,
    allow_extended_string_escapes: false,
};

/// Indentation where the text shows none.
const INDENT: &str = "  ";

fn container_name(format: Format) -> &'static str {
    if format == Format::OpenCode { "mcp" } else { "mcpServers" }
}

/// The text as the parser takes it, every byte in its place: escapes of half a surrogate pair, which
/// JavaScript writes for a text that was cut, are other characters in it.
fn readable(text: &str) -> Cow<'_, str> {
    const ESCAPE: usize = r"\u0000".len();
    let unit = |at: usize| {
        let digits = text.get(at..at + ESCAPE)?.strip_prefix(r"\u")?;
        u16::from_str_radix(digits, 16).ok()
    };
    let mut readable = Cow::Borrowed(text);
    let mut at = 0;
    while let Some(found) = memchr::memchr(b'\\', &text.as_bytes()[at..]) {
        at += found;
        at += match (unit(at), unit(at + ESCAPE)) {
            (Some(0xd800..=0xdbff), Some(0xdc00..=0xdfff)) => 2 * ESCAPE,
            (Some(0xd800..=0xdfff), _) => {
                readable.to_mut().replace_range(at..at + ESCAPE, r"\ufffd");
                ESCAPE
            }
            (Some(_), _) => ESCAPE,
            // The backslash, and what it stands before.
            (None, _) => 2,
        };
        if at >= text.len() {
            break;
        }
    }
    readable
}

/// The outermost object; none in a text of blanks and comments.
fn root(text: &str) -> Result<Option<Object<'_>>, EditError> {
    let unreadable = |why: String| EditError::Unreadable { format: "JSON", why };
    let parsed = parse_to_ast(text, &CollectOptions::default(), &OPTIONS)
        .map_err(|error| unreadable(error.to_string()))?;
    match parsed.value {
        None => Ok(None),
        Some(Value::Object(object)) => Ok(Some(object)),
        Some(_) => Err(unreadable("the outermost value is no object".into())),
    }
}

/// The member of a name. Of two with one name, readers take this or that one: nothing to edit.
fn member<'o, 'a>(
    object: &'o Object<'a>,
    name: &str,
) -> Result<Option<&'o ObjectProp<'a>>, EditError> {
    let mut found = object.properties.iter().filter(|property| property.name.as_str() == name);
    let first = found.next();
    if found.next().is_some() {
        return Err(EditError::Unusual(format!("it has two members \"{name}\" in one object")));
    }
    Ok(first)
}

/// The member that is a container of servers.
fn container<'o, 'a>(
    root: Option<&'o Object<'a>>,
    format: Format,
) -> Result<Option<&'o Object<'a>>, EditError> {
    let name = container_name(format);
    let Some(root) = root else { return Ok(None) };
    match member(root, name)?.map(|member| &member.value) {
        None => Ok(None),
        Some(Value::Object(object)) => Ok(Some(object)),
        Some(_) => Err(EditError::Unusual(format!("its member \"{name}\" is no object"))),
    }
}

/// The value of the entry, for a look at it.
fn with_value<T>(
    format: Format,
    text: &str,
    look: impl FnOnce(&str, &Value<'_>) -> T,
) -> Result<Option<T>, EditError> {
    let (_, text) = split_bom(text);
    let readable = readable(text);
    let root = root(&readable)?;
    let Some(object) = container(root.as_ref(), format)? else { return Ok(None) };
    Ok(member(object, NAME)?.map(|entry| look(text, &entry.value)))
}

/// Where the entry's program is written, and what the entry says.
fn command<'v>(format: Format, value: &'v Value<'_>) -> (Option<&'v Value<'v>>, Entry) {
    fn strings<'v>(value: Option<&'v Value<'_>>) -> Vec<&'v Value<'v>> {
        let array = value.and_then(Value::as_array);
        array.into_iter().flat_map(|array| &array.elements).collect()
    }
    let text = |value: &&Value<'_>| value.as_string_lit().map(|lit| lit.value.to_string());
    let object = value.as_object();
    let of = |name| object.and_then(|object| object.get(name)).map(|member| &member.value);
    let (program, args) = if format == Format::OpenCode {
        let all = strings(of("command"));
        (all.first().copied(), all.get(1..).unwrap_or_default().to_vec())
    } else {
        (of("command"), strings(of("args")))
    };
    let entry = Entry {
        program: program.as_ref().and_then(text).unwrap_or_default(),
        args: args.iter().filter_map(text).collect(),
    };
    (program.filter(|program| program.as_string_lit().is_some()), entry)
}

pub(super) fn find(format: Format, text: &str) -> Result<Option<Entry>, EditError> {
    with_value(format, text, |_, value| command(format, value).1)
}

pub(super) fn has_container(format: Format, text: &str) -> Result<bool, EditError> {
    let (_, text) = split_bom(text);
    Ok(container(root(&readable(text))?.as_ref(), format)?.is_some())
}

pub(super) fn piece(format: Format, text: &str) -> Result<Option<String>, EditError> {
    with_value(format, text, |text, value| text[bytes(value)].to_owned())
}

/// On one line: the harness writes it out as it likes when it rewrites its file.
pub(super) fn render(format: Format, entry: &Entry) -> String {
    let Entry { program, args } = entry;
    if format == Format::OpenCode {
        let command: Vec<&String> = std::iter::once(program).chain(args).collect();
        return json!({"type": "local", "command": command, "enabled": true}).to_string();
    }
    json!({"type": "stdio", "command": program, "args": args}).to_string()
}

pub(super) fn put(format: Format, text: &str, piece: &str) -> Result<String, EditError> {
    let (bom, text) = split_bom(text);
    let range = with_value(format, text, |_, value| bytes(value))?;
    let range = range.ok_or_else(|| EditError::Unusual("it has no entry to replace".into()))?;
    checked(format, [bom, &spliced(text, range, piece)].concat(), true)
}

pub(super) fn set_program(format: Format, text: &str, program: &str) -> Result<String, EditError> {
    let (bom, text) = split_bom(text);
    let range = with_value(format, text, |_, value| command(format, value).0.map(bytes))?;
    let range = range.flatten();
    let range = range.ok_or_else(|| EditError::Unusual("its entry starts no program".into()))?;
    checked(format, [bom, &spliced(text, range, &json!(program).to_string())].concat(), true)
}

pub(super) fn insert(format: Format, text: &str, piece: &str) -> Result<String, EditError> {
    let (bom, text) = split_bom(text);
    let (name, nl) = (container_name(format), newline(text));
    let readable = readable(text);
    let root = root(&readable)?;
    let unit = root.as_ref().and_then(|root| indent_of_members(text, root)).unwrap_or(INDENT);
    let entry = format!("\"{NAME}\": {piece}");
    let new = match (&root, container(root.as_ref(), format)?) {
        (_, Some(object)) => inserted(text, object, unit, &entry),
        (Some(root), None) => {
            let depth = format!("{}{unit}", indent_of_line(text, root.range.start));
            let holder = if is_on_one_line(text, root) {
                format!("\"{name}\": {{{entry}}}")
            } else {
                format!("\"{name}\": {{{nl}{depth}{unit}{entry}{nl}{depth}}}")
            };
            inserted(text, root, unit, &holder)
        }
        (None, _) => {
            let gap = if text.is_empty() || text.ends_with('\n') { "" } else { nl };
            format!(
                "{text}{gap}{{{nl}{INDENT}\"{name}\": {{{nl}{INDENT}{INDENT}{entry}{nl}{INDENT}}}{nl}}}{nl}"
            )
        }
    };
    checked(format, [bom, &new].concat(), true)
}

pub(super) fn remove(
    format: Format,
    text: &str,
    with_container: bool,
) -> Result<String, EditError> {
    let (bom, text) = split_bom(text);
    let name = container_name(format);
    let mut text = {
        let readable = readable(text);
        let root = root(&readable)?;
        match container(root.as_ref(), format)? {
            Some(object) => without(text, object, NAME),
            None => text.to_owned(),
        }
    };
    if with_container {
        let emptied = {
            let readable = readable(&text);
            let root = root(&readable)?;
            match (&root, container(root.as_ref(), format)?) {
                (Some(root), Some(object)) if is_bare(&text, object) => {
                    Some(without(&text, root, name))
                }
                _ => None,
            }
        };
        text = emptied.unwrap_or(text);
    }
    checked(format, [bom, &text].concat(), false)
}

/// The edited text, if it still reads as it should: a mistake here must not reach a file.
fn checked(format: Format, text: String, has_entry: bool) -> Result<String, EditError> {
    match find(format, &text) {
        Ok(entry) if entry.is_some() == has_entry => Ok(text),
        Ok(_) | Err(EditError::Unusual(_)) => {
            Err(EditError::Unusual("it is written in a way that cannot be edited safely".into()))
        }
        Err(error) => Err(error),
    }
}

fn bytes(value: &Value<'_>) -> Range<usize> {
    value.start()..value.end()
}

/// The blanks and line ends before a place.
fn blank_before(text: &str, at: usize) -> Range<usize> {
    text[..at].trim_end_matches([' ', '\t', '\r', '\n']).len()..at
}

/// The comma behind a value, where nothing but blanks and comments is between them.
fn comma_after(text: &str, end: usize) -> Option<usize> {
    let mut at = end;
    loop {
        let rest = &text[at..];
        if rest.starts_with(',') {
            return Some(at);
        }
        at += if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            rest.find("*/").map_or(rest.len(), |close| close + 2)
        } else {
            rest.chars().next().filter(|c| c.is_whitespace())?.len_utf8()
        };
    }
}

/// The blanks that the line of a place begins with.
fn indent_of_line(text: &str, at: usize) -> &str {
    let line = &text[text[..at].rfind('\n').map_or(0, |nl| nl + 1)..at];
    &line[..line.len() - line.trim_start_matches([' ', '\t']).len()]
}

/// How far the members of an object are indented; none where they do not stand on lines of their own.
fn indent_of_members<'t>(text: &'t str, object: &Object<'_>) -> Option<&'t str> {
    let first = object.properties.first()?;
    let before = blank_before(text, first.range.start);
    text[before].contains('\n').then(|| indent_of_line(text, first.range.start))
}

/// Whether an object has members, and its closing brace on their line.
fn is_on_one_line(text: &str, object: &Object<'_>) -> bool {
    let close = object.range.end - 1;
    !object.properties.is_empty() && !text[blank_before(text, close)].contains('\n')
}

/// Nothing in it but blanks.
fn is_bare(text: &str, object: &Object<'_>) -> bool {
    text[object.range.start + 1..object.range.end - 1].trim().is_empty()
}

/// The text with one member more at the end of an object.
fn inserted(text: &str, object: &Object<'_>, unit: &str, member: &str) -> String {
    let (nl, close) = (newline(text), object.range.end - 1);
    let gap = blank_before(text, close);
    let outer = indent_of_line(text, object.range.start);
    let indent =
        indent_of_members(text, object).map_or_else(|| format!("{outer}{unit}"), ToOwned::to_owned);
    let Some(last) = object.properties.last() else {
        let tail =
            if text[gap.clone()].contains('\n') { String::new() } else { format!("{nl}{outer}") };
        return spliced(text, gap.start..gap.start, &format!("{nl}{indent}{member}{tail}"));
    };
    let end = last.range.end;
    let comma = comma_after(text, end);
    let lead = if is_on_one_line(text, object) { " ".to_owned() } else { format!("{nl}{indent}") };
    let trail = if comma.is_some() { "," } else { "" };
    let new = spliced(text, gap.start..gap.start, &format!("{lead}{member}{trail}"));
    if comma.is_some() { new } else { spliced(&new, end..end, ",") }
}

/// The text without a member of an object: the reverse of [`inserted`] where it is the last one.
fn without(text: &str, object: &Object<'_>, name: &str) -> String {
    let properties = &object.properties;
    let Some(at) = properties.iter().position(|property| property.name.as_str() == name) else {
        return text.to_owned();
    };
    let range = properties.get(at).map(|member| member.range).unwrap_or(object.range);
    if properties.len() == 1 {
        let end = comma_after(text, range.end).map_or(range.end, |comma| comma + 1);
        let before = &text[object.range.start + 1..range.start];
        let after = &text[end..object.range.end - 1];
        if before.trim().is_empty() && after.trim().is_empty() {
            return spliced(text, object.range.start + 1..object.range.end - 1, "");
        }
    }
    let start = blank_before(text, range.start).start;
    let comma = comma_after(text, range.end);
    let previous = at.checked_sub(1).and_then(|before| properties.get(before));
    match (comma, previous.and_then(|previous| comma_after(text, previous.range.end))) {
        // Up to the comma, which may stand behind a comment; that goes with the entry.
        (Some(comma), _) => spliced(text, start..comma + 1, ""),
        (None, Some(before)) => {
            spliced(&spliced(text, start..range.end, ""), before..before + 1, "")
        }
        (None, None) => spliced(text, start..range.end, ""),
    }
}
