//! Saved heat: whatever decodes can be counted on, and is written and read again as it is.

#![no_main]

use dray_heat::{Heat, HeatConfig, Op};
use dray_types::BlockRange;
use libfuzzer_sys::fuzz_target;

const BLOCKS: u64 = 1 << 20;

/// The bytes with the checksum that belongs to them, or none would get past it.
fn sealed(bytes: &[u8]) -> Vec<u8> {
    let add = |sum: u64, &byte: &u8| (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    let sum = bytes.iter().fold(0xcbf2_9ce4_8422_2325, add);
    [bytes, &sum.to_le_bytes()].concat()
}

fuzz_target!(|bytes: &[u8]| {
    let config = HeatConfig { max_chunks: 256, ..HeatConfig::default() };
    let Ok(mut heat) = Heat::decode(&sealed(bytes), BLOCKS, config) else { return };
    let again = Heat::decode(&heat.encode(), BLOCKS, config).expect("what was just written");
    assert_eq!(again.encode(), heat.encode());
    assert!(heat.memory() < 12 << 20);
    for nth in 0..300 {
        heat.access(Op::Write, BlockRange::new(nth * 977, 8));
    }
    for op in [Op::Read, Op::Write] {
        let schedule = heat.unguarded(op);
        let blocks: u64 = schedule.ranges().iter().map(|range| range.len).sum();
        assert!(blocks <= BLOCKS && schedule.ranges().iter().all(|range| range.end() <= BLOCKS));
    }
});
