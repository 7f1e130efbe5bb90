//! Everything that can go wrong at each command of an operation, one after the other. `DRAY_WRONG=1` runs all
//! of it; without it one run of so many.

use super::proxy::{ALL, At, Proxy, Wrong};
use dray_qemu::Qmp;
use std::fmt;
use std::path::Path;
use std::time::Duration;

/// How long a client waits for an answer of a monitor that goes wrong.
const PATIENCE: Duration = Duration::from_millis(400);
/// How late an answer comes that comes late.
const LATE: Duration = Duration::from_millis(700);
/// For connecting, which does not go wrong, and for a monitor of which nothing does.
const LONG: Duration = Duration::from_secs(20);

/// What goes wrong, and when.
#[derive(Clone, Copy, Debug)]
pub struct Slip {
    at: At,
    wrong: Wrong,
}

impl Slip {
    /// `wrong` at `at`.
    pub fn new(at: At, wrong: Wrong) -> Self {
        Self { at, wrong }
    }

    /// Nothing goes wrong.
    pub fn none() -> Self {
        Self::new(At::Never, Wrong::Refused)
    }

    /// Whether nothing goes wrong.
    pub fn is_none(self) -> bool {
        self.at == At::Never
    }

    /// A client of `monitor` by way of a proxy at `socket` that goes wrong.
    pub async fn connect(self, monitor: &Path, socket: &Path) -> Line {
        let proxy = Proxy::start(monitor, socket.to_owned(), self.at, self.wrong, LATE);
        let patience = if self.is_none() { LONG } else { PATIENCE };
        let qmp = Qmp::connect_with(proxy.socket(), LONG, patience).await.expect("qmp");
        Line { qmp, proxy, slip: self }
    }
}

impl fmt::Display for Slip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.is_none() {
            true => f.write_str("nothing wrong"),
            false => write!(f, "{:?} at {:?}", self.wrong, self.at),
        }
    }
}

/// A connection that goes wrong.
pub struct Line {
    /// Its client.
    pub qmp: Qmp,
    proxy: Proxy,
    slip: Slip,
}

impl Line {
    /// Waits until what was asked late is carried out; the commands that the client has given. Clones of
    /// the client are cut off.
    pub async fn end(self) -> Vec<String> {
        if !self.slip.is_none() {
            tokio::time::sleep(LATE).await;
        }
        self.proxy.commands()
    }
}

/// Carries `run` out with nothing wrong, and then with everything that can go wrong at each command that it
/// has given; in `make test` with one of `some`, at least with one.
pub async fn walk<Run>(what: &str, some: usize, run: Run)
where
    Run: AsyncFn(Slip) -> Vec<String>,
{
    let commands = run(Slip::none()).await;
    let slips = (0..commands.len()).flat_map(|at| ALL.map(|wrong| Slip::new(At::Nth(at), wrong)));
    let mut slips: Vec<Slip> = slips.collect();
    if std::env::var_os("DRAY_WRONG").is_none() {
        let first = anywhere(what) % some.min(slips.len());
        slips = slips.into_iter().skip(first).step_by(some).collect();
    }
    for slip in &slips {
        run(*slip).await;
    }
    let (of, count) = (commands.len(), slips.len());
    println!("{what}: {of} commands, {count} runs: {}", commands.join(" "));
}

/// A number that is the same for the same text, so that not all walks begin at the same place.
fn anywhere(what: &str) -> usize {
    what.bytes().fold(0, |sum, byte| sum * 31 % 1009 + usize::from(byte))
}
