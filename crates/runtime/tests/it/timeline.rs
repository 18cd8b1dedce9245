//! Files of timelines: snapshots that Python reads, and traces.

use plimsoll_graph::Bytes;
use plimsoll_plan::{Program, Room, Streaming};
use plimsoll_runtime::price::{self, PriceRequest};
use plimsoll_runtime::report::to_json;
use plimsoll_runtime::timeline::{Timeline, memory_viz, to_trace};
use serde_json::Value;
use std::io::Write as _;
use std::process::{Command, Stdio};

/// Reads a pickle without classes and prints it as JSON. Where PyTorch is installed, its own reader runs too.
const READER: &str = "
import importlib.util, io, json, pickle, sys
class Plain(pickle.Unpickler):
    def find_class(self, module, name):
        raise pickle.UnpicklingError(module + '.' + name)
data = sys.stdin.buffer.read()
snapshot = Plain(io.BytesIO(data)).load()
if importlib.util.find_spec('torch'):
    from torch.cuda import _memory_viz
    assert _memory_viz.segsum(snapshot) and _memory_viz.trace(snapshot) and _memory_viz.trace_plot(snapshot)
json.dump(snapshot, sys.stdout)
";

fn program(target: &str) -> Program {
    let target = price::target(target).expect("a target");
    let request = PriceRequest {
        tokens: Some(512),
        budget: None,
        stream: Streaming::Never,
        room: Room::UNLIMITED,
        precision: None,
        target,
    };
    price::program("facebook/esm2_t6_8M_UR50D", &request).expect("planned")
}

/// The snapshot as Python reads it; `None` where there is no Python.
fn read(timelines: &[(String, &Timeline)]) -> Option<Value> {
    let started = Command::new("python3")
        .args(["-c", READER])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let Ok(mut python) = started else {
        println!("skipped: there is no python3");
        return None;
    };
    let bytes = memory_viz::to_pickle(timelines);
    python.stdin.take().expect("piped").write_all(&bytes).expect("Python reads");
    let ran = python.wait_with_output().expect("Python ends");
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    Some(serde_json::from_slice(&ran.stdout).expect("JSON"))
}

fn keys(value: &Value) -> Vec<&str> {
    let mut keys: Vec<&str> = value.as_object().expect("a dict").keys().map(String::as_str).collect();
    keys.sort_unstable();
    keys
}

fn number(value: &Value, key: &str) -> u64 {
    value[key].as_u64().unwrap_or_else(|| panic!("{key} in {value}"))
}

fn list<'a>(value: &'a Value, key: &str) -> &'a Vec<Value> {
    value[key].as_array().unwrap_or_else(|| panic!("{key} in {value}"))
}

#[test]
fn python_reads_a_snapshot_whose_bytes_are_those_of_the_plan() {
    let (here, card) = (program("cpu"), program("h200"));
    let timelines = [("here".to_owned(), &here.timeline()), ("card".to_owned(), &card.timeline())];
    let Some(snapshot) = read(&timelines) else { return };
    assert_eq!(keys(&snapshot), ["device_traces", "segments"]);
    let (segments, traces) = (list(&snapshot, "segments"), list(&snapshot, "device_traces"));
    assert_eq!((segments.len(), traces.len()), (2, 2));
    for (device, (segment, program)) in segments.iter().zip([&here, &card]).enumerate() {
        let wanted = [
            "active_size",
            "address",
            "allocated_size",
            "blocks",
            "device",
            "frames",
            "is_expandable",
            "requested_size",
            "segment_pool_id",
            "segment_type",
            "stream",
            "total_size",
        ];
        assert_eq!(keys(segment), wanted);
        assert_eq!(number(segment, "device"), device as u64);
        assert_eq!(Bytes(number(segment, "total_size")), program.arena_bytes());
        let mut end = number(segment, "address");
        let mut used = 0;
        for block in list(segment, "blocks") {
            assert_eq!(keys(block), ["address", "frames", "requested_size", "size", "state"]);
            assert_eq!(number(block, "address"), end, "{block}");
            end += number(block, "size");
            used += number(block, "requested_size");
            let is_used = block["state"] == "active_allocated";
            assert!(is_used || block["state"] == "inactive", "{block}");
            assert_eq!(list(block, "frames").is_empty(), !is_used, "{block}");
        }
        assert_eq!(end, number(segment, "address") + number(segment, "total_size"));
        for key in ["active_size", "allocated_size", "requested_size"] {
            assert_eq!(number(segment, key), used, "{key}");
        }

        // The trace, replayed: what is allocated never overlaps, and its most bytes are the plan's without padding.
        let (mut live, mut sum, mut most) = (std::collections::BTreeMap::new(), 0, 0);
        for event in traces[device].as_array().expect("a list") {
            assert_eq!(keys(event), ["action", "addr", "frames", "size", "stream", "time_us"]);
            let (addr, size) = (number(event, "addr"), number(event, "size"));
            for frame in list(event, "frames") {
                assert_eq!(keys(frame), ["filename", "line", "name"]);
                assert!(frame["name"].is_string() && frame["filename"].is_string() && frame["line"].is_u64());
            }
            match event["action"].as_str().expect("text") {
                "segment_alloc" => assert_eq!(Bytes(size), program.arena_bytes()),
                "alloc" => {
                    let before = live.range(..addr + size).next_back();
                    assert!(before.is_none_or(|(a, s)| a + s <= addr), "{event}");
                    live.insert(addr, size);
                    sum += size;
                    most = most.max(sum);
                }
                "free_requested" => assert_eq!(live.get(&addr), Some(&size), "{event}"),
                "free_completed" => {
                    assert_eq!(live.remove(&addr), Some(size), "{event}");
                    sum -= size;
                }
                action => panic!("{action}"),
            }
        }
        assert_eq!(sum, used, "what is left is what the segment holds");
        let padding = program.ledger().get("padding and packing");
        assert_eq!(Bytes(most) + padding, program.arena_bytes());
    }
}

#[test]
fn a_trace_has_the_expected_times_and_the_bytes_of_the_ledger() {
    let program = program("h200");
    let timeline = program.timeline();
    let trace = to_json(&to_trace(&[("card".to_owned(), &timeline)]));
    let events = list(&trace, "traceEvents");
    let of = |kind: &str| events.iter().filter(|e| e["ph"] == kind).collect::<Vec<_>>();
    let intervals = of("X");
    assert_eq!(intervals.len(), timeline.instructions.len());
    let mut end = 0.0;
    for (event, instruction) in intervals.iter().zip(&timeline.instructions) {
        let (start, time) = (event["ts"].as_f64().expect("ts"), event["dur"].as_f64().expect("dur"));
        assert!((start - end).abs() < 1e-3, "{event}");
        assert_eq!((&event["name"], time), (&instruction.label.as_str().into(), 1e6 * instruction.seconds));
        assert_eq!(event["args"]["kernel"].as_str(), instruction.kernel);
        end = start + time;
    }
    assert!((end / (1e6 * program.seconds()) - 1.0).abs() < 1e-6);
    let sum = |event: &&Value| -> u64 {
        event["args"].as_object().expect("series").values().filter_map(Value::as_u64).sum()
    };
    assert_eq!(of("C").iter().map(sum).max(), Some(program.peak().0));
}
