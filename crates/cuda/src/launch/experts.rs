//! Mixture of experts: routing, dispatch, and the matmuls of all experts. Invariant: how many rows an expert has is known
//! in device memory only; grids are sized for the worst case, and blocks without work return at once.

use super::{Call, Tensor};
use crate::kernel::{Arg, File, Kernel, Shape};
use crate::row_kernels::row_width;
use plimsoll_exec::DeviceError;
use plimsoll_graph::ops::{
    Combine, CombineGrad, Dispatch, DispatchGrad, GroupedLinear, GroupedLinearInputGrad,
    GroupedLinearWeightGrad, Route, RouteGrad, RouterLoss, RouterLossGrad,
};
use plimsoll_graph::{Counts, DType};
use plimsoll_plan::{
    MAX_EXPERTS, ROUTE_CHUNK, ROUTER_LOSS_CHUNK, route_bytes, router_loss_bytes, router_loss_grad_bytes,
};

/// Warps of a block; each warp processes a token or a row.
const WARPS: u64 = 8;
/// Threads of a block.
const THREADS: u32 = 32 * WARPS as u32;
/// Threads of the block that adds the sums of all chunks.
const MANY_THREADS: u32 = 1024;

pub(super) fn combine(call: &mut Call<'_>, op: &Combine) -> Result<(), DeviceError> {
    let (rows, gates, places, y) = (call.input(0)?, call.input(1)?, call.input(3)?, call.output(0)?);
    let [rows_at, gates, places, y_at] = [rows, gates, places, y].map(|t| t.pointer());
    let args = [rows_at, gates, places, y_at, call.status(), Arg::long(y.rows), Arg::int(y.columns)];
    let kernel = rows_kernel("combine", rows.dtype, y.columns, op.top_k);
    call.kernel(&kernel, by_warp(y.rows), &args)
}

pub(super) fn combine_grad(call: &mut Call<'_>, op: &CombineGrad) -> Result<(), DeviceError> {
    let (dy, rows, gates) = (call.input(0)?, call.input(1)?, call.input(2)?);
    let (order, places) = (call.input(3)?, call.input(4)?);
    one_type(call, &[Some(dy), Some(rows)])?;
    let [drows, dgates] = [call.output_if(0)?, call.output_if(1)?].map(pointer_if);
    let (choices, columns) = (Arg::long(rows.rows), Arg::int(rows.columns));
    let kernel = rows_kernel("combine_grad", rows.dtype, rows.columns, op.top_k);
    let [dy, rows_at, gates, order, places] = [dy, rows, gates, order, places].map(|t| t.pointer());
    let args = [dy, rows_at, gates, order, places, drows, dgates, call.status(), choices, columns];
    call.kernel(&kernel, by_warp(rows.rows), &args)
}

pub(super) fn dispatch(call: &mut Call<'_>, op: &Dispatch) -> Result<(), DeviceError> {
    let (x, order, rows) = (call.input(0)?, call.input(1)?, call.output(0)?);
    let [x, order, rows_at] = [x, order, rows].map(|t| t.pointer());
    let args = [x, order, rows_at, call.status(), Arg::long(rows.rows), Arg::int(rows.columns)];
    let kernel = rows_kernel("dispatch", rows.dtype, rows.columns, op.top_k);
    call.kernel(&kernel, by_warp(rows.rows), &args)
}

pub(super) fn dispatch_grad(call: &mut Call<'_>, op: &DispatchGrad) -> Result<(), DeviceError> {
    let (drows, places, dx) = (call.input(0)?, call.input(1)?, call.output(0)?);
    let [drows_at, places, dx_at] = [drows, places, dx].map(|t| t.pointer());
    let args = [drows_at, places, dx_at, call.status(), Arg::long(dx.rows), Arg::int(dx.columns)];
    let kernel = rows_kernel("dispatch_grad", drows.dtype, dx.columns, op.top_k);
    call.kernel(&kernel, by_warp(dx.rows), &args)
}

/// Returns a kernel on rows of `columns`, with the widest possible memory access.
fn rows_kernel(entry: &'static str, dtype: DType, columns: u64, top_k: u32) -> Kernel {
    let kernel = Kernel::new(File::Dispatch, entry, dtype).with("WIDTH", row_width(dtype, columns) as i64);
    kernel.with("TOP_K", i64::from(top_k))
}

/// Returns a grid with a warp for each of `rows` rows.
fn by_warp(rows: u64) -> Shape {
    Shape::of(rows.div_ceil(WARPS), THREADS)
}

/// A grouped matmul: its output and sums, as `grouped.cu` numbers them.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    /// `y = x W_e^T + b_e`.
    Forward,
    /// `dx = dy W_e`.
    InputGrad,
    /// `dW_e = dy_e^T x_e`.
    WeightGrad,
}

/// Rows and columns of a tile of `grouped_mma`.
const MMA_TILE: u64 = 128;
/// Warps of `grouped_mma` along the rows, and along the columns.
const MMA_WARPS: (u32, u32) = (2, 4);
/// Pipeline stages of `grouped_mma` in shared memory; three of 32 KB are within the 99 KB of a block on compute
/// capability 8.6 and 8.9.
const MMA_STAGES: u32 = 3;
/// Rows and columns of a tile of `grouped`.
const TILE: u64 = 64;

/// Returns the kernel of a grouped matmul of experts (N, K), its tile, and the launch configuration of a block.
fn grouped_kernel(form: Form, dtype: DType, n: u64, k: u64) -> (Kernel, u64, Shape) {
    let number = match form {
        Form::Forward => 0,
        Form::InputGrad => 1,
        Form::WeightGrad => 2,
    };
    if dtype == DType::F32 || !n.is_multiple_of(8) || !k.is_multiple_of(8) {
        let kernel = Kernel::new(File::Grouped, "grouped", dtype).with("FORM", number);
        return (kernel, TILE, Shape::of(1, 256));
    }
    let kernel = Kernel::new(File::Grouped, "grouped_mma", dtype)
        .with("FORM", number)
        .with("BM", MMA_TILE as i64)
        .with("BN", MMA_TILE as i64)
        .with("ROW_WARPS", i64::from(MMA_WARPS.0))
        .with("COLUMN_WARPS", i64::from(MMA_WARPS.1))
        .with("STAGES", i64::from(MMA_STAGES));
    // A stage has 128 bytes of terms for each row and column of the tile.
    let shared = MMA_STAGES * 2 * MMA_TILE as u32 * 128;
    (kernel, MMA_TILE, Shape { shared, ..Shape::of(1, 32 * MMA_WARPS.0 * MMA_WARPS.1) })
}

/// A grouped matmul over `rows` rows, with expert matrices (N, K).
struct Grouped {
    form: Form,
    a: Tensor,
    b: Tensor,
    bias: Option<Tensor>,
    offsets: Tensor,
    y: Tensor,
    n: u64,
    k: u64,
    experts: u32,
}

impl Grouped {
    fn launch(&self, call: &mut Call<'_>) -> Result<(), DeviceError> {
        let &Self { form, a, b, bias, offsets, y, n, k, experts } = self;
        one_type(call, &[Some(a), Some(b), bias, Some(y)])?;
        let (kernel, tile, block) = grouped_kernel(form, a.dtype, n, k);
        // Tiles of rows of one expert are at most one per `tile` rows and one more per expert; the rows behind the last
        // offset count as another expert (`group_of` in grouped.cu).
        let tiles = match form {
            Form::Forward => (a.rows / tile + u64::from(experts) + 1) * n.div_ceil(tile),
            Form::InputGrad => (a.rows / tile + u64::from(experts) + 1) * k.div_ceil(tile),
            Form::WeightGrad => u64::from(experts) * n.div_ceil(tile) * k.div_ceil(tile),
        };
        let shape = Shape { blocks: Shape::of(tiles, block.threads).blocks, ..block };
        let [a_at, b_at, y_at, offsets] = [a, b, y, offsets].map(|t| t.pointer());
        let sizes = [Arg::int(a.rows), Arg::int(n), Arg::int(k), Arg::int(experts)];
        let [rows, n, k, experts] = sizes;
        let args = [a_at, b_at, pointer_if(bias), y_at, offsets, call.status(), rows, n, k, experts];
        call.kernel(&kernel, shape, &args)
    }
}

pub(super) fn grouped_linear(call: &mut Call<'_>, op: &GroupedLinear) -> Result<(), DeviceError> {
    let (a, b, y) = (call.input(0)?, call.input(1)?, call.output(0)?);
    let bias = op.bias.then(|| call.input(2)).transpose()?;
    let offsets = call.input(2 + usize::from(op.bias))?;
    let (n, k, experts) = (y.columns, a.columns, op.experts);
    Grouped { form: Form::Forward, a, b, bias, offsets, y, n, k, experts }.launch(call)
}

pub(super) fn grouped_input_grad(call: &mut Call<'_>, op: &GroupedLinearInputGrad) -> Result<(), DeviceError> {
    let (a, b, offsets, y) = (call.input(0)?, call.input(1)?, call.input(2)?, call.output(0)?);
    let (n, k, experts) = (a.columns, y.columns, op.experts);
    Grouped { form: Form::InputGrad, a, b, bias: None, offsets, y, n, k, experts }.launch(call)
}

pub(super) fn grouped_weight_grad(
    call: &mut Call<'_>,
    op: &GroupedLinearWeightGrad,
) -> Result<(), DeviceError> {
    let (a, b, offsets) = (call.input(0)?, call.input(1)?, call.input(2)?);
    if let Some(y) = call.output_if(0)? {
        let (n, k, experts) = (a.columns, b.columns, op.experts);
        Grouped { form: Form::WeightGrad, a, b, bias: None, offsets, y, n, k, experts }.launch(call)?;
    }
    let Some(db) = call.output_if(1)? else { return Ok(()) };
    let kernel = column_sums_kernel(a.dtype, a.columns);
    let blocks = a.columns.div_ceil(32 * row_width(a.dtype, a.columns));
    let shape = Shape { blocks: (op.experts, blocks as u32, 1), threads: THREADS, shared: 0 };
    let (rows, n) = (Arg::int(a.rows), Arg::int(a.columns));
    let args = [a.pointer(), offsets.pointer(), db.pointer(), call.status(), rows, n];
    call.kernel(&kernel, shape, &args)
}

fn column_sums_kernel(dtype: DType, columns: u64) -> Kernel {
    Kernel::new(File::Grouped, "column_sums", dtype).with("WIDTH", row_width(dtype, columns) as i64)
}

pub(super) fn route(call: &mut Call<'_>, op: &Route) -> Result<(), DeviceError> {
    let logits = call.input(0)?;
    let (tokens, experts, top_k) = (logits.rows, u64::from(op.experts), u64::from(op.top_k));
    check_experts(call, experts)?;
    let packed = op.capacity > 0;
    let packs = packed.then(|| call.input(1)).transpose()?;
    let pack_count = packs.map_or(0, |packs| packs.rows);
    let kernel = |entry| route_kernel(entry, logits.dtype, experts, packed);
    let workspace = route_bytes(counts(call, tokens, pack_count), experts, top_k);
    let [chosen, counts, totals, kept] = parts_of(call, workspace.parts)?.map(Arg::pointer);
    let chunks = workspace.chunks;
    let mut outs = [Arg::pointer(0); 6];
    for (i, out) in outs.iter_mut().enumerate() {
        *out = pointer_if(call.output_if(i)?);
    }
    let [gates, experts_at, order, places, offsets, dropped] = outs;
    let [t, k, c, p] = [tokens, top_k, chunks, pack_count].map(Arg::int);
    let renormalise = Arg::int(i32::from(op.renormalise));
    let packs = pointer_if(packs);
    let capacity = Arg::long(u64::from(op.capacity));

    let status = call.status();
    let args = [logits.pointer(), packs, gates, experts_at, chosen, counts, status, t, k, renormalise, p];
    call.kernel(&kernel("choose"), Shape::of(chunks, THREADS), &args)?;
    let args = [counts, totals, packs, kept, c, t, k, p, capacity];
    call.kernel(&kernel("rank_chunks"), Shape::of(experts, THREADS), &args)?;
    let args =
        [chosen, counts, totals, packs, kept, gates, order, places, offsets, dropped, t, k, c, p, capacity];
    // Without tokens, a block still writes the offsets.
    call.kernel(&kernel("place"), Shape::of(chunks.max(1), THREADS), &args)
}

pub(super) fn route_grad(call: &mut Call<'_>, op: &RouteGrad) -> Result<(), DeviceError> {
    let (dgates, logits, experts) = (call.input(0)?, call.input(1)?, call.input(2)?);
    let (places, dlogits) = (call.input(3)?, call.output(0)?);
    check_experts(call, logits.columns)?;
    let kernel = route_kernel("route_grad", logits.dtype, logits.columns, false);
    let sizes = [logits.rows, dgates.columns, u64::from(op.renormalise)].map(Arg::int);
    let [dgates, logits_at, experts, places, dlogits] =
        [dgates, logits, experts, places, dlogits].map(|t| t.pointer());
    let [tokens, top_k, renormalise] = sizes;
    let args = [dgates, logits_at, experts, places, dlogits, call.status(), tokens, top_k, renormalise];
    call.kernel(&kernel, by_warp(logits.rows), &args)
}

pub(super) fn router_loss(call: &mut Call<'_>, op: &RouterLoss) -> Result<(), DeviceError> {
    let logits = call.input(0)?;
    let experts = call.input(1)?;
    let packs = call.input(2)?;
    check_experts(call, logits.columns)?;
    let kernel = |entry| loss_kernel(entry, logits.dtype, logits.columns);
    let workspace = router_loss_bytes(counts(call, logits.rows, packs.rows), logits.columns);
    let [sums, counts, terms, done] = parts_of(call, workspace.parts)?.map(Arg::pointer);
    let [tokens, top_k, pack_count] = [logits.rows, experts.columns, packs.rows].map(Arg::int);
    let [logits, experts, packs_at] = [logits, experts, packs].map(|t| t.pointer());

    let args = [logits, experts, packs_at, sums, counts, done, call.status(), tokens, top_k, pack_count];
    call.kernel(&kernel("router_sums"), Shape::of(workspace.chunks.max(1), THREADS), &args)?;
    let [loss, balance, z] = [call.output_if(0)?, call.output_if(1)?, call.output_if(2)?].map(pointer_if);
    let [of_balance, of_z] = [op.balance, op.z].map(Arg::float);
    let args =
        [sums, counts, packs_at, terms, done, loss, balance, z, tokens, top_k, pack_count, of_balance, of_z];
    // Without packs, a block still writes the losses.
    call.kernel(&kernel("router_loss"), Shape::of(packs.rows.max(1), MANY_THREADS), &args)
}

pub(super) fn router_loss_grad(call: &mut Call<'_>, op: &RouterLossGrad) -> Result<(), DeviceError> {
    let (dloss, logits, experts) = (call.input(0)?, call.input(1)?, call.input(2)?);
    let packs = call.input(3)?;
    let dlogits = call.output(0)?;
    check_experts(call, logits.columns)?;
    let kernel = |entry| loss_kernel(entry, logits.dtype, logits.columns);
    let workspace = router_loss_grad_bytes(counts(call, logits.rows, packs.rows), logits.columns);
    let [counts, shares] = parts_of(call, workspace.parts)?.map(Arg::pointer);
    let [tokens, top_k, pack_count] = [logits.rows, experts.columns, packs.rows].map(Arg::int);
    let packs_at = packs.pointer();

    let args = [experts.pointer(), packs_at, counts, call.status(), tokens, top_k, pack_count];
    // Without chunks, a block still checks the packs.
    call.kernel(&kernel("count_choices"), Shape::of(workspace.chunks.max(1), THREADS), &args)?;
    let args = [counts, packs_at, shares, tokens, top_k];
    call.kernel(&kernel("expert_shares"), Shape::of(packs.rows, MANY_THREADS), &args)?;
    let (balance, z) = (Arg::float(op.balance), Arg::float(op.z));
    let [dloss, logits_at, dlogits] = [dloss, logits, dlogits].map(|t| t.pointer());
    let args = [dloss, logits_at, shares, packs_at, dlogits, tokens, pack_count, balance, z];
    call.kernel(&kernel("router_loss_grad"), by_warp(logits.rows), &args)
}

/// Sizes of a step of a router.
fn counts(call: &Call<'_>, tokens: u64, packs: u64) -> Counts {
    Counts { tokens, packs, ..call.launch.counts }
}

/// Returns a kernel of routing. In a `packed` kernel the tokens of a chunk are of one pack.
fn route_kernel(entry: &'static str, dtype: DType, experts: u64, packed: bool) -> Kernel {
    router_kernel(entry, dtype, experts, ROUTE_CHUNK).with("PACKED", i64::from(packed))
}

/// Returns a kernel of the router's losses, which are sums over the chunks of packs.
fn loss_kernel(entry: &'static str, dtype: DType, experts: u64) -> Kernel {
    router_kernel(entry, dtype, experts, ROUTER_LOSS_CHUNK).with("PACKED", 1)
}

fn router_kernel(entry: &'static str, dtype: DType, experts: u64, chunk: u64) -> Kernel {
    Kernel::new(File::Route, entry, dtype).with("EXPERTS", experts as i64).with("CHUNK", chunk as i64)
}

/// Checks that a router has at most [`MAX_EXPERTS`] experts; the kernel table checks this of [`Route`] only.
fn check_experts(call: &Call<'_>, experts: u64) -> Result<(), DeviceError> {
    match (1..=u64::from(MAX_EXPERTS)).contains(&experts) {
        true => Ok(()),
        false => Err(call.refused(format!("{experts} experts; GPUs route to 1 to {MAX_EXPERTS}"))),
    }
}

/// Addresses of the parts of the workspace, which follow one another. Fails if they do not fit.
fn parts_of<const N: usize>(call: &Call<'_>, sizes: [u64; N]) -> Result<[u64; N], DeviceError> {
    let (start, bytes) = call.workspace()?;
    let (mut parts, mut used) = ([0; N], 0);
    for (part, size) in parts.iter_mut().zip(sizes) {
        *part = start + used;
        used += size;
    }
    match used <= bytes.0 {
        true => Ok(parts),
        false => Err(call.refused(format!("its workspace has {} bytes, and it needs {used}", bytes.0))),
    }
}

/// Address of a tensor, null if there is none.
fn pointer_if(tensor: Option<Tensor>) -> Arg {
    Arg::pointer(tensor.map_or(0, |tensor| tensor.address))
}

/// Checks that all operands have the same element type.
fn one_type(call: &Call<'_>, operands: &[Option<Tensor>]) -> Result<(), DeviceError> {
    let mut dtypes = operands.iter().flatten().map(|operand| operand.dtype);
    let first = dtypes.next();
    match dtypes.find(|&dtype| Some(dtype) != first) {
        None => Ok(()),
        Some(other) => {
            let first = first.map_or("", DType::name);
            Err(call.refused(format!("operands must have one float type, not {first} and {}", other.name())))
        }
    }
}

pub(super) fn every_kernel() -> Vec<Kernel> {
    let mut kernels = vec![];
    for dtype in [DType::F32, DType::Bf16, DType::F16] {
        // One expert, one vector of a warp, several.
        for experts in [1, 33, 64, 256] {
            kernels.push(route_kernel("route_grad", dtype, experts, false));
            kernels.extend([false, true].map(|packed| route_kernel("choose", dtype, experts, packed)));
            let losses = ["router_sums", "router_loss_grad"];
            kernels.extend(losses.map(|entry| loss_kernel(entry, dtype, experts)));
            // Independent of the element type.
            if dtype == DType::F32 {
                for packed in [false, true] {
                    kernels.extend(["rank_chunks", "place"].map(|e| route_kernel(e, dtype, experts, packed)));
                }
                let losses = ["router_loss", "count_choices", "expert_shares"];
                kernels.extend(losses.map(|entry| loss_kernel(entry, dtype, experts)));
            }
        }
        // Aligned rows, and unaligned rows; one choice, and several.
        for (columns, top_k) in [(1280, 2), (33, 1), (1280, 8), (33, 17)] {
            let entries = ["dispatch", "dispatch_grad", "combine", "combine_grad"];
            kernels.extend(entries.map(|entry| rows_kernel(entry, dtype, columns, top_k)));
        }
        for form in [Form::Forward, Form::InputGrad, Form::WeightGrad] {
            kernels.extend([(3072, 768), (33, 17)].map(|(n, k)| grouped_kernel(form, dtype, n, k).0));
        }
        kernels.extend([3072, 33].map(|columns| column_sums_kernel(dtype, columns)));
    }
    kernels.dedup();
    kernels
}
