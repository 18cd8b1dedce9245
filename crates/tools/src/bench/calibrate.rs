//! `plimsoll bench --calibrate`: measures the rates of this machine and writes them as a target file. On a GPU,
//! it also times the GEMMs of the known models and stores the results in the table from which runs select
//! algorithms. Invariant: the text is parsed before the file is renamed to its path, so an existing file is
//! always a valid target.

use super::case::{BenchCase, one_sequence};
use super::ceiling::raw_gemm_rate;
use super::link::{self, CopyRates};
use super::{BenchWork, median, storage, training};
use crate::ToolError;
use crate::doctor;
use plimsoll_cpu::Cpu;
use plimsoll_data::atomic::AtomicFile;
use plimsoll_graph::ops::{Concat, Relu};
use plimsoll_graph::{Builder, DType, Dim, Op};
use plimsoll_models::{KNOWN, Output, known};
use plimsoll_plan::{Capability, Kernels, Link, PlanError, Policy, Rates, Target};
use plimsoll_runtime::session::TimedSession;
use plimsoll_runtime::{Precision, RuntimeError, Settings};
use plimsoll_setting::{Command, Setting};
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use std::collections::BTreeMap;
use std::fmt;
use std::hint::spin_loop;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::thread::yield_now;
use std::time::Instant;

/// Result of a calibration.
#[derive(Clone, Debug, PartialEq)]
pub struct CalibrationReport {
    /// Path of the target file.
    pub path: PathBuf,
    /// The target in the file.
    pub target: Target,
    /// Whether the storage rate was measured, on the disk that contains the file, or taken from the default target.
    pub storage: bool,
    /// Rates of copies between pinned host memory and the GPU, by size; empty on the CPU.
    pub copies: Vec<CopyRates>,
    /// Known models with timed GEMMs, as (id, description of the arithmetic that determines the bits of the
    /// device's results); empty on the CPU.
    pub matmuls: Vec<(String, String)>,
}

/// `(rows, N, K)` of the GEMMs that give the CPU's rates: one linear layer each of ESM-2 35M, 150M and 650M.
const CPU_GEMMS: [(u64, u64, u64); 3] = [(2048, 1920, 480), (2048, 640, 2560), (2048, 1280, 1280)];

/// Tokens of the longest sequence of ESM-2, including the start and end tokens.
const LONGEST: u64 = 1024;

/// Rows and columns of the two f32 matrices that are concatenated: 128 MiB read and 128 MiB written, so that
/// the copy is bound by memory and not by caches.
const COPY: (u64, u64) = (1 << 14, 1 << 10);

/// Length of the chain of ReLUs on 16 elements that measures the overhead of a launch.
const CHAIN: u32 = 256;

/// Measures this machine and writes a file for `--target` to `path`, which must end in `.toml`. `repeats` is
/// the number of measurements of each rate that is a median.
pub fn calibrate(path: &Path, settings: &Settings, repeats: usize) -> Result<CalibrationReport, ToolError> {
    if path.extension().is_none_or(|e| e != "toml") {
        return Err(ToolError::NotToml { path: path.to_owned() });
    }
    // The file is created first, so that an unwritable path fails before the measurements, which take long.
    let mut file = AtomicFile::create(path)?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let storage = storage::rate(folder.unwrap_or(Path::new(".")));
    let rates = rates(settings, repeats, storage)?;
    let measured = if settings.is_on_host() { None } else { Some(link::measure(settings, repeats)?) };
    let (link, copies) = measured.unzip();
    let rates = Rates { link, ..rates };
    let text = text(path, settings, rates, storage.is_some())?;
    let target = Target::parse(&path.display().to_string(), &text)?;
    // Only the CPU has kernels for training.
    let slower = if settings.is_on_host() {
        training::training_kernel_factors(settings, &target)?
    } else {
        BTreeMap::new()
    };
    let text = text + &slower_text(&slower);
    let target = Target::parse(&path.display().to_string(), &text)?;
    let matmuls = matmuls(settings)?;
    file.write_all(text.as_bytes()).map_err(|e| file.error(e))?;
    file.commit()?;
    Ok(CalibrationReport {
        path: path.to_owned(),
        target,
        storage: storage.is_some(),
        copies: copies.unwrap_or_default(),
        matmuls,
    })
}

fn rates(settings: &Settings, repeats: usize, storage: Option<f64>) -> Result<Rates, ToolError> {
    let (f32, tf32, bf16, fp8, int8) = if settings.is_on_host() {
        let int8 = raw_gemm_rate(&settings_in(settings, Precision::Int8))?;
        let f32 = products_rate(&settings_in(settings, Precision::F32), repeats)?;
        let bf16 = products_rate(&settings_in(settings, Precision::Bf16), repeats)?;
        (f32, None, bf16, None, Some(int8))
    } else {
        let tf32 = raw_gemm_rate(&settings_in(settings, Precision::Tf32))?;
        let fp8 = where_known(settings.target()?.rates.fp8, || {
            raw_gemm_rate(&settings_in(settings, Precision::Fp8))
        })?;
        let f32 = raw_gemm_rate(&settings_in(settings, Precision::F32))?;
        let bf16 = raw_gemm_rate(&settings_in(settings, Precision::Bf16))?;
        (f32, Some(tf32), bf16, fp8, None)
    };
    Ok(Rates {
        f32,
        tf32,
        bf16,
        fp8,
        int8,
        memory: copy_rate(settings, repeats)?,
        launch: launch(settings, repeats)?,
        storage: storage.unwrap_or(settings.target()?.rates.storage),
        link: None,
    })
}

fn settings_in(settings: &Settings, precision: Precision) -> Settings {
    Settings { precision: Some(precision), ..settings.clone() }
}

/// Measures a rate only if the planned target has it: GPUs before sm_89 have no e4m3 matmuls. On a GPU that has
/// them, a failed measurement is an error and not an absent rate.
fn where_known(
    planned: Option<f64>,
    measure: impl FnOnce() -> Result<f64, RuntimeError>,
) -> Result<Option<f64>, ToolError> {
    Ok(planned.map(|_| measure()).transpose()?)
}

/// Operations per second of the GEMMs of [`CPU_GEMMS`] on the CPU, in the precision of the settings.
fn products_rate(settings: &Settings, repeats: usize) -> Result<f64, ToolError> {
    let mut flops = 0.0;
    let mut seconds = 0.0;
    for (rows, n, k) in CPU_GEMMS {
        let mut case = BenchCase::start(&BenchWork::Linear { rows, n, k }, settings)?;
        flops += 2.0 * (rows * n * k) as f64;
        seconds += case.seconds(repeats)?;
    }
    Ok(flops / seconds)
}

/// Opens each known model on the GPU. Opening times the GEMMs that are not yet in the device's table. Models
/// that do not fit into the memory budget are skipped; their GEMMs are timed on the device that runs them.
fn matmuls(settings: &Settings) -> Result<Vec<(String, String)>, ToolError> {
    if settings.is_on_host() {
        return Ok(vec![]);
    }
    let mut timed = vec![];
    for (id, _) in KNOWN {
        let Some(encoder) = known(id) else { continue };
        let graph = Box::new(|bounds| encoder.graph(bounds, &[Output::Mean]));
        match BenchCase::planned(settings, 1, LONGEST, graph) {
            Err(RuntimeError::Plan(PlanError::OverBudget(_))) => {}
            planned => {
                let planned = planned?;
                let session = TimedSession::start(planned.site(), planned.programs()[0].clone())?;
                timed.push(((*id).to_owned(), session.arithmetic()));
            }
        }
    }
    Ok(timed)
}

/// Memory bandwidth in bytes per second: bytes read plus bytes written by a concatenation on all threads.
fn copy_rate(settings: &Settings, repeats: usize) -> Result<f64, ToolError> {
    let (rows, columns) = COPY;
    let mut g = Builder::new(one_sequence(rows));
    let matrix = [Dim::Tokens(1), Dim::Fixed(columns)];
    let x = g.input("x", &matrix, DType::F32);
    let y = g.input("y", &matrix, DType::F32);
    let both = g.one(Op::Concat(Concat {}), &[x, y]);
    g.output("both", both);
    // The inputs stay as the arena has them: the time of a copy does not depend on the values.
    let mut copy = BenchCase::single(settings, &Policy::default(), rows, g.finish())?;
    let (_, bytes) = copy.cost(copy.plan().schedule.instrs[0]);
    Ok(bytes / copy.seconds(repeats)?)
}

/// Overhead of one launch in seconds: resolving the operands and, on the CPU, waking all threads and waiting
/// for them. The ops of the chain are too small for several threads, so the CPU's synchronisation is measured
/// separately.
fn launch(settings: &Settings, repeats: usize) -> Result<f64, ToolError> {
    let mut g = Builder::new(one_sequence(1));
    let mut x = g.input("x", &[Dim::Tokens(1), Dim::Fixed(16)], DType::F32);
    for _ in 0..CHAIN {
        x = g.one(Op::Relu(Relu {}), &[x]);
    }
    g.output("y", x);
    let mut chain = BenchCase::single(settings, &Policy::default(), 1, g.finish())?;
    let synchronisation = if settings.is_on_host() {
        barrier_seconds(&Cpu::start(settings.threads).map_err(RuntimeError::thread("compute"))?)
    } else {
        0.0
    };
    Ok(chain.seconds(repeats)? / f64::from(CHAIN) + synchronisation)
}

/// Median time in seconds of a call of the thread pool in which every thread waits until all threads have started.
fn barrier_seconds(cpu: &Cpu) -> f64 {
    /// Spins before a waiting thread yields its core: with more threads than cores, spinning alone could block
    /// the others.
    const SPINS: usize = 1000;
    let arrived = AtomicUsize::new(0);
    // The counter is never reset: in call number `n` every thread waits until all have arrived `n` times.
    let seconds: Vec<f64> = (1..=CHAIN as usize)
        .map(|n: usize| {
            let start = Instant::now();
            cpu.pool().run(cpu.threads(), &|_, _| {
                arrived.fetch_add(1, SeqCst);
                let mut waits = 0;
                while arrived.load(SeqCst) < n * cpu.threads() {
                    waits += 1;
                    if waits < SPINS { spin_loop() } else { yield_now() }
                }
            });
            start.elapsed().as_secs_f64()
        })
        .collect();
    median(&seconds)
}

/// Text of the target file: the machine's planned target with the measured rates.
fn text(
    path: &Path,
    settings: &Settings,
    rates: Rates,
    storage_is_measured: bool,
) -> Result<String, ToolError> {
    let target = settings.target()?;
    let name = path.file_stem().unwrap_or_default().to_string_lossy();
    let machine = if settings.is_on_host() {
        let machine = doctor::report(doctor::DoctorOptions::default())?;
        let processor = machine.cpu.unwrap_or_else(|| "an unknown processor".to_owned());
        format!("{processor}, {} threads, {}", target.workers, machine.isa)
    } else {
        format!("{}, {}", settings.machine().name(), settings.machine().arithmetic())
    };
    let about = format!("{machine}; rates measured by plimsoll {}", env!("CARGO_PKG_VERSION"));
    let name = quoted(&name);
    let about = quoted(&about);
    let Target { space, memory, alignment, workers: units, saturation, kernels, reserved, .. } = &target;
    let reserved = reserved
        .iter()
        .map(|row| format!("[[reserved]]\nlabel = {}\nbytes = {}\n\n", quoted(&row.label), row.bytes.0));
    let kernels = match kernels {
        Kernels::Reference => "\"reference\"".to_owned(),
        Kernels::Cpu(set) => format!("{{ cpu = \"{}\" }}", set.name()),
        Kernels::Cuda(Capability(major, minor)) => format!("{{ cuda = [{major}, {minor}] }}"),
    };
    let space = quoted(space.name());
    let memory = memory.0;
    let reserved = reserved.collect::<String>();
    let Rates { f32, tf32, bf16, fp8, int8, memory: bandwidth, launch, storage, link } = rates;
    let some: String = [("tf32", tf32), ("fp8", fp8), ("int8", int8)]
        .into_iter()
        .filter_map(|(name, rate)| rate.map(|rate| format!("{name} = {rate:.3e}\n")))
        .collect();
    let of_storage = if storage_is_measured {
        "Measured on the disk that this file was written to, bypassing the cache."
    } else {
        "Not measured: rate of a SATA III SSD, because the location of the weights is unknown."
    };
    Ok(format!(
        "# Written by `{} {}`; `{} {}` reads it.\n\
         name = {name}\nabout = {about}\nspace = {space}\nmemory = {memory}\nalignment = {alignment}\n\
         workers = {units}\nsaturation = {saturation}\nkernels = {kernels}\n\n{reserved}\
         # Operations, bytes and seconds.\n\
         [rates]\nf32 = {f32:.3e}\nbf16 = {bf16:.3e}\n{some}memory = {bandwidth:.3e}\nlaunch = {launch:.3e}\n\
         # {of_storage}\nstorage = {storage:.3e}\n{}",
        Command::Bench,
        Setting::Calibrate,
        Command::Plan,
        Setting::Target,
        link.map_or_else(String::new, link_text)
    ))
}

/// The TOML table `[rates.link]`.
fn link_text(link: Link) -> String {
    let Link { to_device, to_host, latency, slower_kernels, slower_copies } = link;
    format!(
        "\n# Between pinned host memory and the GPU, beside matmuls.\n[rates.link]\nto_device = {to_device:.3e}\n\
         to_host = {to_host:.3e}\nlatency = {latency:.3e}\nslower_kernels = {slower_kernels:.3}\n\
         slower_copies = {slower_copies:.3}\n"
    )
}

/// The TOML table `[slower]` with the factor of each kernel; empty if no factors were measured.
fn slower_text(slower: &BTreeMap<String, f64>) -> String {
    if slower.is_empty() {
        return String::new();
    }
    let lines: String = slower.iter().map(|(kernel, factor)| format!("{kernel} = {factor:.3}\n")).collect();
    format!("\n# Kernels of training: their measured time over that by the rates.\n[slower]\n{lines}")
}

/// A TOML basic string. Characters that TOML would require to be escaped are omitted.
fn quoted(text: &str) -> String {
    format!("\"{}\"", text.chars().filter(|c| !c.is_control() && !matches!(c, '"' | '\\')).collect::<String>())
}

/// The rates of a calibration. `storage` is `None` if it was not measured.
#[derive(Serialize)]
struct MeasuredRates {
    f32: f64,
    tf32: Option<f64>,
    bf16: f64,
    fp8: Option<f64>,
    int8: Option<f64>,
    memory: f64,
    launch: f64,
    storage: Option<f64>,
    link: Option<Link>,
}

/// Serializes the measured values, without those that the file has from the default target.
impl Serialize for CalibrationReport {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Rates { f32, tf32, bf16, fp8, int8, memory, launch, storage, link } = self.target.rates;
        let storage = self.storage.then_some(storage);
        let rates = MeasuredRates { f32, tf32, bf16, fp8, int8, memory, launch, storage, link };
        let matmuls: BTreeMap<&str, &str> =
            self.matmuls.iter().map(|(model, with)| (model.as_str(), with.as_str())).collect();
        let mut calibration = serializer.serialize_map(None)?;
        calibration.serialize_entry("target", &self.path.display().to_string())?;
        calibration.serialize_entry("about", &self.target.about)?;
        calibration.serialize_entry("rates", &rates)?;
        calibration.serialize_entry("copies", &self.copies)?;
        calibration.serialize_entry("slower", &self.target.slower)?;
        calibration.serialize_entry("matmuls", &matmuls)?;
        calibration.end()
    }
}

impl fmt::Display for CalibrationReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.path.display();
        let rates = self.target.rates;
        writeln!(f, "wrote {path}: {}", self.target.about)?;
        writeln!(f, "  f32 matmuls   {:>10.1} GFLOP/s", rates.f32 / 1e9)?;
        writeln!(f, "  bf16          {:>10.1} GFLOP/s", rates.bf16 / 1e9)?;
        for (name, rate) in [("tf32", rates.tf32), ("fp8", rates.fp8), ("int8", rates.int8)] {
            if let Some(rate) = rate {
                writeln!(f, "  {name:<14}{:>10.1} GFLOP/s", rate / 1e9)?;
            }
        }
        writeln!(f, "  memory        {:>10.1} GB/s, read and written", rates.memory / 1e9)?;
        writeln!(f, "  launch        {:>10.2} us", rates.launch * 1e6)?;
        if self.storage {
            writeln!(f, "  storage       {:>10.1} GB/s, the disk of this folder", rates.storage / 1e9)?
        } else {
            writeln!(
                f,
                "  storage       not measured: reads from the disk of this folder cannot bypass the \
                    cache"
            )?
        }
        if let Some(link) = rates.link {
            writeln!(f, "  copies between pinned host memory and the GPU, alone and beside matmuls, GB/s:")?;
            for CopyRates { bytes, to_device, to_host } in &self.copies {
                let [in_alone, in_beside] = to_device.map(|rate| rate / 1e9);
                let [out_alone, out_beside] = to_host.map(|rate| rate / 1e9);
                writeln!(
                    f,
                    "  {:>14} B  to the GPU {in_alone:>5.1} {in_beside:>5.1}  to the host {out_alone:>5.1} {out_beside:>5.1}",
                    bytes
                )?;
            }
            let latency = link.latency * 1e6;
            let Link { slower_kernels, slower_copies, .. } = link;
            writeln!(
                f,
                "  a copy takes {latency:.1} us beside its bytes; it slows down kernels by a factor of {slower_kernels:.3}, and \
                 copies of the other direction by {slower_copies:.3}"
            )?;
        }
        for (model, with) in &self.matmuls {
            writeln!(f, "  matmuls of {model}: {with}")?;
        }
        write!(f, "to use it: {} {}", Command::Plan, Setting::Target.to(path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_can_be_planned_with() {
        let settings = Settings { threads: 7, ..Settings::default() };
        let cpu = settings.target().expect("read");
        let rates = Rates {
            f32: 1.25e11,
            tf32: Some(1e12),
            bf16: 2e12,
            fp8: Some(4e12),
            int8: Some(3e12),
            memory: 3.5e10,
            launch: 4e-6,
            storage: 2.5e9,
            link: Some(Link {
                to_device: 5.2e10,
                to_host: 5.1e10,
                latency: 1e-5,
                slower_kernels: 1.05,
                slower_copies: 1.2,
            }),
        };
        for (stem, storage) in [("here", true), ("odd \"name\\", false)] {
            let path = PathBuf::from(format!("{stem}.toml"));
            let text = text(&path, &settings, rates, storage).expect("text");
            let target = Target::parse("test", &text).unwrap_or_else(|e| panic!("{e}\n{text}"));
            assert_eq!((target.rates, target.workers, &target.kernels), (rates, 7, &cpu.kernels));
            assert_eq!(text.contains("Not measured"), !storage);
        }
    }

    #[test]
    fn a_rate_that_cannot_be_measured_is_no_missing_rate() {
        let fails = || Err(RuntimeError::bug("out of memory"));
        assert!(where_known(Some(1e12), fails).is_err());
        assert_eq!(where_known(None, fails).expect("not measured"), None);
        assert_eq!(where_known(Some(1e12), || Ok(2e12)).expect("measured"), Some(2e12));
    }

    #[test]
    fn another_suffix_is_refused() {
        let error = calibrate(Path::new("rates.json"), &Settings::default(), 1).expect_err("refused");
        assert!(error.to_string().contains(".toml"), "{error}");
    }
}
