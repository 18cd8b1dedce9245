//! The CPU kernels: plain functions over views, knowing nothing of graphs or plans.
//!
//! Invariants, for every kernel here: nothing is allocated; workspace is the caller's, of a size
//! given by a const function; the bits of a row or sequence depend on its own values only, never
//! on other rows, other sequences, the number of threads or the order in which they work; and,
//! where the hardware has FMA, not on the instruction set either, but for products on AMX tiles.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod amx_sums;
mod codes;
mod columns;
mod device;
mod dot;
mod element;
#[cfg(target_arch = "x86_64")]
mod gemm_amx;
#[cfg(target_arch = "x86_64")]
mod gemm_bf16_amx;
mod gemm_dots;
mod isa;
mod launch;
mod machine;
mod math;
#[cfg(target_arch = "x86_64")]
mod mlp_bf16_amx;
mod operands;
#[cfg(target_arch = "x86_64")]
mod parts;
mod pool;
mod simd;
#[cfg(target_arch = "x86_64")]
mod simd_x86;
mod tile;
mod total;
mod view;
mod widening;

pub mod accumulate;
pub mod adafactor;
pub mod attention;
pub mod batch_norm;
pub mod cast;
pub mod cross_entropy;
pub mod dispatch;
pub mod dropout;
pub mod elementwise;
pub mod embed;
pub mod gemm;
pub mod gemm_bf16;
pub mod gemm_int8;
pub mod grouped;
pub mod mlp_bf16;
pub mod norm;
pub mod norm_grad;
pub mod optimizer;
pub mod optimizer_8bit;
pub mod peak;
pub mod place;
pub mod product;
pub mod quantize;
pub mod reduce;
pub mod rope;
pub mod route;
pub mod router_loss;
pub mod scatter;

#[cfg(test)]
mod tests;

pub use codes::{CodeRows, CodeRowsMut, CodeTiles};
pub use device::CpuDevice;
pub use element::{Bf16, Element};
pub use isa::Isa;
pub use machine::CpuMachine;
pub use pool::Pool;
pub use view::{Rows, RowsMut};

use core::ops::Range;
use std::io;

/// The instruction set and the threads that kernels run on.
pub struct Cpu {
    isa: Isa,
    pool: Pool,
}

impl Cpu {
    /// The best instruction set of this machine on `threads` threads (the caller is one).
    pub fn new(threads: usize) -> Cpu {
        Cpu::with_isa(threads, Isa::detect())
    }

    /// As [`Cpu::new`]; an error if the system refuses a thread.
    pub fn start(threads: usize) -> io::Result<Cpu> {
        Ok(Cpu { isa: Isa::detect(), pool: Pool::start(threads)? })
    }

    /// A chosen instruction set.
    pub fn with_isa(threads: usize, isa: Isa) -> Cpu {
        Cpu { isa, pool: Pool::new(threads) }
    }

    /// The instruction set of all kernels.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// The threads.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// How many threads; workspaces are this many times the bytes per thread.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// Runs `work` over `0..rows` in consecutive ranges of about `elements` elements each.
    fn by_rows(&self, rows: usize, cols: usize, work: &(dyn Fn(Range<usize>) + Sync)) {
        /// Elements of a task: some microseconds of streaming, a fraction of L2.
        const GRAIN: usize = 16 * 1024;
        let each = (GRAIN / cols.max(1)).max(1);
        self.pool.run(rows.div_ceil(each), &|task, _| {
            work(task * each..rows.min((task + 1) * each));
        });
    }
}

/// Spans (start, end) of packed sequences: ascending, disjoint, inside `rows`.
fn check_spans(spans: &[[u32; 2]], rows: usize) {
    let mut last = 0;
    for &[start, end] in spans {
        assert!(last <= start && start <= end, "span {start}..{end} after {last}");
        last = end;
    }
    assert!(last as usize <= rows, "a span ends at {last} of {rows} rows");
}
