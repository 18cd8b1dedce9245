//! Kernels, identified by file, entry and compile-time constants; their sources and arguments. Invariant: the constants of a
//! kernel and the arguments of its launch are those that its source names.

use crate::capability::{FP8, HOPPER, OLDEST};
use cudarc::driver::sys as cu;
use plimsoll_graph::DType;
use std::ffi::c_void;
use std::{fmt, ptr};

/// A source file of CUDA C++, compiled once for every set of constants. It includes the headers that it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KernelFile {
    /// `attention.cu`
    Attention,
    /// `attention_f32.cu`
    AttentionF32,
    /// `attention_grad.cu`
    AttentionGrad,
    /// `attention_grad_f32.cu`
    AttentionGradF32,
    /// `attention_grad_hopper.cu`: for compute capability 9.0 only.
    AttentionGradHopper,
    /// `attention_hopper.cu`: for compute capability 9.0 only.
    AttentionHopper,
    /// `attention_narrow.cu`
    AttentionNarrow,
    /// `attention_persistent.cu`: for compute capability 9.0 only.
    AttentionPersistent,
    /// `batch_norm_train.cu`
    BatchNormTrain,
    /// `column_sums.cu`
    ColumnSums,
    /// `cross_entropy.cu`
    CrossEntropy,
    /// `dispatch.cu`
    Dispatch,
    /// `elementwise.cu`
    Elementwise,
    /// `elementwise_grad.cu`
    ElementwiseGrad,
    /// `grouped.cu`
    Grouped,
    /// `kl_divergence.cu`
    KlDivergence,
    /// `matmul.cu`
    Matmul,
    /// `mma.cu`
    Mma,
    /// `norm.cu`
    Norm,
    /// `norm_grad.cu`
    NormGrad,
    /// `optimizer.cu`
    Optimizer,
    /// `quantize.cu`
    Quantize,
    /// `route.cu`
    Route,
    /// `sequence.cu`
    Sequence,
    /// `sequence_grad.cu`
    SequenceGrad,
    /// `sums.cu`
    Sums,
    /// `transpose.cu`
    Transpose,
    /// `wgmma.cu`: for compute capability 9.0 only.
    Wgmma,
    /// `wgmma_norm.cu`: for compute capability 9.0 only.
    WgmmaNorm,
}

impl KernelFile {
    /// File name of the kernel source.
    pub fn name(self) -> &'static str {
        match self {
            Self::Attention => "attention.cu",
            Self::AttentionF32 => "attention_f32.cu",
            Self::AttentionGrad => "attention_grad.cu",
            Self::AttentionGradF32 => "attention_grad_f32.cu",
            Self::AttentionGradHopper => "attention_grad_hopper.cu",
            Self::AttentionHopper => "attention_hopper.cu",
            Self::AttentionNarrow => "attention_narrow.cu",
            Self::AttentionPersistent => "attention_persistent.cu",
            Self::BatchNormTrain => "batch_norm_train.cu",
            Self::ColumnSums => "column_sums.cu",
            Self::CrossEntropy => "cross_entropy.cu",
            Self::Dispatch => "dispatch.cu",
            Self::Elementwise => "elementwise.cu",
            Self::ElementwiseGrad => "elementwise_grad.cu",
            Self::Grouped => "grouped.cu",
            Self::KlDivergence => "kl_divergence.cu",
            Self::Matmul => "matmul.cu",
            Self::Mma => "mma.cu",
            Self::Norm => "norm.cu",
            Self::NormGrad => "norm_grad.cu",
            Self::Optimizer => "optimizer.cu",
            Self::Quantize => "quantize.cu",
            Self::Route => "route.cu",
            Self::Sequence => "sequence.cu",
            Self::SequenceGrad => "sequence_grad.cu",
            Self::Sums => "sums.cu",
            Self::Transpose => "transpose.cu",
            Self::Wgmma => "wgmma.cu",
            Self::WgmmaNorm => "wgmma_norm.cu",
        }
    }

    /// Text of the file.
    fn text(self) -> &'static str {
        match self {
            Self::Attention => include_str!("kernels/attention.cu"),
            Self::AttentionF32 => include_str!("kernels/attention_f32.cu"),
            Self::AttentionGrad => include_str!("kernels/attention_grad.cu"),
            Self::AttentionGradF32 => include_str!("kernels/attention_grad_f32.cu"),
            Self::AttentionGradHopper => include_str!("kernels/attention_grad_hopper.cu"),
            Self::AttentionHopper => include_str!("kernels/attention_hopper.cu"),
            Self::AttentionNarrow => include_str!("kernels/attention_narrow.cu"),
            Self::AttentionPersistent => include_str!("kernels/attention_persistent.cu"),
            Self::BatchNormTrain => include_str!("kernels/batch_norm_train.cu"),
            Self::ColumnSums => include_str!("kernels/column_sums.cu"),
            Self::CrossEntropy => include_str!("kernels/cross_entropy.cu"),
            Self::Dispatch => include_str!("kernels/dispatch.cu"),
            Self::Elementwise => include_str!("kernels/elementwise.cu"),
            Self::ElementwiseGrad => include_str!("kernels/elementwise_grad.cu"),
            Self::Grouped => include_str!("kernels/grouped.cu"),
            Self::KlDivergence => include_str!("kernels/kl_divergence.cu"),
            Self::Matmul => include_str!("kernels/matmul.cu"),
            Self::Mma => include_str!("kernels/mma.cu"),
            Self::Norm => include_str!("kernels/norm.cu"),
            Self::NormGrad => include_str!("kernels/norm_grad.cu"),
            Self::Optimizer => include_str!("kernels/optimizer.cu"),
            Self::Quantize => include_str!("kernels/quantize.cu"),
            Self::Route => include_str!("kernels/route.cu"),
            Self::Sequence => include_str!("kernels/sequence.cu"),
            Self::SequenceGrad => include_str!("kernels/sequence_grad.cu"),
            Self::Sums => include_str!("kernels/sums.cu"),
            Self::Transpose => include_str!("kernels/transpose.cu"),
            Self::Wgmma => include_str!("kernels/wgmma.cu"),
            Self::WgmmaNorm => include_str!("kernels/wgmma_norm.cu"),
        }
    }

    /// Headers that the file includes, directly or through other headers, in the order of their first inclusion.
    pub(crate) fn headers(self) -> Vec<KernelHeader> {
        let mut headers = vec![];
        add_headers(self.text(), &mut headers);
        headers
    }
}

/// A header that kernel sources include.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KernelHeader {
    /// Name in `#include "..."`.
    pub(crate) name: &'static str,
    pub(crate) text: &'static str,
}

/// Lists headers by their names in the folder `kernels`.
macro_rules! headers {
    ($($name:literal,)*) => {
        [$(KernelHeader { name: $name, text: include_str!(concat!("kernels/", $name)) },)*]
    };
}

/// All headers. NVRTC finds a header by its name among those that it is given, never on disk.
const HEADERS: [KernelHeader; 18] = headers![
    "activation.cuh",
    "activation_grad.cuh",
    "attention.cuh",
    "attention_args.cuh",
    "attention_grad.cuh",
    "attention_mask.cuh",
    "attention_mma.cuh",
    "attention_narrow_loads.cuh",
    "attention_persistent_loads.cuh",
    "attention_wgmma.cuh",
    "common.cuh",
    "copies.cuh",
    "elementwise.cuh",
    "packs.cuh",
    "rows.cuh",
    "sequence.cuh",
    "warpgroup.cuh",
    "wgmma.cuh",
];

/// Adds the headers that `text` includes to `headers`, except those that are already there.
fn add_headers(text: &str, headers: &mut Vec<KernelHeader>) {
    for line in text.lines() {
        let Some(name) = line.strip_prefix("#include \"").and_then(|rest| rest.strip_suffix('"')) else {
            continue;
        };
        // NVRTC reports a header that does not exist, with the line that includes it.
        let Some(header) = HEADERS.into_iter().find(|header| header.name == name) else { continue };
        if !headers.contains(&header) {
            headers.push(header);
            add_headers(header.text, headers);
        }
    }
}

/// Largest number of compile-time constants of a kernel.
const CONSTANTS: usize = 12;

/// A kernel: a `__global__` function of a file, compiled with constants (preprocessor macros). The first constant is
/// always `TYPE`, the element type as a number (see `code`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Kernel {
    /// The file that defines the kernel.
    pub file: KernelFile,
    /// Name of the kernel's `__global__` function.
    pub entry: &'static str,
    constants: [(&'static str, i64); CONSTANTS],
}

impl Kernel {
    /// Creates a kernel for an element type, without further constants.
    pub fn new(file: KernelFile, entry: &'static str, dtype: DType) -> Self {
        let mut constants = [("", 0); CONSTANTS];
        constants[0] = ("TYPE", code(dtype));
        Self { file, entry, constants }
    }

    /// Returns this kernel compiled with the constant `QUANTIZED`: it reads or writes quantized values in e4m3.
    pub fn quantized(self) -> Self {
        self.with("QUANTIZED", 1)
    }

    /// Whether the kernel can run on a GPU of the given compute capability.
    pub fn runs_on(&self, capability: (u32, u32)) -> bool {
        let quantized = self.constants().any(|(name, _)| name == "QUANTIZED");
        match self.file {
            KernelFile::AttentionGradHopper
            | KernelFile::AttentionHopper
            | KernelFile::AttentionPersistent
            | KernelFile::Wgmma
            | KernelFile::WgmmaNorm => capability == HOPPER,
            KernelFile::Attention
            | KernelFile::AttentionF32
            | KernelFile::AttentionGrad
            | KernelFile::AttentionGradF32
            | KernelFile::AttentionNarrow
            | KernelFile::BatchNormTrain
            | KernelFile::ColumnSums
            | KernelFile::CrossEntropy
            | KernelFile::Dispatch
            | KernelFile::Elementwise
            | KernelFile::ElementwiseGrad
            | KernelFile::Grouped
            | KernelFile::KlDivergence
            | KernelFile::Matmul
            | KernelFile::Mma
            | KernelFile::Norm
            | KernelFile::NormGrad
            | KernelFile::Optimizer
            | KernelFile::Quantize
            | KernelFile::Route
            | KernelFile::Sequence
            | KernelFile::SequenceGrad
            | KernelFile::Sums
            | KernelFile::Transpose => capability >= if quantized { FP8 } else { OLDEST },
        }
    }

    /// Returns this kernel with another constant; there is room for `CONSTANTS` of them.
    pub fn with(mut self, name: &'static str, value: i64) -> Self {
        if let Some(free) = self.constants.iter_mut().find(|(taken, _)| taken.is_empty()) {
            *free = (name, value);
        }
        debug_assert!(
            self.constants().any(|(n, v)| (n, v) == (name, value)),
            "more than {CONSTANTS} constants"
        );
        self
    }

    /// The kernel's constants as (name, value), in the order in which they were added.
    pub fn constants(&self) -> impl Iterator<Item = (&'static str, i64)> + '_ {
        self.constants.iter().copied().filter(|(name, _)| !name.is_empty())
    }

    /// Text of the kernel's file, without its headers.
    pub(crate) fn text(&self) -> &'static str {
        self.file.text()
    }
}

/// Number of an element type in the kernels' constants; must agree with `common.cuh`.
pub(crate) fn code(dtype: DType) -> i64 {
    match dtype {
        DType::F32 => 0,
        DType::Bf16 => 1,
        DType::F16 => 2,
        DType::I32 => 3,
        DType::U8 => 4,
        DType::F8 => 5,
        DType::I8 => 6,
    }
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.entry, self.file.name())?;
        self.constants().try_for_each(|(name, value)| write!(f, " {name}={value}"))
    }
}

/// Launch configuration: grid dimensions, threads per block, and bytes of dynamic shared memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LaunchShape {
    pub(crate) blocks: (u32, u32, u32),
    pub(crate) threads: u32,
    pub(crate) shared: u32,
}

impl LaunchShape {
    /// Creates a one-dimensional grid of `blocks` blocks, without dynamic shared memory.
    pub(crate) fn of(blocks: u64, threads: u32) -> Self {
        Self { blocks: (blocks as u32, 1, 1), threads, shared: 0 }
    }
}

/// A kernel with its launch configuration and arguments.
pub(crate) struct KernelLaunch<A> {
    pub(crate) kernel: Kernel,
    pub(crate) shape: LaunchShape,
    pub(crate) args: A,
}

/// A kernel argument: a pointer, or a number in the low bytes of a 64-bit word.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arg(u64);

impl Arg {
    /// A `const T*` or `T*`; zero is a null pointer.
    pub(crate) fn pointer(address: u64) -> Self {
        Self(address)
    }

    /// An `int`, converted as by [`int`].
    pub(crate) fn int(value: impl TryInto<i32>) -> Self {
        Self(u64::from(int(value) as u32))
    }

    /// A `long long`.
    pub(crate) fn long(value: u64) -> Self {
        Self(value)
    }

    /// A `float`.
    pub(crate) fn float(value: f32) -> Self {
        Self(u64::from(value.to_bits()))
    }
}

/// Converts a size or an id to an `int` of a kernel. Tensors with more rows or columns than an `int` holds are refused earlier;
/// the fallback -1 is an id that never matches.
pub(crate) fn int(value: impl TryInto<i32>) -> i32 {
    value.try_into().unwrap_or(-1)
}

/// Arguments of a kernel: a short list, a struct with a field for each parameter, or a struct with tensor maps.
pub(crate) trait KernelArguments {
    /// Adds the address of each argument, in the order of the kernel's parameters.
    fn add_to(&self, parameters: &mut Parameters);
}

/// Declares a struct whose fields are the parameters of a kernel, in their order, with the types u64 for pointers and `long
/// long`, i32 and u32 for `int` and `u32`, and f32. The kernel's source asserts the same size and offset of the last field
/// (`PARAMETERS` in common.cuh), so that a parameter that is added or moved on one side only does not compile.
macro_rules! kernel_arguments {
    (
        $(#[$doc:meta])*
        $vis:vis struct $name:ident { $($field_vis:vis $field:ident: $type:ty,)* }
        size $size:literal, last $last:literal
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        #[repr(C)]
        $vis struct $name {
            $($field_vis $field: $type,)*
        }

        const _: () = {
            let offsets = [$(std::mem::offset_of!($name, $field)),*];
            assert!(size_of::<$name>() == $size && offsets[offsets.len() - 1] == $last);
        };

        impl $crate::kernel::KernelArguments for $name {
            fn add_to(&self, parameters: &mut $crate::kernel::Parameters) {
                $(parameters.add(&self.$field);)*
            }
        }
    };
}
pub(crate) use kernel_arguments;

impl<const N: usize> KernelArguments for [Arg; N] {
    fn add_to(&self, parameters: &mut Parameters) {
        for arg in self {
            parameters.add(&arg.0);
        }
    }
}

/// Arguments of a kernel that loads by TMA: its tensor maps are its first parameters.
pub(crate) struct WithMaps<A, const N: usize> {
    pub(crate) maps: [cu::CUtensorMap; N],
    pub(crate) args: A,
}

impl<A: KernelArguments, const N: usize> KernelArguments for WithMaps<A, N> {
    fn add_to(&self, parameters: &mut Parameters) {
        for map in &self.maps {
            parameters.add(map);
        }
        self.args.add_to(parameters);
    }
}

/// Largest number of parameters of a kernel.
const MAX_PARAMETERS: usize = 32;

/// Addresses of a kernel's arguments, as the driver takes them.
pub(crate) struct Parameters {
    addresses: [*mut c_void; MAX_PARAMETERS],
    count: usize,
}

impl Parameters {
    /// Collects the addresses of the arguments, which must outlive the result.
    pub(crate) fn of(args: &impl KernelArguments) -> Self {
        let mut parameters = Self { addresses: [ptr::null_mut(); MAX_PARAMETERS], count: 0 };
        args.add_to(&mut parameters);
        parameters
    }

    /// Adds the address of the next argument.
    pub(crate) fn add<A>(&mut self, argument: &A) {
        self.addresses[self.count] = ptr::from_ref(argument).cast_mut().cast();
        self.count += 1;
    }

    /// The array of addresses; the driver reads as many as the kernel has parameters.
    pub(crate) fn as_mut_ptr(&mut self) -> *mut *mut c_void {
        self.addresses.as_mut_ptr()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::every_kernel;
    use plimsoll_graph::packs;
    use std::collections::HashSet;

    #[test]
    fn kernels_read_the_words_of_packs_of_the_graph() {
        let words = [
            ("PACK_WORDS", packs::WORDS),
            ("PACK_TOKENS", packs::TOKENS),
            ("PACK_TARGETS", packs::TARGETS),
            ("PACK_NUMBER", packs::NUMBER),
        ];
        for (name, word) in words {
            let defined = include_str!("kernels/packs.cuh").lines().find_map(|line| {
                let line = line.strip_prefix("#define ")?.strip_prefix(name)?;
                line.split_whitespace().next()
            });
            assert_eq!(defined, Some(word.to_string().as_str()), "{name}");
        }
    }

    #[test]
    fn every_included_header_exists_and_every_header_is_included() {
        let files: HashSet<KernelFile> = every_kernel().iter().map(|kernel| kernel.file).collect();
        let mut included = HashSet::new();
        for file in files {
            let headers = file.headers();
            for text in headers.iter().map(|header| header.text).chain([file.text()]) {
                for line in text.lines().filter(|line| line.starts_with("#include")) {
                    let known = headers.iter().any(|header| line == format!("#include \"{}\"", header.name));
                    assert!(known, "{}: {line}", file.name());
                }
            }
            included.extend(headers.iter().map(|header| header.name));
        }
        assert_eq!(included.len(), HEADERS.len());
    }

    #[test]
    fn every_entry_waits_for_the_kernels_before_it() {
        let files: HashSet<KernelFile> = every_kernel().iter().map(|kernel| kernel.file).collect();
        assert!(files.len() > 10, "{files:?}");
        for file in files {
            let texts = file.headers().into_iter().map(|header| header.text).chain([file.text()]);
            let text: String = texts.collect();
            for entry in text.split("extern \"C\" __global__").skip(1) {
                let waits = entry.matches("after_predecessors();").count();
                let name = entry.split('(').nth(1).unwrap_or_default();
                assert_eq!(waits, 1, "{}: {name}", file.name());
            }
        }
    }
}
