//! Frame headers: what decodes is what would be encoded, and every length in it is harmless.

#![no_main]

use dray_wire::FrameHeader;
use dray_wire::frame::{HEADER_LEN, MAX_PAYLOAD};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Some((head, payload)) = bytes.split_first_chunk::<HEADER_LEN>() else { return };
    let Ok(header) = FrameHeader::decode(head) else { return };
    assert_eq!(header.encode(), *head);
    assert!(header.payload_len <= MAX_PAYLOAD);
    assert!(header.decoded_len() <= MAX_PAYLOAD as usize);
    assert!(header.range.start.checked_add(header.range.len).is_some());
    let _ = header.verify(payload);
});
