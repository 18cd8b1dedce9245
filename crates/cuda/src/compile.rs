//! Compiles CUDA C++ to machine code (cubin) for one architecture, with a cache on disk. Invariant: the name of a
//! cached file is the hash of everything it depends on (source with its headers, options, compiler version,
//! architecture), and files are written atomically, so any number of processes may share the cache folder.

use crate::api::Nvrtc;
use crate::kernel::Kernel;
use crate::{CudaError, Libraries};
use plimsoll_exec::{OnStart, StartProgress, StartStage};
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::{env, fs, process, ptr, thread};

/// Maximum number of threads that compile. Each takes about 20 MB of host memory.
const MAX_THREADS: usize = 8;

/// NVRTC, configured for one GPU architecture.
pub struct Compiler {
    api: &'static Nvrtc,
    architecture: String,
    version: (i32, i32),
    cache: Option<PathBuf>,
}

/// Resources that a kernel uses, as reported by `ptxas -v`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    /// Registers per thread.
    pub registers: u32,
    /// Bytes of local memory per thread: arrays that were not kept in registers.
    pub stack: u32,
    /// Bytes of register spills per thread: (stores, loads).
    pub spills: (u32, u32),
}

impl Compiler {
    /// Creates a compiler for a compute capability, with the cache in the user's cache folder. Hopper is compiled as
    /// `sm_90a`, since wgmma and other instructions exist only there.
    pub fn new(capability: (u32, u32)) -> Result<Self, CudaError> {
        let api = Libraries::get().nvrtc.as_ref().map_err(CudaError::clone)?;
        let mut version = (0, 0);
        // SAFETY: both pointers are to locals.
        api.check("nvrtcVersion", unsafe { (api.nvrtcVersion)(&mut version.0, &mut version.1) })?;
        let (major, minor) = capability;
        let suffix = if capability == (9, 0) { "a" } else { "" };
        Ok(Self { api, architecture: format!("sm_{major}{minor}{suffix}"), version, cache: cache() })
    }

    /// Moves the cache on disk to another folder.
    pub fn with_cache(mut self, folder: PathBuf) -> Self {
        self.cache = Some(folder);
        self
    }

    /// Version (major, minor) of NVRTC.
    pub fn version(&self) -> (i32, i32) {
        self.version
    }

    /// Returns a kernel's machine code, from the cache if the cache has it.
    pub(crate) fn cubin(&self, kernel: &Kernel) -> Result<Vec<u8>, CudaError> {
        let file = self.cache_file(kernel);
        if let Some(code) = file.as_deref().and_then(cached) {
            return Ok(code);
        }
        let (code, _) = self.compile(kernel, &self.options(kernel))?;
        if let Some(file) = file {
            // A cache that cannot be written only costs time at the next start.
            let _ = keep(&file, &code);
        }
        Ok(code)
    }

    /// Compiles the kernels that the cache does not have, with up to `threads` threads and at most eight, and
    /// returns their machine code. Reports the number of compiled kernels, beginning with 0. A kernel that fails to
    /// compile is left out, so that the error is returned where the kernel is prepared.
    pub fn compile_missing(
        &self,
        kernels: &[Kernel],
        threads: usize,
        report: OnStart<'_>,
    ) -> HashMap<Kernel, Vec<u8>> {
        let mut missing: Vec<&Kernel> = kernels
            .iter()
            .filter(|kernel| self.cache_file(kernel).as_deref().and_then(cached).is_none())
            .collect();
        // Long sources take longest; a thread that began one last would work alone at the end.
        missing.sort_by_key(|kernel| {
            let headers = kernel.file.headers();
            let length = kernel.text().len() + headers.iter().map(|header| header.text.len()).sum::<usize>();
            std::cmp::Reverse(length)
        });
        let total = missing.len() as u64;
        let next = AtomicUsize::new(0);
        let (sender, compiled) = channel();
        let mut found = HashMap::new();
        if missing.is_empty() {
            return found;
        }
        let mut count = |done| report(StartProgress { stage: StartStage::Compile, done, total });
        count(0);
        thread::scope(|scope| {
            for _ in 0..threads.clamp(1, MAX_THREADS).min(missing.len()) {
                let sender = sender.clone();
                let next = &next;
                let missing = &missing;
                let work = move || {
                    while let Some(&&kernel) = missing.get(next.fetch_add(1, Ordering::Relaxed)) {
                        // The receiver is dropped only after all senders.
                        let _ = sender.send((kernel, self.cubin(&kernel)));
                    }
                };
                // Where the system refuses threads, the others compile, or at last the thread that prepares.
                let _ = thread::Builder::new().name("compile".to_owned()).spawn_scoped(scope, work);
            }
            drop(sender);
            for (done, (kernel, code)) in (1..).zip(compiled) {
                found.extend(code.ok().map(|code| (kernel, code)));
                count(done);
            }
        });
        found
    }

    /// Path of a kernel's machine code in the cache; `None` without a cache.
    fn cache_file(&self, kernel: &Kernel) -> Option<PathBuf> {
        self.cache_path(kernel, &self.options(kernel), "cubin")
    }

    /// Returns the resources that a kernel uses.
    pub fn resources(&self, kernel: &Kernel) -> Result<Resources, CudaError> {
        Ok(resources(&self.log(kernel)?, kernel.entry))
    }

    /// Returns the log of compiler and assembler for a kernel's file, from the cache if the cache has it.
    pub fn log(&self, kernel: &Kernel) -> Result<String, CudaError> {
        let mut options = self.options(kernel);
        options.push("--ptxas-options=-v".to_owned());
        let file = self.cache_path(kernel, &options, "log");
        if let Some(log) = file.as_ref().and_then(|file| fs::read_to_string(file).ok()) {
            return Ok(log);
        }
        let (_, log) = self.compile(kernel, &options)?;
        if let Some(file) = file {
            // As above.
            let _ = keep(&file, log.as_bytes());
        }
        Ok(log)
    }

    /// Path of a compilation's result in the cache; `None` without a cache.
    fn cache_path(&self, kernel: &Kernel, options: &[String], extension: &str) -> Option<PathBuf> {
        // Names and texts of headers are hashed too: a change in a header alone must not find the old machine code.
        let mut inputs = format!("{:?} {options:?}\n{}", self.version, kernel.text());
        for header in kernel.file.headers() {
            inputs += &format!("\n{}\n{}", header.name, header.text);
        }
        let name = digest(&inputs);
        Some(self.cache.as_ref()?.join(format!("{name}.{extension}")))
    }

    fn options(&self, kernel: &Kernel) -> Vec<String> {
        let mut options = vec![format!("--gpu-architecture={}", self.architecture), "--std=c++17".to_owned()];
        // No --use_fast_math: it would replace exact operations by approximations and so change the bits.
        options.extend(kernel.constants().map(|(name, value)| format!("--define-macro={name}={value}")));
        options
    }

    /// Compiles a kernel's file; returns the machine code, and the log of compiler and assembler.
    fn compile(&self, kernel: &Kernel, options: &[String]) -> Result<(Vec<u8>, String), CudaError> {
        let source = c_string(kernel.text());
        let name = c_string(kernel.file.name());
        let headers = kernel.file.headers();
        let header_texts: Vec<CString> = headers.iter().map(|header| c_string(header.text)).collect();
        let header_names: Vec<CString> = headers.iter().map(|header| c_string(header.name)).collect();
        let options: Vec<CString> = options.iter().map(|option| c_string(option)).collect();
        let header_texts_at = pointers(&header_texts);
        let header_names_at = pointers(&header_names);
        let options_at = pointers(&options);
        let api = self.api;
        let mut program = ptr::null_mut();
        // SAFETY: all strings outlive the calls; the program is destroyed below on every path that created it.
        unsafe {
            let code = (api.nvrtcCreateProgram)(
                &mut program,
                source.as_ptr(),
                name.as_ptr(),
                headers.len() as c_int,
                header_texts_at.as_ptr(),
                header_names_at.as_ptr(),
            );
            api.check("nvrtcCreateProgram", code)?;
            let compiled = (api.nvrtcCompileProgram)(program, options_at.len() as c_int, options_at.as_ptr());
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

/// Copies a text for C; a text with a zero byte, which no source has, becomes empty.
fn c_string(text: &str) -> CString {
    CString::new(text).unwrap_or_default()
}

/// Returns the addresses of strings, which must outlive them.
fn pointers(strings: &[CString]) -> Vec<*const c_char> {
    strings.iter().map(|string| string.as_ptr()).collect()
}

/// Magic number at the start of machine code.
const ELF: &[u8] = b"\x7fELF";

/// Reads machine code from the cache; `None` if the file is missing or does not begin like machine code.
fn cached(file: &Path) -> Option<Vec<u8>> {
    fs::read(file).ok().filter(|code| code.starts_with(ELF))
}

/// Reads a byte string through a pair of NVRTC calls, one for its size and one for its contents; empty if either fails.
fn read(size: impl FnOnce(*mut usize) -> c_int, get: impl FnOnce(*mut c_char) -> c_int) -> Vec<u8> {
    let mut n = 0;
    if size(&mut n) != 0 {
        return vec![];
    }
    let mut bytes = vec![0u8; n];
    let code = if n == 0 { 0 } else { get(bytes.as_mut_ptr().cast()) };
    if code == 0 { bytes } else { vec![] }
}

/// Returns the SHA-256 of a text in hexadecimal.
pub(crate) fn digest(text: &str) -> String {
    Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the cache folder: `plimsoll/cuda` in the user's cache folder.
pub(crate) fn cache() -> Option<PathBuf> {
    let cache =
        absolute_path_in("XDG_CACHE_HOME").or_else(|| Some(absolute_path_in("HOME")?.join(".cache")))?;
    Some(cache.join("plimsoll").join("cuda"))
}

/// Returns the path in an environment variable if it is absolute.
fn absolute_path_in(variable: &str) -> Option<PathBuf> {
    env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute())
}

/// Writes a file atomically, through a temporary file and a rename.
pub(crate) fn keep(file: &Path, code: &[u8]) -> std::io::Result<()> {
    let Some(folder) = file.parent() else { return Ok(()) };
    fs::create_dir_all(folder)?;
    let temporary = file.with_extension(format!("{}.tmp", process::id()));
    fs::write(&temporary, code)?;
    fs::rename(&temporary, file)
}

/// Parses the word in front of `unit` in a line as a number.
fn number_before(line: &str, unit: &str) -> Option<u32> {
    line[..line.find(unit)?].split_whitespace().next_back()?.parse().ok()
}

/// Parses the resources of one entry from the log of `ptxas -v`.
fn resources(log: &str, entry: &str) -> Resources {
    let mut found = Resources::default();
    let mut ours = false;
    for line in log.lines() {
        if line.contains("Compiling entry function") || line.contains("Function properties for") {
            ours = line.split(|c: char| !(c.is_alphanumeric() || c == '_')).any(|word| word == entry);
        }
        if !ours {
            continue;
        }
        if let Some(stack) = number_before(line, "bytes stack frame") {
            found.stack = stack;
        }
        if let (Some(stores), Some(loads)) =
            (number_before(line, "bytes spill stores"), number_before(line, "bytes spill loads"))
        {
            found.spills = (stores, loads);
        }
        if let Some(registers) = number_before(line, "registers") {
            found.registers = registers;
        }
    }
    found
}

impl Nvrtc {
    /// Returns an error with the library's message unless `code` is zero.
    fn check(&self, function: &'static str, code: c_int) -> Result<(), CudaError> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: the library returns a constant string.
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
