//! CUDA C++ to machine code for one architecture, kept on disk. Invariant: a kept file's name is the hash of all that it
//! depends on (source, options, compiler, architecture), and it appears whole or not at all, so any number of processes
//! may share the folder.

use crate::api::Nvrtc;
use crate::kernel::Kernel;
use crate::{CudaError, Libraries};
use sha2::{Digest, Sha256};
use std::ffi::{CStr, CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::{env, fs, process, ptr};

/// NVRTC for one architecture.
pub struct Compiler {
    api: &'static Nvrtc,
    architecture: String,
    version: (i32, i32),
    cache: Option<PathBuf>,
}

/// What a kernel takes of a multiprocessor, as the assembler reports it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of local memory: arrays that were not kept in registers.
    pub stack: u32,
    /// Bytes spilled: stores and loads.
    pub spills: (u32, u32),
}

impl Compiler {
    /// For a compute capability, with the cache in the user's folder. Hopper's own instructions need `sm_90a`.
    pub fn new(capability: (u32, u32)) -> Result<Self, CudaError> {
        let api = Libraries::get().nvrtc.as_ref().map_err(CudaError::clone)?;
        let mut version = (0, 0);
        // SAFETY: pointers are to locals.
        api.check("nvrtcVersion", unsafe { (api.nvrtcVersion)(&mut version.0, &mut version.1) })?;
        let (major, minor) = capability;
        let suffix = if capability == (9, 0) { "a" } else { "" };
        Ok(Self { api, architecture: format!("sm_{major}{minor}{suffix}"), version, cache: cache() })
    }

    /// The same, without the disk.
    pub fn without_cache(mut self) -> Self {
        self.cache = None;
        self
    }

    /// The compiler's version.
    pub fn version(&self) -> (i32, i32) {
        self.version
    }

    /// A kernel's machine code, from the disk where it is there.
    pub fn cubin(&self, kernel: &Kernel) -> Result<Vec<u8>, CudaError> {
        let (source, options) = (kernel.source(), self.options(kernel));
        let file =
            self.cache.as_ref().map(|folder| folder.join(format!("{}.cubin", self.key(&source, &options))));
        if let Some(code) =
            file.as_ref().and_then(|file| fs::read(file).ok()).filter(|code| code.starts_with(ELF))
        {
            return Ok(code);
        }
        let (code, _) = self.compile(kernel, &source, &options)?;
        if let Some(file) = file {
            // A cache that cannot be written costs time only.
            let _ = keep(&file, &code);
        }
        Ok(code)
    }

    /// What a kernel takes, compiled anew.
    pub fn resources(&self, kernel: &Kernel) -> Result<Resources, CudaError> {
        Ok(resources(&self.log(kernel)?, kernel.entry))
    }

    /// What compiler and assembler say of a kernel's file, compiled anew.
    pub fn log(&self, kernel: &Kernel) -> Result<String, CudaError> {
        let mut options = self.options(kernel);
        options.push("--ptxas-options=-v".to_owned());
        Ok(self.compile(kernel, &kernel.source(), &options)?.1)
    }

    fn options(&self, kernel: &Kernel) -> Vec<String> {
        let mut options = vec![format!("--gpu-architecture={}", self.architecture), "--std=c++17".to_owned()];
        // Sums and exponentials are written as they shall be computed: no --use_fast_math, which would change them.
        options.extend(kernel.constants().map(|(name, value)| format!("--define-macro={name}={value}")));
        options
    }

    fn key(&self, source: &str, options: &[String]) -> String {
        digest(&format!("{:?} {options:?}\n{source}", self.version))
    }

    fn compile(
        &self,
        kernel: &Kernel,
        source: &str,
        options: &[String],
    ) -> Result<(Vec<u8>, String), CudaError> {
        let text = |text: &str| CString::new(text).unwrap_or_default();
        let (source, name) = (text(source), text(kernel.file.name()));
        let options: Vec<CString> = options.iter().map(|option| text(option)).collect();
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let (api, mut program) = (self.api, ptr::null_mut());
        // SAFETY: all strings outlive the calls; the program is destroyed below, on every path.
        unsafe {
            let (none, names) = (ptr::null(), ptr::null());
            let code = (api.nvrtcCreateProgram)(&mut program, source.as_ptr(), name.as_ptr(), 0, none, names);
            api.check("nvrtcCreateProgram", code)?;
            let compiled = (api.nvrtcCompileProgram)(program, pointers.len() as c_int, pointers.as_ptr());
            let log = read(
                |size| (api.nvrtcGetProgramLogSize)(program, size),
                |to| (api.nvrtcGetProgramLog)(program, to),
            );
            let log = String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned();
            let code =
                read(|size| (api.nvrtcGetCUBINSize)(program, size), |to| (api.nvrtcGetCUBIN)(program, to));
            (api.nvrtcDestroyProgram)(&mut program);
            if compiled != 0 || !code.starts_with(ELF) {
                return Err(CudaError::Compile { kernel: kernel.to_string(), log });
            }
            Ok((code, log))
        }
    }
}

/// What machine code starts with.
const ELF: &[u8] = b"\x7fELF";

/// Bytes of which one call says the number and another gives them; none where either fails.
fn read(size: impl FnOnce(*mut usize) -> c_int, get: impl FnOnce(*mut c_char) -> c_int) -> Vec<u8> {
    let mut n = 0;
    if size(&mut n) != 0 {
        return vec![];
    }
    let mut bytes = vec![0u8; n];
    let code = if n == 0 { 0 } else { get(bytes.as_mut_ptr().cast()) };
    if code == 0 { bytes } else { vec![] }
}

/// The SHA-256 of a text, in hexadecimal digits.
pub(crate) fn digest(text: &str) -> String {
    Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The folder of what is kept: `plimsoll/cuda` in the user's cache folder.
pub(crate) fn cache() -> Option<PathBuf> {
    let absolute = |variable| env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".cache")))?;
    Some(cache.join("plimsoll").join("cuda"))
}

/// Writes a file that appears whole or not at all.
pub(crate) fn keep(file: &Path, code: &[u8]) -> std::io::Result<()> {
    let Some(folder) = file.parent() else { return Ok(()) };
    fs::create_dir_all(folder)?;
    let temporary = file.with_extension(format!("{}.tmp", process::id()));
    fs::write(&temporary, code)?;
    fs::rename(&temporary, file)
}

/// Reads the assembler's report about one entry.
fn resources(log: &str, entry: &str) -> Resources {
    let (mut found, mut ours) = (Resources::default(), false);
    let number = |line: &str, before: &str| {
        let words: Vec<&str> = line[..line.find(before)?].split_whitespace().collect();
        words.last()?.parse::<u32>().ok()
    };
    for line in log.lines() {
        if line.contains("Compiling entry function") || line.contains("Function properties for") {
            ours = line.split(|c: char| !(c.is_alphanumeric() || c == '_')).any(|word| word == entry);
        }
        if !ours {
            continue;
        }
        if let Some(stack) = number(line, "bytes stack frame") {
            found.stack = stack;
        }
        if let (Some(stores), Some(loads)) =
            (number(line, "bytes spill stores"), number(line, "bytes spill loads"))
        {
            found.spills = (stores, loads);
        }
        if let Some(registers) = number(line, "registers") {
            found.registers = registers;
        }
    }
    found
}

impl Nvrtc {
    /// An error unless the code is zero.
    fn check(&self, function: &'static str, code: c_int) -> Result<(), CudaError> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: the library gives a constant string.
        let message =
            unsafe { CStr::from_ptr((self.nvrtcGetErrorString)(code)) }.to_string_lossy().into_owned();
        Err(CudaError::Call { function, code, message })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_of_an_entry_is_read() {
        let log = "ptxas info    : 0 bytes gmem\n\
                   ptxas info    : Compiling entry function 'one' for 'sm_90a'\n\
                   ptxas info    : Function properties for one\n    \
                   0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
                   ptxas info    : Used 32 registers, used 0 barriers\n\
                   ptxas info    : Compiling entry function 'two' for 'sm_90a'\n\
                   ptxas info    : Function properties for two\n    \
                   16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads\n\
                   ptxas info    : Used 255 registers, used 1 barriers\n";
        assert_eq!(resources(log, "one"), Resources { registers: 32, stack: 0, spills: (0, 0) });
        assert_eq!(resources(log, "two"), Resources { registers: 255, stack: 16, spills: (4, 8) });
        assert_eq!(resources(log, "three"), Resources::default());
    }
}
