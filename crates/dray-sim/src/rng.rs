//! The source of chance in a run.

pub(crate) use dray_trace::Rng;
