//! Tests that a training step allocates no memory, and that the loop around it makes only a few allocations.
//! Invariant: allocations of all threads are counted, in a process that runs one test alone.

use crate::ALLOCATOR;
use plimsoll_runtime::{Device, Silent};
use plimsoll_testing::{Folder, fixture, in_own_process};
use plimsoll_train::config::TrainConfig;
use plimsoll_train::schedule::hyper;
use plimsoll_train::{MicroStepScalars, OpenedModel, Resume, TrainRequest, open, train_with};
use stats_alloc::Region;
use std::time::Duration;

/// Configuration of the tests: steps of two micro-batches.
const BASE: &str = "
data: {longest: 64, workers: 1}
schedule: {kind: constant}
memory: {budget: 1GB}
batch: {tokens: 256, micro_tokens: 128}
run: {steps: 1, threads: 2}
";

const SUBJECTS: [(&str, &str); 5] = [
    (
        "a mixture of experts that drops rows",
        "data.train=[FIXTURES/../examples/corpus.txt] model.hidden=32 model.layers=2 model.intermediate=32 \
         model.experts.count=4 model.experts.capacity=1.25 model.dropout=0.1 loss.router_z=1e-3",
    ),
    (
        "the same in bf16 at once",
        "data.train=[FIXTURES/../examples/corpus.txt] model.hidden=32 model.layers=2 model.intermediate=32 \
         model.experts.count=4 precision.kind=bf16 batch.micro_tokens=256 optimizer.clip_norm=null \
         optimizer.kind=adamw8bit",
    ),
    (
        "a dense model in fp16, all recomputed",
        "data.train=[FIXTURES/../examples/corpus.txt] model.kind=dense_lm model.hidden=32 model.layers=2 \
         precision.kind=fp16 memory.remat=full optimizer.kind=adafactor",
    ),
    (
        "adapters of an encoder",
        "model.kind=esm2 model.from=FIXTURES/goldens/esm2 data.format=fasta model.lora.rank=2 \
         data.train=[FIXTURES/goldens/pipeline/expected_500/protein.faa]",
    ),
    (
        "a head",
        "model.kind=head data.train=[FIXTURES/../examples/head/dna.npy] batch.tokens=16 batch.pack_tokens=8 batch.micro_tokens=auto data.longest=1024 \
         data.proteins=[FIXTURES/../examples/head/proteins.npy] optimizer.kind=sgd \
         data.labels=FIXTURES/../examples/head/labels.tsv",
    ),
];

fn config(flags: &str) -> TrainConfig {
    let flags = flags.replace("FIXTURES/", &fixture("").display().to_string());
    let flags: Vec<String> = flags.split_whitespace().map(str::to_owned).collect();
    TrainConfig::parse(BASE, "test", &flags).unwrap_or_else(|e| panic!("{flags:?}: {e}"))
}

/// Waits until the threads that prepare the following micro-batches are idle, because they allocate and the counter
/// includes them.
fn wait_for_data() {
    let mut rests = false;
    while !rests {
        let region = Region::new(ALLOCATOR);
        std::thread::sleep(Duration::from_millis(2));
        rests = region.change().allocations == 0;
    }
}

/// Maximum number of steps. One step without an allocation proves the claim; in other steps the test harness
/// may have allocated.
const PATIENCE: u64 = 10;

#[test]
fn a_training_step_allocates_nothing() {
    if !in_own_process("train_quiet::a_training_step_allocates_nothing") {
        return;
    }
    for (what, flags) in SUBJECTS {
        let config = config(flags);
        let opened = open(&config, Device::Cpu, &mut Silent).unwrap_or_else(|e| panic!("{what}: {e}"));
        let OpenedModel { facts, mut batches, mut stepper } = opened;
        let micro = config.batch.micro_tokens.0.unwrap_or_else(|| config.pack_tokens());
        let told = hyper(facts.optimizer, &config.optimizer, 1e-3, 3);
        let mut least = usize::MAX;
        let mut steps = 0;
        while least > 0 && steps < PATIENCE {
            let mut allocations = 0;
            for k in 0..config.batch.tokens / micro {
                let batch = match batches.take(u64::MAX).expect("data") {
                    Some(batch) => batch,
                    // The end of an epoch.
                    None => batches.take(u64::MAX).expect("data").expect("another epoch"),
                };
                wait_for_data();
                let region = Region::new(ALLOCATOR);
                let scalars = MicroStepScalars { keep: k > 0, loss_scale: 1.0, hyper: &told };
                stepper.micro_step(&batch, scalars).unwrap_or_else(|e| panic!("{what}: {e}"));
                allocations += region.change().allocations;
            }
            let region = Region::new(ALLOCATOR);
            stepper.apply(&told, 1.0 / 256.0).unwrap_or_else(|e| panic!("{what}: {e}"));
            let finished = stepper.finish_step(config.batch.tokens / micro, &mut |_| {});
            finished.unwrap_or_else(|e| panic!("{what}: {e}"));
            allocations += region.change().allocations;
            steps += 1;
            // The first step is a warm-up and does not count.
            if steps > 1 {
                least = least.min(allocations);
            }
        }
        assert_eq!(least, 0, "{what}: allocations in a step");
    }
}

/// Maximum number of allocations of the loop for each step: the hyperparameters, the text of `/proc` with the
/// memory of the process for progress and metrics, the line of metrics, and the documents of the following
/// micro-batches.
const LOOP: usize = 32;

#[test]
fn the_loop_around_a_step_allocates_its_line() {
    if !in_own_process("train_quiet::the_loop_around_a_step_allocates_its_line") {
        return;
    }
    let (what, flags) = SUBJECTS[0];
    let allocations = |steps: usize| {
        let folder = Folder::new("train-quiet");
        let config = config(&format!("{flags} run.steps={steps}"));
        let request = TrainRequest { config, output: folder.0.clone(), resume: Resume::Never };
        let region = Region::new(ALLOCATOR);
        train_with(&request, &mut |config, observer| open(config, Device::Cpu, observer), &mut Silent)
            .unwrap_or_else(|e| panic!("{what}: {e}"));
        region.change().allocations
    };
    let few = allocations(4);
    let many = allocations(24);
    let each = many.saturating_sub(few) / 20;
    println!("{each} allocations of the loop for a step");
    assert!(each <= LOOP, "{each} allocations of the loop for a step");
}
