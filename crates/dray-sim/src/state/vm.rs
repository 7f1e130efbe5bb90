//! The orchestration of the VM's own migration.

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stage {
    Idle,
    Moving,
    Draining,
    HandingOver,
}

/// The orchestration; it lives in the source's agent.
pub(crate) struct Vm {
    pub(crate) stage: Stage,
    pub(crate) token: u64,
    pub(crate) tries: u32,
    pub(crate) resumes: u32,
}

impl Vm {
    pub(crate) fn new() -> Self {
        Self { stage: Stage::Idle, token: 0, tries: 0, resumes: 0 }
    }
}
