//! How results look on a terminal. Pure: values in, text out.

pub mod backup;
pub mod batch;
pub mod images;
pub mod lineage;
pub mod planned;
pub mod prepared;
pub mod script;
pub mod status;
pub mod style;
pub mod summary;
pub mod table;
pub mod troubles;
pub mod units;
pub mod words;
