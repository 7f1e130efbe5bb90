//! Clients that have gone and may come back: each that is owed a loss is told.

use super::*;
use crate::client::Origin;

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
