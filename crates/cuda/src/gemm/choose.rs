//! Which kernel computes a product. Invariant: the bits of a product depend on the kind of card and the form alone. Every form
//! has one canonical order of sums ([`Order`]), which a kernel of ours computes, or for fp8 one pinned algorithm of the
//! library. Another algorithm is admitted only where it gave the same bits in at least [`OUTPUTS`] outputs of operands that
//! reveal other orders (`revealing` of `matmul.cu`), for full steps and for few rows; so timing chooses among equals.
//!
//! Candidates are timed on noise, since products of zeros draw less power and run faster.

use super::description::Description;
use super::hopper::{TILES, Tile};
use super::mma::MMA_TILES;
use super::normed::{NORMED, Normed};
use super::{Choice, Choosing, Form, LIBRARY, Operands, table};
use crate::CudaError;
use crate::api::Driver;
use crate::context::Context;
use crate::kernel::{Arg, HOPPER, Kernels, Shape};
use cudarc::cublaslt::sys as lt;
use cudarc::driver::sys as cu;
use graph::DType;
use graph::ops::Epilogue;
use std::collections::BTreeMap;
use std::ffi::{c_float, c_int};
use std::{mem, ptr};

/// The canonical order in which a form is summed on a card: a property of the form and the card's compute capability. The
/// bias is added to the sum in f32, then comes the GELU or the gate, and the result is rounded. A residual is added to the
/// rounded result, and the sum is rounded again: so do separate layers, and the library where y has the residual's place. Of
/// [`Order::Loops`] alone the residual is added before the bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// By `wgmma.cu`: warpgroup products of 16 columns of k after another.
    Wgmma,
    /// By `mma.cu`: `mma.sync` of 16 columns of k (8 of TF32) after another.
    Mma,
    /// By `matmul.cu`: a fused multiply-add in f32 for each column of k.
    Loops,
    /// By the algorithm that the library names first for [`PINNED_ROWS`] rows.
    Pinned,
}

impl Order {
    /// Of a form on a card.
    pub(super) fn of(context: &Context, form: Form) -> Self {
        match form.dtype {
            DType::F8 => Self::Pinned,
            DType::F32 if !form.tf32 => Self::Loops,
            // On Hopper the library's TF32, whose bits no instruction of ours has, is more than twice as fast as `mma.sync`.
            DType::F32
                if context.card.capability == HOPPER
                    && !form.gate()
                    && form.n.is_multiple_of(4)
                    && form.k.is_multiple_of(4) =>
            {
                Self::Pinned
            }
            _ if form.norm.is_some() => Self::Wgmma,
            DType::F32 | DType::Bf16 | DType::F16 | DType::I8 | DType::I32 | DType::U8 => {
                match TILES.iter().any(|tile| tile.suits(context, form)) {
                    true => Self::Wgmma,
                    false => Self::Mma,
                }
            }
        }
    }
}

/// Names the orders of this version, in the arithmetic of a run: changed with any of them.
pub(crate) const ORDERS: &str = "products 3 (16 bits: wgmma k16 on sm_90 for widths in multiples of 8, else mma.sync k16; f32: \
     fma; e4m3, and tf32 on sm_90 for widths in multiples of 4: cuBLASLt's first algorithm for 16384 rows; other tf32: mma.sync k8)";

/// The rows and the bytes of workspace for which the library is asked for the algorithm that is pinned, whatever the step.
const PINNED_ROWS: u64 = 16_384;
const PINNED_WORKSPACE: u64 = 32 << 20;

/// Outputs in which an admitted algorithm was compared.
const OUTPUTS: u64 = 1 << 26;
/// Steps with fewer outputs are left to our own kernels: comparing takes too many of them.
const FEWEST_OUTPUTS: u64 = 1 << 12;
/// Kinds of operands that `revealing` makes: seeds modulo this number.
const MODES: usize = 4;

/// The most algorithms that are asked for.
const CANDIDATES: usize = 16;
/// Runs before those that are timed, and those.
const WARM: usize = 3;
const RUNS: usize = 10;
/// Numbers of rows for which an algorithm must say that it runs: a pinned one for all, any other up to the step's rows.
const ROWS: [u64; 14] = [1, 2, 3, 8, 31, 32, 33, 64, 100, 128, 1000, 4096, 16_384, 65_536];
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

/// A kernel or algorithm that may compute a product, as it was timed and compared with the canonical kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// As [`crate::CudaDevice::products`] names it, and [`crate::CudaDevice::with_product`] takes it.
    pub name: String,
    /// The median time of a full step.
    pub milliseconds: f32,
    /// Whether its outputs were the canonical kernel's in all comparisons; `None` for a kernel of the canonical order itself.
    pub equal: Option<bool>,
    /// Whether a full step had the canonical bits, for each kind of operands: uniform, with wide exponents, and two whose sums
    /// cancel.
    pub modes: [bool; MODES],
    /// A digest of those outputs: candidates with equal ones had equal bits.
    pub digest: u64,
}

impl Trial<'_> {
    /// The fastest admissible candidate, or the first or the named. The operands are poisoned afterwards.
    pub(super) fn choose(&mut self, choosing: &Choosing) -> Result<Choice, CudaError> {
        let own = self.own()?;
        if let Choice::Library(_) = own[0] {
            self.check_invariant(&own[0])?;
        }
        match choosing {
            Choosing::First => Ok(own[0]),
            Choosing::Named(name) => self.named(name, &own),
            Choosing::Timed | Choosing::Surveyed => self.fastest(own),
        }
    }

    /// The kernels that compute the form's canonical order: equal by construction. The first needs no timing.
    pub(super) fn own(&self) -> Result<Vec<Choice>, CudaError> {
        let form = self.form;
        if form.norm.is_some() {
            return match Normed::suits(self.context, form) {
                true => Ok(NORMED.map(Choice::Normed).to_vec()),
                false => Err(self.without_norms()),
            };
        }
        Ok(match Order::of(self.context, form) {
            Order::Wgmma => self.tiles().map(Choice::Hopper).collect(),
            Order::Mma => MMA_TILES.map(Choice::Mma).to_vec(),
            Order::Loops => vec![Choice::Own],
            // Widths that the library has no algorithm for have a kernel of ours, at any number of rows.
            Order::Pinned => match self.pinned()? {
                Some(algorithm) => vec![Choice::Library(algorithm)],
                None if form.scaled() => vec![Choice::Own],
                None => MMA_TILES.map(Choice::Mma).to_vec(),
            },
        })
    }

    /// The algorithm of a form that is pinned: a function of the form, the card and the library's version.
    fn pinned(&self) -> Result<Option<lt::cublasLtMatmulAlgo_t>, CudaError> {
        // For all rows: what is pinned must not depend on the step.
        Ok(self.offered(PINNED_ROWS, PINNED_WORKSPACE, u64::MAX)?.into_iter().next())
    }

    /// A choice by its name: a tile's, the library's fastest by [`LIBRARY`], or as [`table::text`] writes it. Where a kernel
    /// does not compute the form, the form's own does.
    fn named(&mut self, name: &str, own: &[Choice]) -> Result<Choice, CudaError> {
        if name == LIBRARY {
            let candidates = self.algorithms()?;
            self.prepare(&candidates)?;
            self.noise_all()?;
            let fastest = self.by_time(&candidates).first().map(|(_, candidate)| *candidate);
            self.poison_all()?;
            return Ok(fastest.unwrap_or(own[0]));
        }
        // Named norms are one kernel for any number of rows.
        if let (Some(_), Some(normed)) = (self.form.norm, Normed::named(name)) {
            return Ok(Choice::Normed(Normed { few: 0, ..normed }));
        }
        let tile = own.iter().find(|choice| {
            let text = table::text(choice);
            text == name || text.split(' ').next_back() == Some(name)
        });
        let rounds_once = matches!(Order::of(self.context, self.form), Order::Wgmma | Order::Mma);
        let other = || {
            table::parse(name).filter(|choice| match choice {
                Choice::Library(_) => true,
                Choice::Mma(_) => rounds_once && self.form.norm.is_none(),
                Choice::Own | Choice::Hopper(_) | Choice::Normed(_) => false,
            })
        };
        Ok(tile.copied().or_else(other).unwrap_or(own[0]))
    }

    fn fastest(&mut self, own: Vec<Choice>) -> Result<Choice, CudaError> {
        let others = self.others()?;
        if own.len() == 1 && others.is_empty() {
            return Ok(own[0]);
        }
        self.prepare(&own)?;
        self.prepare(&others)?;
        self.noise_all()?;
        let (own, others) = (self.by_time(&own), self.by_time(&others));
        let &(best, mut chosen) =
            own.first().ok_or_else(|| CudaError::Unprepared { what: self.form.to_string() })?;
        let mut digests = BTreeMap::new();
        for (time, candidate) in others {
            // What is slower than our fastest kernel is not worth comparing.
            if time > best {
                break;
            }
            if self.equals(&candidate, &own[0].1, &mut digests)? {
                chosen = candidate;
                break;
            }
        }
        self.poison_all()?;
        Ok(chosen)
    }

    /// Every candidate with its time, and how it compares with the canonical kernel; and the fastest that is admitted.
    pub(super) fn survey(&mut self) -> Result<(Choice, Vec<Candidate>), CudaError> {
        let (own, order) = (self.own()?, Order::of(self.context, self.form));
        // All that compute the form in any order: what the canonical order costs is seen beside the fastest of all.
        let mut others = match self.form.gate() || self.form.norm.is_some() {
            true => vec![],
            false => self.algorithms()?,
        };
        if order == Order::Wgmma && self.form.norm.is_none() {
            others.extend(MMA_TILES.map(Choice::Mma));
        }
        if order == Order::Mma {
            others.push(Choice::Own);
        }
        self.prepare(&own)?;
        self.prepare(&others)?;
        self.noise_all()?;
        let (own, others) = (self.by_time(&own), self.by_time(&others));
        let &(_, canonical) =
            own.first().ok_or_else(|| CudaError::Unprepared { what: self.form.to_string() })?;
        let mut admitted = own.clone();
        let mut candidates: Vec<Candidate> = own
            .iter()
            .map(|&(milliseconds, choice)| Candidate {
                name: table::text(&choice),
                milliseconds,
                equal: None,
                modes: [true; MODES],
                digest: 0,
            })
            .collect();
        let (mut digests, rows) = (BTreeMap::new(), self.operands.rows);
        for (milliseconds, choice) in others {
            let (mut modes, mut digest) = ([true; MODES], 0);
            for (mode, same) in modes.iter_mut().enumerate() {
                let expected = self.digest_of(&canonical, 0, rows, &[mode])?;
                let found = self.digest_of(&choice, 0, rows, &[mode])?;
                *same = found == expected;
                digest ^= found.rotate_left(mode as u32);
            }
            let equal = modes == [true; MODES] && self.equals(&choice, &canonical, &mut digests)?;
            let name = table::text(&choice);
            candidates.push(Candidate { name, milliseconds, equal: Some(equal), modes, digest });
            admitted.extend(equal.then_some((milliseconds, choice)));
        }
        self.poison_all()?;
        let fastest = admitted.into_iter().min_by(|(a, _), (b, _)| a.total_cmp(b));
        Ok((fastest.map_or(canonical, |(_, choice)| choice), candidates))
    }

    /// What may have the canonical bits: algorithms of the library. It has no gates and no norms; its results of 16 bits are
    /// rounded before our GELU.
    fn others(&self) -> Result<Vec<Choice>, CudaError> {
        let form = self.form;
        let rounded_twice = form.epilogue == Epilogue::Gelu && form.out() != DType::F32;
        let pinned = form.dtype == DType::F8;
        let few = self.operands.rows * form.n < FEWEST_OUTPUTS;
        match few || form.gate() || form.norm.is_some() || rounded_twice && !pinned {
            true => Ok(vec![]),
            false => self.algorithms(),
        }
    }

    fn prepare(&mut self, candidates: &[Choice]) -> Result<(), CudaError> {
        candidates
            .iter()
            .try_for_each(|choice| choice.prepare(self.context, self.kernels, self.form, &self.operands))
    }

    /// Whether what was once chosen can be taken again.
    pub(super) fn admits(&self, choice: &Choice) -> bool {
        match choice {
            Choice::Own | Choice::Mma(_) => true,
            Choice::Hopper(tile) => tile.suits(self.context, self.form),
            Choice::Normed(_) => Normed::suits(self.context, self.form),
            Choice::Library(algorithm) => self.admits_algorithm(algorithm, self.operands.rows),
        }
    }

    fn tiles(&self) -> impl Iterator<Item = Tile> {
        TILES.into_iter().filter(|tile| tile.suits(self.context, self.form))
    }

    fn without_norms(&self) -> CudaError {
        CudaError::Unprepared { what: format!("a product with a layer norm in front of it, {}", self.form) }
    }

    /// Those that run with their times, the fastest first.
    fn by_time(&self, candidates: &[Choice]) -> Vec<(f32, Choice)> {
        let timed = candidates.iter().filter_map(|candidate| Some((self.time(candidate).ok()?, *candidate)));
        let mut timed: Vec<_> = timed.collect();
        timed.sort_by(|(a, _), (b, _)| a.total_cmp(b));
        timed
    }

    /// Whether an algorithm keeps every sum whole, and runs in our workspace for the step's rows and those of [`ROWS`] up to `most`.
    fn admits_algorithm(&self, algorithm: &lt::cublasLtMatmulAlgo_t, most: u64) -> bool {
        use lt::cublasLtMatmulAlgoConfigAttributes_t as A;
        // 0 and 1 splits are both one sum; no scheme of reducing several.
        let whole = config(self.description, algorithm, A::CUBLASLT_ALGO_CONFIG_SPLITK_NUM)
            .is_some_and(|n| n <= 1)
            && config(self.description, algorithm, A::CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME) == Some(0);
        let mut rows = ROWS.into_iter().filter(|&rows| rows <= most).chain([self.operands.rows]);
        whole && rows.all(|rows| self.runs(algorithm, rows))
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

    /// The algorithms that the library offers for this step and that may be admitted, in its order.
    fn algorithms(&self) -> Result<Vec<Choice>, CudaError> {
        let rows = self.operands.rows;
        let offered = self.offered(rows, self.operands.workspace.1, rows)?;
        Ok(offered.into_iter().map(Choice::Library).collect())
    }

    /// Algorithms for a number of rows that keep every sum whole and run for the numbers of [`ROWS`] up to `most`, in the
    /// library's order.
    fn offered(
        &self,
        rows: u64,
        workspace: u64,
        most: u64,
    ) -> Result<Vec<lt::cublasLtMatmulAlgo_t>, CudaError> {
        let Description { handle, operation, w, x, y, .. } = self.description;
        self.description.set_launch(&Operands { rows, ..self.operands })?;
        let preference = Preference::new(self.description, self.form, workspace)?;
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
        Ok(offered.map(|found| found.algorithm).filter(|found| self.admits_algorithm(found, most)).collect())
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

    /// Whether a candidate has the canonical bits, as far as operands that reveal other orders tell, at the step's rows and at
    /// fewer. `digests` keeps the canonical kernel's.
    fn equals(
        &mut self,
        candidate: &Choice,
        canonical: &Choice,
        digests: &mut BTreeMap<u64, u64>,
    ) -> Result<bool, CudaError> {
        let full = self.operands.rows;
        let all: Vec<u64> = [full, full / 2, full - 1]
            .into_iter()
            .chain(ROWS)
            .filter(|&rows| rows > 0 && rows <= full)
            .collect();
        let (mut compared, mut group) = (0, 0);
        let modes: Vec<usize> = (0..MODES).collect();
        while compared < OUTPUTS || group < all.len() as u64 {
            // Once few rows had their turn, the step's alone: they have the most outputs.
            let rows = all.get(group as usize).copied().unwrap_or(full);
            let expected = match digests.get(&group) {
                Some(&known) => known,
                None => {
                    let digest = self.digest_of(canonical, group, rows, &modes)?;
                    digests.insert(group, digest);
                    digest
                }
            };
            if self.digest_of(candidate, group, rows, &modes)? != expected {
                return Ok(false);
            }
            compared += MODES as u64 * rows * self.form.n;
            group += 1;
        }
        Ok(true)
    }

    /// An error unless a pinned algorithm gives the first rows the same bits among any number of rows: its attributes do not
    /// tell of algorithms that deal the last tiles out along k.
    fn check_invariant(&mut self, pinned: &Choice) -> Result<(), CudaError> {
        let full = self.operands.rows;
        self.prepare(&[*pinned])?;
        let fewer = [full / 2, full - 1].into_iter().chain(ROWS).filter(|&rows| rows > 0 && rows < full);
        for rows in fewer {
            let [whole, part] = [full, rows].map(|given| self.digest_of_first(pinned, 1, given, rows));
            if whole? != part? {
                let form = self.form;
                let what = format!(
                    "the product {form}: cuBLASLt's algorithm for it gives rows other bits among {rows} rows than among \
                     {full}, so --tokens would change results; take another --precision or version of cuBLASLt"
                );
                return Err(CudaError::Unprepared { what });
            }
        }
        self.poison_all()
    }

    /// A digest of the outputs of some rows on operands of some modes; another group has other operands.
    fn digest_of(&mut self, choice: &Choice, group: u64, rows: u64, modes: &[usize]) -> Result<u64, CudaError> {
        let mut digest = 0u64;
        for &mode in modes {
            let seed = group as usize * MODES + mode;
            digest = digest.rotate_left(7) ^ self.digest_of_first(choice, seed, rows, rows)?;
        }
        Ok(digest)
    }

    /// A digest of the first of some rows.
    fn digest_of_first(
        &mut self,
        choice: &Choice,
        seed: usize,
        rows: u64,
        first: u64,
    ) -> Result<u64, CudaError> {
        let (api, stream) = (self.context.api, self.context.stream);
        let operands = Operands { rows, ..self.operands };
        let kernel = self.form.kernel("digest");
        self.kernels.prepare(self.context, &kernel, 0)?;
        self.reveal(&operands, seed)?;
        self.run(choice, &operands)?;
        // The algorithm is done with the workspace, which is at least as large as the sum.
        let sum = operands.workspace.0;
        // SAFETY: the eight bytes are the workspace's.
        api.check("cuMemsetD8Async", unsafe { (api.cuMemsetD8Async)(sum, 0, size_of::<u64>(), stream) })?;
        let count = first * self.form.n;
        let shape = Shape::of(count.div_ceil(256).min(4096), 256);
        self.kernels.call(
            self.context,
            &kernel,
            shape,
            &[Arg::pointer(operands.y), Arg::long(count), Arg::pointer(sum)],
        )?;
        let mut found = [0u8; size_of::<u64>()];
        // SAFETY: the eight bytes are the workspace's, and the stream is waited for below.
        let code = unsafe { (api.cuMemcpyDtoHAsync_v2)(found.as_mut_ptr().cast(), sum, found.len(), stream) };
        api.check("cuMemcpyDtoHAsync", code)?;
        self.context.synchronize()?;
        Ok(u64::from_le_bytes(found))
    }

    /// Fills the operands with numbers that reveal other orders of sums, and poisons y.
    fn reveal(&mut self, operands: &Operands, seed: usize) -> Result<(), CudaError> {
        let Form { n, k, .. } = self.form;
        self.poison((operands.y, operands.rows * n, self.form.out()))?;
        for (i, (address, elements, dtype)) in self.extents_of(operands).into_iter().enumerate() {
            if address == operands.y && address != operands.residual {
                continue;
            }
            let kernel = Form { dtype, ..self.form }.kernel("revealing");
            self.kernels.prepare(self.context, &kernel, 0)?;
            let shape = Shape::of(elements.div_ceil(256).min(8192), 256);
            let (role, columns) = if i < 2 { (i, k) } else { (2, n) };
            let args =
                [Arg::pointer(address), Arg::long(elements), Arg::int(columns), Arg::int(seed), Arg::int(role)];
            self.kernels.call(self.context, &kernel, shape, &args)?;
        }
        Ok(())
    }

    fn extents(&self) -> Vec<Extent> {
        self.extents_of(&self.operands)
    }

    /// Every operand of the form with its elements and their type, x and w first.
    fn extents_of(&self, operands: &Operands) -> Vec<Extent> {
        let (form @ Form { n, k, dtype, .. }, out) = (self.form, self.form.out());
        let &Operands { x, w, scales, bias, residual, norm, y, rows, .. } = operands;
        let scales = if form.scaled() { scales } else { (0, 0) };
        let params = form.norm.unwrap_or(DType::F32);
        let operands = [
            (x, rows * k, dtype),
            (w, form.outputs() * k, dtype),
            (bias, if form.gate() { 2 * n } else { n }, out),
            (y, rows * n, out),
            (residual, rows * n, out),
            (scales.0, rows, DType::F32),
            (scales.1, n, DType::F32),
            (norm.gamma, k, params),
            (norm.beta, k, params),
        ];
        operands.into_iter().filter(|(address, ..)| *address != 0).collect()
    }

    fn noise_all(&mut self) -> Result<(), CudaError> {
        self.extents().into_iter().enumerate().try_for_each(|(seed, extent)| self.noise(extent, seed))
    }

    fn poison_all(&self) -> Result<(), CudaError> {
        self.extents().into_iter().try_for_each(|extent| self.poison(extent))
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
