//! Planned memory against allocated memory. Invariant: the planned peak is the size of the arena, to the byte.

use crate::ALLOCATOR;
use plimsoll_cpu::{CpuDevice, Isa};
use plimsoll_embed::{EmbedOptions, embed};
use plimsoll_exec::Executor;
use plimsoll_graph::Bytes;
use plimsoll_plan::{PlanError, Program, Reserved, Room};
use plimsoll_runtime::price::{PriceRequest, program, report, to_text};
use plimsoll_runtime::session::Site;
use plimsoll_runtime::{Device, Precision, RuntimeError, Settings, Silent, Streaming};
use plimsoll_testing::cards::{Card, CardMemory};
use plimsoll_testing::{Folder, fixture, in_own_process};
use stats_alloc::Region;
use std::path::{Path, PathBuf};
use std::sync::Arc;

#[test]
fn planned_bytes_are_the_arena() {
    for tokens in [512, 1024] {
        let memory = Arc::new(CardMemory::of(4 << 30));
        let card = Arc::new(Card::new(0).with(Arc::clone(&memory)));
        let device = Device::machines(vec![card]).expect("one kind");
        let settings = Settings { device, ..Settings::default() };
        let mut target = settings.target().expect("a target");
        target.reserved.push(Reserved { label: "context".to_owned(), bytes: Bytes(12_345) });
        let model = fixture("goldens/esm2/config.json").display().to_string();
        let (precision, stream) = (None, Streaming::Never);
        let request = PriceRequest {
            tokens: Some(tokens),
            budget: None,
            stream,
            room: Room::UNLIMITED,
            precision,
            target,
        };
        let program = program(&model, &request).expect("planned");
        let tables = program.ledger().get("reserved: page tables of pinned host memory");
        let peak = program.peak();
        let executors = start(&settings, 1, program);
        // The driver of a card keeps the page tables, which this card does not have.
        assert!(tables > Bytes::ZERO);
        assert_eq!(peak, memory.mapped() + Bytes(12_345) + tables);
        assert_eq!(executors[0].program().arena_bytes(), memory.mapped());
    }
}

/// On a CPU, compares the memory line of `embed` with the plan, and the planned bytes with the allocated
/// arenas. Runs in a process of its own, because the allocation counter covers all threads of a process.
#[test]
fn planned_bytes_are_those_of_lanes() {
    if !in_own_process("in_place::planned_bytes_are_those_of_lanes") {
        return;
    }
    let folder = Folder::new("in-place-replicas");
    let input = long(&folder);
    for (threads, replicas) in [(1, 1), (2, 1), (3, 3), (4, 4), (8, 8)] {
        let planned = planned(threads, None).expect("planned");
        let tokens = planned.plans()[0].1.graph.bounds.tokens;
        let settings = settings(threads, None);
        assert_eq!(planned.replicas(), replicas);
        assert_eq!(report(&planned).expect("a report").replicas, replicas);

        let in_lanes = if replicas > 1 { format!(" in {replicas} replicas") } else { String::new() };
        let line = embedded(&folder, &input, &settings);
        let says = format!(
            "planned {} at {tokens} tokens a step{in_lanes} ({})",
            planned.peak(),
            planned.ledger().line()
        );
        assert!(line.contains(&says), "{threads} threads: {line}\n{says}");

        // Expected outputs: the means of every in-flight step, and of one completed step per replica that is
        // not yet taken.
        let means = Bytes(planned.plans()[0].1.graph.bounds.sequences * 40 * 4);
        let outputs = if replicas == 1 { Bytes(2 * means.0) } else { Bytes(3 * replicas as u64 * means.0) };
        assert_eq!(planned.ledger().get("beside the arena: outputs on their way"), outputs);
        let rows = planned.ledger().get("beside the arena: rows that wait for their turn");
        let (peak, region) = (planned.peak(), Region::new(ALLOCATOR));
        let executors = start(&settings, replicas, planned);
        let change = region.change();
        let held = Bytes((change.bytes_allocated - change.bytes_deallocated) as u64);
        // Beside its arena, each executor allocates its plan and instructions.
        let (arenas, instructions) = (peak - outputs - rows, Bytes(50_000 * replicas as u64));
        assert!(
            executors.len() == replicas && held >= arenas && held < arenas + instructions,
            "{held} for {arenas}"
        );
    }
}

/// Starts executors of a program, with `replicas` replicas on the device of the settings.
fn start(settings: &Settings, replicas: usize, program: Program) -> Vec<Executor> {
    let budget = settings.read_budget().expect("a budget");
    Site::new(settings, replicas, None, budget).start(program, &mut Silent).expect("started")
}

/// With a budget that does not fit all replicas, `plan` and `embed` choose the same smaller number of replicas.
#[test]
fn a_plan_has_the_lanes_that_fit() {
    let folder = Folder::new("in-place-fit");
    let input = long(&folder);
    let most = planned(4, None).expect("planned");
    let budget = Some(most.peak() - Bytes(1));
    let fewer = planned(4, budget).expect("planned");
    assert_eq!((most.replicas(), fewer.replicas()), (4, 2));
    let line = embedded(&folder, &input, &settings(4, budget));
    let says = format!("planned {} at", fewer.peak());
    assert!(line.contains(&says) && line.contains(" in 2 replicas ("), "{line}\n{says}");
    let text = to_text("m", &fewer).expect("text");
    assert!(text.contains("2 replicas of 2 threads") && text.contains("a step in every replica"), "{text}");
    let none = planned(4, Some(Bytes(1000))).expect_err("nothing fits");
    assert!(matches!(none, RuntimeError::Plan(PlanError::OverBudget(_))), "{none}");
}

/// Writes an input with a sequence of the default maximum length and enough sequences for eight replicas.
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

fn planned(threads: usize, budget: Option<Bytes>) -> Result<plimsoll_plan::Program, RuntimeError> {
    let Settings { budget, precision, stream, .. } = settings(threads, budget);
    let target = CpuDevice::target(threads, Isa::detect()).expect("a target");
    let model = fixture("goldens/esm2/config.json").display().to_string();
    program(&model, &PriceRequest { tokens: None, budget, stream, room: Room::UNLIMITED, precision, target })
}

/// Runs `embed` and returns its memory line.
fn embedded(folder: &Folder, input: &Path, settings: &Settings) -> String {
    let usual =
        EmbedOptions::usual(fixture("goldens/esm2").display().to_string(), input, folder.path("out.npy"));
    let options = EmbedOptions { force: true, settings: settings.clone(), ..usual };
    embed(&options, &mut Silent).unwrap_or_else(|e| panic!("{e}")).memory_line
}
