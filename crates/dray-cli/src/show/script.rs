//! The shell script that starts the QEMU that waits at the target.

use super::prepared::quoted;
use dray_api::{Prepared, WaitingCommand};
use std::fmt::Write as _;
use std::path::Path;

/// The script: checks first, and QEMU at its end.
pub fn script(prepared: &Prepared, command: &WaitingCommand) -> String {
    let mut text = head(prepared, command);
    text += &left_out(command);
    text += &checks(prepared, command);
    text += "exec ";
    text += &quoted(&command.program);
    for (name, value) in &command.options {
        // Writing to a string cannot fail.
        let _ = write!(text, " \\\n    {}", quoted(name));
        if let Some(value) = value {
            let _ = write!(text, " {}", quoted(value));
        }
    }
    text + "\n"
}

fn head(prepared: &Prepared, command: &WaitingCommand) -> String {
    let vm =
        command.vm.as_deref().map_or(String::new(), |name| format!(" of the VM {}", comment(name)));
    format!(
        "#!/bin/sh\n\
         # Starts the QEMU{vm} that waits at {} for migration {}.\n\
         # `dray prepare --script` made it from the command line of process {} at the source. A QEMU that\n\
         # its guest has taken over can change that line: read the command before you run it.\n\
         set -eu\n\
         stop() {{ echo \"$0: $*\" >&2; exit 1; }}\n\n",
        comment(&prepared.to),
        prepared.migration,
        command.pid,
    )
}

/// What the operator has to write; the script ends before QEMU starts as long as such a line is there.
fn left_out(command: &WaitingCommand) -> String {
    if command.left_out.is_empty() {
        return String::new();
    }
    let mut text = String::from(
        "# dray cannot repeat what these lines name. Add it to the command at the end, and delete its line.\n\
         missing=\n\
         missing() { echo \"$0: left out: $*\" >&2; missing=1; }\n",
    );
    for what in &command.left_out {
        let _ = writeln!(text, "missing {}", single(what));
    }
    text + "[ -z \"$missing\" ] || stop 'edit this script first: it says where'\n\n"
}

/// Stops with a reason where QEMU would stop with another, or would take what belongs to another.
fn checks(prepared: &Prepared, command: &WaitingCommand) -> String {
    let mut text = String::new();
    if let Some(directory) = &command.directory {
        let (path, shown) = (shell(directory), said(directory));
        let _ = writeln!(
            text,
            "cd {path} || stop {}",
            single(&format!("QEMU runs in {shown} at the source"))
        );
    }
    if let Some(user) = &command.user {
        let why = format!("run it as the user {user}, as QEMU is run at the source");
        let _ = writeln!(text, "[ \"$(id -un)\" = {} ] || stop {}", quoted(user), single(&why));
    }
    let endpoint = Path::new(&prepared.endpoint.path);
    let why = format!("no agent serves disks at {}: is this {}?", said(endpoint), prepared.to);
    let _ = writeln!(text, "[ -S {} ] || stop {}", shell(endpoint), single(&why));
    for file in &command.reads {
        let why = format!("QEMU needs {}, which is not here", said(file));
        let _ = writeln!(text, "[ -e {} ] || stop {}", shell(file), single(&why));
    }
    for socket in &command.makes {
        let why = format!("{} is here already; if no other QEMU uses it, delete it", said(socket));
        let _ = writeln!(text, "[ ! -e {} ] || stop {}", shell(socket), single(&why));
    }
    text + "\n"
}

/// A path as `[` and `cd` take it, also one that begins with a dash.
fn shell(path: &Path) -> String {
    let text = path.to_string_lossy();
    quoted(&if text.starts_with('-') { format!("./{text}") } else { text.into_owned() })
}

fn said(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

fn single(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// What may stand in a comment: one line.
fn comment(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_types::{Endpoint, MigrationId};
    use std::process::Command;

    fn command() -> WaitingCommand {
        WaitingCommand {
            vm: Some("it\'s\nrm -rf".to_owned()),
            pid: 7,
            user: None,
            program: "echo".to_owned(),
            options: vec![
                ("-name".to_owned(), Some("it\'s $HOME".to_owned())),
                ("-S".to_owned(), None),
            ],
            left_out: Vec::new(),
            reads: Vec::new(),
            makes: Vec::new(),
            directory: None,
            qmp: None,
        }
    }

    fn run(endpoint: &Path, command: &WaitingCommand) -> (bool, String) {
        let prepared = Prepared {
            migration: MigrationId(1),
            to: "hostb".to_owned(),
            endpoint: Endpoint::nbd(endpoint),
            images: Vec::new(),
            qemu_args: Vec::new(),
            command_line: None,
        };
        let ran =
            Command::new("sh").args(["-c", &script(&prepared, command), "s"]).output().unwrap();
        let said = [ran.stdout, ran.stderr].concat();
        (ran.status.success(), String::from_utf8(said).unwrap())
    }

    #[test]
    fn a_shell_runs_what_was_meant_and_nothing_when_something_is_missing() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("nbd.sock");
        let _bound = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let good = command();
        assert_eq!(run(&socket, &good), (true, "-name it\'s $HOME -S\n".to_owned()));
        let nowhere = dir.path().join("none");
        let bad = [
            (&nowhere, good.clone(), "is this hostb?"),
            (&socket, WaitingCommand { user: Some("no such".into()), ..good.clone() }, "run it as"),
            (
                &socket,
                WaitingCommand { left_out: vec!["-a it\'s".into()], ..good.clone() },
                "left out: -a it\'s",
            ),
            (
                &socket,
                WaitingCommand { reads: vec![nowhere.clone()], ..good.clone() },
                "QEMU needs",
            ),
            (
                &socket,
                WaitingCommand { makes: vec![socket.clone()], ..good.clone() },
                "is here already",
            ),
            (&socket, WaitingCommand { directory: Some(nowhere.clone()), ..good }, "QEMU runs in"),
        ];
        for (endpoint, command, why) in bad {
            let (done, said) = run(endpoint, &command);
            assert!(!done && said.contains(why) && !said.contains("-name"), "{why}: {said}");
        }
    }
}
