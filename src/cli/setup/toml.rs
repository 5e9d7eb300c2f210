//! Our entry in Codex's `config.toml`: a table of its own at the end of the file. The parser says where
//! things are; what is not the entry is never written anew.

use std::ops::Range;

use toml_edit::{Array, Document, Item, Table, TableLike, Value};

use super::edit::{EditError, Entry, NAME, newline, spliced, split_bom};

const SERVERS: &str = "mcp_servers";

fn parse(text: &str) -> Result<Document<&str>, EditError> {
    Document::parse(text).map_err(|error| EditError::Unreadable {
        format: "TOML",
        why: error.to_string().trim_end().replace('\n', " "),
    })
}

fn unusual(why: &str) -> EditError {
    EditError::Unusual(why.into())
}

/// The entry; an error where it could not be edited.
fn entry<'d>(document: &'d Document<&str>) -> Result<Option<&'d Item>, EditError> {
    match document.get(SERVERS) {
        None => Ok(None),
        Some(Item::Table(servers)) => Ok(servers.get(NAME)),
        Some(_) => Err(unusual("its mcp_servers is not written as tables")),
    }
}

/// What an entry says.
fn read(item: &dyn TableLike) -> Entry {
    let string = |item: &Item| item.as_str().map(str::to_owned);
    let args = item.get("args").and_then(Item::as_array);
    Entry {
        program: item.get("command").and_then(string).unwrap_or_default(),
        args: args
            .into_iter()
            .flat_map(Array::iter)
            .filter_map(|value| value.as_str().map(str::to_owned))
            .collect(),
    }
}

pub(super) fn find(text: &str) -> Result<Option<Entry>, EditError> {
    let document = parse(split_bom(text).1)?;
    let Some(item) = entry(&document)? else { return Ok(None) };
    Ok(Some(item.as_table_like().map(read).unwrap_or_default()))
}

/// Where the entry is: a value behind its key, or one or more sections.
enum Place {
    /// The value, and the lines that it stands on.
    Value { value: Range<usize>, lines: Range<usize> },
    /// Sections from the header to the last line with a value, line end included, in their order.
    Sections(Vec<Range<usize>>),
}

fn place(text: &str) -> Result<Option<Place>, EditError> {
    let document = parse(text)?;
    let Some(item) = entry(&document)? else { return Ok(None) };
    match item {
        Item::Value(value) => {
            let servers = document.get(SERVERS).and_then(Item::as_table);
            let key = servers.and_then(|servers| servers.key(NAME)).and_then(toml_edit::Key::span);
            let (Some(value), Some(key)) = (value.span(), key) else {
                return Err(unusual("its entry cannot be located"));
            };
            let lines = line_start(text, key.start)..line_end(text, value.end);
            // `mcp_servers.agent-comms = …` begins before its last key.
            Ok(Some(Place::Value { value, lines }))
        }
        Item::Table(table) => {
            let mut sections = Vec::new();
            gather(text, table, &mut sections)?;
            if sections.is_empty() {
                return Err(unusual("its entry is written with dotted keys"));
            }
            sections.sort_by_key(|section| section.start);
            Ok(Some(Place::Sections(sections)))
        }
        _ => Err(unusual("its entry is no table")),
    }
}

/// The sections of a table and of those below it.
fn gather(text: &str, table: &Table, out: &mut Vec<Range<usize>>) -> Result<(), EditError> {
    if table.is_dotted() {
        return Err(unusual("its entry is written with dotted keys"));
    }
    if let Some(header) = table.span().filter(|_| !table.is_implicit()) {
        let end = last_value(table).unwrap_or(header.end).max(header.end);
        out.push(line_start(text, header.start)..line_end(text, end));
    }
    for (_, item) in table.iter() {
        match item {
            Item::Table(below) if !below.is_dotted() => gather(text, below, out)?,
            Item::ArrayOfTables(_) => {
                return Err(unusual("its entry has arrays of tables"));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Where the last value of a section ends.
fn last_value(table: &Table) -> Option<usize> {
    let end = |(_, item): (&str, &Item)| match item {
        Item::Value(value) => value.span().map(|span| span.end),
        Item::Table(below) if below.is_dotted() => last_value(below),
        _ => None,
    };
    table.iter().filter_map(end).max()
}

fn line_start(text: &str, at: usize) -> usize {
    text[..at].rfind('\n').map_or(0, |nl| nl + 1)
}

fn line_end(text: &str, at: usize) -> usize {
    text[at..].find('\n').map_or(text.len(), |nl| at + nl + 1)
}

fn chomped(text: &str) -> &str {
    let text = text.strip_suffix('\n').unwrap_or(text);
    text.strip_suffix('\r').unwrap_or(text)
}

pub(super) fn piece(text: &str) -> Result<Option<String>, EditError> {
    let (_, text) = split_bom(text);
    Ok(place(text)?.map(|place| match place {
        Place::Value { value, .. } => text[value].to_owned(),
        Place::Sections(sections) => {
            let pieces: Vec<_> = sections.into_iter().map(|range| chomped(&text[range])).collect();
            let nl = newline(text);
            pieces.join(&format!("{nl}{nl}"))
        }
    }))
}

pub(super) fn render(text: &str, entry: &Entry) -> String {
    let (command, args) = values(entry);
    if let Ok(Some(Place::Value { .. })) = place(split_bom(text).1) {
        return format!("{{ command = {command}, args = {args} }}");
    }
    let nl = newline(text);
    format!("[{SERVERS}.{NAME}]{nl}command = {command}{nl}args = {args}")
}

fn values(entry: &Entry) -> (Value, Array) {
    (Value::from(entry.program.as_str()), entry.args.iter().collect())
}

/// A blank line and the section behind all there is. A text that does not end its last line goes on
/// not doing so.
pub(super) fn insert(text: &str, piece: &str) -> Result<String, EditError> {
    let (bom, text) = split_bom(text);
    let document = parse(text)?;
    entry(&document)?;
    let nl = newline(text);
    let new = if text.is_empty() {
        format!("{piece}{nl}")
    } else if text.ends_with('\n') {
        format!("{text}{nl}{piece}{nl}")
    } else {
        format!("{text}{nl}{nl}{piece}")
    };
    checked([bom, &new].concat(), true)
}

pub(super) fn put(text: &str, piece: &str) -> Result<String, EditError> {
    let (bom, text) = split_bom(text);
    let new = match place(text)? {
        None => return Err(unusual("it has no entry to replace")),
        Some(Place::Value { value, .. }) => spliced(text, value, piece),
        Some(Place::Sections(sections)) => {
            let mut new = text.to_owned();
            let mut later = sections.into_iter();
            let Some(first) = later.next() else { return Ok(text.to_owned()) };
            for section in later.rev() {
                new = cut(&new, section);
            }
            let section = chomped(&text[first.clone()]).len();
            spliced(&new, first.start..first.start + section, piece)
        }
    };
    checked([bom, &new].concat(), true)
}

pub(super) fn set_program(text: &str, program: &str) -> Result<String, EditError> {
    let (bom, text) = split_bom(text);
    let document = parse(text)?;
    let table = entry(&document)?.and_then(Item::as_table_like);
    let range = table.and_then(|table| table.get("command")).and_then(Item::span);
    let range = range.ok_or_else(|| unusual("its entry starts no program"))?;
    let new = spliced(text, range, &Value::from(program).to_string());
    checked([bom, &new].concat(), true)
}

pub(super) fn remove(text: &str) -> Result<String, EditError> {
    let (bom, text) = split_bom(text);
    let new = match place(text)? {
        None => text.to_owned(),
        Some(Place::Value { lines, .. }) => spliced(text, lines, ""),
        Some(Place::Sections(sections)) => {
            sections.into_iter().rev().fold(text.to_owned(), |text, section| cut(&text, section))
        }
    };
    checked([bom, &new].concat(), false)
}

/// The text without a section and the blank line before it.
fn cut(text: &str, section: Range<usize>) -> String {
    let unended = !text[section.clone()].ends_with('\n');
    let mut before = &text[..section.start];
    let shorter = chomped(before);
    if before.ends_with('\n') && shorter.ends_with('\n') || shorter.is_empty() {
        before = shorter;
    }
    if unended {
        before = chomped(before);
    }
    [before, &text[section.end..]].concat()
}

/// The edited text, if it still reads as it should: a mistake here must not reach a file.
fn checked(text: String, has_entry: bool) -> Result<String, EditError> {
    match find(&text) {
        Ok(entry) if entry.is_some() == has_entry => Ok(text),
        _ => Err(unusual("it is written in a way that cannot be edited safely")),
    }
}
