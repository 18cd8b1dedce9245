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
use plimsoll_runtime::fair_esm::{self, FairEsmCheckpoint};
use plimsoll_runtime::hub::{CONFIG, Need, lacks};
use plimsoll_runtime::machine;
use plimsoll_runtime::model::read_config;
use plimsoll_runtime::on_cpu;
use plimsoll_runtime::report::{optional_path_text, path_text};
use plimsoll_runtime::{Precision, RuntimeError, Settings};
use plimsoll_setting::Setting;
use serde::{Serialize, Serializer};
use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::PathBuf;

/// Report on this machine: processor, memory, GPUs, cached models and free disk space.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DoctorReport {
    /// Version of Plimsoll.
    #[serde(rename = "plimsoll")]
    pub version: &'static str,
    /// Oldest version of Rust that compiles Plimsoll.
    pub rust_at_least: &'static str,
    /// Architecture and operating system that this binary was compiled for.
    pub platform: String,
    /// Model name of the processor from `/proc/cpuinfo`; `None` if it is not listed there.
    pub cpu: Option<String>,
    /// Vector extensions of interest for kernels, each with whether the processor has it. Empty if
    /// `/proc/cpuinfo` has no flags.
    #[serde(serialize_with = "as_map")]
    pub features: Vec<(&'static str, bool)>,
    /// The instruction set that CPU kernels are dispatched for.
    #[serde(rename = "instruction_set")]
    pub isa: &'static str,
    /// The first supported entry of [`Isa::CHAIN`].
    pub best: &'static str,
    /// The precision that `--precision auto` selects.
    pub precision: &'static str,
    /// Values of `--precision` that CPUs support.
    pub precisions: [&'static str; 3],
    /// Cores that this process may use.
    pub cores: usize,
    /// Number of threads of a run without `--threads`.
    pub default_threads: usize,
    /// Memory of this machine.
    pub memory: MachineMemory,
    /// Lines about GPUs: one for each GPU and one for each library that GPUs need.
    #[serde(rename = "gpu")]
    pub gpus: Vec<String>,
    /// The Hugging Face hub cache.
    #[serde(rename = "hub_cache")]
    pub hub: HubCache,
    /// The torch hub cache.
    #[serde(rename = "torch_hub_cache")]
    pub torch_hub: TorchHubCache,
    /// Free disk space: of the working directory for results, of the hub cache for models.
    pub disk: Vec<FreeDisk>,
    /// Names of the CPU kernels of each op; `None` unless they were requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernels: Option<BTreeMap<&'static str, Vec<&'static str>>>,
}

/// Memory of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MachineMemory {
    /// All memory within the limits of containers.
    #[serde(rename = "total_bytes")]
    pub total: Bytes,
    /// Free memory within the limits of containers.
    #[serde(rename = "free_bytes")]
    pub free: Bytes,
    /// Memory of the whole machine; more than `total` if a container limits this process to less.
    #[serde(rename = "machine_bytes")]
    pub machine: Bytes,
    /// Memory budget of a run without `--memory-budget`.
    #[serde(rename = "default_budget_bytes")]
    pub default_budget: Bytes,
}

/// The Hugging Face hub cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HubCache {
    /// Its folder; `None` if no environment variable determines it.
    #[serde(serialize_with = "optional_path_text")]
    pub folder: Option<PathBuf>,
    /// Its models: (id, model family and missing files, or the reason why the model cannot run).
    #[serde(serialize_with = "as_map")]
    pub models: Vec<(String, String)>,
}

/// The torch hub cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TorchHubCache {
    /// Its folder; `None` if no environment variable determines it.
    #[serde(serialize_with = "optional_path_text")]
    pub folder: Option<PathBuf>,
    /// Its ESM-2 checkpoints of fair-esm.
    pub checkpoints: Vec<FairEsmCheckpoint>,
}

/// Free space of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FreeDisk {
    /// Kind of the files that a run writes to the disk.
    #[serde(rename = "for")]
    pub purpose: &'static str,
    /// A folder on the disk.
    #[serde(serialize_with = "path_text")]
    pub folder: PathBuf,
    /// Free bytes; `None` if unknown.
    #[serde(rename = "free_bytes")]
    pub free: Option<Bytes>,
}

/// Serializes pairs of a key and a value as a map.
fn as_map<K: Serialize, V: Serialize, S: Serializer>(
    pairs: &[(K, V)],
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_map(pairs.iter().map(|(key, value)| (key, value)))
}

/// Options of the report. The caller supplies the lines about GPUs, because this crate does not depend on CUDA.
#[derive(Clone, Debug, Default)]
pub struct DoctorOptions {
    /// Lines about GPUs: one for each GPU and one for each library that GPUs need.
    pub gpus: Vec<String>,
    /// Whether to list the CPU kernels of each op.
    pub kernels: bool,
}

/// Collects the report on this machine. `Err` if the working directory, the default precision or the default memory
/// budget cannot be determined.
pub fn report(options: DoctorOptions) -> Result<DoctorReport, RuntimeError> {
    let cores = machine::cores();
    let memory = machine::available();
    let hub = HubEnv::from_process();
    let here = std::env::current_dir().map_err(RuntimeError::io("."))?;
    let mut folders = vec![("results", here)];
    folders.extend(hub.cache_dir().map(|cache| ("models", cache)));
    let cpuinfo = read("/proc/cpuinfo");
    Ok(DoctorReport {
        version: env!("CARGO_PKG_VERSION"),
        rust_at_least: env!("CARGO_PKG_RUST_VERSION"),
        platform: format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS),
        cpu: cpu_model(&cpuinfo),
        features: features(&cpuinfo),
        isa: Isa::detect().name(),
        best: Isa::detect().best(),
        precision: on_cpu(None)?.name(),
        precisions: ON_CPU.map(Precision::name),
        cores,
        default_threads: cores,
        memory: MachineMemory {
            total: memory.total,
            free: memory.free,
            machine: mem_total(&read("/proc/meminfo")).unwrap_or_default().max(memory.total),
            default_budget: Settings::default().read_budget()?.bytes,
        },
        gpus: options.gpus,
        hub: HubCache { folder: hub.cache_dir(), models: cached(&hub) },
        torch_hub: TorchHubCache { folder: hub.torch_checkpoints(), checkpoints: fair_esm::cached(&hub) },
        disk: folders
            .into_iter()
            .map(|(purpose, folder)| {
                let free = disk::free(&folder);
                FreeDisk { purpose, folder, free }
            })
            .collect(),
        kernels: options.kernels.then(kernels),
    })
}

/// Names of the CPU kernels of each op.
fn kernels() -> BTreeMap<&'static str, Vec<&'static str>> {
    let mut kernels: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for kernel in CpuKernel::ALL {
        kernels.entry(kernel.op().name()).or_default().push(kernel.name());
    }
    kernels
}

/// Values of `--precision` that CPUs support.
const ON_CPU: [Precision; 3] = [Precision::F32, Precision::Bf16, Precision::Int8];

impl DoctorReport {
    fn write_processor(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let supported = self.features.iter().filter(|(_, is_supported)| *is_supported).map(|(name, _)| *name);
        let lacking = self.features.iter().filter(|(_, is_supported)| !is_supported).map(|(name, _)| *name);
        let others = self.precisions.into_iter().filter(|name| *name != self.precision);
        writeln!(f, "\nprocessor")?;
        writeln!(f, "  model            {}", self.cpu.as_deref().unwrap_or("unknown"))?;
        writeln!(f, "  cores            {}, the default of {}", self.cores, Setting::Threads)?;
        writeln!(f, "  supports         {}", list(supported))?;
        writeln!(f, "  lacks            {}", list(lacking))?;
        let chosen = Setting::Precision.to("auto");
        writeln!(f, "  precision        {} ({chosen}), also {}", self.precision, list(others))
    }

    fn write_memory(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\nmemory")?;
        let MachineMemory { total, free, machine, default_budget } = self.memory;
        writeln!(f, "  total            {total}")?;
        if machine > total {
            writeln!(f, "                   limited by a container; the machine has {machine}")?;
        }
        writeln!(f, "  free             {free}")?;
        writeln!(f, "  default budget   {default_budget} (80 % of the free memory)")
    }

    fn write_models(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\nmodels")?;
        match &self.hub.folder {
            Some(folder) => writeln!(f, "  hub cache        {}", EscapedPath(folder))?,
            None => writeln!(f, "  hub cache        none: HF_HUB_CACHE, HF_HOME and HOME are not set")?,
        }
        if self.hub.models.is_empty() {
            writeln!(f, "    no models")?;
        }
        for (id, what) in &self.hub.models {
            writeln!(f, "    {id}: {what}")?;
        }
        match &self.torch_hub.folder {
            Some(folder) => writeln!(f, "  torch hub cache  {}", EscapedPath(folder))?,
            None => writeln!(f, "  torch hub cache  none: TORCH_HOME, XDG_CACHE_HOME and HOME are not set")?,
        }
        if self.torch_hub.checkpoints.is_empty() {
            writeln!(f, "    no ESM-2 checkpoints")?;
        }
        for FairEsmCheckpoint { model, bytes, .. } in &self.torch_hub.checkpoints {
            writeln!(f, "    {model}: ESM-2, {}", Bytes(*bytes))?;
        }
        Ok(())
    }

    fn write_disk(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\ndisk")?;
        for FreeDisk { purpose, folder, free } in &self.disk {
            let free = free.map_or("unknown".to_owned(), |bytes| format!("{bytes} free"));
            writeln!(f, "  for {purpose:<12} {free} in {}", EscapedPath(folder))?;
        }
        Ok(())
    }
}

impl fmt::Display for DoctorReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { version, platform, rust_at_least, .. } = self;
        writeln!(f, "plimsoll {version} for {platform}, built with Rust {rust_at_least} or later")?;
        self.write_processor(f)?;
        self.write_memory(f)?;
        writeln!(f, "\ngpu")?;
        for line in &self.gpus {
            writeln!(f, "  {line}")?;
        }
        self.write_models(f)?;
        self.write_disk(f)?;
        if self.kernels.is_none() {
            return Ok(());
        }
        writeln!(f, "\nkernels, compiled for {}", self.isa)?;
        writeln!(f, "  the first that is here of {}: {}", Isa::CHAIN.join(" -> "), self.best)?;
        for kernel in CpuKernel::ALL {
            let types: Vec<&str> = KernelId::Cpu(*kernel).dtypes().iter().map(|d| d.name()).collect();
            writeln!(f, "  {:<15}  {} ({})", kernel.op().name(), kernel.name(), types.join(", "))?;
        }
        Ok(())
    }
}

/// Names with commas between them; `none` without any.
fn list<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let names: Vec<&str> = names.collect();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// Name of the first processor in `/proc/cpuinfo`; on aarch64, where the file has no names, the implementer and
/// part numbers.
fn cpu_model(cpuinfo: &str) -> Option<String> {
    if let Some(name) = cpuinfo_value(cpuinfo, "model name") {
        return Some(name.to_owned());
    }
    let implementer = cpuinfo_value(cpuinfo, "CPU implementer")?;
    let part = cpuinfo_value(cpuinfo, "CPU part")?;
    Some(format!("implementer {implementer}, part {part}"))
}

/// Value of the first line of `/proc/cpuinfo` with a key.
fn cpuinfo_value<'a>(cpuinfo: &'a str, key: &str) -> Option<&'a str> {
    let (_, value) = cpuinfo.lines().find(|l| l.starts_with(key))?.split_once(':')?;
    Some(value.trim())
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
    use plimsoll_runtime::report::to_json;

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
        let doctor = report(DoctorOptions { gpus: gpus.clone(), kernels: false }).expect("looked at");
        let (text, json) = (doctor.to_string(), to_json(&doctor));
        let parts = ["\nprocessor", "\nmemory", "\ngpu\n  cuda:0: a card", "\nmodels", "\ndisk"];
        let places: Vec<usize> =
            parts.iter().map(|part| text.find(part).unwrap_or_else(|| panic!("{part}: {text}"))).collect();
        assert!(places.is_sorted(), "{text}");
        assert_eq!((&json["cores"], &json["gpu"][0]), (&doctor.cores.into(), &"cuda:0: a card".into()));
        assert!(json["disk"][0]["free_bytes"].as_u64().is_some_and(|free| free > 0), "{json}");
        assert!(!text.contains("kernels") && json.get("kernels").is_none(), "{text}");
        let doctor = report(DoctorOptions { gpus, kernels: true }).expect("looked at");
        let (text, json) = (doctor.to_string(), to_json(&doctor));
        assert!(text.contains("\nkernels") && text.contains("linear"), "{text}");
        assert!(json["kernels"]["linear"].as_array().is_some_and(|rows| rows.len() > 1), "{json}");
        assert!(Isa::CHAIN.contains(&doctor.best) && text.contains(&format!("portable: {}", doctor.best)));
    }
}
