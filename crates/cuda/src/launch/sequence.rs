//! Ops on sequences and positions: embedding, rotary tables, means over sequences, row selection. Invariant: ids, rows
//! and spans are in device memory, so their kernels check them and report invalid values in the status word.

use super::{DeviceTensor, OpLaunch};
use crate::kernel::{Arg, Kernel, KernelFile, LaunchShape, code, int, kernel_arguments};
use crate::row_kernels::row_width;
use plimsoll_exec::DeviceError;
use plimsoll_graph::DType;
use plimsoll_graph::ops::{Embed, SegmentMean, TokenDropout};

/// Warps of a block; each warp processes a row.
const WARPS: u64 = 8;
/// Threads of a block.
const THREADS: u32 = 32 * WARPS as u32;

kernel_arguments! {
    /// Arguments of `embed` (sequence.cu).
    struct EmbedArgs {
        ids: u64,
        table: u64,
        row: u64,
        x: u64,
        status: u64,
        tokens: u64,
        vocabulary: i32,
        columns: i32,
    }
    size 56, last 52
}

kernel_arguments! {
    /// Arguments of `embed_dropout` (sequence.cu).
    struct EmbedDropoutArgs {
        ids: u64,
        table: u64,
        row: u64,
        spans: u64,
        x: u64,
        status: u64,
        tokens: u64,
        sequences: i32,
        vocabulary: i32,
        columns: i32,
        mask: i32,
        keep: f32,
    }
    size 80, last 72
}

kernel_arguments! {
    /// Arguments of `segment_mean` (sequence.cu).
    struct SegmentMeanArgs {
        x: u64,
        spans: u64,
        y: u64,
        status: u64,
        tokens: u64,
        columns: i32,
        skip_first: u64,
        skip_last: u64,
    }
    size 64, last 56
}

pub(super) fn embed(call: &mut OpLaunch<'_>, op: &Embed) -> Result<(), DeviceError> {
    let ids = call.input(0)?;
    let table = call.input(1)?;
    let x = call.output(0)?;
    let row = if op.row { Some(call.input(2)?) } else { None };
    let entry = if op.token_dropout.is_some() { "embed_dropout" } else { "embed" };
    let kernel = embed_kernel(entry, x.dtype, row.map_or(x.dtype, |row| row.dtype), x.columns);
    let row = row.map_or(0, |row| row.address);
    let Some(TokenDropout { mask_id, keep }) = op.token_dropout else {
        let args = EmbedArgs {
            ids: ids.address,
            table: table.address,
            row,
            x: x.address,
            status: call.status(),
            tokens: x.rows,
            vocabulary: int(table.rows),
            columns: int(x.columns),
        };
        return call.kernel(&kernel, LaunchShape::of(x.rows.div_ceil(WARPS), THREADS), &args);
    };
    let spans = call.input(2 + usize::from(op.row))?;
    let args = EmbedDropoutArgs {
        ids: ids.address,
        table: table.address,
        row,
        spans: spans.address,
        x: x.address,
        status: call.status(),
        tokens: x.rows,
        sequences: int(spans.rows),
        vocabulary: int(table.rows),
        columns: int(x.columns),
        mask: int(mask_id),
        keep,
    };
    call.kernel(&kernel, by_sequence(&x, spans.rows), &args)
}

/// Returns a grid with one row of blocks for each sequence and one for the rows behind the last; about four rows a
/// warp.
pub(super) fn by_sequence(x: &DeviceTensor, sequences: u64) -> LaunchShape {
    let blocks = x.rows.div_ceil((sequences + 1) * WARPS * 4).clamp(1, 1024);
    LaunchShape { blocks: (sequences as u32 + 1, blocks as u32, 1), threads: THREADS, shared: 0 }
}

fn embed_kernel(entry: &'static str, dtype: DType, row: DType, columns: u64) -> Kernel {
    rows_kernel(entry, dtype, columns).with("ROW", code(row))
}

/// Returns a kernel on rows of `columns`, with the widest possible memory access.
fn rows_kernel(entry: &'static str, dtype: DType, columns: u64) -> Kernel {
    Kernel::new(KernelFile::Sequence, entry, dtype).with("WIDTH", row_width(dtype, columns) as i64)
}

pub(super) fn rotary_table(call: &mut OpLaunch<'_>) -> Result<(), DeviceError> {
    let frequencies = call.input(0)?;
    let tables = [call.output_if(0)?, call.output_if(1)?];
    let Some(table) = tables[0].or(tables[1]) else {
        return Err(call.refused("nobody reads its tables".to_owned()));
    };
    let [cos, sin] = tables.map(|table| Arg::pointer(table.map_or(0, |t| t.address)));
    let args = [frequencies.pointer(), cos, sin, Arg::int(table.rows), Arg::int(table.columns)];
    let shape = LaunchShape::of(table.elements().div_ceil(u64::from(THREADS)), THREADS);
    call.kernel(&Kernel::new(KernelFile::Sequence, "rotary_table", frequencies.dtype), shape, &args)
}

pub(super) fn segment_mean(call: &mut OpLaunch<'_>, op: &SegmentMean) -> Result<(), DeviceError> {
    let x = call.input(0)?;
    let spans = call.input(1)?;
    let y = call.output(0)?;
    let kernel = rows_kernel("segment_mean", x.dtype, x.columns);
    let blocks = x.columns.div_ceil(32 * row_width(x.dtype, x.columns));
    let shape = LaunchShape { blocks: (spans.rows as u32, blocks as u32, 1), threads: THREADS, shared: 0 };
    let args = SegmentMeanArgs {
        x: x.address,
        spans: spans.address,
        y: y.address,
        status: call.status(),
        tokens: x.rows,
        skip_first: u64::from(op.skip_first),
        skip_last: u64::from(op.skip_last),
        columns: int(x.columns),
    };
    call.kernel(&kernel, shape, &args)
}

pub(super) fn select_rows(call: &mut OpLaunch<'_>) -> Result<(), DeviceError> {
    let x = call.input(0)?;
    let rows = call.input(1)?;
    let y = call.output(0)?;
    let args = [
        x.pointer(),
        rows.pointer(),
        y.pointer(),
        Arg::pointer(call.status()),
        Arg::long(y.rows),
        Arg::long(x.rows),
        Arg::int(y.columns),
    ];
    let kernel = rows_kernel("select_rows", x.dtype, x.columns);
    call.kernel(&kernel, LaunchShape::of(y.rows.div_ceil(WARPS), THREADS), &args)
}

pub(super) fn every_kernel() -> Vec<Kernel> {
    let mut kernels = vec![];
    for dtype in [DType::F32, DType::Bf16, DType::F16] {
        kernels.push(Kernel::new(KernelFile::Sequence, "rotary_table", dtype));
        // Aligned rows, and unaligned rows.
        for columns in [2560, 33] {
            kernels.extend(["embed", "embed_dropout"].map(|entry| embed_kernel(entry, dtype, dtype, columns)));
            kernels.extend(["select_rows", "segment_mean"].map(|entry| rows_kernel(entry, dtype, columns)));
        }
        if dtype != DType::F32 {
            kernels.push(embed_kernel("embed", dtype, DType::F32, 768));
        }
    }
    kernels
}
