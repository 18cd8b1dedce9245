//! The flag `--device`: turns a device name into a machine. Invariant: a device requested by name is used or refused;
//! only `auto` falls back, and reports why.

use super::gpu::GpuOptions;
use crate::error::{CliError, usage};
use plimsoll_runtime::Device;
use std::sync::Arc;

/// Value of `--device`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceName {
    /// The usable GPUs, or else the CPU.
    Auto,
    /// The CPU.
    Cpu,
    /// All GPUs.
    AllCuda,
    /// The GPUs with these ordinals.
    Cuda(Vec<usize>),
}

impl DeviceName {
    /// Parses `auto`, `cpu`, `cuda` (all GPUs) or `cuda:N,M,...`.
    pub fn parse(word: &str) -> Result<Self, String> {
        const VALUES: &str = "give auto, cpu, cuda (all GPUs), or GPUs by ordinal, such as cuda:0 or cuda:0,2";
        match word {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::AllCuda),
            _ => {
                let list = word.strip_prefix("cuda:").ok_or(VALUES)?;
                let numbers: Option<Vec<usize>> = list.split(',').map(|n| n.parse().ok()).collect();
                let numbers = numbers.ok_or(VALUES)?;
                let twice = numbers.iter().enumerate().find(|(i, n)| numbers[..*i].contains(n));
                twice.map_or(Ok(()), |(_, n)| Err(format!("GPU {n} is listed twice; list every GPU once")))?;
                Ok(Self::Cuda(numbers))
            }
        }
    }

    /// Opens the devices, for commands that distribute work over all of them.
    pub fn open(&self, options: GpuOptions) -> Result<Device, CliError> {
        match self {
            Self::Cpu => Ok(Device::Cpu),
            Self::Auto => auto(HowMany::All, options),
            Self::AllCuda => Ok(Device::machines(all(options)?)?),
            Self::Cuda(numbers) => Ok(Device::machines(named(numbers, options)?)?),
        }
    }

    /// Opens one device, for commands that compute on one: the first, unless an ordinal was given.
    pub fn open_one(&self, options: GpuOptions) -> Result<Device, CliError> {
        match self {
            Self::Cpu => Ok(Device::Cpu),
            Self::Auto => auto(HowMany::One, options),
            Self::AllCuda => Ok(Device::machines(named(&[0], options)?.into_iter().map(first).collect())?),
            Self::Cuda(numbers) if numbers.len() > 1 => {
                Err(usage(format!("this command uses a single device; give --device cuda:{}", numbers[0])))
            }
            Self::Cuda(numbers) => Ok(Device::machines(named(numbers, options)?)?),
        }
    }
}

type Gpu = Arc<dyn plimsoll_runtime::Machine>;

/// Opens the usable GPUs of one kind, or the CPU if there are none, and reports unused GPUs.
fn auto(how_many: HowMany, options: GpuOptions) -> Result<Device, CliError> {
    let (usable, unusable) = opened(how_many, gpus_there(), |ordinal| gpu(ordinal, options));
    let Some(one) = usable.first().cloned() else {
        if let Some(NoGpu { why, .. }) = unusable.iter().find(|no| !no.absent) {
            eprintln!("using the CPU, because no GPU can be used: {why}");
        }
        return Ok(Device::Cpu);
    };
    for NoGpu { why, .. } in unusable {
        eprintln!("not using a GPU: {why}");
    }
    if matches!(how_many, HowMany::One) {
        return Ok(Device::machines(vec![first(one)])?);
    }
    let (same, others): (Vec<Gpu>, Vec<Gpu>) = usable.into_iter().partition(|gpu| gpu.kind() == one.kind());
    for other in others {
        eprintln!(
            "not using {}: all GPUs of a run must be of the same kind, and the first is {}",
            other.name(),
            one.name()
        );
    }
    Ok(Device::machines(same)?)
}

/// Opens only as many usable GPUs as needed, because every opened GPU has memory allocated on it.
fn opened<T>(
    how_many: HowMany,
    count: usize,
    mut open: impl FnMut(usize) -> Result<T, NoGpu>,
) -> (Vec<T>, Vec<NoGpu>) {
    let mut usable = vec![];
    let mut unusable = vec![];
    // Ordinal 0 is tried even without GPUs: its error is the reason to report.
    for ordinal in 0..count.max(1) {
        open(ordinal).map_or_else(|why| unusable.push(why), |one| usable.push(one));
        if matches!(how_many, HowMany::One) && !usable.is_empty() {
            break;
        }
    }
    (usable, unusable)
}

/// Reports that a GPU is the first of several.
fn first(gpu: Gpu) -> Gpu {
    if gpus_there() > 1 {
        eprintln!("using {}, one of {} GPUs", gpu.name(), gpus_there());
    }
    gpu
}

/// Opens all GPUs; an unusable GPU is an error.
fn all(options: GpuOptions) -> Result<Vec<Gpu>, CliError> {
    let numbers: Vec<usize> = (0..gpus_there().max(1)).collect();
    named(&numbers, options)
}

fn named(numbers: &[usize], options: GpuOptions) -> Result<Vec<Gpu>, CliError> {
    let opened = numbers.iter().map(|&ordinal| {
        gpu(ordinal, options).map_err(|no| usage(format!("--device cuda:{ordinal}: {}", no.why)))
    });
    opened.collect()
}

/// Number of GPUs that a command uses when no ordinals were given.
#[derive(Clone, Copy)]
enum HowMany {
    All,
    One,
}

/// Reason why no GPU can be used, and whether this machine has none at all, which `auto` does not report.
struct NoGpu {
    why: String,
    absent: bool,
}

/// Number of GPUs known to the driver, usable or not.
#[cfg(feature = "cuda")]
fn gpus_there() -> usize {
    plimsoll_cuda::cards().map_or(0, |cards| cards.len())
}

#[cfg(feature = "cuda")]
fn gpu(ordinal: usize, options: GpuOptions) -> Result<Gpu, NoGpu> {
    match plimsoll_cuda::CudaMachine::new(ordinal, options) {
        Ok(machine) => Ok(Arc::new(machine)),
        Err(error) => Err(NoGpu { why: error.to_string(), absent: error.is_absent() }),
    }
}

/// Describes the GPUs and their libraries, one line per library and GPU.
#[cfg(feature = "cuda")]
pub fn gpus() -> Vec<String> {
    let libraries = plimsoll_cuda::Libraries::get();
    let found = libraries.found().iter().map(|found| format!("{}: {}", found.name, found.path));
    let mut lines: Vec<String> = found.collect();
    lines.extend(libraries.missing().iter().map(ToString::to_string));
    match plimsoll_cuda::cards() {
        Ok(cards) => lines.extend(cards.iter().map(|card| {
            let (major, minor) = card.capability;
            let name = &card.name;
            let memory = card.memory;
            let ordinal = card.ordinal;
            let used = used(card);
            let formats = precisions(card);
            format!("cuda:{ordinal}: {name}, {memory}, compute capability {major}.{minor}{used}; {formats}")
        })),
        // A missing driver was already listed above.
        Err(error) if libraries.missing().iter().any(|missing| missing.to_string() == error.to_string()) => {}
        Err(error) => lines.push(error.to_string()),
    }
    lines
}

/// Number formats supported on a GPU.
#[cfg(feature = "cuda")]
fn precisions(card: &plimsoll_cuda::Card) -> String {
    let names: Vec<&str> = card.precisions().into_iter().map(plimsoll_runtime::Precision::name).collect();
    match &names[..] {
        [] => "not supported: compute capability 8.0 or later is required".to_owned(),
        [auto, others @ ..] => format!("precision {auto} (--precision auto), also {}", others.join(", ")),
    }
}

/// Describes a GPU's free memory and the processes that hold the rest, as far as known.
#[cfg(feature = "cuda")]
fn used(card: &plimsoll_cuda::Card) -> String {
    let free = plimsoll_cuda::nvml::free(card).map_or_else(|_| String::new(), |free| format!(", {free} free"));
    let holders = plimsoll_cuda::nvml::holders(card).unwrap_or_default();
    holders.iter().fold(free, |text, holder| format!("{text}, {holder}"))
}

/// Without the feature `cuda` there are no GPUs.
#[cfg(not(feature = "cuda"))]
pub fn gpus() -> Vec<String> {
    vec!["plimsoll was built without the feature `cuda`, so it cannot use GPUs".to_owned()]
}

#[cfg(not(feature = "cuda"))]
fn gpus_there() -> usize {
    0
}

#[cfg(not(feature = "cuda"))]
fn gpu(_: usize, _: GpuOptions) -> Result<Gpu, NoGpu> {
    Err(NoGpu {
        why: "plimsoll was built without the feature `cuda`, so it cannot use GPUs".to_owned(),
        absent: true,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words() {
        for (word, wanted) in [
            ("auto", Some(DeviceName::Auto)),
            ("cpu", Some(DeviceName::Cpu)),
            ("cuda", Some(DeviceName::AllCuda)),
            ("cuda:3", Some(DeviceName::Cuda(vec![3]))),
            ("cuda:2,0,5", Some(DeviceName::Cuda(vec![2, 0, 5]))),
            ("cuda:", None),
            ("cuda:1,", None),
            ("cuda:1,2,1", None),
            ("cuda:-1", None),
            ("gpu", None),
            ("", None),
        ] {
            assert_eq!(DeviceName::parse(word).ok(), wanted, "{word}");
        }
    }

    #[test]
    fn a_command_on_one_device_opens_one() {
        for (how_many, there, broken, wanted, asked) in [
            (HowMany::One, 4, &[][..], &[0][..], 1),
            (HowMany::One, 4, &[0, 1], &[2], 3),
            (HowMany::One, 2, &[0, 1], &[], 2),
            (HowMany::All, 4, &[1], &[0, 2, 3], 4),
            (HowMany::All, 0, &[0], &[], 1),
        ] {
            let mut tries = 0;
            let (usable, unusable) = opened(how_many, there, |ordinal| {
                tries += 1;
                let why = || NoGpu { why: format!("cuda:{ordinal} is broken"), absent: false };
                (!broken.contains(&ordinal)).then_some(ordinal).ok_or_else(why)
            });
            assert_eq!((&usable[..], tries), (wanted, asked));
            assert_eq!(unusable.len(), asked - wanted.len());
        }
    }

    #[test]
    fn a_command_on_one_device_refuses_several() {
        let several = DeviceName::Cuda(vec![2, 0]).open_one(GpuOptions::default());
        let error = several.expect_err("two are named").to_string();
        assert_eq!(error, "this command uses a single device; give --device cuda:2");
    }
}
