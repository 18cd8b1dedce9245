//! Attention. Invariant: the kernel is determined by the element type, the head and the GPU, for all sequences of a
//! run. The counts of a step only choose among variants of a kernel, which differ in speed and give the same bits.

use super::{DeviceTensor, OpLaunch};
use crate::capability::HOPPER;
use crate::context::Card;
use crate::kernel::{Kernel, KernelFile, LaunchShape, WithMaps, code, int, kernel_arguments};
use crate::tensor_map::tensor_map;
use plimsoll_exec::DeviceError;
use plimsoll_graph::ops::{Attention, Bias, Mask, Qkv};
use plimsoll_graph::{Counts, DType};
use plimsoll_plan::WIDEST_CUDA_HEAD;

/// Numbers of warps of a block in the variants of `attention.cu`.
const WARPS: [u32; 3] = [2, 4, 6];

/// A variant of `attention_hopper.cu`, for heads of 64 columns.
#[derive(Clone, Copy)]
struct HopperTiling {
    /// Warpgroups of a block.
    groups: u32,
    /// Tiles of 64 queries per warpgroup.
    m_tiles: u32,
    /// Stages of 64 keys.
    stages: u32,
    /// Blocks per multiprocessor.
    blocks: u32,
    /// Heads of a block: several share the search for the block's sequence.
    heads: u32,
}

/// Variants of `attention_hopper.cu`. A short sequence is computed by one block. Longer sequences use
/// `attention_persistent.cu`, which gives the same bits.
const HOPPER_TILINGS: [HopperTiling; 2] = [
    HopperTiling { groups: 1, m_tiles: 1, stages: 3, blocks: 4, heads: 4 },
    HopperTiling { groups: 1, m_tiles: 2, stages: 3, blocks: 3, heads: 2 },
];

/// A variant of `attention_persistent.cu`.
#[derive(Clone, Copy)]
struct PersistentTiling {
    /// Consumer warpgroups.
    groups: u32,
    /// Warpgroups that load and rotate.
    load_groups: u32,
    /// Tiles of 64 rows in shared memory.
    slots: u32,
}

/// Variants for heads of 64 columns. The second has registers for plain attention only (H200, 40 heads, 65 536 tokens in
/// sequences of 1 024 and 4 096: 1 612 and 6 052 us, against 1 820 and 6 623 for the first).
const PERSISTENT: [PersistentTiling; 2] = [
    PersistentTiling { groups: 3, load_groups: 2, slots: 25 },
    PersistentTiling { groups: 4, load_groups: 1, slots: 23 },
];
/// Variants for heads of 128 columns, for all lengths (H200, 20 heads, 65 536 tokens in sequences of 51, 168 and 4 096:
/// 507, 668 and 9 561 us, against 1 053, 1 027 and 12 664 of `attention_hopper.cu`).
const PERSISTENT_WIDE: [PersistentTiling; 1] = [PersistentTiling { groups: 2, load_groups: 2, slots: 12 }];

/// A variant of `attention_narrow.cu`.
#[derive(Clone, Copy)]
struct NarrowTiling {
    /// Consumer warps of a block.
    warps: u32,
    /// Warps that load and rotate.
    load_warps: u32,
    /// Tiles of 16 queries per consumer warp.
    m_tiles: u32,
    /// Keys of a slot.
    tile: u32,
    /// Slots.
    stages: u32,
    /// Blocks per multiprocessor.
    blocks: u32,
}

/// Variants for heads of 16 columns. (H200, 20 heads of 16, 24 and 32 columns, 16 300 tokens: in sequences of 168 38, 52 and
/// 52 us, of 51 30, 44 and 42 us, of 1 000 157, 197 and 200 us.)
const NARROW: [NarrowTiling; 2] = [
    NarrowTiling { warps: 2, load_warps: 1, m_tiles: 2, tile: 64, stages: 2, blocks: 6 },
    NarrowTiling { warps: 4, load_warps: 1, m_tiles: 3, tile: 176, stages: 2, blocks: 3 },
];
/// Variants for heads of more than 16 columns, for which the registers of a multiprocessor hold fewer warps.
const LESS_NARROW: [NarrowTiling; 2] = [
    NarrowTiling { warps: 2, load_warps: 2, m_tiles: 2, tile: 64, stages: 2, blocks: 4 },
    NarrowTiling { warps: 4, load_warps: 2, m_tiles: 3, tile: 176, stages: 2, blocks: 2 },
];

kernel_arguments! {
    /// Arguments of the attention kernels that read q, k and v by address (attention_args.cuh).
    struct AttentionArgs {
        q: u64,
        k: u64,
        v: u64,
        q_stride: u64,
        kv_stride: u64,
        spans: u64,
        sequences: i32,
        tokens: i32,
        cosines: u64,
        sines: u64,
        longest: i32,
        o: u64,
        lse: u64,
        heads: i32,
        group: i32,
        scale: f32,
        status: u64,
        heads_per_block: i32,
        span: i32,
        local: i32,
        global: i32,
    }
    size 136, last 132
}

kernel_arguments! {
    /// Arguments of `attention` (attention_persistent.cu) beside its tensor maps.
    struct AttentionMapArgs {
        k_column: i32,
        v_column: i32,
        spans: u64,
        sequences: i32,
        tokens: i32,
        cosines: u64,
        sines: u64,
        longest: i32,
        o: u64,
        lse: u64,
        heads: i32,
        group: i32,
        scale: f32,
        status: u64,
    }
    size 88, last 80
}

/// Prepares or runs the attention of one step.
pub(super) fn attention(call: &mut OpLaunch<'_>, op: &Attention) -> Result<(), DeviceError> {
    let operands = check(call, op)?;
    let capability = call.context.card.capability;
    // Blocks of queries belong to spans, of which a sequence of the step may have several.
    let counts = Counts { sequences: call.input(op.operands())?.rows, ..call.launch.counts };
    match operands.q.dtype {
        // Prepare every variant that any step may launch.
        DType::Bf16 | DType::F16 if call.preparing => AttentionVariant::all(op, capability)
            .try_for_each(|variant| variant.run(call, op, &operands, counts)),
        DType::Bf16 | DType::F16 => {
            AttentionVariant::for_counts(op, counts, capability).run(call, op, &operands, counts)
        }
        DType::F32 | DType::F8 | DType::I8 | DType::I32 | DType::U8 => {
            AttentionVariant::f32(op).run(call, op, &operands, counts)
        }
    }
}

/// The matrices of q, k and v; of a fused qkv, all three are the whole matrix.
#[derive(Clone, Copy)]
struct QkvTensors {
    q: DeviceTensor,
    k: DeviceTensor,
    v: DeviceTensor,
}

/// A variant of a kernel, with its launch parameters.
struct AttentionVariant {
    file: KernelFile,
    /// Constants that define the variant; none for f32. An array, since a step must not allocate.
    constants: [Option<(&'static str, u32)>; 6],
    /// Queries of a block.
    rows: u64,
    /// Heads of a block.
    heads: u32,
    threads: u32,
    shared: u32,
    /// Blocks per multiprocessor of a persistent kernel, whose blocks loop over items.
    resident: Option<u32>,
}

impl AttentionVariant {
    /// `attention_f32.cu`; shared memory holds queries, keys or values, and weights. For heads wider than 128 columns, a
    /// tile of 64 rows would need more shared memory than a block of compute capability 8.6, 8.9 or 12.0 may use.
    fn f32(op: &Attention) -> Self {
        let rows = if op.head_dim > 128 { 32 } else { 64 };
        // Words of 16 bytes of a row: an odd number, so that adjacent rows begin in different banks.
        let words = op.head_dim.div_ceil(4) | 1;
        Self {
            file: KernelFile::AttentionF32,
            constants: constants([("ROWS", rows)]),
            rows: u64::from(rows),
            heads: 1,
            threads: 256,
            shared: 2 * rows * words * 16 + rows * (rows + 4) * 4,
            resident: None,
        }
    }

    /// `attention.cu`; shared memory holds queries and the stages of keys and values. With small tiles, shared memory
    /// allows as many blocks as registers do (H200, d = 64, rotary, 2 warps, 51 tokens: 202 us, against 260 with three
    /// stages of 64 keys). Four stages of 32 keys gain 1 to 4 % with more warps, and spill. Heads wider than 64 were
    /// measured with two stages of 64 only. Of heads wider than 128, shared memory holds two stages of 32 keys.
    fn of_warps(op: &Attention, warps: u32) -> Self {
        let columns = op.head_dim.next_multiple_of(16);
        let (m_tiles, tile, stages) = match (columns, warps) {
            (129.., _) => (1, 32, 2),
            (65.., _) => (1, 64, 2),
            (_, 2) => (2, 32, 3),
            _ => (2, 32, 4),
        };
        let rows = warps * m_tiles * 16;
        Self {
            file: KernelFile::Attention,
            constants: constants([("WARPS", warps), ("MT", m_tiles), ("TILE", tile), ("STAGES", stages)]),
            rows: u64::from(rows),
            heads: 1,
            threads: warps * 32,
            shared: (rows + stages * 2 * tile) * (columns + 8) * 2,
            resident: None,
        }
    }

    /// `attention_hopper.cu`; shared memory holds queries and the stages of keys and values, 64 rows each. With ALiBi
    /// there are no registers for a fourth block.
    fn hopper(op: &Attention, tiling: HopperTiling) -> Self {
        let HopperTiling { groups, m_tiles, stages, blocks, heads } = tiling;
        let blocks = if op.bias == Bias::Alibi { blocks.min(3) } else { blocks };
        let rows = groups * m_tiles * 64;
        Self {
            file: KernelFile::AttentionHopper,
            constants: constants([("GROUPS", groups), ("MT", m_tiles), ("STAGES", stages), ("BLOCKS", blocks)]),
            rows: u64::from(rows),
            heads,
            threads: groups * 128,
            shared: (rows + stages * 2 * 64) * op.head_dim * 2,
            resident: None,
        }
    }

    /// `attention_persistent.cu`; shared memory holds tiles, each with three barriers and a 32-byte item, and output
    /// staging.
    fn persistent(op: &Attention, tiling: PersistentTiling) -> Self {
        let PersistentTiling { groups, load_groups, slots } = tiling;
        Self {
            file: KernelFile::AttentionPersistent,
            constants: constants([("GROUPS", groups), ("LOAD_GROUPS", load_groups), ("SLOTS", slots)]),
            rows: u64::from(groups * 64),
            heads: 1,
            threads: (groups + load_groups) * 128,
            shared: (slots + groups) * 64 * op.head_dim * 2 + slots.next_multiple_of(2) * (3 * 8 + 32),
            resident: Some(1),
        }
    }

    /// `attention_narrow.cu`; shared memory holds the queries of two items, each with the item and a barrier, and the
    /// stages of keys and values, each with two barriers.
    fn narrow(op: &Attention, tiling: NarrowTiling) -> Self {
        let NarrowTiling { warps, load_warps, m_tiles, tile, stages, blocks } = tiling;
        let rows = warps * m_tiles * 16;
        Self {
            file: KernelFile::AttentionNarrow,
            constants: constants([
                ("WARPS", warps),
                ("LOAD_WARPS", load_warps),
                ("MT", m_tiles),
                ("TILE", tile),
                ("STAGES", stages),
                ("BLOCKS", blocks),
            ]),
            rows: u64::from(rows),
            heads: 1,
            threads: (warps + load_warps) * 32,
            shared: (rows + stages * tile) * 2 * op.head_dim * 2 + 2 * (16 + 8) + stages * 2 * 8,
            resident: Some(blocks),
        }
    }

    /// Prepares or launches this variant for a step with the given counts.
    fn run(
        &self,
        call: &mut OpLaunch<'_>,
        op: &Attention,
        operands: &QkvTensors,
        counts: Counts,
    ) -> Result<(), DeviceError> {
        let QkvTensors { q, k, v } = *operands;
        // An upper bound without reading the spans, which are in device memory: a sequence of n tokens has at most n / rows
        // + 1 blocks. The kernels return at once for block numbers that no sequence uses (`block_of` in attention.cuh).
        let blocks = (counts.tokens / self.rows + counts.sequences) * u64::from(op.heads.div_ceil(self.heads));
        let blocks = self.resident_blocks(&call.context.card).map_or(blocks, |limit| blocks.min(limit));
        let shape = LaunchShape { shared: self.shared, ..LaunchShape::of(blocks, self.threads) };
        let table = if op.rotary { call.input(op.operands() + 1)?.dtype } else { DType::F32 };
        let kernel = self.kernel(op, q.dtype, table);
        let args = arguments(call, op, operands, self.heads)?;
        if self.file != KernelFile::AttentionPersistent {
            return call.kernel(&kernel, shape, &args);
        }
        if q.rows == 0 {
            return Ok(()); // no tensor map can describe a tensor without rows
        }
        let context = call.context;
        let maps = [
            tensor_map(context, &q.matrix(), 64)?,
            tensor_map(context, &k.matrix(), 64)?,
            tensor_map(context, &v.matrix(), 64)?,
        ];
        let [k_column, v_column] = columns(op).map(int);
        let args = AttentionMapArgs {
            k_column,
            v_column,
            spans: args.spans,
            sequences: args.sequences,
            tokens: args.tokens,
            cosines: args.cosines,
            sines: args.sines,
            longest: args.longest,
            o: args.o,
            lse: args.lse,
            heads: args.heads,
            group: args.group,
            scale: args.scale,
            status: args.status,
        };
        call.kernel(&kernel, shape, &WithMaps { maps, args })
    }

    /// Number of blocks that the GPU runs at once, for a persistent kernel. A multiprocessor has 1 KiB more shared
    /// memory than a block may use, and reserves 1 KiB per block (CUDA programming guide, "Technical Specifications
    /// per Compute Capability").
    fn resident_blocks(&self, card: &Card) -> Option<u64> {
        let fit = (card.shared + 1024) / (self.shared + 1024);
        self.resident.map(|blocks| u64::from(blocks.min(fit.max(1)) * card.multiprocessors))
    }

    /// Whether `attention_narrow.cu` supports this op.
    fn is_narrow(op: &Attention) -> bool {
        let plain = op.mask == Mask::Full && op.bias == Bias::None && op.kv_heads == op.heads;
        plain && op.rotary && [16, 24, 32].contains(&op.head_dim)
    }

    /// The numbers of warps of a block in the variants of `attention.cu` for this op. For wide heads, the rows of more
    /// warps would not fit into the shared memory of a block of compute capability 8.6, 8.9 or 12.0, 99 KiB.
    fn warps(op: &Attention) -> &'static [u32] {
        match op.head_dim {
            241.. => &[2, 3],
            129.. => &[2, 4],
            _ => &WARPS,
        }
    }

    /// The variants of `attention_persistent.cu` for this op.
    fn persistent_variants(op: &Attention) -> &'static [PersistentTiling] {
        let plain = op.mask == Mask::Full && op.bias == Bias::None && !op.rotary;
        match op.head_dim {
            64 if plain => &PERSISTENT,
            64 => &PERSISTENT[..1],
            _ => &PERSISTENT_WIDE,
        }
    }

    /// The variants for short sequences by wgmma; `None` if wgmma is not used.
    fn hopper_variants(op: &Attention, capability: (u32, u32)) -> Option<&'static [HopperTiling]> {
        match op.head_dim {
            _ if is_sparse(op) => None,
            64 if capability == HOPPER => Some(&HOPPER_TILINGS),
            128 if capability == HOPPER => Some(&[]),
            _ => None,
        }
    }

    /// All 16-bit variants, which belong to one kernel; the last is for sequences longer than a block's queries.
    fn all(op: &Attention, capability: (u32, u32)) -> impl Iterator<Item = Self> {
        let hoppers = Self::hopper_variants(op, capability).filter(|_| !Self::is_narrow(op));
        let persistent_variants = if hoppers.is_some() { Self::persistent_variants(op) } else { &[] };
        let narrow = match op.head_dim {
            _ if !Self::is_narrow(op) => &[][..],
            16 => &NARROW,
            _ => &LESS_NARROW,
        };
        let warps = if hoppers.is_none() && narrow.is_empty() { Self::warps(op) } else { &[] };
        let hoppers = hoppers.into_iter().flatten().map(|&tiling| Self::hopper(op, tiling));
        let hoppers = hoppers.chain(persistent_variants.iter().map(|&tiling| Self::persistent(op, tiling)));
        let narrow = narrow.iter().map(|&tiling| Self::narrow(op, tiling));
        narrow.chain(hoppers).chain(warps.iter().map(|&warps| Self::of_warps(op, warps)))
    }

    /// Returns the variant with the smallest block that holds an average sequence, otherwise the fastest for long
    /// sequences. Six warps are faster for wide heads, and for d = 64 without ALiBi, which leaves registers for only
    /// one such block.
    fn for_counts(op: &Attention, counts: Counts, capability: (u32, u32)) -> Self {
        let average = counts.tokens / counts.sequences.max(1);
        if Self::is_narrow(op) || Self::hopper_variants(op, capability).is_some() {
            let last = Self::all(op, capability).count() - 1;
            let mut variants = Self::all(op, capability).enumerate();
            if let Some((_, variant)) = variants.find(|(i, variant)| *i == last || average <= variant.rows) {
                return variant;
            }
        }
        let all = Self::warps(op);
        // Number of variants for short sequences, and the variant for long ones.
        let (short, long) = match op.head_dim {
            65.. => (all.len(), all.len() - 1),
            49.. if op.bias == Bias::None => (3, 1),
            _ => (2, 1),
        };
        let mut variants = all[..short].iter().map(|&warps| Self::of_warps(op, warps));
        variants.find(|variant| average <= variant.rows).unwrap_or_else(|| Self::of_warps(op, all[long]))
    }

    fn kernel(&self, op: &Attention, dtype: DType, table: DType) -> Kernel {
        let kernel = Kernel::new(self.file, "attention", dtype)
            .with("HEAD_DIM", i64::from(op.head_dim))
            .with("TABLE", code(table));
        let kernel = if self.file == KernelFile::AttentionNarrow {
            kernel
        } else {
            kernel
                .with("ROTARY", i64::from(op.rotary))
                .with("ALIBI", i64::from(op.bias == Bias::Alibi))
                .with("CAUSAL", i64::from(op.mask != Mask::Full))
        };
        // Only the kernels of sparse masks have the constant, so that the others remain what they are in the caches.
        let kernel = if is_sparse(op) { kernel.with("MASK", mask_kind(op.mask)) } else { kernel };
        let constants = self.constants.iter().flatten();
        constants.fold(kernel, |kernel, &(name, value)| kernel.with(name, i64::from(value)))
    }
}

/// Pads a variant's constants with `None`.
fn constants<const N: usize>(some: [(&'static str, u32); N]) -> [Option<(&'static str, u32)>; 6] {
    std::array::from_fn(|i| some.get(i).copied())
}

/// Checks what the kernels rely on, and returns the matrices of q, k and v.
fn check(call: &OpLaunch<'_>, op: &Attention) -> Result<QkvTensors, DeviceError> {
    if op.head_dim > WIDEST_CUDA_HEAD {
        let dim = op.head_dim;
        return Err(call.refused(format!("a head of {dim} columns is wider than {WIDEST_CUDA_HEAD}")));
    }
    if !(op.scale.is_finite() && op.scale > 0.0) {
        return Err(call.refused(format!("the scale {} of the scores is not a positive number", op.scale)));
    }
    let [q, k, v] = match op.qkv {
        Qkv::Separate => [call.input(0)?, call.input(1)?, call.input(2)?],
        Qkv::Fused => [call.input(0)?; 3],
    };
    let dtype = call.output(0)?.dtype;
    if [q, k, v].iter().any(|x| x.dtype != dtype) {
        return Err(call.refused("q, k, v and o must be of one element type".to_owned()));
    }
    if op.rotary {
        let [cosines, sines] = [call.input(op.operands() + 1)?.dtype, call.input(op.operands() + 2)?.dtype];
        if cosines != sines {
            return Err(call.refused(format!("cosines are {cosines:?} and sines are {sines:?}")));
        }
    }
    Ok(QkvTensors { q, k, v })
}

/// Whether only `attention.cu` and `attention_f32.cu` have the mask: a sliding window or a block-sparse mask.
fn is_sparse(op: &Attention) -> bool {
    matches!(op.mask, Mask::Window(_) | Mask::BlockSparse { .. })
}

/// Number of a mask in the kernels' constants.
pub(super) fn mask_kind(mask: Mask) -> i64 {
    match mask {
        Mask::Full => 0,
        Mask::Causal => 1,
        Mask::Window(_) => 2,
        Mask::BlockSparse { .. } => 3,
    }
}

/// Size of a mask: keys of a window, or positions of a block with the numbers of local and global blocks. No position is
/// larger than an `int`, so a larger size admits the same pairs as the largest `int`.
pub(super) fn mask_extent(mask: Mask) -> [u32; 3] {
    let extent = match mask {
        Mask::Full | Mask::Causal => [0; 3],
        Mask::Window(width) => [width, 0, 0],
        Mask::BlockSparse { block, local, global } => [block, local, global],
    };
    extent.map(|n| n.min(i32::MAX as u32))
}

/// First columns of k and v in their matrices.
pub(super) fn columns(op: &Attention) -> [u64; 2] {
    match op.qkv {
        Qkv::Separate => [0, 0],
        Qkv::Fused => [op.width(), op.width() + op.kv_width()],
    }
}

/// Returns the arguments of the kernels that read by address, for blocks of `heads_per_block` heads.
fn arguments(
    call: &OpLaunch<'_>,
    op: &Attention,
    operands: &QkvTensors,
    heads_per_block: u32,
) -> Result<AttentionArgs, DeviceError> {
    let QkvTensors { q, k, v } = *operands;
    let size = if q.dtype == DType::F32 { 4 } else { 2 };
    let [k_column, v_column] = columns(op);
    let spans = call.input(op.operands())?;
    let mut cosines = DeviceTensor::NONE;
    let mut sines = DeviceTensor::NONE;
    if op.rotary {
        cosines = call.input(op.operands() + 1)?;
        sines = call.input(op.operands() + 2)?;
    }
    let [span, local, global] = mask_extent(op.mask).map(int);
    Ok(AttentionArgs {
        q: q.address,
        k: k.address + k_column * size,
        v: v.address + v_column * size,
        spans: spans.address,
        cosines: cosines.address,
        sines: sines.address,
        o: call.output(0)?.address,
        lse: call.output_if(1)?.unwrap_or(DeviceTensor::NONE).address,
        status: call.status(),
        q_stride: q.columns,
        kv_stride: k.columns,
        sequences: int(spans.rows),
        tokens: int(q.rows),
        longest: int(cosines.rows),
        heads: int(op.heads),
        group: int(op.heads / op.kv_heads),
        scale: op.scale,
        heads_per_block: int(heads_per_block),
        span,
        local,
        global,
    })
}

/// An op with 12 heads, for samples of kernels.
pub(super) fn sample_op(head_dim: u32, mask: Mask, bias: Bias, rotary: bool) -> Attention {
    Attention { heads: 12, kv_heads: 12, head_dim, scale: 1.0, mask, bias, rotary, qkv: Qkv::Fused }
}

/// Returns a sample of the kernels: every head dimension of the supported models, with their masks and biases.
pub(super) fn every_kernel() -> Vec<Kernel> {
    let op = sample_op;
    let mut ops: Vec<Attention> =
        [16, 20, 24, 32, 64, 128].map(|head_dim| op(head_dim, Mask::Full, Bias::None, true)).into();
    ops.push(op(64, Mask::Full, Bias::Alibi, false));
    ops.push(op(20, Mask::Full, Bias::None, false));
    ops.push(op(128, Mask::Causal, Bias::Alibi, true));
    for head_dim in [136, 160, 192, 256] {
        ops.push(op(head_dim, Mask::Full, Bias::None, true));
        ops.push(op(head_dim, Mask::Causal, Bias::Alibi, false));
    }
    for mask in [Mask::Window(100), Mask::BlockSparse { block: 64, local: 2, global: 1 }] {
        ops.push(op(32, mask, Bias::None, true));
        ops.push(op(64, mask, Bias::Alibi, true));
        ops.push(op(128, mask, Bias::None, true));
        ops.push(op(256, mask, Bias::Alibi, true));
    }
    let mut kernels = vec![];
    for op in &ops {
        let warps = AttentionVariant::warps(op);
        kernels.push(AttentionVariant::f32(op).kernel(op, DType::F32, DType::F32));
        kernels.push(AttentionVariant::of_warps(op, warps[warps.len() / 2]).kernel(op, DType::F16, DType::F32));
        for &warps in warps {
            kernels.push(AttentionVariant::of_warps(op, warps).kernel(op, DType::Bf16, DType::F32));
        }
        if AttentionVariant::is_narrow(op) || AttentionVariant::hopper_variants(op, HOPPER).is_some() {
            for dtype in [DType::Bf16, DType::F16] {
                let variants = AttentionVariant::all(op, HOPPER);
                kernels.extend(variants.map(|variant| variant.kernel(op, dtype, DType::F32)));
            }
        }
    }
    // 16-bit cosine and sine tables: no supported model has them, but a graph may.
    for op in [20, 64].map(|head_dim| op(head_dim, Mask::Full, Bias::None, true)) {
        for dtype in [DType::Bf16, DType::F16] {
            kernels.push(AttentionVariant::of_warps(&op, WARPS[1]).kernel(&op, dtype, dtype));
        }
        kernels.push(AttentionVariant::f32(&op).kernel(&op, DType::F32, DType::Bf16));
    }
    // Plain attention has a variant of its own. (`attention_hopper.cu` with four blocks spills a register for it.)
    let plain = op(64, Mask::Full, Bias::None, false);
    for dtype in [DType::Bf16, DType::F16] {
        let variant = AttentionVariant::persistent(&plain, PERSISTENT[1]);
        kernels.push(variant.kernel(&plain, dtype, DType::F32));
    }
    kernels
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Shared memory of a block of compute capability 8.6, 8.9 and 12.0, the smallest of the supported cards, without
    /// 64 bytes for the kernels' static variables.
    pub(in crate::launch) const SMALLEST_SHARED_MEMORY: u32 = (99 << 10) - 64;

    /// An op with heads of `head_dim` columns, whose variants are those of `attention.cu` in 16 bits.
    pub(in crate::launch) fn op(head_dim: u32) -> Attention {
        let op = sample_op(head_dim, Mask::Causal, Bias::None, false);
        Attention { heads: 2, kv_heads: 1, qkv: Qkv::Separate, ..op }
    }

    #[test]
    fn every_head_fits_into_the_shared_memory_of_every_card() {
        for op in (1..=WIDEST_CUDA_HEAD).map(op) {
            let forms = AttentionVariant::all(&op, (8, 9)).chain([AttentionVariant::f32(&op)]);
            let most = forms.map(|form| form.shared).max();
            assert!(
                most.is_some_and(|most| most <= SMALLEST_SHARED_MEMORY),
                "{} columns: {most:?}",
                op.head_dim
            );
        }
    }

    /// `prepare` compiles what `all` returns, so that a step may launch nothing else.
    #[test]
    fn every_count_chooses_a_prepared_variant() {
        for op in (1..=WIDEST_CUDA_HEAD).map(op) {
            let constants = |form: AttentionVariant| form.constants;
            let all: Vec<_> = AttentionVariant::all(&op, (8, 9)).map(constants).collect();
            for tokens in [1, 32, 33, 48, 49, 64, 65, 128, 129, 192, 193, 5000] {
                let counts = Counts { tokens, sequences: 1, packs: 1 };
                let chosen = constants(AttentionVariant::for_counts(&op, counts, (8, 9)));
                assert!(all.contains(&chosen), "{} columns, {tokens} tokens", op.head_dim);
            }
        }
    }
}
