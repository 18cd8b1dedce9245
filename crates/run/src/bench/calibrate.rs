//! `plimsoll bench --calibrate`: this machine's rates as a target file.
//! Invariant: the file is read back before it gets its name, so what is there can be planned with.

use super::subject::{Subject, one_sequence};
use super::{Work, median};
use crate::{RunError, Settings, doctor};
use data::atomic::AtomicFile;
use exec::cpu::Cpu;
use graph::ops::{Concat, Relu};
use graph::{Builder, DType, Dim, Op};
use plan::{Rates, Target};
use serde_json::{Value, json};
use std::fmt;
use std::hint::spin_loop;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::thread::yield_now;
use std::time::Instant;

/// What was written.
#[derive(Clone, Debug, PartialEq)]
pub struct Calibration {
    /// The file.
    pub path: PathBuf,
    /// Its content.
    pub target: Target,
}

/// (rows, N, K) of the products: a layer of ESM-2 35M, 150M and 650M each.
const PRODUCTS: [(u64, u64, u64); 3] = [(2048, 1920, 480), (2048, 640, 2560), (2048, 1280, 1280)];

/// Rows and columns of the two matrices that are copied side by side: 256 MB read and written, more than a
/// share of any cache.
const COPY: (u64, u64) = (1 << 14, 1 << 10);

/// Launches of the chain whose ops have next to nothing to do.
const CHAIN: u32 = 256;

/// Measures this machine and writes `path`, which must end in `.toml`, as `--target` wants it.
pub fn calibrate(path: &Path, settings: &Settings, repeats: usize) -> Result<Calibration, RunError> {
    if path.extension().is_none_or(|e| e != "toml") {
        let why = format!("--calibrate {}: name a file that ends in .toml", path.display());
        return Err(RunError::Refused(why));
    }
    // A file that cannot be written is found out before the measurements.
    let mut file = AtomicFile::create(path)?;
    let rates = rates(settings, repeats)?;
    let text = text(path, &settings.target()?, rates)?;
    let target = Target::parse(&path.display().to_string(), &text)?;
    file.write_all(text.as_bytes()).map_err(|e| file.error(e))?;
    file.commit()?;
    Ok(Calibration { path: path.to_owned(), target })
}

fn rates(settings: &Settings, repeats: usize) -> Result<Rates, RunError> {
    let (mut flops, mut seconds) = (0.0, 0.0);
    for (rows, n, k) in PRODUCTS {
        let mut product = Subject::start(&Work::Linear { rows, n, k }, settings)?;
        flops += 2.0 * (rows * n * k) as f64;
        seconds += product.seconds(repeats)?;
    }
    let f32 = flops / seconds;
    // Not measured: where weights will lie is not known here.
    let storage = settings.target()?.rates.storage;
    // There are no bf16 kernels yet, so a bf16 product is the f32 one.
    Ok(Rates {
        f32,
        bf16: f32,
        fp8: None,
        memory: copy_rate(settings, repeats)?,
        launch: launch(settings, repeats)?,
        storage,
    })
}

/// Bytes per second, read and written, of a copy on all threads.
fn copy_rate(settings: &Settings, repeats: usize) -> Result<f64, RunError> {
    let (rows, columns) = COPY;
    let mut g = Builder::new(one_sequence(rows));
    let matrix = [Dim::Tokens(1), Dim::Fixed(columns)];
    let (x, y) = (g.input("x", &matrix, DType::F32), g.input("y", &matrix, DType::F32));
    let both = g.one(Op::Concat(Concat {}), &[x, y]);
    g.output("both", both);
    // What lies in a fresh arena is as good as any numbers.
    let mut copy = Subject::single(settings, rows, g.finish(), |_| vec![])?;
    let (_, bytes) = copy.cost(copy.plan().schedule.instrs[0]);
    Ok(bytes / copy.seconds(repeats)?)
}

/// Seconds that a launch costs by itself: to find the operands, and to call all threads together.
fn launch(settings: &Settings, repeats: usize) -> Result<f64, RunError> {
    let mut g = Builder::new(one_sequence(1));
    let mut x = g.input("x", &[Dim::Tokens(1), Dim::Fixed(16)], DType::F32);
    for _ in 0..CHAIN {
        x = g.one(Op::Relu(Relu {}), &[x]);
    }
    g.output("y", x);
    let mut chain = Subject::single(settings, 1, g.finish(), |_| vec![])?;
    Ok(chain.seconds(repeats)? / f64::from(CHAIN) + meeting(&Cpu::new(settings.threads)))
}

/// Seconds until all threads are at work and have come back, the median.
fn meeting(cpu: &Cpu) -> f64 {
    /// Rounds of waiting before a thread makes room: there may be more threads than cores.
    const SPINS: usize = 1000;
    let come = AtomicUsize::new(0);
    let meet = |n: usize| {
        let start = Instant::now();
        cpu.pool().run(cpu.threads(), &|_, _| {
            come.fetch_add(1, SeqCst);
            let mut waits = 0;
            while come.load(SeqCst) < n * cpu.threads() {
                waits += 1;
                if waits < SPINS { spin_loop() } else { yield_now() }
            }
        });
        start.elapsed().as_secs_f64()
    };
    let seconds: Vec<f64> = (1..=CHAIN as usize).map(meet).collect();
    median(&seconds)
}

/// The target file: that of the CPU with these rates.
fn text(path: &Path, cpu: &Target, rates: Rates) -> Result<String, RunError> {
    let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let machine = doctor::report()?;
    let processor = machine.cpu.as_deref().unwrap_or("an unknown processor");
    let about = format!(
        "{processor}, {} threads, {}; rates measured by plimsoll {}",
        cpu.units,
        machine.isa,
        env!("CARGO_PKG_VERSION")
    );
    let (name, about) = (quoted(&name), quoted(&about));
    let Target { space, memory, alignment, units, saturation, .. } = cpu;
    let (space, memory) = (quoted(space), memory.0);
    let Rates { f32, bf16, memory: bandwidth, launch, storage, .. } = rates;
    Ok(format!(
        "# Written by `plimsoll bench --calibrate`; `plimsoll plan --target` reads it.\n\
         name = {name}\nabout = {about}\nspace = {space}\nmemory = {memory}\nalignment = {alignment}\n\
         units = {units}\nsaturation = {saturation}\nkernels_of = \"cpu\"\n\n\
         # Operations, bytes and seconds. There are no bf16 kernels yet: their rate is that of f32.\n\
         [rates]\nf32 = {f32:.3e}\nbf16 = {bf16:.3e}\nmemory = {bandwidth:.3e}\nlaunch = {launch:.3e}\n\
         # Not measured: of a SATA III SSD; where weights lie is not the target's to know.\nstorage = {storage:.3e}\n"
    ))
}

/// A TOML string: what it would have to escape is left out.
fn quoted(text: &str) -> String {
    let plain = |c: &char| !c.is_control() && !matches!(c, '"' | '\\');
    format!("\"{}\"", text.chars().filter(plain).collect::<String>())
}

impl Calibration {
    /// The same as JSON.
    pub fn to_json(&self) -> Value {
        let Rates { f32, bf16, memory, launch, .. } = self.target.rates;
        json!({
            "target": self.path.display().to_string(),
            "about": self.target.about,
            "rates": {"f32": f32, "bf16": bf16, "memory": memory, "launch": launch},
        })
    }
}

impl fmt::Display for Calibration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (path, rates) = (self.path.display(), self.target.rates);
        writeln!(f, "wrote {path}: {}", self.target.about)?;
        writeln!(f, "  f32 products  {:>10.1} GFLOP/s", rates.f32 / 1e9)?;
        writeln!(f, "  bf16          {:>10.1} GFLOP/s", rates.bf16 / 1e9)?;
        writeln!(f, "  memory        {:>10.1} GB/s, read and written", rates.memory / 1e9)?;
        writeln!(f, "  launch        {:>10.2} us", rates.launch * 1e6)?;
        write!(f, "to plan with it: plimsoll plan --target {path}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_can_be_planned_with() {
        let cpu = Target::named("cpu").expect("read").with_units(7);
        let rates = Rates { f32: 1.25e11, bf16: 2e12, fp8: None, memory: 3.5e10, launch: 4e-6, storage: 2.5e9 };
        for stem in ["here", "odd \"name\\"] {
            let path = PathBuf::from(format!("{stem}.toml"));
            let text = text(&path, &cpu, rates).expect("text");
            let target = Target::parse("test", &text).unwrap_or_else(|e| panic!("{e}\n{text}"));
            assert_eq!((target.rates, target.units, &target.kernels), (rates, 7, &cpu.kernels));
        }
    }

    #[test]
    fn another_suffix_is_refused() {
        let error = calibrate(Path::new("rates.json"), &Settings::default(), 1).expect_err("refused");
        assert!(error.to_string().contains(".toml"), "{error}");
    }
}
