//! Chooses the kernel that computes a matmul. Invariant: the bits of a matmul depend on the GPU model and the form
//! alone. Every form has one canonical summation order ([`SumOrder`]), computed by a kernel of ours or, for fp8, by one
//! pinned algorithm of cuBLASLt. Another algorithm is admitted only if it gave the same bits in at least [`OUTPUTS`]
//! outputs, for full steps and for few rows, on operands made to reveal other orders (`order_probe` of `matmul.cu`).
//! Timing therefore chooses only among kernels with equal results.
//!
//! Candidates are timed on noise, since multiplying zeros draws less power and runs faster.

use super::algorithms::AlgorithmLimits;
use super::description::Description;
use super::hopper::{TILES, WgmmaTile};
use super::mma::MMA_TILES;
use super::normed::{NORMED, Normed};
use super::{Choosing, GemmForm, GemmKernel, GemmOperands, LIBRARY, table};
use crate::CudaError;
use crate::api::Driver;
use crate::capability::HOPPER;
use crate::context::Context;
use crate::kernel::{Arg, LaunchShape};
use crate::loaded_kernels::LoadedKernels;
use cudarc::cublaslt::sys as lt;
use cudarc::driver::sys as cu;
use plimsoll_graph::DType;
use plimsoll_graph::ops::Epilogue;
use plimsoll_setting::Setting;
use std::collections::BTreeMap;
use std::ptr;

/// The canonical summation order of a form on a GPU, determined by the form and the compute capability. The bias is
/// added to the f32 sum, then GELU or the gate is applied, and the result is rounded. A residual is added to the
/// rounded result and the sum is rounded again, as separate layers do, and as the library does if the residual is in
/// y's place. Only [`SumOrder::Loops`] adds the residual before the bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SumOrder {
    /// `wgmma.cu`: wgmma instructions that each add 16 columns of k, in ascending order of k.
    Wgmma,
    /// `mma.cu`: `mma.sync` instructions that each add 16 columns of k (8 for TF32), in ascending order of k.
    Mma,
    /// `matmul.cu`: one f32 fused multiply-add for each column of k, in ascending order of k.
    Loops,
    /// The first algorithm of cuBLASLt's heuristic for [`PINNED_ROWS`] rows.
    Pinned,
}

impl SumOrder {
    /// Returns the order of a form on a GPU.
    pub(super) fn of(context: &Context, form: GemmForm) -> Self {
        match form.dtype {
            DType::F8 => Self::Pinned,
            DType::F32 if !form.tf32 => Self::Loops,
            // On Hopper, cuBLASLt's TF32 is more than twice as fast as `mma.sync`, but no kernel of ours reproduces
            // its bits.
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
                if TILES.iter().any(|tile| tile.suits(context, form)) { Self::Wgmma } else { Self::Mma }
            }
        }
    }
}

/// Description of the canonical orders, part of a run's arithmetic; must change whenever any order changes.
pub(super) const ORDERS: &str = "products 3 (16 bits: wgmma k16 on sm_90 for widths in multiples of 8, else mma.sync k16; f32: \
     fma; e4m3, and tf32 on sm_90 for widths in multiples of 4: cuBLASLt's first algorithm for 16384 rows; other tf32: mma.sync k8)";

/// Rows for which the library is asked for the pinned algorithm, whatever the step's rows.
const PINNED_ROWS: u64 = 16_384;
/// Bytes of workspace for which the library is asked for the pinned algorithm.
const PINNED_WORKSPACE: u64 = 32 << 20;

/// Number of outputs in which an algorithm is compared before it is admitted.
const OUTPUTS: u64 = 1 << 26;
/// With fewer outputs in a step, only our own kernels are used: comparing [`OUTPUTS`] outputs would take too many runs.
const MIN_OUTPUTS: u64 = 1 << 12;
/// Kinds of operands that `order_probe` makes; the kind is the seed modulo this number.
const MODES: usize = 4;

/// Runs before the timed runs.
const WARM: usize = 3;
/// Timed runs.
const RUNS: usize = 10;
/// Numbers of rows that an algorithm must support: all of them if pinned, otherwise those up to the step's rows.
const ROWS: [u64; 14] = [1, 2, 3, 8, 31, 32, 33, 64, 100, 128, 1000, 4096, 16_384, 65_536];

/// Timing and comparison of the candidates of one matmul, on the operands of a full step, which are overwritten.
pub(super) struct GemmTrial<'a> {
    pub(super) context: &'a Context,
    pub(super) kernels: &'a mut LoadedKernels,
    pub(super) description: &'a Description,
    pub(super) form: GemmForm,
    pub(super) operands: GemmOperands,
}

/// A kernel or algorithm for a matmul, with its time and its comparison with the canonical kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct GemmCandidate {
    /// Name, as listed by [`crate::CudaDevice::matmul_kernels`] and accepted by [`crate::CudaDevice::with_matmul`].
    pub name: String,
    /// Median time of a full step, in milliseconds.
    pub milliseconds: f32,
    /// Whether all compared outputs equal those of the canonical kernel; `None` for kernels of the canonical order
    /// itself.
    pub equal: Option<bool>,
    /// Whether the outputs of a full step equal the canonical ones, for each kind of operands: uniform, with wide
    /// exponents, and two kinds whose sums cancel.
    pub modes: [bool; MODES],
    /// Digest of these outputs: candidates with equal digests had equal bits.
    pub digest: u64,
}

impl GemmTrial<'_> {
    /// Returns the candidate that `choosing` selects. Fills the operands with NaN afterwards.
    pub(super) fn choose(&mut self, choosing: &Choosing) -> Result<GemmKernel, CudaError> {
        let own = self.own()?;
        if let GemmKernel::Library(_) = own[0] {
            self.check_invariant(&own[0])?;
        }
        match choosing {
            Choosing::First => Ok(own[0]),
            Choosing::Named(name) => self.named(name, &own),
            Choosing::Timed | Choosing::Surveyed => self.fastest(own),
        }
    }

    /// Prepares the kernels that [`Self::choose`] may run with `choosing`, and runs none.
    pub(super) fn collect(&mut self, choosing: &Choosing) -> Result<(), CudaError> {
        let own = self.own()?;
        let pinned = matches!(own[0], GemmKernel::Library(_));
        let timed = *choosing != Choosing::First;
        self.prepare(if timed { &own } else { &own[..1] })?;
        if !pinned && !timed {
            return Ok(());
        }
        self.kernels.prepare(self.context, &self.form.kernel("digest"), 0)?;
        for OperandExtent { dtype, .. } in self.extents() {
            let of = GemmForm { dtype, ..self.form };
            self.kernels.prepare(self.context, &of.kernel("order_probe"), 0)?;
            if timed {
                self.kernels.prepare(self.context, &of.kernel("noise"), 0)?;
            }
        }
        Ok(())
    }

    /// Returns the kernels of the form's canonical order, whose bits are equal by construction; the first is the
    /// default.
    pub(super) fn own(&self) -> Result<Vec<GemmKernel>, CudaError> {
        let form = self.form;
        if form.norm.is_some() {
            if !Normed::suits(self.context, form) {
                return Err(self.without_norms());
            }
            return Ok(NORMED.map(GemmKernel::Normed).to_vec());
        }
        let order = SumOrder::of(self.context, form);
        if form.by_k && order != SumOrder::Wgmma {
            // The other kernels would read w as (N, K).
            return Err(CudaError::Unprepared { what: format!("a matmul with w stored by k, {form}") });
        }
        Ok(match order {
            SumOrder::Wgmma => self.tiles().map(GemmKernel::Hopper).collect(),
            SumOrder::Mma => MMA_TILES.map(GemmKernel::Mma).to_vec(),
            SumOrder::Loops => vec![GemmKernel::Own],
            // For widths that cuBLASLt does not support, our kernel is the canonical one, at every number of rows.
            SumOrder::Pinned => match self.pinned()? {
                Some(algorithm) => vec![GemmKernel::Library(algorithm)],
                None if form.scaled() => vec![GemmKernel::Own],
                None => MMA_TILES.map(GemmKernel::Mma).to_vec(),
            },
        })
    }

    /// Returns the pinned algorithm of a form, a function of the form, the GPU and the library's version.
    fn pinned(&self) -> Result<Option<lt::cublasLtMatmulAlgo_t>, CudaError> {
        // Must support all numbers of rows: the pinned algorithm must not depend on the step.
        Ok(self.offered(PINNED_ROWS, PINNED_WORKSPACE, u64::MAX)?.into_iter().next())
    }

    /// Finds a choice by name: a tile, cuBLASLt's fastest algorithm ([`LIBRARY`]), or a name written by
    /// [`table::text`]. Falls back to the form's canonical kernel where the named one does not support the form.
    fn named(&mut self, name: &str, own: &[GemmKernel]) -> Result<GemmKernel, CudaError> {
        if name == LIBRARY {
            let candidates = self.algorithms()?;
            self.prepare(&candidates)?;
            self.noise_all()?;
            let fastest = self.by_time(&candidates).first().map(|(_, candidate)| *candidate);
            self.poison_all()?;
            return Ok(fastest.unwrap_or(own[0]));
        }
        // A kernel with a layer norm that was chosen by name is fused at every number of rows.
        if let (Some(_), Some(normed)) = (self.form.norm, Normed::named(name)) {
            return Ok(GemmKernel::Normed(Normed { few: 0, ..normed }));
        }
        let tile = own.iter().find(|choice| {
            let text = table::text(choice);
            text == name || text.split(' ').next_back() == Some(name)
        });
        let rounds_once = matches!(SumOrder::of(self.context, self.form), SumOrder::Wgmma | SumOrder::Mma);
        let by_mma = rounds_once && self.form.norm.is_none() && !self.form.by_k;
        if let Some(tile) = tile {
            return Ok(*tile);
        }
        Ok(match table::parse(name) {
            Some(choice @ GemmKernel::Library(_)) => choice,
            Some(choice @ GemmKernel::Mma(_)) if by_mma => choice,
            _ => own[0],
        })
    }

    /// Returns the fastest candidate that has the canonical bits.
    fn fastest(&mut self, own: Vec<GemmKernel>) -> Result<GemmKernel, CudaError> {
        let others = self.others()?;
        if own.len() == 1 && others.is_empty() {
            return Ok(own[0]);
        }
        self.prepare(&own)?;
        self.prepare(&others)?;
        self.noise_all()?;
        let own = self.by_time(&own);
        let others = self.by_time(&others);
        let &(best, mut chosen) =
            own.first().ok_or_else(|| CudaError::Unprepared { what: self.form.to_string() })?;
        let mut digests = BTreeMap::new();
        for (time, candidate) in others {
            // An algorithm slower than our fastest kernel needs no comparison; `others` is sorted by time.
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

    /// Times and compares every candidate; returns the fastest that is admitted, and all of them.
    pub(super) fn survey(&mut self) -> Result<(GemmKernel, Vec<GemmCandidate>), CudaError> {
        let own = self.own()?;
        let order = SumOrder::of(self.context, self.form);
        // Includes kernels of other orders, to compare the speed of the canonical order with the fastest possible.
        let mut others = if self.form.gate() || self.form.norm.is_some() { vec![] } else { self.algorithms()? };
        if order == SumOrder::Wgmma && self.form.norm.is_none() && !self.form.by_k {
            others.extend(MMA_TILES.map(GemmKernel::Mma));
        }
        if order == SumOrder::Mma {
            others.push(GemmKernel::Own);
        }
        self.prepare(&own)?;
        self.prepare(&others)?;
        self.noise_all()?;
        let own = self.by_time(&own);
        let others = self.by_time(&others);
        let &(_, canonical) =
            own.first().ok_or_else(|| CudaError::Unprepared { what: self.form.to_string() })?;
        let mut admitted = own.clone();
        let mut candidates: Vec<GemmCandidate> = own
            .iter()
            .map(|&(milliseconds, choice)| GemmCandidate {
                name: table::text(&choice),
                milliseconds,
                equal: None,
                modes: [true; MODES],
                digest: 0,
            })
            .collect();
        let mut digests = BTreeMap::new();
        let rows = self.operands.rows;
        for (milliseconds, choice) in others {
            let mut modes = [true; MODES];
            let mut digest = 0;
            for (mode, same) in modes.iter_mut().enumerate() {
                let expected = self.digest_of(&canonical, 0, rows, &[mode])?;
                let found = self.digest_of(&choice, 0, rows, &[mode])?;
                *same = found == expected;
                digest ^= found.rotate_left(mode as u32);
            }
            let equal = modes == [true; MODES] && self.equals(&choice, &canonical, &mut digests)?;
            let name = table::text(&choice);
            candidates.push(GemmCandidate { name, milliseconds, equal: Some(equal), modes, digest });
            admitted.extend(equal.then_some((milliseconds, choice)));
        }
        self.poison_all()?;
        let fastest = admitted.into_iter().min_by(|(a, _), (b, _)| a.total_cmp(b));
        Ok((fastest.map_or(canonical, |(_, choice)| choice), candidates))
    }

    /// Returns the library's algorithms that may have the canonical bits. The library has no gates or layer norms, and
    /// rounds results to 16 bits before our separate GELU, where the canonical kernels round only after it.
    fn others(&self) -> Result<Vec<GemmKernel>, CudaError> {
        let form = self.form;
        let rounded_twice = form.epilogue == Epilogue::Gelu && form.output_dtype() != DType::F32;
        let pinned = form.dtype == DType::F8;
        let few = self.operands.rows * form.n < MIN_OUTPUTS;
        if few || form.gate() || form.norm.is_some() || rounded_twice && !pinned {
            return Ok(vec![]);
        }
        self.algorithms()
    }

    fn prepare(&mut self, candidates: &[GemmKernel]) -> Result<(), CudaError> {
        candidates
            .iter()
            .try_for_each(|choice| choice.prepare(self.context, self.kernels, self.form, &self.operands))
    }

    /// Whether a choice from the table can be used again.
    pub(super) fn admits(&self, choice: &GemmKernel) -> bool {
        match choice {
            GemmKernel::Own | GemmKernel::Mma(_) => !self.form.by_k,
            GemmKernel::Hopper(tile) => tile.suits(self.context, self.form),
            GemmKernel::Normed(_) => Normed::suits(self.context, self.form),
            GemmKernel::Library(algorithm) => self.admits_algorithm(algorithm, self.operands.rows),
        }
    }

    fn tiles(&self) -> impl Iterator<Item = WgmmaTile> {
        TILES.into_iter().filter(|tile| tile.suits(self.context, self.form))
    }

    fn without_norms(&self) -> CudaError {
        CudaError::Unprepared { what: format!("a matmul with a layer norm in front of it, {}", self.form) }
    }

    /// Times the candidates and returns those that ran, the fastest first.
    fn by_time(&self, candidates: &[GemmKernel]) -> Vec<(f32, GemmKernel)> {
        let timed = candidates.iter().filter_map(|candidate| Some((self.time(candidate).ok()?, *candidate)));
        let mut timed: Vec<_> = timed.collect();
        timed.sort_by(|(a, _), (b, _)| a.total_cmp(b));
        timed
    }

    /// Whether an algorithm does not split sums along k and runs within our workspace, for the step's rows and for the
    /// numbers in [`ROWS`] up to `max_rows`.
    fn admits_algorithm(&self, algorithm: &lt::cublasLtMatmulAlgo_t, max_rows: u64) -> bool {
        use lt::cublasLtMatmulAlgoConfigAttributes_t as A;
        // Split counts of 0 and 1 both mean a single sum; the reduction scheme must be 0, none.
        let descriptors = &self.description.descriptors;
        let splits = descriptors.config(algorithm, A::CUBLASLT_ALGO_CONFIG_SPLITK_NUM);
        let reduction = descriptors.config(algorithm, A::CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME);
        if splits.is_none_or(|splits| splits > 1) || reduction != Some(0) {
            return false;
        }
        let mut rows = ROWS.into_iter().filter(|&rows| rows <= max_rows).chain([self.operands.rows]);
        rows.all(|rows| self.runs(algorithm, rows))
    }

    fn runs(&self, algorithm: &lt::cublasLtMatmulAlgo_t, rows: u64) -> bool {
        if self.description.set_launch(&GemmOperands { rows, ..self.operands }).is_err() {
            return false;
        }
        let needed = self.description.descriptors.workspace_of(algorithm);
        needed.is_some_and(|bytes| bytes <= self.operands.workspace.1)
    }

    /// Returns the algorithms that the library offers for this step and that may be admitted, in the library's order.
    fn algorithms(&self) -> Result<Vec<GemmKernel>, CudaError> {
        let rows = self.operands.rows;
        let offered = self.offered(rows, self.operands.workspace.1, rows)?;
        Ok(offered.into_iter().map(GemmKernel::Library).collect())
    }

    /// Returns the library's algorithms for `rows` rows that do not split sums and that run for the numbers in [`ROWS`]
    /// up to `max_rows`, in the library's order.
    fn offered(
        &self,
        rows: u64,
        workspace: u64,
        max_rows: u64,
    ) -> Result<Vec<lt::cublasLtMatmulAlgo_t>, CudaError> {
        self.description.set_launch(&GemmOperands { rows, ..self.operands })?;
        let implementations = match self.form.dtype {
            DType::F32 if self.form.tf32 => !0,
            // All implementations but those on tensor cores (cublasLt.h: bits 1 to 7), which would round f32 operands.
            DType::F32 => !0xfe_u64,
            DType::Bf16 | DType::F16 | DType::F8 | DType::I8 | DType::I32 | DType::U8 => !0,
        };
        // No reduction scheme: sums must not be split along k.
        let limits = AlgorithmLimits { workspace, reductions: 0, implementations, alignment: 256 };
        let proposed = self.description.descriptors.proposed(&limits)?;
        Ok(proposed.into_iter().filter(|found| self.admits_algorithm(found, max_rows)).collect())
    }

    fn run(&self, candidate: &GemmKernel, operands: &GemmOperands) -> Result<(), CudaError> {
        candidate.run(self.context, self.kernels, self.description, self.form, operands)
    }

    /// Returns the median time of [`RUNS`] runs, in milliseconds.
    fn time(&self, candidate: &GemmKernel) -> Result<f32, CudaError> {
        let context = self.context;
        let events: Vec<TimingEvent> =
            (0..=RUNS).map(|_| TimingEvent::new(context.api)).collect::<Result<_, _>>()?;
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

    /// Whether a candidate has the canonical bits on the operands of `order_probe`, at the step's rows and at fewer.
    /// `digests` caches the canonical kernel's digests by group.
    fn equals(
        &mut self,
        candidate: &GemmKernel,
        canonical: &GemmKernel,
        digests: &mut BTreeMap<u64, u64>,
    ) -> Result<bool, CudaError> {
        let full = self.operands.rows;
        let all: Vec<u64> = [full, full / 2, full - 1]
            .into_iter()
            .chain(ROWS)
            .filter(|&rows| rows > 0 && rows <= full)
            .collect();
        let mut compared = 0;
        let mut group = 0;
        let modes: Vec<usize> = (0..MODES).collect();
        while compared < OUTPUTS || group < all.len() as u64 {
            // After each smaller number of rows was compared once, compare full steps, which have the most outputs.
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

    /// Checks that a pinned algorithm gives the first rows the same bits for every total number of rows; an error
    /// otherwise. The attributes of an algorithm do not reveal stream-K schedules, which split the last tiles along k.
    fn check_invariant(&mut self, pinned: &GemmKernel) -> Result<(), CudaError> {
        let full = self.operands.rows;
        self.prepare(&[*pinned])?;
        let fewer = [full / 2, full - 1].into_iter().chain(ROWS).filter(|&rows| rows > 0 && rows < full);
        for rows in fewer {
            let among_all = self.digest_of_first(pinned, 1, full, rows)?;
            let among_few = self.digest_of_first(pinned, 1, rows, rows)?;
            if among_all != among_few {
                let form = self.form;
                let what = format!(
                    "the matmul {form}: cuBLASLt's algorithm for it gives rows other bits among {rows} rows than among \
                     {full}, so {} would change results; use another {} or version of cuBLASLt",
                    Setting::Tokens,
                    Setting::Precision
                );
                return Err(CudaError::Unprepared { what });
            }
        }
        self.poison_all()
    }

    /// Returns a digest of the outputs for `rows` rows on operands of the given kinds; each group has different
    /// operands.
    fn digest_of(
        &mut self,
        choice: &GemmKernel,
        group: u64,
        rows: u64,
        modes: &[usize],
    ) -> Result<u64, CudaError> {
        let mut digest = 0u64;
        for &mode in modes {
            let seed = group as usize * MODES + mode;
            digest = digest.rotate_left(7) ^ self.digest_of_first(choice, seed, rows, rows)?;
        }
        Ok(digest)
    }

    /// Returns a digest of the outputs of the `first` rows of a matmul with `rows` rows.
    fn digest_of_first(
        &mut self,
        choice: &GemmKernel,
        seed: usize,
        rows: u64,
        first: u64,
    ) -> Result<u64, CudaError> {
        let api = self.context.api;
        let stream = self.context.stream;
        let operands = GemmOperands { rows, ..self.operands };
        let kernel = self.form.kernel("digest");
        self.kernels.prepare(self.context, &kernel, 0)?;
        self.reveal(&operands, seed)?;
        self.run(choice, &operands)?;
        // The algorithm has finished with the workspace, which is large enough for the sum.
        let sum = operands.workspace.0;
        // SAFETY: the eight bytes lie in the workspace.
        api.check("cuMemsetD8Async", unsafe { (api.cuMemsetD8Async)(sum, 0, size_of::<u64>(), stream) })?;
        let count = first * self.form.n;
        let shape = LaunchShape::of(count.div_ceil(256).min(4096), 256);
        let args = [Arg::pointer(operands.y), Arg::long(count), Arg::pointer(sum)];
        self.kernels.call(self.context, &kernel, shape, &args)?;
        let mut found = [0u8; size_of::<u64>()];
        // SAFETY: the eight bytes lie in the workspace, and the streams are synchronised below.
        let code = unsafe { (api.cuMemcpyDtoHAsync_v2)(found.as_mut_ptr().cast(), sum, found.len(), stream) };
        api.check("cuMemcpyDtoHAsync", code)?;
        self.context.synchronize()?;
        Ok(u64::from_le_bytes(found))
    }

    /// Fills the operands with numbers whose sums depend on the summation order, and y with NaN.
    fn reveal(&mut self, operands: &GemmOperands, seed: usize) -> Result<(), CudaError> {
        let GemmForm { n, k, by_k, .. } = self.form;
        self.poison(OperandExtent {
            address: operands.y,
            elements: operands.rows * n,
            dtype: self.form.output_dtype(),
        })?;
        for (i, extent) in self.extents_of(operands).into_iter().enumerate() {
            let OperandExtent { address, elements, dtype } = extent;
            if address == operands.y && address != operands.residual {
                continue;
            }
            let kernel = GemmForm { dtype, ..self.form }.kernel("order_probe");
            self.kernels.prepare(self.context, &kernel, 0)?;
            let shape = LaunchShape::of(elements.div_ceil(256).min(8192), 256);
            let (role, columns) = match i {
                1 if by_k => (3, n),
                0 | 1 => (i, k),
                _ => (2, n),
            };
            let args =
                [Arg::pointer(address), Arg::long(elements), Arg::int(columns), Arg::int(seed), Arg::int(role)];
            self.kernels.call(self.context, &kernel, shape, &args)?;
        }
        Ok(())
    }

    fn extents(&self) -> Vec<OperandExtent> {
        self.extents_of(&self.operands)
    }

    /// Returns the address, number of elements and element type of each operand that the form has, x and w first.
    fn extents_of(&self, operands: &GemmOperands) -> Vec<OperandExtent> {
        let form = self.form;
        let GemmForm { n, k, dtype, .. } = form;
        let &GemmOperands { x, w, scales, bias, residual, norm, y, rows, .. } = operands;
        let (x_scales, w_scales) = if form.scaled() { scales } else { (0, 0) };
        let params = form.norm.unwrap_or(DType::F32);
        let extents = [
            OperandExtent { address: x, elements: rows * k, dtype },
            OperandExtent { address: w, elements: form.weight_rows() * k, dtype },
            OperandExtent { address: bias, elements: form.weight_rows(), dtype: form.output_dtype() },
            OperandExtent { address: y, elements: rows * n, dtype: form.output_dtype() },
            OperandExtent { address: residual, elements: rows * n, dtype: form.output_dtype() },
            OperandExtent { address: x_scales, elements: rows, dtype: DType::F32 },
            OperandExtent { address: w_scales, elements: n, dtype: DType::F32 },
            OperandExtent { address: norm.gamma, elements: k, dtype: params },
            OperandExtent { address: norm.beta, elements: k, dtype: params },
        ];
        extents.into_iter().filter(|extent| extent.address != 0).collect()
    }

    fn noise_all(&mut self) -> Result<(), CudaError> {
        self.extents().into_iter().enumerate().try_for_each(|(seed, extent)| self.noise(extent, seed))
    }

    fn poison_all(&self) -> Result<(), CudaError> {
        self.extents().into_iter().try_for_each(|extent| self.poison(extent))
    }

    /// Fills an operand with pseudo-random numbers.
    fn noise(&mut self, extent: OperandExtent, seed: usize) -> Result<(), CudaError> {
        let OperandExtent { address, elements, dtype } = extent;
        let kernel = GemmForm { dtype, ..self.form }.kernel("noise");
        self.kernels.prepare(self.context, &kernel, 0)?;
        let shape = LaunchShape::of(elements.div_ceil(256).min(8192), 256);
        let args = [Arg::pointer(address), Arg::long(elements), Arg::int(seed)];
        self.kernels.call(self.context, &kernel, shape, &args)
    }

    /// Fills an operand with NaN, as the executor fills memory that has not been written.
    fn poison(&self, extent: OperandExtent) -> Result<(), CudaError> {
        let api = self.context.api;
        let bytes = (extent.elements * extent.dtype.size()) as usize;
        // SAFETY: the range is one of the operands.
        let code = unsafe { (api.cuMemsetD8Async)(extent.address, 0xFF, bytes, self.context.stream) };
        api.check("cuMemsetD8Async", code)
    }
}

/// The memory of an operand.
#[derive(Clone, Copy)]
struct OperandExtent {
    address: u64,
    elements: u64,
    dtype: DType,
}

/// A timing event.
struct TimingEvent {
    api: &'static Driver,
    raw: cu::CUevent,
}

impl TimingEvent {
    fn new(api: &'static Driver) -> Result<Self, CudaError> {
        let mut made = Self { api, raw: ptr::null_mut() };
        // SAFETY: the pointer is to a field of a local.
        api.check("cuEventCreate", unsafe { (api.cuEventCreate)(&mut made.raw, 0) })?;
        Ok(made)
    }

    fn record(&self, context: &Context) -> Result<(), CudaError> {
        // SAFETY: the event and the stream are alive.
        self.api.check("cuEventRecord", unsafe { (self.api.cuEventRecord)(self.raw, context.stream) })
    }

    /// Elapsed milliseconds from `before` to this event; both must have completed.
    fn since(&self, before: &Self) -> Result<f32, CudaError> {
        let mut milliseconds = 0.0;
        // SAFETY: the pointer is to a local.
        let code = unsafe { (self.api.cuEventElapsedTime)(&mut milliseconds, before.raw, self.raw) };
        self.api.check("cuEventElapsedTime", code)?;
        Ok(milliseconds)
    }
}

impl Drop for TimingEvent {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: the event is owned, and the driver keeps it while it is needed.
            unsafe { (self.api.cuEventDestroy_v2)(self.raw) };
        }
    }
}
