//! Tests that the memory held by an executor equals the planned memory, for random configurations of all kinds
//! of models. Invariant: configuration `k` is a function of `k` alone, so that a failure can be reproduced, and
//! every configuration can be trained.

use crate::ALLOCATOR;
use crate::train::lines;
use plimsoll_exec::{Executor, PersistentKind};
use plimsoll_graph::StateKind;
use plimsoll_plan::{Program, check};
use plimsoll_runtime::session::Site;
use plimsoll_runtime::{Device, Settings, Silent};
use plimsoll_testing::{Folder, fixture, in_own_process};
use plimsoll_train::config::TrainConfig;
use plimsoll_train::{Resume, TrainRequest, open, priced, train_with};
use stats_alloc::Region;
use std::collections::{BTreeMap, BTreeSet};

/// Number of random configurations.
const DRAWS: u64 = 300;

/// Every `STEPS`-th configuration is also trained for one step.
const STEPS: u64 = 5;

/// Upper bound of the bytes that an executor holds outside the arena for one instruction: its op, and the
/// addresses and shapes of its operands.
const PER_INSTRUCTION: u64 = 4096;

/// Upper bound of the bytes that a device holds outside the arena: threads with their queues, and the tile
/// configuration.
const DEVICE: u64 = 128 << 10;

/// Pseudo-random number generator SplitMix64 (Steele, Lea and Flood 2014).
struct Draw(u64);

impl Draw {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn of<'a>(&mut self, words: &[&'a str]) -> &'a str {
        words[(self.next() % words.len() as u64) as usize]
    }

    fn number(&mut self, from: u64, to: u64) -> u64 {
        from + self.next() % (to - from + 1)
    }
}

const BASE: &str = "run: {steps: 1}\nschedule: {kind: constant}\nmemory: {budget: 1GB}\n";

/// A random configuration as flags `key=value`.
fn flags(draw: &mut Draw) -> String {
    let kind = draw.of(&["moe_lm", "moe_lm", "dense_lm", "esm2", "dnabert_s", "head"]);
    let model = match kind {
        "moe_lm" | "dense_lm" => decoder(draw, kind),
        "head" => head(draw),
        encoder => encoder_of(draw, encoder),
    };
    let optimizer = draw.of(&["adamw", "adamw8bit", "adafactor", "sgd", "auto"]);
    let momentum = draw.of(&["0", "0.9"]);
    let clip = draw.of(&["1", "null"]);
    // Only f32 for a head, because other precisions would save nothing.
    let precision = if kind == "head" { "f32" } else { draw.of(&["f32", "f32", "bf16", "fp16"]) };
    let remat = draw.of(&["none", "full", "selective", "auto", "every_n memory.remat_every=2"]);
    let decay = draw.of(&["matrices", "all"]);
    let is_head = kind == "head";
    let pack = if is_head { draw.number(2, 9) } else { draw.number(64, 100) };
    // A micro-step of a head is a pack.
    let micro = if is_head { pack } else { pack * draw.number(1, 2) };
    let tokens = micro * draw.number(1, 3);
    let is_given = draw.of(&["given", "auto"]) == "given" && !is_head;
    let micro = if is_given { micro.to_string() } else { "auto".to_owned() };
    let chunk = draw.of(&["auto", "7", "64"]);
    let threads = draw.number(1, 3);
    let ema = draw.of(&["null", "0.99"]);
    format!(
        "model.kind={kind} {model} optimizer.kind={optimizer} optimizer.momentum={momentum} \
         optimizer.clip_norm={clip} optimizer.decay={decay} precision.kind={precision} memory.remat={remat} \
         memory.loss_chunk={chunk} batch.tokens={tokens} batch.pack_tokens={pack} batch.micro_tokens={micro} run.threads={threads} \
         optimizer.ema={ema}"
    )
}

fn decoder(draw: &mut Draw, kind: &str) -> String {
    let heads = draw.of(&["2", "4"]);
    let hidden = 4 * 2 * draw.number(1, 8);
    let layers = draw.number(1, 4);
    let intermediate = draw.number(5, 70);
    let kv_heads = draw.of(&["null", "1", "2"]);
    let norm = draw.of(&["layer_norm", "rms_norm"]);
    let activation = draw.of(&["gelu", "swiglu"]);
    let bias = draw.of(&["true", "false"]);
    let position = draw.of(&["rotary", "alibi"]);
    let tied = draw.of(&["true", "false"]);
    let mask = draw.of(&[
        "causal",
        "window model.attention.window=9",
        "block_sparse model.attention.block=8 model.attention.local=2",
    ]);
    let dropout = draw.of(&["0", "0.1"]);
    let longest = draw.number(5, 64);
    let experts = if kind == "dense_lm" { String::new() } else { experts(draw) };
    format!(
        "data.train=[FIXTURES/../examples/corpus.txt] data.longest={longest} data.document=line model.heads={heads} \
         model.hidden={hidden} model.layers={layers} model.intermediate={intermediate} \
         model.kv_heads={kv_heads} model.norm={norm} model.activation={activation} model.bias={bias} \
         model.position={position} model.tied_head={tied} model.attention.mask={mask} model.dropout={dropout} \
         {experts}"
    )
}

fn experts(draw: &mut Draw) -> String {
    let count = draw.number(2, 6);
    let top_k = draw.number(1, 2);
    let shared = draw.number(0, 1);
    let capacity = draw.of(&["null", "1.25"]);
    let z = draw.of(&["0", "1e-3"]);
    let renormalise = draw.of(&["true", "false"]);
    let balance = draw.of(&["0", "0.01"]);
    format!(
        "model.experts.count={count} model.experts.top_k={top_k} model.experts.shared={shared} \
         model.experts.capacity={capacity} model.experts.renormalise={renormalise} loss.balance={balance} \
         loss.router_z={z}"
    )
}

fn encoder_of(draw: &mut Draw, kind: &str) -> String {
    let (data, longest) = match kind {
        "esm2" => ("goldens/pipeline/expected_500/protein.faa", draw.number(20, 64)),
        _ => ("goldens/pipeline/expected_500/nucleotide.fa", draw.number(20, 64)),
    };
    // Adapters without classes need a model with a language-model head. Of the goldens, only ESM-2 has one.
    let adapters = if kind == "esm2" { "model.lora.rank=2" } else { "" };
    let what = draw.of(&[
        "",
        "model.classes=3 data.truncate=true data.labels=LABELS",
        "model.classes=2 model.freeze_encoder=true data.truncate=true data.labels=LABELS",
        adapters,
        "model.lora.rank=3 model.classes=2 data.truncate=true data.labels=LABELS",
    ]);
    let dropout = draw.of(&["0", "0.2"]);
    let labels = if kind == "esm2" { "proteins.tsv" } else { "reads.tsv" };
    format!(
        "model.from=FIXTURES/goldens/{kind} data.train=[FIXTURES/{data}] data.format=fasta data.longest={longest} \
         model.dropout={dropout} {}",
        what.replace("LABELS", &format!("FOLDER/{labels}"))
    )
}

fn head(draw: &mut Draw) -> String {
    let hidden = draw.number(1, 40);
    let dropout = draw.of(&["0", "0.5"]);
    format!(
        "data.train=[FIXTURES/../examples/head/dna.npy] data.proteins=[FIXTURES/../examples/head/proteins.npy] \
         data.labels=FIXTURES/../examples/head/labels.tsv model.hidden={hidden} model.dropout={dropout}"
    )
}

/// Writes tables that assign the classes 0 and 1 to the golden proteins and reads in turn.
fn labels(folder: &Folder) {
    for (name, from) in [("proteins", "expected_500/protein.faa"), ("reads", "expected_500/nucleotide.fa")] {
        let text = crate::rig::read(fixture("goldens/pipeline").join(from));
        let names = text.lines().filter_map(|line| line.strip_prefix('>')?.split_whitespace().next());
        let rows: String = names.enumerate().map(|(i, name)| format!("{name}\t{}\n", i % 2)).collect();
        folder.write(&format!("{name}.tsv"), rows);
    }
}

/// Bytes allocated and not freed since the start of `region`.
fn held(region: &Region<'_, std::alloc::System>) -> u64 {
    let change = region.change();
    (change.bytes_allocated as u64).saturating_sub(change.bytes_deallocated as u64)
}

/// Asserts that an executor of the program allocates its arena and at most [`DEVICE`] plus [`PER_INSTRUCTION`]
/// bytes for each instruction, and that its persistent tensors have exactly the bytes of the ledger.
fn holds(program: Program, threads: usize, what: &str) {
    let arena = program.arena_bytes().0;
    let ledger = program.ledger();
    assert_eq!(ledger.total(), program.peak(), "{what}");
    for (name, plan) in program.plans() {
        check(&plan.graph, &plan.schedule, &plan.memory).unwrap_or_else(|e| panic!("{what}: {name}: {e}"));
    }
    let instructions: u64 = program.plans().iter().map(|(_, p)| p.schedule.instrs.len() as u64).sum();
    let settings = Settings { threads, ..Settings::default() };
    let site = Site::new(&settings, 1, None, settings.read_budget().expect("a budget"));
    let region = Region::new(ALLOCATOR);
    let executor = site.start(program, &mut Silent).expect("started").pop().expect("a device");
    let beside = held(&region).checked_sub(arena).unwrap_or_else(|| panic!("{what}: less than the arena"));
    assert!(
        beside <= DEVICE + PER_INSTRUCTION * instructions,
        "{what}: {beside} B beside the arena of {arena} B"
    );
    let lines = ledger.entries.iter().map(|e| (e.label.as_str(), e.bytes.0));
    let wanted: BTreeMap<&str, u64> = lines.filter(|(label, n)| survives(label) && *n > 0).collect();
    assert_eq!(survivors(&executor), wanted, "{what}");
}

/// Whether an entry of the ledger is for persistent tensors: parameters or states.
fn survives(label: &str) -> bool {
    let kinds =
        [StateKind::Gradient, StateKind::Optimizer, StateKind::Master, StateKind::Average, StateKind::Buffer];
    label == "params" || kinds.iter().any(|kind| kind.label() == label)
}

/// Bytes of the executor's persistent tensors by entry of the ledger; panics if two tensors have the same address.
fn survivors(executor: &Executor) -> BTreeMap<&'static str, u64> {
    let mut sums = BTreeMap::new();
    let mut seen = BTreeSet::new();
    for resident in executor.persistent_tensors() {
        let label = match &resident.what {
            PersistentKind::Param(_) => "params",
            PersistentKind::State(state) => state.role.kind().label(),
        };
        assert!(seen.insert(resident.at), "two tensors at {:?}", resident.at);
        let elements: u64 = resident.spec.shape.iter().filter_map(|d| d.fixed()).product();
        *sums.entry(label).or_default() += elements * resident.spec.dtype.size();
    }
    sums
}

#[test]
fn planned_is_held_for_three_hundred_configurations() {
    if !in_own_process("train_planned::planned_is_held_for_three_hundred_configurations") {
        return;
    }
    let folder = Folder::new("train-planned");
    labels(&folder);
    let fixtures = fixture("").display().to_string();
    let path = folder.0.display().to_string();
    let mut peaks = BTreeSet::new();
    for k in 0..DRAWS {
        let text = flags(&mut Draw(k)).replace("FIXTURES/", &fixtures).replace("FOLDER", &path);
        let what = format!("draw {k}: {text}");
        let flags: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
        let config = TrainConfig::parse(BASE, "test", &flags).unwrap_or_else(|e| panic!("{what}: {e}"));
        let target = priced::target(&config, "cpu").expect("a target");
        let found = priced::found(&config, &target, &mut Silent).unwrap_or_else(|e| panic!("{what}: {e}"));
        let peak = found.program.peak();
        let digest = found.program.digest().expect("hashed");
        peaks.insert(peak);
        holds(found.program, target.workers as usize, &what);
        if k % STEPS == 0 {
            let output = Folder::new("train-planned-run");
            let request = TrainRequest { config, output: output.0.clone(), resume: Resume::Never };
            let report =
                train_with(&request, &mut |config, observer| open(config, Device::Cpu, observer), &mut Silent)
                    .unwrap_or_else(|e| panic!("{what}: {e}"));
            let record = &report.run_record;
            let plan = record.plan.as_ref().expect("a plan");
            let data: u64 = plan.data.values().sum();
            assert_eq!(record.peak_bytes.0, peak.0 + data, "{what}");
            assert_eq!(plan.plan.digest, digest, "{what}");
            assert!(lines(&output)[0]["loss"].as_f64().is_some_and(f64::is_finite), "{what}");
        }
    }
    assert!(peaks.len() > 250, "{} of {DRAWS} are like another", DRAWS - peaks.len() as u64);
}

/// A refusal offers the longest sequences with which a plan fits, and the search goes down to the smallest micro-batch.
#[test]
fn a_refusal_goes_down_to_what_fits() {
    let plan = |flags: &str| {
        let base = "model: {kind: dense_lm, hidden: 16, layers: 2, heads: 2, intermediate: 16}\n\
                    data: {train: [x.txt], longest: 32768}\nbatch: {tokens: 65536}\nrun: {steps: 4}\n\
                    memory: {loss_chunk: 64, remat: none, budget: 36MB}\n";
        let flags: Vec<String> = flags.split_whitespace().map(str::to_owned).collect();
        let config = TrainConfig::parse(base, "test", &flags).expect("a configuration");
        priced::found(&config, &priced::target(&config, "cpu").expect("a target"), &mut Silent)
    };
    let refused = plan("").expect_err("too little").to_string();
    let (_, rest) = refused.split_once(" data.longest=").unwrap_or_else(|| panic!("{refused}"));
    let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    let longest: u64 = rest[..digits].parse().expect("a number");
    // The micro-batch is smaller than the batch divided by 2^5.
    let fits = plan(&format!("data.longest={longest}")).expect("as offered");
    assert!(fits.candidate.tokens < 65_536 >> 5, "{}", fits.candidate.tokens);
    assert!(plan(&format!("data.longest={}", 2 * longest)).is_err(), "{longest} is not the longest that fits");
    // Another batch has no micro-batch that is a power of two.
    let fits = plan("data.longest=16 batch.tokens=49152").expect("small sequences");
    assert!(49_152 % fits.candidate.tokens == 0, "{}", fits.candidate.tokens);
}
