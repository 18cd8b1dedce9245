//! Series of numbers over the steps of a run, in bounded memory: neighbouring steps are joined to one point. Invariant: a point
//! that stands for several steps has their lowest, highest and mean value, and every value belongs to exactly one point.

/// Maximum number of points of a series; more steps are joined to points of equally many steps.
pub const MOST_POINTS: usize = 4096;

/// A number over the steps of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    /// Key in metrics.jsonl; keys of nested objects are joined with dots.
    pub name: String,
    /// Points in ascending order of steps.
    pub points: Vec<Point>,
    /// The first value; NaN without values.
    pub first: f64,
    /// The last value; NaN without values.
    pub last: f64,
    /// The lowest value, and its step.
    pub lowest: (f64, u64),
    /// The highest value, and its step.
    pub highest: (f64, u64),
    /// Number of values.
    pub count: u64,
    /// Number of steps of a point.
    width: u64,
}

/// The values of neighbouring steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// First step with a value.
    pub first: u64,
    /// Last step with a value.
    pub last: u64,
    /// Number of values.
    pub count: u64,
    /// Lowest value.
    pub low: f64,
    /// Highest value.
    pub high: f64,
    /// Sum of the values.
    sum: f64,
}

impl Point {
    /// A point with one value.
    pub fn new(step: u64, value: f64) -> Self {
        Self { first: step, last: step, count: 1, low: value, high: value, sum: value }
    }

    /// Mean of the values.
    pub fn mean(&self) -> f64 {
        // The mean of equal values must be that value, and a mean lies between the lowest and the highest.
        (self.sum / self.count as f64).clamp(self.low, self.high)
    }

    /// Joins equally many neighbours to one point, so that at most `most` are left. Unlike [`Series::thinned`], uses nearly
    /// all of them, and takes no care that the points of several series stand for the same steps.
    pub fn in_groups(points: &[Self], most: usize) -> Vec<Self> {
        let size = points.len().div_ceil(most.max(1)).max(1);
        points
            .chunks(size)
            .filter_map(|group| {
                let (first, rest) = group.split_first()?;
                let mut joined = *first;
                rest.iter().for_each(|point| joined.join(point));
                Some(joined)
            })
            .collect()
    }

    fn join(&mut self, other: &Self) {
        self.last = other.last;
        self.count += other.count;
        self.low = self.low.min(other.low);
        self.high = self.high.max(other.high);
        self.sum += other.sum;
    }
}

/// Appends an item, and joins items so that at most `most` are left. Items of the same multiple of `width` steps are joined, so
/// the result does not depend on how many items there were before.
pub fn append<T>(
    items: &mut Vec<T>,
    width: &mut u64,
    most: usize,
    item: T,
    first: impl Fn(&T) -> u64,
    join: impl Fn(&mut T, &T),
) {
    items.push(item);
    // Widths are powers of two times the first, so items that a width joins are also joined by every larger width: the
    // boundaries depend on the steps alone, not on the moments at which the list was full.
    loop {
        let at = items.len().saturating_sub(2);
        if let [before, last] = &items[at..]
            && first(before) / *width == first(last) / *width
            && let Some(last) = items.pop()
        {
            join(&mut items[at], &last);
        }
        if items.len() <= most {
            return;
        }
        *width *= 2;
        let mut joined: Vec<T> = Vec::with_capacity(most);
        for item in items.drain(..) {
            match joined.last_mut() {
                Some(before) if first(before) / *width == first(&item) / *width => join(before, &item),
                _ => joined.push(item),
            }
        }
        *items = joined;
    }
}

impl Default for Series {
    fn default() -> Self {
        Self::new("")
    }
}

impl Series {
    /// A series without values.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            points: vec![],
            first: f64::NAN,
            last: f64::NAN,
            lowest: (f64::INFINITY, 0),
            highest: (f64::NEG_INFINITY, 0),
            count: 0,
            width: 1,
        }
    }

    /// Adds the value of a step that is not before the steps of earlier values.
    pub fn add(&mut self, step: u64, value: f64) {
        if self.count == 0 {
            self.first = value;
        }
        self.count += 1;
        self.last = value;
        if value < self.lowest.0 {
            self.lowest = (value, step);
        }
        if value > self.highest.0 {
            self.highest = (value, step);
        }
        append(
            &mut self.points,
            &mut self.width,
            MOST_POINTS,
            Point::new(step, value),
            |point| point.first,
            Point::join,
        );
    }

    /// Adds the value of a step that a file names.
    ///
    /// # Errors
    /// A step before an earlier one, as the text of a message.
    pub fn try_add(&mut self, step: u64, value: f64) -> Result<(), String> {
        if let Some(before) = self.last_step().filter(|&before| step < before) {
            return Err(format!("step {step} comes after step {before}; the steps of a run ascend"));
        }
        self.add(step, value);
        Ok(())
    }

    /// Step of the last value.
    pub fn last_step(&self) -> Option<u64> {
        self.points.last().map(|point| point.last)
    }

    /// The points, joined so that there are at most `most`.
    pub fn thinned(&self, most: usize) -> Vec<Point> {
        let mut points = vec![];
        let mut width = self.width;
        for point in &self.points {
            append(&mut points, &mut width, most.max(1), *point, |point| point.first, Point::join);
        }
        points
    }

    /// The value at a step, exactly; `None` if there is none or the step is joined with others.
    pub fn at(&self, step: u64) -> Option<f64> {
        let index = self.points.binary_search_by_key(&step, |point| point.first).ok()?;
        (self.points[index].count == 1).then(|| self.points[index].low)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A long series keeps its lowest, highest and mean value, and every step belongs to one point.
    #[test]
    fn long_series_are_joined_honestly() {
        let (mut series, steps) = (Series::new("loss"), 100_000_u64);
        let value = |step: u64| if step == 77_777 { -50.0 } else { (step % 10) as f64 };
        (1..=steps).for_each(|step| series.add(step, value(step)));
        assert!(series.points.len() <= MOST_POINTS && series.points.len() > MOST_POINTS / 2);
        for most in [1000, 100, 7, 1] {
            let points = series.thinned(most);
            assert!(points.len() <= most && points.len() >= most.div_ceil(3), "{most}: {}", points.len());
            assert_eq!(points.iter().map(|point| point.count).sum::<u64>(), steps);
            let mut next = 1;
            for point in &points {
                assert_eq!((point.first, point.last - point.first + 1), (next, point.count));
                let all: Vec<f64> = (point.first..=point.last).map(value).collect();
                assert_eq!(point.low, all.iter().copied().fold(f64::INFINITY, f64::min));
                assert_eq!(point.high, all.iter().copied().fold(f64::NEG_INFINITY, f64::max));
                assert!((point.mean() - all.iter().sum::<f64>() / all.len() as f64).abs() < 1e-9);
                next = point.last + 1;
            }
        }
        assert_eq!(series.lowest, (-50.0, 77_777));
        assert_eq!((series.first, series.last, series.last_step()), (1.0, 0.0, Some(steps)));
        assert!(series.try_add(steps - 1, 0.0).is_err() && series.try_add(steps, 0.0).is_ok());
    }

    #[test]
    fn groups_use_the_width() {
        let mut series = Series::new("loss");
        (1..=620).for_each(|step| series.add(step, step as f64));
        for most in [1, 7, 57, 620, 1000] {
            let points = Point::in_groups(&series.points, most);
            assert!(points.len() <= most && points.len() > most.min(620) * 3 / 4, "{most}: {}", points.len());
            assert_eq!(points.iter().map(|point| point.count).sum::<u64>(), 620);
            assert!(
                points.iter().all(
                    |point| point.mean() == point.first.midpoint(point.last) as f64 || point.count % 2 == 0
                )
            );
        }
        assert_eq!(Point::in_groups(&[], 7), []);
    }
}
