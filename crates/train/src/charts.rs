//! The charts of training runs: which series form a chart, their units, axes and labels. Used by the report, which draws them as
//! HTML, and by `plimsoll plot`, which draws them as SVG and PNG. Invariant: a chart exists if a run has a value for it, and
//! every series of a run is in exactly one chart, except the positions of the run (tokens, epoch, seconds).

use crate::TrainError;
use crate::history::{ExpertLoad, FULLEST_EXPERT, RunHistory};
use plimsoll_graph::Bytes;
use plimsoll_runtime::series::Point;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Maximum number of runs that are compared.
pub const MOST_RUNS: usize = 16;

/// Unit of a chart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// A number without a unit.
    Number,
    /// Nats per target.
    Nats,
    /// Tokens per second.
    TokensPerSecond,
    /// Bytes, labelled in powers of 1000.
    Bytes,
    /// Seconds.
    Seconds,
    /// Rows of a mixture of experts.
    Rows,
}

impl Unit {
    /// Name of the unit; empty for a number.
    pub fn name(self) -> &'static str {
        match self {
            Self::Number => "",
            Self::Nats => "nats",
            Self::TokensPerSecond => "tokens/s",
            Self::Bytes => "bytes",
            Self::Seconds => "s",
            Self::Rows => "rows",
        }
    }

    /// Factor and name of the unit in which numbers up to `largest` are labelled.
    pub fn scale(self, largest: f64) -> (f64, &'static str) {
        match self {
            Self::Bytes => {
                let (factor, name) = Bytes(largest as u64).unit();
                (factor as f64, name)
            }
            Self::Number | Self::Nats | Self::TokensPerSecond | Self::Seconds | Self::Rows => {
                (1.0, self.name())
            }
        }
    }

    /// A value with its unit, in four significant digits.
    pub fn text(self, value: f64) -> String {
        let (factor, name) = self.scale(value.abs());
        let number = number(value / factor);
        if name.is_empty() { number } else { format!("{number} {name}") }
    }
}

/// A chart.
#[derive(Clone, Debug)]
pub struct Chart {
    /// Identifier, a name for `plimsoll plot --series`.
    pub id: String,
    /// Title.
    pub title: String,
    /// Unit of its values.
    pub unit: Unit,
    /// Whether a logarithmic axis suits the quantity.
    pub suits_log: bool,
    /// Whether a linear axis begins at 0.
    pub from_zero: bool,
    /// Lines, run by run.
    pub lines: Vec<Line>,
    /// Values with which the lines are compared.
    pub limits: Vec<ChartLimit>,
}

/// A series of a run in a chart.
#[derive(Clone, Debug)]
pub struct Line {
    /// Index of the run.
    pub run: usize,
    /// Name of the series.
    pub series: String,
    /// Index of the series among those of the chart: gives the dashes of the line.
    pub place: usize,
    /// Whether points are marked, because they are few by nature.
    pub marked: bool,
    /// Points.
    pub points: Vec<Point>,
}

/// A value of a run that is constant.
#[derive(Clone, Debug, PartialEq)]
pub struct ChartLimit {
    /// Index of the run.
    pub run: usize,
    /// Name of the value.
    pub name: &'static str,
    /// The value.
    pub value: f64,
}

/// A chart of known series.
struct KnownChart {
    id: &'static str,
    title: &'static str,
    unit: Unit,
    suits_log: bool,
    from_zero: bool,
    series: &'static [&'static str],
}

const KNOWN_CHARTS: [KnownChart; 11] = [
    KnownChart {
        id: "loss",
        title: "Loss",
        unit: Unit::Nats,
        suits_log: true,
        from_zero: false,
        series: &["loss", "validation_loss"],
    },
    KnownChart {
        id: "auxiliary",
        title: "Auxiliary losses",
        unit: Unit::Nats,
        suits_log: true,
        from_zero: true,
        series: &["z_loss", "balance_loss", "router_z_loss", "distillation_loss"],
    },
    KnownChart {
        id: "lr",
        title: "Learning rate",
        unit: Unit::Number,
        suits_log: true,
        from_zero: true,
        series: &["lr"],
    },
    KnownChart {
        id: "grad_norm",
        title: "Norm of the gradients",
        unit: Unit::Number,
        suits_log: true,
        from_zero: true,
        series: &["grad_norm"],
    },
    KnownChart {
        id: "tokens_per_second",
        title: "Tokens per second",
        unit: Unit::TokensPerSecond,
        suits_log: false,
        from_zero: true,
        series: &["tokens_per_second"],
    },
    KnownChart {
        id: MEMORY,
        title: "Memory",
        unit: Unit::Bytes,
        suits_log: false,
        from_zero: true,
        series: &["memory_bytes", "card_bytes"],
    },
    KnownChart {
        id: "machine_memory",
        title: "Memory of all processes",
        unit: Unit::Bytes,
        suits_log: false,
        from_zero: true,
        series: &["host_used_bytes", "card_used_bytes"],
    },
    KnownChart {
        id: "health",
        title: "Health",
        unit: Unit::Number,
        suits_log: false,
        from_zero: true,
        series: &["utilisation", "oom_risk"],
    },
    KnownChart {
        id: "experts",
        title: "Largest share of an expert, in even shares",
        unit: Unit::Number,
        suits_log: false,
        from_zero: true,
        series: &[FULLEST_EXPERT],
    },
    KnownChart {
        id: "dropped",
        title: "Dropped rows of experts",
        unit: Unit::Rows,
        suits_log: false,
        from_zero: true,
        series: &["dropped"],
    },
    KnownChart {
        id: "loss_scale",
        title: "Loss scale",
        unit: Unit::Number,
        suits_log: true,
        from_zero: true,
        series: &["loss_scale"],
    },
];

/// Chart of the memory of the run's process, and of further series whose names end in `_bytes`.
const MEMORY: &str = "memory";
/// Series that say where the run is and need no chart.
const POSITIONS: [&str; 5] = ["tokens", "epoch", "micro_steps", "seconds", "validation_targets"];
/// Series with few values by nature.
const MARKED: [&str; 1] = ["validation_loss"];

/// The charts of runs, in a fixed order: known series first, then the others by name. `max_points` is the maximum number of
/// points of a line.
pub fn charts(runs: &[RunHistory], max_points: usize) -> Vec<Chart> {
    let mut charts: Vec<Chart> = KNOWN_CHARTS.iter().map(|kind| known(kind, runs, max_points)).collect();
    let mut others: Vec<&str> = runs.iter().flat_map(|run| &run.series).map(|s| s.name.as_str()).collect();
    others.sort_unstable();
    others.dedup();
    others.retain(|name| {
        let in_kind = KNOWN_CHARTS.iter().any(|kind| kind.series.contains(name));
        !in_kind && !POSITIONS.contains(name) && !is_constant_zero(runs, name)
    });
    for name in others {
        let is_memory = name.ends_with("_bytes");
        let place = charts.iter().position(|chart| is_memory && chart.id == MEMORY).unwrap_or_else(|| {
            let unit = if name.ends_with("_seconds") { Unit::Seconds } else { Unit::Number };
            charts.push(Chart {
                id: name.to_owned(),
                title: name.to_owned(),
                unit,
                suits_log: false,
                from_zero: true,
                lines: vec![],
                limits: vec![],
            });
            charts.len() - 1
        });
        let series = charts[place].lines.iter().map(|line| line.place + 1).max().unwrap_or(0);
        let lines = lines(runs, name, series, max_points);
        charts[place].lines.extend(lines);
    }
    charts.retain(|chart| !chart.lines.is_empty());
    for chart in charts.iter_mut().filter(|chart| chart.id == MEMORY) {
        chart.limits = runs.iter().enumerate().filter_map(|(run, history)| planned(run, history)).collect();
    }
    charts
}

/// Counters such as `skipped` that stay at 0 need no chart.
fn is_constant_zero(runs: &[RunHistory], name: &str) -> bool {
    let mut series = runs.iter().filter_map(|run| run.series(name));
    series.all(|series| series.lowest.0 == 0.0 && series.highest.0 == 0.0)
}

fn known(chart: &KnownChart, runs: &[RunHistory], max_points: usize) -> Chart {
    let present: Vec<&str> =
        chart.series.iter().copied().filter(|name| runs.iter().any(|run| run.series(name).is_some())).collect();
    let title = match present[..] {
        // The key of a chart names its series only if there are several. The memory of a GPU is missing in most runs.
        [only] if chart.series.len() > 1 && only != chart.id && chart.unit != Unit::Bytes => {
            format!("{}: {only}", chart.title)
        }
        _ => chart.title.to_owned(),
    };
    let all = present.into_iter().enumerate();
    Chart {
        id: chart.id.to_owned(),
        title,
        unit: chart.unit,
        suits_log: chart.suits_log,
        from_zero: chart.from_zero,
        lines: all.flat_map(|(place, name)| lines(runs, name, place, max_points)).collect(),
        limits: vec![],
    }
}

fn lines(runs: &[RunHistory], name: &str, place: usize, max_points: usize) -> Vec<Line> {
    let lines = runs.iter().enumerate().filter_map(|(run, history)| {
        let series = history.series(name)?;
        let marked = MARKED.contains(&name) || series.points.len() == 1;
        Some(Line { run, series: name.to_owned(), place, marked, points: series.thinned(max_points) })
    });
    lines.collect()
}

/// The planned peak of a run in host memory. On a GPU the plan is of the memory of the GPU, and `memory_bytes` is not.
fn planned(run: usize, history: &RunHistory) -> Option<ChartLimit> {
    let on_host = history.record["device"].as_str()?.starts_with("the CPU");
    let value = history.record["peak_bytes"].as_f64().filter(|_| on_host)?;
    Some(ChartLimit { run, name: "planned peak", value })
}

/// The charts that `names` select, in the order of the names: each is the id of a chart, or a series, of which only the line is
/// left.
///
/// # Errors
/// The first name that is neither, with the names that exist.
pub fn select(charts: Vec<Chart>, names: &[String]) -> Result<Vec<Chart>, UnknownSeries> {
    let mut chosen: Vec<Chart> = vec![];
    for name in names {
        if let Some(chart) = charts.iter().find(|chart| chart.id == *name) {
            chosen.push(chart.clone());
            continue;
        }
        let found = charts.iter().find(|chart| chart.lines.iter().any(|line| line.series == *name));
        let Some(chart) = found else {
            let known = charts.iter().flat_map(Chart::names).collect::<Vec<_>>();
            return Err(UnknownSeries { name: name.clone(), known });
        };
        let mut chart = chart.clone();
        chart.lines.retain(|line| line.series == *name);
        chosen.push(chart);
    }
    Ok(chosen)
}

/// A name that is neither a chart nor a series of the runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownSeries {
    /// The name.
    pub name: String,
    /// All names.
    pub known: Vec<String>,
}

/// A series in the key of a chart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyEntry<'a> {
    /// Name of the series.
    pub name: &'a str,
    /// Number of its dashes ([`dashes`]); `None` for a line without dashes.
    pub dashes: Option<usize>,
    /// Whether points are marked.
    pub marked: bool,
}

/// Number of different dashes of lines.
pub const DASHES: usize = 3;

/// Number of the dashes of a line, by the place of its series in its chart; `None` for a line without dashes.
pub fn dashes(place: usize, marked: bool) -> Option<usize> {
    (place > 0 && !marked).then(|| (place - 1) % DASHES)
}

impl Chart {
    /// The names of its series, in their order; empty if the title names the only one.
    pub fn key(&self) -> Vec<KeyEntry<'_>> {
        let series: BTreeMap<usize, (&str, bool)> =
            self.lines.iter().map(|line| (line.place, (line.series.as_str(), line.marked))).collect();
        if series.len() < 2 {
            return vec![];
        }
        series
            .into_iter()
            .map(|(place, (name, marked))| KeyEntry { name, dashes: dashes(place, marked), marked })
            .collect()
    }

    /// The limits within an axis, each with its height from 0 to 1; a limit far above the lines is not drawn.
    pub fn limits_on(&self, axis: &Axis) -> impl Iterator<Item = (&ChartLimit, f64)> {
        let heights = self.limits.iter().filter_map(|limit| Some((limit, axis.at(limit.value)?)));
        heights.filter(|(_, height)| *height <= 1.0)
    }

    /// Its id, and the names of its series that differ from it.
    fn names(&self) -> Vec<String> {
        let mut names = vec![self.id.clone()];
        for line in &self.lines {
            if !names.contains(&line.series) {
                names.push(line.series.clone());
            }
        }
        names
    }

    /// The points of all lines.
    fn points(&self) -> impl Iterator<Item = &Point> {
        self.lines.iter().flat_map(|line| &line.points)
    }

    /// The axis of its values: all lines, and the limits unless they are so far away that they would flatten the lines.
    pub fn axis(&self, log: bool) -> Axis {
        let log = log && self.points().any(|point| point.high > 0.0);
        let low = self.points().map(|point| point.low).filter(|&low| !log || low > 0.0);
        let low = low.fold(f64::INFINITY, f64::min);
        let high = self.points().map(|point| point.high).fold(f64::NEG_INFINITY, f64::max);
        let limits = self.limits.iter().map(|limit| limit.value).filter(|&value| value <= 4.0 * high);
        let high = limits.fold(high, f64::max);
        // A point may have a positive highest and another lowest value.
        let low = if low.is_finite() { low.min(high) } else { high };
        if log {
            return Axis::new(low, high, true);
        }
        if self.from_zero && low >= 0.0 {
            return Axis::new(0.0, 1.04 * high, false);
        }
        let margin = 0.04 * (high - low);
        Axis::new(low - margin, high + margin, false)
    }
}

/// An axis.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Axis {
    /// Lowest value.
    pub low: f64,
    /// Highest value, above the lowest.
    pub high: f64,
    /// Whether distances are those of logarithms.
    pub log: bool,
}

impl Axis {
    /// An axis from `low` to `high`; a range without extent is widened. `log` needs positive numbers.
    pub fn new(low: f64, high: f64, log: bool) -> Self {
        let (low, high) = match (low < high, log) {
            (true, _) => (low, high),
            (false, true) => (low / 2.0, low * 2.0),
            (false, false) if low == 0.0 => (0.0, 1.0),
            (false, false) => (low - 0.1 * low.abs(), low + 0.1 * low.abs()),
        };
        Self { low, high, log }
    }

    /// Position of a value: 0 at the lowest value, 1 at the highest. A logarithmic axis has no place for values of 0 and below.
    pub fn at(&self, value: f64) -> Option<f64> {
        if self.log {
            (value > 0.0).then(|| (value / self.low).ln() / (self.high / self.low).ln())
        } else {
            Some((value - self.low) / (self.high - self.low))
        }
    }

    /// At most about `max_ticks` values with labels, in a unit of which `factor` is the size.
    pub fn ticks(&self, max_ticks: f64, factor: f64) -> Vec<(f64, String)> {
        if self.log {
            let ticks = self.decades(max_ticks);
            if ticks.len() > 1 {
                return ticks.into_iter().map(|value| (value, number(value / factor))).collect();
            }
        }
        let low = self.low / factor;
        let high = self.high / factor;
        let step = round_step(high - low, max_ticks);
        // The margin keeps a tick at the lower end that division moves just above it.
        let first = (low / step - 1e-9).ceil();
        let values = (0..100).map(|n| (first + f64::from(n)) * step).take_while(|&v| v <= high + 1e-9 * step);
        values
            .map(|value| (value * factor, number(if value.abs() < 1e-9 * step { 0.0 } else { value })))
            .collect()
    }

    /// Powers of ten, and between them 2 and 5 times these where there is room.
    fn decades(&self, max_ticks: f64) -> Vec<f64> {
        for factors in [&[1.0, 2.0, 5.0][..], &[1.0, 3.0]] {
            let ticks = self.power_multiples(factors);
            if ticks.len() as f64 <= max_ticks + 1.0 {
                return ticks;
            }
        }
        let powers = self.power_multiples(&[1.0]);
        let step = (powers.len() as f64 / max_ticks).ceil().max(1.0) as usize;
        powers.into_iter().step_by(step).collect()
    }

    /// The values on the axis that are a power of ten times one of `factors`, in ascending order.
    fn power_multiples(&self, factors: &[f64]) -> Vec<f64> {
        let first = self.low.log10().floor() as i32;
        let last = self.high.log10().ceil() as i32;
        // The margin keeps the ends of the axis, which the powers meet only up to rounding.
        let inside = self.low * 0.999_999..=self.high * 1.000_001;
        let all = (first..=last).flat_map(|power| factors.iter().map(move |n| n * 10_f64.powi(power)));
        all.filter(|value| inside.contains(value)).collect()
    }
}

/// The smallest of 1, 2 and 5 times a power of 10 of which `extent` has at most `parts`.
pub fn round_step(extent: f64, parts: f64) -> f64 {
    let unit = 10_f64.powf((extent / parts).log10().floor());
    [1.0, 2.0, 5.0].map(|n| n * unit).into_iter().find(|n| extent / n <= parts).unwrap_or(10.0 * unit)
}

/// A number in at most four significant digits: `0.25`, `12 340`, `3e-4`.
pub fn number(value: f64) -> String {
    let size = value.abs();
    if value == 0.0 || !value.is_finite() {
        return if value == 0.0 { "0".to_owned() } else { value.to_string() };
    }
    if (1e-3..1e6).contains(&size) {
        let decimals = (3 - size.log10().floor() as i32).clamp(0, 6) as usize;
        let text = format!("{value:.decimals$}");
        return if text.contains('.') {
            text.trim_end_matches('0').trim_end_matches('.').to_owned()
        } else {
            text
        };
    }
    let text = format!("{value:.3e}");
    let (digits, power) = text.split_once('e').unwrap_or((&text, "0"));
    format!("{}e{power}", digits.trim_end_matches('0').trim_end_matches('.'))
}

/// Opens the runs of one page or picture.
///
/// # Errors
/// [`TrainError::TooManyRuns`], and those of [`RunHistory::open`].
pub fn open(folders: &[PathBuf]) -> Result<Vec<RunHistory>, TrainError> {
    let count = folders.len();
    if count > MOST_RUNS {
        return Err(TrainError::TooManyRuns { count, most: MOST_RUNS });
    }
    folders.iter().map(|folder| RunHistory::open(folder)).collect()
}

/// Last step of the axis that all charts share, which begins at 0.
pub fn last_step(runs: &[RunHistory]) -> u64 {
    runs.iter().map(|run| run.last_step).max().unwrap_or(1).max(1)
}

/// Whether a point of a chart stands for several steps.
pub fn are_joined(charts: &[Chart]) -> bool {
    let mut points = charts.iter().flat_map(|chart| &chart.lines).flat_map(|line| &line.points);
    points.any(|point| point.count > 1)
}

/// The load of the experts of each run and layer, each with a title; `names` are those of the runs.
pub fn loads<'a>(
    runs: &'a [RunHistory],
    names: &'a [String],
) -> impl Iterator<Item = (String, &'a ExpertLoad)> + 'a {
    let is_single = runs.len() == 1;
    runs.iter().zip(names).flat_map(move |(run, name)| {
        run.loads.iter().map(move |load| {
            let layer = load.layer;
            let title = if is_single { format!("Layer {layer}") } else { format!("Layer {layer}, {name}") };
            (title, load)
        })
    })
}

/// The names of runs for a legend: the names of the folders, or their paths where names are equal.
pub fn names(runs: &[RunHistory]) -> Vec<String> {
    let names = runs.iter().map(|run| {
        let is_unique = runs.iter().filter(|other| other.name == run.name).count() == 1;
        if is_unique {
            run.name.clone()
        } else {
            plimsoll_data::printable::EscapedPath(&run.folder).to_string()
        }
    });
    names.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_runtime::series::Series;
    use serde_json::json;

    fn run(name: &str, series: &[(&str, &[f64])]) -> RunHistory {
        let series = series.iter().map(|(name, values)| {
            let mut series = Series::new(name);
            values.iter().zip(1..).for_each(|(&value, step)| series.add(step, value));
            series
        });
        RunHistory {
            folder: format!("runs/{name}").into(),
            name: name.to_owned(),
            record: json!({"device": "the CPU, 2 threads", "peak_bytes": 3000}),
            settings: BTreeMap::new(),
            series: series.collect(),
            loads: vec![],
            events: vec![],
            event_count: 0,
            stages: vec![],
            last_step: 2,
        }
    }

    #[test]
    fn every_series_has_its_chart() {
        let runs = [
            run(
                "a",
                &[
                    ("tokens", &[1.0, 2.0]),
                    ("loss", &[3.0, 2.0]),
                    ("memory_bytes", &[1024.0, 2048.0]),
                    ("skipped", &[0.0, 0.0]),
                    ("zeta", &[1.0, 1.0]),
                    ("host.heap_bytes", &[1.0, 1.0]),
                ],
            ),
            run("b", &[("loss", &[4.0, 1.0]), ("validation_loss", &[5.0]), ("data_wait_seconds", &[0.5])]),
        ];
        let charts = charts(&runs, 100);
        let lines_of = |chart: &'_ Chart| -> Vec<(usize, String, usize)> {
            chart.lines.iter().map(|line| (line.run, line.series.clone(), line.place)).collect()
        };
        let found: Vec<_> = charts.iter().map(|chart| (chart.id.as_str(), lines_of(chart))).collect();
        assert_eq!(
            found,
            [
                (
                    "loss",
                    vec![
                        (0, "loss".to_owned(), 0),
                        (1, "loss".to_owned(), 0),
                        (1, "validation_loss".to_owned(), 1)
                    ]
                ),
                ("memory", vec![(0, "memory_bytes".to_owned(), 0), (0, "host.heap_bytes".to_owned(), 1)]),
                ("data_wait_seconds", vec![(1, "data_wait_seconds".to_owned(), 0)]),
                ("zeta", vec![(0, "zeta".to_owned(), 0)]),
            ]
        );
        assert_eq!(charts[2].unit, Unit::Seconds);
        let entry = |name, dashes, marked| KeyEntry { name, dashes, marked };
        assert_eq!(charts[0].key(), [entry("loss", None, false), entry("validation_loss", None, true)]);
        assert_eq!(
            charts[1].key(),
            [entry("memory_bytes", None, false), entry("host.heap_bytes", Some(0), false)]
        );
        assert_eq!((charts[3].key(), last_step(&runs), are_joined(&charts)), (vec![], 2, false));
        assert_eq!(
            charts[1].limits_on(&Axis::new(0.0, 4000.0, false)).map(|(_, at)| at).collect::<Vec<_>>(),
            [0.75, 0.75]
        );
        assert_eq!(charts[1].limits_on(&Axis::new(0.0, 2000.0, false)).count(), 0);
        assert_eq!(charts[1].limits[0], ChartLimit { run: 0, name: "planned peak", value: 3000.0 });
        let pick = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
            let chosen = select(charts.clone(), &names)?;
            Ok(chosen.into_iter().map(|chart| (chart.id, chart.lines.len())).collect::<Vec<_>>())
        };
        let two = vec![("zeta".to_owned(), 1), ("loss".to_owned(), 1)];
        assert_eq!(pick(&["zeta", "validation_loss"]), Ok(two));
        let known =
            ["loss", "validation_loss", "memory", "memory_bytes", "host.heap_bytes", "data_wait_seconds"];
        let known = known.into_iter().chain(["zeta"]).map(str::to_owned).collect();
        assert_eq!(pick(&["los"]), Err(UnknownSeries { name: "los".to_owned(), known }));
    }

    /// The memory of the run and that of the machine differ so much that one axis would flatten the former.
    #[test]
    fn memory_of_all_processes_and_health_have_charts_of_their_own() {
        let runs = [run(
            "a",
            &[
                ("memory_bytes", &[1e9]),
                ("host_used_bytes", &[9e9]),
                ("card_bytes", &[2e9]),
                ("card_used_bytes", &[8e9]),
                ("utilisation", &[0.5]),
                ("oom_risk", &[0.0]),
            ],
        )];
        let charts = charts(&runs, 100);
        let found: Vec<(&str, Vec<&str>)> = charts
            .iter()
            .map(|chart| (chart.id.as_str(), chart.lines.iter().map(|line| line.series.as_str()).collect()))
            .collect();
        assert_eq!(
            found,
            [
                ("memory", vec!["memory_bytes", "card_bytes"]),
                ("machine_memory", vec!["host_used_bytes", "card_used_bytes"]),
                ("health", vec!["utilisation", "oom_risk"]),
            ]
        );
        assert_eq!(charts.iter().map(|chart| chart.limits.len()).collect::<Vec<_>>(), [1, 0, 0]);
    }

    #[test]
    fn a_chart_of_one_of_its_series_names_it() {
        let title = |series: &[(&str, &[f64])]| {
            let chart = charts(&[run("a", series)], 100).remove(0);
            (chart.title, chart.lines.iter().map(|line| line.place).collect::<Vec<_>>())
        };
        let both: [(&str, &[f64]); 2] = [("router_z_loss", &[1.0]), ("balance_loss", &[1.0])];
        assert_eq!(title(&both), ("Auxiliary losses".to_owned(), vec![0, 1]));
        assert_eq!(title(&both[..1]), ("Auxiliary losses: router_z_loss".to_owned(), vec![0]));
        assert_eq!(title(&[("loss", &[1.0])]), ("Loss".to_owned(), vec![0]));
    }

    #[test]
    fn axes_hold_all_values() {
        let chart = |values: &[f64], id: &str| {
            let runs = [run("a", &[(id, values)])];
            charts(&runs, 100).remove(0)
        };
        let loss = chart(&[2.0, 4.0], "loss").axis(false);
        assert!(loss.low > 1.9 && loss.low < 2.0 && loss.high > 4.0 && loss.high < 4.1);
        assert_eq!(chart(&[2.0, 4.0], "lr").axis(false).low, 0.0);
        let log = chart(&[0.0, 1.0, 100.0], "lr").axis(true);
        assert_eq!((log.low, log.high, log.at(10.0), log.at(0.0)), (1.0, 100.0, Some(0.5), None));
        // Without a positive number, and with a single number.
        assert!(!chart(&[0.0, -1.0], "lr").axis(true).log);
        let single = chart(&[0.5], "lr").axis(true);
        assert!(single.low < 0.5 && single.high > 0.5);
    }

    #[test]
    fn ticks_are_round() {
        let check = |low: f64, high: f64, log: bool, factor: f64, wanted: &str| {
            let ticks = Axis::new(low, high, log).ticks(5.0, factor);
            let labels: Vec<String> = ticks.into_iter().map(|(_, label)| label).collect();
            assert_eq!(labels.join(" "), wanted);
        };
        check(0.0, 10.0, false, 1.0, "0 2 4 6 8 10");
        check(1.93, 4.06, false, 1.0, "2 2.5 3 3.5 4");
        check(0.0, 3e-4, false, 1.0, "0 1e-4 2e-4 3e-4");
        check(-0.3, 0.3, false, 1.0, "-0.2 0 0.2");
        check(0.0, 3e9, false, 1e9, "0 1 2 3");
        check(0.01, 100.0, true, 1.0, "0.01 0.1 1 10 100");
        check(1.0, 10.0, true, 1.0, "1 2 5 10");
        check(1e-9, 1e9, true, 1.0, "1e-9 1e-5 0.1 1000 1e7");
        check(3.1, 3.3, true, 1.0, "3.1 3.15 3.2 3.25 3.3");
    }

    #[test]
    fn numbers_are_short() {
        for (value, wanted) in [
            (0.0, "0"),
            (0.25, "0.25"),
            (2.71549, "2.715"),
            (12_340.0, "12340"),
            (0.001, "0.001"),
            (3e-4, "3e-4"),
            (-1234.5678, "-1235"),
            (9.99996, "10"),
            (1_234_567.0, "1.235e6"),
        ] {
            assert_eq!(number(value), wanted);
        }
        assert_eq!(Unit::Bytes.text(1_500_000_000.0), "1.5 GB");
        assert_eq!(Unit::Nats.text(2.5), "2.5 nats");
        assert_eq!(Unit::Number.text(2.5), "2.5");
    }

    #[test]
    fn equal_names_become_paths() {
        let mut runs = [run("a", &[]), run("a", &[]), run("b", &[])];
        runs[1].folder = "other/a".into();
        assert_eq!(names(&runs), ["runs/a", "other/a", "b"]);
    }
}
