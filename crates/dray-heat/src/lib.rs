//! What a guest's accesses say about the order in which its blocks should move.

#![forbid(unsafe_code)]
