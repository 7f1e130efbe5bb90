//! A disk that is quiesced, parked, incoming or shut.

use crate::*;

#[test]
fn quiesce_holds_writes_back_and_lets_reads_pass() {
    let Fixture { disk, _dir } = fixture(MIB);
    let quiesced = disk.quiesce(SOON).unwrap();
    assert!(disk.quiesce(SOON).is_err(), "quiesced twice");
    assert_eq!(disk.try_write_at(&[1; 512], 0).unwrap(), Attempt::WouldWait);
    disk.read_at(&mut [0; 512], 0).unwrap();
    let writer = thread::spawn({
        let disk = Arc::clone(&disk);
        move || disk.write_at(&[1; 512], 0, false)
    });
    let mut byte = [0; 1];
    disk.backing().read_at(&mut byte, 0).unwrap();
    assert_eq!(byte, [0], "a write passed a closed gate");
    drop(quiesced);
    writer.join().unwrap().unwrap();
    disk.read_at(&mut byte, 0).unwrap();
    assert_eq!(byte, [1]);
}

#[test]
fn a_parked_disk_answers_flush_and_holds_everything_else() {
    let Fixture { disk, _dir } = fixture(MIB);
    disk.park(disk.quiesce(SOON).unwrap());
    disk.flush().unwrap();
    assert_eq!(disk.try_read_at(&mut [0; 512], 0).unwrap(), Attempt::WouldWait);
    let io: Vec<_> = [true, false]
        .into_iter()
        .map(|write| {
            let disk = Arc::clone(&disk);
            thread::spawn(move || {
                if write {
                    disk.write_at(&[1; 512], 0, false)
                } else {
                    disk.read_at(&mut [0; 512], 0)
                }
            })
        })
        .collect();
    disk.fail_parked();
    for thread in io {
        assert_eq!(thread.join().unwrap().unwrap_err().kind, ErrorKind::Unavailable);
    }
    assert_eq!(disk.read_at(&mut [0; 1], 0).unwrap_err().kind, ErrorKind::Unavailable);
    disk.flush().unwrap();
    disk.unpark();
    disk.write_at(&[1; 512], 0, false).unwrap();
}

/// Changes of every kind, each in a thread of its own.
fn changes(disk: &Arc<Disk>) -> Vec<thread::JoinHandle<Result<()>>> {
    let write = |disk: &Disk| disk.write_at(&[1; 512], 0, false);
    let zero = |disk: &Disk| disk.zero(4096, 512, ZeroMode::MayUnmap, false);
    let discard = |disk: &Disk| disk.discard(8192, 512, true);
    let all: [fn(&Disk) -> Result<()>; 3] = [write, zero, discard];
    let spawn = |change: fn(&Disk) -> Result<()>| {
        let disk = Arc::clone(disk);
        thread::spawn(move || change(&disk))
    };
    all.into_iter().map(spawn).collect()
}

#[test]
fn incoming_reads_come_from_the_owner_and_changes_wait_for_the_handover() {
    let Fixture { disk, _dir } = fixture(MIB);
    disk.begin_incoming(Arc::new(Sevens::default()));
    let mut buf = [0; 512];
    assert_eq!(disk.try_read_at(&mut buf, 0).unwrap(), Attempt::WouldWait);
    disk.read_at(&mut buf, 0).unwrap();
    assert_eq!(buf, [7; 512]);
    assert_eq!(disk.try_write_at(&buf, 0).unwrap(), Attempt::WouldWait);
    let waiting = changes(&disk);
    assert_eq!(disk.extents(0, MIB, 4).unwrap()[0].kind, ExtentKind::Data);
    disk.flush().unwrap();
    assert!(disk.quiesce(SOON).is_err(), "another host's guest cannot be quiesced here");
    assert_eq!(disk.stats().writes, 0);
    disk.serve_with_missing(
        BlockSet::new(),
        &BlockSet::new(),
        Arc::new(Sevens::default()),
        Arc::new(Log::default()),
    );
    waiting.into_iter().for_each(|change| change.join().unwrap().unwrap());
    disk.read_at(&mut buf, 0).unwrap();
    assert_eq!(buf, [1; 512]);
}

#[test]
fn changes_that_wait_for_a_handover_fail_when_the_image_is_discarded() {
    let Fixture { disk, _dir } = fixture(MIB);
    disk.begin_incoming(Arc::new(Sevens::default()));
    let waiting = changes(&disk);
    disk.fail_parked();
    for change in waiting.into_iter().chain(changes(&disk)) {
        assert_eq!(change.join().unwrap().unwrap_err().kind, ErrorKind::Unavailable);
    }
    disk.read_at(&mut [0; 512], 0).unwrap();
    disk.flush().unwrap();
}

#[test]
fn a_shut_disk_holds_reads_changes_and_flushes() {
    let Fixture { disk, _dir } = fixture(MIB);
    let disk = Disk::new_shut(Arc::clone(disk.backing()));
    assert_eq!(disk.try_read_at(&mut [0; 512], 0).unwrap(), Attempt::WouldWait);
    assert_eq!(disk.try_write_at(&[1; 512], 0).unwrap(), Attempt::WouldWait);
    let io = || {
        let mut all = changes(&disk);
        let (reader, flusher) = (Arc::clone(&disk), Arc::clone(&disk));
        all.push(thread::spawn(move || reader.read_at(&mut [0; 512], 0)));
        all.push(thread::spawn(move || flusher.flush()));
        all
    };
    let waiting = io();
    // What ends other causes opens nothing.
    disk.unpark();
    disk.wait_again();
    drop(disk.quiesce(SOON).unwrap());
    let stats = disk.stats();
    assert_eq!((stats.reads, stats.writes, stats.zeroes), (0, 0, 0));
    disk.unshut();
    waiting.into_iter().for_each(|io| io.join().unwrap().unwrap());
    disk.shut();
    let waiting = io();
    disk.fail_parked();
    for io in waiting.into_iter().chain(io()) {
        assert_eq!(io.join().unwrap().unwrap_err().kind, ErrorKind::Unavailable);
    }
    disk.wait_again();
    let waiting = io();
    disk.unshut();
    waiting.into_iter().for_each(|io| io.join().unwrap().unwrap());
}

#[test]
fn a_disk_that_is_parked_while_it_is_shut_is_parked_when_it_is_no_longer_shut() {
    let Fixture { disk, _dir } = fixture(MIB);
    let disk = Disk::new_shut(Arc::clone(disk.backing()));
    disk.park(disk.quiesce(Duration::ZERO).unwrap());
    disk.unshut();
    disk.flush().unwrap();
    assert_eq!(disk.try_read_at(&mut [0; 512], 0).unwrap(), Attempt::WouldWait);
    disk.shut();
    disk.unpark();
    assert_eq!(disk.try_read_at(&mut [0; 512], 0).unwrap(), Attempt::WouldWait);
    disk.unshut();
    disk.read_at(&mut [0; 512], 0).unwrap();
}
