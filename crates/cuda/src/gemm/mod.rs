//! Matrix products `y = f(p(x) W^T + b) + r`, all row-major, where f is GELU, a gate or nothing, and p a layer norm or
//! nothing. Invariant: the bits of a product are a property of the kind of card, the element type and the form; the number of
//! rows, timing and what is cached choose only among kernels that give the same bits (`choose.rs`).

mod choose;
mod description;
mod hopper;
mod mma;
mod normed;
mod table;

use crate::api::CublasLt;
use crate::context::{Card, Context};
use crate::kernel::{Arg, File, Kernel, Kernels, Shape};
use crate::launch::gelu_in_place;
use crate::{CudaError, Libraries};
use choose::Trial;
use cudarc::cublaslt::sys as lt;
use description::{Description, Handle};
use graph::DType;
use graph::ops::Epilogue;
use hopper::Tile;
use mma::MmaTile;
use normed::Normed;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Arc;
use table::Table;

pub use choose::Candidate;
pub(crate) use choose::ORDERS;
pub(crate) use normed::WIDEST;

/// All of a product but its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Form {
    /// Columns of y.
    pub(crate) n: u64,
    /// Columns of x.
    pub(crate) k: u64,
    /// Of x and w: a float.
    pub(crate) dtype: DType,
    /// Whether f32 is cut to TF32 for the tensor cores.
    pub(crate) tf32: bool,
    pub(crate) bias: bool,
    pub(crate) epilogue: Epilogue,
    /// The type of gamma and beta, where rows of x go through a layer norm first.
    pub(crate) norm: Option<DType>,
}

impl Form {
    fn residual(&self) -> bool {
        match self.epilogue {
            Epilogue::Residual => true,
            Epilogue::None | Epilogue::Gelu | Epilogue::Gate => false,
        }
    }

    /// The element type of y, the bias and the residual.
    pub(crate) fn out(&self) -> DType {
        match self.dtype {
            DType::F8 => DType::Bf16,
            DType::F32 | DType::Bf16 | DType::F16 | DType::I8 | DType::I32 | DType::U8 => self.dtype,
        }
    }

    /// Whether x and w are codes, with a scale for each of their rows.
    pub(crate) fn scaled(&self) -> bool {
        self.dtype == DType::F8
    }

    /// Rows of w: a gate's outputs are of two each.
    pub(crate) fn outputs(&self) -> u64 {
        if self.gate() { 2 * self.n } else { self.n }
    }

    pub(crate) fn gate(&self) -> bool {
        self.epilogue == Epilogue::Gate
    }

    /// An entry of `matmul.cu` for its operands.
    fn kernel(&self, entry: &'static str) -> Kernel {
        let kernel = Kernel::new(File::Matmul, entry, self.out());
        let kernel = if self.scaled() { kernel.on_codes() } else { kernel };
        if self.gate() && entry == "product" { kernel.with("GATE", 1) } else { kernel }
    }
}

impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { n, k, dtype, tf32, bias, epilogue, norm } = *self;
        let factors = if tf32 { "tf32" } else { dtype.name() };
        let bias = if bias { "bias" } else { "-" };
        let behind = match epilogue {
            Epilogue::None => "-",
            Epilogue::Gelu => "gelu",
            Epilogue::Residual => "residual",
            Epilogue::Gate => "gate",
        };
        write!(f, "{n} {k} {factors} {bias} {behind}")?;
        norm.map_or(Ok(()), |params| write!(f, " norm {}", params.name()))
    }
}

/// A product's addresses on the card; those that its form lacks are zero.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operands {
    /// (R, K)
    pub(crate) x: u64,
    /// (N, K)
    pub(crate) w: u64,
    /// Of the rows of x: (R) f32, and of w: (N) f32; for codes.
    pub(crate) scales: (u64, u64),
    /// (N)
    pub(crate) bias: u64,
    /// (R, N), may be `y`.
    pub(crate) residual: u64,
    pub(crate) norm: Norm,
    /// (R, N)
    pub(crate) y: u64,
    /// R
    pub(crate) rows: u64,
    /// Scratch: its address and bytes.
    pub(crate) workspace: (u64, u64),
}

/// A layer norm's (K) and (K), and what its variances are added to.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Norm {
    pub(crate) gamma: u64,
    pub(crate) beta: u64,
    pub(crate) eps: f32,
}

/// What computes a product.
#[derive(Clone, Copy, Debug)]
enum Choice {
    /// Our own plain loops, the canonical order of f32; a GELU is a pass behind them.
    Own,
    /// An algorithm of the library; a GELU is a pass behind it.
    Library(lt::cublasLtMatmulAlgo_t),
    /// Our own kernel by `mma.sync`, with its epilogue.
    Mma(MmaTile),
    /// Our own kernel on Hopper, with its epilogue.
    Hopper(Tile),
    /// The same with a layer norm in front.
    Normed(Normed),
}

/// What the library is called among the names of our own.
pub(crate) const LIBRARY: &str = "cuBLASLt";

/// How a product's kernel is chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Choosing {
    /// The fastest of those with the canonical bits, timed once for a kind of card.
    Timed,
    /// The first kernel of the form's canonical order, without timing.
    First,
    /// The same without the disk, where every candidate is timed and compared, and told ([`Gemm::candidates`]).
    Surveyed,
    /// The kernel or algorithm of this name wherever it computes the form, or the library's fastest by [`LIBRARY`], which may
    /// have other bits: for tests and measurements.
    Named(String),
}

/// The products of a card's programs.
pub(crate) struct Gemm {
    handle: Arc<Handle>,
    table: Table,
    choosing: Choosing,
    products: HashMap<Form, (Description, Choice)>,
    candidates: Vec<Candidate>,
}

impl Gemm {
    /// Opens the library.
    pub(crate) fn new(context: &Context, choosing: Choosing) -> Result<Self, CudaError> {
        let handle = Handle::new(Libraries::get().cublaslt.as_ref().map_err(CudaError::clone)?)?;
        let table = Table::of(&context.card, handle.version());
        Ok(Self { handle: Arc::new(handle), table, choosing, products: HashMap::new(), candidates: vec![] })
    }

    /// Chooses what computes a form, unless that was done, and compiles it. What the operands hold is lost.
    pub(crate) fn prepare(
        &mut self,
        context: &Context,
        kernels: &mut Kernels,
        form: Form,
        operands: &Operands,
    ) -> Result<(), CudaError> {
        if self.products.contains_key(&form) {
            return Ok(());
        }
        let description = Description::new(Arc::clone(&self.handle), form)?;
        let mut trial = Trial { context, kernels, description: &description, form, operands: *operands };
        let choice = match self.choosing {
            Choosing::First | Choosing::Named(_) => trial.choose(&self.choosing)?,
            Choosing::Surveyed => {
                let (choice, candidates) = trial.survey()?;
                self.candidates.extend(candidates);
                choice
            }
            Choosing::Timed => {
                // Locked while it is chosen: another card of this kind waits, and takes the same.
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
        self.products.insert(form, (description, choice));
        Ok(())
    }

    /// All candidates of the products that were prepared, where they are surveyed.
    pub(crate) fn candidates(&self) -> &[Candidate] {
        &self.candidates
    }

    /// Runs a product with all that stands behind it.
    pub(crate) fn run(
        &self,
        context: &Context,
        kernels: &Kernels,
        form: Form,
        operands: &Operands,
    ) -> Result<(), CudaError> {
        let unprepared = || CudaError::Unprepared { what: format!("the product {form}") };
        let (description, choice) = self.products.get(&form).ok_or_else(unprepared)?;
        choice.run(context, kernels, description, form, operands)
    }

    /// What was chosen, a line for each product, sorted.
    pub(crate) fn choices(&self) -> Vec<String> {
        let mut lines: Vec<String> = self
            .products
            .iter()
            .map(|(form, (_, choice))| format!("{form}: {}", table::text(choice)))
            .collect();
        lines.sort();
        lines
    }

    /// Who computes how many forms: `cuBLASLt (5 forms) and wgmma (12 forms)`.
    pub(crate) fn by(&self) -> Option<String> {
        by(self.products.values().map(|(_, choice)| choice))
    }
}

fn by<'a>(choices: impl Iterator<Item = &'a Choice>) -> Option<String> {
    let mut forms = BTreeMap::new();
    for choice in choices {
        let who = match choice {
            Choice::Library(_) => LIBRARY,
            Choice::Hopper(_) | Choice::Normed(_) => "wgmma",
            Choice::Mma(_) => "mma.sync",
            Choice::Own => "plain loops",
        };
        *forms.entry(who).or_insert(0) += 1;
    }
    let of = |n| if n == 1 { "form" } else { "forms" };
    let each: Vec<String> = forms.into_iter().map(|(who, n)| format!("{who} ({n} {})", of(n))).collect();
    (!each.is_empty()).then(|| each.join(" and "))
}

/// The operands with the residual in y's place. The library rounds a product to 16 bits before it adds what stands there, and
/// adds what stands elsewhere to the sum: the bits of a form must not depend on where a plan has its residual.
fn in_place(context: &Context, form: Form, operands: &Operands) -> Result<Operands, CudaError> {
    let Operands { residual, y, rows, .. } = *operands;
    let bytes = (rows * form.n * form.out().size()) as usize;
    if form.residual() && form.out() != DType::F32 && residual != y && bytes > 0 {
        // SAFETY: both are operands of so many bytes, and do not overlap.
        let code = unsafe { (context.api.cuMemcpyDtoDAsync_v2)(y, residual, bytes, context.stream) };
        context.api.check("cuMemcpyDtoDAsync", code)?;
        return Ok(Operands { residual: y, ..*operands });
    }
    Ok(*operands)
}

/// Whether no product was ever timed on a card of this kind, with this driver and library.
pub(crate) fn nothing_is_timed(card: &Card) -> bool {
    // SAFETY: it has no preconditions.
    let version = |library: &CublasLt| unsafe { (library.cublasLtGetVersion)() };
    let library = Libraries::get().cublaslt.as_ref();
    library.is_ok_and(|library| Table::of(card, version(library)).lock().is_empty())
}

impl Choice {
    /// Compiles what [`Self::run`] calls.
    fn prepare(
        &self,
        context: &Context,
        kernels: &mut Kernels,
        form: Form,
        operands: &Operands,
    ) -> Result<(), CudaError> {
        match self {
            Self::Hopper(tile) => return tile.prepare(context, kernels, form),
            Self::Normed(normed) => return normed.prepare(context, kernels, form),
            Self::Mma(tile) => return tile.prepare(context, kernels, form),
            Self::Own => kernels.prepare(context, &own(form, operands).0, 0)?,
            Self::Library(_) => {}
        }
        match form.epilogue {
            Epilogue::Gelu => kernels.prepare(context, &pass(form, operands).0, 0),
            Epilogue::None | Epilogue::Residual | Epilogue::Gate => Ok(()),
        }
    }

    fn run(
        &self,
        context: &Context,
        kernels: &Kernels,
        description: &Description,
        form: Form,
        operands: &Operands,
    ) -> Result<(), CudaError> {
        match self {
            Self::Hopper(tile) => return tile.run(context, kernels, form, operands),
            Self::Normed(normed) => return normed.run(context, kernels, form, operands),
            Self::Mma(tile) => return tile.run(context, kernels, form, operands),
            Self::Own => {
                let (kernel, shape, args) = own(form, operands);
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
                let (kernel, shape, args) = pass(form, operands);
                kernels.call(context, &kernel, shape, &args)
            }
            Epilogue::None | Epilogue::Residual | Epilogue::Gate => Ok(()),
        }
    }
}

/// The plain loops for a form, their grid and arguments.
fn own(form: Form, operands: &Operands) -> (Kernel, Shape, [Arg; 10]) {
    const TILE: u64 = 64;
    let &Operands { x, w, scales, bias, residual, y, rows, .. } = operands;
    let blocks = (rows.div_ceil(TILE) as u32, form.n.div_ceil(TILE) as u32, 1);
    let [x, w, bias, residual, y] = [x, w, bias, residual, y].map(Arg::pointer);
    let scales = [Arg::pointer(scales.0), Arg::pointer(scales.1)];
    let sizes = [Arg::long(rows), Arg::int(form.n), Arg::int(form.k)];
    let args = [x, w, scales[0], scales[1], bias, residual, y, sizes[0], sizes[1], sizes[2]];
    (form.kernel("product"), Shape { blocks, threads: 256, shared: 0 }, args)
}

/// The pass over y that a GELU is where the product has none: the library's is the one by tanh, ours by erf.
fn pass(form: Form, operands: &Operands) -> (Kernel, Shape, [Arg; 3]) {
    gelu_in_place(form.out(), operands.y, operands.rows * form.n)
}

/// Whether a form with a norm in front has a kernel on a card.
pub(crate) fn has_norms(context: &Context, form: Form) -> bool {
    Normed::suits(context, form)
}

/// The names of our own kernel's forms on Hopper.
pub(crate) fn own_products() -> Vec<&'static str> {
    hopper::TILES.iter().map(|tile| tile.name).collect()
}

/// And of those with a norm in front.
pub(crate) fn own_norms() -> Vec<&'static str> {
    normed::NORMED.iter().map(|normed| normed.name).collect()
}

/// Every kernel of this folder, in every form.
pub(crate) fn every_kernel() -> Vec<Kernel> {
    let form =
        |dtype| Form { n: 1, k: 1, dtype, tf32: false, bias: false, epilogue: Epilogue::None, norm: None };
    let forms = [DType::F32, DType::Bf16, DType::F16, DType::F8].map(form);
    let gate = |dtype| Form { epilogue: Epilogue::Gate, ..form(dtype) }.kernel("product");
    let gates = [DType::F32, DType::Bf16].map(gate);
    let matmul = forms
        .iter()
        .flat_map(|form| ["product", "noise", "revealing", "digest"].map(|entry| form.kernel(entry)))
        .chain(gates);
    matmul.chain(mma::every_kernel()).chain(hopper::every_kernel()).chain(normed::every_kernel()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_start_line_names_all_that_compute_products() {
        let library = Choice::Library(lt::cublasLtMatmulAlgo_t { data: [0; 8] });
        let hopper = Choice::Hopper(hopper::TILES[0]);
        for (choices, wanted) in [
            (&[][..], None),
            (&[library], Some("cuBLASLt (1 form)")),
            (&[hopper, library, hopper], Some("cuBLASLt (1 form) and wgmma (2 forms)")),
            (&[Choice::Own, hopper], Some("plain loops (1 form) and wgmma (1 form)")),
        ] {
            assert_eq!(by(choices.iter()).as_deref(), wanted);
        }
    }
}
