//! Trace of the launches and copies of a few passes, for Perfetto (ui.perfetto.dev) or chrome://tracing.
//! Invariant: the times are measured by the device.

use super::case::BenchCase;
use plimsoll_data::atomic::AtomicFile;
use plimsoll_exec::Span;
use plimsoll_graph::{Graph, node_label};
use plimsoll_plan::{Instr, Plan};
use plimsoll_runtime::RuntimeError;
use plimsoll_runtime::report::to_json;
use plimsoll_runtime::timeline::{EventTrace, TraceDetails, TraceEvent};
use std::io::Write as _;
use std::path::Path;

/// Number of traced passes, which run after the timed passes.
const PASSES: u32 = 2;

/// Tracks of a device in display order; the index is the thread id in the trace.
const TRACKS: [&str; 3] = ["in", "compute", "out"];

/// Traces [`PASSES`] passes and writes the trace to `path`.
pub(super) fn write(path: &Path, case: &mut BenchCase) -> Result<(), RuntimeError> {
    let mut file = AtomicFile::create(path)?;
    let spans = case.spans(PASSES)?;
    let text = to_json(&trace(&spans, &LaunchOrder::of(case.plan()))).to_string();
    file.write_all(text.as_bytes()).map_err(|e| file.error(e))?;
    Ok(file.commit()?)
}

/// Launches of a step in schedule order. Consecutive launches of one op are one entry, because a launch may
/// consist of several kernels and the trace does not mark their boundaries.
struct LaunchOrder(Vec<(&'static str, Vec<LabelledLaunch>)>);

struct LabelledLaunch {
    label: String,
    layer: Option<u32>,
}

impl LaunchOrder {
    fn of(plan: &Plan) -> Self {
        let mut order: Vec<(&'static str, Vec<LabelledLaunch>)> = vec![];
        for instr in &plan.schedule.instrs {
            let Instr::Launch(id) = *instr else { continue };
            let (op, launch) = launch(&plan.graph, id);
            match order.last_mut() {
                Some((last, launches)) if *last == op => launches.push(launch),
                _ => order.push((op, vec![launch])),
            }
        }
        Self(order)
    }

    /// Assigns a launch to each kernel span, given the op of each span in order of time. Runs of one op are
    /// matched with the next entry for the op, cyclically, because the spans cover several steps. `None` for
    /// ops that the step lacks.
    fn launches<'a>(&'a self, ops: &[&str]) -> Vec<Option<&'a LabelledLaunch>> {
        let mut found = vec![];
        let mut at = 0;
        for run in ops.chunk_by(|a, b| a == b) {
            let ahead = (0..self.0.len()).find(|i| self.0[(at + i) % self.0.len()].0 == run[0]);
            let Some(ahead) = ahead else {
                found.extend(run.iter().map(|_| None));
                continue;
            };
            let launches = &self.0[(at + ahead) % self.0.len()].1;
            at += ahead + 1;
            // If a launch of the run has several kernels, the boundaries between launches are unknown: all
            // kernels of the run are attributed to its first launch.
            let are_single = run.len() == launches.len();
            found.extend((0..run.len()).map(|i| Some(&launches[if are_single { i } else { 0 }])));
        }
        found
    }
}

fn launch(graph: &Graph, id: plimsoll_graph::NodeId) -> (&'static str, LabelledLaunch) {
    let node = graph.node(id);
    (node.op.name(), LabelledLaunch { label: node_label(graph, id), layer: node.layer })
}

/// The trace, with one process for each replica.
fn trace(replicas: &[(String, Vec<Span>)], order: &LaunchOrder) -> EventTrace {
    let mut trace = EventTrace::new();
    for (pid, (name, spans)) in replicas.iter().enumerate() {
        trace.process(pid, name, &TRACKS);
        add_spans(&mut trace, pid, spans, order);
    }
    trace
}

fn add_spans(trace: &mut EventTrace, pid: usize, spans: &[Span], order: &LaunchOrder) {
    let mut sorted: Vec<&Span> = spans.iter().collect();
    sorted.sort_by(|a, b| a.start.total_cmp(&b.start));
    let computed: Vec<&Span> = sorted.iter().copied().filter(|span| is_launch(span)).collect();
    let ops: Vec<&str> = computed.iter().map(|span| op(span)).collect();
    let mut launches = order.launches(&ops).into_iter();
    for span in sorted {
        let launch = if is_launch(span) { launches.next().flatten() } else { None };
        let tid = TRACKS.iter().position(|track| *track == span.track).unwrap_or(TRACKS.len());
        trace.interval(TraceEvent {
            name: &span.name,
            category: if is_launch(span) { "kernel" } else { "copy" },
            track: (pid, tid),
            start: span.start,
            seconds: span.seconds,
            details: launch.map(|LabelledLaunch { label, layer }| TraceDetails::Launch {
                launch: label.clone(),
                layer: *layer,
            }),
        });
    }
}

fn is_launch(span: &Span) -> bool {
    span.track == "compute" && !span.name.starts_with("copy")
}

/// The op in the name of a span: `linear` in `linear: gelu of elementwise.cu`.
fn op(span: &Span) -> &str {
    span.name.split(':').next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn span(track: &'static str, name: &str, start: f64) -> Span {
        Span { track, name: name.to_owned(), start, seconds: 1e-6 }
    }

    fn order() -> LaunchOrder {
        let launch = |label: &str, layer| LabelledLaunch { label: label.to_owned(), layer };
        LaunchOrder(vec![
            ("embed", vec![launch("embed", None)]),
            ("linear", vec![launch("linear a", Some(0)), launch("linear b", Some(0))]),
            ("add", vec![launch("add", Some(1))]),
        ])
    }

    #[test]
    fn events_have_their_tracks_times_and_launches() {
        let names =
            ["embed", "linear: product", "linear: gelu", "add", "embed", "linear", "linear", "linear", "add"];
        let mut spans: Vec<Span> =
            names.iter().enumerate().map(|(i, name)| span("compute", name, i as f64)).collect();
        spans.insert(0, span("out", "copy out, 8 B", 20.0));
        spans.push(span("in", "copy in, 16 B", 0.5));
        let replicas = [("a device".to_owned(), spans), ("another".to_owned(), vec![])];
        let json = to_json(&trace(&replicas, &order()));
        let events = json["traceEvents"].as_array().expect("events");
        assert_eq!(events[0]["args"]["name"], "a device");
        let tracks: Vec<&str> = events[1..4].iter().filter_map(|e| e["args"]["name"].as_str()).collect();
        assert_eq!(tracks, TRACKS);
        let told: Vec<_> =
            events[4..15].iter().map(|e| (e["tid"].as_u64(), e["args"]["launch"].as_str())).collect();
        let of = |label| (Some(1), Some(label));
        let wanted = [
            of("embed"),
            (Some(0), None),
            of("linear a"),
            of("linear b"),
            of("add"),
            of("embed"),
            // Three kernels for two launches: all are attributed to the first launch.
            of("linear a"),
            of("linear a"),
            of("linear a"),
            of("add"),
            (Some(2), None),
        ];
        assert_eq!(told, wanted);
        let copy = &events[5];
        assert_eq!((&copy["ph"], &copy["cat"], copy["ts"].as_f64()), (&"X".into(), &"copy".into(), Some(5e5)));
        assert_eq!(events[6]["args"]["layer"], 0);
        let process = |event: &Value| (event["pid"].as_u64(), event["args"]["name"].clone());
        assert_eq!(process(&events[15]), (Some(1), "another".into()));
        assert!(events.len() == 19 && events[..15].iter().all(|event| event["pid"] == 0));
    }
}
