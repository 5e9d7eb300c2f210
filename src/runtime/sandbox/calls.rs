//! The seccomp filter of a run: system calls that no adapter's program needs and that reach beyond
//! the run, or that would go round the other restrictions. Everything else stays allowed, since a
//! list of what is allowed breaks with every new C library.

use std::collections::BTreeMap;

use libc::{AF_INET, AF_INET6, AF_UNIX, IPPROTO_TCP, MSG_FASTOPEN, SOCK_STREAM};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, apply_filter,
};

use super::confine::Sockets;

/// Refused with EPERM whatever the arguments are.
const REFUSED: &[libc::c_long] = &[
    // Other processes.
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_kcmp,
    libc::SYS_pidfd_getfd,
    // Namespaces and mounts.
    libc::SYS_unshare,
    libc::SYS_setns,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_open_tree,
    libc::SYS_move_mount,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    libc::SYS_open_by_handle_at,
    libc::SYS_name_to_handle_at,
    // Keys, and parts of the kernel with a long record of holes.
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    // Sockets and files without the calls that are filtered here.
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    // The machine.
    libc::SYS_kexec_load,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_acct,
    libc::SYS_quotactl,
    libc::SYS_syslog,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_clock_adjtime,
    libc::SYS_adjtimex,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    libc::SYS_vhangup,
];

/// Flags of clone(2) that make a namespace.
const NAMESPACES: u64 = (libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET) as u64;

/// The bits of a socket's type without its flags.
const TYPE_BITS: u64 = 0xf;

type Fault = seccompiler::BackendError;
type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// Applies the filter to this thread, and so to the program that it becomes.
pub(super) fn apply(sockets: Sockets) -> Result<(), String> {
    let refused = compile(refused(sockets).map_err(|e| e.to_string())?, libc::EPERM)?;
    // Its flags are in memory, where a filter cannot see them. The C library takes clone(2) instead.
    let unknown = compile(Rules::from([(libc::SYS_clone3, Vec::new())]), libc::ENOSYS)?;
    for program in [&unknown, &refused] {
        apply_filter(program).map_err(|e| e.to_string())?;
    }
    Ok(())
}

fn compile(rules: Rules, errno: libc::c_int) -> Result<BpfProgram, String> {
    let arch = TargetArch::try_from(std::env::consts::ARCH).map_err(|e| e.to_string())?;
    let errno = SeccompAction::Errno(errno.unsigned_abs());
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, errno, arch);
    let program: BpfProgram =
        filter.and_then(TryInto::try_into).map_err(|e: Fault| e.to_string())?;
    Ok(if cfg!(target_arch = "x86_64") { without_x32(program) } else { program })
}

/// `program` behind a refusal of the x32 calls of x86-64: they have the numbers of the others with
/// one more bit, and would pass a filter of the others.
fn without_x32(program: BpfProgram) -> BpfProgram {
    /// `seccomp_data.nr` into the accumulator.
    const LOAD_NUMBER: u16 = 0x20;
    /// Jump if at least.
    const JUMP_IF_GE: u16 = 0x35;
    const RETURN: u16 = 0x06;
    const X32_BIT: u32 = 0x4000_0000;
    const ERRNO: u32 = 0x0005_0000;
    let step = |code, jt, jf, k| seccompiler::sock_filter { code, jt, jf, k };
    let mut whole = vec![
        step(LOAD_NUMBER, 0, 0, 0),
        step(JUMP_IF_GE, 0, 1, X32_BIT),
        step(RETURN, 0, 0, ERRNO | libc::ENOSYS.unsigned_abs()),
    ];
    whole.extend(program);
    whole
}

fn refused(sockets: Sockets) -> Result<Rules, Fault> {
    let mut rules: Rules = REFUSED.iter().map(|number| (*number, Vec::new())).collect();
    let flag = |argument, flag: u64| {
        let both = SeccompCmpOp::MaskedEq(flag);
        let set = SeccompCondition::new(argument, SeccompCmpArgLen::Qword, both, flag)?;
        SeccompRule::new(vec![set])
    };
    let mut clone = Vec::new();
    for bit in (0..u64::BITS).map(|n| 1 << n).filter(|bit| NAMESPACES & bit != 0) {
        clone.push(flag(0, bit)?);
    }
    rules.insert(libc::SYS_clone, clone);
    if sockets == Sockets::Any {
        return Ok(rules);
    }
    let differs = |argument, values: &[libc::c_int]| {
        let conditions = values.iter().map(|value| {
            let value = u64::from(value.unsigned_abs());
            SeccompCondition::new(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Ne, value)
        });
        SeccompRule::new(conditions.collect::<Result<_, _>>()?)
    };
    let mut no_stream = Vec::new();
    for kind in (0..=TYPE_BITS).filter(|kind| *kind != u64::from(SOCK_STREAM.unsigned_abs())) {
        let is = SeccompCmpOp::MaskedEq(TYPE_BITS);
        let condition = SeccompCondition::new(1, SeccompCmpArgLen::Dword, is, kind)?;
        no_stream.push(SeccompRule::new(vec![condition])?);
    }
    // A stream pair is connected for good; a datagram pair could be connected elsewhere.
    let mut pair = no_stream.clone();
    pair.push(differs(0, &[AF_UNIX])?);
    rules.insert(libc::SYS_socketpair, pair);
    let socket = if sockets == Sockets::Tcp {
        // Landlock judges TCP alone, so nothing else that makes a stream is left: no UNIX socket,
        // no SCTP, no MPTCP.
        let mut socket = no_stream;
        socket.push(differs(0, &[AF_INET, AF_INET6])?);
        socket.push(differs(2, &[0, IPPROTO_TCP])?);
        socket
    } else {
        Vec::new()
    };
    rules.insert(libc::SYS_socket, socket);
    // Connects without connect(2), which Landlock does not see.
    let fast_open = u64::from(MSG_FASTOPEN.unsigned_abs());
    rules.insert(libc::SYS_sendto, vec![flag(3, fast_open)?]);
    rules.insert(libc::SYS_sendmsg, vec![flag(2, fast_open)?]);
    rules.insert(libc::SYS_sendmmsg, vec![flag(3, fast_open)?]);
    Ok(rules)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_sockets_compiles() {
        for sockets in [Sockets::None, Sockets::Tcp, Sockets::Any] {
            assert!(!compile(refused(sockets).unwrap(), libc::EPERM).unwrap().is_empty());
        }
    }
}
