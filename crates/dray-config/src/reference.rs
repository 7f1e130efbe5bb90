//! `docs/reference/configuration.md` is made of `packaging/dray.toml`, whose comments say what each key does, and
//! both are checked against what is understood. `UPDATE_GOLDEN=1` writes the document.

use super::typed::Typed;
use std::fmt::Write;
use std::path::Path;

const SAMPLE: &str = include_str!("../../../packaging/dray.toml");
const DOCUMENT: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/configuration.md");
/// What no key has.
const NO_KEY: &str = "no_such_key";

/// A key as the sample shows it.
struct Key {
    name: String,
    value: String,
    /// It has to be there; of the others the sample shows the default, or an example.
    needed: bool,
    text: String,
}

/// A table of the sample: its header, what is said above it, its keys.
struct Table {
    header: String,
    text: String,
    keys: Vec<Key>,
}

/// A line without its comment sign, and whether it had one.
fn uncommented(line: &str) -> (&str, bool) {
    line.strip_prefix("# ").map_or((line, false), |rest| (rest, true))
}

fn key_of(line: &str) -> Option<(String, String)> {
    let (name, value) = line.split_once(" = ")?;
    let plain = !name.is_empty() && name.chars().all(|c| c.is_ascii_lowercase() || c == '_');
    plain.then(|| (name.to_owned(), value.to_owned()))
}

/// The tables of the sample. What is said above a key, and above a table, belongs to it.
fn tables() -> Vec<Table> {
    let top = Table { header: String::new(), text: String::new(), keys: Vec::new() };
    let (mut all, mut said) = (vec![top], String::new());
    for line in SAMPLE.lines() {
        let (text, commented) = uncommented(line);
        if text.is_empty() {
            said.clear();
        } else if text.starts_with('[') {
            let (header, text) = (text.to_owned(), std::mem::take(&mut said));
            all.push(Table { header, text, keys: Vec::new() });
        } else if let Some((name, value)) = key_of(text) {
            let (needed, text) = (!commented, std::mem::take(&mut said));
            if let Some(table) = all.last_mut() {
                table.keys.push(Key { name, value, needed, text });
            }
        } else {
            let gap = if said.is_empty() { "" } else { " " };
            let _ = write!(said, "{gap}{text}");
        }
    }
    all
}

fn document() -> String {
    let mut text = String::from(
        "# Configuration\n\n\
         The agent reads one TOML file, by default `/etc/dray/dray.toml`. `dray check-config` checks it\n\
         and names the line of each problem. [How to configure an agent](../how-to/configure.md) explains\n\
         the choices. This page is generated from `packaging/dray.toml`.\n\n\
         A key marked *required* must be present. For the other keys the table shows the default, or an\n\
         example if there is no default.\n",
    );
    for table in tables() {
        if table.keys.is_empty() {
            continue;
        }
        let title = if table.header.is_empty() { "Top of the file" } else { &table.header };
        let _ = write!(text, "\n## {title}\n\n");
        if !table.text.is_empty() {
            let _ = write!(text, "{}\n\n", table.text);
        }
        text.push_str("| Key | Value | Meaning |\n|---|---|---|\n");
        for key in &table.keys {
            let needed = if key.needed { ", *required*" } else { "" };
            let meaning = key.text.replace('|', "\\|");
            let _ = writeln!(text, "| `{}` | `{}`{needed} | {meaning} |", key.name, key.value);
        }
    }
    text
}

/// The sample with every table and key that it shows, used.
fn everything() -> String {
    let mut text = String::new();
    for table in tables() {
        let _ = writeln!(text, "{}", table.header);
        for key in &table.keys {
            let _ = writeln!(text, "{} = {}", key.name, key.value);
        }
    }
    text
}

/// The keys that a table may have, as the parser lists them when it meets one that it does not know.
fn understood(header: &str) -> Vec<String> {
    let all = everything();
    let marked = match header {
        "" => format!("{NO_KEY} = 1\n{all}"),
        header => all.replacen(&format!("{header}\n"), &format!("{header}\n{NO_KEY} = 1\n"), 1),
    };
    let why = toml::from_str::<Typed>(&marked).err().expect("an unknown key").to_string();
    assert!(why.contains(NO_KEY), "{header}: {why}");
    let expected = why.split("expected").nth(1).unwrap_or_default();
    expected.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

#[test]
fn the_sample_shows_every_key_and_no_other() {
    if let Err(why) = toml::from_str::<Typed>(&everything()) {
        panic!("{why}");
    }
    let tables = tables();
    let name = |table: &Table| table.header.trim_matches(['[', ']']).to_owned();
    let shown_tables: Vec<_> = tables.iter().map(name).collect();
    for table in &tables {
        let shown = |key: &String| table.keys.iter().any(|shown| shown.name == *key);
        for key in understood(&table.header) {
            let elsewhere = table.header.is_empty() && shown_tables.contains(&key);
            // It is shown at the top, where it belongs.
            let moved = table.header == "[agent]" && key == "qmp_dirs";
            let table_in_it = format!("{}.{key}", name(table));
            let inner = shown_tables.contains(&table_in_it);
            assert!(
                shown(&key) || elsewhere || moved || inner,
                "{}: {key} is not shown",
                table.header
            );
        }
    }
}

#[test]
fn the_reference_says_what_the_sample_says() {
    let (found, path) = (document(), Path::new(DOCUMENT));
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        return std::fs::write(path, found).unwrap();
    }
    let wanted = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        found == wanted,
        "{DOCUMENT} is not what packaging/dray.toml says; UPDATE_GOLDEN=1 writes it"
    );
}
