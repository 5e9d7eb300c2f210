//! Questions to the operating system that the standard library has no call for: who we are and how
//! many descriptors we may open. Safe wrappers of `rustix` only.

use std::io;
use std::os::fd::AsFd;

use rustix::fs::OFlags;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// What macOS takes as a soft descriptor limit when the hard one says "unlimited" (its `OPEN_MAX`).
const FALLBACK_DESCRIPTORS: u64 = 10_240;

/// How many descriptors this process may have open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DescriptorLimit {
    /// The limit in force; `u64::MAX` for none.
    pub soft: u64,
    /// How far it can be raised; `u64::MAX` for any number.
    pub hard: u64,
}

/// The user that this process acts as.
#[must_use]
pub fn uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// The descriptor limit in force.
#[must_use]
pub fn descriptor_limit() -> DescriptorLimit {
    let limit = getrlimit(Resource::Nofile);
    DescriptorLimit {
        soft: limit.current.unwrap_or(u64::MAX),
        hard: limit.maximum.unwrap_or(u64::MAX),
    }
}

/// Raises the soft descriptor limit to the hard one and returns what is then in force.
///
/// # Errors
/// When the system refuses; the old limit then stays.
pub fn raise_descriptor_limit() -> io::Result<DescriptorLimit> {
    let DescriptorLimit { soft, hard } = descriptor_limit();
    if soft < hard {
        let maximum = getrlimit(Resource::Nofile).maximum;
        if setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).is_err() {
            let current = Some(FALLBACK_DESCRIPTORS.min(hard).max(soft));
            setrlimit(Resource::Nofile, Rlimit { current, maximum })?;
        }
    }
    Ok(descriptor_limit())
}

/// How many descriptors are open now; `None` where the system does not tell.
#[must_use]
pub fn open_descriptors() -> Option<u64> {
    let entries = std::fs::read_dir("/dev/fd").ok()?;
    // One of them is the directory being read.
    u64::try_from(entries.count()).ok()?.checked_sub(1)
}

/// Whether what is written to stdout goes anywhere, if only where the user said.
///
/// Rust's start-up opens `/dev/null` for reading and writing in place of a descriptor that is
/// closed, and a write to one that was opened for reading counts as done. A shell opens `/dev/null`
/// for writing alone. Who hands over one that can be read as well is taken for closed.
#[must_use]
pub fn stdout_is_open() -> bool {
    is_open(&std::io::stdout())
}

fn is_open(descriptor: &impl AsFd) -> bool {
    let Ok(flags) = rustix::fs::fcntl_getfl(descriptor) else { return false };
    let null = || {
        let (here, null) =
            (rustix::fs::fstat(descriptor).ok()?, rustix::fs::stat(c"/dev/null").ok()?);
        let is_device = rustix::fs::FileType::from_raw_mode(here.st_mode)
            == rustix::fs::FileType::CharacterDevice;
        Some(is_device && here.st_rdev == null.st_rdev)
    };
    match flags & OFlags::RWMODE {
        OFlags::WRONLY => true,
        OFlags::RDWR => !null().unwrap_or(false),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn raising_reaches_the_hard_limit_and_stays_there() {
        let before = descriptor_limit();
        let raised = raise_descriptor_limit().unwrap();
        assert_eq!(raised.hard, before.hard);
        assert!(raised.soft >= before.soft);
        assert_eq!(raise_descriptor_limit().unwrap(), raised);
    }

    #[test]
    fn output_goes_somewhere_but_into_what_is_no_output() {
        use std::fs::OpenOptions;
        let null =
            |read, write| OpenOptions::new().read(read).write(write).open("/dev/null").unwrap();
        assert!(is_open(&null(false, true)), "> /dev/null");
        assert!(!is_open(&null(true, true)), "closed at the start");
        assert!(!is_open(&null(true, false)), "< /dev/null");
        let (reader, writer) = io::pipe().unwrap();
        assert!(is_open(&writer) && !is_open(&reader));
        // A terminal is open both ways.
        let both = OpenOptions::new().read(true).write(true).open("/dev/zero").unwrap();
        assert!(is_open(&both));
    }

    #[test]
    fn an_opened_file_is_counted() {
        // Other tests open and close files in this process at the same time, so many are opened.
        let before = open_descriptors().unwrap();
        let files: Vec<_> = (0..500).map(|_| std::fs::File::open("/dev/null").unwrap()).collect();
        assert!(open_descriptors().unwrap() > before + 250);
        drop(files);
    }
}
