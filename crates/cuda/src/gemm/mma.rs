//! Matmul by `mma.sync` (`mma.cu`), for every compute capability from 8.0 on, for 16 bits and TF32, with any number of
//! columns. Invariant: every tile sums the terms of an element in the same order, so tiles differ in speed only, and
//! the bits of a row depend on the row and the form alone.

use super::{GemmForm, GemmOperands};
use crate::CudaError;
use crate::context::Context;
use crate::kernel::{Kernel, KernelFile, LaunchShape, int, kernel_arguments};
use crate::loaded_kernels::LoadedKernels;
use plimsoll_graph::DType;
use plimsoll_graph::ops::Epilogue;

kernel_arguments! {
    /// Arguments of `mma` (mma.cu).
    struct MmaArgs {
        x: u64,
        w: u64,
        bias: u64,
        residual: u64,
        y: u64,
        rows: i32,
        n: i32,
        k: i32,
    }
    size 56, last 48
}

/// A tile shape of the kernel: the part of y that a block computes, and the number of warps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MmaTile {
    /// Name in the table of choices.
    pub(super) name: &'static str,
    /// Rows of x of a block (BM).
    rows: u32,
    /// Rows of w of a block (BN).
    columns: u32,
    /// Warps along the rows, and along the columns.
    warps: (u32, u32),
    /// Pipeline stages of x and w in shared memory.
    stages: u32,
}

/// The tiles that are timed; the first is the default without timing.
pub(super) const MMA_TILES: [MmaTile; 3] = [
    MmaTile { name: "mma-128x128", rows: 128, columns: 128, warps: (2, 4), stages: 3 },
    MmaTile { name: "mma-64x64", rows: 64, columns: 64, warps: (2, 2), stages: 3 },
    MmaTile { name: "mma-32x32", rows: 32, columns: 32, warps: (1, 2), stages: 4 },
];

impl MmaTile {
    /// Looks up a tile by its name in the table of choices.
    pub(super) fn named(name: &str) -> Option<Self> {
        MMA_TILES.into_iter().find(|tile| tile.name == name)
    }

    /// Bytes of shared memory: every stage holds 128 bytes of k for each row of x and of w.
    pub(super) fn shared(&self) -> u32 {
        self.stages * (self.rows + self.columns) * 128
    }

    /// Returns the kernel of a form whose y and residual have the element type `out`: that of x and w, or f32.
    pub(super) fn kernel(&self, form: GemmForm, out: DType) -> Kernel {
        let epilogue = match form.epilogue {
            Epilogue::None => 0,
            Epilogue::Gelu => 1,
            Epilogue::Residual => 2,
            // Launches refuse gates with SiLU.
            Epilogue::Gate | Epilogue::SiluGate => 3,
        };
        // Matrices start at multiples of 256 bytes, so the alignment of rows is the alignment of their length.
        let align = [16, 4, 2].into_iter().find(|&align| (form.k * form.dtype.size()).is_multiple_of(align));
        let kernel = Kernel::new(KernelFile::Mma, "mma", form.dtype)
            .with("EPILOGUE", epilogue)
            .with("BM", i64::from(self.rows))
            .with("BN", i64::from(self.columns))
            .with("ROW_WARPS", i64::from(self.warps.0))
            .with("COLUMN_WARPS", i64::from(self.warps.1))
            .with("STAGES", i64::from(self.stages))
            .with("ALIGN", align.unwrap_or(2) as i64);
        if out == form.dtype { kernel } else { kernel.with("WIDE", 1) }
    }

    /// Launches the matmul; `out` as for [`Self::kernel`].
    pub(super) fn run(
        &self,
        context: &Context,
        kernels: &LoadedKernels,
        form: GemmForm,
        out: DType,
        operands: &GemmOperands,
    ) -> Result<(), CudaError> {
        let &GemmOperands { x, w, bias, residual, y, rows, .. } = operands;
        let columns = u64::from(if form.gate() { self.columns / 2 } else { self.columns });
        let blocks = rows.div_ceil(u64::from(self.rows)) * form.n.div_ceil(columns);
        let args = MmaArgs { x, w, bias, residual, y, rows: int(rows), n: int(form.n), k: int(form.k) };
        let shape =
            LaunchShape { shared: self.shared(), ..LaunchShape::of(blocks, 32 * self.warps.0 * self.warps.1) };
        kernels.call_as(context, &self.kernel(form, out), || form.to_string(), shape, &args)
    }
}

/// Returns a sample of the kernel's forms: every tile, epilogue, element type and alignment.
pub(super) fn every_kernel() -> Vec<Kernel> {
    let mut kernels = vec![];
    for tile in MMA_TILES {
        for (dtype, k) in [
            (DType::F32, 320),
            (DType::F32, 33),
            (DType::Bf16, 320),
            (DType::Bf16, 34),
            (DType::F16, 320),
            (DType::F16, 33),
        ] {
            for epilogue in [Epilogue::None, Epilogue::Gelu, Epilogue::Residual, Epilogue::Gate] {
                let tf32 = dtype == DType::F32;
                let form = GemmForm { tf32, bias: true, epilogue, ..GemmForm::new(33, k, dtype) };
                kernels.push(tile.kernel(form, dtype));
            }
        }
    }
    kernels
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_fit_into_the_smallest_multiprocessor_and_have_names_of_their_own() {
        for tile in MMA_TILES {
            assert_eq!(MmaTile::named(tile.name), Some(tile));
            // 99 KB is the largest shared memory of a block on compute capability 8.6 and 8.9.
            assert!(tile.shared() <= 99 << 10, "{tile:?} takes {} bytes", tile.shared());
        }
    }
}
