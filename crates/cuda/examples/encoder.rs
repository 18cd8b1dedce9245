//! Measures tokens per second of known encoders with random weights on the first CUDA device, for sequences of
//! 168 tokens. `cargo run --release -p plimsoll-cuda --example encoder -- PRECISION[,..] TOKENS[,..] MODEL...`
//! prints a line for each combination.

use plimsoll_cuda::{CudaMachine, Options};
use plimsoll_exec::{Executor, Machine};
use plimsoll_graph::{Bounds, Counts, Param};
use plimsoll_models::{Output, known};
use plimsoll_plan::{Policy, Precision, Program, compile};
use std::error::Error;
use std::ops::Range;
use std::time::Instant;

const LENGTH: u64 = 168;
/// Number of timed batches of steps; the median is printed.
const BATCHES: usize = 5;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [precisions, tokens, models @ ..] = &args[..] else {
        return Err("give PRECISION TOKENS MODEL...".into());
    };
    for model in models {
        for tokens in tokens.split(',') {
            for precision in precisions.split(',') {
                let rate = rate(model, precision, tokens.parse()?)?;
                println!("{model} {tokens} {precision} {rate:.0}");
            }
        }
    }
    Ok(())
}

fn rate(model: &str, precision: &str, tokens: u64) -> Result<f64, Box<dyn Error>> {
    let precision = match precision {
        "f32" => Precision::F32,
        "tf32" => Precision::Tf32,
        "fp16" => Precision::Fp16,
        "fp8" => Precision::Fp8,
        _ => Precision::Bf16,
    };
    let machine = CudaMachine::new(0, Options::default())?;
    let sequences = tokens / LENGTH;
    let counts = Counts { tokens: sequences * LENGTH, sequences, packs: 1 };
    let bounds = Bounds { tokens: counts.tokens, sequences, longest: LENGTH, packs: 1 };
    let graph = known(model).ok_or("not known")?.graph(bounds, &[Output::Mean])?;
    let target = machine.target()?;
    let plan = compile(&graph, &Policy { precision, ..Policy::default() }, &target)?;
    let program = Program::new(target, vec![("encoder".to_owned(), plan)], vec![]);
    let mut executor = Executor::new(machine.open()?.remove(0), program)?;
    let random: Vec<f32> =
        (0..65_521u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / 1.68e8 - 0.05).collect();
    let read = |param: &Param, _: Range<u64>, out: &mut [f32]| {
        match param.name.to_ascii_lowercase().ends_with("norm.weight") {
            true => out.fill(1.0),
            false => out.chunks_mut(random.len()).for_each(|part| part.copy_from_slice(&random[..part.len()])),
        }
        Ok(())
    };
    executor.load(0, &mut { read })?;
    let ids: Vec<i32> = (0..counts.tokens).map(|i| 4 + (i * 7 % 20) as i32).collect();
    let spans: Vec<i32> =
        (0..sequences).flat_map(|s| [s * LENGTH, (s + 1) * LENGTH].map(|t| t as i32)).collect();
    executor.write_i32(executor.input(0, "ids")?, &ids)?;
    executor.write_i32(executor.input(0, "spans")?, &spans)?;
    let mut steps = |count: u32| -> Result<f64, Box<dyn Error>> {
        let start = Instant::now();
        for _ in 0..count {
            executor.run(0, counts)?;
        }
        executor.wait()?;
        Ok(start.elapsed().as_secs_f64() / f64::from(count))
    };
    // A batch has as many steps as take about 60 ms.
    steps(2)?;
    let count = (0.06 / steps(2)?).ceil().clamp(1.0, 200.0) as u32;
    let mut times = (0..BATCHES).map(|_| steps(count)).collect::<Result<Vec<f64>, _>>()?;
    times.sort_by(f64::total_cmp);
    Ok(counts.tokens as f64 / times[BATCHES / 2])
}
