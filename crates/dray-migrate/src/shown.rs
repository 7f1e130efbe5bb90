//! Texts that both sides of a migration share.

use dray_api::{ErrorKind, Phase, Refusal};

/// What is said as long as the guest's start is tried.
pub const WAITS: &str = "the guest is not started yet";

/// What an operator does after a migration that has failed before the handover. A QEMU that has waited for a VM once does
/// so no more.
pub fn once_more(moves_vm: bool) -> &'static str {
    match moves_vm {
        true => {
            "the guest continues at the source; give `dray prepare` again, start QEMU at the target with what it prints, \
             and give `dray migrate` again"
        }
        false => "the image stays at the source; `dray resume` tries again",
    }
}

/// The engine's phase as the API names it.
pub fn shown_phase(phase: dray_engine::Phase) -> Phase {
    match phase {
        dray_engine::Phase::Copy => Phase::Copy,
        dray_engine::Phase::Sync => Phase::Sync,
        dray_engine::Phase::Handover => Phase::Handover,
        dray_engine::Phase::Backfill => Phase::Backfill,
        dray_engine::Phase::Release => Phase::Release,
    }
}

/// What both hosts show while the QEMU behind the socket `qmp` at the target does not answer. The end of that QEMU
/// would be the end of the guest.
pub fn not_started(qmp: &str, why: &str) -> Refusal {
    let hint = format!(
        "the target keeps asking its QEMU, which has the guest's memory: do not end it; if \
         another program is connected to its QMP socket {qmp}, disconnect that program"
    );
    Refusal::new(ErrorKind::Hypervisor, WAITS, why).hint(hint)
}
