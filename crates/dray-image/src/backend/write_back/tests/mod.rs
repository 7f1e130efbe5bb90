//! Who hears of a loss, and when it is over.

mod gone;
mod restarts;

use super::*;
use crate::client::{Departure, working_for};
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
    back.keep(Arc::clone(&log) as _, &Past::default());
    back.guest(Path::new("disk"), || Ok(())).unwrap();
    (back, log)
}

fn is_told(back: &WriteBack) -> bool {
    back.error().unwrap().told
}

fn is_over(log: &Written) -> bool {
    log.0.lock().is_none()
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
    first.keep(Arc::clone(&log) as _, &Past::default());
    Guest::writer(&first).flush(lost).unwrap_err();
    let back = WriteBack::default();
    back.keep(Arc::clone(&log) as _, &Past::owing(log.0.lock().clone()));
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
    back.keep(Arc::clone(&log) as _, &Past::default());
    back.own(image, lost).unwrap_err();
    back.guest_stops(true);
    // The guest may go on before `guest_stops(false)`.
    back.guest(image, || Ok(())).unwrap_err();
    back.guest(image, || Ok(())).unwrap_err();
    assert!(log.0.lock().is_some(), "a restart must tell the guest");
    back.guest_stops(false);
    assert!(back.error().is_some_and(|last| !last.told));
    back.guest(image, || Ok(())).unwrap_err();
    back.guest(image, || Ok(())).unwrap();
    assert!(log.0.lock().is_none());
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
        *self.0.lock() = Some(loss.clone());
        Ok(())
    }

    fn begun_anew(&self) -> Result<()> {
        self.settled("")
    }

    fn settled(&self, _: &str) -> Result<()> {
        *self.0.lock() = None;
        Ok(())
    }
}

#[test]
fn a_restart_forgets_no_loss_before_a_flush_has_succeeded_after_the_guest_was_told() {
    let (log, image) = (Arc::new(Written::default()), Path::new("disk"));
    let start = || {
        let back = WriteBack::default();
        back.keep(Arc::clone(&log) as _, &Past::owing(log.0.lock().clone()));
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
    assert!(log.0.lock().is_none());
}

#[test]
fn a_loss_that_was_no_guests_is_told_to_nobody() {
    let (log, image) = (Arc::new(Written::default()), Path::new("disk"));
    let back = WriteBack::default();
    back.keep(Arc::clone(&log) as _, &Past::default());
    back.own(image, lost).unwrap_err();
    back.forget(image);
    assert!(log.0.lock().is_none() && back.error().is_none());
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
