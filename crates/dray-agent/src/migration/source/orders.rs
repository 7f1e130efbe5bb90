//! The orders in which blocks move: made of the images' heat while this host is the owner.

use super::SourceLoop;
use crate::api::Order;
use dray_engine::SourceEvent;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Pause between two orders: a guest's habits change more slowly.
const REFRESH: Duration = Duration::from_secs(1);

/// What the engine was last told.
#[derive(Default)]
pub struct Orders {
    told_at: Option<Instant>,
    /// Per image, accesses that were counted by then: without a new one the order is as it was.
    counted: BTreeMap<u16, u64>,
}

impl Orders {
    /// The guest may stop at any moment now: the next tick tells what is known until then.
    pub fn make_due(&mut self) {
        self.told_at = None;
    }
}

impl SourceLoop {
    /// Tells the engine again once a second. After the handover the guest's accesses are made
    /// elsewhere, and what is fetched first was said with the handover.
    pub(super) fn refresh_orders(&mut self) {
        if self.orders.told_at.is_none_or(|at| at.elapsed() >= REFRESH) {
            self.tell_orders();
        }
    }

    pub(super) fn tell_orders(&mut self) {
        let intent = self.slot.intent();
        let by_heat = intent.options.is_some_and(|options| options.order == Order::WorkloadAware);
        let copies = self.engine.as_ref().is_some_and(|engine| engine.owns() && !engine.is_over());
        if !by_heat || !copies {
            return;
        }
        self.orders.told_at = Some(Instant::now());
        let rate = self.engine.as_ref().map_or(0.0, |engine| engine.status().rate);
        let content = self.images.content();
        let (jump, nanos) = {
            let jumps = content.jumps();
            (jumps.blocks(rate), jumps.nanos())
        };
        let mut events = vec![SourceEvent::Jumps { nanos }];
        for (image, heat) in self.images.heats() {
            let counted = heat.counted();
            if self.orders.counted.insert(image.0, counted) != Some(counted) {
                let (copy, backfill) = heat.schedules(jump);
                events.push(SourceEvent::Schedule { image, copy, backfill });
            }
        }
        events.into_iter().for_each(|event| self.step(event));
    }
}
