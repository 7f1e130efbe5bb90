//! Decides which options of a migration a strategy uses.

use super::options::{HotSet, Throttle, Tuning};
use super::{ErrorKind, Refusal};
use dray_types::{BLOCK_SIZE, Choice, Strategy};

/// Whether `strategy` uses everything that was asked for.
///
/// # Errors
/// `Invalid`, naming the first option that it does not use.
pub fn check(tuning: &Tuning, strategy: Strategy) -> Result<(), Refusal> {
    if tuning.throttle != Throttle::None && !strategy.traits().syncs {
        let why = format!("{strategy} sends no block again before the handover");
        return Err(refused("--throttle", strategy, &why)
            .hint("leave --throttle out, or use pre-copy, mirror or hot-set"));
    }
    let copies = strategy.traits().copies;
    if tuning.max_added_latency_ms.is_some() && !copies {
        let why = format!("{strategy} copies nothing while the guest runs at the source");
        return Err(refused("--max-added-latency", strategy, &why)
            .hint("leave it out, or limit the rate with --bandwidth"));
    }
    if tuning.max_added_latency_ms.is_some_and(|ms| !(0.001..=60_000.0).contains(&ms)) {
        let why = "it is not a time from a microsecond to a minute";
        let what = "cannot use this --max-added-latency";
        return Err(Refusal::new(ErrorKind::Invalid, what, why));
    }
    if let Some(hot_set) = &tuning.hot_set {
        if strategy.traits().choice != Choice::Hot {
            let why = "only hot-set chooses blocks by the guest's accesses";
            return Err(refused("options of hot-set", strategy, why).hint(
                "leave --observe, --threshold, --segment, --read-weight and --handover-size \
                 out, or use --strategy hot-set",
            ));
        }
        check_hot_set(hot_set)?;
    }
    Ok(())
}

fn check_hot_set(hot_set: &HotSet) -> Result<(), Refusal> {
    let wrong = |option: &str, why: &str| {
        Err(Refusal::new(ErrorKind::Invalid, format!("cannot use this {option}"), why))
    };
    if !(0.0..=1.0).contains(&hot_set.read_weight) {
        return wrong("--read-weight", "it is not between 0 and 1");
    }
    if hot_set.threshold.is_nan() || hot_set.threshold < 0.0 {
        return wrong("--threshold", "it is not a number from 0 on");
    }
    if hot_set.segment == 0 || !hot_set.segment.is_multiple_of(BLOCK_SIZE) {
        return wrong("--segment", "it is not a multiple of 4 KiB");
    }
    Ok(())
}

fn refused(option: &str, strategy: Strategy, why: &str) -> Refusal {
    Refusal::new(ErrorKind::Invalid, format!("cannot use {option} with {strategy}"), why)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_strategy_uses_is_accepted() {
        let slowed = Tuning { throttle: Throttle::Soft, ..Tuning::default() };
        for strategy in [Strategy::PreCopy, Strategy::Mirror, Strategy::HotSet] {
            check(&slowed, strategy).unwrap();
        }
        for strategy in [Strategy::PostCopy, Strategy::Hybrid, Strategy::Deferred] {
            let error = check(&slowed, strategy).unwrap_err();
            assert_eq!(error.kind, ErrorKind::Invalid);
            assert!(error.what.contains("--throttle") && error.hint.is_some(), "{error:?}");
            check(&Tuning::default(), strategy).unwrap();
        }
        let hot = Tuning { hot_set: Some(HotSet::default()), ..Tuning::default() };
        check(&hot, Strategy::HotSet).unwrap();
        let error = check(&hot, Strategy::PreCopy).unwrap_err();
        assert!(error.hint.is_some_and(|hint| hint.contains("--observe")));
    }

    #[test]
    fn what_makes_no_sense_is_refused_by_name() {
        let what = |hot_set: HotSet| {
            let tuning = Tuning { hot_set: Some(hot_set), ..Tuning::default() };
            check(&tuning, Strategy::HotSet).unwrap_err().what
        };
        let wrong = HotSet { read_weight: 1.5, ..HotSet::default() };
        assert!(what(wrong).contains("--read-weight"));
        assert!(what(HotSet { threshold: -1.0, ..HotSet::default() }).contains("--threshold"));
        assert!(what(HotSet { segment: 5000, ..HotSet::default() }).contains("--segment"));
        assert!(what(HotSet { segment: 0, ..HotSet::default() }).contains("--segment"));
        let paced = Tuning { max_added_latency_ms: Some(2.0), ..Tuning::default() };
        check(&paced, Strategy::Hybrid).unwrap();
        assert!(check(&paced, Strategy::PostCopy).unwrap_err().hint.is_some());
        for wrong in [0.0, -1.0, f64::NAN, 1e9] {
            let tuning = Tuning { max_added_latency_ms: Some(wrong), ..Tuning::default() };
            let what = check(&tuning, Strategy::Hybrid).unwrap_err().what;
            assert!(what.contains("--max-added-latency"), "{what}");
        }
    }
}
