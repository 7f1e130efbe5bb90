//! The orders in which blocks move: made of the images' heat while this host is the owner.

use super::SourceLoop;
use dray_api::Order;
use dray_engine::SourceEvent;
use dray_engine::refresh::Refresh;
use std::collections::BTreeMap;

/// What the engine was last told.
#[derive(Default)]
pub struct Orders {
    refresh: Refresh,
    /// Per image, accesses that were counted by then: without a new one the order is as it was.
    counted: BTreeMap<u16, u64>,
}

impl Orders {
    /// The guest may stop at any moment now: the next tick tells what is known until then, also for what
    /// is fetched after it.
    pub fn make_due(&mut self) {
        self.refresh.ends();
        self.counted.clear();
    }
}

impl SourceLoop {
    /// Tells the engine again when it is due. After the handover the guest's accesses are made
    /// elsewhere, and what is fetched first was said with the handover.
    pub(super) fn refresh_orders(&mut self) {
        let sent = self.engine.as_ref().map_or(0, |engine| engine.status().blocks_sent);
        if self.orders.refresh.is_due(self.clock.now(), sent, self.images.blocks()) {
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
        let Some(status) = self.engine.as_ref().map(|engine| engine.status()) else { return };
        self.orders.refresh.made(self.clock.now(), status.blocks_sent);
        let content = self.images.content();
        let (jump, nanos) = {
            let jumps = content.jumps();
            (jumps.blocks(status.rate), jumps.nanos())
        };
        let mut events = vec![SourceEvent::Jumps { nanos }];
        for (image, heat) in self.images.heats() {
            let counted = heat.counted();
            if self.orders.counted.insert(image.0, counted) != Some(counted) {
                let copy = heat.copy_schedule(jump);
                // Without a guest's memory to move the handover may follow at once.
                let backfill = Some(heat.backfill_schedule(jump));
                events.push(SourceEvent::Schedule { image, copy, backfill });
            }
        }
        events.into_iter().for_each(|event| self.step(event));
    }
}
