//! Stands where the agent's own start belongs until the agent is wired up.

use super::{ApiError, ApiResult, ErrorKind};
use crate::config::Config;
use std::path::Path;

/// Reads the configuration and stops there.
///
/// # Errors
/// Always: with what is wrong with the configuration, or because this build has no agent.
pub fn run(path: &Path) -> ApiResult<()> {
    let what = format!("cannot start the agent with {}", path.display());
    Config::load(path).map_err(|why| ApiError::new(ErrorKind::Invalid, what.clone(), why))?;
    Err(ApiError::new(ErrorKind::Unsupported, what, "this build has no agent"))
}
