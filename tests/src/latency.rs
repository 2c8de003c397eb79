//! How long requests took: a histogram with bounded relative error and constant memory, so that a load
//! generator can record every request of a run. Measures nothing itself.

use std::time::Duration;

/// Buckets a power of two is split into; the relative error of a percentile is at most 1/16.
const SUB_BUCKETS: usize = 16;
/// log2 of [`SUB_BUCKETS`].
const SUB_BITS: u32 = 4;
/// Powers of two covered: up to 2^40 ns, some 18 minutes; longer ones land in the last bucket.
const OCTAVES: usize = 36;

/// Counts of durations in logarithmic buckets, and the exact maximum.
#[derive(Clone, Debug)]
pub struct Latency {
    buckets: Vec<u64>,
    count: u64,
    max: u64,
}

impl Default for Latency {
    fn default() -> Self {
        Self {
            buckets: vec![0; SUB_BUCKETS * (OCTAVES + 1)],
            count: 0,
            max: 0,
        }
    }
}

impl Latency {
    /// Adds one duration.
    pub fn record(&mut self, took: Duration) {
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.count += 1;
        self.max = self.max.max(nanos);
        let last = self.buckets.len() - 1;
        self.buckets[bucket_of(nanos).min(last)] += 1;
    }

    /// Adds every duration of `other`.
    pub fn merge(&mut self, other: &Self) {
        for (mine, theirs) in self.buckets.iter_mut().zip(&other.buckets) {
            *mine += theirs;
        }
        self.count += other.count;
        self.max = self.max.max(other.max);
    }

    /// Durations recorded.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The longest one.
    pub fn max(&self) -> Duration {
        Duration::from_nanos(self.max)
    }

    /// The duration that `per_mille` of 1000 requests did not exceed, rounded up to its bucket's end;
    /// zero when nothing was recorded.
    pub fn percentile(&self, per_mille: u64) -> Duration {
        let rank = (self.count * per_mille).div_ceil(1000).max(1);
        let mut seen = 0;
        for (bucket, count) in self.buckets.iter().enumerate() {
            seen += count;
            if seen >= rank {
                return Duration::from_nanos(upper_bound(bucket).min(self.max));
            }
        }
        Duration::ZERO
    }
}

/// Values below 16 have a bucket each; above, the top five bits select it.
fn bucket_of(nanos: u64) -> usize {
    if nanos < SUB_BUCKETS as u64 {
        return nanos as usize;
    }
    let shift = nanos.ilog2() - SUB_BITS;
    SUB_BUCKETS * shift as usize + (nanos >> shift) as usize
}

/// The largest value that lands in `bucket`.
fn upper_bound(bucket: usize) -> u64 {
    if bucket < 2 * SUB_BUCKETS {
        return bucket as u64;
    }
    let shift = bucket / SUB_BUCKETS - 1;
    let top = (bucket % SUB_BUCKETS + SUB_BUCKETS) as u64;
    ((top + 1) << shift) - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_lies_within_its_bucket_and_a_sixteenth_of_its_bound() {
        for nanos in (0..4096).chain((0..40).map(|shift| (1u64 << shift) + 1)) {
            let bucket = bucket_of(nanos);
            let upper = upper_bound(bucket);
            assert!(
                nanos <= upper,
                "{nanos} above bucket {bucket} ending at {upper}"
            );
            assert!(
                upper - nanos <= nanos / 16,
                "{nanos} in bucket ending at {upper}"
            );
            assert_eq!(bucket_of(upper), bucket);
            assert_eq!(bucket_of(upper + 1), bucket + 1);
        }
    }

    #[test]
    fn percentiles_of_a_known_distribution() {
        let mut latency = Latency::default();
        for micros in 1..=1000 {
            latency.record(Duration::from_micros(micros));
        }
        let p50 = latency.percentile(500).as_nanos();
        assert!((500_000..=500_000 * 17 / 16).contains(&p50), "{p50}");
        let p99 = latency.percentile(990).as_nanos();
        assert!((990_000..=990_000 * 17 / 16).contains(&p99), "{p99}");
        assert_eq!(latency.max(), Duration::from_millis(1));
        assert_eq!(latency.count(), 1000);
    }

    #[test]
    fn nothing_recorded_gives_zero_and_merging_adds_up() {
        let mut empty = Latency::default();
        assert_eq!(empty.percentile(990), Duration::ZERO);
        let mut one = Latency::default();
        one.record(Duration::from_hours(1));
        empty.merge(&one);
        assert_eq!(empty.count(), 1);
        assert_eq!(empty.max(), Duration::from_hours(1));
    }
}
