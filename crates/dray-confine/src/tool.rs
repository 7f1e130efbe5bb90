//! [`Tool`]: a program that is to run behind the wall, from the agent's side.

use crate::FIRST;
use crate::order::{self, MAX_HANDED, Order};
use crate::spawner::{launcher, spawn};
use std::io::{self, PipeReader, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Most bytes of what a tool says that are taken: an answer about one image takes some KiB.
const MAX_SAID: u64 = 1 << 20;
/// How often is looked whether a tool has ended.
const POLL: Duration = Duration::from_millis(2);

/// A program that is to run behind the wall.
pub struct Tool {
    program: String,
    arguments: Vec<String>,
    handed: Vec<OwnedFd>,
}

/// What a tool has said until it ended.
#[derive(Debug)]
pub struct Finished {
    /// How it ended.
    pub status: ExitStatus,
    /// What it wrote to its standard output.
    pub stdout: Vec<u8>,
    /// The same of its standard error.
    pub stderr: Vec<u8>,
}

impl Tool {
    /// The program `program`, which is looked for where the agent finds programs.
    pub fn new(program: impl Into<String>) -> Self {
        Self { program: program.into(), arguments: Vec::new(), handed: Vec::new() }
    }

    /// One more argument.
    pub fn arg(&mut self, argument: impl Into<String>) -> &mut Self {
        self.arguments.push(argument.into());
        self
    }

    /// More arguments.
    pub fn args<T: Into<String>>(&mut self, arguments: impl IntoIterator<Item = T>) -> &mut Self {
        self.arguments.extend(arguments.into_iter().map(Into::into));
        self
    }

    /// Hands over a descriptor: its number in the tool.
    pub fn hand(&mut self, descriptor: impl Into<OwnedFd>) -> usize {
        self.handed.push(descriptor.into());
        FIRST + self.handed.len() - 1
    }

    /// Starts it. It ends with this process.
    ///
    /// # Errors
    /// When there is no such program, or it cannot be started. What keeps the wall from going up is
    /// told on `stderr`, and the tool ends at once.
    pub fn spawn(self, stdout: OwnedFd, stderr: OwnedFd) -> io::Result<Child> {
        if self.handed.len() > MAX_HANDED {
            return Err(io::Error::other("too many descriptors for one tool"));
        }
        let program = find(&self.program)?;
        let (ours, theirs) = UnixStream::pair()?;
        let mut command = launcher();
        command.stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).stderr(stderr);
        let child = spawn(command)?;
        let parent = rustix::process::getpid().as_raw_nonzero().get();
        let order = Order { program, name: self.program, arguments: self.arguments, parent };
        let descriptors: Vec<OwnedFd> = [stdout].into_iter().chain(self.handed).collect();
        match order::send(ours, &order, &descriptors) {
            Ok(()) => Ok(child),
            // It has ended before it took the order: why, it has said.
            Err(why) if why.kind() == io::ErrorKind::BrokenPipe => Ok(child),
            Err(why) => {
                end(child);
                Err(why)
            }
        }
    }

    /// Runs it to its end, for at most `patience`.
    ///
    /// # Errors
    /// As [`spawn`](Self::spawn); or it has not ended in time, and was killed.
    pub fn run(self, patience: Duration) -> io::Result<Finished> {
        let name = self.program.clone();
        let ((from_out, stdout), (from_err, stderr)) = (io::pipe()?, io::pipe()?);
        let mut child = self.spawn(stdout.into(), stderr.into())?;
        let (stdout, stderr) = (collect(from_out), collect(from_err));
        let deadline = Instant::now() + patience;
        let status = loop {
            if let Some(status) = child.try_wait()? {
                break status;
            }
            if Instant::now() > deadline {
                end(child);
                let seconds = patience.as_secs();
                let why = format!("{name} has not ended after {seconds} s");
                return Err(io::Error::new(io::ErrorKind::TimedOut, why));
            }
            std::thread::sleep(POLL);
        };
        let said = |thread: JoinHandle<Vec<u8>>| thread.join().unwrap_or_default();
        Ok(Finished { status, stdout: said(stdout), stderr: said(stderr) })
    }
}

fn end(mut child: Child) {
    // One that has ended cannot be killed, and needs not be.
    let _ = child.kill();
    let _ = child.wait();
}

/// Takes what comes, up to the limit. A tool that says more waits for a reader until it is killed.
fn collect(from: PipeReader) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let (mut said, mut limited) = (Vec::new(), (&from).take(MAX_SAID));
        // What came until it failed is told.
        let _ = limited.read_to_end(&mut said);
        said
    })
}

/// The file of a program, from the folders of `PATH`.
fn find(program: &str) -> io::Result<PathBuf> {
    let is_program = |path: &PathBuf| {
        path.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
    };
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into());
    let found = std::env::split_paths(&path).map(|dir| dir.join(program)).find(is_program);
    let missing = || {
        io::Error::new(io::ErrorKind::NotFound, format!("there is no program {program} in PATH"))
    };
    found.ok_or_else(missing)?.canonicalize()
}
