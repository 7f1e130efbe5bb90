//! Numbers as people read them.

use dray_types::ByteSize;

/// Bytes in a block.
pub const BLOCK: u64 = 4096;

/// A number of bytes.
pub fn bytes(count: u64) -> String {
    ByteSize(count).to_string()
}

/// Bytes a second.
pub fn rate(bytes_per_second: u64) -> String {
    format!("{}/s", bytes(bytes_per_second))
}

/// A count, its digits in groups of three.
pub fn count(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A count with its noun: `1 image`, `2 images`.
pub fn counted(value: u64, noun: &str) -> String {
    let plural = if value == 1 { "" } else { "s" };
    format!("{} {noun}{plural}", count(value))
}

/// A time in milliseconds.
pub fn millis(ms: f64) -> String {
    if ms < 100.0 {
        format!("{ms:.1} ms")
    } else if ms < 10_000.0 {
        format!("{ms:.0} ms")
    } else {
        seconds(ms / 1000.0)
    }
}

/// A time in seconds.
pub fn seconds(seconds: f64) -> String {
    // Rounded first, so that 59.97 s is a minute and not "60.0 s".
    let tenths = (seconds * 10.0).round() / 10.0;
    let whole = seconds.round() as u64;
    if tenths < 60.0 {
        format!("{tenths:.1} s")
    } else if whole < 3600 {
        format!("{} m {:02} s", whole / 60, whole % 60)
    } else {
        format!("{} h {:02} m", whole / 3600, whole % 3600 / 60)
    }
}

/// A time that is only an estimate: whole seconds.
pub fn about(estimate: f64) -> String {
    if estimate < 60.0 { format!("{estimate:.0} s") } else { seconds(estimate) }
}

/// How much of a whole, in percent rounded down: 100 only when all is done.
pub fn percent(done: u64, total: u64) -> u64 {
    if total == 0 { 100 } else { (u128::from(done) * 100 / u128::from(total)).min(100) as u64 }
}

/// The same, or a dash where nothing is known of the whole.
pub fn share_of(done: u64, total: u64) -> String {
    if total == 0 { "-".to_owned() } else { format!("{} %", percent(done, total)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        assert_eq!(count(7), "7");
        assert_eq!(count(1_234_567), "1,234,567");
        assert_eq!(counted(1, "image"), "1 image");
        assert_eq!(counted(2000, "block"), "2,000 blocks");
        assert_eq!(millis(3.149), "3.1 ms");
        assert_eq!(millis(380.4), "380 ms");
        assert_eq!(seconds(12.34), "12.3 s");
        assert_eq!(seconds(59.97), "1 m 00 s");
        assert_eq!(about(1.4), "1 s");
        assert_eq!(seconds(7380.0), "2 h 03 m");
        assert_eq!(percent(999, 1000), 99);
        assert_eq!(percent(0, 0), 100);
        assert_eq!(percent(u64::MAX, u64::MAX), 100);
    }
}
