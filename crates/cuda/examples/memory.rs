//! Prints the device memory in use after each stage of a run. The `reserved` entries of target files come from these
//! figures.
//! `cargo run -p plimsoll-cuda --example memory -- MODEL bf16|f32 TOKENS`

use plimsoll_cuda::{CudaMachine, Options};
use plimsoll_exec::{Data, Executor, Machine};
use plimsoll_graph::{Bounds, Bytes, Counts};
use plimsoll_models::{Output, known};
use plimsoll_plan::{Policy, Precision, Program, compile};
use std::error::Error;

const LENGTH: u64 = 168;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().collect();
    let [_, model, precision, tokens] = &args[..] else { return Err("give MODEL bf16|f32 TOKENS".into()) };
    let precision = if precision == "f32" { Precision::F32 } else { Precision::Bf16 };
    let machine = CudaMachine::new(0, Options::default())?;
    println!("{} free {} holders {:?}", machine.name(), machine.free()?, machine.holders());
    let taken = |stage: &str, planned: Bytes| -> Result<(), Box<dyn Error>> {
        let taken = machine.taken()?.unwrap_or_default();
        let rest = taken.0 as f64 - planned.0 as f64;
        println!("{stage:10} taken {:14} arena {:14} beside {:9.3} MiB", taken.0, planned.0, rest / 1048576.0);
        Ok(())
    };
    taken("context", Bytes::ZERO)?;
    let device = machine.open()?.remove(0);
    taken("device", Bytes::ZERO)?;
    let sequences = (tokens.parse::<u64>()? / LENGTH).max(1);
    let counts = Counts { tokens: sequences * LENGTH, sequences, packs: 1 };
    let bounds = Bounds { tokens: counts.tokens, sequences, longest: LENGTH, packs: 1 };
    let graph = known(model).ok_or("not known")?.graph(bounds, &[Output::Mean])?;
    let target = machine.target()?;
    let plan = compile(&graph, &Policy { precision, ..Policy::default() }, &target)?;
    let program = Program::new(target, vec![("encoder".to_owned(), plan)], vec![]);
    let (arena, reserved) = (program.arena_bytes(), program.target().reserved());
    let mut executor = Executor::new(device, program)?;
    taken("prepared", arena)?;
    for _ in 0..4 {
        let ids = vec![5; counts.tokens as usize];
        let spans: Vec<i32> =
            (0..sequences).flat_map(|s| [s * LENGTH, (s + 1) * LENGTH].map(|t| t as i32)).collect();
        let inputs =
            [(executor.input(0, "ids")?, Data::I32(&ids)), (executor.input(0, "spans")?, Data::I32(&spans))];
        let open = executor.submit(0, &inputs, counts, &[(executor.output(0, Output::Mean.name())?, 1)])?;
        executor.collect(open, &mut [vec![]])?;
        taken("step", arena)?;
    }
    println!("reserved {:.3} MiB", reserved.0 as f64 / 1048576.0);
    drop(executor);
    taken("dropped", Bytes::ZERO)
}
