//! The owner's own command: input on stdin and in `TASK_INPUT_FILE`, one JSON text on stdout. And the
//! words of command lines.

use super::dialogue::{Dialogue, Done, Step, parse};
use super::{AdapterError, AdapterOptions};
use crate::acp::code::Error;
use crate::runtime::sandbox;

/// `--cmd` in words, split by POSIX shell-word rules; no shell sees it.
pub(super) fn words(options: &AdapterOptions) -> Result<Vec<String>, AdapterError> {
    let kind = options.kind.as_str();
    let cmd = options.cmd.as_deref().ok_or(AdapterError::Missing(kind, "--cmd COMMAND"))?;
    let words = shlex::split(cmd).filter(|words| !words.is_empty());
    let mut words =
        words.ok_or_else(|| AdapterError::Bad("--cmd", "no words, or an open quote".into()))?;
    words.extend(options.extra_args.iter().cloned());
    Ok(words)
}

/// The program of the options, else `name`, as one word.
pub(super) fn program_words(
    options: &AdapterOptions,
    name: &str,
) -> Result<Vec<String>, AdapterError> {
    let wanted = options.program.as_ref().map_or(name.into(), |path| path.to_string_lossy());
    let found = sandbox::find_program(&wanted);
    found.map(|path| vec![path]).ok_or_else(|| AdapterError::NoProgram(wanted.into_owned()))
}

/// Input in, one JSON text out.
#[derive(Debug)]
pub(super) struct Plain {
    input: Vec<u8>,
    output: Vec<u8>,
}

impl Plain {
    /// With this input.
    pub fn new(input: Vec<u8>) -> Self {
        Self { input, output: Vec::new() }
    }
}

impl Dialogue for Plain {
    fn open(&mut self) -> Vec<Step> {
        vec![Step::Send(std::mem::take(&mut self.input)), Step::Close]
    }

    fn take(&mut self, bytes: &[u8]) -> Vec<Step> {
        self.output.extend_from_slice(bytes);
        Vec::new()
    }

    fn finish(&mut self) -> Result<Done, Error> {
        Ok(Done { output: parse(&self.output)?, ..Done::default() })
    }
}
