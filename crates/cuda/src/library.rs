//! Loads the driver, NVRTC, cuBLASLt and NVML at run time. Invariant: a missing library never panics but is an error
//! that lists the paths tried; a loaded library stays loaded for the life of the process.
//!
//! Search order for each library: the folders in `PLIMSOLL_CUDA_PATH`; the dynamic loader's own search (which honours
//! `LD_LIBRARY_PATH`); CUDA's usual installation folders; and the packages `nvidia/*/lib` of the active Python
//! environments (`VIRTUAL_ENV`, `CONDA_PREFIX`) and of every `python3` on `PATH`.

use crate::CudaError;
use crate::api::{CublasLt, Driver, Nvml, Nvrtc};
use crate::error::DRIVER_NAME;
use libloading::Library;
use libloading::os::unix::{Library as Open, RTLD_GLOBAL, RTLD_NOW};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::{env, fs};

/// Environment variable with the folders to search first, separated by colons.
pub(crate) const PATH_VARIABLE: &str = "PLIMSOLL_CUDA_PATH";

/// The libraries of this machine, searched for once per process; each is a function table or the error of its search.
pub struct Libraries {
    pub(crate) driver: Result<Driver, CudaError>,
    pub(crate) nvrtc: Result<Nvrtc, CudaError>,
    pub(crate) cublaslt: Result<CublasLt, CudaError>,
    /// Optional: without NVML, only its information about GPU memory and other processes is missing.
    pub(crate) nvml: Result<Nvml, CudaError>,
    found: Vec<FoundLibrary>,
}

/// A library that was loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundLibrary {
    /// Display name, such as `cuBLASLt (libcublasLt)`.
    pub name: &'static str,
    /// Path the library was loaded from, or its bare file name where the dynamic loader found it.
    pub path: String,
}

/// A library to search for.
struct WantedLibrary {
    name: &'static str,
    /// File names in order of preference.
    files: &'static [&'static str],
    /// Prefix of files to load first from the same folder, if they exist there.
    before: Option<&'static str>,
    remedy: &'static str,
}

const DRIVER: WantedLibrary = WantedLibrary {
    name: DRIVER_NAME,
    files: &["libcuda.so.1"],
    before: None,
    remedy: "install the NVIDIA driver, version 525 or later",
};

const NVRTC: WantedLibrary = WantedLibrary {
    name: "NVRTC (libnvrtc)",
    files: &["libnvrtc.so.13", "libnvrtc.so.12"],
    before: Some("libnvrtc-builtins.so"),
    remedy: "install the Python package nvidia-cuda-nvrtc (nvidia-cuda-nvrtc-cu12 for older drivers) or CUDA's nvrtc package",
};

const CUBLASLT: WantedLibrary = WantedLibrary {
    name: "cuBLASLt (libcublasLt)",
    files: &["libcublasLt.so.13", "libcublasLt.so.12"],
    before: None,
    remedy: "install the Python package nvidia-cublas (nvidia-cublas-cu12 for older drivers) or CUDA's cublas package",
};

const NVML: WantedLibrary = WantedLibrary {
    name: "NVML (libnvidia-ml)",
    files: &["libnvidia-ml.so.1"],
    before: None,
    remedy: "it comes with the NVIDIA driver",
};

impl Libraries {
    /// Returns the libraries of this machine; the first call searches for them.
    pub fn get() -> &'static Self {
        static LIBRARIES: OnceLock<Libraries> = OnceLock::new();
        LIBRARIES.get_or_init(|| {
            let mut found = vec![];
            let folders = folders();
            let driver = open(&DRIVER, &folders, &mut found);
            let nvrtc = open(&NVRTC, &folders, &mut found);
            let cublaslt = open(&CUBLASLT, &folders, &mut found);
            let nvml = open(&NVML, &folders, &mut found);
            Self {
                driver: driver.and_then(|library| Driver::of(library, DRIVER.name)),
                nvrtc: nvrtc.and_then(|library| Nvrtc::of(library, NVRTC.name)),
                cublaslt: cublaslt.and_then(|library| CublasLt::of(library, CUBLASLT.name)),
                nvml: nvml.and_then(|library| Nvml::of(library, NVML.name)),
                found,
            }
        })
    }

    /// Returns the libraries if the driver, NVRTC and cuBLASLt were all found, otherwise the error of the first
    /// missing one.
    pub fn complete() -> Result<&'static Self, CudaError> {
        let libraries = Self::get();
        libraries.missing().first().map_or(Ok(libraries), |&error| Err(error.clone()))
    }

    /// The libraries that were loaded.
    pub fn found(&self) -> &[FoundLibrary] {
        &self.found
    }

    /// Returns the versions of NVRTC and cuBLASLt as text; 0 stands for a library that is missing.
    pub fn versions(&self) -> String {
        let mut major = 0;
        let mut minor = 0;
        if let Ok(nvrtc) = &self.nvrtc {
            // SAFETY: both pointers are to locals.
            unsafe { (nvrtc.nvrtcVersion)(&mut major, &mut minor) };
        }
        // SAFETY: the function has no preconditions.
        let cublaslt = self.cublaslt.as_ref().map_or(0, |library| unsafe { (library.cublasLtGetVersion)() });
        format!("NVRTC {major}.{minor}, cuBLASLt {cublaslt}")
    }

    /// Returns the errors of the missing libraries among the driver, NVRTC and cuBLASLt; each names the paths tried
    /// and a remedy.
    pub fn missing(&self) -> Vec<&CudaError> {
        let errors = [self.driver.as_ref().err(), self.nvrtc.as_ref().err(), self.cublaslt.as_ref().err()];
        errors.into_iter().flatten().collect()
    }
}

/// Library folders for this processor architecture: of a CUDA toolkit (relative) and of Debian packages (absolute).
const OF_PROCESSOR: [&str; 2] = if cfg!(target_arch = "aarch64") {
    ["targets/sbsa-linux/lib", "/usr/lib/aarch64-linux-gnu"]
} else {
    ["targets/x86_64-linux/lib", "/usr/lib/x86_64-linux-gnu"]
};

/// Returns the folders to search, in order; `None` stands for the dynamic loader's own search.
fn folders() -> Vec<Option<PathBuf>> {
    let explicit = paths_in(PATH_VARIABLE);
    let mut folders: Vec<Option<PathBuf>> =
        explicit.into_iter().filter(|folder| folder.is_absolute()).map(Some).collect();
    folders.push(None);
    let mut usual: Vec<PathBuf> = children(Path::new("/usr/local"), "cuda");
    usual.sort_by(|a, b| b.cmp(a));
    let [toolkit, system] = OF_PROCESSOR;
    folders.extend(usual.iter().flat_map(|cuda| ["lib64", toolkit].map(|l| Some(cuda.join(l)))));
    for folder in ["/usr/local/nvidia/lib64", "/usr/lib/wsl/lib", system, "/usr/lib64"] {
        folders.push(Some(folder.into()));
    }
    let environments = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(env::var_os).map(PathBuf::from);
    let on_path = paths_in("PATH");
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

/// Returns the paths in an environment variable; empty if it is not set.
fn paths_in(variable: &str) -> Vec<PathBuf> {
    env::var_os(variable).map(|paths| env::split_paths(&paths).collect()).unwrap_or_default()
}

/// Returns the entries of `folder` whose names start with `start`, sorted; empty if the folder cannot be read.
fn children(folder: &Path, start: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut paths: Vec<PathBuf> = entries
        .filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(start)))
        .collect();
    paths.sort();
    paths
}

/// Loads the first file of `wanted` that can be loaded, by preferred file name and then by folder, and appends it to
/// `found`.
fn open(
    wanted: &WantedLibrary,
    folders: &[Option<PathBuf>],
    found: &mut Vec<FoundLibrary>,
) -> Result<&'static Library, CudaError> {
    let mut tried = vec![];
    for file in wanted.files {
        for folder in folders {
            let path = folder.as_ref().map_or_else(|| PathBuf::from(file), |folder| folder.join(file));
            if folder.is_some() && !path.exists() {
                continue;
            }
            if let (Some(before), Some(folder)) = (wanted.before, folder) {
                // A failure to load it is ignored: the library that needs it reports its absence on first use.
                children(folder, before).iter().for_each(|path| drop(load(path)));
            }
            match load(&path) {
                Ok(library) => {
                    found.push(FoundLibrary { name: wanted.name, path: path.display().to_string() });
                    return Ok(library);
                }
                Err(why) => tried.push(why),
            }
        }
    }
    Err(CudaError::Library { name: wanted.name, tried, remedy: wanted.remedy })
}

/// Loads a library and leaks it, so that function pointers into it stay valid.
fn load(path: &Path) -> Result<&'static Library, String> {
    // SAFETY: these are NVIDIA's libraries, opened by name; their initialisers have no preconditions.
    let open = unsafe { Open::open(Some(path), RTLD_NOW | RTLD_GLOBAL) };
    match open {
        Ok(library) => Ok(Box::leak(Box::new(library.into()))),
        Err(error) => Err(error.to_string()),
    }
}
