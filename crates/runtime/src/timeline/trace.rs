//! Traces for Perfetto (ui.perfetto.dev) and chrome://tracing. Invariant: a trace has the JSON object form of the Trace
//! Event Format; times are in microseconds.

use plimsoll_graph::Phase;
use plimsoll_plan::Timeline;
use serde_json::{Map, Value, json};

/// A trace under construction.
#[derive(Debug, Default)]
pub struct Trace {
    events: Vec<Value>,
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
    /// Details; `null` for none.
    pub details: Value,
}

impl Trace {
    /// Creates an empty trace.
    pub fn new() -> Self {
        Self::default()
    }

    /// Names a process and its tracks, which are numbered from 0.
    pub fn process(&mut self, pid: usize, name: &str, tracks: &[&str]) {
        self.events.push(json!({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}}));
        let named = |(tid, name): (usize, &&str)| json!({"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}});
        self.events.extend(tracks.iter().enumerate().map(named));
    }

    /// Adds an interval.
    pub fn interval(&mut self, event: TraceEvent<'_>) {
        let TraceEvent { name, category, track: (pid, tid), start, seconds, details } = event;
        let mut event = json!({
            "name": name,
            "cat": category,
            "ph": "X",
            "pid": pid,
            "tid": tid,
            "ts": 1e6 * start,
            "dur": 1e6 * seconds,
        });
        if !details.is_null() {
            event["args"] = details;
        }
        self.events.push(event);
    }

    /// Adds the values of the series of a counter from a time on.
    pub fn counter(&mut self, pid: usize, name: &str, start: f64, series: Map<String, Value>) {
        self.events.push(json!({"name": name, "ph": "C", "pid": pid, "ts": 1e6 * start, "args": series}));
    }

    /// The trace as JSON.
    pub fn to_json(self) -> Value {
        json!({"displayTimeUnit": "ms", "traceEvents": self.events})
    }
}

/// The expected times of the instructions of titled timelines, one after another, and counters of the bytes of each line
/// of the ledger.
pub fn to_trace(timelines: &[(String, &Timeline)]) -> Trace {
    let mut trace = Trace::new();
    for (pid, (title, timeline)) in timelines.iter().enumerate() {
        let tracks: Vec<&str> = timeline.plans.iter().map(|plan| plan.name.as_str()).collect();
        trace.process(pid, title, &tracks);
        let lines = timeline.lines();
        let mut start = 0.0;
        let mut last: Option<Vec<u64>> = None;
        let plan_of = |i: usize| timeline.plans.iter().rposition(|plan| plan.first <= i).unwrap_or(0);
        for (i, instruction) in timeline.instructions.iter().enumerate() {
            let bytes: Vec<u64> = lines.bytes.iter().map(|line| line[i]).collect();
            if last.as_ref() != Some(&bytes) {
                let series = lines.lines.iter().cloned().zip(bytes.iter().map(|&b| json!(b))).collect();
                trace.counter(pid, "bytes", start, series);
                last = Some(bytes);
            }
            trace.interval(TraceEvent {
                name: &instruction.label,
                category: name(instruction.phase),
                track: (pid, plan_of(i)),
                start,
                seconds: instruction.seconds,
                details: json!({
                    "instruction": i, "op": instruction.op, "layer": instruction.layer, "kernel": instruction.kernel,
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
