//! Measures the peak arithmetic rate of this machine, the reference for the speed of kernels. Invariant: all threads
//! of a `Cpu` are busy for the whole measurement, with its instruction set, and no operand comes from beyond L1.

use crate::Cpu;
#[cfg(target_arch = "x86_64")]
use crate::simd::amx::{SIDE, TILE, TileUnit, Tiles};
use crate::simd::isa::SimdKernel;
use crate::simd::{LANES, Simd};
use std::hint::black_box;
#[cfg(target_arch = "x86_64")]
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Measures the rate of f32 multiply-adds (two operations each) of all threads together, in GFLOP/s, over about
/// `seconds`.
pub fn fma_gflops(cpu: &Cpu, seconds: f64) -> f64 {
    gflops(cpu, seconds, &|| {
        let mut flops = 0;
        cpu.isa().run(FmaBurst { flops: &mut flops });
        flops
    })
}

/// Measures the rate of dot-product instructions in GFLOP/s: pairs of bf16 (AVX512-BF16) or quads of int8 (VNNI).
/// `None` if the instruction set has none.
pub fn dot_gflops(cpu: &Cpu, factors: FactorType, seconds: f64) -> Option<f64> {
    match factors {
        // SAFETY: `has_dots` proves the instructions.
        FactorType::Bf16 => cpu.isa().has_dots().then(|| gflops(cpu, seconds, &|| unsafe { pairs_burst() })),
        // SAFETY: `has_vnni` proves the instructions.
        FactorType::Int8 => cpu.isa().has_vnni().then(|| gflops(cpu, seconds, &|| unsafe { quads_burst() })),
    }
}

/// Operand type of tile products or dot products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FactorType {
    /// bf16 operands.
    Bf16,
    /// int8 operands, twice as many per instruction.
    Int8,
}

/// Measures the rate of multiply-adds on AMX tiles in GFLOP/s; `None` if the instruction set has none. An f32 matmul
/// on tiles takes six bf16 matmuls.
pub fn amx_gflops(cpu: &Cpu, factors: FactorType, seconds: f64) -> Option<f64> {
    if !cpu.isa().has_tiles() {
        return None;
    }
    let rate = gflops(cpu, seconds, &|| {
        // SAFETY: the CPU has tiles; the pool's threads run no other tile kernel during a burst.
        unsafe {
            match factors {
                FactorType::Bf16 => tile_burst::<false>(),
                FactorType::Int8 => tile_burst::<true>(),
            }
        }
    });
    Some(rate)
}

/// Calls `burst`, a short computation that returns its number of operations, on every thread until the time is
/// over. Returns the rate of all threads in GFLOP/s.
fn gflops(cpu: &Cpu, seconds: f64, burst: &(dyn Fn() -> u64 + Sync)) -> f64 {
    let flops = AtomicU64::new(0);
    let length = Duration::try_from_secs_f64(seconds).unwrap_or_default();
    let start = Instant::now();
    cpu.pool().run(cpu.threads(), &|_, _| {
        loop {
            flops.fetch_add(burst(), Relaxed);
            if start.elapsed() >= length {
                break;
            }
        }
    });
    flops.into_inner() as f64 / start.elapsed().as_secs_f64() / 1e9
}

/// Iterations of a burst, which then takes from a few to some tens of microseconds: long compared to reading the
/// clock after it, short compared to the measurement.
const ROUNDS: u64 = 2048;

/// A burst of f32 multiply-adds, each dependent on its own accumulator only.
struct FmaBurst<'a> {
    /// Receives the number of operations.
    flops: &'a mut u64,
}

impl SimdKernel for FmaBurst<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // As many accumulators as registers hold: enough independent chains to hide the latency of a multiply-add.
        *self.flops = match S::ROWS {
            14.. => burst::<S, 24>(s),
            4.. => burst::<S, 6>(s),
            _ => burst::<S, 3>(s),
        };
    }
}

/// Runs multiply-adds on `N` vectors of accumulators; returns the number of operations.
#[inline(always)]
fn burst<S: Simd, const N: usize>(s: S) -> u64 {
    let half = black_box(s.splat(0.5));
    // a = a / 2 + 1/2 keeps 1, so there are neither overflows nor denormals.
    let mut sums = [s.splat(1.0); N];
    for _ in 0..ROUNDS {
        for a in &mut sums {
            *a = s.fma(*a, half, half);
        }
    }
    black_box(sums);
    2 * ROUNDS * (N * LANES) as u64
}

/// Accumulators of a dot-product burst: as many as registers hold beside the operands.
#[cfg(target_arch = "x86_64")]
const SUMS: usize = 24;

/// As `burst`, with bf16 dot products; returns the number of operations.
///
/// # Safety
/// The CPU has AVX-512 with BF16.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn pairs_burst() -> u64 {
    use core::arch::x86_64::*;
    // Pairs (1/2, -1/2) times (1/2, 1/2) add 0, so the accumulators stay at 1.
    let [x, y] = [0xbf00_3f00_u32, 0x3f00_3f00].map(|pair| {
        let pairs = _mm512_set1_epi32(black_box(pair) as i32);
        // SAFETY: both types are 64 bytes, and any bits are valid bf16.
        unsafe { core::mem::transmute::<__m512i, __m512bh>(pairs) }
    });
    let mut sums = [_mm512_set1_ps(1.0); SUMS];
    for _ in 0..ROUNDS {
        for sum in &mut sums {
            *sum = _mm512_dpbf16_ps(*sum, x, y);
        }
    }
    black_box(sums);
    4 * ROUNDS * (SUMS * LANES) as u64
}

/// As `burst`, with int8 dot products; returns the number of operations.
///
/// # Safety
/// The CPU has AVX-512 with VNNI.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vnni")]
unsafe fn quads_burst() -> u64 {
    use core::arch::x86_64::*;
    // 200, 100, 1, 0 times 50, -101, 7, 9 adds -93 to the accumulators, which stay far from overflow.
    let [x, y] = [[200, 100, 1, 0], [50, 155, 7, 9]]
        .map(|quad: [u8; 4]| _mm512_set1_epi32(black_box(i32::from_le_bytes(quad))));
    let mut sums = [_mm512_set1_epi32(1); SUMS];
    for _ in 0..ROUNDS {
        for sum in &mut sums {
            *sum = _mm512_dpbusd_epi32(*sum, x, y);
        }
    }
    black_box(sums);
    8 * ROUNDS * (SUMS * LANES) as u64
}

/// Runs tile products on four accumulator tiles, with operands loaded from L1 in every iteration as in a kernel;
/// returns the number of operations. The operands are not zero: multiplying zeros takes less power and runs faster.
///
/// # Safety
/// The CPU has the tiles of AMX, this process may use them, and this thread has no `Tiles`.
#[cfg(target_arch = "x86_64")]
unsafe fn tile_burst<const INT8: bool>() -> u64 {
    #[repr(align(64))]
    struct TileOperands([u32; 1024]);
    /// Four tiles: pairs of bf16 between -1 and 1, or the same bytes as quads of int8.
    static TILES: LazyLock<TileOperands> = LazyLock::new(|| {
        let number = |i: usize| (((i * 7919 + 13) % 2003) as f32 / 1001.5 - 1.0).to_bits();
        TileOperands(std::array::from_fn(|i| number(i) >> 16 | number(i + 1024) & 0xffff_0000))
    });
    let tiles = TILES.0.as_ptr().cast::<u8>();
    // SAFETY: the caller promises the instructions; there are two tiles of each operand.
    unsafe {
        let mut unit = Tiles::<INT8>::configure();
        unit.zero();
        for _ in 0..ROUNDS {
            unit.load_a(tiles, TILE / SIDE, true);
            unit.load_b(tiles.add(2 * TILE));
            unit.multiply();
        }
    }
    // Each of the four tile products is 16 x 16 x 32, or 16 x 16 x 64 for int8.
    ROUNDS * 4 * 2 * 16 * 16 * if INT8 { 64 } else { 32 }
}

/// Stand-in for CPUs other than x86-64, never called.
///
/// # Safety
/// No requirements.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn pairs_burst() -> u64 {
    0
}

/// Stand-in for CPUs other than x86-64, never called.
///
/// # Safety
/// No requirements.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn quads_burst() -> u64 {
    0
}

/// Stand-in for CPUs other than x86-64, never called.
///
/// # Safety
/// No requirements.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn tile_burst<const INT8: bool>() -> u64 {
    0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;

    #[test]
    fn every_instruction_set_multiplies() {
        for isa in Isa::available() {
            let cpu = Cpu::with_isa(2, isa);
            let fma = fma_gflops(&cpu, 1e-3);
            let amx = amx_gflops(&cpu, FactorType::Bf16, 1e-3);
            let int8 = amx_gflops(&cpu, FactorType::Int8, 1e-3);
            assert_eq!((amx.is_some(), int8.is_some()), (isa.has_tiles(), isa.has_tiles()));
            let [dots, quads] =
                [FactorType::Bf16, FactorType::Int8].map(|factors| dot_gflops(&cpu, factors, 1e-3));
            assert_eq!((dots.is_some(), quads.is_some()), (isa.has_dots(), isa.has_vnni()));
            for rate in [Some(fma), amx, int8, dots, quads].into_iter().flatten() {
                assert!(rate.is_finite() && rate > 0.0, "{}: {rate}", isa.name());
            }
        }
    }
}
