//! What fails leaves the guest at the source.
