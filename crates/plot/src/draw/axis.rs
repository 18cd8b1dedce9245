//! Linear scales from 0 to coordinates, their ticks, and the format of counts and lengths. The axis of the values of a chart
//! of training runs, which need not begin at 0 and can be logarithmic, is `plimsoll_train::charts::Axis`: the report draws it
//! too. Invariant: ticks are multiples of 1, 2 or 5 times a power of ten, from 0 to at most the end of the scale, and their
//! labels are exact.

/// Linear map of the numbers from 0 to `end` to coordinates.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinearScale {
    /// Coordinate of 0.
    pub from: f64,
    /// Coordinate of `end`.
    pub to: f64,
    /// Largest number.
    pub end: f64,
}

impl LinearScale {
    /// Coordinate of `number`.
    pub fn at(&self, number: f64) -> f64 {
        self.from + (self.to - self.from) * (number / self.end.max(f64::MIN_POSITIVE))
    }

    /// Ticks from 0 to at most `end`: at most `max_ticks` after 0.
    pub fn ticks(&self, max_ticks: u64) -> Vec<u64> {
        let end = self.end as u64;
        let step = round_step(end, max_ticks);
        (0..=end / step).map(|n| n * step).collect()
    }
}

/// The smallest step of the form 1, 2 or 5 times a power of ten with at most `max_ticks` multiples up to `end`.
fn round_step(end: u64, max_ticks: u64) -> u64 {
    let mut power = 1_u64;
    loop {
        for factor in [1, 2, 5] {
            let step = power.saturating_mul(factor);
            if end / step <= max_ticks.max(1) {
                return step;
            }
        }
        power = power.saturating_mul(10);
    }
}

/// Labels of ticks along a sequence, all in one unit, which only the last label shows.
pub fn base_labels(ticks: &[u64]) -> Vec<String> {
    let last = ticks.last().copied().unwrap_or(0);
    let step = ticks.get(1).copied().unwrap_or(last);
    let (unit, name) = unit(last);
    // A step has one nonzero digit, so a finite number of decimals makes every label exact.
    let decimals = (0..).find(|&d| step.saturating_mul(10_u64.pow(d)) % unit == 0).unwrap_or(0) as usize;
    let mut labels: Vec<String> = ticks
        .iter()
        .map(|&tick| match tick {
            0 => "0".to_owned(),
            _ => format!("{:.decimals$}", tick as f64 / unit as f64),
        })
        .collect();
    if let Some(label) = labels.last_mut() {
        label.push(' ');
        label.push_str(name);
    }
    labels
}

/// Formats a length with three significant digits: `362 bp`, `48.2 kb`, `1.25 Mb`.
pub fn bases(length: u64) -> String {
    let (unit, name) = unit(length);
    let number = length as f64 / unit as f64;
    let decimals = match (unit, number) {
        (1, _) => 0,
        (_, n) if n < 9.995 => 2,
        (_, n) if n < 99.95 => 1,
        (_, _) => 0,
    };
    format!("{number:.decimals$} {name}")
}

/// Returns the unit in which a length of `length` bases is shown: the number of bases in the unit, and its name.
fn unit(length: u64) -> (u64, &'static str) {
    match length {
        0..1000 => (1, "bp"),
        1000..1_000_000 => (1000, "kb"),
        _ => (1_000_000, "Mb"),
    }
}

/// Formats a number in groups of three digits, separated by no-break spaces: `12 345`.
pub fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.char_indices() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push('\u{a0}');
        }
        text.push(digit);
    }
    text
}

/// Formats a number with a noun: `1 record`, `2 records`.
pub fn counted(number: u64, what: &str) -> String {
    format!("{} {what}{}", count(number), if number == 1 { "" } else { "s" })
}

/// Formats a fraction in percent. Only exact values give `0 %` and `100 %`.
pub fn percent(part: u64, all: u64) -> String {
    match (part, all) {
        (_, 0) => "0 %".to_owned(),
        (part, all) if part == all || part == 0 => format!("{} %", 100 * part / all),
        (part, all) => {
            let percent = 100.0 * part as f64 / all as f64;
            match percent {
                p if p < 0.1 => "<0.1 %".to_owned(),
                p if p > 99.9 => ">99.9 %".to_owned(),
                p => format!("{p:.1} %"),
            }
        }
    }
}

/// Formats a score or a threshold with at most three decimals, without trailing zeros.
pub fn score(score: f64) -> String {
    let text = format!("{score:.3}");
    let short = text.trim_end_matches('0');
    short.strip_suffix('.').unwrap_or(short).to_owned()
}

/// Separates labels that would overlap. `places` are their centres in ascending order, `gaps` their sizes.
/// Moves the centres, in a forward and a backward pass, so that labels do not overlap and lie between `low` and
/// `high` if they fit there.
pub fn separate_labels(places: &mut [f64], gaps: &[f64], low: f64, high: f64) {
    let mut end_before = low;
    for (place, gap) in places.iter_mut().zip(gaps) {
        *place = place.max(end_before + gap / 2.0);
        end_before = *place + gap / 2.0;
    }
    // The forward pass may have pushed the last labels beyond `high`; the backward pass moves them and those before them back.
    let mut start_after = high;
    for (place, gap) in places.iter_mut().zip(gaps).rev() {
        *place = place.min(start_after - gap / 2.0);
        start_after = *place - gap / 2.0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bases_land_where_they_belong() {
        let scale = LinearScale { from: 30.0, to: 430.0, end: 1000.0 };
        for (base, wanted) in [(0.0, 30.0), (250.0, 130.0), (500.0, 230.0), (1000.0, 430.0)] {
            assert_eq!(scale.at(base), wanted, "{base}");
        }
    }

    fn check(end: u64, most: u64, wanted: &str) {
        let ticks = LinearScale { from: 0.0, to: 1.0, end: end as f64 }.ticks(most);
        assert_eq!(base_labels(&ticks).join("|"), wanted, "{end}");
    }

    #[test]
    fn ticks_are_round_and_their_labels_exact() {
        check(5, 6, "0|1|2|3|4|5 bp");
        check(362, 6, "0|100|200|300 bp");
        check(501, 2, "0|200|400 bp");
        check(1090, 4, "0|0.5|1.0 kb");
        check(5386, 6, "0|1|2|3|4|5 kb");
        check(48_175, 6, "0|10|20|30|40 kb");
        check(1_250_000, 4, "0|0.5|1.0 Mb");
        check(1_250_000, 6, "0|0.2|0.4|0.6|0.8|1.0|1.2 Mb");
        check(50_000_000, 6, "0|10|20|30|40|50 Mb");
        check(1, 6, "0|1 bp");
        check(0, 6, "0 bp");
        check(u64::MAX, 6, "0|5000000000000|10000000000000|15000000000000 Mb");
    }

    #[test]
    fn numbers_are_written_shortly() {
        for (number, wanted) in [
            (5, "5 bp"),
            (999, "999 bp"),
            (1000, "1.00 kb"),
            (48_175, "48.2 kb"),
            (249_250, "249 kb"),
            (1_254_000, "1.25 Mb"),
        ] {
            assert_eq!(bases(number), wanted);
        }
        for (number, wanted) in
            [(0, "0"), (999, "999"), (1000, "1\u{a0}000"), (12_345_678, "12\u{a0}345\u{a0}678")]
        {
            assert_eq!(count(number), wanted);
        }
        for (number, wanted) in [(0.5, "0.5"), (1.0, "1"), (0.0, "0"), (0.123_456, "0.123")] {
            assert_eq!(score(number), wanted);
        }
        for (part, all, wanted) in [
            (0, 0, "0 %"),
            (0, 9, "0 %"),
            (9, 9, "100 %"),
            (1, 3, "33.3 %"),
            (1, 99_999, "<0.1 %"),
            (99_998, 99_999, ">99.9 %"),
        ] {
            assert_eq!(percent(part, all), wanted);
        }
    }

    #[test]
    fn labels_do_not_touch() {
        let check = |places: &[f64], wanted: &[f64]| {
            let mut found = places.to_vec();
            separate_labels(&mut found, &vec![10.0; places.len()], 0.0, 100.0);
            assert_eq!(found, wanted);
        };
        check(&[50.0], &[50.0]);
        check(&[0.0, 50.0, 100.0], &[5.0, 50.0, 95.0]);
        check(&[50.0, 51.0, 52.0], &[50.0, 60.0, 70.0]);
        check(&[97.0, 98.0, 99.0], &[75.0, 85.0, 95.0]);
    }
}
