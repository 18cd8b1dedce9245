//! The tile registers of AMX, through `asm!`: stable Rust has no intrinsics for them.
//!
//! Invariant: a `Tiles` exists only while the eight tile registers of its thread are configured, each as 16
//! rows of 64 bytes unless `configure_as` says otherwise; when it ends they are released. Nobody else writes them: the compiler has no use for
//! tile registers, so what one block of assembly leaves there the next one finds.
//!
//! A tile product (TDPBF16PS) is C (16 x 16 f32) += A (16 x 32 bf16) B, where row j of B's tile holds, for
//! each of 16 columns, the two values that meet A's columns 2j and 2j + 1. An element's 16 even and 16 odd
//! products are summed apart, then both added to C; every step rounds to f32 and takes denormals, in and
//! out, as zero (Intel 64 and IA-32 Software Developer's Manual, volume 2).
//!
//! Of integers (TDPBSSD) it is C (16 x 16 i32) += A (16 x 64 i8) B, where row j of B's tile holds the four values that
//! meet A's columns 4j to 4j + 3: the same bytes, two codes where a bf16 stands. Its sums are exact.

use core::arch::asm;
use core::arch::x86_64::__cpuid_count;
use std::sync::OnceLock;

/// Bytes of a tile.
pub(super) const TILE: usize = 1024;
/// Rows of a tile; columns of a tile of f32.
pub(super) const SIDE: usize = 16;
/// Rows, and columns, of the four tiles of sums.
pub(super) const STRIP: usize = 2 * SIDE;
/// k that a tile product takes.
pub(super) const STEP: usize = 32;
/// Steps of a strip, or of a panel, that stay in L1 beside a room of sums and what passes: 36 of its 48 KB.
pub(super) const NEAR: usize = 18;

/// Which factor of a step L1 keeps; another streams past it, from L2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Near {
    /// A strip, which the next panel meets again.
    A,
    /// A panel, which the next strip meets again.
    B,
    /// Neither: this step of both is met again too late.
    Neither,
}

impl Near {
    /// This one, of the first `most` steps.
    #[inline(always)]
    pub(super) fn first(self, most: usize, step: usize) -> Near {
        if step < most { self } else { Near::Neither }
    }
}

/// Whether this CPU has bf16 tiles and the system lets this process use them. Asked once.
pub(super) fn available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| has_tiles() && permitted())
}

/// AMX-TILE, AMX-BF16 and AMX-INT8, and AVX512-BF16, which their kernels round with.
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

/// Asks Linux for the tile registers, for all threads of the process (Documentation/arch/x86/xstate.rst).
#[cfg(target_os = "linux")]
fn permitted() -> bool {
    const ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: u64 = 0x1023;
    const XFEATURE_XTILEDATA: u64 = 18;
    let result: i64;
    // SAFETY: a system call that reads and writes no memory; `syscall` overwrites rcx and r11.
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

/// Other systems have no way to ask that is known here.
#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}

/// What `ldtilecfg` reads: the palette, and each register's bytes per row and rows.
#[repr(C, align(64))]
pub(super) struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Config {
    /// Eight whole registers.
    pub(super) const WHOLE: Config = Config {
        palette: 1,
        start_row: 0,
        reserved: [0; 14],
        row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
        rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
    };

    /// Register `t` has only these.
    pub(super) fn cut(&mut self, t: usize, rows: usize, row_bytes: usize) {
        assert!((1..=SIDE).contains(&rows) && (4..=64).contains(&row_bytes) && t < 8, "part of a register");
        (self.rows[t], self.row_bytes[t]) = (rows as u8, row_bytes as u16);
    }
}

static CONFIG: Config = Config::WHOLE;

/// Eight tile registers: 0 to 3 are the sums, 32 x 32 of f32 or i32 as (upper left, upper right, lower left, lower right); 4 and 5
/// the two tiles of A, 6 and 7 of B. Kernels are written over this, so that their order of work is tested on any CPU.
pub(super) trait Unit: Sized {
    /// Registers of this thread's own until the value is dropped.
    ///
    /// # Safety
    /// The CPU has these registers, and this thread has no other such value.
    unsafe fn configure() -> Self;

    /// The sums begin at zero.
    fn zero(&mut self);

    /// The sums begin at `c`.
    ///
    /// # Safety
    /// `c` holds 32 rows of 32 f32.
    unsafe fn begin(&mut self, c: *const f32);

    /// Stores the sums.
    ///
    /// # Safety
    /// `c` has room for 32 rows of 32 f32.
    unsafe fn end(&mut self, c: *mut f32);

    /// Loads both tiles of A, their rows `row` bytes apart, `near` if L1 is to keep them.
    ///
    /// # Safety
    /// 32 rows of 64 bytes are readable at `a`.
    unsafe fn load_a(&mut self, a: *const u8, row: usize, near: bool);

    /// Loads both tiles of B, one behind the other.
    ///
    /// # Safety
    /// Two tiles are readable at `b`.
    unsafe fn load_b(&mut self, b: *const u8);

    /// Adds A B to the sums.
    fn multiply(&mut self);

    /// Loads both factors and multiplies.
    ///
    /// # Safety
    /// As `load_a` and `load_b`.
    #[inline(always)]
    unsafe fn step(&mut self, a: *const u8, row: usize, b: *const u8, _near: Near) {
        // SAFETY: as the caller promises.
        unsafe {
            self.load_a(a, row, true);
            self.load_b(b);
        }
        self.multiply();
    }

    /// Loads another A and multiplies by the B that is there.
    ///
    /// # Safety
    /// As `load_a`.
    #[inline(always)]
    unsafe fn next_a(&mut self, a: *const u8, row: usize, near: bool) {
        // SAFETY: as the caller promises.
        unsafe { self.load_a(a, row, near) };
        self.multiply();
    }

    /// Loads another B and multiplies the A that is there by it.
    ///
    /// # Safety
    /// As `load_b`.
    #[inline(always)]
    unsafe fn next_b(&mut self, b: *const u8, _near: bool) {
        // SAFETY: as the caller promises.
        unsafe { self.load_b(b) };
        self.multiply();
    }

    /// `c (+)= a b` to nearly f32 from three bf16 parts of each factor: of the nine products of parts the six
    /// largest, ordered so that successive ones share a factor. `c` is 32 x 32, and begins at zero unless
    /// there is `more`. After each product, while the tiles are busy, the core does `meanwhile`.
    ///
    /// A step of `a` is (lo, mid, hi) times two tiles, of `b` (hi, mid, lo) times two tiles. `a` streams past L1, where `b`
    /// stays if it fits; else of `b` only hi does, which a step meets twice.
    ///
    /// # Safety
    /// `a` and `b` hold `steps` steps of six tiles, and `c` 32 rows of 32 f32, which `meanwhile` leaves alone.
    #[inline(always)]
    unsafe fn six(
        &mut self,
        a: *const u8,
        b: *const u8,
        c: *mut f32,
        steps: usize,
        more: bool,
        mut meanwhile: impl FnMut(),
    ) {
        const PART: usize = 2 * TILE;
        const ROW: usize = 64;
        let near = 3 * steps <= NEAR;
        // SAFETY: inside what the caller promises.
        unsafe {
            if more {
                self.begin(c)
            } else {
                self.zero()
            }
            for step in 0..steps {
                let (a, b) = (a.add(step * 3 * PART), b.add(step * 3 * PART));
                // lo hi
                self.load_b(b);
                self.next_a(a, ROW, false);
                meanwhile();
                // mid hi
                self.next_a(a.add(PART), ROW, false);
                meanwhile();
                // mid mid
                self.next_b(b.add(PART), near);
                meanwhile();
                // hi mid
                self.next_a(a.add(2 * PART), ROW, false);
                meanwhile();
                // hi lo
                self.next_b(b.add(2 * PART), near);
                meanwhile();
                // hi hi
                self.next_b(b, true);
                meanwhile();
            }
            self.end(c);
        }
    }
}

/// Loads tile `T`, its rows `row` bytes apart: so that L1 keeps what is read, or without leaving anything there.
///
/// # Safety
/// This thread's tiles are configured, and 16 rows of 64 bytes are readable at `from`.
#[inline(always)]
unsafe fn load<const T: u8>(from: *const u8, row: usize, near: bool) {
    // SAFETY: as the caller promises.
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
/// This thread's tiles are configured.
#[inline(always)]
unsafe fn product<const INT8: bool, const C: u8, const A: u8, const B: u8>() {
    // SAFETY: registers only.
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

/// This thread's tile registers, for products of bf16 or of integers.
pub(super) struct Tiles<const INT8: bool = false>(());

impl<const INT8: bool> Tiles<INT8> {
    /// As `configure`, of other shapes: those that `Unit`'s products have not, so who does that leaves these alone.
    ///
    /// # Safety
    /// As `configure`.
    pub(super) unsafe fn configure_as(config: &Config) -> Self {
        // SAFETY: the instruction exists and reads the 64 bytes of `config`.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const *config, options(nostack, readonly, preserves_flags))
        };
        Self(())
    }
}

impl<const INT8: bool> Unit for Tiles<INT8> {
    unsafe fn configure() -> Self {
        // SAFETY: as the caller promises.
        unsafe { Self::configure_as(&CONFIG) }
    }

    #[inline(always)]
    fn zero(&mut self) {
        // SAFETY: registers only; `self` proves that they are configured.
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
        // SAFETY: reads the 32 rows; `self` proves that tiles are configured.
        unsafe {
            load::<4>(a, row, near);
            load::<5>(a.add(SIDE * row), row, near);
        }
    }

    #[inline(always)]
    unsafe fn load_b(&mut self, b: *const u8) {
        // SAFETY: reads the two tiles; `self` proves that tiles are configured.
        unsafe {
            load::<6>(b, 64, true);
            load::<7>(b.add(TILE), 64, true);
        }
    }

    #[inline(always)]
    fn multiply(&mut self) {
        // SAFETY: `self` proves that tiles are configured.
        unsafe {
            product::<INT8, 0, 4, 6>();
            product::<INT8, 1, 4, 7>();
            product::<INT8, 2, 5, 6>();
            product::<INT8, 3, 5, 7>();
        }
    }

    /// Each tile right before its first product, as in `step`.
    #[inline(always)]
    unsafe fn next_a(&mut self, a: *const u8, row: usize, near: bool) {
        // SAFETY: reads the 32 rows; `self` proves that tiles are configured.
        unsafe {
            load::<4>(a, row, near);
            product::<INT8, 0, 4, 6>();
            product::<INT8, 1, 4, 7>();
            load::<5>(a.add(SIDE * row), row, near);
            product::<INT8, 2, 5, 6>();
            product::<INT8, 3, 5, 7>();
        }
    }

    /// As `next_a`.
    #[inline(always)]
    unsafe fn next_b(&mut self, b: *const u8, near: bool) {
        // SAFETY: reads the two tiles; `self` proves that tiles are configured.
        unsafe {
            load::<6>(b, 64, near);
            product::<INT8, 0, 4, 6>();
            load::<7>(b.add(TILE), 64, near);
            product::<INT8, 1, 4, 7>();
            product::<INT8, 2, 5, 6>();
            product::<INT8, 3, 5, 7>();
        }
    }

    /// Each tile right before its first product: up to a tenth faster than all loads before all products.
    #[inline(always)]
    unsafe fn step(&mut self, a: *const u8, row: usize, b: *const u8, near: Near) {
        let (near_a, near_b) = (near == Near::A, near == Near::B);
        // SAFETY: reads the 32 rows and the two tiles; `self` proves that tiles are configured.
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
        // SAFETY: this thread configured them, and nobody uses them any more.
        unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) };
    }
}
