//! How fast this machine multiplies when nothing else is in the way: what a kernel's speed is held against.
//! Invariant: all threads of a `Cpu` are busy for the whole measurement, with its instruction set, and no
//! operand comes from farther than L1.

use super::Cpu;
#[cfg(target_arch = "x86_64")]
use super::amx::{SIDE, TILE, Tiles, Unit};
use super::isa::Kernel;
use super::simd::{LANES, Simd};
use std::hint::black_box;
#[cfg(target_arch = "x86_64")]
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// GFLOP/s of f32 multiply-adds (two operations each) on all threads together, over about `seconds`.
pub fn fma_gflops(cpu: &Cpu, seconds: f64) -> f64 {
    gflops(cpu, seconds, &|| {
        let mut flops = 0;
        cpu.isa().run(FmaBurst { flops: &mut flops });
        flops
    })
}

/// GFLOP/s of dot products, of pairs of bf16 (AVX512-BF16) or of quads of integers (VNNI); `None` where this instruction set
/// has none.
pub fn dot_gflops(cpu: &Cpu, of: Factors, seconds: f64) -> Option<f64> {
    match of {
        // SAFETY: `has_dots` proves the instructions.
        Factors::Bf16 => cpu.isa().has_dots().then(|| gflops(cpu, seconds, &|| unsafe { pairs_burst() })),
        // SAFETY: `has_vnni` proves the instructions.
        Factors::Int8 => cpu.isa().has_vnni().then(|| gflops(cpu, seconds, &|| unsafe { quads_burst() })),
    }
}

/// What tiles, or dot products, multiply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Factors {
    /// bf16.
    Bf16,
    /// Integers of 8 bits, twice as many at once.
    Int8,
}

/// GFLOP/s of multiply-adds on the tiles of AMX; `None` where this instruction set has none. An f32 product on tiles is six
/// of bf16.
pub fn amx_gflops(cpu: &Cpu, of: Factors, seconds: f64) -> Option<f64> {
    let burst = || {
        // SAFETY: called below `has_tiles` only; the pool's threads run no product while they run this.
        unsafe {
            match of {
                Factors::Bf16 => tile_burst::<false>(),
                Factors::Int8 => tile_burst::<true>(),
            }
        }
    };
    cpu.isa().has_tiles().then(|| gflops(cpu, seconds, &burst))
}

/// Calls `burst`, some microseconds of arithmetic that returns its operations, on every thread until the time
/// is over. A burst of another kind of arithmetic is measured the same way.
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

/// Rounds of a burst: some tens of microseconds.
const ROUNDS: u64 = 2048;

/// Multiply-adds that depend on nothing but their own sums.
struct FmaBurst<'a> {
    /// Takes how many operations it did.
    flops: &'a mut u64,
}

impl Kernel for FmaBurst<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // As many sums as registers hold: enough of them in flight to hide the latency of each.
        *self.flops = match S::ROWS {
            14.. => burst::<S, 24>(s),
            4.. => burst::<S, 6>(s),
            _ => burst::<S, 3>(s),
        };
    }
}

/// `N` vectors of sums; returns the operations.
#[inline(always)]
fn burst<S: Simd, const N: usize>(s: S) -> u64 {
    let half = black_box(s.splat(0.5));
    // a = a / 2 + 1/2 stays at 1.
    let mut sums = [s.splat(1.0); N];
    for _ in 0..ROUNDS {
        for a in &mut sums {
            *a = s.fma(*a, half, half);
        }
    }
    black_box(sums);
    2 * ROUNDS * (N * LANES) as u64
}

/// Sums of dot products of a burst: as many as registers hold beside the factors.
#[cfg(target_arch = "x86_64")]
const SUMS: usize = 24;

/// As `burst`, of dot products of bf16; returns the operations.
///
/// # Safety
/// The CPU has AVX-512 with BF16.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn pairs_burst() -> u64 {
    use core::arch::x86_64::*;
    // Pairs of 1/2 and -1/2: sums stay at 1.
    let bits = |pair: u32| -> __m512bh {
        // SAFETY: both are 64 bytes, of which any are bf16.
        unsafe { core::mem::transmute(_mm512_set1_epi32(black_box(pair) as i32)) }
    };
    let (x, y) = (bits(0xbf00_3f00), bits(0x3f00_3f00));
    let mut sums = [_mm512_set1_ps(1.0); SUMS];
    for _ in 0..ROUNDS {
        for sum in &mut sums {
            *sum = _mm512_dpbf16_ps(*sum, x, y);
        }
    }
    black_box(sums);
    4 * ROUNDS * (SUMS * LANES) as u64
}

/// The same of integers.
///
/// # Safety
/// The CPU has AVX-512 with VNNI.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vnni")]
unsafe fn quads_burst() -> u64 {
    use core::arch::x86_64::*;
    // 200, 100, 1, 0 by 50, -101, 7, 9: sums move a little.
    let quad = |quad: [u8; 4]| _mm512_set1_epi32(black_box(i32::from_le_bytes(quad)));
    let (x, y) = (quad([200, 100, 1, 0]), quad([50, 155, 7, 9]));
    let mut sums = [_mm512_set1_epi32(1); SUMS];
    for _ in 0..ROUNDS {
        for sum in &mut sums {
            *sum = _mm512_dpbusd_epi32(*sum, x, y);
        }
    }
    black_box(sums);
    8 * ROUNDS * (SUMS * LANES) as u64
}

/// Four sums of tile products, whose operands are loaded from L1 for each round as a kernel does; returns the
/// operations. The numbers are not zeros: those would take less power, and run faster.
///
/// # Safety
/// The CPU has the tiles of AMX, this process may use them, and this thread has no `Tiles`.
#[cfg(target_arch = "x86_64")]
unsafe fn tile_burst<const INT8: bool>() -> u64 {
    #[repr(align(64))]
    struct Lines([u32; 1024]);
    /// Pairs of bf16 between -1 and 1, or quads of integers of any size: four tiles.
    static TILES: LazyLock<Lines> = LazyLock::new(|| {
        let number = |i: usize| (((i * 7919 + 13) % 2003) as f32 / 1001.5 - 1.0).to_bits();
        Lines(std::array::from_fn(|i| number(i) >> 16 | number(i + 1024) & 0xffff_0000))
    });
    let tiles = TILES.0.as_ptr().cast::<u8>();
    // SAFETY: the caller promises the instructions; two tiles of either factor.
    unsafe {
        let mut unit = Tiles::<INT8>::configure();
        unit.zero();
        for _ in 0..ROUNDS {
            unit.load_a(tiles, TILE / SIDE, true);
            unit.load_b(tiles.add(2 * TILE));
            unit.multiply();
        }
    }
    // Each of the four products is 16 x 16 x 32, of integers 64.
    ROUNDS * 4 * 2 * 16 * 16 * if INT8 { 64 } else { 32 }
}

/// # Safety
/// None: there is nothing to run.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn pairs_burst() -> u64 {
    0
}

/// # Safety
/// None: there is nothing to run.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn quads_burst() -> u64 {
    0
}

/// # Safety
/// None: there is nothing to run.
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
            let (fma, amx) = (fma_gflops(&cpu, 1e-3), amx_gflops(&cpu, Factors::Bf16, 1e-3));
            let int8 = amx_gflops(&cpu, Factors::Int8, 1e-3);
            assert_eq!((amx.is_some(), int8.is_some()), (isa.has_tiles(), isa.has_tiles()));
            let [dots, quads] = [Factors::Bf16, Factors::Int8].map(|of| dot_gflops(&cpu, of, 1e-3));
            assert_eq!((dots.is_some(), quads.is_some()), (isa.has_dots(), isa.has_vnni()));
            for rate in [Some(fma), amx, int8, dots, quads].into_iter().flatten() {
                assert!(rate.is_finite() && rate > 0.0, "{}: {rate}", isa.name());
            }
        }
    }
}
