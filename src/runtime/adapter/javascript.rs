//! Restricted JavaScript in Node: the body of a function of `input`, `return input;` by default. Node's
//! permission flags are set where there are any and count for nothing: the level of isolation is the
//! boundary.

use super::AdapterOptions;
use super::command;
use super::{AdapterError, Isolation};

/// What runs when no `--cmd` is given.
const ECHO: &str = "return input;";

/// Reads stdin, calls the function whose body is the last argument, prints what it returns.
const HARNESS: &str = "\
let text = '';
process.stdin.setEncoding('utf8');
process.stdin.on('data', (piece) => { text += piece; });
process.stdin.on('end', async () => {
  const AsyncFunction = (async () => {}).constructor;
  const output = await new AsyncFunction('input', process.argv[1])(JSON.parse(text));
  process.stdout.write(JSON.stringify(output === undefined ? null : output));
});
";

/// The host's Node, and the code.
pub(super) fn words(options: &AdapterOptions) -> Result<Vec<String>, AdapterError> {
    let mut words = command::program_words(options, "node")?;
    words.push(options.cmd.clone().unwrap_or_else(|| ECHO.to_owned()));
    Ok(words)
}

/// The command line at a level: a container has its own Node.
pub(super) fn argv(words: &[String], isolation: Isolation) -> Vec<String> {
    let (node, code) = match words {
        [node, code] => (node.as_str(), code.as_str()),
        _ => ("node", ECHO),
    };
    let node = if isolation == Isolation::Oci { "node" } else { node };
    [node, "--no-warnings", "--eval", HARNESS, "--", code].map(str::to_owned).into()
}
