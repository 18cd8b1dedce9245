//! Finds the driver, NVRTC, cuBLASLt and NVML. Invariant: nothing panics where one is absent, and what was tried is told; a
//! library that was opened stays open for the life of the process.
//!
//! Each is looked for, in this order, in the folders of `PLIMSOLL_CUDA_PATH`, where the loader looks (so
//! `LD_LIBRARY_PATH` counts), in CUDA's usual folders, and in the packages `nvidia/*/lib` of the Python environments that
//! are active (`VIRTUAL_ENV`, `CONDA_PREFIX`) or that `python3` on the path has.

use crate::CudaError;
use crate::api::{CublasLt, Driver, Nvml, Nvrtc};
use libloading::Library;
use libloading::os::unix::{Library as Open, RTLD_GLOBAL, RTLD_NOW};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::{env, fs};

/// The environment variable with folders to look in first, between colons.
pub const PATH_VARIABLE: &str = "PLIMSOLL_CUDA_PATH";

/// The libraries, looked for once.
pub struct Libraries {
    pub(crate) driver: Result<Driver, CudaError>,
    pub(crate) nvrtc: Result<Nvrtc, CudaError>,
    pub(crate) cublaslt: Result<CublasLt, CudaError>,
    /// Only what it tells is missing without it.
    pub(crate) nvml: Result<Nvml, CudaError>,
    found: Vec<Found>,
}

/// A library that was opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// What it is.
    pub name: &'static str,
    /// As it was opened: a path, or a bare name where the loader found it.
    pub path: String,
}

struct Wanted {
    name: &'static str,
    /// File names, the preferred one first.
    files: &'static [&'static str],
    /// Must be opened before, from the same folder, where it is there.
    before: Option<&'static str>,
    remedy: &'static str,
}

/// What messages call the driver.
pub(crate) const DRIVER_NAME: &str = "the NVIDIA driver (libcuda)";

const DRIVER: Wanted = Wanted {
    name: DRIVER_NAME,
    files: &["libcuda.so.1"],
    before: None,
    remedy: "install the NVIDIA driver, version 525 or later",
};

const NVRTC: Wanted = Wanted {
    name: "NVRTC (libnvrtc)",
    files: &["libnvrtc.so.13", "libnvrtc.so.12"],
    before: Some("libnvrtc-builtins.so"),
    remedy: "install the Python package nvidia-cuda-nvrtc (nvidia-cuda-nvrtc-cu12 for older drivers) or CUDA's nvrtc package",
};

const CUBLASLT: Wanted = Wanted {
    name: "cuBLASLt (libcublasLt)",
    files: &["libcublasLt.so.13", "libcublasLt.so.12"],
    before: None,
    remedy: "install the Python package nvidia-cublas (nvidia-cublas-cu12 for older drivers) or CUDA's cublas package",
};

const NVML: Wanted = Wanted {
    name: "NVML (libnvidia-ml)",
    files: &["libnvidia-ml.so.1"],
    before: None,
    remedy: "it comes with the NVIDIA driver",
};

impl Libraries {
    /// Those of this machine.
    pub fn get() -> &'static Self {
        static LIBRARIES: OnceLock<Libraries> = OnceLock::new();
        LIBRARIES.get_or_init(|| {
            let mut found = vec![];
            let folders = folders();
            let mut opened = |wanted: &Wanted| open(wanted, &folders, &mut found);
            let (driver, nvrtc, cublaslt) = (opened(&DRIVER), opened(&NVRTC), opened(&CUBLASLT));
            let nvml = opened(&NVML);
            Self {
                driver: driver.and_then(|library| Driver::of(library, DRIVER.name)),
                nvrtc: nvrtc.and_then(|library| Nvrtc::of(library, NVRTC.name)),
                cublaslt: cublaslt.and_then(|library| CublasLt::of(library, CUBLASLT.name)),
                nvml: nvml.and_then(|library| Nvml::of(library, NVML.name)),
                found,
            }
        })
    }

    /// Those of this machine, where none is missing.
    pub fn whole() -> Result<&'static Self, CudaError> {
        let libraries = Self::get();
        libraries.missing().first().map_or(Ok(libraries), |&error| Err(error.clone()))
    }

    /// What was opened.
    pub fn found(&self) -> &[Found] {
        &self.found
    }

    /// Versions of NVRTC and cuBLASLt.
    pub fn versions(&self) -> String {
        let (mut major, mut minor) = (0, 0);
        if let Ok(nvrtc) = &self.nvrtc {
            // SAFETY: pointers are to locals.
            unsafe { (nvrtc.nvrtcVersion)(&mut major, &mut minor) };
        }
        // SAFETY: the function has no preconditions.
        let cublaslt = self.cublaslt.as_ref().map_or(0, |library| unsafe { (library.cublasLtGetVersion)() });
        format!("NVRTC {major}.{minor}, cuBLASLt {cublaslt}")
    }

    /// What is missing of those that computing needs, each with where it was looked for and what brings it.
    pub fn missing(&self) -> Vec<&CudaError> {
        let errors = [self.driver.as_ref().err(), self.nvrtc.as_ref().err(), self.cublaslt.as_ref().err()];
        errors.into_iter().flatten().collect()
    }
}

/// Where a toolkit, and Debian's packages, keep libraries for this kind of processor.
const OF_PROCESSOR: [&str; 2] = match cfg!(target_arch = "aarch64") {
    true => ["targets/sbsa-linux/lib", "/usr/lib/aarch64-linux-gnu"],
    false => ["targets/x86_64-linux/lib", "/usr/lib/x86_64-linux-gnu"],
};

/// Where to look; `None` is wherever the loader does.
fn folders() -> Vec<Option<PathBuf>> {
    let listed = |variable| env::var_os(variable).map(|v| env::split_paths(&v).collect()).unwrap_or_default();
    let explicit: Vec<PathBuf> = listed(PATH_VARIABLE);
    let mut folders: Vec<Option<PathBuf>> =
        explicit.into_iter().filter(|f| f.is_absolute()).map(Some).collect();
    folders.push(None);
    let mut usual: Vec<PathBuf> = children(Path::new("/usr/local"), "cuda");
    usual.sort_by(|a, b| b.cmp(a));
    let [toolkit, system] = OF_PROCESSOR;
    folders.extend(usual.iter().flat_map(|cuda| ["lib64", toolkit].map(|l| Some(cuda.join(l)))));
    for folder in ["/usr/local/nvidia/lib64", "/usr/lib/wsl/lib", system, "/usr/lib64"] {
        folders.push(Some(folder.into()));
    }
    let environments = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(env::var_os).map(PathBuf::from);
    let on_path: Vec<PathBuf> = listed("PATH");
    let python = on_path.iter().filter(|bin| bin.join("python3").exists()).filter_map(|bin| bin.parent());
    for prefix in environments.chain(python.map(Path::to_owned)) {
        for library in ["lib", "lib64"].map(|l| prefix.join(l)) {
            let versions = children(&library, "python3");
            let sites = versions.iter().flat_map(|v| ["site-packages", "dist-packages"].map(|s| v.join(s)));
            let packages = sites.flat_map(|site| children(&site.join("nvidia"), "")).map(|p| p.join("lib"));
            folders.extend(packages.map(Some));
        }
    }
    folders.dedup();
    folders
}

/// The entries of a folder whose names start so, sorted; none where it cannot be read.
fn children(folder: &Path, start: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let named = |path: &PathBuf| path.file_name().is_some_and(|n| n.to_string_lossy().starts_with(start));
    let mut paths: Vec<PathBuf> = entries.filter(named).collect();
    paths.sort();
    paths
}

fn open(
    wanted: &Wanted,
    folders: &[Option<PathBuf>],
    found: &mut Vec<Found>,
) -> Result<&'static Library, CudaError> {
    let mut tried = vec![];
    for file in wanted.files {
        for folder in folders {
            let path = folder.as_ref().map_or_else(|| PathBuf::from(file), |folder| folder.join(file));
            if folder.is_some() && !path.exists() {
                continue;
            }
            if let (Some(before), Some(folder)) = (wanted.before, folder) {
                // Where it is missing, the library itself says so when it is used.
                children(folder, before).iter().for_each(|path| drop(load(path)));
            }
            match load(&path) {
                Ok(library) => {
                    found.push(Found { name: wanted.name, path: path.display().to_string() });
                    return Ok(library);
                }
                Err(why) => tried.push(why),
            }
        }
    }
    Err(CudaError::Library { name: wanted.name, tried, remedy: wanted.remedy })
}

/// Opens a library for good.
fn load(path: &Path) -> Result<&'static Library, String> {
    // SAFETY: these are NVIDIA's libraries by name; their initialisers have no preconditions.
    let open = unsafe { Open::open(Some(path), RTLD_NOW | RTLD_GLOBAL) };
    match open {
        Ok(library) => Ok(Box::leak(Box::new(library.into()))),
        Err(error) => Err(error.to_string()),
    }
}
