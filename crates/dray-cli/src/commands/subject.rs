//! The arguments for the subject and the target of a move, which `prepare`, `seed`, `plan` and
//! `migrate` share.

use super::absolute;
use clap::ValueEnum;
use dray_api::{ApiResult, Chain, Subject, TargetFormat};
use std::path::PathBuf;

/// A move.
#[derive(clap::Args, Debug)]
pub struct MoveArgs {
    #[command(flatten)]
    pub subject: SubjectArgs,
    /// The target: a peer's name from the configuration
    #[arg(long, value_name = "HOST")]
    pub to: String,
}

/// What becomes of chains of images, as it is typed.
#[derive(ValueEnum, Clone, Copy, Debug, Default)]
pub enum ChainArg {
    /// Every image of a chain moves as it is
    #[default]
    Keep,
    /// Only the content that the guest sees moves; the target gets a raw image
    Flatten,
}

impl From<ChainArg> for Chain {
    fn from(chain: ChainArg) -> Self {
        match chain {
            ChainArg::Keep => Self::Keep,
            ChainArg::Flatten => Self::Flatten,
        }
    }
}

/// What a flattened disk is at the target, as it is typed.
#[derive(ValueEnum, Clone, Copy, Debug, Default)]
pub enum TargetFormatArg {
    /// A raw image
    #[default]
    Raw,
    /// A new qcow2, which the target makes of the raw image; needs the same space once more
    Qcow2,
}

impl From<TargetFormatArg> for TargetFormat {
    fn from(format: TargetFormatArg) -> Self {
        match format {
            TargetFormatArg::Raw => Self::Raw,
            TargetFormatArg::Qcow2 => Self::Qcow2,
        }
    }
}

/// A VM or images.
#[derive(clap::Args, Debug)]
#[group(required = true, multiple = false)]
pub struct SubjectArgs {
    /// QMP socket of the running VM on this host
    #[arg(long, value_name = "SOCKET")]
    pub qmp: Option<PathBuf>,
    /// Image to move without a VM, by its name (repeat for several)
    #[arg(long = "image", value_name = "NAME")]
    pub images: Vec<String>,
}

impl SubjectArgs {
    /// As the agent wants it.
    pub fn resolve(self) -> ApiResult<Subject> {
        Ok(match self.qmp {
            Some(qmp) => Subject::Vm { qmp: absolute(&qmp)? },
            None => Subject::Images { names: self.images },
        })
    }
}
