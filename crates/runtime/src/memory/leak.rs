//! Detection of memory leaks from the memory of the process after each step. Invariant: memory that jumps, or moves and
//! returns, is not reported; memory that grows steadily by at least `LEAST_GROWTH` is.
//!
//! The detector compares readings at several time scales. On the first, a reading is that of one step; on each further
//! scale, it is the minimum of four readings of the scale before, so that a slow leak is found too, only later. On each
//! scale, the last `WINDOW` readings, cut into four blocks, are a leak if
//! - the minimum of every block is higher than that of the block before by a similar amount, together by
//!   `LEAST_GROWTH` and by `LEAST_RATIO` times the largest decrease seen so far: noise returns, a leak does not;
//! - every reading is higher than the one a block earlier, and no single step makes a main part of the growth: a few
//!   large allocations are no leak.

use plimsoll_graph::Bytes;
use serde::Serialize;
use std::collections::VecDeque;

/// Steps at the start that are ignored: buffers, caches and the stacks of threads reach their size.
const WARM_UP: u64 = 3;

/// Readings of a block.
const BLOCK: usize = 4;

/// Readings that are compared: four blocks.
const WINDOW: usize = 4 * BLOCK;

/// Scales: the last one compares readings of 4^4 steps each, over about 4000 steps.
const SCALES: usize = 5;

/// Least growth over the blocks of a window that is a leak.
const LEAST_GROWTH: Bytes = Bytes(8 << 20);

/// Least ratio of the growth to the largest decrease of memory so far.
const LEAST_RATIO: u64 = 3;

/// Least ratio of the growth from a block to the next one to the mean of this growth: a block with less is a plateau, as
/// between the stages of a start.
const EVEN: f64 = 0.4;

/// Detects growth of the memory of this process.
#[derive(Clone, Debug, Default)]
pub struct LeakDetector {
    steps: u64,
    scales: Vec<TimeScale>,
    leak: Option<Leak>,
}

/// Memory that grows with every step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Leak {
    /// Number of readings after which the leak was found.
    #[serde(rename = "found_after_steps")]
    pub found_after: u64,
    /// Mean growth for each step.
    pub bytes_per_step: u64,
}

/// Readings at one time scale.
#[derive(Clone, Debug, Default)]
struct TimeScale {
    /// The last readings, one more than the window.
    readings: VecDeque<u64>,
    /// Readings of the block that is not complete.
    block: Vec<u64>,
    /// Highest minimum of a block so far.
    highest: u64,
    /// Largest difference so far between `highest` and the minimum of a later block.
    decrease: u64,
}

impl LeakDetector {
    /// Adds the memory after a step, and returns the leak if this reading revealed it. Only the first leak of a run is
    /// returned; [`LeakDetector::leak`] still has it later.
    pub fn add(&mut self, memory: Bytes) -> Option<Leak> {
        self.steps += 1;
        if self.steps <= WARM_UP {
            return None;
        }
        let mut reading = memory.0;
        for scale in 0..SCALES {
            if scale == self.scales.len() {
                self.scales.push(TimeScale::default());
            }
            let steps_of_reading = (BLOCK as u64).pow(scale as u32);
            let (growth, minimum) = self.scales[scale].add(reading);
            if let (Some(growth), None) = (growth, self.leak) {
                // Between the first and the last of four blocks lie three blocks.
                let bytes_per_step = growth / (3 * BLOCK as u64 * steps_of_reading);
                self.leak = Some(Leak { found_after: self.steps, bytes_per_step });
                return self.leak;
            }
            match minimum {
                Some(minimum) => reading = minimum,
                None => break,
            }
        }
        None
    }

    /// The leak that was found.
    pub fn leak(&self) -> Option<Leak> {
        self.leak
    }
}

impl TimeScale {
    /// Adds a reading. Returns the growth over the window if it is a leak, and the minimum of the block that the reading
    /// completes.
    fn add(&mut self, reading: u64) -> (Option<u64>, Option<u64>) {
        self.readings.push_back(reading);
        if self.readings.len() > WINDOW + 1 {
            self.readings.pop_front();
        }
        let growth = self.growth();
        self.block.push(reading);
        if self.block.len() < BLOCK {
            return (growth, None);
        }
        let minimum = self.block.drain(..).min();
        if let Some(minimum) = minimum {
            self.highest = self.highest.max(minimum);
            self.decrease = self.decrease.max(self.highest - minimum);
        }
        (growth, minimum)
    }

    /// The growth over the window if it is a leak.
    fn growth(&self) -> Option<u64> {
        if self.readings.len() <= WINDOW {
            return None;
        }
        // The minimum with the next reading removes peaks of one reading, such as the buffers of a checkpoint.
        let readings: Vec<u64> =
            self.readings.iter().zip(self.readings.iter().skip(1)).map(|(&a, &b)| a.min(b)).collect();
        let minima: Vec<u64> = readings.chunks(BLOCK).filter_map(|block| block.iter().copied().min()).collect();
        let growth = minima.last()?.checked_sub(*minima.first()?)?;
        if growth < LEAST_GROWTH.0.max(LEAST_RATIO * self.decrease) {
            return None;
        }
        // Four blocks have three steps from one to the next.
        let least_growth = (EVEN * growth as f64 / 3.0) as u64;
        let blocks_grow = all_grow(&minima, &minima[1..], least_growth);
        let readings_grow = all_grow(&readings, &readings[BLOCK..], least_growth);
        let largest_step =
            readings.iter().zip(&readings[1..]).map(|(&from, &to)| to.saturating_sub(from)).max();
        (blocks_grow && readings_grow && largest_step? <= growth / 3).then_some(growth)
    }
}

/// Whether every reading of `later` is at least `least` bytes above the one at its place in `earlier`.
fn all_grow(earlier: &[u64], later: &[u64], least: u64) -> bool {
    earlier.iter().zip(later).all(|(&from, &to)| to.saturating_sub(from) >= least)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: f64 = (1 << 20) as f64;

    /// Pseudo-random numbers from 0 to 1.
    struct Random(u64);

    impl Random {
        fn next(&mut self) -> f64 {
            // xorshift64* of Vigna.
            self.0 ^= self.0 >> 12;
            self.0 ^= self.0 << 25;
            self.0 ^= self.0 >> 27;
            (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11) as f64 / (1u64 << 53) as f64
        }

        /// A sample of about the normal distribution.
        fn normal(&mut self) -> f64 {
            (0..12).map(|_| self.next()).sum::<f64>() - 6.0
        }
    }

    /// Memory of a process without a leak, in MiB: a random walk that returns, jitter, five jumps of up to 64 MiB, and
    /// peaks of one step in fifty.
    fn steady(seed: u64, steps: usize) -> Vec<f64> {
        let mut random = Random(0x9e37_79b9_7f4a_7c15 ^ (seed + 1));
        let (mut walk, mut level) = (0.0, 300.0);
        let jumps: Vec<(usize, f64)> =
            (0..5).map(|_| ((random.next() * 1000.0) as usize, random.next() * 64.0)).collect();
        let mut reading = |step| {
            walk = 0.95 * walk + 0.3 * random.normal();
            level += jumps.iter().filter(|(at, _)| *at == step).map(|(_, by)| by).sum::<f64>();
            let peak = if random.next() < 0.02 { 50.0 * random.next() } else { 0.0 };
            level + walk + 0.3 * random.normal().abs() + peak
        };
        (0..steps).map(&mut reading).collect()
    }

    /// The leak that is found in readings in MiB.
    fn found(readings: impl IntoIterator<Item = f64>) -> Option<Leak> {
        let mut detector = LeakDetector::default();
        let first = readings.into_iter().find_map(|mib| detector.add(Bytes((mib * MIB) as u64)));
        assert_eq!(first, detector.leak());
        first
    }

    #[test]
    fn a_thousand_steady_steps_have_no_leak() {
        for seed in 0..300 {
            assert_eq!(found(steady(seed, 1000)), None, "seed {seed}");
        }
    }

    #[test]
    fn a_leak_of_a_megabyte_is_found_within_twenty_steps() {
        let noise = |seed: u64| {
            let mut random = Random(0x5851_f42d_4c95_7f2d ^ (seed + 1));
            move || 0.1 * random.normal()
        };
        for seed in 0..100 {
            for start in [0, 1, 7, 50, 333] {
                let mut noise = noise(seed);
                let leak =
                    found((0..start + 20).map(|step: u64| 300.0 + noise() + step.saturating_sub(start) as f64));
                let leak = leak.unwrap_or_else(|| panic!("seed {seed}, from step {start}"));
                let rate = leak.bytes_per_step as f64 / MIB;
                assert!(leak.found_after <= start + 20 && (0.6..1.4).contains(&rate), "{leak:?}");
            }
        }
    }

    #[test]
    fn slower_leaks_are_found_later() {
        for (rate, most) in [(0.25, 80), (0.06, 320), (0.016, 1280)] {
            let leak = found((0..4000).map(|step| 300.0 + rate * f64::from(step))).expect("a leak");
            assert!(leak.found_after <= most, "{rate}: {leak:?}");
            assert!((leak.bytes_per_step as f64 / MIB / rate - 1.0).abs() < 0.1, "{rate}: {leak:?}");
        }
        // 4 KiB a step stay below the least growth of every window.
        assert_eq!(found((0..2000).map(|step| 300.0 + 0.004 * f64::from(step))), None);
    }

    #[test]
    fn growth_that_ends_is_no_leak() {
        let check = |name: &str, readings: Vec<f64>| assert_eq!(found(readings), None, "{name}");
        check("constant", vec![300.0; 1000]);
        check("a jump", (0..1000).map(|step| if step < 500 { 300.0 } else { 900.0 }).collect());
        let evaluations = |step: u32| 300.0 + f64::from((step / 10).min(2)) * 20.0;
        check("stages of a start", (0..1000).map(evaluations).collect());
        check("a saw", (0..1000).map(|step: u32| 300.0 + f64::from(step % 12)).collect());
        check("warm-up", (0..1000).map(|step: u32| 300.0 + 100.0 * f64::from(step.min(3))).collect());
        check("falls", (0..1000).map(|step: u32| 3000.0 - f64::from(step)).collect());
    }
}
