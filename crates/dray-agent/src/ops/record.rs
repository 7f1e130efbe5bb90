//! `dray trace record`: tells a client what guests do to an image.

use crate::agent::Agent;
use crate::api::{Answers, Events};
use dray_api::{
    AccessBatch, AccessKind, AccessLine, ApiResult, ErrorKind, Event, Record, RecordEnd, Recorded,
    Refusal,
};
use dray_heat::Op;
use dray_host::record::CopyState;
use dray_host::registry::Entry;
use dray_image::{Access, Accesses, Disk, Recording};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Pause between two tellings: with a recording's room, for 650,000 accesses a second.
const EVERY: Duration = Duration::from_millis(100);
/// Times that a recording is tried to begin.
const TRIES: u32 = 10;
/// Accesses of one event: its line is some hundred kilobytes at most.
const BATCH: usize = 4096;

fn line(access: &Access) -> AccessLine {
    let kind = if access.op == Op::Read { AccessKind::R } else { AccessKind::W };
    AccessLine(nanos(access.time), kind, access.offset, access.len)
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Begins as soon as nobody else records, if that is soon: a client that has just gone is noticed
/// with the next event.
async fn begin(disk: &Disk) -> Option<Recording> {
    for _ in 0..TRIES {
        let begun = disk.record();
        if begun.is_some() {
            return begun;
        }
        tokio::time::sleep(EVERY).await;
    }
    None
}

/// One event after another, none of them too long; without accesses one that tells the time.
async fn tell(taken: &Accesses, events: &Events) -> ApiResult<()> {
    let mut batches = taken.accesses.chunks(BATCH);
    let mut next = batches.next().unwrap_or_default();
    loop {
        let following = batches.next();
        let until = match following {
            // What comes after this event has its own times.
            Some(_) => next.last().map_or(Duration::ZERO, |access| access.time),
            None => taken.until,
        };
        let accesses = next.iter().map(line).collect();
        let batch = AccessBatch { accesses, until_ns: nanos(until), missed: taken.missed };
        if events.send(Event::Accesses(batch)).await.is_err() {
            let why = "the client has disconnected";
            return Err(Refusal::new(ErrorKind::Internal, "the recording ended", why));
        }
        let Some(following) = following else { return Ok(()) };
        next = following;
    }
}

impl Answers<Record> for Arc<Agent> {
    async fn answer(&self, command: Record, events: Events) -> ApiResult<Recorded> {
        let Record { image, duration_ms } = command;
        let what = format!("cannot record image '{image}'");
        let entry = self.image(&image)?;
        if !self.serves(&entry) {
            let why = "this host does not serve it to guests";
            return Err(Refusal::new(ErrorKind::Conflict, what, why)
                .hint("record it on the host that owns it"));
        }
        let recording = begin(&entry.disk).await.ok_or_else(|| {
            Refusal::new(ErrorKind::Conflict, &what, "it is being recorded already")
        })?;
        let end = duration_ms.map(|ms| Instant::now() + Duration::from_millis(ms));
        let mut accesses = 0;
        loop {
            let next = Instant::now() + EVERY;
            tokio::time::sleep_until(end.map_or(next, |end| end.min(next))).await;
            // Asked before the last look, so that nothing comes between.
            let gone = !self.serves(&entry);
            let over = end.is_some_and(|end| Instant::now() >= end);
            let taken = recording.take();
            tell(&taken, &events).await?;
            accesses += taken.accesses.len() as u64;
            if gone || over {
                return Ok(Recorded {
                    image: image.clone(),
                    bytes: entry.record().len,
                    accesses,
                    missed: taken.missed,
                    duration_ns: nanos(taken.until),
                    end: if gone { RecordEnd::Gone } else { RecordEnd::Duration },
                });
            }
        }
    }
}

impl Agent {
    /// Whether guests are still served from this image, here.
    fn serves(&self, entry: &Arc<Entry>) -> bool {
        let record = entry.record();
        let same = self.registry.get(&record.name).is_some_and(|now| Arc::ptr_eq(&now, entry));
        same && record.state == CopyState::Owner
    }
}
