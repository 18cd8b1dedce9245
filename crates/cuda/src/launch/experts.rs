//! Mixture of experts: routing, dispatch, and the matmuls of all experts. Invariant: how many rows an expert has is known
//! in device memory only; grids are sized for the worst case, and blocks without work return at once.

use super::{DeviceTensor, OpLaunch, gradients};
use crate::kernel::{Arg, Kernel, KernelFile, LaunchShape, int, kernel_arguments};
use crate::row_kernels::row_width;
use plimsoll_exec::DeviceError;
use plimsoll_graph::ops::{
    Combine, CombineGrad, Dispatch, DispatchGrad, GroupedLinear, GroupedLinearInputGrad,
    GroupedLinearWeightGrad, Route, RouteGrad, RouterLoss, RouterLossGrad,
};
use plimsoll_graph::{Bytes, Counts, DType};
use plimsoll_plan::{
    MAX_EXPERTS, ROUTE_CHUNK, ROUTER_LOSS_CHUNK, route_bytes, router_loss_bytes, router_loss_grad_bytes,
};

/// Warps of a block; each warp processes a token or a row.
const WARPS: u64 = 8;
/// Threads of a block.
const THREADS: u32 = 32 * WARPS as u32;
/// Threads of the block that adds the sums of all chunks.
const MANY_THREADS: u32 = 1024;

kernel_arguments! {
    /// Arguments of `combine` (dispatch.cu).
    struct CombineArgs {
        rows: u64,
        gates: u64,
        places: u64,
        y: u64,
        status: u64,
        tokens: u64,
        columns: i32,
    }
    size 56, last 48
}

kernel_arguments! {
    /// Arguments of `combine_grad` (dispatch.cu).
    struct CombineGradArgs {
        dy: u64,
        rows: u64,
        gates: u64,
        order: u64,
        places: u64,
        drows: u64,
        dgates: u64,
        status: u64,
        choices: u64,
        columns: i32,
    }
    size 80, last 72
}

pub(super) fn combine(call: &mut OpLaunch<'_>, op: &Combine) -> Result<(), DeviceError> {
    let rows = call.input(0)?;
    let y = call.output(0)?;
    let args = CombineArgs {
        rows: rows.address,
        gates: call.input(1)?.address,
        places: call.input(3)?.address,
        y: y.address,
        status: call.status(),
        tokens: y.rows,
        columns: int(y.columns),
    };
    let kernel = rows_kernel("combine", rows.dtype, y.columns, op.top_k);
    call.kernel(&kernel, by_warp(y.rows), &args)
}

pub(super) fn combine_grad(call: &mut OpLaunch<'_>, op: &CombineGrad) -> Result<(), DeviceError> {
    let dy = call.input(0)?;
    let rows = call.input(1)?;
    one_type(call, &[Some(dy), Some(rows)])?;
    let args = CombineGradArgs {
        dy: dy.address,
        rows: rows.address,
        gates: call.input(2)?.address,
        order: call.input(3)?.address,
        places: call.input(4)?.address,
        drows: address_if(call.output_if(0)?),
        dgates: address_if(call.output_if(1)?),
        status: call.status(),
        choices: rows.rows,
        columns: int(rows.columns),
    };
    let kernel = rows_kernel("combine_grad", rows.dtype, rows.columns, op.top_k);
    call.kernel(&kernel, by_warp(rows.rows), &args)
}

pub(super) fn dispatch(call: &mut OpLaunch<'_>, op: &Dispatch) -> Result<(), DeviceError> {
    let x = call.input(0)?;
    let order = call.input(1)?;
    let rows = call.output(0)?;
    let args = [
        x.pointer(),
        order.pointer(),
        rows.pointer(),
        Arg::pointer(call.status()),
        Arg::long(rows.rows),
        Arg::int(rows.columns),
    ];
    let kernel = rows_kernel("dispatch", rows.dtype, rows.columns, op.top_k);
    call.kernel(&kernel, by_warp(rows.rows), &args)
}

pub(super) fn dispatch_grad(call: &mut OpLaunch<'_>, op: &DispatchGrad) -> Result<(), DeviceError> {
    let drows = call.input(0)?;
    let places = call.input(1)?;
    let dx = call.output(0)?;
    let args = [
        drows.pointer(),
        places.pointer(),
        dx.pointer(),
        Arg::pointer(call.status()),
        Arg::long(dx.rows),
        Arg::int(dx.columns),
    ];
    let kernel = rows_kernel("dispatch_grad", drows.dtype, dx.columns, op.top_k);
    call.kernel(&kernel, by_warp(dx.rows), &args)
}

/// Returns a kernel on rows of `columns`, with the widest possible memory access.
fn rows_kernel(entry: &'static str, dtype: DType, columns: u64, top_k: u32) -> Kernel {
    let kernel =
        Kernel::new(KernelFile::Dispatch, entry, dtype).with("WIDTH", row_width(dtype, columns) as i64);
    kernel.with("TOP_K", i64::from(top_k))
}

/// Returns a grid with a warp for each of `rows` rows.
fn by_warp(rows: u64) -> LaunchShape {
    LaunchShape::of(rows.div_ceil(WARPS), THREADS)
}

/// Operation of a grouped matmul, in the order of the values of `FORM` in `grouped.cu`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum GroupedForm {
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

/// The kernel of a grouped matmul, and its launch configuration.
struct GroupedKernel {
    kernel: Kernel,
    /// Rows and columns of a block's tile.
    tile: u64,
    threads: u32,
    shared: u32,
}

/// Returns the kernel of a grouped matmul of experts (N, K).
fn grouped_kernel(form: GroupedForm, dtype: DType, n: u64, k: u64) -> GroupedKernel {
    let number = match form {
        GroupedForm::Forward => 0,
        GroupedForm::InputGrad => 1,
        GroupedForm::WeightGrad => 2,
    };
    if dtype == DType::F32 || !n.is_multiple_of(8) || !k.is_multiple_of(8) {
        let kernel = Kernel::new(KernelFile::Grouped, "grouped", dtype).with("FORM", number);
        return GroupedKernel { kernel, tile: TILE, threads: 256, shared: 0 };
    }
    let kernel = Kernel::new(KernelFile::Grouped, "grouped_mma", dtype)
        .with("FORM", number)
        .with("BM", MMA_TILE as i64)
        .with("BN", MMA_TILE as i64)
        .with("ROW_WARPS", i64::from(MMA_WARPS.0))
        .with("COLUMN_WARPS", i64::from(MMA_WARPS.1))
        .with("STAGES", i64::from(MMA_STAGES));
    // A stage has 128 bytes of terms for each row and column of the tile.
    let shared = MMA_STAGES * 2 * MMA_TILE as u32 * 128;
    GroupedKernel { kernel, tile: MMA_TILE, threads: 32 * MMA_WARPS.0 * MMA_WARPS.1, shared }
}

kernel_arguments! {
    /// Arguments of `grouped` and `grouped_mma` (grouped.cu).
    struct GroupedArgs {
        a: u64,
        b: u64,
        bias: u64,
        y: u64,
        offsets: u64,
        status: u64,
        rows: i32,
        n: i32,
        k: i32,
        experts: i32,
    }
    size 64, last 60
}

/// A grouped matmul over the rows of `a`, with expert matrices (N, K).
struct GroupedMatmul {
    form: GroupedForm,
    a: DeviceTensor,
    b: DeviceTensor,
    bias: Option<DeviceTensor>,
    offsets: DeviceTensor,
    y: DeviceTensor,
    n: u64,
    k: u64,
    experts: u32,
}

impl GroupedMatmul {
    fn launch(&self, call: &mut OpLaunch<'_>) -> Result<(), DeviceError> {
        let &Self { form, a, b, bias, offsets, y, n, k, experts } = self;
        one_type(call, &[Some(a), Some(b), bias, Some(y)])?;
        let GroupedKernel { kernel, tile, threads, shared } = grouped_kernel(form, a.dtype, n, k);
        // Tiles of rows of one expert are at most one per `tile` rows and one more per expert; the rows behind the last
        // offset count as another expert (`group_of` in grouped.cu).
        let tiles = match form {
            GroupedForm::Forward => (a.rows / tile + u64::from(experts) + 1) * n.div_ceil(tile),
            GroupedForm::InputGrad => (a.rows / tile + u64::from(experts) + 1) * k.div_ceil(tile),
            GroupedForm::WeightGrad => u64::from(experts) * n.div_ceil(tile) * k.div_ceil(tile),
        };
        let args = GroupedArgs {
            a: a.address,
            b: b.address,
            bias: address_if(bias),
            y: y.address,
            offsets: offsets.address,
            status: call.status(),
            rows: int(a.rows),
            n: int(n),
            k: int(k),
            experts: int(experts),
        };
        call.kernel(&kernel, LaunchShape { shared, ..LaunchShape::of(tiles, threads) }, &args)
    }
}

pub(super) fn grouped_linear(call: &mut OpLaunch<'_>, op: &GroupedLinear) -> Result<(), DeviceError> {
    let a = call.input(0)?;
    let y = call.output(0)?;
    GroupedMatmul {
        form: GroupedForm::Forward,
        a,
        b: call.input(1)?,
        bias: op.bias.then(|| call.input(2)).transpose()?,
        offsets: call.input(2 + usize::from(op.bias))?,
        y,
        n: y.columns,
        k: a.columns,
        experts: op.experts,
    }
    .launch(call)
}

pub(super) fn grouped_input_grad(
    call: &mut OpLaunch<'_>,
    op: &GroupedLinearInputGrad,
) -> Result<(), DeviceError> {
    let a = call.input(0)?;
    let y = call.output(0)?;
    GroupedMatmul {
        form: GroupedForm::InputGrad,
        a,
        b: call.input(1)?,
        bias: None,
        offsets: call.input(2)?,
        y,
        n: a.columns,
        k: y.columns,
        experts: op.experts,
    }
    .launch(call)
}

pub(super) fn grouped_weight_grad(
    call: &mut OpLaunch<'_>,
    op: &GroupedLinearWeightGrad,
) -> Result<(), DeviceError> {
    let a = call.input(0)?;
    let b = call.input(1)?;
    let offsets = call.input(2)?;
    if let Some(y) = call.output_if(0)? {
        let matmul = GroupedMatmul {
            form: GroupedForm::WeightGrad,
            a,
            b,
            bias: None,
            offsets,
            y,
            n: a.columns,
            k: b.columns,
            experts: op.experts,
        };
        matmul.launch(call)?;
    }
    let Some(db) = call.output_if(1)? else { return Ok(()) };
    let kernel = column_sums_kernel(a.dtype, a.columns);
    let blocks = a.columns.div_ceil(32 * row_width(a.dtype, a.columns));
    let shape = LaunchShape { blocks: (op.experts, blocks as u32, 1), threads: THREADS, shared: 0 };
    let args = [
        a.pointer(),
        offsets.pointer(),
        db.pointer(),
        Arg::pointer(call.status()),
        Arg::int(a.rows),
        Arg::int(a.columns),
    ];
    call.kernel(&kernel, shape, &args)
}

fn column_sums_kernel(dtype: DType, columns: u64) -> Kernel {
    Kernel::new(KernelFile::Grouped, "column_sums", dtype).with("WIDTH", row_width(dtype, columns) as i64)
}

kernel_arguments! {
    /// Arguments of `choose` (route.cu).
    struct ChooseArgs {
        logits: u64,
        packs: u64,
        gates: u64,
        experts: u64,
        chosen: u64,
        counts: u64,
        status: u64,
        tokens: i32,
        top_k: i32,
        renormalise: i32,
        pack_count: i32,
    }
    size 72, last 68
}

kernel_arguments! {
    /// Arguments of `rank_chunks` (route.cu).
    struct RankChunksArgs {
        counts: u64,
        totals: u64,
        packs: u64,
        kept: u64,
        chunks: i32,
        tokens: i32,
        top_k: i32,
        pack_count: i32,
        capacity: u32,
    }
    size 56, last 48
}

kernel_arguments! {
    /// Arguments of `place` (route.cu).
    struct PlaceArgs {
        chosen: u64,
        ranks: u64,
        totals: u64,
        packs: u64,
        kept: u64,
        gates: u64,
        order: u64,
        places: u64,
        offsets: u64,
        dropped: u64,
        tokens: i32,
        top_k: i32,
        chunks: i32,
        pack_count: i32,
        capacity: u32,
    }
    size 104, last 96
}

kernel_arguments! {
    /// Arguments of `route_grad` (route.cu).
    struct RouteGradArgs {
        dgates: u64,
        logits: u64,
        experts: u64,
        places: u64,
        dlogits: u64,
        status: u64,
        tokens: i32,
        top_k: i32,
        renormalise: i32,
    }
    size 64, last 56
}

kernel_arguments! {
    /// Arguments of `router_sums` (route.cu).
    struct RouterSumsArgs {
        logits: u64,
        experts: u64,
        packs: u64,
        sums: u64,
        counts: u64,
        done: u64,
        status: u64,
        tokens: i32,
        top_k: i32,
        pack_count: i32,
    }
    size 72, last 64
}

kernel_arguments! {
    /// Arguments of `router_loss` (route.cu).
    struct RouterLossArgs {
        sums: u64,
        counts: u64,
        packs: u64,
        terms: u64,
        done: u64,
        loss: u64,
        balance: u64,
        z: u64,
        tokens: i32,
        top_k: i32,
        pack_count: i32,
        balance_weight: f32,
        z_weight: f32,
    }
    size 88, last 80
}

kernel_arguments! {
    /// Arguments of `count_choices` (route.cu).
    struct CountChoicesArgs {
        experts: u64,
        packs: u64,
        counts: u64,
        status: u64,
        tokens: i32,
        top_k: i32,
        pack_count: i32,
    }
    size 48, last 40
}

kernel_arguments! {
    /// Arguments of `router_loss_grad` (route.cu).
    struct RouterLossGradArgs {
        dloss: u64,
        logits: u64,
        shares: u64,
        packs: u64,
        dlogits: u64,
        tokens: i32,
        pack_count: i32,
        balance_weight: f32,
        z_weight: f32,
    }
    size 56, last 52
}

pub(super) fn route(call: &mut OpLaunch<'_>, op: &Route) -> Result<(), DeviceError> {
    let logits = call.input(0)?;
    let tokens = logits.rows;
    let experts = u64::from(op.experts);
    check_experts(call, experts)?;
    let packed = op.capacity > 0;
    let packs = packed.then(|| call.input(1)).transpose()?;
    let pack_count = packs.map_or(0, |packs| packs.rows);
    let workspace = route_bytes(counts(call, tokens, pack_count), experts, u64::from(op.top_k));
    let [chosen, counts, totals, kept] = gradients::parts(call, workspace.parts.map(Bytes))?;
    let chunks = workspace.chunks;
    let packs = address_if(packs);
    let gates = address_if(call.output_if(0)?);

    let args = ChooseArgs {
        logits: logits.address,
        packs,
        gates,
        experts: address_if(call.output_if(1)?),
        chosen,
        counts,
        status: call.status(),
        tokens: int(tokens),
        top_k: int(op.top_k),
        renormalise: i32::from(op.renormalise),
        pack_count: int(pack_count),
    };
    call.kernel(
        &route_kernel("choose", logits.dtype, experts, packed),
        LaunchShape::of(chunks, THREADS),
        &args,
    )?;
    let args = RankChunksArgs {
        counts,
        totals,
        packs,
        kept,
        chunks: int(chunks),
        tokens: int(tokens),
        top_k: int(op.top_k),
        pack_count: int(pack_count),
        capacity: op.capacity,
    };
    call.kernel(
        &route_kernel("rank_chunks", logits.dtype, experts, packed),
        LaunchShape::of(experts, THREADS),
        &args,
    )?;
    let args = PlaceArgs {
        chosen,
        ranks: counts,
        totals,
        packs,
        kept,
        gates,
        order: address_if(call.output_if(2)?),
        places: address_if(call.output_if(3)?),
        offsets: address_if(call.output_if(4)?),
        dropped: address_if(call.output_if(5)?),
        tokens: int(tokens),
        top_k: int(op.top_k),
        chunks: int(chunks),
        pack_count: int(pack_count),
        capacity: op.capacity,
    };
    // `rank_chunks` has replaced the counts by ranks. Without tokens, a block still writes the offsets.
    call.kernel(
        &route_kernel("place", logits.dtype, experts, packed),
        LaunchShape::of(chunks.max(1), THREADS),
        &args,
    )
}

pub(super) fn route_grad(call: &mut OpLaunch<'_>, op: &RouteGrad) -> Result<(), DeviceError> {
    let dgates = call.input(0)?;
    let logits = call.input(1)?;
    check_experts(call, logits.columns)?;
    let kernel = route_kernel("route_grad", logits.dtype, logits.columns, false);
    let args = RouteGradArgs {
        dgates: dgates.address,
        logits: logits.address,
        experts: call.input(2)?.address,
        places: call.input(3)?.address,
        dlogits: call.output(0)?.address,
        status: call.status(),
        tokens: int(logits.rows),
        top_k: int(dgates.columns),
        renormalise: i32::from(op.renormalise),
    };
    call.kernel(&kernel, by_warp(logits.rows), &args)
}

pub(super) fn router_loss(call: &mut OpLaunch<'_>, op: &RouterLoss) -> Result<(), DeviceError> {
    let logits = call.input(0)?;
    let experts = call.input(1)?;
    let packs = call.input(2)?;
    check_experts(call, logits.columns)?;
    let workspace = router_loss_bytes(counts(call, logits.rows, packs.rows), logits.columns);
    let [sums, counts, terms, done] = gradients::parts(call, workspace.parts.map(Bytes))?;

    let args = RouterSumsArgs {
        logits: logits.address,
        experts: experts.address,
        packs: packs.address,
        sums,
        counts,
        done,
        status: call.status(),
        tokens: int(logits.rows),
        top_k: int(experts.columns),
        pack_count: int(packs.rows),
    };
    call.kernel(
        &loss_kernel("router_sums", logits.dtype, logits.columns),
        LaunchShape::of(workspace.chunks.max(1), THREADS),
        &args,
    )?;
    let args = RouterLossArgs {
        sums,
        counts,
        packs: packs.address,
        terms,
        done,
        loss: address_if(call.output_if(0)?),
        balance: address_if(call.output_if(1)?),
        z: address_if(call.output_if(2)?),
        tokens: int(logits.rows),
        top_k: int(experts.columns),
        pack_count: int(packs.rows),
        balance_weight: op.balance,
        z_weight: op.z,
    };
    // Without packs, a block still writes the losses.
    call.kernel(
        &loss_kernel("router_loss", logits.dtype, logits.columns),
        LaunchShape::of(packs.rows.max(1), MANY_THREADS),
        &args,
    )
}

pub(super) fn router_loss_grad(call: &mut OpLaunch<'_>, op: &RouterLossGrad) -> Result<(), DeviceError> {
    let dloss = call.input(0)?;
    let logits = call.input(1)?;
    let experts = call.input(2)?;
    let packs = call.input(3)?;
    let dlogits = call.output(0)?;
    check_experts(call, logits.columns)?;
    let workspace = router_loss_grad_bytes(counts(call, logits.rows, packs.rows), logits.columns);
    let [counts, shares] = gradients::parts(call, workspace.parts.map(Bytes))?;

    let args = CountChoicesArgs {
        experts: experts.address,
        packs: packs.address,
        counts,
        status: call.status(),
        tokens: int(logits.rows),
        top_k: int(experts.columns),
        pack_count: int(packs.rows),
    };
    // Without chunks, a block still checks the packs.
    call.kernel(
        &loss_kernel("count_choices", logits.dtype, logits.columns),
        LaunchShape::of(workspace.chunks.max(1), THREADS),
        &args,
    )?;
    let args = [
        Arg::pointer(counts),
        packs.pointer(),
        Arg::pointer(shares),
        Arg::int(logits.rows),
        Arg::int(experts.columns),
    ];
    call.kernel(
        &loss_kernel("expert_shares", logits.dtype, logits.columns),
        LaunchShape::of(packs.rows, MANY_THREADS),
        &args,
    )?;
    let args = RouterLossGradArgs {
        dloss: dloss.address,
        logits: logits.address,
        shares,
        packs: packs.address,
        dlogits: dlogits.address,
        tokens: int(logits.rows),
        pack_count: int(packs.rows),
        balance_weight: op.balance,
        z_weight: op.z,
    };
    call.kernel(&loss_kernel("router_loss_grad", logits.dtype, logits.columns), by_warp(logits.rows), &args)
}

/// Sizes of a step of a router.
fn counts(call: &OpLaunch<'_>, tokens: u64, packs: u64) -> Counts {
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
    Kernel::new(KernelFile::Route, entry, dtype).with("EXPERTS", experts as i64).with("CHUNK", chunk as i64)
}

/// Checks that a router has at most [`MAX_EXPERTS`] experts; the kernel table checks this of [`Route`] only.
fn check_experts(call: &OpLaunch<'_>, experts: u64) -> Result<(), DeviceError> {
    if !(1..=u64::from(MAX_EXPERTS)).contains(&experts) {
        return Err(call.refused(format!("{experts} experts; GPUs route to 1 to {MAX_EXPERTS}")));
    }
    Ok(())
}

/// Address of a tensor, null if there is none.
fn address_if(tensor: Option<DeviceTensor>) -> u64 {
    tensor.map_or(0, |tensor| tensor.address)
}

/// Checks that all operands have the same element type.
fn one_type(call: &OpLaunch<'_>, operands: &[Option<DeviceTensor>]) -> Result<(), DeviceError> {
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
        for form in [GroupedForm::Forward, GroupedForm::InputGrad, GroupedForm::WeightGrad] {
            kernels.extend([(3072, 768), (33, 17)].map(|(n, k)| grouped_kernel(form, dtype, n, k).kernel));
        }
        kernels.extend([3072, 33].map(|columns| column_sums_kernel(dtype, columns)));
    }
    kernels.dedup();
    kernels
}
