//! The portable runtime in a repository: which versions a file names, and whether this engine may
//! work beside it (specification, section 12.1).

use serde::Serialize;

use super::marker::PROTOCOL;

/// The engine version that this engine and the runtime it installs carry.
pub const ENGINE: &str = "1.1.1";
/// The version of the texts that it installs.
pub const ADAPTER: &str = "1.1.1";

/// What is in the runtime's place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// Nothing.
    Missing,
    /// Something that is no regular UTF-8 file.
    Unusable(&'static str),
    /// A file with this text.
    File(String),
}

/// What `inspect` and `protocol` say of the runtime.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Runtime {
    /// Whether there is one.
    pub exists: bool,
    /// Whether it names both versions.
    pub recognized: bool,
    /// The engine version that it names.
    pub engine_version: Option<String>,
    /// The protocol that it names.
    pub protocol_version: Option<String>,
    /// Whether it speaks this protocol.
    pub compatible: bool,
    /// Whether it is this engine's version, too.
    pub current: bool,
    /// What is wrong with it.
    pub error: Option<String>,
}

/// How this engine stands to the runtime in the repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// There is none: the first writer installs it.
    Missing,
    /// The same version: both may write.
    Same,
    /// Older: only `init`, `migrate` and `upgrade` may write, by replacing it.
    Older,
    /// Newer and compatible: it must do the work.
    Newer,
    /// Of another protocol, or not recognised: nobody may write.
    Foreign,
}

/// The digits of `x.y.z`, and nothing else.
fn triple(version: &str) -> Option<[u64; 3]> {
    let mut parts = version.split('.');
    let mut next = || {
        let part = parts.next()?;
        let digits = !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
        if digits { part.parse().ok() } else { None }
    };
    let triple = [next()?, next()?, next()?];
    parts.next().is_none().then_some(triple)
}

/// The version that the first line `NAME = "x.y.z"` gives.
fn version<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.split('\n').find_map(|line| {
        let value = line.strip_prefix(name)?.strip_prefix(" = \"")?.strip_suffix('"')?;
        triple(value).map(|_| value)
    })
}

/// Judges what is in the runtime's place.
pub fn judge(found: &Found) -> (Runtime, Standing) {
    let mut runtime = Runtime {
        exists: true,
        recognized: false,
        engine_version: None,
        protocol_version: None,
        compatible: false,
        current: false,
        error: None,
    };
    let text = match found {
        Found::Missing => {
            runtime.exists = false;
            runtime.error = Some("there is no project runtime; init installs it".into());
            return (runtime, Standing::Missing);
        }
        Found::Unusable(why) => {
            runtime.error = Some((*why).into());
            return (runtime, Standing::Foreign);
        }
        Found::File(text) => text,
    };
    let engine = version(text, "ENGINE_VERSION").or_else(|| version(text, "PLUGIN_VERSION"));
    let protocol = version(text, "PROTOCOL_VERSION");
    runtime.recognized = engine.is_some() && protocol.is_some();
    runtime.compatible = protocol == Some(PROTOCOL);
    runtime.current = runtime.compatible && engine == Some(ENGINE);
    runtime.engine_version = engine.map(str::to_owned);
    runtime.protocol_version = protocol.map(str::to_owned);
    if !runtime.recognized {
        runtime.error = Some(
            "the file does not say which engine and protocol it is; move it away and run `commsd vault upgrade` there"
                .into(),
        );
    }
    let standing = match engine.and_then(triple).zip(triple(ENGINE)) {
        Some((theirs, ours)) if runtime.compatible => match theirs.cmp(&ours) {
            std::cmp::Ordering::Less => Standing::Older,
            std::cmp::Ordering::Equal => Standing::Same,
            std::cmp::Ordering::Greater => Standing::Newer,
        },
        _ => Standing::Foreign,
    };
    (runtime, standing)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(engine: &str, protocol: &str) -> Found {
        Found::File(format!(
            "#!\nENGINE_VERSION = \"{engine}\"\nPROTOCOL_VERSION = \"{protocol}\"\n"
        ))
    }

    #[test]
    fn versions_compare_as_numbers() {
        for (found, standing) in [
            (Found::Missing, Standing::Missing),
            (file("1.1.1", "1.0.0"), Standing::Same),
            (file("1.1.0", "1.0.0"), Standing::Older),
            (file("1.10.0", "1.0.0"), Standing::Newer),
            (file("1.1.1", "2.0.0"), Standing::Foreign),
            (file("1.1.2-rc1", "1.0.0"), Standing::Foreign),
            (Found::File("print('x')\n".into()), Standing::Foreign),
            (Found::Unusable("a folder"), Standing::Foreign),
            (
                Found::File("PLUGIN_VERSION = \"0.9.0\"\nPROTOCOL_VERSION = \"1.0.0\"\n".into()),
                Standing::Older,
            ),
            (
                Found::File("# ENGINE_VERSION = \"1.1.1\"\n PROTOCOL_VERSION = \"1.0.0\"\n".into()),
                Standing::Foreign,
            ),
        ] {
            assert_eq!(judge(&found).1, standing, "{found:?}");
        }
    }

    #[test]
    fn a_file_with_only_a_protocol_is_compatible_but_not_recognised() {
        let (runtime, standing) = judge(&Found::File("PROTOCOL_VERSION = \"1.0.0\"\n".into()));
        assert!(runtime.compatible && !runtime.recognized && !runtime.current);
        assert_eq!(standing, Standing::Foreign);
    }
}
