//! The source's journal, and what becomes of a step whose record cannot be written.

use crate::faults::Crash;
use crate::state::source::SourceHost;
use crate::world::{World, note};
use dray_engine::record::Unrecorded;
use dray_engine::{SECOND, SourceEffect, SourceEvent, SourceRecord};
use dray_types::{Epoch, ErrorKind};

impl SourceHost {
    fn look_who_owns(&mut self) {
        let word = |record: &SourceRecord| match record {
            SourceRecord::HandedOver(_) => Some(true),
            SourceRecord::TakenBack { .. } => Some(false),
            _ => None,
        };
        self.handed_over = self.records.iter().rev().find_map(word).unwrap_or(false);
    }
}

impl World {
    /// Appends a record, or does what a failure of that asks for; how long that takes.
    pub(crate) fn source_journal(&mut self, record: SourceRecord, spoiled: Option<Crash>) -> u64 {
        note!(self, "source -> Journal {record:?}");
        let fails =
            spoiled == Some(Crash::Unrecorded) || self.faulty(self.setup.faults.record_fails);
        let unsure = spoiled == Some(Crash::Unsure) || self.faulty(self.setup.faults.record_unsure);
        if !fails && !unsure {
            self.forget_unsure();
            self.recorded(record);
            return 0;
        }
        note!(self, "source: that fails{}", if unsure { ", or not" } else { "" });
        self.forget_unsure();
        if unsure && self.rng.chance(0.5) {
            self.source.unsure = true;
            self.recorded(record.clone());
        }
        match record.unrecorded() {
            Unrecorded::GoesOn => 0,
            Unrecorded::Ends if !unsure => {
                self.source.effects.clear();
                if matches!(record, SourceRecord::HandedOver(_)) {
                    // The one way back to an epoch that was never left.
                    let epoch = self.source.machine.epoch();
                    self.check.source_reborn(Epoch(epoch.0 - 1));
                }
                let why = "no space left on device".to_owned();
                self.source_event(SourceEvent::NotRecorded {
                    record,
                    kind: ErrorKind::NoSpace,
                    why,
                });
                0
            }
            _ => {
                self.source.effects.push_front(SourceEffect::Journal(record));
                SECOND
            }
        }
    }

    /// Before anything is appended the journal is written anew without a record that may be there.
    fn forget_unsure(&mut self) {
        if std::mem::take(&mut self.source.unsure) {
            self.source.records.pop();
            self.source.look_who_owns();
        }
    }

    fn recorded(&mut self, record: SourceRecord) {
        self.check_source_record(&record);
        self.source.records.push(record);
        self.source.look_who_owns();
    }
}
