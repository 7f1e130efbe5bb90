//! The first bytes of a stream, before anyone has said which version they speak.

#![no_main]

use dray_wire::hello::{MAX_HELLO, PREFACE_LEN, decode_preface};
use dray_wire::{Hello, HelloReply};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Some((preface, body)) = bytes.split_first_chunk::<PREFACE_LEN>() {
        if let Ok(preface) = decode_preface(preface) {
            assert!(preface.body_len <= MAX_HELLO.into());
        }
        let _ = Hello::decode(body);
        let _ = HelloReply::decode(body);
    }
});
