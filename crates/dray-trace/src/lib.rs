//! Block traces: reading, writing, analysing and generating them.

#![forbid(unsafe_code)]
