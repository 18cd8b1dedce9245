//! Tile registers of Intel AMX, used through `asm!` because stable Rust has no intrinsics for them.
//!
//! Invariant: a `Tiles` value exists only while the eight tile registers of its thread are configured, each as 16
//! rows of 64 bytes unless `configure_as` sets another shape; dropping the value releases them. The compiler never
//! uses tile registers itself, so their contents survive from one `asm!` block to the next.
//!
//! The bf16 tile product (TDPBF16PS) computes C (16 x 16 f32) += A (16 x 32 bf16) B, where row j of B's tile holds,
//! for each of the 16 columns, the two values that are multiplied by columns 2j and 2j + 1 of A. For each element of
//! C the 16 even and the 16 odd products are summed separately and then both added to C; every step rounds to f32 and
//! treats denormals, as input and as result, as zero (Intel 64 and IA-32 Software Developer's Manual, volume 2).
//!
//! The integer tile product (TDPBSSD) computes C (16 x 16 i32) += A (16 x 64 i8) B, where row j of B's tile holds the
//! four values that are multiplied by columns 4j to 4j + 3 of A. The byte layout is the same, with two i8 values in
//! place of one bf16. Integer sums are exact.

use core::arch::asm;
use core::arch::x86_64::__cpuid_count;
use std::sync::OnceLock;

/// Bytes of a tile (16 rows of 64 bytes).
pub(crate) const TILE: usize = 1024;
/// Rows of a tile; also the columns of an f32 tile.
pub(crate) const SIDE: usize = 16;
/// Rows, and columns, of the 2 x 2 accumulator tiles.
pub(crate) const STRIP: usize = 2 * SIDE;
/// Length along k of one bf16 tile product.
pub(crate) const STEP: usize = 32;
/// Number of steps of a strip of A, or of a panel of B, that stay in L1: 18 steps of 2 KB are 36 of its 48 KB, which
/// leaves room for the accumulator buffer and the factor that streams through.
pub(crate) const L1_STEPS: usize = 18;

/// Which factor of a step is loaded so that L1 keeps it; the other is streamed from L2 past L1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum L1Factor {
    /// The strip of A, which is used again with the next panel.
    A,
    /// The panel of B, which is used again with the next strip.
    B,
    /// Neither: both factors of this step are reused too late for L1 to keep them.
    Neither,
}

impl L1Factor {
    /// The factor to keep in step `step`, if L1 has room for the first `l1_steps` steps.
    #[inline(always)]
    pub(crate) fn for_step(self, step: usize, l1_steps: usize) -> L1Factor {
        if step < l1_steps { self } else { L1Factor::Neither }
    }
}

/// Whether this CPU has bf16 tiles and the operating system permits their use. Queried once per process.
pub(crate) fn available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| has_tiles() && permitted())
}

/// Whether CPUID reports AMX-TILE, AMX-BF16 and AMX-INT8, and AVX512-BF16, which the kernels on tiles use for
/// rounding.
fn has_tiles() -> bool {
    const BF16: u32 = 1 << 22;
    const TILES: u32 = 1 << 24;
    const INT8: u32 = 1 << 25;
    if __cpuid_count(0, 0).eax < 7 || !is_x86_feature_detected!("avx512bf16") {
        return false;
    }
    let features = __cpuid_count(7, 0).edx;
    [BF16, TILES, INT8].iter().all(|feature| features & feature > 0)
}

/// Requests permission to use the tile registers from Linux, for all threads of the process
/// (Documentation/arch/x86/xstate.rst).
#[cfg(target_os = "linux")]
fn permitted() -> bool {
    const ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: u64 = 0x1023;
    const XFEATURE_XTILEDATA: u64 = 18;
    let result: i64;
    // SAFETY: this system call reads and writes no memory; `syscall` overwrites rcx and r11, which are declared.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => result,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XFEATURE_XTILEDATA,
            out("rcx") _,
            out("r11") _,
            options(nostack),
        );
    }
    result == 0
}

/// On other operating systems no way to request the permission is known here.
#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}

/// Operand of `ldtilecfg`: the palette, and for each register the bytes per row and the number of rows.
#[repr(C, align(64))]
pub(crate) struct TileConfig {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl TileConfig {
    /// All eight registers at full size.
    pub(crate) const WHOLE: TileConfig = TileConfig {
        palette: 1,
        start_row: 0,
        reserved: [0; 14],
        row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
        rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
    };

    /// Restricts register `t` to `rows` rows of `row_bytes` bytes.
    pub(crate) fn restrict(&mut self, t: usize, rows: usize, row_bytes: usize) {
        assert!((1..=SIDE).contains(&rows) && (4..=64).contains(&row_bytes) && t < 8, "part of a register");
        self.rows[t] = rows as u8;
        self.row_bytes[t] = row_bytes as u16;
    }
}

static CONFIG: TileConfig = TileConfig::WHOLE;

/// Operands of a product of bf16x3 splits, c (+)= a b.
#[derive(Clone, Copy)]
pub(crate) struct Bf16x3Matmul {
    /// `steps` steps of (lo, mid, hi), two tiles each.
    pub(crate) a: *const u8,
    /// `steps` steps of (hi, mid, lo), two tiles each.
    pub(crate) b: *const u8,
    /// 32 rows of 32 f32.
    pub(crate) c: *mut f32,
    pub(crate) steps: usize,
    /// Whether `c` holds the sums of earlier steps; otherwise the sums start at zero.
    pub(crate) continues: bool,
}

/// Eight tile registers as a 32 x 32 accumulator and two factors. Registers 0 to 3 hold the accumulator, f32 or i32,
/// as (upper left, upper right, lower left, lower right); 4 and 5 hold the two tiles of A, 6 and 7 the two tiles of B.
/// Kernels are generic over this trait, so that their order of operations can be tested on any CPU.
pub(crate) trait TileUnit: Sized {
    /// Configures the registers of this thread, until the value is dropped.
    ///
    /// # Safety
    /// The CPU must have tile registers, and this thread must hold no other such value.
    unsafe fn configure() -> Self;

    /// Sets the accumulator to zero.
    fn zero(&mut self);

    /// Loads the accumulator from `c`.
    ///
    /// # Safety
    /// `c` must hold 32 rows of 32 f32.
    unsafe fn begin(&mut self, c: *const f32);

    /// Stores the accumulator to `c`.
    ///
    /// # Safety
    /// 32 rows of 32 f32 must be writable at `c`.
    unsafe fn end(&mut self, c: *mut f32);

    /// Loads both tiles of A, from rows that are `row` bytes apart; `near` asks L1 to keep them.
    ///
    /// # Safety
    /// 32 rows of 64 bytes must be readable at `a`.
    unsafe fn load_a(&mut self, a: *const u8, row: usize, near: bool);

    /// Loads both tiles of B, which are adjacent in memory.
    ///
    /// # Safety
    /// Two tiles must be readable at `b`.
    unsafe fn load_b(&mut self, b: *const u8);

    /// Adds A B to the accumulator.
    fn multiply(&mut self);

    /// Loads both factors and multiplies them.
    ///
    /// # Safety
    /// As for `load_a` and `load_b`.
    #[inline(always)]
    unsafe fn step(&mut self, a: *const u8, row: usize, b: *const u8, _l1_factor: L1Factor) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            self.load_a(a, row, true);
            self.load_b(b);
        }
        self.multiply();
    }

    /// Loads the next A and multiplies it by the B that is already loaded.
    ///
    /// # Safety
    /// As for `load_a`.
    #[inline(always)]
    unsafe fn next_a(&mut self, a: *const u8, row: usize, near: bool) {
        // SAFETY: guaranteed by the caller.
        unsafe { self.load_a(a, row, near) };
        self.multiply();
    }

    /// Loads the next B and multiplies the A that is already loaded by it.
    ///
    /// # Safety
    /// As for `load_b`.
    #[inline(always)]
    unsafe fn next_b(&mut self, b: *const u8, _near: bool) {
        // SAFETY: guaranteed by the caller.
        unsafe { self.load_b(b) };
        self.multiply();
    }

    /// Multiplies two bf16x3 splits to nearly f32 accuracy (Henry, Tang and Heinecke 2019): of the nine products of
    /// components, the six largest, ordered so that successive products share a factor. `meanwhile` is called after each
    /// product, so that the core does other work while the tile unit is busy.
    ///
    /// `a` streams past L1. `b` stays in L1 if it fits; otherwise only its hi component is kept, which each step loads
    /// twice.
    ///
    /// # Safety
    /// The memory of the operands must be as documented at [`Bf16x3Matmul`]; `meanwhile` must not touch `c`.
    #[inline(always)]
    unsafe fn bf16x3_matmul(&mut self, matmul: Bf16x3Matmul, mut meanwhile: impl FnMut()) {
        const PART: usize = 2 * TILE;
        const ROW: usize = 64;
        let Bf16x3Matmul { a, b, c, steps, continues } = matmul;
        let near = 3 * steps <= L1_STEPS;
        // SAFETY: all offsets stay inside the buffers that the caller guarantees.
        unsafe {
            if continues {
                self.begin(c)
            } else {
                self.zero()
            }
            for step in 0..steps {
                let a = a.add(step * 3 * PART);
                let b = b.add(step * 3 * PART);
                // lo(a) hi(b)
                self.load_b(b);
                self.next_a(a, ROW, false);
                meanwhile();
                // mid(a) hi(b)
                self.next_a(a.add(PART), ROW, false);
                meanwhile();
                // mid(a) mid(b)
                self.next_b(b.add(PART), near);
                meanwhile();
                // hi(a) mid(b)
                self.next_a(a.add(2 * PART), ROW, false);
                meanwhile();
                // hi(a) lo(b)
                self.next_b(b.add(2 * PART), near);
                meanwhile();
                // hi(a) hi(b)
                self.next_b(b, true);
                meanwhile();
            }
            self.end(c);
        }
    }
}

/// Loads tile `T` from rows that are `row` bytes apart: with `near` so that L1 keeps the lines (TILELOADD), otherwise
/// with a hint not to allocate them there (TILELOADDT1).
///
/// # Safety
/// This thread's tiles must be configured, and 16 rows of 64 bytes must be readable at `from`.
#[inline(always)]
unsafe fn load<const T: u8>(from: *const u8, row: usize, near: bool) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        if near {
            asm!("tileloadd tmm{t}, [{from} + {row}*1]", t = const T, from = in(reg) from, row = in(reg) row,
                options(nostack, readonly, preserves_flags));
        } else {
            asm!("tileloaddt1 tmm{t}, [{from} + {row}*1]", t = const T, from = in(reg) from, row = in(reg) row,
                options(nostack, readonly, preserves_flags));
        }
    }
}

/// Adds the product of tiles `A` and `B` to tile `C`.
///
/// # Safety
/// This thread's tiles must be configured.
#[inline(always)]
unsafe fn product<const INT8: bool, const C: u8, const A: u8, const B: u8>() {
    // SAFETY: the instructions access registers only.
    unsafe {
        if INT8 {
            asm!("tdpbssd tmm{c}, tmm{a}, tmm{b}", c = const C, a = const A, b = const B,
                options(nostack, nomem, preserves_flags));
        } else {
            asm!("tdpbf16ps tmm{c}, tmm{a}, tmm{b}", c = const C, a = const A, b = const B,
                options(nostack, nomem, preserves_flags));
        }
    }
}

/// The tile registers of this thread, for products of bf16, or of i8 if `INT8`.
pub(crate) struct Tiles<const INT8: bool = false>(());

impl<const INT8: bool> Tiles<INT8> {
    /// Like `configure`, with other tile shapes. `TileUnit`'s products assume full tiles, so a caller that restricts registers
    /// must not use them.
    ///
    /// # Safety
    /// As for `configure`.
    pub(crate) unsafe fn configure_as(config: &TileConfig) -> Self {
        // SAFETY: the CPU has the instruction, which reads the 64 bytes of `config`.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const *config, options(nostack, readonly, preserves_flags))
        };
        Self(())
    }
}

impl<const INT8: bool> TileUnit for Tiles<INT8> {
    unsafe fn configure() -> Self {
        // SAFETY: guaranteed by the caller.
        unsafe { Self::configure_as(&CONFIG) }
    }

    #[inline(always)]
    fn zero(&mut self) {
        // SAFETY: accesses registers only; `self` proves that they are configured.
        unsafe {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                options(nostack, nomem, preserves_flags),
            );
        }
    }

    #[inline(always)]
    unsafe fn begin(&mut self, c: *const f32) {
        // SAFETY: reads the 32 rows of 128 bytes at `c`.
        unsafe {
            asm!(
                "tileloadd tmm0, [{c} + {row}*1]",
                "tileloadd tmm1, [{c} + {row}*1 + 64]",
                "tileloadd tmm2, [{c} + {row}*1 + 2048]",
                "tileloadd tmm3, [{c} + {row}*1 + 2112]",
                c = in(reg) c,
                row = in(reg) 4 * STRIP,
                options(nostack, readonly, preserves_flags),
            );
        }
    }

    #[inline(always)]
    unsafe fn end(&mut self, c: *mut f32) {
        // SAFETY: writes the 32 rows of 128 bytes at `c`.
        unsafe {
            asm!(
                "tilestored [{c} + {row}*1], tmm0",
                "tilestored [{c} + {row}*1 + 64], tmm1",
                "tilestored [{c} + {row}*1 + 2048], tmm2",
                "tilestored [{c} + {row}*1 + 2112], tmm3",
                c = in(reg) c,
                row = in(reg) 4 * STRIP,
                options(nostack, preserves_flags),
            );
        }
    }

    #[inline(always)]
    unsafe fn load_a(&mut self, a: *const u8, row: usize, near: bool) {
        // SAFETY: reads 32 rows, guaranteed by the caller; `self` proves that the tiles are configured.
        unsafe {
            load::<4>(a, row, near);
            load::<5>(a.add(SIDE * row), row, near);
        }
    }

    #[inline(always)]
    unsafe fn load_b(&mut self, b: *const u8) {
        // SAFETY: reads two tiles, guaranteed by the caller; `self` proves that the tiles are configured.
        unsafe {
            load::<6>(b, 64, true);
            load::<7>(b.add(TILE), 64, true);
        }
    }

    #[inline(always)]
    fn multiply(&mut self) {
        // SAFETY: `self` proves that the tiles are configured.
        unsafe {
            product::<INT8, 0, 4, 6>();
            product::<INT8, 1, 4, 7>();
            product::<INT8, 2, 5, 6>();
            product::<INT8, 3, 5, 7>();
        }
    }

    /// Loads each tile immediately before its first product, as `step` does.
    #[inline(always)]
    unsafe fn next_a(&mut self, a: *const u8, row: usize, near: bool) {
        // SAFETY: reads 32 rows, guaranteed by the caller; `self` proves that the tiles are configured.
        unsafe {
            load::<4>(a, row, near);
            product::<INT8, 0, 4, 6>();
            product::<INT8, 1, 4, 7>();
            load::<5>(a.add(SIDE * row), row, near);
            product::<INT8, 2, 5, 6>();
            product::<INT8, 3, 5, 7>();
        }
    }

    /// Loads each tile immediately before its first product, as `step` does.
    #[inline(always)]
    unsafe fn next_b(&mut self, b: *const u8, near: bool) {
        // SAFETY: reads two tiles, guaranteed by the caller; `self` proves that the tiles are configured.
        unsafe {
            load::<6>(b, 64, near);
            product::<INT8, 0, 4, 6>();
            load::<7>(b.add(TILE), 64, near);
            product::<INT8, 1, 4, 7>();
            product::<INT8, 2, 5, 6>();
            product::<INT8, 3, 5, 7>();
        }
    }

    /// Loads each tile immediately before its first product: up to a tenth faster than all loads before all products.
    #[inline(always)]
    unsafe fn step(&mut self, a: *const u8, row: usize, b: *const u8, l1_factor: L1Factor) {
        let near_a = l1_factor == L1Factor::A;
        let near_b = l1_factor == L1Factor::B;
        // SAFETY: reads 32 rows and two tiles, guaranteed by the caller; `self` proves that the tiles are configured.
        unsafe {
            load::<6>(b, 64, near_b);
            load::<4>(a, row, near_a);
            product::<INT8, 0, 4, 6>();
            load::<7>(b.add(TILE), 64, near_b);
            product::<INT8, 1, 4, 7>();
            load::<5>(a.add(SIDE * row), row, near_a);
            product::<INT8, 2, 5, 6>();
            product::<INT8, 3, 5, 7>();
        }
    }
}

impl<const INT8: bool> Drop for Tiles<INT8> {
    fn drop(&mut self) {
        // SAFETY: this thread configured the tiles, and the value that stood for them is gone.
        unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) };
    }
}
