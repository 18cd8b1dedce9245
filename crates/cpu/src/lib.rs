//! CPU kernels: plain functions over matrix views that depend on neither graphs nor plans, and the [`CpuDevice`] that
//! binds them to launches.
//!
//! Invariants of every kernel: it allocates nothing; its workspace belongs to the caller and has a size given by a
//! `const fn`; the bits of a row, sequence or pack depend on that row, sequence or pack alone, never on others beside it,
//! the number of threads or the order in which threads work. Where the hardware has FMA, the bits do not depend on the
//! instruction set either, except for matmuls on AMX tiles.

mod device;
mod element;
mod launch;
mod machine;
mod pool;
mod simd;
mod view;

pub mod attention;
pub mod matmul;
pub mod moe;
pub mod packs;
pub mod peak;
pub mod rows;
pub mod training;

#[cfg(test)]
mod tests;

pub use device::CpuDevice;
pub use element::{Bf16, Element};
pub use machine::CpuMachine;
pub use matmul::quantized::{QuantizedRows, QuantizedRowsMut, QuantizedTiles};
pub use pool::ThreadPool;
pub use simd::isa::Isa;
pub use view::{Rows, RowsMut};

use core::ops::Range;
use std::io;

/// The instruction set and the thread pool that kernels run on.
pub struct Cpu {
    isa: Isa,
    pool: ThreadPool,
}

impl Cpu {
    /// Returns a CPU with `threads` threads, the caller included, and the best instruction set of this machine.
    pub fn new(threads: usize) -> Cpu {
        Cpu::with_isa(threads, Isa::detect())
    }

    /// As [`Cpu::new`], but returns an error if the operating system refuses to start a thread.
    pub fn start(threads: usize) -> io::Result<Cpu> {
        Ok(Cpu { isa: Isa::detect(), pool: ThreadPool::start(threads)? })
    }

    /// As [`Cpu::new`], with a given instruction set.
    pub fn with_isa(threads: usize, isa: Isa) -> Cpu {
        Cpu { isa, pool: ThreadPool::new(threads) }
    }

    /// The instruction set that all kernels use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// The thread pool.
    pub fn pool(&self) -> &ThreadPool {
        &self.pool
    }

    /// Number of threads, the caller included. A workspace holds this number times the bytes per thread.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// Runs `work` over `0..rows` in parallel, in consecutive ranges of rows with about `GRAIN` elements each.
    fn by_rows(&self, rows: usize, cols: usize, work: &(dyn Fn(Range<usize>) + Sync)) {
        /// Elements per task: streaming them takes a few microseconds and they fill a fraction of L2.
        const GRAIN: usize = 16 * 1024;
        let each = (GRAIN / cols.max(1)).max(1);
        self.pool.run(rows.div_ceil(each), &|task, _| {
            work(task * each..rows.min((task + 1) * each));
        });
    }
}

/// Checks that the spans `(start, end)` of packed sequences are ascending, disjoint and inside `0..rows`. Panics
/// otherwise.
fn check_spans(spans: &[[u32; 2]], rows: usize) {
    let mut last = 0;
    for &[start, end] in spans {
        assert!(last <= start && start <= end, "span {start}..{end} after {last}");
        last = end;
    }
    assert!(last as usize <= rows, "a span ends at {last} of {rows} rows");
}
