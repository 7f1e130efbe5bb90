//! When agents ran here. What is written to an image in between was written by somebody else, and no line of
//! generations knows of it.
//!
//! An agent that is stopped in order notes how each image looks. One that is killed cannot: instead, every agent
//! touches a file once a second, and what was changed later than that file was not changed by it.

use crate::store::Store;
use dray_files::StatePath;
use dray_files::files::Look;
use serde::{Deserialize, Serialize};
use std::io;
use std::time::Duration;

/// How often the file is to be touched.
pub const EVERY: Duration = Duration::from_secs(1);
/// An agent that is busy touches the file late, and what it was writing when it died may end after it, in seconds.
const LATE: i64 = 4;
/// A power cut takes back what the file system had not written down by then, in seconds.
const LOST: i64 = 60;
/// So many agents are remembered. An image that was last open in an earlier one counts as changed.
const REMEMBERED: usize = 64;

/// Seconds since 1970, and nanoseconds.
pub type When = (i64, i64);

/// From when to when an agent ran.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct Run {
    since: When,
    until: When,
}

/// What the file holds.
#[derive(Serialize, Deserialize)]
struct Seen {
    /// The boot of the host in which the last agent ran.
    boot: String,
    /// When that began; it ran until the file was touched last.
    since: When,
    /// The agents before it, the oldest first.
    before: Vec<Run>,
}

/// The agents that have run here.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Agents(Vec<Run>);

impl Agents {
    /// What is known of them; none when nothing is.
    fn find(at: &StatePath) -> Option<Self> {
        let (seen, touched) = (at.get::<Seen>().ok()?, at.look().ok()?.changed);
        let same_boot = boot(at).is_ok_and(|boot| boot == seen.boot);
        let grace = if same_boot { LATE } else { LOST };
        let until = (touched.0.saturating_add(grace), touched.1);
        let mut runs = seen.before;
        // When the next one began it had ended.
        if let Some(last) = runs.last_mut() {
            last.until = last.until.min(seen.since);
        }
        runs.push(Run { since: seen.since, until });
        let old = runs.len().saturating_sub(REMEMBERED);
        runs.drain(..old);
        Some(Self(runs))
    }

    /// Whether an agent ran each time a file was changed last, its content or anything of it. What is older than all
    /// known agents counts as theirs.
    pub fn ran_at(&self, file: &Look) -> bool {
        let ran = |when: When| {
            let older = self.0.first().is_none_or(|first| when < first.since);
            older || self.0.iter().any(|run| run.since <= when && when <= run.until)
        };
        ran(file.changed) && ran(file.touched)
    }

    /// Whether an image can be as the agent has left it that opened it last, by how its file and its line look. A
    /// line is written anew when its image is opened.
    pub fn have_left(&self, line: &Look, image: &Look) -> bool {
        let opened = self.0.iter().rev().find(|run| line.changed >= run.since);
        opened.is_some_and(|run| image.changed <= run.until && image.touched <= run.until)
    }
}

/// An agent that runs here.
#[derive(Debug)]
pub struct Begun {
    /// The file to be touched.
    pub file: StatePath,
    /// Since when. No touch may be earlier, whatever becomes of the clock.
    pub since: When,
}

/// An agent runs here from now on, and has opened no image yet. Tells which have run before, as far as that is
/// known. Without room for it, this agent counts as the one before, gone on with: its own writes must not be taken for
/// somebody else's.
///
/// # Errors
/// What the file system reports where there is no such file either.
pub fn begin(store: &Store) -> (Option<Agents>, io::Result<Begun>) {
    let file = store.seen();
    let touched = file.look().map_or((i64::MIN, 0), |look| look.changed);
    let agents = Agents::find(&file);
    let before = agents.clone().unwrap_or_default().0;
    let since = match note(&file, before, touched) {
        Err(why) if file.exists().unwrap_or(false) => {
            tracing::warn!(%why, "cannot note when an agent began");
            Ok(touched)
        }
        noted => noted,
    };
    (agents, since.map(|since| Begun { file, since }))
}

fn note(at: &StatePath, before: Vec<Run>, touched: When) -> io::Result<When> {
    let boot = boot(at)?;
    // Until it is known when it began: it takes nothing of its own for somebody else's if that cannot be written.
    at.put(&Seen { boot: boot.clone(), since: touched, before: before.clone() })?;
    // By the clock of the file system, which the lines go by as well. One that was set back does not make agents run
    // into each other.
    let since = at.look()?.changed.max(touched);
    at.put(&Seen { boot, since, before })?;
    Ok(since)
}

fn boot(at: &StatePath) -> io::Result<String> {
    at.files().boot().map(|boot| String::from_utf8_lossy(&boot).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_files::files::sim::{Fault, SimDisk};
    use dray_files::files::{Files, Kind};
    use dray_image::StateImages;
    use std::fs::{File, FileTimes};
    use std::path::Path;
    use std::sync::Arc;
    use std::time::SystemTime;

    fn at(seconds: i64) -> Look {
        let when = (seconds, 0);
        let kind = Kind::File;
        Look { kind, len: 0, mode: 0, inode: 1, birth: None, changed: when, touched: when }
    }

    #[test]
    fn what_is_later_than_its_agent_is_not_its_doing() {
        let run = |since, until| Run { since: (since, 0), until: (until, 0) };
        let agents = Agents(vec![run(100, 200), run(300, 400)]);
        assert!(agents.have_left(&at(300), &at(400)) && agents.have_left(&at(350), &at(90)));
        assert!(!agents.have_left(&at(350), &at(401)));
        // The last one has not opened it.
        assert!(agents.have_left(&at(150), &at(200)) && !agents.have_left(&at(250), &at(201)));
        assert!(!agents.have_left(&at(99), &at(90)), "nobody knows who has opened it");
        let hidden = Look { changed: (90, 0), ..at(401) };
        assert!(!agents.have_left(&at(350), &hidden), "somebody has set the time back");
    }

    /// Without room, and wherever it dies: what an agent writes next is not taken for somebody else's.
    #[test]
    fn an_agent_that_cannot_note_its_begin_is_still_known() {
        for (fault, agents) in
            [Fault::NoSpace, Fault::KillBefore].map(|it| [(it, 1), (it, 2)]).concat()
        {
            for call in 1.. {
                let disk = SimDisk::new(1, &["/", "/state"].map(Path::new));
                let store = || {
                    let files: Arc<dyn Files> = Arc::new(disk.files());
                    let state = StatePath::new(Arc::clone(&files), "/state");
                    Store::among(state, Arc::new(StateImages(files))).unwrap()
                };
                let first = store();
                (1..agents).for_each(|_| drop(begin(&first).1.unwrap()));
                disk.plan(disk.calls() + call, fault);
                let _ = begin(&first);
                let met = disk.met() > 0;
                disk.kill();
                disk.plan_nothing();
                let file = store().seen();
                if let Some(agents) = Agents::find(&file) {
                    assert!(agents.ran_at(&file.look().unwrap()), "{fault:?} {agents:?}");
                }
                if !met {
                    break;
                }
            }
        }
    }

    #[test]
    fn what_was_changed_between_two_agents_is_neithers() {
        let run = |since, until| Run { since: (since, 0), until: (until, 0) };
        let agents = Agents(vec![run(100, 200), run(300, 400)]);
        assert!([50, 100, 200, 350].iter().all(|&when| agents.ran_at(&at(when))));
        assert!([201, 299, 401].iter().all(|&when| !agents.ran_at(&at(when))));
        assert!(!agents.ran_at(&Look { changed: (150, 0), ..at(250) }), "its time was set back");
    }

    fn touch(file: &StatePath, seconds: u64) {
        let last = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        let touched = File::options().write(true).open(file.path()).unwrap();
        touched.set_times(FileTimes::new().set_modified(last)).unwrap();
    }

    #[test]
    fn an_agent_is_known_by_what_it_touches() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let (agents, file) = begin(&store);
        assert_eq!(agents, None);
        touch(&file.unwrap().file, 4_000_000_000);
        let (agents, file) = begin(&store);
        let first = agents.unwrap().0;
        assert_eq!(first.len(), 1);
        assert!(first[0].since.0 < 4_000_000_000);
        assert_eq!(first[0].until, (4_000_000_000 + LATE, 0));
        let Begun { file, since } = file.unwrap();
        assert_eq!(since, (4_000_000_000, 0), "the clock was set back since");
        assert!(Agents(first.clone()).ran_at(&at(4_000_000_000)));
        touch(&file, 4_000_000_100);
        let seen: Seen = file.get().unwrap();
        file.put(&Seen { boot: "another".to_owned(), ..seen }).unwrap();
        touch(&file, 4_000_000_200);
        let second = begin(&store).0.unwrap().0;
        assert_eq!((second.len(), second[0].since), (2, first[0].since));
        assert_eq!(second[0].until, second[1].since, "it had ended by then");
        assert_eq!(
            second[1].until,
            (4_000_000_200 + LOST, 0),
            "a power cut may have taken some back"
        );
        for _ in 0..2 * REMEMBERED {
            assert!(begin(&store).0.unwrap().0.len() <= REMEMBERED);
        }
    }
}
