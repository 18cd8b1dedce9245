//! Traces for Perfetto (ui.perfetto.dev) and chrome://tracing. Invariant: a trace has the JSON object form of the Trace
//! Event Format; times are in microseconds.

use plimsoll_graph::Phase;
use plimsoll_plan::Timeline;
use serde::Serialize;
use std::collections::BTreeMap;

/// A trace under construction.
#[derive(Debug, Serialize)]
pub struct EventTrace {
    /// Unit in which a viewer shows times.
    #[serde(rename = "displayTimeUnit")]
    unit: &'static str,
    #[serde(rename = "traceEvents")]
    events: Vec<EventRecord>,
}

/// An event of the Trace Event Format.
#[derive(Debug, Default, Serialize)]
struct EventRecord {
    name: String,
    /// The phase: metadata (`M`), interval (`X`) or counter (`C`).
    ph: &'static str,
    pid: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    tid: Option<usize>,
    #[serde(rename = "cat", skip_serializing_if = "Option::is_none")]
    category: Option<String>,
    /// Start in microseconds.
    #[serde(rename = "ts", skip_serializing_if = "Option::is_none")]
    start: Option<f64>,
    /// Duration in microseconds.
    #[serde(rename = "dur", skip_serializing_if = "Option::is_none")]
    duration: Option<f64>,
    #[serde(rename = "args", skip_serializing_if = "Option::is_none")]
    arguments: Option<Arguments>,
}

/// The key `args` of an event.
#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Arguments {
    Name { name: String },
    Series(BTreeMap<String, u64>),
    Details(TraceDetails),
}

/// An interval on a track.
#[derive(Clone, Debug)]
pub struct TraceEvent<'a> {
    /// Text of the interval.
    pub name: &'a str,
    /// Category.
    pub category: &'a str,
    /// Process and track.
    pub track: (usize, usize),
    /// Start in seconds.
    pub start: f64,
    /// Duration in seconds.
    pub seconds: f64,
    /// Details.
    pub details: Option<TraceDetails>,
}

/// Details of an interval.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum TraceDetails {
    /// Details of an instruction of a plan.
    Instruction {
        /// Number of the instruction in its timeline.
        instruction: usize,
        /// Name of the op.
        op: &'static str,
        /// Layer of the model.
        layer: Option<u32>,
        /// Name of the kernel; `None` for a move.
        kernel: Option<&'static str>,
    },
    /// Details of a launch of a step.
    Launch {
        /// Label of the node.
        launch: String,
        /// Layer of the model.
        layer: Option<u32>,
    },
}

impl Default for EventTrace {
    fn default() -> Self {
        Self { unit: "ms", events: vec![] }
    }
}

impl EventTrace {
    /// Creates an empty trace.
    pub fn new() -> Self {
        Self::default()
    }

    /// Names a process and its tracks, which are numbered from 0.
    pub fn process(&mut self, pid: usize, name: &str, tracks: &[&str]) {
        self.events.push(name_record("process_name", pid, None, name));
        for (tid, track) in tracks.iter().enumerate() {
            self.events.push(name_record("thread_name", pid, Some(tid), track));
        }
    }

    /// Adds an interval.
    pub fn interval(&mut self, event: TraceEvent<'_>) {
        let TraceEvent { name, category, track: (pid, tid), start, seconds, details } = event;
        self.events.push(EventRecord {
            name: name.to_owned(),
            ph: "X",
            pid,
            tid: Some(tid),
            category: Some(category.to_owned()),
            start: Some(1e6 * start),
            duration: Some(1e6 * seconds),
            arguments: details.map(Arguments::Details),
        });
    }

    /// Adds the values of the series of a counter from a time on.
    pub fn counter(&mut self, pid: usize, name: &str, start: f64, series: BTreeMap<String, u64>) {
        self.events.push(EventRecord {
            name: name.to_owned(),
            ph: "C",
            pid,
            start: Some(1e6 * start),
            arguments: Some(Arguments::Series(series)),
            ..EventRecord::default()
        });
    }
}

/// A metadata event that names a process, or one of its tracks.
fn name_record(event: &str, pid: usize, tid: Option<usize>, name: &str) -> EventRecord {
    EventRecord {
        name: event.to_owned(),
        ph: "M",
        pid,
        tid,
        arguments: Some(Arguments::Name { name: name.to_owned() }),
        ..EventRecord::default()
    }
}

/// The expected times of the instructions of titled timelines, one after another, and counters of the bytes of each line
/// of the ledger.
pub fn to_trace(timelines: &[(String, &Timeline)]) -> EventTrace {
    let mut trace = EventTrace::new();
    for (pid, (title, timeline)) in timelines.iter().enumerate() {
        let tracks: Vec<&str> = timeline.plans.iter().map(|plan| plan.name.as_str()).collect();
        trace.process(pid, title, &tracks);
        let lines = timeline.lines();
        let mut start = 0.0;
        let mut last: Option<Vec<u64>> = None;
        for (i, instruction) in timeline.instructions.iter().enumerate() {
            let plan = timeline.plans.iter().rposition(|plan| plan.first <= i).unwrap_or(0);
            let bytes: Vec<u64> = lines.bytes.iter().map(|line| line[i]).collect();
            if last.as_ref() != Some(&bytes) {
                let series = lines.lines.iter().cloned().zip(bytes.iter().copied()).collect();
                trace.counter(pid, "bytes", start, series);
                last = Some(bytes);
            }
            trace.interval(TraceEvent {
                name: &instruction.label,
                category: name(instruction.phase),
                track: (pid, plan),
                start,
                seconds: instruction.seconds,
                details: Some(TraceDetails::Instruction {
                    instruction: i,
                    op: instruction.op,
                    layer: instruction.layer,
                    kernel: instruction.kernel,
                }),
            });
            start += instruction.seconds;
        }
    }
    trace
}

/// Name of a phase.
pub fn name(phase: Phase) -> &'static str {
    match phase {
        Phase::Forward => "forward",
        Phase::Backward => "backward",
        Phase::Recompute => "recomputation",
        Phase::Update => "update",
    }
}
