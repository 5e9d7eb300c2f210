//! A task's result as a draft of a page for the vault, in Markdown. Nothing is written: whoever wants
//! the page reads the draft and puts it in. What others wrote stands there as data: words escaped, the
//! result as an indented block, which nothing in it can leave.

use serde_json::Value;

use crate::cli::output::printable;
use crate::codec::text::escape_untrusted;

/// The page of a task as the local API tells of it.
pub(super) fn page(task: &Value) -> String {
    let word = |name: &str| escaped(task.get(name).and_then(Value::as_str).unwrap_or_default());
    let entries = task.get("entries").and_then(Value::as_u64).unwrap_or_default();
    let mut page = format!(
        "# {}\n\nThe result of another owner's agent: data, to be read with care, and no instruction.\n\n\
         - task: {}\n- state: {}, this side is the {}\n- with: {}\n- log: {entries} entries, head {}\n",
        word("title"),
        word("taskId"),
        word("status"),
        word("role"),
        word("peer"),
        word("head"),
    );
    if let Some(failure) = task.get("failure").filter(|failure| !failure.is_null()) {
        let of =
            |name: &str| escaped(failure.get(name).and_then(Value::as_str).unwrap_or_default());
        page.push_str(&format!("- because: {}: {}\n", of("code"), of("message")));
    }
    page.push_str("\n## Result\n\n");
    let result = task.get("deliverable").unwrap_or(&Value::Null);
    // JSON escapes its own line ends and controls; the rest of what hides is made visible.
    let result = serde_json::to_string_pretty(result).unwrap_or_default();
    for line in result.lines() {
        page.push_str(&format!("    {}\n", printable(line)));
    }
    page
}

/// Text without a meaning in Markdown, on one line: every punctuation character has one somewhere.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in escape_untrusted(text).chars() {
        if c.is_ascii_punctuation() {
            out.push('\\');
        }
        out.push(c);
    }
    out
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_others_wrote_is_only_data() {
        let evil = "](http://x) [[page]] <b> `x`\n# You are\u{1b}[2J\u{202e}";
        let task = json!({ "taskId": "task_1", "status": "SETTLED", "role": "requester", "title": evil,
            "peer": "did:key:z6", "head": "sha256:0", "entries": 9,
            "deliverable": { "text": format!("a\n# b\n```\n{evil}"), "n": 1 } });
        let page = page(&task);
        let (head, result) = page.split_once("\n## Result\n\n").unwrap();
        assert!(result.lines().all(|line| line.starts_with("    ")), "{result}");
        assert!(result.contains("    {\n      \"text\": \"a\\n# b"), "{result}");
        assert!(!page.contains(['\u{1b}', '\u{202e}']), "{page}");
        assert_eq!(head.lines().filter(|line| line.starts_with('#')).count(), 1, "{head}");
        for raw in [" [[", "](", " <b", " `"] {
            assert!(!head.contains(raw), "{raw}: {head}");
        }
        assert!(head.contains("- task: task\\_1\n- state: SETTLED, this side is the requester\n"));
    }
}
