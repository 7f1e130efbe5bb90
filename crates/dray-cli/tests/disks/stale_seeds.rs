//! Seeds whose file is replaced or written to while no agent runs: nothing of such a file is used.

use crate::again::{killed_long_ago, make_again, write_in_place};
use crate::lab::{DRAY, Host, read_record, wait_for, write_record};
use crate::moves::result;
use crate::restarts::WAIT;
use crate::seeds::{IMAGE, World, sent};
use dray_backup::Key;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::thread::JoinHandle;

/// The target of a seed, whose agent has died, and whoever still asks for it.
struct Seeding {
    world: World,
    asked: JoinHandle<Output>,
}

impl Seeding {
    /// Everything has been read; the agent died before the `step` that comes next.
    fn until(step: &str) -> Self {
        let mut world = World::begin(&[("nas", false)]);
        world.back_up("nas", &Key::None);
        world.c.kill();
        world.c.spawn(&[("DRAY_ABORT_BEFORE", step)]);
        wait_for("hostc", WAIT, || world.c.ask("info".into()).is_ok()).unwrap();
        let mut dray = Command::new(DRAY);
        dray.arg("--socket").arg(world.lab.b.api());
        dray.args(["--json", "seed", "--image", IMAGE, "--to", "hostc"]);
        let asked = std::thread::spawn(move || dray.output().unwrap());
        world.c.await_death().unwrap();
        if step == "seed-finish" {
            all_saved(&world.c);
        }
        Self { world, asked }
    }

    fn path(&self) -> PathBuf {
        self.world.c.pool().join(format!(".{}.dray-seed", IMAGE))
    }

    /// The agent starts again. Bytes that the backup gives to it then.
    fn go_on(self) -> (World, u64) {
        let Self { mut world, asked } = self;
        world.c.start();
        let seeded = asked.join().unwrap();
        let image = &result(&seeded)["images"][0];
        let given = image["given"]["nas"].as_u64().unwrap_or_default();
        assert_eq!(world.c.image(IMAGE).unwrap()["state"], "replica", "{image}");
        (world, given)
    }
}

/// What has been read is durable, as it is after some seconds in the life of a large image.
fn all_saved(host: &Host) {
    let note = host.state().join("seeds").join(format!("{}.json", IMAGE));
    let text = read_record(&note);
    let saved = text.replace("\"done\": []", &format!("\"done\": [[0, {}]]", u64::MAX));
    assert_ne!(saved, text);
    write_record(&note, &saved);
}

/// Moves the image to where it was read from a backup, which it begins with.
fn move_after(mut world: World, what: &str) {
    world.write(&[(10, 4)]);
    let (summary, _) = world.go(&["--verify"]);
    assert_eq!(sent(&summary), 4, "{what}: {summary}");
}

/// While it is read, and when it is about to become a replica.
const SEEDING: [&str; 2] = ["seed-finish", "seed-name"];

#[test]
fn a_seed_that_nobody_has_changed_is_not_read_again() {
    for step in SEEDING {
        let (world, given) = Seeding::until(step).go_on();
        assert_eq!(given, 0, "{step}");
        move_after(world, step);
    }
}

#[test]
fn a_seed_that_was_replaced_while_no_agent_ran_is_read_again() {
    for step in SEEDING {
        for same_number in [false, true] {
            let seeding = Seeding::until(step);
            let path = seeding.path();
            let empty = vec![0; path.metadata().unwrap().len() as usize];
            let other = path.with_extension("other");
            if same_number && !make_again(&path, &empty) {
                continue;
            }
            if !same_number {
                std::fs::write(&other, &empty).unwrap();
                std::fs::rename(&other, &path).unwrap();
            }
            let (world, given) = seeding.go_on();
            assert!(given > 0, "{step}");
            move_after(world, step);
        }
    }
}

#[test]
fn a_seed_that_was_written_to_while_no_agent_ran_is_read_again() {
    for step in SEEDING {
        let mut seeding = Seeding::until(step);
        killed_long_ago(&mut seeding.world.c);
        write_in_place(&seeding.path());
        let (world, given) = seeding.go_on();
        assert!(given > 0, "{step}");
        move_after(world, step);
    }
}
