//! Runs seeds until the time is over: `cargo run -p dray-sim --example soak -- --minutes 10`.

use std::time::Duration;

fn main() {
    let mut args = std::env::args().skip(1);
    let mut minutes = 1.0f64;
    let mut first = 1_000_000u64;
    while let Some(arg) = args.next() {
        let value = args.next();
        match (arg.as_str(), value) {
            ("--minutes", Some(value)) => minutes = value.parse().expect("minutes are a number"),
            ("--first", Some(value)) => first = value.parse().expect("a seed is a number"),
            _ => {
                eprintln!("usage: soak [--minutes N] [--first SEED]");
                std::process::exit(2);
            }
        }
    }
    match dray_sim::soak(first, Duration::from_secs_f64(minutes * 60.0)) {
        Ok(runs) => println!("{runs} seeds from {first} on, every invariant held"),
        Err(report) => {
            eprintln!("{report}");
            std::process::exit(1);
        }
    }
}
