//! Records of a trace a second through a whole replay: `replay_speed [SECONDS OF TRACE [ORDER]]`, in all
//! orders unless one is named. The trace is written as CSV first, so parsing it is a part of what is
//! measured.

use dray_engine::SECOND;
use dray_sim::replay::{Order, Settings, replay};
use dray_trace::generate::Load;
use dray_trace::{Reader, Writer};
use dray_types::Strategy;
use std::time::Instant;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let seconds: u64 = std::env::args().nth(1).map_or(Ok(8000), |text| text.parse())?;
    let only: Option<Order> = std::env::args().nth(2).map(|text| text.parse()).transpose()?;
    let path = std::env::temp_dir().join(format!("dray-replay-speed-{}.csv", std::process::id()));
    let spec = Load::FileServer.spec();
    let mut writer = Writer::create(&path)?;
    for record in spec.records(1).take_while(|record| record.time_ns < seconds * SECOND) {
        writer.write(&record)?;
    }
    writer.finish()?;
    for strategy in [Strategy::PreCopy, Strategy::PostCopy, Strategy::Hybrid] {
        for order in Order::ALL.into_iter().filter(|order| only.is_none_or(|only| only == *order)) {
            // So slow a link that the migration takes up most of the trace.
            let bandwidth = (spec.layout.disk + spec.memory) * 3 / 2 / seconds;
            let mut settings = Settings::new(strategy, order, spec.layout.disk, bandwidth);
            settings.memory = spec.memory;
            settings.start = seconds * SECOND / 20;
            let began = Instant::now();
            let outcome = replay(&settings, Reader::open(&path)?)?;
            let elapsed = began.elapsed().as_secs_f64();
            println!(
                "{strategy:<9} {order:<15} {:>9} records, {:>7} events, {:5.2} s: {:5.2} million \
                 records a second {}",
                outcome.records,
                outcome.events,
                elapsed,
                outcome.records as f64 / elapsed / 1e6,
                outcome.failed.unwrap_or_default()
            );
        }
    }
    std::fs::remove_file(&path)?;
    Ok(())
}
