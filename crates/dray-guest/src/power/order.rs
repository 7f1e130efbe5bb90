//! What the test outside wants done: words `dray.KEY=VALUE` of the kernel's command line.

use std::fmt::Display;
use std::str::FromStr;

/// The order.
pub struct Order(Vec<(String, String)>);

impl Order {
    /// Reads the command line of the kernel that runs.
    pub fn read() -> std::io::Result<Self> {
        let text = std::fs::read_to_string("/proc/cmdline")?;
        let words = text.split_whitespace().filter_map(|word| word.strip_prefix("dray."));
        let pairs = words.filter_map(|word| word.split_once('='));
        Ok(Self(pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).collect()))
    }

    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.0.iter().find(|(name, _)| name == key).map(|(_, value)| value.as_str())
    }

    /// The number under a key, which must be there.
    pub fn number<T: FromStr<Err: Display>>(&self, key: &str) -> Result<T, String> {
        let text = self.get(key).ok_or_else(|| format!("dray.{key}= is missing"))?;
        text.parse().map_err(|why| format!("dray.{key}={text}: {why}"))
    }
}
