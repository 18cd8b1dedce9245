//! `plimsoll doctor`: a report of the hardware, the memory limits, the caches of models and the free disk space
//! that a run would use. Invariant: the report changes nothing; a property that cannot be read is absent, never
//! guessed.

use crate::list::cached_ids;
use plimsoll_cpu::Isa;
use plimsoll_data::printable::EscapedPath;
use plimsoll_data::weights::{FOLDER_FILES, HubEnv, find_in_hub};
use plimsoll_exec::disk;
use plimsoll_graph::Bytes;
use plimsoll_models::{ModelConfig, SequenceModel};
use plimsoll_plan::{CpuKernel, KernelId};
use plimsoll_runtime::fair_esm::{self, Checkpoint};
use plimsoll_runtime::hub::{CONFIG, Need, lacks};
use plimsoll_runtime::machine::{self, Memory};
use plimsoll_runtime::model::read_config;
use plimsoll_runtime::on_cpu;
use plimsoll_runtime::{Precision, RuntimeError, Settings};
use plimsoll_setting::Setting;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::PathBuf;

/// Report on this machine: processor, memory, GPUs, cached models and free disk space.
#[derive(Clone, Debug, PartialEq)]
pub struct Doctor {
    /// Model name of the processor from `/proc/cpuinfo`; `None` if it is not listed there.
    pub cpu: Option<String>,
    /// Vector extensions of interest for kernels, each with whether the processor has it. Empty if
    /// `/proc/cpuinfo` has no flags.
    pub features: Vec<(&'static str, bool)>,
    /// The instruction set that CPU kernels are dispatched for.
    pub isa: &'static str,
    /// The first supported entry of [`Isa::CHAIN`], and the precision that `--precision auto` selects.
    pub best: (&'static str, Precision),
    /// Whether the report lists the CPU kernels of each op.
    pub kernels: bool,
    /// Lines about GPUs: one for each GPU and one for each library that GPUs need.
    pub gpus: Vec<String>,
    /// Cores that this process may use: the default number of threads.
    pub cores: usize,
    /// Total and free memory within the limits of containers.
    pub memory: Memory,
    /// Memory of the whole machine; `None` unless a container limits this process to less.
    pub machine: Option<Bytes>,
    /// Memory budget of a run without `--memory-budget`.
    pub budget: Bytes,
    /// The folder of the Hugging Face hub cache; `None` if no environment variable determines it.
    pub hub: Option<PathBuf>,
    /// Models in the hub cache: (id, model family and missing files, or the reason why the model cannot run).
    pub models: Vec<(String, String)>,
    /// The folder of the torch hub cache; `None` if no environment variable determines it.
    pub torch_hub: Option<PathBuf>,
    /// ESM-2 checkpoints of fair-esm in the torch hub cache.
    pub checkpoints: Vec<Checkpoint>,
    /// Free disk space, as (purpose, folder, free bytes): the working directory for results, the hub cache for
    /// models.
    pub disk: Vec<(&'static str, PathBuf, Option<Bytes>)>,
}

/// Options of the report. The caller supplies the lines about GPUs, because this crate does not depend on CUDA.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Lines about GPUs: one for each GPU and one for each library that GPUs need.
    pub gpus: Vec<String>,
    /// Whether to list the CPU kernels of each op.
    pub kernels: bool,
}

/// Collects the report on this machine. `Err` if the working directory, the default precision or the default memory
/// budget cannot be determined.
pub fn report(options: Options) -> Result<Doctor, RuntimeError> {
    let cores = machine::cores();
    let memory = machine::available();
    let hub = HubEnv::from_process();
    let here = std::env::current_dir().map_err(RuntimeError::io("."))?;
    let mut disk = vec![("results", here)];
    disk.extend(hub.cache_dir().map(|cache| ("models", cache)));
    Ok(Doctor {
        cpu: cpu_model(&read("/proc/cpuinfo")),
        features: features(&read("/proc/cpuinfo")),
        isa: Isa::detect().name(),
        best: (Isa::detect().best(), on_cpu(None)?),
        kernels: options.kernels,
        gpus: options.gpus,
        cores,
        memory,
        machine: mem_total(&read("/proc/meminfo")).filter(|&all| all > memory.total),
        budget: Settings::default().read_budget()?.bytes,
        models: cached(&hub),
        torch_hub: hub.torch_checkpoints(),
        checkpoints: fair_esm::cached(&hub),
        disk: disk.into_iter().map(|(what, folder)| (what, folder.clone(), disk::free(&folder))).collect(),
        hub: hub.cache_dir(),
    })
}

/// Architecture and operating system that this binary was compiled for.
const PLATFORM: (&str, &str) = (std::env::consts::ARCH, std::env::consts::OS);

/// Values of `--precision` that CPUs support.
const ON_CPU: [Precision; 3] = [Precision::F32, Precision::Bf16, Precision::Int8];

impl Doctor {
    /// The report as JSON.
    pub fn to_json(&self) -> Value {
        let features: serde_json::Map<String, Value> =
            self.features.iter().map(|(name, has)| ((*name).to_owned(), json!(has))).collect();
        let models: serde_json::Map<String, Value> =
            self.models.iter().map(|(id, what)| (id.clone(), json!(what))).collect();
        let path = |path: &PathBuf| path.display().to_string();
        let checkpoint =
            |c: &Checkpoint| json!({"model": c.model, "file": path(&c.file), "file_bytes": c.bytes});
        let disk = |(what, folder, free): &(&str, PathBuf, Option<Bytes>)| json!({"for": what, "folder": path(folder), "free_bytes": free.map(|bytes| bytes.0)});
        let mut report = json!({
            "plimsoll": env!("CARGO_PKG_VERSION"),
            "rust_at_least": env!("CARGO_PKG_RUST_VERSION"),
            "platform": format!("{}-{}", PLATFORM.0, PLATFORM.1),
            "cpu": self.cpu,
            "features": features,
            "instruction_set": self.isa,
            "best": self.best.0,
            "precision": self.best.1.name(),
            "precisions": ON_CPU.map(Precision::name),
            "cores": self.cores,
            "default_threads": self.cores,
            "memory": {
                "total_bytes": self.memory.total.0,
                "free_bytes": self.memory.free.0,
                "machine_bytes": self.machine.unwrap_or(self.memory.total).0,
                "default_budget_bytes": self.budget.0,
            },
            "gpu": self.gpus,
            "hub_cache": {"folder": self.hub.as_ref().map(path), "models": models},
            "torch_hub_cache": {
                "folder": self.torch_hub.as_ref().map(path),
                "checkpoints": self.checkpoints.iter().map(checkpoint).collect::<Vec<_>>(),
            },
            "disk": self.disk.iter().map(disk).collect::<Vec<_>>(),
        });
        if self.kernels {
            let mut of_op: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
            for kernel in CpuKernel::ALL {
                of_op.entry(kernel.op().name()).or_default().push(kernel.name());
            }
            report["kernels"] = json!(of_op);
        }
        report
    }

    fn write_processor(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let has = |wanted| self.features.iter().filter(move |(_, has)| *has == wanted).map(|(name, _)| *name);
        let list = |names: Vec<&str>| if names.is_empty() { "none".to_owned() } else { names.join(", ") };
        let auto = self.best.1;
        let others: Vec<&str> = ON_CPU.into_iter().filter(|p| *p != auto).map(Precision::name).collect();
        writeln!(f, "\nprocessor")?;
        writeln!(f, "  model            {}", self.cpu.as_deref().unwrap_or("unknown"))?;
        writeln!(f, "  cores            {}, the default of {}", self.cores, Setting::Threads)?;
        writeln!(f, "  supports         {}", list(has(true).collect()))?;
        writeln!(f, "  lacks            {}", list(has(false).collect()))?;
        let chosen = Setting::Precision.to("auto");
        writeln!(f, "  precision        {} ({chosen}), also {}", auto.name(), list(others))
    }

    fn write_memory(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\nmemory")?;
        writeln!(f, "  total            {}", self.memory.total)?;
        if let Some(machine) = self.machine {
            writeln!(f, "                   limited by a container; the machine has {machine}")?;
        }
        writeln!(f, "  free             {}", self.memory.free)?;
        writeln!(f, "  default budget   {} (80 % of the free memory)", self.budget)
    }

    fn write_models(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\nmodels")?;
        match &self.hub {
            Some(folder) => writeln!(f, "  hub cache        {}", EscapedPath(folder))?,
            None => writeln!(f, "  hub cache        none: HF_HUB_CACHE, HF_HOME and HOME are not set")?,
        }
        if self.models.is_empty() {
            writeln!(f, "    no models")?;
        }
        for (id, what) in &self.models {
            writeln!(f, "    {id}: {what}")?;
        }
        match &self.torch_hub {
            Some(folder) => writeln!(f, "  torch hub cache  {}", EscapedPath(folder))?,
            None => writeln!(f, "  torch hub cache  none: TORCH_HOME, XDG_CACHE_HOME and HOME are not set")?,
        }
        if self.checkpoints.is_empty() {
            writeln!(f, "    no ESM-2 checkpoints")?;
        }
        for Checkpoint { model, bytes, .. } in &self.checkpoints {
            writeln!(f, "    {model}: ESM-2, {}", Bytes(*bytes))?;
        }
        Ok(())
    }

    fn write_disk(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\ndisk")?;
        for (what, folder, free) in &self.disk {
            let free = free.map_or("unknown".to_owned(), |bytes| format!("{bytes} free"));
            writeln!(f, "  for {what:<12} {free} in {}", EscapedPath(folder))?;
        }
        Ok(())
    }
}

impl fmt::Display for Doctor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (arch, os) = PLATFORM;
        let (version, rust) = (env!("CARGO_PKG_VERSION"), env!("CARGO_PKG_RUST_VERSION"));
        writeln!(f, "plimsoll {version} for {arch}-{os}, built with Rust {rust} or later")?;
        self.write_processor(f)?;
        self.write_memory(f)?;
        writeln!(f, "\ngpu")?;
        for line in &self.gpus {
            writeln!(f, "  {line}")?;
        }
        self.write_models(f)?;
        self.write_disk(f)?;
        if !self.kernels {
            return Ok(());
        }
        writeln!(f, "\nkernels, compiled for {}", self.isa)?;
        writeln!(f, "  the first that is here of {}: {}", Isa::CHAIN.join(" -> "), self.best.0)?;
        for kernel in CpuKernel::ALL {
            let types: Vec<&str> = KernelId::Cpu(*kernel).dtypes().iter().map(|d| d.name()).collect();
            writeln!(f, "  {:<15}  {} ({})", kernel.op().name(), kernel.name(), types.join(", "))?;
        }
        Ok(())
    }
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// Name of the first processor in `/proc/cpuinfo`; on aarch64, where the file has no names, the implementer and
/// part numbers.
fn cpu_model(cpuinfo: &str) -> Option<String> {
    let value = |key: &str| {
        let (_, value) = cpuinfo.lines().find(|l| l.starts_with(key))?.split_once(':')?;
        Some(value.trim().to_owned())
    };
    let numbers = || Some(format!("implementer {}, part {}", value("CPU implementer")?, value("CPU part")?));
    value("model name").or_else(numbers)
}

/// Vector extensions according to the flags in `/proc/cpuinfo`. Unlike CPUID, these flags also tell whether the
/// operating system saves the registers of an extension.
fn features(cpuinfo: &str) -> Vec<(&'static str, bool)> {
    const X86: &[(&str, &[&str])] = &[
        ("AVX2", &["avx2"]),
        ("FMA", &["fma"]),
        ("AVX-512", &["avx512f", "avx512bw", "avx512dq", "avx512vl"]),
        ("AVX-512 BF16", &["avx512_bf16"]),
        ("AVX-512 VNNI", &["avx512_vnni"]),
        ("AMX", &["amx_tile", "amx_bf16", "amx_int8"]),
    ];
    const ARM: &[(&str, &[&str])] = &[("NEON", &["asimd"]), ("SVE", &["sve"]), ("BF16", &["bf16"])];
    let line = cpuinfo.lines().find(|l| l.starts_with("flags") || l.starts_with("Features"));
    let Some((_, flags)) = line.and_then(|l| l.split_once(':')) else { return vec![] };
    let flags: Vec<&str> = flags.split_whitespace().collect();
    let table = if cfg!(target_arch = "aarch64") { ARM } else { X86 };
    table.iter().map(|(name, all)| (*name, all.iter().all(|flag| flags.contains(flag)))).collect()
}

/// Total memory of the machine from the text of `/proc/meminfo`, which counts in KiB.
fn mem_total(meminfo: &str) -> Option<Bytes> {
    let line = meminfo.lines().find_map(|l| l.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(Bytes(kib * 1024))
}

/// Models in the hub cache: (id, state).
fn cached(env: &HubEnv) -> Vec<(String, String)> {
    cached_ids(env).into_iter().map(|id| (id.clone(), state(&id, env))).collect()
}

/// State of a cached model, without reading its weights: its family and missing files, or why it cannot run.
fn state(id: &str, env: &HubEnv) -> String {
    let Ok(folder) = find_in_hub(id, env) else { return "incomplete, no snapshot of `main`".to_owned() };
    let Ok(text) = read_config(&folder.join(CONFIG)) else { return "no config.json".to_owned() };
    let family = match ModelConfig::from_json(&text) {
        Ok(ModelConfig::Encoder(encoder)) => encoder.family(),
        Ok(ModelConfig::Decoder(decoder)) => SequenceModel::Decoder(decoder).family(),
        Ok(ModelConfig::Caller(_)) => "caller",
        Err(error) => return error.to_string(),
    };
    match &lacks(&folder, Need::Model)[..] {
        [] => family.to_owned(),
        [file] if *file == FOLDER_FILES[0] => format!("{family}, without weights"),
        files => format!("{family}, without {}", files.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpuinfo_is_read() {
        let text = "processor : 0\nmodel name\t: Some CPU @ 2GHz\nflags\t\t: fpu avx2 fma amx_tile amx_bf16 amx_int8\n";
        assert_eq!(cpu_model(text).as_deref(), Some("Some CPU @ 2GHz"));
        if cfg!(target_arch = "x86_64") {
            let wanted = ["AVX2", "FMA", "AMX"];
            let found = features(text).into_iter().filter_map(|(name, has)| has.then_some(name));
            assert_eq!(found.collect::<Vec<_>>(), wanted);
        }
        assert_eq!(cpu_model(""), None);
        let text = "processor\t: 0\nFeatures\t: fp asimd bf16\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n";
        assert_eq!(cpu_model(text).as_deref(), Some("implementer 0x41, part 0xd4f"));
        if cfg!(target_arch = "aarch64") {
            assert_eq!(features(text), [("NEON", true), ("SVE", false), ("BF16", true)]);
        }
        assert_eq!(features(""), []);
        assert_eq!(mem_total("MemTotal:   2 kB\n"), Some(Bytes(2048)));
    }

    #[test]
    fn every_part_is_in_both_forms() {
        let gpus = vec!["cuda:0: a card".to_owned()];
        let doctor = report(Options { gpus: gpus.clone(), kernels: false }).expect("looked at");
        let (text, json) = (doctor.to_string(), doctor.to_json());
        let parts = ["\nprocessor", "\nmemory", "\ngpu\n  cuda:0: a card", "\nmodels", "\ndisk"];
        let places: Vec<usize> =
            parts.iter().map(|part| text.find(part).unwrap_or_else(|| panic!("{part}: {text}"))).collect();
        assert!(places.is_sorted(), "{text}");
        assert_eq!((&json["cores"], &json["gpu"][0]), (&json!(doctor.cores), &json!("cuda:0: a card")));
        assert!(json["disk"][0]["free_bytes"].as_u64().is_some_and(|free| free > 0), "{json}");
        assert!(!text.contains("kernels") && json.get("kernels").is_none(), "{text}");
        let doctor = report(Options { gpus, kernels: true }).expect("looked at");
        let (text, json) = (doctor.to_string(), doctor.to_json());
        assert!(text.contains("\nkernels") && text.contains("linear"), "{text}");
        assert!(json["kernels"]["linear"].as_array().is_some_and(|rows| rows.len() > 1), "{json}");
        assert!(Isa::CHAIN.contains(&doctor.best.0) && text.contains(&format!("portable: {}", doctor.best.0)));
    }
}
