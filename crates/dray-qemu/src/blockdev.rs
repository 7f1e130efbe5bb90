//! The `-blockdev` arguments of a target QEMU: the source's nodes, with NBD nodes in place of its
//! files.

use serde_json::{Map, Value};

use crate::adopt::NbdExport;
use crate::plan::{LayerPlan, Pivot};

/// The nodes of one disk: a plan made with [`LayerPlan::for_target`] and an export for each layer,
/// the active one first. Each value is one `-blockdev` argument (JSON); a node comes after those
/// it refers to.
pub fn arguments(layers: &[(LayerPlan, NbdExport)]) -> Vec<String> {
    let mut found = Vec::new();
    let mut backing = None;
    for (plan, export) in layers.iter().rev() {
        found.push(Value::Object(export.node(plan)).to_string());
        let Pivot::Reopen { options } = &plan.pivot else {
            backing = Some(plan.nbd_node());
            continue;
        };
        let mut format: Map<String, Value> = options.clone();
        format.insert("file".into(), plan.nbd_node().into());
        if plan.format == "qcow2" {
            let below = backing.take().map_or(Value::Null, Value::from);
            format.insert("backing".into(), below);
        }
        backing = plan.format_node().map(str::to_owned);
        found.push(Value::Object(format).to_string());
    }
    found
}

/// The name of the node that the disk's `-device` gets as `drive=`.
pub fn top_node(active: &LayerPlan) -> String {
    active.format_node().map_or_else(|| active.nbd_node(), str::to_owned)
}

/// The arguments as lines for a shell.
pub fn shell_lines(arguments: &[String]) -> Vec<String> {
    arguments.iter().map(|argument| format!("-blockdev {}", quoted(argument))).collect()
}

/// Quotes a word for a POSIX shell.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_shell_reads_back_the_same_words() {
        let words = [r#"{"filename":"/a b/it's $HOME\\"}"#.to_owned(), "x".to_owned()];
        let line = shell_lines(&words).join(" ");
        let script = format!("printf '%s\\n' {line}");
        let output = Command::new("sh").args(["-c", &script]).output().expect("sh");
        let said = String::from_utf8(output.stdout).expect("text");
        let want = format!("-blockdev\n{}\n-blockdev\nx\n", words[0]);
        assert_eq!(said, want);
    }
}
