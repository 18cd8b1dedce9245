//! GPU information from NVML: free memory, even before a context exists, and the other processes that hold memory.
//! Invariant: only reads; GPUs are identified by UUID, so that `CUDA_VISIBLE_DEVICES` does not change which GPU is
//! meant; unknown values are left out rather than guessed.

use crate::api::{Nvml, NvmlDevice, NvmlMemory, NvmlProcess};
use crate::context::Card;
use crate::{CudaError, Libraries};
use plimsoll_exec::Holder;
use plimsoll_graph::Bytes;
use std::ffi::{CStr, CString, c_int, c_uint, c_ulonglong};
use std::sync::OnceLock;
use std::{fs, process, ptr};

/// Value of `used` for a process whose memory NVML does not report.
const NOT_AVAILABLE: c_ulonglong = c_ulonglong::MAX;

/// `NVML_ERROR_INSUFFICIENT_SIZE`: the buffer is too short for the list.
const INSUFFICIENT_SIZE: c_int = 7;

/// Returns the free memory of a GPU, counting all processes.
pub fn free(card: &Card) -> Result<Bytes, CudaError> {
    let (api, handle) = open(card)?;
    let mut memory = NvmlMemory::default();
    // SAFETY: the pointer is to a local with the layout of the header.
    api.check("nvmlDeviceGetMemoryInfo", unsafe { (api.nvmlDeviceGetMemoryInfo)(handle, &mut memory) })?;
    Ok(Bytes(memory.free))
}

/// Returns the other processes that compute on a GPU, those with the most memory first.
pub fn holders(card: &Card) -> Result<Vec<Holder>, CudaError> {
    let processes = processes(card)?;
    // If our own process id is not in the list, NVML counts ids in another namespace (a container), and /proc would
    // give the names of unrelated processes.
    let ours = processes.iter().any(|p| p.pid == process::id());
    let mut others: Vec<&NvmlProcess> = processes.iter().filter(|p| p.pid != process::id()).collect();
    others.sort_by_key(|p| std::cmp::Reverse(p.used));
    Ok(others.into_iter().map(|p| holder(*p, ours.then(|| name(p.pid)).flatten())).collect())
}

fn processes(card: &Card) -> Result<Vec<NvmlProcess>, CudaError> {
    let (api, handle) = open(card)?;
    // Retry with a longer buffer: processes may have started since the size was reported.
    let mut list = vec![NvmlProcess::default(); 64];
    loop {
        let mut count = list.len() as c_uint;
        let get = api.nvmlDeviceGetComputeRunningProcesses_v3;
        // SAFETY: the list has `count` elements of the header's layout.
        let code = unsafe { get(handle, &mut count, list.as_mut_ptr()) };
        if code != INSUFFICIENT_SIZE {
            api.check("nvmlDeviceGetComputeRunningProcesses", code)?;
            list.truncate(count as usize);
            return Ok(list);
        }
        list.resize(count as usize + 64, NvmlProcess::default());
    }
}

fn holder(process: NvmlProcess, name: Option<String>) -> Holder {
    let pid = process.pid;
    let who = name.map_or_else(|| format!("process {pid}"), |name| format!("process {pid} ({name})"));
    Holder { who, bytes: (process.used != NOT_AVAILABLE).then_some(Bytes(process.used)) }
}

/// Returns a process's name, with control characters replaced.
fn name(pid: u32) -> Option<String> {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
    Some(name.trim_end().chars().map(|c| if c.is_control() { '?' } else { c }).collect())
}

/// Initialises NVML once per process and returns it with the handle of a GPU.
fn open(card: &Card) -> Result<(&'static Nvml, NvmlDevice), CudaError> {
    static INITIALISED: OnceLock<c_int> = OnceLock::new();
    let api = Libraries::get().nvml.as_ref().map_err(CudaError::clone)?;
    // SAFETY: the function has no preconditions.
    api.check("nvmlInit", *INITIALISED.get_or_init(|| unsafe { (api.nvmlInit_v2)() }))?;
    // The UUID of a MIG instance has the prefix `MIG` instead of `GPU`.
    let mut code = 0;
    for kind in ["GPU", "MIG"] {
        let uuid = CString::new(format!("{kind}-{}", card.uuid)).unwrap_or_default();
        let mut handle = ptr::null_mut();
        // SAFETY: the string outlives the call; the pointer is to a local.
        code = unsafe { (api.nvmlDeviceGetHandleByUUID)(uuid.as_ptr(), &mut handle) };
        if code == 0 {
            return Ok((api, handle));
        }
    }
    api.check("nvmlDeviceGetHandleByUUID", code).map(|()| (api, ptr::null_mut()))
}

impl Nvml {
    /// Returns an error with the library's message unless `code` is zero.
    fn check(&self, function: &'static str, code: c_int) -> Result<(), CudaError> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: the library returns a constant string.
        let message = unsafe { CStr::from_ptr((self.nvmlErrorString)(code)) }.to_string_lossy().into_owned();
        Err(CudaError::Call { function, code, message })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holders_are_told_with_what_is_known() {
        let process = NvmlProcess { pid: 7, used: 5, ..NvmlProcess::default() };
        let told = holder(process, Some("python".to_owned()));
        assert_eq!(told, Holder { who: "process 7 (python)".to_owned(), bytes: Some(Bytes(5)) });
        let unknown = holder(NvmlProcess { used: NOT_AVAILABLE, ..process }, None);
        assert_eq!(unknown, Holder { who: "process 7".to_owned(), bytes: None });
    }

    /// The struct sizes of nvml.h on 64-bit machines.
    #[test]
    fn structs_have_the_size_of_the_header() {
        assert_eq!((size_of::<NvmlMemory>(), size_of::<NvmlProcess>()), (24, 24));
    }

    #[test]
    fn this_process_has_a_name() {
        assert!(name(process::id()).is_some_and(|name| !name.is_empty()));
        assert_eq!(name(u32::MAX), None);
    }
}
