//! Seccomp: which calls of the system a tool may make. Every other one does not exist for it.
//!
//! The list is of what `qemu-img` and `qemu-storage-daemon` do with sockets that they were handed, and of
//! what the loader and the C library do before. Nothing in it makes a socket, connects one, follows
//! another process, changes a file by its name or makes a process.

use libc::*;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, apply_filter,
};
use std::collections::BTreeMap;
use std::io;

/// Calls that may be made in any way.
const ALLOWED: &[c_long] = &[
    // Descriptors that it has.
    SYS_read,
    SYS_write,
    SYS_readv,
    SYS_writev,
    SYS_pread64,
    SYS_pwrite64,
    SYS_preadv,
    SYS_pwritev,
    SYS_close,
    SYS_lseek,
    SYS_dup,
    SYS_dup3,
    SYS_pipe2,
    SYS_eventfd2,
    SYS_signalfd4,
    SYS_timerfd_create,
    SYS_timerfd_settime,
    SYS_timerfd_gettime,
    SYS_ppoll,
    SYS_pselect6,
    SYS_epoll_create1,
    SYS_epoll_ctl,
    SYS_epoll_pwait,
    SYS_epoll_pwait2,
    // Sockets that it has.
    SYS_recvmsg,
    SYS_recvfrom,
    SYS_sendmsg,
    SYS_sendto,
    SYS_shutdown,
    SYS_listen,
    SYS_accept,
    SYS_accept4,
    SYS_getsockopt,
    SYS_setsockopt,
    SYS_getsockname,
    SYS_getpeername,
    // Programs and libraries: landlock says which.
    SYS_openat,
    SYS_newfstatat,
    SYS_fstat,
    SYS_statx,
    SYS_readlinkat,
    SYS_faccessat,
    SYS_faccessat2,
    SYS_getdents64,
    SYS_getcwd,
    SYS_execve,
    // Memory.
    SYS_mmap,
    SYS_munmap,
    SYS_mremap,
    SYS_mprotect,
    SYS_madvise,
    SYS_brk,
    SYS_membarrier,
    SYS_get_mempolicy,
    SYS_set_mempolicy,
    // Its own threads and signals.
    SYS_futex,
    SYS_futex_waitv,
    SYS_set_robust_list,
    SYS_set_tid_address,
    SYS_rseq,
    SYS_gettid,
    SYS_sched_yield,
    SYS_sched_getaffinity,
    SYS_rt_sigaction,
    SYS_rt_sigprocmask,
    SYS_rt_sigreturn,
    SYS_rt_sigtimedwait,
    SYS_sigaltstack,
    SYS_restart_syscall,
    SYS_exit,
    SYS_exit_group,
    // Time, chance, and who it is.
    SYS_clock_gettime,
    SYS_clock_getres,
    SYS_clock_nanosleep,
    SYS_nanosleep,
    SYS_gettimeofday,
    SYS_getrandom,
    SYS_getpid,
    SYS_getppid,
    SYS_getuid,
    SYS_geteuid,
    SYS_getgid,
    SYS_getegid,
    SYS_getrusage,
    SYS_uname,
    SYS_sysinfo,
];

/// Older forms of the same, which only this architecture has.
#[cfg(target_arch = "x86_64")]
const ALLOWED_HERE: &[c_long] = &[
    SYS_arch_prctl,
    SYS_access,
    SYS_readlink,
    SYS_stat,
    SYS_lstat,
    SYS_open,
    SYS_poll,
    SYS_select,
    SYS_epoll_create,
    SYS_epoll_wait,
    SYS_eventfd,
    SYS_pipe,
    SYS_dup2,
    SYS_getdents,
    SYS_time,
];
#[cfg(not(target_arch = "x86_64"))]
const ALLOWED_HERE: &[c_long] = &[];

/// Options of `prctl` that say something of the calling thread: its name, how exact its timers are, and
/// the names of its memory (`PR_SET_VMA`).
const OWN_OPTIONS: [c_int; 3] = [PR_SET_NAME, PR_SET_TIMERSLACK, 0x5356_4d41];

/// What `fcntl` may do: copies of descriptors, their flags, and locks. It can also have the system send signals to
/// any process of the same user.
const OF_DESCRIPTORS: [c_int; 11] = [
    F_DUPFD,
    F_DUPFD_CLOEXEC,
    F_GETFD,
    F_SETFD,
    F_GETFL,
    F_SETFL,
    F_GETLK,
    F_SETLK,
    F_SETLKW,
    F_OFD_GETLK,
    F_OFD_SETLK,
];

/// Lets no other call through from now on. One that is not allowed fails as if the system did not know
/// it, for which libraries are prepared.
pub(super) fn close() -> io::Result<()> {
    let program = filter().map_err(io::Error::other)?;
    apply_filter(&program).map_err(io::Error::other)
}

fn filter() -> Result<BpfProgram, seccompiler::BackendError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> =
        ALLOWED.iter().chain(ALLOWED_HERE).map(|&call| (call, Vec::new())).collect();
    // Threads, no processes.
    rules.insert(SYS_clone, vec![only(0, masked(CLONE_THREAD), CLONE_THREAD as u64)?]);
    // Its own limits.
    rules.insert(SYS_prlimit64, vec![only(0, SeccompCmpOp::Eq, 0)?]);
    rules.insert(SYS_prctl, one_of(0, &OWN_OPTIONS)?);
    rules.insert(SYS_fcntl, one_of(1, &OF_DESCRIPTORS)?);
    let arch = TargetArch::try_from(std::env::consts::ARCH)?;
    let unknown = SeccompAction::Errno(ENOSYS as u32);
    SeccompFilter::new(rules, unknown, SeccompAction::Allow, arch)?.try_into()
}

fn masked(bits: c_int) -> SeccompCmpOp {
    SeccompCmpOp::MaskedEq(bits as u64)
}

/// A call whose argument `nth` is one of these.
fn one_of(nth: u8, values: &[c_int]) -> Result<Vec<SeccompRule>, seccompiler::BackendError> {
    values.iter().map(|&value| only(nth, SeccompCmpOp::Eq, value as u64)).collect()
}

/// A call whose argument `nth` is so.
fn only(nth: u8, op: SeccompCmpOp, value: u64) -> Result<SeccompRule, seccompiler::BackendError> {
    let condition = SeccompCondition::new(nth, SeccompCmpArgLen::Dword, op, value)?;
    SeccompRule::new(vec![condition])
}
