//! Disks against models of what they must hold: guests write, blocks arrive or are merged meanwhile,
//! and the power is cut at every step. Every run has a seed; `DRAY_SEED=n cargo test -p dray-image
//! --test models` repeats one.
//!
//! * [`missing`]: an owner with missing blocks. [`missing_cut`]: the same, with power cuts (I2).
//! * [`overlay`]: an overlay that is merged. [`overlay_cut`]: the same, with power cuts (I2).
//! * [`lane`]: a guest. [`power`]: a disk that may lose what was not flushed. [`random`]: seeds.

mod lane;
mod missing;
mod missing_cut;
mod overlay;
mod overlay_cut;
mod power;
mod random;
