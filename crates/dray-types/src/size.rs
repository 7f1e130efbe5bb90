//! Sizes and rates as operators write them.
//!
//! Sizes are bytes with binary units (`64KiB`, `2GiB`; `K`, `M`, `G`, `T` mean the same). Rates are
//! bits a second with decimal units, as links are sold (`800Mbit`, `10Gbit`), or bytes a second
//! with a `/s` (`100MiB/s`).

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A number of bytes.
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize,
)]
pub struct ByteSize(pub u64);

/// A transfer rate in bytes a second.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct BitRate {
    /// Bytes a second; never zero.
    pub bytes_per_second: u64,
}

/// Why a text is not a size or rate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParseSizeError {
    text: String,
    wanted: &'static str,
}

impl fmt::Display for ParseSizeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "'{}' is not {}", self.text, self.wanted)
    }
}

impl std::error::Error for ParseSizeError {}

const SIZE_HINT: &str = "a size; write it as 64KiB, 512MiB or 2GiB";
const RATE_HINT: &str = "a rate; write it as 800Mbit, 10Gbit or 100MiB/s";

fn scaled(number: &str, factor: u64) -> Option<u64> {
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(factor);
    }
    let value = number.parse::<f64>().ok()?;
    let scaled = value * factor as f64;
    (scaled.is_finite() && scaled >= 0.0 && scaled < u64::MAX as f64).then_some(scaled as u64)
}

fn size_factor(unit: &str) -> Option<u64> {
    Some(match unit.trim() {
        "" | "B" => 1,
        "K" | "KiB" | "k" => 1 << 10,
        "M" | "MiB" => 1 << 20,
        "G" | "GiB" => 1 << 30,
        "T" | "TiB" => 1 << 40,
        "KB" | "kB" => 1_000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "TB" => 1_000_000_000_000,
        _ => return None,
    })
}

fn split_unit(text: &str) -> (&str, &str) {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    text.split_at(end)
}

impl FromStr for ByteSize {
    type Err = ParseSizeError;

    fn from_str(text: &str) -> Result<Self, ParseSizeError> {
        let (number, unit) = split_unit(text.trim());
        size_factor(unit)
            .and_then(|factor| scaled(number, factor))
            .map(Self)
            .ok_or_else(|| ParseSizeError { text: text.to_owned(), wanted: SIZE_HINT })
    }
}

impl FromStr for BitRate {
    type Err = ParseSizeError;

    fn from_str(text: &str) -> Result<Self, ParseSizeError> {
        let error = || ParseSizeError { text: text.to_owned(), wanted: RATE_HINT };
        let (number, unit) = split_unit(text.trim());
        let bytes = if let Some(unit) = unit.trim().strip_suffix("/s") {
            size_factor(unit).and_then(|factor| scaled(number, factor))
        } else {
            let factor = match unit.trim().to_ascii_lowercase().as_str() {
                "bit" => 1,
                "kbit" => 1_000,
                "mbit" => 1_000_000,
                "gbit" => 1_000_000_000,
                _ => return Err(error()),
            };
            scaled(number, factor).map(|bits| bits / 8)
        };
        match bytes {
            Some(bytes_per_second) if bytes_per_second > 0 => Ok(Self { bytes_per_second }),
            _ => Err(error()),
        }
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(&str, u64); 4] =
            [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
        for (name, factor) in UNITS {
            if self.0 >= factor {
                let value = self.0 as f64 / factor as f64;
                return if self.0.is_multiple_of(factor) {
                    write!(f, "{} {name}", self.0 / factor)
                } else {
                    write!(f, "{value:.1} {name}")
                };
            }
        }
        write!(f, "{} B", self.0)
    }
}

impl fmt::Display for BitRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bits = self.bytes_per_second as f64 * 8.0;
        if bits >= 1e9 {
            write!(f, "{:.2} Gbit/s", bits / 1e9)
        } else if bits >= 1e6 {
            write!(f, "{:.0} Mbit/s", bits / 1e6)
        } else {
            write!(f, "{:.0} kbit/s", bits / 1e3)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_parse_and_print() {
        assert_eq!("64KiB".parse(), Ok(ByteSize(65536)));
        assert_eq!("2G".parse(), Ok(ByteSize(2 << 30)));
        assert_eq!("1.5MiB".parse(), Ok(ByteSize(3 << 19)));
        assert_eq!("12".parse(), Ok(ByteSize(12)));
        assert!("twelve".parse::<ByteSize>().is_err());
        assert!("12 parsecs".parse::<ByteSize>().is_err());
        assert!("-1".parse::<ByteSize>().is_err());
        assert_eq!(ByteSize(2 << 30).to_string(), "2 GiB");
        assert_eq!(ByteSize(100).to_string(), "100 B");
        assert_eq!(ByteSize(1_600_000).to_string(), "1.5 MiB");
    }

    #[test]
    fn rates_are_bits_unless_they_say_bytes() {
        assert_eq!("800Mbit".parse(), Ok(BitRate { bytes_per_second: 100_000_000 }));
        assert_eq!("100MiB/s".parse(), Ok(BitRate { bytes_per_second: 100 << 20 }));
        assert!("0Mbit".parse::<BitRate>().is_err());
        let error = "fast".parse::<BitRate>().unwrap_err().to_string();
        assert_eq!(error, "'fast' is not a rate; write it as 800Mbit, 10Gbit or 100MiB/s");
    }
}
