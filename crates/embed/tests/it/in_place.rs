//! Plans for a machine in place. Invariant: what `plan` says is what the arena takes, to the byte.

use crate::ALLOCATOR;
use crate::cards::{Card, Memory};
use crate::rig::{Folder, alone, fixture};
use cpu::{CpuDevice, Isa};
use exec::Executor;
use graph::Bytes;
use plan::{PlanError, Program, Reserved};
use plimsoll_embed::{Destination, Options, Pool, embed};
use runtime::price::{Request, program, to_json, to_text};
use runtime::session::Site;
use runtime::{Device, Precision, RuntimeError, Settings, Silent, Stream};
use stats_alloc::Region;
use std::path::{Path, PathBuf};
use std::sync::Arc;

#[test]
fn planned_bytes_are_the_arena() {
    for tokens in [512, 1024] {
        let memory = Arc::new(Memory::of(4 << 30));
        let card = Arc::new(Card::new(0).with(Arc::clone(&memory)));
        let device = Device::machines(vec![card]).expect("one kind");
        let settings = Settings { device, ..Settings::default() };
        let mut target = settings.target().expect("a target");
        target.reserved.push(Reserved { label: "context".to_owned(), bytes: Bytes(12_345) });
        let model = fixture("goldens/esm2/config.json").display().to_string();
        let (precision, stream) = (None, Stream::Never);
        let request = Request { tokens: Some(tokens), budget: None, stream, precision, target };
        let program = program(&model, &request).expect("planned");
        let (peak, executors) = (program.peak(), start(&settings, 1, program));
        assert_eq!(peak, memory.mapped() + Bytes(12_345));
        assert_eq!(executors[0].program().arena_bytes(), memory.mapped());
    }
}

/// On a CPU: what the memory line of `embed` says of an input that may be long, and what its arenas take. By itself, since
/// the counter sees all threads of a process.
#[test]
fn planned_bytes_are_those_of_lanes() {
    if !alone("in_place::planned_bytes_are_those_of_lanes") {
        return;
    }
    let folder = Folder::new("in-place-lanes");
    let input = long(&folder);
    for (threads, lanes) in [(1, 1), (2, 1), (3, 3), (4, 4), (8, 8)] {
        let planned = planned(threads, None).expect("planned");
        let tokens = planned.plans()[0].1.graph.bounds.tokens;
        let settings = settings(threads, None);
        assert_eq!(
            (planned.lanes(), to_json(&planned).expect("JSON")["lanes"].as_u64()),
            (lanes, Some(lanes as u64))
        );

        let in_lanes = if lanes > 1 { format!(" in {lanes} replicas") } else { String::new() };
        let line = embedded(&folder, &input, &settings);
        let says = format!(
            "planned {} at {tokens} tokens a step{in_lanes} ({})",
            planned.peak(),
            planned.ledger().line()
        );
        assert!(line.contains(&says), "{threads} threads: {line}\n{says}");

        // Means of every step that is on its way, and those that each lane has not handed out.
        let means = Bytes(planned.plans()[0].1.graph.bounds.sequences * 40 * 4);
        let outputs = if lanes == 1 { Bytes(2 * means.0) } else { Bytes(3 * lanes as u64 * means.0) };
        assert_eq!(planned.ledger().get("beside the arena: outputs on their way"), outputs);
        let rows = planned.ledger().get("beside the arena: rows that wait for their turn");
        let (peak, region) = (planned.peak(), Region::new(ALLOCATOR));
        let executors = start(&settings, lanes, planned);
        let change = region.change();
        let held = Bytes((change.bytes_allocated - change.bytes_deallocated) as u64);
        // Each executor has its plan and instructions beside its arena.
        let (arenas, instructions) = (peak - outputs - rows, Bytes(50_000 * lanes as u64));
        assert!(
            executors.len() == lanes && held >= arenas && held < arenas + instructions,
            "{held} for {arenas}"
        );
    }
}

/// Executors of a program, on the machine of the settings with this many replicas.
fn start(settings: &Settings, replicas: usize, program: Program) -> Vec<Executor> {
    let budget = settings.read_budget().expect("a budget");
    Site::new(settings, replicas, None, budget).start(program).expect("started")
}

/// Where the line has no room for as many lanes, the plan has as many as the run.
#[test]
fn a_plan_has_the_lanes_that_fit() {
    let folder = Folder::new("in-place-fit");
    let input = long(&folder);
    let most = planned(4, None).expect("planned");
    let budget = Some(most.peak() - Bytes(1));
    let fewer = planned(4, budget).expect("planned");
    assert_eq!((most.lanes(), fewer.lanes()), (4, 2));
    let line = embedded(&folder, &input, &settings(4, budget));
    let says = format!("planned {} at", fewer.peak());
    assert!(line.contains(&says) && line.contains(" in 2 replicas ("), "{line}\n{says}");
    let text = to_text("m", &fewer).expect("text");
    assert!(text.contains("2 replicas of 2 threads") && text.contains("a step in every replica"), "{text}");
    let none = planned(4, Some(Bytes(1000))).expect_err("nothing fits");
    assert!(matches!(none, RuntimeError::Plan(PlanError::OverBudget(_))), "{none}");
}

/// A sequence as long as a plan thinks, in an input that is worth eight lanes.
fn long(folder: &Folder) -> PathBuf {
    let record =
        |(i, letters): (usize, usize)| format!(">s{i}\n{}\n", "MKVLAWTRES".repeat(103)[..letters].to_owned());
    let lengths = std::iter::once(1022).chain((0..700).map(|i| 60 + i * 7 % 70));
    folder.write("long.faa", lengths.enumerate().map(record).collect::<String>())
}

fn settings(threads: usize, budget: Option<Bytes>) -> Settings {
    let budget = budget.or(Some(Bytes(1 << 32)));
    Settings { threads, budget, precision: Some(Precision::F32), ..Settings::default() }
}

fn planned(threads: usize, budget: Option<Bytes>) -> Result<plan::Program, RuntimeError> {
    let Settings { budget, precision, stream, .. } = settings(threads, budget);
    let target = CpuDevice::target(threads, Isa::detect()).expect("a target");
    let model = fixture("goldens/esm2/config.json").display().to_string();
    program(&model, &Request { tokens: None, budget, stream, precision, target })
}

/// The memory line of an embedding.
fn embedded(folder: &Folder, input: &Path, settings: &Settings) -> String {
    let options = Options {
        model: fixture("goldens/esm2").display().to_string(),
        inputs: vec![input.to_owned()],
        output: Destination::File(folder.path("out.npy")),
        force: true,
        pool: Pool::Mean,
        layers: None,
        sort_by_length: true,
        max_length: None,
        truncate: false,
        prefetch: 2,
        settings: settings.clone(),
    };
    embed(&options, &mut Silent).unwrap_or_else(|e| panic!("{e}")).memory_line
}
