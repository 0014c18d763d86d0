//! Several drives that should be ready at the same time.

/// Reads in flight of each drive: `each` on average, in proportion to their rates, and at least half of `each`: the
/// slowest of drives too gives more when it has several.
pub(super) fn shares(rates: &[f64], each: usize) -> Vec<usize> {
    let each = each.max(1);
    let least = each.div_ceil(2);
    let mut shares = vec![least; rates.len()];
    // What the others are given in proportion is what those with the least leave.
    let mut open: Vec<usize> = (0..rates.len()).collect();
    let mut total = rates.len() * each;
    let exact = loop {
        let sum: f64 = open.iter().map(|&drive| rates[drive]).sum();
        let part = |drive: usize| if sum > 0.0 { rates[drive] / sum } else { 1.0 / open.len() as f64 };
        let exact: Vec<(usize, f64)> =
            open.iter().map(|&drive| (drive, part(drive) * total as f64)).collect();
        let (more, few): (Vec<_>, Vec<_>) = exact.iter().partition(|(_, exact)| *exact >= least as f64);
        if few.is_empty() {
            break exact;
        }
        total -= few.len() * least;
        open = more.into_iter().map(|(drive, _)| drive).collect();
    };
    exact.iter().for_each(|&(drive, exact)| shares[drive] = exact as usize);
    // What rounding down left goes to those who lost the most by it.
    let given: usize = exact.iter().map(|&(drive, _)| shares[drive]).sum();
    for _ in given..total {
        let lost = |&&(drive, exact): &&(usize, f64)| exact - shares[drive] as f64;
        let most = exact.iter().max_by(|a, b| lost(a).total_cmp(&lost(b)).then(b.0.cmp(&a.0)));
        most.into_iter().for_each(|&(drive, _)| shares[drive] += 1);
    }
    shares
}

/// The order in which reads are issued, as positions in `reads` (drive and bytes of each, the most wanted first): next
/// is always one of the drive that has the most left to do, in seconds. While there are buffers for some of the reads
/// only, the slow drive then has its own first, and is not still reading when the others are done. On a drive the
/// most wanted comes first.
pub(super) fn order(reads: &[(usize, u64)], rates: &[f64]) -> Vec<usize> {
    let mut left = vec![0.0; rates.len()];
    for &(drive, bytes) in reads {
        left[drive] += bytes as f64 / rates[drive].max(f64::MIN_POSITIVE);
    }
    let mut queues = vec![Vec::new(); rates.len()];
    for (at, &(drive, _)) in reads.iter().enumerate().rev() {
        queues[drive].push(at);
    }
    let mut order = Vec::with_capacity(reads.len());
    while order.len() < reads.len() {
        let waiting = (0..rates.len()).filter(|&drive| !queues[drive].is_empty());
        // Of equals the one whose read is wanted more.
        let busiest = waiting.max_by(|&a, &b| {
            left[a].total_cmp(&left[b]).then_with(|| queues[b].last().cmp(&queues[a].last()))
        });
        let Some(drive) = busiest else { break };
        if let Some(at) = queues[drive].pop() {
            left[drive] -= reads[at].1 as f64 / rates[drive].max(f64::MIN_POSITIVE);
            order.push(at);
        }
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_in_flight_follow_the_rates() {
        let check = |rates: &[f64], each, expected: &[usize]| assert_eq!(shares(rates, each), expected);
        check(&[1.0], 6, &[6]);
        check(&[5e9], 6, &[6]);
        check(&[1.0, 1.0], 6, &[6, 6]);
        check(&[3.0, 1.0], 6, &[9, 3]);
        check(&[2.0, 1.0], 4, &[5, 3]);
        check(&[100.0, 1.0], 6, &[9, 3]);
        check(&[8.0, 1.0, 1.0], 4, &[8, 2, 2]);
        check(&[8.0, 3.0, 1.0], 4, &[7, 3, 2]);
        check(&[1e9, 1e-9, 1.0], 2, &[4, 1, 1]);
        check(&[1.0, 7.0], 1, &[1, 1]);
        check(&[0.0, 0.0], 3, &[3, 3]);
        check(&[], 6, &[]);
    }

    #[test]
    fn order_keeps_the_rank_on_a_drive() {
        let check = |reads: &[(usize, u64)], rates: &[f64], expected: &[usize]| {
            assert_eq!(order(reads, rates), expected, "{reads:?} {rates:?}");
        };
        check(&[(0, 5); 4], &[1.0], &[0, 1, 2, 3]);
        check(&[(0, 5), (0, 5), (0, 5), (1, 5), (1, 5)], &[1.0, 1.0], &[0, 1, 3, 2, 4]);
        // Equal work: one of each, the more wanted first; the slow drive then has its share for three of the other.
        check(&[(0, 1), (0, 1), (0, 1), (1, 1)], &[3.0, 1.0], &[0, 3, 1, 2]);
        check(&[(0, 1), (0, 1), (0, 1), (1, 1)], &[3.0, 0.9], &[3, 0, 1, 2]);
        check(&[], &[1.0, 2.0], &[]);
        // A drive that nothing is known of does not divide by zero.
        check(&[(0, 1), (1, 1)], &[0.0, 1.0], &[0, 1]);
    }

    /// Two drives and a few buffers, each of which is handed on when its read is done: the time until all is read,
    /// counted in steps of the faster drive.
    fn makespan(reads: &[(usize, u64)], order: &[usize], steps: &[u64], buffers: usize) -> u64 {
        let mut free_at = vec![0; steps.len()];
        let mut buffers = vec![0_u64; buffers];
        let mut end = 0;
        for &at in order {
            // The buffer that is free first; then the drive, one read after the other.
            let buffer = buffers.iter_mut().min().unwrap();
            let drive = reads[at].0;
            let done = free_at[drive].max(*buffer) + steps[drive];
            (free_at[drive], *buffer) = (done, done);
            end = end.max(done);
        }
        end
    }

    /// Whatever order experts are wanted in, drives end together: no later than the busier of them needs alone, and
    /// one read more.
    #[test]
    fn drives_end_together() {
        let check = |pattern: &[usize], steps: [u64; 2]| {
            let reads: Vec<(usize, u64)> = pattern.iter().map(|&drive| (drive, 100)).collect();
            let alone = |drive| steps[drive] * pattern.iter().filter(|d| **d == drive).count() as u64;
            let bound = alone(0).max(alone(1));
            let rates = steps.map(|steps| 1.0 / steps as f64);
            let found = makespan(&reads, &order(&reads, &rates), &steps, 4);
            assert!(found <= bound + steps[0].max(steps[1]), "{pattern:?} {steps:?}: {found}, bound {bound}");
            let wanted: Vec<usize> = (0..reads.len()).collect();
            (found, makespan(&reads, &wanted, &steps, 4))
        };
        let half = |first: usize| -> Vec<usize> { (0..16).map(|i| (i / 8 + first) % 2).collect() };
        let alternating: Vec<usize> = (0..16).map(|i| i % 2).collect();
        let mostly: Vec<usize> = (0..16).map(|i| usize::from(i >= 12)).collect();
        for pattern in [half(0), half(1), alternating, mostly] {
            for steps in [[1, 1], [1, 3], [3, 1], [1, 2]] {
                check(&pattern, steps);
            }
        }
        // As wanted, the fast drive takes all buffers first and the slow one begins late.
        let (balanced, wanted) = check(&mostly_slow(), [1, 3]);
        assert!(balanced < wanted, "{balanced} steps, {wanted} as wanted");
    }

    fn mostly_slow() -> Vec<usize> {
        (0..16).map(|i| usize::from(i >= 11)).collect()
    }
}
