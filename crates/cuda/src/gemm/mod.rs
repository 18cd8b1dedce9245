//! Matrix products `y = x W^T + b + r`, all row-major. Invariant: what computes a product is chosen once for its form,
//! from everything but the number of rows, and sums each element in one order; so a row has the same bits in any batch.

mod choose;
mod description;
mod table;

use crate::api::CublasLt;
use crate::compile::digest;
use crate::context::{Card, Context};
use crate::kernel::{Arg, File, Kernel, Kernels, Shape};
use crate::{CudaError, Libraries};
use choose::Trial;
use cudarc::cublaslt::sys as lt;
use description::{Description, Handle};
use graph::DType;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use table::Table;

/// All of a product but its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Form {
    /// Columns of y.
    pub(crate) n: u64,
    /// Columns of x.
    pub(crate) k: u64,
    /// Of x and w: a float.
    pub(crate) dtype: DType,
    pub(crate) bias: bool,
    pub(crate) residual: bool,
}

impl Form {
    /// The element type of y, the bias and the residual.
    pub(crate) fn out(&self) -> DType {
        match self.dtype {
            DType::F8 => DType::Bf16,
            DType::F32 | DType::Bf16 | DType::F16 | DType::I32 | DType::U8 => self.dtype,
        }
    }

    /// Whether x and w are codes, with a scale for each of their rows.
    pub(crate) fn scaled(&self) -> bool {
        self.dtype == DType::F8
    }

    /// An entry of `matmul.cu` for its operands.
    fn kernel(&self, entry: &'static str) -> Kernel {
        let kernel = Kernel::new(File::Matmul, entry, self.out());
        if self.scaled() { kernel.on_codes() } else { kernel }
    }
}

impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let with = |is, word: &'static str| if is { word } else { "-" };
        let Self { n, k, dtype, bias, residual } = *self;
        write!(f, "{n} {k} {} {} {}", dtype.name(), with(bias, "bias"), with(residual, "residual"))
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
    /// (R, N)
    pub(crate) y: u64,
    /// R
    pub(crate) rows: u64,
    /// Scratch: its address and bytes.
    pub(crate) workspace: (u64, u64),
}

/// What computes a product: an algorithm of the library, or else our own kernel.
type Choice = Option<lt::cublasLtMatmulAlgo_t>;

/// The products of a card's programs.
pub(crate) struct Gemm {
    handle: Arc<Handle>,
    table: Table,
    timed: bool,
    products: HashMap<Form, (Description, Choice)>,
}

impl Gemm {
    /// Opens the library. Where algorithms are not `timed`, the one that it expects to be the fastest is taken.
    pub(crate) fn new(context: &Context, timed: bool) -> Result<Self, CudaError> {
        let handle = Handle::new(Libraries::get().cublaslt.as_ref().map_err(CudaError::clone)?)?;
        let table = Table::of(&context.card, handle.version());
        Ok(Self { handle: Arc::new(handle), table, timed, products: HashMap::new() })
    }

    /// Chooses what computes a form, unless that was done; `false` where that is [`own`]. What the operands hold is lost.
    pub(crate) fn prepare(
        &mut self,
        context: &Context,
        kernels: &mut Kernels,
        form: Form,
        operands: &Operands,
    ) -> Result<bool, CudaError> {
        if let Some((_, choice)) = self.products.get(&form) {
            return Ok(choice.is_some());
        }
        let description = Description::new(Arc::clone(&self.handle), form)?;
        let mut trial = Trial { context, kernels, description: &description, form, operands: *operands };
        // Locked while it is chosen: another card of this kind waits, and takes the same.
        let choice = match self.timed {
            false => trial.choose(false)?,
            true => {
                let mut entries = self.table.lock();
                match entries.get(&form, operands.rows) {
                    Some(None) => None,
                    Some(Some(known)) if trial.admits(&known) => Some(known),
                    None | Some(Some(_)) => {
                        let choice = trial.choose(true)?;
                        entries.insert(&form, operands.rows, choice);
                        choice
                    }
                }
            }
        };
        self.products.insert(form, (description, choice));
        Ok(choice.is_some())
    }

    /// Runs a product by the library; `false` where that is for [`own`].
    pub(crate) fn run(&self, context: &Context, form: Form, operands: &Operands) -> Result<bool, CudaError> {
        let unprepared = || CudaError::Unprepared { what: format!("the product {form}") };
        let (description, choice) = self.products.get(&form).ok_or_else(unprepared)?;
        match choice {
            Some(algorithm) => {
                let run = || description.run(algorithm, operands, context.stream);
                context.trace.kernel(context.stream, || form.to_string(), run).map(|()| true)
            }
            None => Ok(false),
        }
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

    /// A digest of what was chosen: with the card and the library, all that the products' bits depend on.
    pub(crate) fn digest(&self) -> String {
        digest(&format!("cuBLASLt {}\n{}", self.handle.version(), self.choices().join("\n")))
    }
}

/// Whether no product was ever timed on a card of this kind, with this driver and library.
pub(crate) fn nothing_is_timed(card: &Card) -> bool {
    // SAFETY: it has no preconditions.
    let version = |library: &CublasLt| unsafe { (library.cublasLtGetVersion)() };
    let library = Libraries::get().cublaslt.as_ref();
    library.is_ok_and(|library| Table::of(card, version(library)).lock().is_empty())
}

/// Our own kernel for a form, its grid and arguments.
pub(crate) fn own(form: Form, operands: &Operands) -> (Kernel, Shape, [Arg; 10]) {
    const TILE: u64 = 64;
    let &Operands { x, w, scales, bias, residual, y, rows, .. } = operands;
    let blocks = (rows.div_ceil(TILE) as u32, form.n.div_ceil(TILE) as u32, 1);
    let [x, w, bias, residual, y] = [x, w, bias, residual, y].map(Arg::pointer);
    let scales = [Arg::pointer(scales.0), Arg::pointer(scales.1)];
    let sizes = [Arg::long(rows), Arg::int(form.n), Arg::int(form.k)];
    let args = [x, w, scales[0], scales[1], bias, residual, y, sizes[0], sizes[1], sizes[2]];
    (form.kernel("product"), Shape { blocks, threads: 256, shared: 0 }, args)
}

/// Every kernel of this file, in every form.
pub(crate) fn every_kernel() -> Vec<Kernel> {
    let form = |dtype| Form { n: 1, k: 1, dtype, bias: false, residual: false };
    let forms = [DType::F32, DType::Bf16, DType::F16, DType::F8].map(form);
    forms.iter().flat_map(|form| ["product", "noise"].map(|entry| form.kernel(entry))).collect()
}
