//! Times the instructions of a micro-step, beside what its plan expects, by op, by kernel and by shape:
//!
//! ```text
//! cargo run --release -p plimsoll-cli --example step_times -- CONFIG.yaml [cpu|cuda:N] [STEPS]
//! ```

use plimsoll_runtime::{Device, Machine, Silent};
use plimsoll_train::config::TrainConfig;
use plimsoll_train::{InstructionTime, MicroStepScalars, OpenedModel};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Micro-steps before the measured ones.
const WARM: usize = 3;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let path = args.first().ok_or("step_times CONFIG.yaml [cpu|cuda:N] [STEPS]")?;
    let word = args.get(1).map_or("cuda:0", String::as_str);
    let steps: usize = args.get(2).map_or(Ok(5), |n| n.parse())?;
    let config = TrainConfig::read(Path::new(path), &[], &mut Silent)?;
    let device = match word.strip_prefix("cuda:") {
        None => Device::Cpu,
        Some(ordinal) => {
            let options =
                plimsoll_cuda::Options { depth: plimsoll_train::TRAINING_DEPTH, ..Default::default() };
            let gpu: Arc<dyn Machine> = Arc::new(plimsoll_cuda::CudaMachine::new(ordinal.parse()?, options)?);
            Device::machines(vec![gpu])?
        }
    };
    let began = Instant::now();
    let OpenedModel { facts, mut batches, mut stepper } = plimsoll_train::open(&config, device, &mut Silent)?;
    println!("{} opened in {:.1} s, peak {}", facts.device, began.elapsed().as_secs_f64(), facts.peak);
    let hyper = plimsoll_train::schedule::hyper(facts.optimizer, &config.optimizer, 1e-5, 1);
    let scalars = MicroStepScalars { keep: false, loss_scale: 1.0, hyper: &hyper };
    let mut tables: [BTreeMap<String, Sum>; 3] = Default::default();
    let mut tokens = 0;
    let mut whole = Duration::ZERO;
    for step in 0..WARM + steps {
        let Some(batch) = batches.take(u64::MAX)? else { continue };
        let start = Instant::now();
        stepper.micro_step(&batch, scalars)?;
        stepper.apply(&hyper, 1e-5)?;
        stepper.finish_step(1, &mut |_| {})?;
        if step < WARM {
            continue;
        }
        whole += start.elapsed();
        tokens += batch.taken.tokens;
        let times = stepper.timed_micro_step(&batch, &hyper)?;
        for InstructionTime { instruction, kernel, expected, measured } in times {
            let op = instruction.split(' ').next().unwrap_or_default().to_owned();
            for (table, key) in tables.iter_mut().zip([op, kernel.to_owned(), instruction]) {
                let sum = table.entry(key).or_default();
                sum.count += 1;
                sum.expected += expected;
                sum.measured += measured.as_secs_f64();
            }
        }
    }
    let per_step = |seconds: f64| seconds * 1e3 / steps as f64;
    println!(
        "{:.0} tokens, {:.2} ms a step of one micro-step and the update, without timing",
        tokens as f64 / steps as f64,
        per_step(whole.as_secs_f64())
    );
    for (table, by) in tables.into_iter().zip(["op", "kernel", "instruction"]) {
        let mut rows: Vec<_> = table.into_iter().collect();
        rows.sort_by(|(_, a), (_, b)| b.measured.total_cmp(&a.measured));
        let [measured, expected] = [|sum: &Sum| sum.measured, |sum: &Sum| sum.expected]
            .map(|of| rows.iter().map(|(_, sum)| of(sum)).sum());
        println!(
            "\nby {by}: measured {:.2} ms, expected {:.2} ms a micro-step\n  measured   expected  share  count",
            per_step(measured),
            per_step(expected)
        );
        for (name, sum) in rows.into_iter().take(40) {
            let share = 100.0 * sum.measured / measured;
            let measured = per_step(sum.measured);
            let expected = per_step(sum.expected);
            println!("{measured:10.3} {expected:10.3} {share:4.1} % {:6}  {name}", sum.count / steps);
        }
    }
    Ok(())
}

/// Times of some instructions, in seconds.
#[derive(Default)]
struct Sum {
    count: usize,
    expected: f64,
    measured: f64,
}
