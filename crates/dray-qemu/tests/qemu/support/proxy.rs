//! A monitor that goes wrong at one command, between a client and a real QEMU.

use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{UnixListener, UnixStream};

/// What goes wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wrong {
    /// The connection ends before QEMU hears the command.
    CutBefore,
    /// QEMU carries it out, and the connection ends before the answer.
    CutAfter,
    /// QEMU never hears it, and nobody answers.
    HangBefore,
    /// QEMU carries it out, and nobody answers.
    HangAfter,
    /// The answer comes when its client has given up, and so does everything behind it.
    Late,
    /// QEMU refuses it.
    Refused,
    /// No event comes from here on.
    EventsLost,
    /// Each event comes twice.
    EventsTwice,
    /// Before QEMU hears it somebody resizes the disk on node `active` to 8 MiB, as far as QEMU allows it.
    Resized,
}

/// All of them.
pub const ALL: [Wrong; 8] = [
    Wrong::CutBefore,
    Wrong::CutAfter,
    Wrong::HangBefore,
    Wrong::HangAfter,
    Wrong::Late,
    Wrong::Refused,
    Wrong::EventsLost,
    Wrong::EventsTwice,
];

/// When it goes wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum At {
    /// It does not.
    Never,
    /// At the client's command of this number, counted from 0.
    Nth(usize),
    /// At its first command of this name.
    First(&'static str),
}

/// The id of a command that somebody else gives.
const OTHERS: &str = "somebody else's";

/// The names of the commands that a client has given, in their order.
type Heard = Arc<Mutex<Vec<String>>>;

/// The monitor that a client connects to instead of QEMU's.
pub struct Proxy {
    socket: PathBuf,
    heard: Heard,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Proxy {
    /// Stands before `monitor`. At `at` `wrong` happens; answers that are late are so by `late`.
    pub fn start(monitor: &Path, socket: PathBuf, at: At, wrong: Wrong, late: Duration) -> Self {
        let listener = UnixListener::bind(&socket).expect("bind");
        let heard = Heard::default();
        let (monitor, counted) = (monitor.to_owned(), Arc::clone(&heard));
        let task = tokio::spawn(async move {
            let (client, _) = listener.accept().await.expect("accept");
            let qemu = UnixStream::connect(monitor).await.expect("qemu's monitor");
            Session::new(client, qemu, counted, (at, wrong, late)).run().await;
        });
        Self { socket, heard, task }
    }

    /// Where it listens.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The commands that the client has given.
    pub fn commands(&self) -> Vec<String> {
        self.heard.lock().expect("heard").clone()
    }
}

struct Session {
    client: (Lines<BufReader<OwnedReadHalf>>, OwnedWriteHalf),
    qemu: (Lines<BufReader<OwnedReadHalf>>, OwnedWriteHalf),
    heard: Heard,
    at: At,
    wrong: Wrong,
    late: Duration,
    /// The command whose answer goes wrong.
    id: Option<Value>,
    /// It has gone wrong.
    reached: bool,
}

fn halves(stream: UnixStream) -> (Lines<BufReader<OwnedReadHalf>>, OwnedWriteHalf) {
    let (reader, writer) = stream.into_split();
    (BufReader::new(reader).lines(), writer)
}

impl Session {
    fn new(
        client: UnixStream,
        qemu: UnixStream,
        heard: Heard,
        (at, wrong, late): (At, Wrong, Duration),
    ) -> Self {
        let (client, qemu) = (halves(client), halves(qemu));
        Self { client, qemu, heard, at, wrong, late, id: None, reached: false }
    }

    /// Until one side has ended, or the connection is to be cut.
    async fn run(mut self) {
        let mut goes_on = true;
        while goes_on {
            goes_on = tokio::select! {
                line = self.client.0.next_line() => match line {
                    Ok(Some(line)) => self.client_said(&line).await,
                    _ => false,
                },
                line = self.qemu.0.next_line() => match line {
                    Ok(Some(line)) => self.qemu_said(&line).await,
                    _ => false,
                },
            };
        }
    }

    /// Whether it goes wrong at this command.
    fn is_reached(&mut self, message: &Value) -> bool {
        let name = message["execute"].as_str().unwrap_or_default();
        let mut heard = self.heard.lock().expect("heard");
        let nth = heard.len();
        heard.push(name.to_owned());
        match self.at {
            At::Never => false,
            At::Nth(at) => nth == at,
            At::First(command) => !self.reached && name == command,
        }
    }

    async fn client_said(&mut self, line: &str) -> bool {
        let message: Value = serde_json::from_str(line).expect("a command");
        if message["execute"] == "qmp_capabilities" {
            return send(&mut self.qemu.1, line).await;
        }
        if self.is_reached(&message) {
            self.reached = true;
            match self.wrong {
                Wrong::CutBefore => return false,
                Wrong::HangBefore => return true,
                Wrong::Refused => {
                    let error = json!({ "class": "GenericError", "desc": "it was told to refuse" });
                    let answer = json!({ "error": error, "id": message["id"] });
                    return send(&mut self.client.1, &answer.to_string()).await;
                }
                Wrong::Resized => {
                    let arguments = json!({ "node-name": "active", "size": 8 << 20 });
                    let resize =
                        json!({ "execute": "block_resize", "arguments": arguments, "id": OTHERS });
                    if !send(&mut self.qemu.1, &resize.to_string()).await {
                        return false;
                    }
                }
                _ => self.id = Some(message["id"].clone()),
            }
        }
        send(&mut self.qemu.1, line).await
    }

    async fn qemu_said(&mut self, line: &str) -> bool {
        let message: Value = serde_json::from_str(line).expect("a message");
        if message["id"] == OTHERS {
            return true;
        }
        let is_event = message.get("event").is_some();
        if is_event && self.reached && self.wrong == Wrong::EventsLost {
            return true;
        }
        if self.id.is_some() && message.get("id") == self.id.as_ref() {
            match self.wrong {
                Wrong::CutAfter => return false,
                Wrong::HangAfter => return true,
                Wrong::Late => tokio::time::sleep(self.late).await,
                _ => {}
            }
        }
        let twice = is_event && self.reached && self.wrong == Wrong::EventsTwice;
        let sent = send(&mut self.client.1, line).await;
        if twice { send(&mut self.client.1, line).await } else { sent }
    }
}

async fn send(to: &mut OwnedWriteHalf, line: &str) -> bool {
    to.write_all(format!("{line}\n").as_bytes()).await.is_ok()
}
