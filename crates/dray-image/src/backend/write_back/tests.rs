//! Who hears of a loss, and when it is over.

use super::*;
use crate::client::{Departure, Origin, working_for};
use crate::disk::PresentLog;
use crate::unrecorded::Unrecorded;
use dray_types::{BlockRange, BlockSet};
use std::sync::mpsc::channel;

fn lost() -> Result<()> {
    Err(Error::new(ErrorKind::NoSpace, "syncing", "the pool is full"))
}

#[test]
fn an_error_is_reported_to_one_flush_of_those_that_are_no_clients_whoever_met_it() {
    let (back, image) = (WriteBack::default(), Path::new("disk"));
    assert!(back.guest(image, || Ok(())).is_ok() && back.error().is_none());
    // A guest's own.
    back.guest(image, lost).unwrap_err();
    back.guest(image, || Ok(())).unwrap();
    assert!(back.error().is_some_and(|last| last.told && last.count == 1));
    // dray's, twice: one error is owed.
    back.own(image, lost).unwrap_err();
    back.own(image, lost).unwrap_err();
    back.own(image, || Ok(())).unwrap();
    assert!(back.error().is_some_and(|last| !last.told && last.count == 3));
    let told = back.guest(image, || Ok(())).unwrap_err();
    assert_eq!(told.kind, ErrorKind::NoSpace);
    assert!(told.to_string().contains("the pool is full"), "{told}");
    assert!(back.error().is_some_and(|last| last.told));
    back.guest(image, || Ok(())).unwrap();
    // Both at once are one.
    back.own(image, lost).unwrap_err();
    back.guest(image, lost).unwrap_err();
    back.guest(image, || Ok(())).unwrap();
}

/// Flushes as the client that it is, one after the other.
struct Guest<'a>(&'a WriteBack, Arc<Client>);

impl<'a> Guest<'a> {
    fn comes(back: &'a WriteBack) -> Self {
        Self::is(back, Client::new(Arc::new(|| true)))
    }

    fn is(back: &'a WriteBack, client: Arc<Client>) -> Self {
        back.look_at(Path::new("disk"), &client);
        Self(back, client)
    }

    fn writer(back: &'a WriteBack) -> Self {
        let guest = Self::comes(back);
        guest.1.writes();
        guest
    }

    /// A flush that came when `asked` had been answered, up to its answer.
    fn begin(&self, asked: u64, sync: fn() -> Result<()>) -> Result<()> {
        self.1.flushes(asked);
        working_for(&self.1, || self.0.guest(Path::new("disk"), sync))
    }

    fn flush(&self, sync: fn() -> Result<()>) -> Result<()> {
        let done = self.begin(self.1.answered(), sync);
        self.1.has_answer();
        done
    }

    fn is_told(&self) -> bool {
        self.flush(|| Ok(())).is_err()
    }

    fn goes(&self, how: Departure) {
        self.1.departs(how);
        self.0.look_at(Path::new("disk"), &self.1);
    }
}

/// An image whose losses are written down, and of which everything is durable.
fn logged() -> (WriteBack, Arc<Written>) {
    let (back, log) = (WriteBack::default(), Arc::new(Written::default()));
    back.keep(Arc::clone(&log) as _, None);
    back.guest(Path::new("disk"), || Ok(())).unwrap();
    (back, log)
}

fn is_told(back: &WriteBack) -> bool {
    back.error().unwrap().told
}

fn is_over(log: &Written) -> bool {
    log.0.lock().unwrap().is_none()
}

#[test]
fn each_client_that_was_there_is_told_whoever_met_the_loss() {
    let (back, log) = logged();
    let (guest, other, reader) = (Guest::writer(&back), Guest::writer(&back), Guest::comes(&back));
    other.flush(lost).unwrap_err();
    assert!(!is_told(&back) && back.untold().is_some());
    assert!(!other.is_told(), "it was");
    assert!(guest.is_told() && is_told(&back) && back.untold().is_none());
    assert!(!guest.is_told() && is_over(&log), "the reader has lost nothing");
    assert!(reader.is_told() && !reader.is_told() && is_over(&log) && is_told(&back));
    // Who comes later has nothing to do with it.
    assert!(!Guest::comes(&back).is_told());
    // A sync of dray's own is told to all.
    back.own(Path::new("disk"), lost).unwrap_err();
    assert!([&guest, &other, &reader].into_iter().all(Guest::is_told));
}

#[test]
fn a_client_that_only_looks_on_and_goes_takes_nothing_with_it() {
    let (back, log) = logged();
    let (guest, reader) = (Guest::writer(&back), Guest::comes(&back));
    guest.flush(lost).unwrap_err();
    reader.goes(Departure::Goodbye);
    assert!(is_told(&back) && !is_over(&log) && !guest.is_told() && is_over(&log));
    // The one that looks on meets the loss.
    let reader = Guest::comes(&back);
    reader.flush(lost).unwrap_err();
    reader.goes(Departure::Goodbye);
    assert!(!is_told(&back) && !is_over(&log));
    assert!(guest.is_told() && is_told(&back));
    assert!(!guest.is_told() && is_over(&log));
}

#[test]
fn a_client_that_was_cut_off_before_it_has_surely_heard_is_told_when_it_comes_back() {
    let (back, log) = logged();
    let (guest, other) = (Guest::writer(&back), Guest::comes(&back));
    guest.begin(guest.1.answered(), lost).unwrap_err();
    assert!(is_told(&back));
    guest.goes(Departure::CutOff);
    assert!(!is_told(&back), "the answer was lost with the connection");
    // It does not matter that another one has heard.
    assert!(other.is_told() && !other.is_told() && !is_told(&back) && !is_over(&log));
    let guest = Guest::comes(&back);
    assert!(!is_told(&back));
    assert!(guest.is_told() && is_told(&back) && !is_over(&log));
    // And again.
    guest.goes(Departure::CutOff);
    let guest = Guest::comes(&back);
    assert!(!is_told(&back) && guest.is_told());
    assert!(!guest.is_told() && is_over(&log));
    guest.goes(Departure::CutOff);
    assert!(!Guest::comes(&back).is_told());
}

/// One after the other comes back, by whatever connection.
#[test]
fn each_of_two_that_were_cut_off_is_told_though_the_first_has_heard() {
    for lost_before in [true, false] {
        let (back, log) = logged();
        let writers = [Guest::writer(&back), Guest::writer(&back)];
        if lost_before {
            back.own(Path::new("disk"), lost).unwrap_err();
        }
        writers.iter().for_each(|one| one.goes(Departure::CutOff));
        if !lost_before {
            back.own(Path::new("disk"), lost).unwrap_err();
        }
        let first = Guest::comes(&back);
        assert!(first.is_told() && !first.is_told() && !is_told(&back) && !is_over(&log));
        let second = Guest::comes(&back);
        assert!(second.is_told() && is_told(&back) && !is_over(&log));
        assert!(!second.is_told() && is_over(&log));
        assert!(!Guest::comes(&back).is_told());
    }
}

/// It is cut off again and again.
#[test]
fn a_client_that_has_heard_and_comes_back_takes_nothing_from_another_that_was_cut_off() {
    let (back, log) = logged();
    let (guest, _other) = (Guest::writer(&back), Guest::writer(&back).goes(Departure::CutOff));
    back.own(Path::new("disk"), lost).unwrap_err();
    assert!(guest.is_told() && !guest.is_told());
    guest.goes(Departure::CutOff);
    for _ in 0..3 {
        let guest = Guest::comes(&back);
        assert!(guest.is_told() && !guest.is_told() && !is_told(&back));
        guest.goes(Departure::CutOff);
    }
    // One that was not told leaves nothing that was not there.
    Guest::comes(&back).goes(Departure::CutOff);
    let comers = [Guest::comes(&back), Guest::comes(&back)];
    assert!(comers.iter().all(|one| one.is_told() && !one.is_told()) && is_over(&log));
}

#[test]
fn a_client_that_only_looked_on_and_comes_back_takes_nothing_from_one_that_wrote() {
    let (back, log) = logged();
    let (guest, reader) = (Guest::writer(&back), Guest::comes(&back));
    back.own(Path::new("disk"), lost).unwrap_err();
    [reader, guest].iter().for_each(|one| one.goes(Departure::CutOff));
    let reader = Guest::comes(&back);
    assert!(reader.is_told() && !reader.is_told() && !is_told(&back));
    reader.goes(Departure::Goodbye);
    let guest = Guest::comes(&back);
    assert!(guest.is_told() && is_told(&back) && !guest.is_told() && is_over(&log));
}

/// A process of this host.
struct Program(u128, Arc<AtomicBool>);

impl Program {
    fn start(id: u128) -> Self {
        Self(id, Arc::new(AtomicBool::new(true)))
    }

    fn ends(&self) {
        self.1.store(false, Ordering::SeqCst);
    }

    fn comes<'a>(&self, back: &'a WriteBack) -> Guest<'a> {
        let runs = Arc::clone(&self.1);
        let origin = Origin::new(self.0, Arc::new(move || runs.load(Ordering::SeqCst)));
        Guest::is(back, Client::of(Some(origin), Arc::new(|| true)))
    }

    fn writer<'a>(&self, back: &'a WriteBack) -> Guest<'a> {
        let guest = self.comes(back);
        guest.1.writes();
        guest
    }
}

#[test]
fn nobody_takes_a_loss_away_from_a_process_that_runs() {
    let (back, log) = logged();
    let [first, second, other] = [1, 2, 3].map(Program::start);
    let there = [&first, &second].map(|program| program.writer(&back));
    back.own(Path::new("disk"), lost).unwrap_err();
    there.iter().for_each(|one| one.goes(Departure::CutOff));
    // Each is told once.
    for stranger in [other.comes(&back), Guest::comes(&back), first.comes(&back)] {
        assert!(stranger.is_told() && !stranger.is_told() && !is_told(&back) && !is_over(&log));
        stranger.goes(Departure::Goodbye);
    }
    let again = first.comes(&back);
    assert!(again.is_told() && !again.is_told() && !is_told(&back) && !is_over(&log));
    let last = second.comes(&back);
    assert!(last.is_told() && is_told(&back) && !last.is_told() && is_over(&log));
    assert!(!other.comes(&back).is_told());
}

#[test]
fn a_process_that_has_gone_twice_comes_back_once() {
    let (back, log) = logged();
    let program = Program::start(1);
    for _ in 0..3 {
        program.writer(&back).goes(Departure::CutOff);
        back.own(Path::new("disk"), lost).unwrap_err();
    }
    let guest = program.comes(&back);
    assert!(guest.is_told() && is_told(&back) && !guest.is_told() && is_over(&log));
    // With two connections at once it has two to hear.
    let there = [program.writer(&back), program.writer(&back)];
    back.own(Path::new("disk"), lost).unwrap_err();
    there.iter().for_each(|one| one.goes(Departure::CutOff));
    let again = [program.comes(&back), program.comes(&back)];
    assert!(again[0].is_told() && !again[0].is_told() && !is_told(&back) && !is_over(&log));
    assert!(again[1].is_told() && !again[1].is_told() && is_told(&back) && is_over(&log));
}

/// As an operator takes note of it with `qemu-io -c flush`.
#[test]
fn anybody_may_hear_of_a_loss_for_a_process_that_has_ended() {
    let (back, log) = logged();
    let [guest, operator] = [1, 2].map(Program::start);
    guest.writer(&back).goes(Departure::CutOff);
    back.own(Path::new("disk"), lost).unwrap_err();
    let takes_note = || {
        let flushing = operator.comes(&back);
        let told = flushing.is_told();
        flushing.goes(Departure::Goodbye);
        told
    };
    assert!(takes_note() && !is_told(&back));
    guest.ends();
    assert!(takes_note() && is_told(&back) && is_over(&log) && !takes_note());
}

/// What is counted has a limit, and what is beyond that is not forgotten.
#[test]
fn a_loss_of_very_many_that_have_gone_stays_owed_until_the_last_has_heard() {
    let (back, log) = logged();
    (0..3000).for_each(|_| Guest::writer(&back).goes(Departure::CutOff));
    back.own(Path::new("disk"), lost).unwrap_err();
    let told = (0..3000).take_while(|_| {
        let guest = Guest::comes(&back);
        let told = guest.is_told();
        guest.goes(Departure::Goodbye);
        told
    });
    assert_eq!(told.count(), 1000);
    assert!(is_told(&back) && is_over(&log));
}

/// It has written nothing and never flushes.
#[test]
fn a_loss_does_not_wait_for_a_client_that_only_looks_on() {
    let (back, log) = logged();
    let (guest, reader) = (Guest::writer(&back), Guest::comes(&back));
    guest.flush(lost).unwrap_err();
    assert!(!guest.is_told() && is_over(&log) && !Guest::comes(&back).is_told());
    // Its own flush tells it nevertheless, once.
    assert!(reader.is_told() && !reader.is_told());
}

/// When it came it might have been a guest that had been cut off; what that one wrote is durable.
#[test]
fn after_a_flush_a_client_that_only_looks_on_is_none_that_had_gone() {
    let (back, log) = logged();
    let guest = Guest::writer(&back);
    guest.goes(Departure::CutOff);
    let (guest, _reader) = (Guest::comes(&back), Guest::comes(&back));
    assert!(!guest.is_told());
    guest.1.writes();
    guest.flush(lost).unwrap_err();
    assert!(is_told(&back) && !guest.is_told() && is_over(&log));
}

#[test]
fn who_says_goodbye_after_it_was_told_of_the_last_of_many_losses_leaves_nothing_behind() {
    let (back, log) = logged();
    let guest = Guest::writer(&back);
    guest.flush(lost).unwrap_err();
    back.own(Path::new("disk"), lost).unwrap_err();
    assert!(guest.is_told());
    guest.goes(Departure::Goodbye);
    assert!(is_told(&back) && is_over(&log) && !Guest::comes(&back).is_told());
    // It was told of the first one only.
    let guest = Guest::writer(&back);
    guest.flush(lost).unwrap_err();
    back.own(Path::new("disk"), lost).unwrap_err();
    guest.goes(Departure::Goodbye);
    assert!(!is_told(&back) && !is_over(&log));
    let next = Guest::comes(&back);
    assert!(next.is_told() && !next.is_told() && is_over(&log));
}

/// Its flush is still under way, which nobody waits for any more.
#[test]
fn a_loss_that_is_met_for_a_client_that_has_gone_is_told_to_the_one_that_comes() {
    for comes_before in [true, false] {
        let (back, log) = logged();
        let gone = Guest::writer(&back);
        gone.goes(Departure::CutOff);
        let early = comes_before.then(|| Guest::comes(&back));
        gone.flush(lost).unwrap_err();
        assert!(!is_told(&back) && gone.is_told(), "it does not count");
        let guest = early.unwrap_or_else(|| Guest::comes(&back));
        assert!(guest.is_told() && is_told(&back) && !is_over(&log));
        assert!(!guest.is_told() && is_over(&log));
    }
}

#[test]
fn who_says_goodbye_after_it_was_told_has_heard_and_who_was_not_told_leaves_it_behind() {
    let (back, log) = logged();
    let guest = Guest::writer(&back);
    guest.flush(lost).unwrap_err();
    guest.goes(Departure::Goodbye);
    assert!(is_told(&back) && is_over(&log));
    // What else it wrote may not be durable.
    back.own(Path::new("disk"), lost).unwrap_err();
    Guest::comes(&back).goes(Departure::Goodbye);
    assert!(!is_told(&back) && !is_over(&log));
    let next = Guest::comes(&back);
    assert!(next.is_told() && !next.is_told() && is_over(&log));
    next.1.writes();
    back.own(Path::new("disk"), lost).unwrap_err();
    next.goes(Departure::Goodbye);
    assert!(!is_told(&back) && !is_over(&log));
    // As `qemu-io -c flush` does.
    let noted = Guest::comes(&back);
    assert!(noted.is_told() && is_told(&back));
    noted.goes(Departure::Goodbye);
    assert!(is_told(&back) && is_over(&log));
}

#[test]
fn what_is_lost_while_its_writer_is_away_is_told_when_it_comes_back() {
    for how in [Departure::Goodbye, Departure::CutOff] {
        let (back, log) = logged();
        let reader = Guest::comes(&back);
        Guest::writer(&back).goes(how);
        back.own(Path::new("disk"), lost).unwrap_err();
        assert!(reader.is_told() && !reader.is_told() && !is_told(&back) && !is_over(&log));
        let guest = Guest::comes(&back);
        assert!(guest.is_told() && is_told(&back) && !guest.is_told() && is_over(&log));
        // What was durable when it went cannot be lost.
        guest.1.writes();
        guest.goes(how);
        assert!(!reader.is_told());
        reader.1.writes();
        back.own(Path::new("disk"), lost).unwrap_err();
        assert!(reader.is_told() && is_told(&back) && !reader.is_told() && is_over(&log));
    }
}

/// It goes while a flush is under way, which may not cover what it has written.
#[test]
fn a_flush_answers_only_for_those_that_had_gone_when_it_began() {
    let (back, log) = logged();
    let (guest, reader) = (Guest::writer(&back), Guest::comes(&back));
    working_for(&reader.1, || {
        back.guest(Path::new("disk"), || {
            guest.goes(Departure::CutOff);
            Ok(())
        })
    })
    .unwrap();
    reader.1.writes();
    back.own(Path::new("disk"), lost).unwrap_err();
    assert!(reader.is_told() && !reader.is_told() && !is_told(&back) && !is_over(&log));
    assert!(Guest::comes(&back).is_told());
}

/// A guest with many queues sends flushes before the ones before are answered.
#[test]
fn a_flush_that_was_sent_before_the_answer_does_not_show_that_it_was_heard() {
    let (back, log) = logged();
    let guest = Guest::writer(&back);
    guest.begin(0, lost).unwrap_err();
    guest.1.has_answer();
    guest.begin(0, || Ok(())).unwrap();
    guest.1.has_answer();
    assert!(!is_over(&log));
    guest.begin(1, || Ok(())).unwrap();
    assert!(is_over(&log));
}

#[test]
fn a_loss_of_an_earlier_process_is_told_to_all_that_come_until_one_has_heard() {
    let log = Arc::new(Written::default());
    let first = WriteBack::default();
    first.keep(Arc::clone(&log) as _, None);
    Guest::writer(&first).flush(lost).unwrap_err();
    let back = WriteBack::default();
    back.keep(Arc::clone(&log) as _, log.0.lock().unwrap().as_ref());
    let (other, guest) = (Guest::comes(&back), Guest::comes(&back));
    assert!(other.is_told() && !other.is_told());
    assert!(!is_told(&back) && back.untold().is_some(), "the other one may be the guest");
    assert!(guest.is_told() && is_told(&back) && !is_over(&log));
    assert!(!guest.is_told() && is_over(&log));
    assert!(!Guest::comes(&back).is_told());
}

#[test]
fn nobody_is_kept_who_has_gone() {
    let (back, _) = logged();
    let clients: Vec<_> = (0..9).map(|_| Guest::writer(&back)).collect();
    clients[0].flush(lost).unwrap_err();
    clients.iter().for_each(|one| one.goes(Departure::CutOff));
    assert!(clients.iter().all(|one| Arc::strong_count(&one.1) == 1));
}

#[test]
fn what_a_client_was_told_while_qemu_stopped_its_guest_it_is_told_again() {
    let (back, log) = logged();
    let guest = Guest::writer(&back);
    back.guest_stops(true);
    guest.flush(lost).unwrap_err();
    assert!(guest.is_told() && !is_told(&back));
    back.guest_stops(false);
    assert!(back.untold().is_some() && guest.is_told() && back.untold().is_none());
    assert!(!guest.is_told() && is_over(&log));
}

/// QEMU flushes its disks when it stops a guest for a migration, and an error ends that one.
#[test]
fn a_loss_that_qemu_itself_was_told_while_it_stopped_the_guest_is_told_again() {
    let (log, image) = (Arc::new(Written::default()), Path::new("disk"));
    let back = WriteBack::default();
    back.keep(Arc::clone(&log) as _, None);
    back.own(image, lost).unwrap_err();
    back.guest_stops(true);
    // The guest may go on before `guest_stops(false)`.
    back.guest(image, || Ok(())).unwrap_err();
    back.guest(image, || Ok(())).unwrap_err();
    assert!(log.0.lock().unwrap().is_some(), "a restart must tell the guest");
    back.guest_stops(false);
    assert!(back.error().is_some_and(|last| !last.told));
    back.guest(image, || Ok(())).unwrap_err();
    back.guest(image, || Ok(())).unwrap();
    assert!(log.0.lock().unwrap().is_none());
    // The device told QEMU itself.
    back.guest_stops(true);
    back.guest(image, lost).unwrap_err();
    back.guest(image, || Ok(())).unwrap_err();
    back.guest_stops(false);
    back.guest(image, || Ok(())).unwrap_err();
    // Nothing was told while the guest was being stopped.
    back.guest_stops(true);
    back.guest_stops(false);
    back.guest(image, || Ok(())).unwrap();
}

#[test]
fn a_loss_is_untold_until_a_flush_that_must_be_the_guests_has_reported_it() {
    let (back, image) = (WriteBack::default(), Path::new("disk"));
    assert!(back.untold().is_none());
    back.guest(image, lost).unwrap_err();
    assert!(back.untold().is_none());
    back.own(image, lost).unwrap_err();
    assert!(back.untold().is_some());
    for told in [back.guest(image, || Ok(())), back.guest(image, lost)] {
        told.unwrap_err();
    }
    assert!(back.untold().is_none());
    back.guest_stops(true);
    back.guest(image, lost).unwrap_err();
    assert!(back.untold().is_some_and(|last| !last.told), "QEMU may have asked");
    back.guest_stops(false);
    assert!(back.untold().is_some());
    back.guest(image, || Ok(())).unwrap_err();
    assert!(back.untold().is_none());
}

#[test]
fn who_asks_for_a_loss_waits_for_a_sync_under_way() {
    let (back, image) = (WriteBack::default(), Path::new("disk"));
    let (begun, begins) = channel();
    std::thread::scope(|scope| {
        let back = &back;
        let own = scope.spawn(move || {
            back.own(image, || {
                begun.send(()).unwrap();
                std::thread::sleep(std::time::Duration::from_millis(50));
                lost()
            })
        });
        begins.recv().unwrap();
        assert!(back.untold().is_some());
        own.join().unwrap().unwrap_err();
    });
}

/// What is written down.
#[derive(Default)]
struct Written(Mutex<Option<Loss>>);

impl LossLog for Written {
    fn lost(&self, loss: &Loss) -> Result<()> {
        *self.0.lock().unwrap() = Some(loss.clone());
        Ok(())
    }

    fn settled(&self) -> Result<()> {
        *self.0.lock().unwrap() = None;
        Ok(())
    }
}

#[test]
fn a_restart_forgets_no_loss_before_a_flush_has_succeeded_after_the_guest_was_told() {
    let (log, image) = (Arc::new(Written::default()), Path::new("disk"));
    let start = || {
        let back = WriteBack::default();
        back.keep(Arc::clone(&log) as _, log.0.lock().unwrap().as_ref());
        back
    };
    // dray's own sync fails, a guest's flush fails: each before a restart.
    start().own(image, lost).unwrap_err();
    start().guest(image, lost).unwrap_err();
    let back = start();
    let told = back.guest(image, || Ok(())).unwrap_err().to_string();
    assert!(told.contains("before the agent was restarted"), "{told}");
    // Perhaps nobody has heard the answer.
    let back = start();
    back.guest(image, || Ok(())).unwrap_err();
    back.guest(image, || Ok(())).unwrap();
    start().guest(image, || Ok(())).unwrap();
    assert!(log.0.lock().unwrap().is_none());
}

/// Which blocks are present.
#[derive(Default)]
struct Present {
    recorded: Mutex<BlockSet>,
    noted: Mutex<BlockSet>,
    stuck: AtomicBool,
}

impl PresentLog for Present {
    fn record(&self, present: &BlockSet) -> Result<()> {
        self.recorded.lock().unwrap().union_with(present);
        self.noted.lock().unwrap().subtract(present);
        Ok(())
    }

    fn note(&self, run: BlockRange) -> Result<()> {
        self.noted.lock().unwrap().insert(run);
        Ok(())
    }

    fn forget_notes(&self) -> Result<()> {
        if self.stuck.load(Ordering::SeqCst) {
            return lost();
        }
        *self.noted.lock().unwrap() = BlockSet::new();
        Ok(())
    }
}

/// A process that serves an image to which blocks come.
struct Process<'a> {
    back: WriteBack,
    unrecorded: Unrecorded,
    present: &'a Present,
}

impl<'a> Process<'a> {
    fn start(losses: &Arc<Written>, present: &'a Present) -> Self {
        let (back, unrecorded) = (WriteBack::default(), Unrecorded::new(8));
        back.keep(Arc::clone(losses) as _, losses.0.lock().unwrap().as_ref());
        if unrecorded.inherit(&present.noted.lock().unwrap(), back.error()) {
            back.notes_begin_anew();
        }
        Self { back, unrecorded, present }
    }

    fn add(&self, block: u64) -> Result<()> {
        self.unrecorded.add(Some(self.present), BlockRange::new(block, 1))
    }

    fn flush(&self, sync: fn() -> Result<()>) -> Result<()> {
        let sync = || self.back.guest(Path::new("disk"), sync);
        self.unrecorded.record("flushing", Some(self.present), sync)
    }
}

fn blocks(blocks: &[u64]) -> BlockSet {
    blocks.iter().map(|&block| BlockRange::new(block, 1)).collect()
}

#[test]
fn a_restart_tells_a_loss_once_and_the_image_is_usable() {
    let (losses, present) = (Arc::new(Written::default()), Present::default());
    let start = || Process::start(&losses, &present);
    let first = start();
    first.add(1).unwrap();
    first.flush(lost).unwrap_err();
    first.add(2).unwrap_err();
    let second = start();
    second.add(3).unwrap();
    let told = second.flush(|| Ok(())).unwrap_err();
    assert!(told.is_earlier_loss() && told.to_string().contains("the pool is full"), "{told}");
    assert_eq!(*present.recorded.lock().unwrap(), blocks(&[3]), "it was durable");
    second.unrecorded.check_usable("writing").unwrap();
    second.add(4).unwrap();
    second.flush(|| Ok(())).unwrap();
    assert_eq!(*present.recorded.lock().unwrap(), blocks(&[3, 4]));
    assert!(losses.0.lock().unwrap().is_none());
    start().flush(|| Ok(())).unwrap();
    // What fails now is no earlier loss, whatever there was before.
    second.flush(lost).unwrap_err();
    let third = start();
    third.back.own(Path::new("disk"), lost).unwrap_err();
    assert!(!third.flush(|| Ok(())).unwrap_err().is_earlier_loss());
    third.add(5).unwrap_err();
}

/// The guest has not flushed yet when its host's agent is restarted a second time.
#[test]
fn right_notes_of_a_later_process_are_believed_before_the_guest_was_told() {
    let (losses, present) = (Arc::new(Written::default()), Present::default());
    let start = || Process::start(&losses, &present);
    start().flush(lost).unwrap_err();
    start().add(1).unwrap();
    let third = start();
    assert!(third.back.error().is_some_and(|loss| !loss.told));
    third.unrecorded.check_usable("writing").unwrap();
    assert!(third.flush(|| Ok(())).unwrap_err().is_earlier_loss());
    assert_eq!(*present.recorded.lock().unwrap(), blocks(&[1]));
}

#[test]
fn notes_that_a_failed_sync_has_left_behind_are_not_believed() {
    let (losses, present) = (Arc::new(Written::default()), Present::default());
    let start = || Process::start(&losses, &present);
    let first = start();
    first.add(1).unwrap();
    present.stuck.store(true, Ordering::SeqCst);
    first.flush(lost).unwrap_err();
    present.stuck.store(false, Ordering::SeqCst);
    let second = start();
    second.add(2).unwrap_err();
    let own = || second.back.own(Path::new("disk"), || Ok(()));
    second.unrecorded.record("a checkpoint", Some(&present), own).unwrap_err();
    assert_eq!(*present.noted.lock().unwrap(), BlockSet::new());
    let third = start();
    third.add(2).unwrap();
    third.flush(|| Ok(())).unwrap_err();
    third.flush(|| Ok(())).unwrap();
    assert_eq!(*present.recorded.lock().unwrap(), blocks(&[2]));
}

#[test]
fn notes_of_a_process_that_lost_nothing_are_believed() {
    let (losses, present) = (Arc::new(Written::default()), Present::default());
    let start = || Process::start(&losses, &present);
    start().flush(lost).unwrap_err();
    let second = start();
    second.flush(|| Ok(())).unwrap_err();
    second.add(1).unwrap();
    // Killed: what it told may not have been heard.
    let third = start();
    third.add(2).unwrap();
    let told = third.flush(|| Ok(())).unwrap_err();
    assert_eq!(told.to_string().matches(EARLIER).count(), 1, "{told}");
    third.flush(|| Ok(())).unwrap();
    assert_eq!(*present.recorded.lock().unwrap(), blocks(&[1, 2]));
    assert!(losses.0.lock().unwrap().is_none());
}

#[test]
fn a_loss_that_was_no_guests_is_told_to_nobody() {
    let (log, image) = (Arc::new(Written::default()), Path::new("disk"));
    let back = WriteBack::default();
    back.keep(Arc::clone(&log) as _, None);
    back.own(image, lost).unwrap_err();
    back.forget(image);
    assert!(log.0.lock().unwrap().is_none() && back.error().is_none());
    back.guest(image, || Ok(())).unwrap();
    back.own(image, lost).unwrap_err();
    assert!(!back.guest(image, || Ok(())).unwrap_err().is_earlier_loss());
}

/// The kernel tells one of two syncs that end at once, which goes on only when the other one has ended.
#[test]
fn a_flush_waits_for_what_another_call_under_way_is_told() {
    type Call = fn(&WriteBack, &dyn Fn() -> Result<()>) -> Result<()>;
    let own: Call = |back, sync| back.own(Path::new("disk"), sync);
    let flush: Call = |back, sync| {
        let other = Guest::comes(back);
        working_for(&other.1, || back.guest(Path::new("disk"), sync))
    };
    for call in [own, flush] {
        let (back, ((begun, begins), (go, goes))) = (logged().0, (channel(), channel()));
        let (back, guest) = (&back, Guest::writer(&back));
        std::thread::scope(|scope| {
            let other = scope.spawn(move || {
                call(back, &|| {
                    begun.send(()).unwrap();
                    goes.recv().unwrap();
                    lost()
                })
            });
            begins.recv().unwrap();
            let flushed = working_for(&guest.1, || {
                back.guest(Path::new("disk"), || {
                    go.send(()).unwrap();
                    Ok(())
                })
            });
            flushed.unwrap_err();
            other.join().unwrap().unwrap_err();
        });
    }
}
