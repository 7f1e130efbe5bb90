//! The arguments for the waiting QEMU at the target, ready to be pasted into a shell.

use dray_api::Prepared;

/// The arguments for the target's QEMU, one a line, joined by backslashes.
pub fn qemu_arguments(prepared: &Prepared) -> String {
    let blockdevs = prepared
        .images
        .iter()
        .flat_map(|image| &image.blockdev)
        .map(|value| format!("-blockdev {}", quoted(value)));
    let others = arguments(&prepared.qemu_args);
    let lines: Vec<String> = blockdevs.chain(others).collect();
    lines.join(" \\\n") + "\n"
}

/// Further arguments, an option and its value on one line.
fn arguments(args: &[String]) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for arg in args {
        match lines.last_mut() {
            Some(line) if !arg.starts_with('-') => *line += &format!(" {}", quoted(arg)),
            _ => lines.push(quoted(arg)),
        }
    }
    lines
}

/// As a POSIX shell reads it back.
pub fn quoted(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,@%+".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        return text.to_owned();
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_reads_back_what_was_meant() {
        assert_eq!(quoted("defer"), "defer");
        assert_eq!(quoted(r#"{"driver":"nbd"}"#), r#"'{"driver":"nbd"}'"#);
        assert_eq!(quoted("it's"), r"'it'\''s'");
        assert_eq!(quoted(""), "''");
        let args = ["-S", "-incoming", "defer"].map(str::to_owned);
        assert_eq!(arguments(&args), ["-S", "-incoming defer"]);
    }
}
