//! Times an encoder with random weights on the CPU, f32: the Plimsoll side of `bench/compare.sh`.
//!
//! `cargo run --release -p plimsoll-run --example bench_encoder -- --model facebook/esm2_t12_35M_UR50D
//! --batch 64x168 --threads 2 --repeats 5 [--tokens 4096]` prints one line of JSON.

use exec::Executor;
use exec::cpu::CpuDevice;
use graph::{Bounds, Counts};
use models::{Output, known};
use plan::{Policy, Program, Target, compile};
use serde_json::json;
use std::error::Error;
use std::time::Instant;

struct Request {
    model: String,
    sequences: u64,
    length: u64,
    threads: usize,
    repeats: usize,
    /// Tokens of a step: the batch is cut into steps of at most this.
    tokens: u64,
}

fn main() -> Result<(), Box<dyn Error>> {
    let request = request()?;
    let mut executor = executor(&request)?;
    let per_step = (request.tokens / request.length).clamp(1, request.sequences);
    let ids: Vec<i32> = (0..per_step * request.length).map(|i| 4 + (i * 7 % 20) as i32).collect();
    let length = request.length as i32;
    let spans: Vec<i32> = (0..per_step as i32).flat_map(|s| [s * length, (s + 1) * length]).collect();
    let mut batch = || -> Result<f64, Box<dyn Error>> {
        let start = Instant::now();
        let mut left = request.sequences;
        while left > 0 {
            let now = left.min(per_step);
            let tokens = now * request.length;
            executor.input_i32(0, "ids", &ids[..tokens as usize])?;
            executor.input_i32(0, "spans", &spans[..2 * now as usize])?;
            executor.run(0, Counts { tokens, sequences: now })?;
            left -= now;
        }
        Ok(start.elapsed().as_secs_f64())
    };
    batch()?;
    let mut seconds = (0..request.repeats).map(|_| batch()).collect::<Result<Vec<_>, _>>()?;
    let all = seconds.clone();
    seconds.sort_by(f64::total_cmp);
    let median = seconds[seconds.len() / 2];
    let tokens = (request.sequences * request.length) as f64;
    let line = json!({
        "side": "plimsoll", "model": request.model, "dtype": "f32", "batch": request.sequences,
        "length": request.length, "threads": request.threads, "step_tokens": per_step * request.length,
        "tokens_per_s": tokens / median, "seconds": all,
    });
    println!("{line}");
    Ok(())
}

fn request() -> Result<Request, Box<dyn Error>> {
    let mut r = Request {
        model: "facebook/esm2_t12_35M_UR50D".to_owned(),
        sequences: 64,
        length: 168,
        threads: 2,
        repeats: 5,
        tokens: Target::named("cpu")?.saturation,
    };
    let mut words = std::env::args().skip(1);
    while let Some(flag) = words.next() {
        let value = words.next().ok_or(format!("{flag} wants a value"))?;
        match flag.as_str() {
            "--model" => r.model = value,
            "--threads" => r.threads = value.parse()?,
            "--repeats" => r.repeats = value.parse()?,
            "--tokens" => r.tokens = value.parse()?,
            "--batch" => {
                let (sequences, length) = value.split_once('x').ok_or("--batch wants SEQUENCESxLENGTH")?;
                (r.sequences, r.length) = (sequences.parse()?, length.parse()?);
            }
            _ => return Err(format!("unknown flag {flag}").into()),
        }
    }
    Ok(r)
}

fn executor(r: &Request) -> Result<Executor, Box<dyn Error>> {
    let encoder = known(&r.model).ok_or(format!("{} is not known", r.model))?;
    let sequences = (r.tokens / r.length).clamp(1, r.sequences);
    let bounds = Bounds { tokens: sequences * r.length, sequences, longest: r.length };
    let graph = encoder.graph(bounds, &[Output::Mean])?;
    let target = Target::named("cpu")?.with_units(r.threads as u64);
    let plan = compile(&graph, &Policy::default(), &target)?;
    let program = Program::new(target, vec![("encoder".to_owned(), plan)], vec![]);
    let mut executor = Executor::new(Box::new(CpuDevice::new(r.threads)), program)?;
    let mut state = 1u64;
    executor.load(0, &mut |param, _, out| {
        let norm = param.name.ends_with("norm.weight") || param.name.ends_with("Norm.weight");
        for x in out {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let unit = (state >> 40) as f32 / (1 << 23) as f32 - 1.0;
            *x = if norm { 1.0 } else { 0.05 * unit };
        }
        Ok(())
    })?;
    Ok(executor)
}
