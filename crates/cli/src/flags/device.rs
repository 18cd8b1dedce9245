//! `--device`: a word becomes a machine. Invariant: a device that was asked for by name is used or refused; only `auto`
//! falls back, and says why.

use run::{Device, RunError};

/// Where to compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceName {
    /// The first GPU that can be used, or the CPU.
    Auto,
    /// The CPU.
    Cpu,
    /// The GPU of a number.
    Cuda(usize),
}

impl DeviceName {
    /// `auto`, `cpu`, `cuda` (the first) or `cuda:N`.
    pub fn parse(word: &str) -> Result<Self, String> {
        let number = word.strip_prefix("cuda:").and_then(|n| n.parse().ok());
        match (word, number) {
            ("auto", _) => Ok(Self::Auto),
            ("cpu", _) => Ok(Self::Cpu),
            ("cuda", _) => Ok(Self::Cuda(0)),
            (_, Some(ordinal)) => Ok(Self::Cuda(ordinal)),
            (_, None) => Err("give auto, cpu, cuda or cuda:N, such as cuda:0".to_owned()),
        }
    }

    /// The machine.
    pub fn open(self) -> Result<Device, RunError> {
        match self {
            Self::Cpu => Ok(Device::Cpu),
            Self::Auto => Ok(gpu(0).unwrap_or_else(|why| {
                if !why.is_absent() {
                    eprintln!("computing on the CPU: {}", why.0);
                }
                Device::Cpu
            })),
            Self::Cuda(ordinal) => {
                let why = |why: NoGpu| RunError::Refused(format!("--device cuda:{ordinal}: {}", why.0));
                gpu(ordinal).map_err(why)
            }
        }
    }
}

/// Why there is no GPU.
struct NoGpu(String, bool);

impl NoGpu {
    /// Whether this machine has none at all, of which `auto` says nothing.
    fn is_absent(&self) -> bool {
        self.1
    }
}

#[cfg(feature = "cuda")]
fn gpu(ordinal: usize) -> Result<Device, NoGpu> {
    match cuda::CudaMachine::new(ordinal, cuda::Options::default()) {
        Ok(machine) => Ok(Device::Machine(std::sync::Arc::new(machine))),
        Err(error) => Err(NoGpu(error.to_string(), error.is_absent())),
    }
}

/// What there is of GPUs and of what they need: a line for each library and each card.
#[cfg(feature = "cuda")]
pub fn gpus() -> Vec<String> {
    let libraries = cuda::Libraries::get();
    let found = libraries.found().iter().map(|found| format!("{}: {}", found.name, found.path));
    let mut lines: Vec<String> = found.collect();
    lines.extend(libraries.missing().iter().map(ToString::to_string));
    match cuda::cards() {
        Ok(cards) => lines.extend(cards.iter().map(|card| {
            let (major, minor) = card.capability;
            let (name, memory) = (&card.name, card.memory);
            format!("cuda:{}: {name}, {memory}, compute capability {major}.{minor}", card.ordinal)
        })),
        // A missing driver was said above.
        Err(error) if libraries.missing().iter().any(|missing| missing.to_string() == error.to_string()) => {}
        Err(error) => lines.push(error.to_string()),
    }
    lines
}

/// None without the feature.
#[cfg(not(feature = "cuda"))]
pub fn gpus() -> Vec<String> {
    vec!["this plimsoll was built without the feature `cuda`".to_owned()]
}

#[cfg(not(feature = "cuda"))]
fn gpu(_: usize) -> Result<Device, NoGpu> {
    Err(NoGpu("this plimsoll was built without the feature `cuda`".to_owned(), true))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words() {
        for (word, wanted) in [
            ("auto", Some(DeviceName::Auto)),
            ("cpu", Some(DeviceName::Cpu)),
            ("cuda", Some(DeviceName::Cuda(0))),
            ("cuda:3", Some(DeviceName::Cuda(3))),
            ("cuda:", None),
            ("cuda:-1", None),
            ("gpu", None),
            ("", None),
        ] {
            assert_eq!(DeviceName::parse(word).ok(), wanted, "{word}");
        }
    }
}
