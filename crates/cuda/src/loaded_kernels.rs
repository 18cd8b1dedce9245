//! Compiled kernels that are loaded on a GPU, and their launches. Invariant: a kernel is compiled when a program is prepared
//! and only looked up while a step runs.

use crate::CudaError;
use crate::compile::Compiler;
use crate::context::{Context, StatusWords};
use crate::kernel::{Kernel, KernelArguments, LaunchShape, Parameters};
use cudarc::driver::sys as cu;
use plimsoll_exec::OnStart;
use std::collections::{HashMap, HashSet};
use std::ffi::CString;
use std::ptr;

/// Launch attribute of programmatic dependent launch: the kernel may start before its predecessors have finished. Each
/// of our kernels begins by waiting for them (`after_predecessors` in common.cuh), so only the launch latency between
/// two kernels is hidden, and their memory accesses stay in the order of the stream.
fn starts_early() -> cu::CUlaunchAttribute {
    cu::CUlaunchAttribute {
        id: cu::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        pad: [0; 4],
        value: cu::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
    }
}

/// Compiled kernels of a GPU.
pub(crate) struct LoadedKernels {
    compiler: Compiler,
    functions: HashMap<Kernel, (cu::CUmodule, cu::CUfunction)>,
    /// While kernels are collected ([`Self::collect`]): the kernels that [`Self::prepare`] was asked for.
    collected: Option<HashSet<Kernel>>,
    /// Machine code of kernels that were compiled and are not loaded yet.
    compiled: HashMap<Kernel, Vec<u8>>,
    /// Status words to which the kernels report invalid input data.
    pub(crate) status: StatusWords,
}

// SAFETY: driver handles may be used from any thread to which the context is current.
unsafe impl Send for LoadedKernels {}

impl LoadedKernels {
    /// Creates an empty set of kernels, with status words for `steps` in-flight steps.
    pub(crate) fn new(context: &Context, steps: usize) -> Result<Self, CudaError> {
        let compiler = Compiler::new(context.card.capability)?;
        Ok(Self {
            compiler,
            functions: HashMap::new(),
            collected: None,
            compiled: HashMap::new(),
            status: StatusWords::new(context, steps)?,
        })
    }

    /// Begins to collect kernels: until [`Self::compile_collected`], [`Self::prepare`] only notes its kernels.
    pub(crate) fn collect(&mut self) {
        self.collected = Some(HashSet::new());
    }

    /// Whether kernels are being collected.
    pub(crate) fn is_collecting(&self) -> bool {
        self.collected.is_some()
    }

    /// Ends the collection, and compiles the collected kernels that the cache does not have, on several threads.
    pub(crate) fn compile_collected(&mut self, report: OnStart<'_>) {
        let kernels: Vec<Kernel> = self.collected.take().into_iter().flatten().collect();
        let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        self.compiled = self.compiler.compile_missing(&kernels, threads, report);
    }

    /// Drops machine code that was compiled and not loaded.
    pub(crate) fn drop_compiled(&mut self) {
        self.compiled = HashMap::new();
    }

    /// Compiles and loads a kernel that may use `shared` bytes of dynamic shared memory; does nothing if it is loaded.
    /// Only notes the kernel while kernels are collected.
    pub(crate) fn prepare(&mut self, context: &Context, kernel: &Kernel, shared: u32) -> Result<(), CudaError> {
        if self.functions.contains_key(kernel) {
            return Ok(());
        }
        if let Some(collected) = &mut self.collected {
            collected.insert(*kernel);
            return Ok(());
        }
        let code = self.compiled.remove(kernel).map_or_else(|| self.compiler.cubin(kernel), Ok)?;
        let api = context.api;
        let mut module = ptr::null_mut();
        let mut function = ptr::null_mut();
        let entry = CString::new(kernel.entry).unwrap_or_default();
        // SAFETY: the code is a complete ELF image from the compiler; all pointers are to locals.
        unsafe {
            api.check("cuModuleLoadData", (api.cuModuleLoadData)(&mut module, code.as_ptr().cast()))?;
            api.check("cuModuleGetFunction", (api.cuModuleGetFunction)(&mut function, module, entry.as_ptr()))?;
            if shared > 0 {
                let max_shared = cu::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                api.check("cuFuncSetAttribute", (api.cuFuncSetAttribute)(function, max_shared, shared as i32))?;
            }
        }
        self.functions.insert(*kernel, (module, function));
        Ok(())
    }

    /// Launches a kernel in the compute stream, traced under the name of its entry.
    pub(crate) fn call(
        &self,
        context: &Context,
        kernel: &Kernel,
        shape: LaunchShape,
        args: &impl KernelArguments,
    ) -> Result<(), CudaError> {
        self.call_as(context, kernel, || kernel.entry.to_owned(), shape, args)
    }

    /// Launches a kernel in the compute stream, traced under `name`.
    pub(crate) fn call_as(
        &self,
        context: &Context,
        kernel: &Kernel,
        name: impl FnOnce() -> String,
        shape: LaunchShape,
        args: &impl KernelArguments,
    ) -> Result<(), CudaError> {
        let Some(&(_, function)) = self.functions.get(kernel) else {
            return Err(CudaError::Unprepared { what: kernel.to_string() });
        };
        let LaunchShape { blocks: (x, y, z), threads, shared } = shape;
        if x == 0 || y == 0 || z == 0 {
            return Ok(());
        }
        // Addresses of `args`, which outlives the launch; the driver copies the arguments before the call returns.
        let mut parameters = Parameters::of(args);
        let api = context.api;
        context.trace.kernel(context.stream, name, || {
            let mut early = starts_early();
            let config = cu::CUlaunchConfig {
                gridDimX: x,
                gridDimY: y,
                gridDimZ: z,
                blockDimX: threads,
                blockDimY: 1,
                blockDimZ: 1,
                sharedMemBytes: shared,
                hStream: context.stream,
                attrs: &raw mut early,
                numAttrs: u32::from(context.card.has_early_starts()),
            };
            // SAFETY: the launch code passes the arguments of the kernel's declaration; the driver copies them, and
            // the attribute that the configuration points to, before it returns.
            let code =
                unsafe { (api.cuLaunchKernelEx)(&config, function, parameters.as_mut_ptr(), ptr::null_mut()) };
            api.check(kernel.entry, code)
        })
    }

    /// Unloads all kernels; the streams must be idle.
    pub(crate) fn unload(&mut self, context: &Context) {
        for (_, (module, _)) in self.functions.drain() {
            // SAFETY: no kernel is running; a failure is ignored.
            unsafe { (context.api.cuModuleUnload)(module) };
        }
    }
}
