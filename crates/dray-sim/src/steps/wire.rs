//! What the shells do with the network: sessions, control messages, frames, all through the real
//! encodings.

use crate::faults::Side;
use crate::state::index::mask_of;
use crate::state::link::Frame;
use crate::state::target::{Left, PendingWrite};
use crate::world::{Ev, World, note};
use dray_engine::receiver::Arrival;
use dray_engine::{MILLISECOND, SECOND, SourceEvent, TargetEvent};
use dray_types::{BLOCK_SIZE, BlockRange, ImageIndex};
use dray_wire::frame::{HEADER_LEN, frame_hash, mask_bit};
use dray_wire::{Encoding, Envelope, FrameHeader, FrameKind, ToSource, ToTarget, control};

impl World {
    /// The source dials while it has no session and something to do.
    pub(crate) fn connect(&mut self) {
        let delay = self.rng.between(10, 300) * MILLISECOND;
        self.at(delay, Ev::Connect);
        let source = &self.source;
        let wants = source.up && source.session == 0 && !source.machine.is_over();
        if !self.link.up || !wants || !self.target.up {
            return;
        }
        if self.target.session != 0 {
            self.tell_target(TargetEvent::LinkDown);
        }
        self.settle_old_writes();
        let session = self.link.connect(self.now);
        note!(self, "session {session}");
        self.check.new_session();
        self.source.session = session;
        self.source.link_ups.push_back(session);
        self.target.session = session;
        self.target.link_ups.push_back(session);
        self.tell_target(TargetEvent::LinkUp);
        if let Some(reuse) = self.setup.reuse.clone() {
            let known = !self.rng.chance(reuse.unknown);
            self.basis_known = known && self.rng.chance(reuse.basis.known);
            self.asks_known = known && self.rng.chance(reuse.asks);
            self.tell_source(SourceEvent::Reuse { known, together: reuse.together });
        }
        self.tell_source(SourceEvent::LinkUp);
    }

    pub(crate) fn link_fault(&mut self) {
        if self.now >= self.setup.faults_until {
            return;
        }
        let mean = (SECOND as f64 / self.setup.faults.link_drop) as u64;
        let next = self.rng.below(2 * mean);
        self.at(next, Ev::LinkFault);
        note!(self, "the link is down");
        self.check.drops += 1;
        self.link.up = false;
        self.lose_session();
        let back = self.rng.pick(&[10 * MILLISECOND, SECOND, 8 * SECOND]);
        let back = self.rng.below(back);
        self.at(back, Ev::LinkBack);
    }

    /// The session breaks; each side notices in its own time.
    pub(crate) fn lose_session(&mut self) {
        if !self.link.break_session(self.now, &mut self.rng) {
            return;
        }
        for side in [Side::Source, Side::Target] {
            let delay = self.rng.below(500 * MILLISECOND);
            self.at(delay, Ev::NoticeDown(side, self.link.session));
        }
    }

    pub(crate) fn notice_down(&mut self, side: Side, session: u64) {
        match side {
            Side::Source if self.source.session == session => {
                self.source.session = 0;
                self.tell_source(SourceEvent::LinkDown);
            }
            Side::Target if self.target.session == session => {
                self.target.session = 0;
                self.tell_target(TargetEvent::LinkDown);
            }
            _ => {}
        }
    }

    pub(crate) fn send_to_target(&mut self, envelope: &Envelope<ToTarget>) {
        if matches!(envelope.body, ToTarget::Describes { .. }) && !self.asks_known {
            return;
        }
        match control::encode(envelope) {
            Ok(bytes) => self.send_control(Side::Target, self.source.known_session, bytes),
            Err(why) => self.fail(format!("a message of the source cannot be sent: {why}")),
        }
    }

    pub(crate) fn send_to_source(&mut self, envelope: &Envelope<ToSource>) {
        self.check_paused(&envelope.body);
        self.check_asks(&envelope.body);
        match control::encode(envelope) {
            Ok(bytes) => self.send_control(Side::Source, self.target.known_session, bytes),
            Err(why) => self.fail(format!("a message of the target cannot be sent: {why}")),
        }
    }

    fn send_control(&mut self, to: Side, session: u64, bytes: Vec<u8>) {
        if session == 0 || session != self.link.session || self.link.broken {
            return;
        }
        let arrival = self.link.control_arrival(self.now, to, &mut self.rng);
        self.at(arrival - self.now, Ev::Control { to, session, bytes });
    }

    pub(crate) fn control_arrives(&mut self, to: Side, session: u64, bytes: &[u8]) {
        let listening = match to {
            Side::Source => self.source.session,
            Side::Target => self.target.session,
        };
        if listening != session || !self.link.control_lives(session, to, self.now) {
            return;
        }
        let Ok(len) = control::decode_len([bytes[0], bytes[1], bytes[2], bytes[3]]) else {
            return self.fail("a message is too long".into());
        };
        let body = &bytes[4..4 + len];
        let refused = match to {
            Side::Source => match control::decode::<ToSource>(body) {
                Ok(message) => {
                    self.tell_source(SourceEvent::Message(message));
                    None
                }
                Err(why) => Some(why),
            },
            Side::Target => match control::decode::<ToTarget>(body) {
                Ok(message) => {
                    self.tell_target(TargetEvent::Message(message));
                    None
                }
                Err(why) => Some(why),
            },
        };
        if let Some(why) = refused {
            self.fail(format!("the {to:?} refuses a message: {why}"));
        }
    }

    /// The run was read: its blocks travel as they are now.
    pub(crate) fn send_run(&mut self, tag: u64, image: ImageIndex, range: BlockRange) {
        let disk = &self.source.disks[image.ix()];
        let versions: Vec<_> = (range.start..range.end()).map(|b| disk.read(b)).collect();
        self.send_versions(tag, image, range, &versions);
    }

    pub(crate) fn send_versions(
        &mut self,
        tag: u64,
        image: ImageIndex,
        range: BlockRange,
        versions: &[u64],
    ) {
        let zero_mask = mask_of(versions);
        let mut payload = Vec::with_capacity(range.byte_len() as usize);
        for version in versions.iter().filter(|version| **version != crate::disk::ZERO) {
            payload.extend(version.to_le_bytes());
            payload.resize(payload.len() + BLOCK_SIZE as usize - 8, 0);
        }
        self.check_crossing(image, range);
        self.send_frame(FrameKind::Run, tag, image, range, zero_mask, payload);
    }

    pub(crate) fn send_zero(&mut self, tag: u64, image: ImageIndex, range: BlockRange) {
        self.send_frame(FrameKind::Zero, tag, image, range, [0; 4], Vec::new());
    }

    pub(crate) fn send_frame(
        &mut self,
        kind: FrameKind,
        tag: u64,
        image: ImageIndex,
        range: BlockRange,
        zero_mask: [u64; 4],
        mut payload: Vec<u8>,
    ) {
        let session = self.source.known_session;
        if session == 0 || session != self.link.session || self.link.broken {
            return;
        }
        let header = FrameHeader {
            kind,
            encoding: Encoding::Raw,
            image,
            epoch: self.source.machine.epoch(),
            tag,
            range,
            zero_mask,
            payload_len: payload.len() as u32,
            hash: frame_hash(kind, image, range, &zero_mask, &payload),
        };
        if !payload.is_empty() && self.faulty(self.setup.faults.damage) {
            let at = self.rng.below(payload.len() as u64) as usize;
            payload[at] ^= 0x10;
            self.check.damaged += 1;
        }
        let bytes = (HEADER_LEN + payload.len()) as u64;
        let (stream, arrival) = self.link.data_arrival(self.now, bytes, &mut self.rng);
        let frame = Frame { header: header.encode(), payload };
        self.at(arrival - self.now, Ev::Data { session, stream, frame });
    }

    pub(crate) fn frame_arrives(&mut self, session: u64, stream: usize, frame: Frame) {
        if self.target.session != session || !self.link.data_lives(session, stream, self.now) {
            return;
        }
        let header = match FrameHeader::decode(&frame.header) {
            Ok(header) => header,
            Err(why) => return self.fail(format!("the target refuses a frame: {why}")),
        };
        // A lower epoch is a voice from before the last handover (I1).
        if header.epoch < self.target.machine.epoch() {
            return self
                .fail(format!("a frame of epoch {} came after the handover", header.epoch.0));
        }
        let FrameHeader { tag, image, range, .. } = header;
        if header.verify(&frame.payload).is_err() {
            self.check_landed(session, image, range);
            let arrival = Arrival::Damaged;
            return self.tell_target(TargetEvent::RunArrived { tag, image, range, arrival });
        }
        if header.kind == FrameKind::Described {
            let (write, looking) = self.look_up(session, &header, &frame.payload);
            return self.start_write(write, looking);
        }
        if header.kind == FrameKind::DescribedBlocks {
            let (write, looking) = self.look_up_blocks(session, &header, &frame.payload);
            return self.start_write(write, looking);
        }
        let left = match header.kind {
            FrameKind::Part => Left::Elsewhere(header.zero_mask),
            _ => Left::Nothing,
        };
        let versions = (header.kind != FrameKind::Zero).then(|| versions(&header, &frame.payload));
        let write = PendingWrite { session, tag, image, range, versions, left };
        self.start_write(write, 0);
    }
}

fn versions(header: &FrameHeader, payload: &[u8]) -> Vec<u64> {
    let mut blocks = payload.chunks_exact(BLOCK_SIZE as usize);
    let version = |nth| {
        if mask_bit(&header.zero_mask, nth) {
            return crate::disk::ZERO;
        }
        let block = blocks.next().unwrap_or(&[0; 8]);
        u64::from_le_bytes(std::array::from_fn(|byte| block[byte]))
    };
    (0..header.range.len).map(version).collect()
}
