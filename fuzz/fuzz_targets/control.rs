//! Control messages and requests, both ways: what decodes can be encoded, and comes back equal.

#![no_main]

use dray_wire::control::{self, decode_len};
use dray_wire::request::{self, Reply, Request};
use dray_wire::{ToSource, ToTarget};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(message) = control::decode::<ToTarget>(bytes) {
        let again = control::encode(&message).expect("what was received is not too long");
        assert_eq!(decode_len(again[..4].try_into().unwrap()), Ok(again.len() - 4));
        assert_eq!(control::decode::<ToTarget>(&again[4..]).as_ref(), Ok(&message));
    }
    if let Ok(message) = control::decode::<ToSource>(bytes) {
        let again = control::encode(&message).expect("what was received is not too long");
        assert_eq!(control::decode::<ToSource>(&again[4..]).as_ref(), Ok(&message));
    }
    let _ = request::decode::<Request>(bytes);
    let _ = request::decode::<Reply>(bytes);
});
