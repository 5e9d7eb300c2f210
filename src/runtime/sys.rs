//! What the standard library has no call for: who we are, how many descriptors we may open, and
//! memory that the system may have back. The only room with code that the compiler cannot judge.

use std::io;
use std::os::fd::AsFd;

use rustix::fs::OFlags;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

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

/// The same of stderr.
#[must_use]
pub fn stderr_is_open() -> bool {
    is_open(&std::io::stderr())
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

/// Completes when the other side of a pipe or socket can send nothing more, whether or not all that it
/// sent was read. Reads nothing.
///
/// # Errors
/// Where the system cannot tell, as of a file.
pub async fn hung_up(descriptor: impl AsFd) -> io::Result<()> {
    let copy = descriptor.as_fd().try_clone_to_owned()?;
    // SAFETY: the descriptor is a copy of our own, which the value owns and closes after it has taken it
    // from the system's list.
    #[allow(unsafe_code)]
    let watched = unsafe { AsyncFd::register_with_interest(copy, Interest::READABLE) };
    let watched = watched?;
    loop {
        let mut guard = watched.readable().await?;
        if guard.ready().is_read_closed() {
            return Ok(());
        }
        guard.clear_ready();
    }
}

/// Unmaps the parts of the program's file that nobody has changed: its code, and the constants
/// before it. What is used again is mapped again, from the system's cache, a few pages at a time.
/// Returns how many bytes were asked for.
///
/// A start touches code all over the program, and the system maps what surrounds each place too;
/// most of it is never used again, but counts as this process's memory until somebody says so.
///
/// # Errors
/// Where the system does not list its mappings, or refuses; what was not let go stays as it was.
#[cfg(target_os = "linux")]
pub fn release_program() -> io::Result<usize> {
    let program = std::fs::read_link("/proc/self/exe")?;
    let maps = std::fs::read_to_string("/proc/self/maps")?;
    let mut released = 0;
    for line in maps.lines() {
        let Some((address, length)) = unchanged_part(line, &program) else { continue };
        // SAFETY: the range is one mapping of this process, private, of a file and never written to
        // (code, or the beginning of the file, which has no relocations), so that the system can read
        // the very same bytes again whenever one of them is used; no reference to them changes.
        #[allow(unsafe_code)]
        unsafe {
            rustix::mm::madvise(
                std::ptr::with_exposed_provenance_mut(address),
                length,
                rustix::mm::Advice::LinuxDontNeed,
            )?;
        }
        released += length;
    }
    Ok(released)
}

/// As on Linux, where the system offers it.
///
/// # Errors
/// Always: nothing here tells what is mapped.
#[cfg(not(target_os = "linux"))]
pub fn release_program() -> io::Result<usize> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Address and length of a mapping, by its line of `/proc/self/maps`, if it is a part of `program`
/// that holds what the file holds: code, or constants at its beginning. (Further back there may be
/// some that were relocated and then closed to writing.)
#[cfg(target_os = "linux")]
fn unchanged_part(line: &str, program: &std::path::Path) -> Option<(usize, usize)> {
    let mut fields = line.splitn(6, ' ');
    let (range, rights, offset) = (fields.next()?, fields.next()?, fields.next()?);
    let file = fields.nth(2)?.trim_start();
    let begins = offset.bytes().all(|digit| digit == b'0');
    if std::path::Path::new(file) != program || !(rights == "r-xp" || rights == "r--p" && begins) {
        return None;
    }
    let (from, to) = range.split_once('-')?;
    let (from, to) = (usize::from_str_radix(from, 16).ok()?, usize::from_str_radix(to, 16).ok()?);
    Some((from, to.checked_sub(from)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    #[test]
    fn only_parts_of_the_program_that_are_as_in_its_file_are_let_go() {
        let program = std::path::Path::new("/opt/a b/commsd");
        let line = |rights: &str, offset: &str, file: &str| {
            let line = format!("55a0-55ff {rights} {offset} fe:00 6686923      {file}");
            unchanged_part(&line, program)
        };
        let whole = Some((0x55a0, 0x5f));
        assert_eq!(line("r-xp", "00537000", "/opt/a b/commsd"), whole);
        assert_eq!(line("r--p", "00000000", "/opt/a b/commsd"), whole);
        for (rights, offset, file) in [
            ("r--p", "01ab1000", "/opt/a b/commsd"),
            ("rw-p", "00000000", "/opt/a b/commsd"),
            ("r-xs", "00537000", "/opt/a b/commsd"),
            ("r-xp", "00537000", "/opt/a b/commsd (deleted)"),
            ("r-xp", "00026000", "/usr/lib/libc.so.6"),
            ("rw-p", "00000000", ""),
        ] {
            assert_eq!(line(rights, offset, file), None, "{rights} {offset} {file}");
        }
        assert_eq!(unchanged_part("55a0-55ff r-xp", program), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_program_goes_on_without_what_it_has_used_once() {
        let resident = || {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let line = status.lines().find_map(|line| line.strip_prefix("RssFile:")).unwrap();
            line.trim().trim_end_matches(" kB").parse::<usize>().unwrap()
        };
        let program = std::fs::read_link("/proc/self/exe").unwrap();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let length: usize =
            maps.lines().filter_map(|l| unchanged_part(l, &program)).map(|(_, len)| len).sum();
        let before = resident();
        assert_eq!(release_program().unwrap(), length);
        assert!(length > 1024 * 1024 && resident() < before, "{length} {before}");
    }

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
