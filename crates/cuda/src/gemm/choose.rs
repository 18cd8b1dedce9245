//! What computes a product: one of the library's algorithms, or our own kernel. Invariant: one that is chosen splits no sum
//! over k, runs for any number of rows, and was seen to give rows the same bits alone, among few and among all.
//!
//! The heuristic's first is up to a fifth slower than the fastest, so all that it offers are timed beside our own, with
//! what stands behind the product, on noise: products of zeros draw less power and run faster.

use super::description::Description;
use super::hopper::{TILES, Tile};
use super::normed::{NORMED, Normed};
use super::{Choice, Choosing, Form, LIBRARY, Operands};
use crate::CudaError;
use crate::api::Driver;
use crate::context::Context;
use crate::kernel::{Arg, Kernels, Shape};
use cudarc::cublaslt::sys as lt;
use cudarc::driver::sys as cu;
use graph::DType;
use std::ffi::{c_float, c_int};
use std::{mem, ptr};

/// The most algorithms that are asked for.
const CANDIDATES: usize = 16;
/// Runs before those that are timed, and those.
const WARM: usize = 3;
const RUNS: usize = 10;
/// Numbers of rows for which an algorithm must say that it runs.
const ROWS: [u64; 12] = [1, 2, 3, 8, 31, 32, 33, 64, 100, 128, 1000, 4096];
/// Rows after which any matrix of 16 bits or more is aligned to 256 bytes again.
const ALIGNED: u64 = 128;
/// Rows whose bits are compared, at each end of a piece.
const COMPARED: u64 = 32;

/// The library's `cublasLtMatmulHeuristicResult_t`, with a state that may be any number.
#[repr(C)]
#[derive(Clone, Copy)]
struct Found {
    algorithm: lt::cublasLtMatmulAlgo_t,
    workspace: usize,
    state: c_int,
    waves: c_float,
    reserved: [c_int; 4],
}

const _: () = assert!(size_of::<Found>() == size_of::<lt::cublasLtMatmulHeuristicResult_t>());

const NOTHING: Found = Found {
    algorithm: lt::cublasLtMatmulAlgo_t { data: [0; 8] },
    workspace: 0,
    state: 0,
    waves: 0.0,
    reserved: [0; 4],
};

/// A product on its full operands, which it overwrites.
pub(super) struct Trial<'a> {
    pub(super) context: &'a Context,
    pub(super) kernels: &'a mut Kernels,
    pub(super) description: &'a Description,
    pub(super) form: Form,
    pub(super) operands: Operands,
}

impl Trial<'_> {
    /// The fastest admissible one, or the first or the named. The operands are poisoned again afterwards.
    pub(super) fn choose(&mut self, choosing: &Choosing) -> Result<Choice, CudaError> {
        let mut candidates: Vec<Choice> = match choosing {
            // Nothing else has norms.
            _ if self.form.norm.is_some() => self.normed(choosing)?,
            // The library has no gates.
            Choosing::First | Choosing::Timed if self.form.gate() => self.tiles().map(Choice::Hopper).collect(),
            Choosing::Named(name) if name == LIBRARY && self.form.gate() => vec![],
            Choosing::First => self.algorithms()?,
            Choosing::Timed => [self.algorithms()?, self.tiles().map(Choice::Hopper).collect()].concat(),
            Choosing::Named(name) if name == LIBRARY => self.algorithms()?,
            Choosing::Named(name) => {
                self.tiles().filter(|tile| tile.name == name).map(Choice::Hopper).collect()
            }
        };
        if candidates.is_empty() {
            return Ok(Choice::Own);
        }
        for candidate in &candidates {
            candidate.prepare(self.context, self.kernels, self.form, &self.operands)?;
        }
        self.noise_all()?;
        if *choosing != Choosing::First {
            candidates = self.by_time(&candidates);
        }
        let mut chosen = Choice::Own;
        for candidate in candidates {
            if self.is_invariant(&candidate)? {
                chosen = candidate;
                break;
            }
        }
        self.poison_all()?;
        match chosen {
            Choice::Own if self.form.norm.is_some() => Err(self.without_norms()),
            chosen => Ok(chosen),
        }
    }

    /// Whether what was once chosen can be taken again.
    pub(super) fn admits(&self, choice: &Choice) -> bool {
        match choice {
            Choice::Own => true,
            Choice::Hopper(tile) => tile.suits(self.context, self.form),
            Choice::Normed(_) => Normed::suits(self.context, self.form),
            Choice::Library(algorithm) => self.admits_algorithm(algorithm),
        }
    }

    fn tiles(&self) -> impl Iterator<Item = Tile> {
        TILES.into_iter().filter(|tile| tile.suits(self.context, self.form))
    }

    /// Our own with norms: the named one, for any number of rows, or all.
    fn normed(&self, choosing: &Choosing) -> Result<Vec<Choice>, CudaError> {
        if !Normed::suits(self.context, self.form) {
            return Err(self.without_norms());
        }
        let named = match choosing {
            Choosing::Named(name) => Normed::named(name),
            Choosing::Timed | Choosing::First => None,
        };
        Ok(match named {
            Some(normed) => vec![Choice::Normed(Normed { few: 0, ..normed })],
            None => NORMED.map(Choice::Normed).to_vec(),
        })
    }

    fn without_norms(&self) -> CudaError {
        CudaError::Unprepared { what: format!("a product with a layer norm in front of it, {}", self.form) }
    }

    /// Those that run, the fastest first.
    fn by_time(&self, candidates: &[Choice]) -> Vec<Choice> {
        let timed = candidates.iter().filter_map(|candidate| Some((self.time(candidate).ok()?, *candidate)));
        let mut timed: Vec<_> = timed.collect();
        timed.sort_by(|(a, _), (b, _)| a.total_cmp(b));
        timed.into_iter().map(|(_, candidate)| candidate).collect()
    }

    /// Whether an algorithm keeps every sum whole, and runs for any number of rows in our workspace.
    fn admits_algorithm(&self, algorithm: &lt::cublasLtMatmulAlgo_t) -> bool {
        use lt::cublasLtMatmulAlgoConfigAttributes_t as A;
        // 0 and 1 splits are both one sum; no scheme of reducing several.
        let whole = config(self.description, algorithm, A::CUBLASLT_ALGO_CONFIG_SPLITK_NUM)
            .is_some_and(|n| n <= 1)
            && config(self.description, algorithm, A::CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME) == Some(0);
        let full = self.operands.rows;
        whole
            && ROWS.into_iter().filter(|&rows| rows < full).chain([full]).all(|rows| self.runs(algorithm, rows))
    }

    fn runs(&self, algorithm: &lt::cublasLtMatmulAlgo_t, rows: u64) -> bool {
        let Description { handle, operation, w, x, y, .. } = self.description;
        let mut found = NOTHING;
        let operands = Operands { rows, ..self.operands };
        // SAFETY: the descriptors live; the result is written to a local of its size.
        let code = self.description.set_launch(&operands).is_ok().then(|| unsafe {
            let found = ptr::from_mut(&mut found).cast();
            (handle.api.cublasLtMatmulAlgoCheck)(handle.raw, *operation, *w, *x, *y, *y, algorithm, found)
        });
        code == Some(0) && found.workspace as u64 <= self.operands.workspace.1
    }

    /// The admissible ones of those that the library offers, in its order.
    fn algorithms(&self) -> Result<Vec<Choice>, CudaError> {
        let Description { handle, operation, w, x, y, .. } = self.description;
        self.description.set_launch(&self.operands)?;
        let preference = Preference::new(self.description, self.form, self.operands.workspace.1)?;
        let (mut found, mut count) = ([NOTHING; CANDIDATES], 0);
        // SAFETY: the descriptors live; at most `CANDIDATES` results are written.
        let code = unsafe {
            let (to, most) = (found.as_mut_ptr().cast(), CANDIDATES as c_int);
            let ask = handle.api.cublasLtMatmulAlgoGetHeuristic;
            ask(handle.raw, *operation, *w, *x, *y, *y, preference.raw, most, to, &mut count)
        };
        match handle.check("cublasLtMatmulAlgoGetHeuristic", code) {
            // It has none: odd sizes and strides of 16-bit elements.
            Err(CudaError::Call { code: NOT_SUPPORTED | INVALID_VALUE, .. }) => return Ok(vec![]),
            other => other?,
        }
        let offered = found.into_iter().take(count as usize).filter(|found| found.state == 0);
        let admitted = offered.map(|found| found.algorithm).filter(|found| self.admits_algorithm(found));
        Ok(admitted.map(Choice::Library).collect())
    }

    fn run(&self, candidate: &Choice, operands: &Operands) -> Result<(), CudaError> {
        candidate.run(self.context, self.kernels, self.description, self.form, operands)
    }

    /// The median of some runs, in milliseconds.
    fn time(&self, candidate: &Choice) -> Result<f32, CudaError> {
        let (context, api) = (self.context, self.context.api);
        let events: Vec<Event> = (0..=RUNS).map(|_| Event::new(api)).collect::<Result<_, _>>()?;
        for _ in 0..WARM {
            self.run(candidate, &self.operands)?;
        }
        events[0].record(context)?;
        for event in &events[1..] {
            self.run(candidate, &self.operands)?;
            event.record(context)?;
        }
        context.synchronize()?;
        let mut times: Vec<f32> =
            events.windows(2).map(|pair| pair[1].since(&pair[0])).collect::<Result<_, _>>()?;
        times.sort_by(f32::total_cmp);
        Ok(times[RUNS / 2])
    }

    /// Whether rows have the bits in pieces that they have in the whole: the attributes do not tell of algorithms that
    /// deal the last tiles out along k.
    fn is_invariant(&mut self, candidate: &Choice) -> Result<bool, CudaError> {
        let rows = self.operands.rows;
        let tail = (rows - 1) / ALIGNED * ALIGNED;
        let mut pieces = vec![(0, 1), (0, 2), (0, 33), (0, rows / 2), (tail, rows - tail)];
        pieces.retain(|&(start, length)| length > 0 && start + length <= rows);
        self.run_piece(candidate, 0, rows)?;
        let whole: Vec<_> = pieces.iter().map(|&piece| self.edges(piece)).collect::<Result<_, _>>()?;
        for (&(start, length), expected) in pieces.iter().zip(&whole) {
            self.run_piece(candidate, start, length)?;
            if self.edges((start, length))? != *expected {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Runs some rows; of y nothing else is left.
    fn run_piece(&mut self, candidate: &Choice, start: u64, rows: u64) -> Result<(), CudaError> {
        let Form { n, k, dtype, .. } = self.form;
        let (all, out) = (self.operands.rows * n, self.form.out());
        self.poison((self.operands.y, all, out))?;
        if self.form.residual() {
            // It may be y, which the run before has written.
            self.noise((self.operands.residual, all, out), RESIDUAL)?;
        }
        let (wide, narrow) = (start * n * out.size(), start * k * dtype.size());
        let Operands { x, scales, residual, y, .. } = self.operands;
        let scales = (scales.0 + start * DType::F32.size(), scales.1);
        let (x, residual, y) = (x + narrow, residual + wide, y + wide);
        let piece = Operands { x, scales, residual, y, rows, ..self.operands };
        self.run(candidate, &piece)
    }

    /// The first and last rows of a piece of y.
    fn edges(&self, (start, length): (u64, u64)) -> Result<Vec<u8>, CudaError> {
        let row = self.form.n * self.form.out().size();
        let compared = length.min(COMPARED);
        let mut bytes = vec![0; (2 * compared * row) as usize];
        let (first, last) = bytes.split_at_mut((compared * row) as usize);
        for (at, to) in [(start, first), (start + length - compared, last)] {
            let (from, stream) = (self.operands.y + at * row, self.context.stream);
            // SAFETY: the rows are y's, and the stream is waited for below.
            let code = unsafe {
                (self.context.api.cuMemcpyDtoHAsync_v2)(to.as_mut_ptr().cast(), from, to.len(), stream)
            };
            self.context.api.check("cuMemcpyDtoHAsync", code)?;
        }
        self.context.synchronize()?;
        Ok(bytes)
    }

    /// Every operand of the form, with its elements and their type.
    fn extents(&self) -> impl Iterator<Item = Extent> + use<> {
        let (form @ Form { n, k, dtype, .. }, out) = (self.form, self.form.out());
        let Operands { x, w, scales, bias, residual, norm, y, rows, .. } = self.operands;
        let scales = if form.scaled() { scales } else { (0, 0) };
        let params = form.norm.unwrap_or(DType::F32);
        let operands = [
            (x, rows * k, dtype),
            (w, form.outputs() * k, dtype),
            (bias, n, out),
            (y, rows * n, out),
            (residual, rows * n, out),
            (scales.0, rows, DType::F32),
            (scales.1, n, DType::F32),
            (norm.gamma, k, params),
            (norm.beta, k, params),
        ];
        operands.into_iter().filter(|(address, ..)| *address != 0)
    }

    fn noise_all(&mut self) -> Result<(), CudaError> {
        self.extents().enumerate().try_for_each(|(seed, extent)| self.noise(extent, seed))
    }

    fn poison_all(&self) -> Result<(), CudaError> {
        self.extents().try_for_each(|extent| self.poison(extent))
    }

    fn noise(&mut self, (address, elements, dtype): Extent, seed: usize) -> Result<(), CudaError> {
        let kernel = Form { dtype, ..self.form }.kernel("noise");
        self.kernels.prepare(self.context, &kernel, 0)?;
        let shape = Shape::of(elements.div_ceil(256).min(8192), 256);
        let args = [Arg::pointer(address), Arg::long(elements), Arg::int(seed)];
        self.kernels.call(self.context, &kernel, shape, &args)
    }

    /// Not a number, as the executor leaves memory that nobody wrote.
    fn poison(&self, (address, elements, dtype): Extent) -> Result<(), CudaError> {
        let (api, bytes) = (self.context.api, (elements * dtype.size()) as usize);
        // SAFETY: the range is one of the operands.
        let code = unsafe { (api.cuMemsetD8Async)(address, 0xFF, bytes, self.context.stream) };
        api.check("cuMemsetD8Async", code)
    }
}

/// Address, elements and their type.
type Extent = (u64, u64, DType);

/// The seed of the residual's noise before every run.
const RESIDUAL: usize = 4;

/// Codes with which the library says that it has no algorithm.
const INVALID_VALUE: c_int = 7;
const NOT_SUPPORTED: c_int = 15;

/// A number of an algorithm's configuration; those that are asked for have 32 bits.
fn config(
    description: &Description,
    algorithm: &lt::cublasLtMatmulAlgo_t,
    which: lt::cublasLtMatmulAlgoConfigAttributes_t,
) -> Option<u32> {
    let (mut value, mut written) = (0u32, 0);
    // SAFETY: at most four bytes are written to a local of four.
    let code = unsafe {
        let (to, get) =
            (ptr::from_mut(&mut value).cast(), description.handle.api.cublasLtMatmulAlgoConfigGetAttribute);
        get(algorithm, which, to, mem::size_of::<u32>(), &mut written)
    };
    (code == 0).then_some(value)
}

/// What the heuristic is asked for.
struct Preference<'a> {
    description: &'a Description,
    raw: lt::cublasLtMatmulPreference_t,
}

impl<'a> Preference<'a> {
    fn new(description: &'a Description, form: Form, workspace: u64) -> Result<Self, CudaError> {
        use lt::cublasLtMatmulPreferenceAttributes_t as A;
        let mut made = Self { description, raw: ptr::null_mut() };
        // SAFETY: the pointer is to a field of a local.
        let code = unsafe { (description.handle.api.cublasLtMatmulPreferenceCreate)(&mut made.raw) };
        description.handle.check("cublasLtMatmulPreferenceCreate", code)?;
        made.set(A::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace)?;
        // No scheme of reduction: sums are not split.
        made.set(A::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &0u32)?;
        let implementations = match form.dtype {
            DType::F32 if form.tf32 => !0,
            // All but those on tensor cores (cublasLt.h: bits 1 to 7), which would cut f32 to fewer bits.
            DType::F32 => !0xfe_u64,
            DType::Bf16 | DType::F16 | DType::F8 | DType::I8 | DType::I32 | DType::U8 => !0,
        };
        made.set(A::CUBLASLT_MATMUL_PREF_IMPL_MASK, &implementations)?;
        Ok(made)
    }

    fn set<T: Copy>(
        &self,
        which: lt::cublasLtMatmulPreferenceAttributes_t,
        value: &T,
    ) -> Result<(), CudaError> {
        let (handle, value, size) = (&self.description.handle, ptr::from_ref(value).cast(), size_of::<T>());
        // SAFETY: the value is as large as is said; the library refuses a size that is not the attribute's.
        let code = unsafe { (handle.api.cublasLtMatmulPreferenceSetAttribute)(self.raw, which, value, size) };
        handle.check("cublasLtMatmulPreferenceSetAttribute", code)
    }
}

impl Drop for Preference<'_> {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: it is ours; a failure changes nothing here.
            unsafe { (self.description.handle.api.cublasLtMatmulPreferenceDestroy)(self.raw) };
        }
    }
}

/// A moment in the stream.
struct Event {
    api: &'static Driver,
    raw: cu::CUevent,
}

impl Event {
    fn new(api: &'static Driver) -> Result<Self, CudaError> {
        let mut made = Self { api, raw: ptr::null_mut() };
        // SAFETY: the pointer is to a field of a local.
        api.check("cuEventCreate", unsafe { (api.cuEventCreate)(&mut made.raw, 0) })?;
        Ok(made)
    }

    fn record(&self, context: &Context) -> Result<(), CudaError> {
        // SAFETY: both are ours.
        self.api.check("cuEventRecord", unsafe { (self.api.cuEventRecord)(self.raw, context.stream) })
    }

    /// Milliseconds since another one; both are past.
    fn since(&self, before: &Self) -> Result<f32, CudaError> {
        let mut milliseconds = 0.0;
        // SAFETY: the pointer is to a local.
        let code = unsafe { (self.api.cuEventElapsedTime)(&mut milliseconds, before.raw, self.raw) };
        self.api.check("cuEventElapsedTime", code)?;
        Ok(milliseconds)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: it is ours, and the driver waits for what still needs it.
            unsafe { (self.api.cuEventDestroy_v2)(self.raw) };
        }
    }
}
