//! Matrix multiplication (GEMM) `y = f(p(x) W^T + b) + r` with row-major operands, where the epilogue `f` is GELU, a
//! gate or the identity, and the prologue `p` is a layer norm or the identity. Invariant: the bits of a result are
//! determined by the GPU model, the element type and the form; the number of rows, timing and the cache only choose
//! among kernels that give the same bits (`choose.rs`).

mod algorithms;
mod choose;
mod description;
mod grad;
mod hopper;
mod mma;
mod normed;
mod table;

use crate::context::{Card, Context};
use crate::kernel::{Arg, Kernel, KernelFile, KernelLaunch, LaunchShape, int, kernel_arguments};
use crate::loaded_kernels::LoadedKernels;
use crate::row_kernels::gelu_in_place;
use crate::{CudaError, Libraries};
use choose::GemmTrial;
use cudarc::cublaslt::sys as lt;
use description::{Description, Handle};
use grad::PinnedAlgorithms;
use hopper::WgmmaTile;
use mma::MmaTile;
use normed::Normed;
use plimsoll_graph::DType;
use plimsoll_graph::ops::Epilogue;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::sync::Arc;
use table::ChoiceTable;

pub use choose::GemmCandidate;
pub(crate) use grad::{MANY_ROWS, OwnProduct, Product, ProductForm, ProductOperands};
pub(crate) use normed::WIDEST;

/// The shape and kind of a matmul: everything but its number of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct GemmForm {
    /// Columns of y.
    pub(crate) n: u64,
    /// Columns of x, the length of the dot products.
    pub(crate) k: u64,
    /// Element type of x and w.
    pub(crate) dtype: DType,
    /// Whether f32 operands are rounded to TF32 for the tensor cores.
    pub(crate) tf32: bool,
    /// Whether a bias is added.
    pub(crate) bias: bool,
    /// Operation fused behind the matmul.
    pub(crate) epilogue: Epilogue,
    /// Element type of gamma and beta of the layer norm that is applied to the rows of x, if there is one.
    pub(crate) norm: Option<DType>,
    /// Whether w is stored as (K, N), see [`takes_w_by_k`].
    pub(crate) by_k: bool,
}

impl GemmForm {
    /// Creates the form of a plain matmul.
    pub(crate) const fn new(n: u64, k: u64, dtype: DType) -> Self {
        Self { n, k, dtype, tf32: false, bias: false, epilogue: Epilogue::None, norm: None, by_k: false }
    }

    fn residual(&self) -> bool {
        match self.epilogue {
            Epilogue::Residual => true,
            Epilogue::None | Epilogue::Gelu | Epilogue::Gate | Epilogue::SiluGate => false,
        }
    }

    /// Element type of y, the bias and the residual.
    pub(crate) fn output_dtype(&self) -> DType {
        match self.dtype {
            DType::F8 => DType::Bf16,
            DType::F32 | DType::Bf16 | DType::F16 | DType::I8 | DType::I32 | DType::U8 => self.dtype,
        }
    }

    /// Whether x and w are quantized, with a scale for each of their rows.
    pub(crate) fn scaled(&self) -> bool {
        self.dtype == DType::F8
    }

    /// Rows of w: a gate computes each column of y from two outputs.
    pub(crate) fn weight_rows(&self) -> u64 {
        if self.gate() { 2 * self.n } else { self.n }
    }

    /// Whether the epilogue is a gate.
    pub(crate) fn gate(&self) -> bool {
        self.epilogue.gate().is_some()
    }

    /// Returns the kernel of `matmul.cu` with the given entry, compiled for this form's element types.
    fn kernel(&self, entry: &'static str) -> Kernel {
        let kernel = Kernel::new(KernelFile::Matmul, entry, self.output_dtype());
        let kernel = if self.scaled() { kernel.quantized() } else { kernel };
        if self.gate() && entry == "matmul" { kernel.with("GATE", 1) } else { kernel }
    }
}

impl fmt::Display for GemmForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { n, k, dtype, tf32, bias, epilogue, norm, by_k } = *self;
        let factors = if tf32 { "tf32" } else { dtype.name() };
        let bias = if bias { "bias" } else { "-" };
        let behind = match epilogue {
            Epilogue::None => "-",
            Epilogue::Gelu => "gelu",
            Epilogue::Residual => "residual",
            Epilogue::Gate => "gate",
            Epilogue::SiluGate => "silu_gate",
        };
        write!(f, "{n} {k} {factors} {bias} {behind}")?;
        norm.map_or(Ok(()), |params| write!(f, " norm {}", params.name()))?;
        if by_k { write!(f, " by-k") } else { Ok(()) }
    }
}

/// Device addresses of a matmul's operands; 0 for operands that the form does not have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GemmOperands {
    /// (R, K)
    pub(crate) x: u64,
    /// (N, K), or (K, N) if the form is `by_k`
    pub(crate) w: u64,
    /// For quantized operands: f32 scales of the rows of x, (R), and of w, (N).
    pub(crate) scales: (u64, u64),
    /// (N)
    pub(crate) bias: u64,
    /// (R, N), may be the same address as `y`.
    pub(crate) residual: u64,
    /// Parameters of the layer norm in front.
    pub(crate) norm: NormParameters,
    /// (R, N)
    pub(crate) y: u64,
    /// R, the number of rows.
    pub(crate) rows: u64,
    /// Scratch memory: (address, bytes).
    pub(crate) workspace: (u64, u64),
}

/// Parameters of a layer norm: gamma (K), beta (K), and the epsilon that is added to variances.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct NormParameters {
    pub(crate) gamma: u64,
    pub(crate) beta: u64,
    pub(crate) eps: f32,
}

/// The kernel that computes a matmul.
#[derive(Clone, Copy, Debug)]
enum GemmKernel {
    /// Our kernel of fused multiply-adds on CUDA cores, the canonical order of f32; GELU is a separate pass.
    Own,
    /// An algorithm of cuBLASLt; GELU is a separate pass.
    Library(lt::cublasLtMatmulAlgo_t),
    /// Our `mma.sync` kernel, with a fused epilogue.
    Mma(MmaTile),
    /// Our wgmma kernel on Hopper, with a fused epilogue.
    Hopper(WgmmaTile),
    /// Our wgmma kernel on Hopper with a layer norm in front.
    Normed(Normed),
}

/// Name that stands for cuBLASLt's fastest algorithm among the names of kernels.
pub(crate) const LIBRARY: &str = "cuBLASLt";

/// How the kernel of a matmul is chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Choosing {
    /// The fastest kernel with the canonical bits; timed once per GPU model.
    Timed,
    /// The first kernel of the form's canonical order, without timing.
    First,
    /// As `Timed`, but without the cache, timing and comparing every candidate ([`Gemm::candidates`]).
    Surveyed,
    /// The kernel or algorithm of this name for all forms that it supports, or cuBLASLt's fastest for the name
    /// [`LIBRARY`], whose bits may differ from the canonical ones: for tests and measurements.
    Named(String),
}

/// The matmuls of one GPU, with the kernel chosen for each form.
pub(crate) struct Gemm {
    handle: Arc<Handle>,
    table: ChoiceTable,
    choosing: Choosing,
    matmuls: HashMap<GemmForm, (Description, GemmKernel)>,
    products: HashMap<ProductForm, PinnedAlgorithms>,
    /// Forms whose kernels were collected ([`LoadedKernels::collect`]).
    collected: HashSet<GemmForm>,
    candidates: Vec<GemmCandidate>,
}

impl Gemm {
    /// Opens cuBLASLt and the table of earlier choices.
    pub(crate) fn new(context: &Context, choosing: Choosing) -> Result<Self, CudaError> {
        let handle = Handle::new(Libraries::get().cublaslt.as_ref().map_err(CudaError::clone)?)?;
        let table = ChoiceTable::of(&context.card, handle.version());
        Ok(Self {
            handle: Arc::new(handle),
            table,
            choosing,
            matmuls: HashMap::new(),
            products: HashMap::new(),
            collected: HashSet::new(),
            candidates: vec![],
        })
    }

    /// Collects the kernels that [`Self::prepare`] may run for a form, without running any. They are a guess: a kernel that is
    /// not collected is compiled when it is prepared.
    fn collect(
        &mut self,
        context: &Context,
        kernels: &mut LoadedKernels,
        form: GemmForm,
        operands: &GemmOperands,
    ) -> Result<(), CudaError> {
        if !self.collected.insert(form) {
            return Ok(());
        }
        let description = Description::new(Arc::clone(&self.handle), form)?;
        let known = match self.choosing {
            Choosing::Named(_) => return Ok(()),
            Choosing::First | Choosing::Surveyed => None,
            Choosing::Timed => self.table.lock().get(&form, operands.rows),
        };
        let mut trial = GemmTrial { context, kernels, description: &description, form, operands: *operands };
        match known.filter(|known| trial.admits(known)) {
            Some(known) => known.prepare(context, kernels, form, operands),
            None => trial.collect(&self.choosing),
        }
    }

    /// Chooses and compiles the kernel of a form, unless that was done before. Overwrites the operands.
    pub(crate) fn prepare(
        &mut self,
        context: &Context,
        kernels: &mut LoadedKernels,
        form: GemmForm,
        operands: &GemmOperands,
    ) -> Result<(), CudaError> {
        if self.matmuls.contains_key(&form) {
            return Ok(());
        }
        if kernels.is_collecting() {
            return self.collect(context, kernels, form, operands);
        }
        let description = Description::new(Arc::clone(&self.handle), form)?;
        let mut trial = GemmTrial { context, kernels, description: &description, form, operands: *operands };
        let choice = match self.choosing {
            Choosing::First | Choosing::Named(_) => trial.choose(&self.choosing)?,
            Choosing::Surveyed => {
                let (choice, candidates) = trial.survey()?;
                self.candidates.extend(candidates);
                choice
            }
            Choosing::Timed => {
                // The table stays locked while algorithms are timed: a second GPU of the same model waits, then uses this
                // choice instead of timing its own and possibly choosing another algorithm.
                let mut entries = self.table.lock();
                match entries.get(&form, operands.rows).filter(|known| trial.admits(known)) {
                    Some(known) => known,
                    None => {
                        let choice = trial.choose(&self.choosing)?;
                        entries.insert(&form, operands.rows, choice);
                        choice
                    }
                }
            }
        };
        choice.prepare(context, kernels, form, operands)?;
        self.matmuls.insert(form, (description, choice));
        Ok(())
    }

    /// All candidates of the matmuls prepared so far, with [`Choosing::Surveyed`].
    pub(crate) fn candidates(&self) -> &[GemmCandidate] {
        &self.candidates
    }

    /// Runs a matmul with its prologue and epilogue.
    pub(crate) fn run(
        &self,
        context: &Context,
        kernels: &LoadedKernels,
        form: GemmForm,
        operands: &GemmOperands,
    ) -> Result<(), CudaError> {
        let Some((description, choice)) = self.matmuls.get(&form) else {
            return Err(CudaError::Unprepared { what: format!("the matmul {form}") });
        };
        choice.run(context, kernels, description, form, operands)
    }

    /// Returns the choices, sorted, a line for each matmul.
    pub(crate) fn choices(&self) -> Vec<String> {
        let mut lines: Vec<String> =
            self.matmuls.iter().map(|(form, (_, choice))| format!("{form}: {}", table::text(choice))).collect();
        lines.sort();
        lines
    }

    /// Summarizes how many forms each kind of kernel computes: `cuBLASLt (5 forms) and wgmma (12 forms)`.
    pub(crate) fn kernel_summary(&self) -> Option<String> {
        summary_of(self.matmuls.values().map(|(_, choice)| choice))
    }
}

fn summary_of<'a>(choices: impl Iterator<Item = &'a GemmKernel>) -> Option<String> {
    let mut forms = BTreeMap::new();
    for choice in choices {
        let who = match choice {
            GemmKernel::Library(_) => LIBRARY,
            GemmKernel::Hopper(_) | GemmKernel::Normed(_) => "wgmma",
            GemmKernel::Mma(_) => "mma.sync",
            GemmKernel::Own => "plain loops",
        };
        *forms.entry(who).or_insert(0) += 1;
    }
    let counts: Vec<String> = forms
        .into_iter()
        .map(|(who, n)| format!("{who} ({n} {})", if n == 1 { "form" } else { "forms" }))
        .collect();
    (!counts.is_empty()).then(|| counts.join(" and "))
}

/// Copies the residual to y and returns the operands with `residual == y`. With the residual in place, the library
/// rounds a result to 16 bits before it adds the residual; from another address it adds the residual to the f32 sum.
/// The bits of a form must not depend on where a plan puts the residual.
fn in_place(context: &Context, form: GemmForm, operands: &GemmOperands) -> Result<GemmOperands, CudaError> {
    let GemmOperands { residual, y, rows, .. } = *operands;
    let bytes = (rows * form.n * form.output_dtype().size()) as usize;
    if form.residual() && form.output_dtype() != DType::F32 && residual != y && bytes > 0 {
        // SAFETY: both are operands of `bytes` bytes, and do not overlap.
        let code = unsafe { (context.api.cuMemcpyDtoDAsync_v2)(y, residual, bytes, context.stream) };
        context.api.check("cuMemcpyDtoDAsync", code)?;
        return Ok(GemmOperands { residual: y, ..*operands });
    }
    Ok(*operands)
}

/// Describes everything besides input and weights that determines the bits of a result: the GPU's name and
/// architecture, the versions of the driver and of the libraries that compile and multiply, and the canonical
/// summation orders of matmuls. Kernel choices made by timing do not change the bits and are left out.
pub(crate) fn arithmetic(card: &Card) -> String {
    let Card { name, capability: (major, minor), driver, .. } = card;
    format!("{name}, sm_{major}{minor}, driver {driver}, {}, {}", Libraries::get().versions(), choose::ORDERS)
}

/// Whether no matmul was ever timed on a GPU of this model with this driver and library.
pub(crate) fn nothing_is_timed(card: &Card) -> bool {
    let Ok(library) = &Libraries::get().cublaslt else { return false };
    // SAFETY: the function has no preconditions.
    let version = unsafe { (library.cublasLtGetVersion)() };
    ChoiceTable::of(card, version).lock().is_empty()
}

impl GemmKernel {
    /// Compiles the kernels that [`Self::run`] launches.
    fn prepare(
        &self,
        context: &Context,
        kernels: &mut LoadedKernels,
        form: GemmForm,
        operands: &GemmOperands,
    ) -> Result<(), CudaError> {
        match self {
            Self::Hopper(tile) => return kernels.prepare(context, &tile.kernel(form), tile.shared()),
            Self::Normed(normed) => return normed.prepare(context, kernels, form, operands),
            Self::Mma(tile) => {
                return kernels.prepare(context, &tile.kernel(form, form.output_dtype()), tile.shared());
            }
            Self::Own => kernels.prepare(context, &loop_matmul(form, operands).kernel, 0)?,
            Self::Library(_) => {}
        }
        match form.epilogue {
            Epilogue::Gelu => kernels.prepare(context, &gelu_pass(form, operands).kernel, 0),
            Epilogue::None | Epilogue::Residual | Epilogue::Gate | Epilogue::SiluGate => Ok(()),
        }
    }

    fn run(
        &self,
        context: &Context,
        kernels: &LoadedKernels,
        description: &Description,
        form: GemmForm,
        operands: &GemmOperands,
    ) -> Result<(), CudaError> {
        match self {
            Self::Hopper(tile) => return tile.run(context, kernels, form, operands),
            Self::Normed(normed) => return normed.run(context, kernels, form, operands),
            Self::Mma(tile) => return tile.run(context, kernels, form, form.output_dtype(), operands),
            Self::Own => {
                let KernelLaunch { kernel, shape, args } = loop_matmul(form, operands);
                kernels.call(context, &kernel, shape, &args)?;
            }
            Self::Library(algorithm) => {
                let operands = &in_place(context, form, operands)?;
                let run = || description.run(algorithm, operands, context.stream);
                context.trace.kernel(context.stream, || form.to_string(), run)?;
            }
        }
        match form.epilogue {
            Epilogue::Gelu => {
                let KernelLaunch { kernel, shape, args } = gelu_pass(form, operands);
                kernels.call(context, &kernel, shape, &args)
            }
            Epilogue::None | Epilogue::Residual | Epilogue::Gate | Epilogue::SiluGate => Ok(()),
        }
    }
}

kernel_arguments! {
    /// Arguments of `matmul` (matmul.cu).
    struct MatmulArgs {
        x: u64,
        w: u64,
        x_scales: u64,
        w_scales: u64,
        bias: u64,
        residual: u64,
        y: u64,
        rows: u64,
        n: i32,
        k: i32,
    }
    size 72, last 68
}

/// Returns the CUDA-core kernel (`matmul` of `matmul.cu`) of a form, with its grid and arguments.
fn loop_matmul(form: GemmForm, operands: &GemmOperands) -> KernelLaunch<MatmulArgs> {
    const TILE: u64 = 64;
    let &GemmOperands { x, w, scales, bias, residual, y, rows, .. } = operands;
    let blocks = (rows.div_ceil(TILE) as u32, form.n.div_ceil(TILE) as u32, 1);
    let args = MatmulArgs {
        x,
        w,
        x_scales: scales.0,
        w_scales: scales.1,
        bias,
        residual,
        y,
        rows,
        n: int(form.n),
        k: int(form.k),
    };
    KernelLaunch { kernel: form.kernel("matmul"), shape: LaunchShape { blocks, threads: 256, shared: 0 }, args }
}

/// Returns the kernel that applies GELU to y in place, for matmuls without a fused GELU. cuBLASLt's own GELU epilogue
/// is the tanh approximation; ours is exact (erf).
fn gelu_pass(form: GemmForm, operands: &GemmOperands) -> KernelLaunch<[Arg; 3]> {
    gelu_in_place(form.output_dtype(), operands.y, operands.rows * form.n)
}

/// Whether a form with a layer norm in front has a fused kernel on this GPU.
pub(crate) fn has_norms(context: &Context, form: GemmForm) -> bool {
    Normed::suits(context, form)
}

/// Whether w of a form may be stored as (K, N) on this GPU.
pub(crate) fn takes_w_by_k(context: &Context, form: GemmForm) -> bool {
    hopper::TILES.iter().any(|tile| tile.suits(context, GemmForm { by_k: true, ..form }))
}

/// Names of the tiles of our Hopper kernel.
pub(crate) fn hopper_tiles() -> Vec<&'static str> {
    hopper::TILES.iter().map(|tile| tile.name).collect()
}

/// Names of the variants of our Hopper kernel with a layer norm in front.
pub(crate) fn hopper_norm_tiles() -> Vec<&'static str> {
    normed::NORMED.iter().map(|normed| normed.name).collect()
}

/// Returns a sample of every kernel in this folder, in every form.
pub(crate) fn every_kernel() -> Vec<Kernel> {
    let mut kernels = vec![];
    for dtype in [DType::F32, DType::Bf16, DType::F16, DType::F8] {
        let form = GemmForm::new(1, 1, dtype);
        kernels.extend(["matmul", "noise", "order_probe", "digest"].map(|entry| form.kernel(entry)));
    }
    for dtype in [DType::F32, DType::Bf16] {
        let gate = GemmForm { epilogue: Epilogue::Gate, ..GemmForm::new(1, 1, dtype) };
        kernels.push(gate.kernel("matmul"));
    }
    kernels.extend(mma::every_kernel());
    kernels.extend(grad::every_kernel());
    kernels.extend(hopper::every_kernel());
    kernels.extend(normed::every_kernel());
    kernels
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_start_line_names_all_that_compute_matmuls() {
        let library = GemmKernel::Library(lt::cublasLtMatmulAlgo_t { data: [0; 8] });
        let hopper = GemmKernel::Hopper(hopper::TILES[0]);
        for (choices, wanted) in [
            (&[][..], None),
            (&[library], Some("cuBLASLt (1 form)")),
            (&[hopper, library, hopper], Some("cuBLASLt (1 form) and wgmma (2 forms)")),
            (&[GemmKernel::Own, hopper], Some("plain loops (1 form) and wgmma (1 form)")),
        ] {
            assert_eq!(summary_of(choices.iter()).as_deref(), wanted);
        }
    }
}
