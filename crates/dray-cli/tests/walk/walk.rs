//! The walk: what there is, and one step after the other.

use crate::judge;
use crate::loose::Loose;
use crate::vm::Vm;
use crate::world::{LETTERS, Outcome, World, kept};
use dray_testkit::counts::Counts;
use dray_testkit::random::Random;
use std::collections::BTreeSet;
use std::time::Instant;

/// How many VMs and images there are.
const VMS: usize = 2;
const IMAGES: usize = 2;
/// So many of a hundred guests are powered off before they are compared: they boot for half a minute on a busy
/// machine.
const OFF: u64 = 15;
/// All images are compared after so many steps.
const JUDGED: usize = 4;

/// Hosts, VMs, images, and what was done to them.
pub struct Walk<'a> {
    // Before the hosts: their agents are not asked by a QEMU that ends.
    pub vms: Vec<Vm>,
    pub images: Vec<Loose>,
    pub world: World,
    pub random: Random,
    pub counts: &'a mut Counts,
    story: Vec<String>,
    began: Instant,
    /// Migrations that the operator has given up.
    pub forgotten: BTreeSet<String>,
}

/// What one step does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Act {
    MoveVm,
    MoveImage,
    Adopt,
    Release,
    StartAgain,
    Backup,
    ResizeImage,
    ResizeDisk,
    EditReplica,
    Seed,
    Write,
}

/// With their names for `DRAY_WALK_ACTS`, and how often they are drawn.
const ALL: [(Act, &str, usize); 11] = [
    (Act::MoveVm, "move", 10),
    (Act::MoveImage, "image", 5),
    (Act::Adopt, "adopt", 2),
    (Act::Release, "release", 2),
    (Act::StartAgain, "again", 3),
    (Act::Backup, "backup", 3),
    (Act::ResizeImage, "resize", 1),
    (Act::ResizeDisk, "resize-disk", 1),
    (Act::EditReplica, "replica", 2),
    (Act::Seed, "seed", 1),
    (Act::Write, "write", 1),
];

/// The acts to draw from: all, or those that `DRAY_WALK_ACTS` names.
fn drawn() -> Vec<Act> {
    let named = std::env::var("DRAY_WALK_ACTS").ok();
    let wanted = |name: &str| named.as_ref().is_none_or(|all| all.split(',').any(|n| n == name));
    let some = ALL.iter().filter(|(_, name, _)| wanted(name));
    some.flat_map(|&(act, _, often)| std::iter::repeat_n(act, often)).collect()
}

impl<'a> Walk<'a> {
    pub fn begin(mut random: Random, counts: &'a mut Counts) -> Result<Self, String> {
        let world = World::begin().map_err(|why| format!("hosts: {why}"))?;
        let vms = (0..VMS).map(|number| Vm::begin(&world, &mut random, number));
        let vms = vms.collect::<Result<_, _>>()?;
        let images = (0..IMAGES).map(|number| Loose::make(&world, &mut random, number));
        let images = images.collect::<Result<_, _>>()?;
        let (story, began, forgotten) = (Vec::new(), Instant::now(), BTreeSet::new());
        Ok(Self { vms, images, world, random, counts, story, began, forgotten })
    }

    pub fn tell(&mut self, what: impl Into<String>) {
        let line = format!("{:8.2} {}", self.began.elapsed().as_secs_f64(), what.into());
        if std::env::var_os("DRAY_WALK_TELL").is_some() {
            println!("{line}");
        }
        self.story.push(line);
    }

    /// Keeps what there is to look at, and shows the end of the story.
    pub fn keep(&self, seed: u64, why: &str) {
        let to = kept(seed);
        // Asked before anything is taken down; an agent that says nothing is what the failure is about.
        let asked = |host, what| format!("{:#?}", self.world.list(host, what));
        let shown = [(0, "status"), (0, "images"), (1, "status"), (1, "images")];
        let shown =
            shown.map(|(host, what)| (format!("{what}-{}", LETTERS[host]), asked(host, what)));
        let story = format!("{}\n{why}\n", self.story.join("\n"));
        let result =
            self.world.lab.keep(&to).and_then(|()| std::fs::write(to.join("story"), story));
        let write = |(name, what): &(String, String)| std::fs::write(to.join(name), what);
        if let Err(why) = result.and_then(|()| shown.iter().try_for_each(write)) {
            println!("logs are not kept: {why}");
        }
        println!("{}", self.story[self.story.len().saturating_sub(25)..].join("\n"));
    }

    /// One act on one of the VMs or images; then everybody is heard, and now and then everything is compared.
    pub fn step(&mut self, nth: usize) -> Result<(), String> {
        let acts = drawn();
        let (act, began) = (self.random.pick(&acts), Instant::now());
        let (vm, image) = (self.random.below(VMS as u64), self.random.below(IMAGES as u64));
        let (vm, image) = (vm as usize, image as usize);
        self.tell(format!("{nth}: {act:?}, vm{vm} or image{image}"));
        match act {
            Act::MoveVm => self.move_vm(vm)?,
            Act::MoveImage => self.move_image(image)?,
            Act::Adopt => self.adopt(vm)?,
            Act::Release => self.release(vm)?,
            Act::StartAgain => self.start_again(vm)?,
            Act::Backup => self.back_up(image)?,
            Act::ResizeImage => self.resize_image(image)?,
            Act::ResizeDisk => self.resize_disk(vm)?,
            Act::EditReplica => self.edit_replica()?,
            Act::Seed => self.seed(image)?,
            Act::Write => self.write_image(image)?,
        }
        self.settle()?;
        self.hear()?;
        self.counts.add("steps", 1);
        self.tell(format!("   took {:.1?}", began.elapsed()));
        if nth % JUDGED == JUDGED - 1 { self.judge_all() } else { Ok(()) }
    }

    pub fn hear(&mut self) -> Result<(), String> {
        for vm in &mut self.vms {
            self.counts.add("flushes", vm.hear()?);
        }
        Ok(())
    }

    /// A command, which may be refused; its result.
    pub fn ask(&mut self, host: usize, args: &[&str]) -> Result<Option<serde_json::Value>, String> {
        let outcome = self.world.ask(host, args)?;
        Ok(self.note(args, outcome))
    }

    /// Counts what a command came to.
    pub fn note(&mut self, args: &[&str], outcome: Outcome) -> Option<serde_json::Value> {
        let command = args.first().copied().unwrap_or_default();
        match outcome {
            Outcome::Done(value) => {
                self.counts.add(format!("{command} done"), 1);
                Some(value)
            }
            Outcome::Refused(code, why) => {
                self.counts.add(format!("{command} refused ({code})"), 1);
                self.tell(format!("   {args:?}: {code} {why}"));
                None
            }
        }
    }

    /// Compares everything. Some guests are powered off for it, and boot again.
    pub fn judge_all(&mut self) -> Result<(), String> {
        for number in 0..self.vms.len() {
            let off = self.random.chance(OFF);
            self.judge_vm(number, off)?;
        }
        for image in &self.images {
            let bytes = image.judge(&self.world)?;
            self.counts.add("MiB compared", bytes >> 20);
        }
        Ok(())
    }

    fn judge_vm(&mut self, number: usize, off: bool) -> Result<(), String> {
        let vm = &mut self.vms[number];
        let host = vm.host();
        for disk in &vm.disks {
            judge::judge_owner(&self.world, &disk.file, host)?;
        }
        let bytes = judge::judge_vm(&self.world, vm, off)?;
        self.counts.add("MiB compared", bytes >> 20);
        if !off {
            return Ok(());
        }
        self.counts.add("power offs", 1);
        self.boot(number, host)
    }
}
