//! Numbers out of bytes: no allocation, no overflow, no locale.

/// Digits of a second in nanoseconds.
const NANO_DIGITS: u32 = 9;

/// A whole number that fills `text`; none when there is anything else in it or it does not fit.
#[inline]
pub(super) fn whole(text: &[u8]) -> Option<u64> {
    if text.is_empty() {
        return None;
    }
    // Nineteen digits always fit.
    if text.len() <= 19 {
        let mut value = 0u64;
        for &byte in text {
            let digit = byte.wrapping_sub(b'0');
            if digit > 9 {
                return None;
            }
            value = value * 10 + u64::from(digit);
        }
        return Some(value);
    }
    text.iter().try_fold(0u64, |value, &byte| {
        let digit = byte.wrapping_sub(b'0');
        let digit = (digit <= 9).then_some(u64::from(digit))?;
        value.checked_mul(10)?.checked_add(digit)
    })
}

/// Seconds with or without a fraction, in nanoseconds; digits beyond them are cut off.
#[inline]
pub(super) fn seconds(text: &[u8]) -> Option<u64> {
    let (mut nanos, mut places) = (0u64, None);
    for &byte in text {
        if byte == b'.' {
            if places.is_some() {
                return None;
            }
            places = Some(0);
            continue;
        }
        let digit = byte.wrapping_sub(b'0');
        if digit > 9 {
            return None;
        }
        if let Some(places) = &mut places {
            if *places == NANO_DIGITS {
                continue;
            }
            *places += 1;
        }
        nanos = nanos.checked_mul(10)?.checked_add(u64::from(digit))?;
    }
    let dot = usize::from(places.is_some());
    if text.len() == dot {
        return None;
    }
    nanos.checked_mul(POWERS[(NANO_DIGITS - places.unwrap_or(0)) as usize])
}

const POWERS: [u64; 10] =
    [1, 10, 100, 1_000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000, 1_000_000_000];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wholes() {
        assert_eq!(whole(b"0"), Some(0));
        assert_eq!(whole(b"18446744073709551615"), Some(u64::MAX));
        assert_eq!(whole(b"18446744073709551616"), None);
        for bad in [&b""[..], b"-1", b"1 ", b"0x1", b"1.0", b"99999999999999999999999"] {
            assert_eq!(whole(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn times() {
        assert_eq!(seconds(b"12.5"), Some(12_500_000_000));
        assert_eq!(seconds(b"7"), Some(7_000_000_000));
        assert_eq!(seconds(b".25"), Some(250_000_000));
        assert_eq!(seconds(b"3."), Some(3_000_000_000));
        assert_eq!(seconds(b"0.0000000019"), Some(1));
        for bad in [&b""[..], b".", b"1.2.3", b"-1", b"1e3", b"99999999999999999999", b"nan"] {
            assert_eq!(seconds(bad), None, "{bad:?}");
        }
    }
}
