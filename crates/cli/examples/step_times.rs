//! Times the instructions of a training step, by op and shape:
//!
//! ```text
//! cargo run --release -p plimsoll-cli --example step_times -- CONFIG.yaml [cpu|cuda:N] [STEPS]
//! ```

use plimsoll_runtime::{Device, Machine, Silent};
use plimsoll_train::config::TrainConfig;
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
    let mut model = plimsoll_train::open(&config, device, &mut Silent)?;
    println!("{} opened in {:.1} s, peak {}", model.device(), began.elapsed().as_secs_f64(), model.peak());
    let hyper = plimsoll_train::schedule::hyper(model.optimizer(), &config.optimizer, 1e-5, 1);
    model.prepare(&hyper);
    let (mut tokens, mut of_op, mut of_shape) = (0, BTreeMap::new(), BTreeMap::new());
    let mut whole = Duration::ZERO;
    for step in 0..WARM + steps {
        let Some(taken) = model.take()? else { continue };
        let start = Instant::now();
        model.micro_step(false, 1.0)?;
        model.apply(&hyper, 1e-5)?;
        model.finish_step(1, &mut |_| {})?;
        if step < WARM {
            continue;
        }
        whole += start.elapsed();
        let times = model.timed_micro_step()?;
        tokens += taken.tokens;
        for (name, time) in times {
            let op = name.split(' ').next().unwrap_or_default().to_owned();
            for (table, key) in [(&mut of_op, op), (&mut of_shape, name)] {
                let entry: &mut (usize, Duration) = table.entry(key).or_default();
                *entry = (entry.0 + 1, entry.1 + time);
            }
        }
    }
    let per_step = |time: Duration| time.as_secs_f64() * 1e3 / steps as f64;
    println!(
        "{:.0} tokens, {:.2} ms a step of one micro-step and the update, without timing",
        tokens as f64 / steps as f64,
        per_step(whole)
    );
    for table in [of_op, of_shape] {
        let mut rows: Vec<_> = table.into_iter().collect();
        rows.sort_by_key(|(_, (_, time))| std::cmp::Reverse(*time));
        let all: Duration = rows.iter().map(|(_, (_, time))| *time).sum();
        println!("{:.2} ms in all", per_step(all));
        for (name, (count, time)) in rows.into_iter().take(40) {
            let share = 100.0 * time.as_secs_f64() / all.as_secs_f64();
            println!("{:9.3} ms {share:5.1} % {:4} x {name}", per_step(time), count / steps);
        }
    }
    Ok(())
}
