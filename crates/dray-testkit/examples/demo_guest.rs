//! The guest of `demo/run.sh`, and the bystander who knows what its disk must hold. Takes one
//! command a line and answers each with one line, `OK …` or `ERROR …`; ends, with its QEMUs, at the
//! end of its input.
//!
//! ```text
//! demo_guest DIRECTORY SIZE_MIB SEEDED_MIB RATE_MIB
//!   image PATH       makes the disk's image
//!   start PATH       boots the guest on it and lets it write and verify
//!   wait FILE        starts the waiting QEMU as the JSON of `dray prepare` says
//!   counters         what the guest counts, on whichever QEMU it is
//!   moved            from now on the guest is at the target
//!   quit             ends the source's QEMU
//!   finish           the guest verifies its whole disk and powers off
//!   compare PATH     compares an image with what the guest wrote
//! ```

use dray_testkit::guest::{Bystander, GuestVm};
use serde_json::Value;
use std::io::{self, BufRead, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

const MIB: u64 = 1 << 20;
const MEMORY_MIB: u32 = 512;
/// A dump and a whole verification of some GiB under emulation.
const FINISH_TIMEOUT: Duration = Duration::from_secs(120);

struct Demo {
    dir: PathBuf,
    bystander: Bystander,
    seeded: u64,
    rate: u64,
    source: Option<GuestVm>,
    target: Option<GuestVm>,
    moved: bool,
}

fn main() -> io::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [dir, size, seeded, rate] = &args[..] else {
        return Err(io::Error::other("usage: demo_guest DIRECTORY SIZE_MIB SEEDED_MIB RATE_MIB"));
    };
    let mib = |text: &String| text.parse::<u64>().map(|n| n * MIB).map_err(io::Error::other);
    let (size, seeded, rate) = (mib(size)?, mib(seeded)?, mib(rate)?);
    let bystander = Bystander::new(1, size, seeded);
    let (source, target) = (None, None);
    let mut demo = Demo { dir: dir.into(), bystander, seeded, rate, source, target, moved: false };
    for line in io::stdin().lock().lines() {
        let answer = match demo.command(&line?) {
            Ok(said) => format!("OK {said}"),
            Err(why) => format!("ERROR {}", why.to_string().replace('\n', " ")),
        };
        println!("{answer}");
        io::stdout().flush()?;
    }
    Ok(())
}

impl Demo {
    fn command(&mut self, line: &str) -> io::Result<String> {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        match word {
            "image" => self.bystander.create_raw(Path::new(rest)).map(|()| String::new()),
            "start" => self.start(rest),
            "wait" => self.wait(Path::new(rest)),
            "counters" => self.counters(),
            "moved" => {
                self.moved = true;
                Ok(String::new())
            }
            "quit" => self.quit(),
            "finish" => self.finish(),
            "compare" => {
                self.bystander.check_raw(Path::new(rest))?;
                Ok(format!("{} blocks were written by the guest", self.bystander.written_blocks()))
            }
            _ => Err(io::Error::other("no such command")),
        }
    }

    fn guest(&mut self) -> io::Result<&mut GuestVm> {
        let guest = if self.moved { &mut self.target } else { &mut self.source };
        guest.as_mut().ok_or_else(|| io::Error::other("no guest"))
    }

    fn start(&mut self, path: &str) -> io::Result<String> {
        let vm = GuestVm::builder(&self.dir, "vm1")
            .memory_mib(MEMORY_MIB)
            .blockdev(format!("driver=file,node-name=disk0-file,filename={path},discard=unmap"))
            .disk("disk0", "disk0-file");
        let mut vm = vm.start()?;
        vm.wait_ready()?;
        vm.console().command(&self.bystander.open_command("vda"))?;
        let (span, rate) = (self.seeded, self.rate);
        let start = format!("start disk=vda span={span} block=65536 rate={rate} flush=64 verify=2");
        vm.console().command(&start)?;
        self.source = Some(vm);
        Ok(String::new())
    }

    fn wait(&mut self, prepared: &Path) -> io::Result<String> {
        let prepared: Value = serde_json::from_slice(&std::fs::read(prepared)?)?;
        let bad = || io::Error::other("not the JSON of dray prepare");
        let mut vm = GuestVm::builder(&self.dir, "vm1-incoming").memory_mib(MEMORY_MIB).incoming();
        for image in prepared["images"].as_array().ok_or_else(bad)? {
            let mut top = Value::Null;
            for line in image["blockdev"].as_array().ok_or_else(bad)? {
                let line = line.as_str().ok_or_else(bad)?;
                vm = vm.blockdev(line);
                top = serde_json::from_str(line)?;
            }
            let node = top["node-name"].as_str().ok_or_else(bad)?;
            vm = vm.disk(image["device"].as_str().ok_or_else(bad)?, node);
        }
        self.target = Some(vm.start()?);
        Ok(String::new())
    }

    fn counters(&mut self) -> io::Result<String> {
        let guest = self.guest()?;
        let report = guest.console().report("vda")?;
        let complaints = guest.console().complaints().len();
        let number = |key: &str| report.value::<u64>(key, 0).map_err(io::Error::other);
        let errors = number("errors")? + number("bad")? + complaints as u64;
        let (written, verified) = (number("bytes")?, number("verified")?);
        let longest = number("max_us")? / 1000;
        Ok(format!("written={written} verified={verified} longest_ms={longest} errors={errors}"))
    }

    fn quit(&mut self) -> io::Result<String> {
        let Some(mut vm) = self.source.take() else { return Ok(String::new()) };
        let mut stream = std::os::unix::net::UnixStream::connect(vm.qmp_path())?;
        stream.write_all(b"{\"execute\":\"qmp_capabilities\"}{\"execute\":\"quit\"}")?;
        vm.wait_exit(Duration::from_secs(10)).map(|_| String::new())
    }

    fn finish(&mut self) -> io::Result<String> {
        let guest = self.guest()?;
        let mut command = |text: &str| {
            guest.console().send(text)?;
            guest.console().answer(text, FINISH_TIMEOUT)
        };
        command("stop")?;
        command("verify")?;
        command("flush")?;
        let dump = command("dump disk=vda")?;
        let complaints = guest.console().complaints();
        guest.console().send("poweroff")?;
        guest.wait_exit(FINISH_TIMEOUT)?;
        if !complaints.is_empty() {
            return Err(io::Error::other(complaints.join("; ")));
        }
        self.bystander.apply_dump("vda", &dump)?;
        Ok(String::new())
    }
}
