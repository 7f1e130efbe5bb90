//! Spearman's rank correlation.

/// Correlation of the ranks of two equally long lists, equal values sharing the mean of their
/// ranks; none when one of them has no order at all.
pub fn spearman(one: &[u64], two: &[u64]) -> Option<f64> {
    pearson(&ranks(one), &ranks(two))
}

fn ranks(values: &[u64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_unstable_by_key(|&at| values[at]);
    let mut ranks = vec![0.0; values.len()];
    let mut first = 0;
    while first < order.len() {
        let value = values[order[first]];
        let equal = order[first..].iter().take_while(|&&at| values[at] == value).count();
        // The ranks are first + 1 to first + equal.
        let shared = first as f64 + (equal + 1) as f64 / 2.0;
        for &at in &order[first..first + equal] {
            ranks[at] = shared;
        }
        first += equal;
    }
    ranks
}

fn pearson(one: &[f64], two: &[f64]) -> Option<f64> {
    let count = one.len() as f64;
    let mean = |values: &[f64]| values.iter().sum::<f64>() / count;
    let (mean_one, mean_two) = (mean(one), mean(two));
    let (mut both, mut var_one, mut var_two) = (0.0, 0.0, 0.0);
    for (a, b) in one.iter().zip(two) {
        let (a, b) = (a - mean_one, b - mean_two);
        both += a * b;
        var_one += a * a;
        var_two += b * b;
    }
    (var_one > 0.0 && var_two > 0.0).then(|| both / (var_one * var_two).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(value: Option<f64>, wanted: f64) {
        assert!((value.unwrap() - wanted).abs() < 1e-9, "{value:?} {wanted}");
    }

    #[test]
    fn orders() {
        near(spearman(&[1, 2, 3, 4], &[10, 20, 30, 400]), 1.0);
        near(spearman(&[1, 2, 3, 4], &[4, 3, 2, 1]), -1.0);
        // 1 - 6 Σd² ÷ n(n² - 1) with d = (1, 1, 1, 1): no equal values, so the short formula holds.
        near(spearman(&[1, 2, 3, 4], &[2, 1, 4, 3]), 1.0 - 6.0 * 4.0 / (4.0 * 15.0));
        assert_eq!(spearman(&[1, 1], &[1, 2]), None);
        assert_eq!(spearman(&[], &[]), None);
    }

    #[test]
    fn equal_values_share_their_ranks() {
        assert_eq!(ranks(&[7, 1, 7, 7]), [3.0, 1.0, 3.0, 3.0]);
    }
}
