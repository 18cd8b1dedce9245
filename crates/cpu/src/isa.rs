//! The instruction set: detected once, carried by value, entered through one door.
//!
//! Invariant: a `Simd` value exists only inside `Isa::run`, below a function that enables its
//! target features, on a CPU that was seen to have them.

use super::simd::{Portable, Simd};
#[cfg(target_arch = "x86_64")]
use super::simd_x86::{Avx2, Avx512};
use plimsoll_plan::InstructionSet;

/// Which vector instructions the kernels use. A value proves that this CPU has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Isa(Kind);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// AVX-512, and products on the tiles of AMX.
    #[cfg(target_arch = "x86_64")]
    Amx,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Portable,
}

impl Isa {
    /// The best one that this CPU has.
    pub fn detect() -> Isa {
        Isa::available().next().unwrap_or(Isa(Kind::Portable))
    }

    /// All that this CPU has, best first; the last is always `portable`.
    pub fn available() -> impl Iterator<Item = Isa> {
        [
            #[cfg(target_arch = "x86_64")]
            (Kind::Amx, has_avx512() && super::amx::available()),
            #[cfg(target_arch = "x86_64")]
            (Kind::Avx512, has_avx512()),
            #[cfg(target_arch = "x86_64")]
            (Kind::Avx2, has_avx2()),
            (Kind::Portable, true),
        ]
        .into_iter()
        .filter_map(|(kind, has)| has.then_some(Isa(kind)))
    }

    /// `avx512+amx`, `avx512+bf16`, `avx512`, `avx2`, `portable+fma` or `portable`: what bits may depend on.
    pub fn name(self) -> &'static str {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Amx => "avx512+amx",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 if self.has_dots() => "avx512+bf16",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => "avx2",
            // As on aarch64. x86-64 without FMA rounds twice: another arithmetic, so another name.
            Kind::Portable if self.has_fma() => "portable+fma",
            Kind::Portable => "portable",
        }
    }

    /// What the kernel tables call it.
    pub fn set(self) -> InstructionSet {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Amx => InstructionSet::Amx,
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => InstructionSet::Avx512,
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => InstructionSet::Avx2,
            Kind::Portable => InstructionSet::Portable,
        }
    }

    /// What `--precision auto` takes of a CPU, best first: [`Isa::best`] is one of them.
    pub const CHAIN: [&str; 4] = ["AMX bf16", "AVX-512 f32", "AVX2+FMA f32", "portable"];

    /// Which of [`Isa::CHAIN`] this is.
    pub fn best(self) -> &'static str {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Amx => "AMX bf16",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => "AVX-512 f32",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => "AVX2+FMA f32",
            Kind::Portable => "portable",
        }
    }

    /// Whether products with weights run on the tiles of AMX, each in six bf16 products: to f32 accuracy, but
    /// with bits of their own.
    pub fn has_tiles(self) -> bool {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Amx => true,
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 | Kind::Avx2 => false,
            Kind::Portable => false,
        }
    }

    /// Whether products of bf16 may be dot products of pairs (AVX512-BF16): twice the rate of the lanes, with their bits.
    pub fn has_dots(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        // With VBMI, which attention by them needs: one name for one arithmetic.
        return self.has_avx512()
            && is_x86_feature_detected!("avx512bf16")
            && is_x86_feature_detected!("avx512vbmi");
        #[cfg(not(target_arch = "x86_64"))]
        false
    }

    /// Whether sums of products of codes may be VNNI's: twice the multiplications of a dot product of bf16.
    pub fn has_vnni(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return self.has_avx512() && is_x86_feature_detected!("avx512vnni");
        #[cfg(not(target_arch = "x86_64"))]
        false
    }

    /// Whether lanes are of AVX-512.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn has_avx512(self) -> bool {
        match self.0 {
            Kind::Amx | Kind::Avx512 => true,
            Kind::Avx2 | Kind::Portable => false,
        }
    }

    /// Whether `fma` rounds once: all such sets give the same bits, but for products on tiles.
    pub fn has_fma(self) -> bool {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Amx | Kind::Avx512 | Kind::Avx2 => true,
            Kind::Portable => cfg!(any(target_feature = "fma", target_arch = "aarch64")),
        }
    }

    /// Rows of the tallest register tile: row blocks are whole tiles of it.
    pub(super) fn tile_rows(self) -> usize {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Amx | Kind::Avx512 => Avx512::ROWS,
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => Avx2::ROWS,
            Kind::Portable => Portable::ROWS,
        }
    }

    /// Runs `kernel` compiled for this instruction set.
    #[inline]
    pub(super) fn run<K: Kernel>(self, kernel: K) {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: both kinds are made only by `available`, after detection.
            Kind::Amx | Kind::Avx512 => unsafe { run_avx512(kernel) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `Kind::Avx2` is made only by `available`, after detection.
            Kind::Avx2 => unsafe { run_avx2(kernel) },
            Kind::Portable => kernel.run(Portable),
        }
    }
}

/// A piece of work written once for all instruction sets. `run` must be `#[inline(always)]`,
/// with everything it calls, so that it is compiled inside the function that enables them.
pub(super) trait Kernel {
    /// Does the work with the lanes `s`.
    fn run<S: Simd>(self, s: S);
}

#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")
}

#[cfg(target_arch = "x86_64")]
fn has_avx512() -> bool {
    has_avx2()
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
}

/// # Safety
/// `has_avx512()` must hold.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn run_avx512<K: Kernel>(kernel: K) {
    // SAFETY: the caller promises the instructions.
    kernel.run(unsafe { Avx512::assume() });
}

/// # Safety
/// `has_avx2()` must hold.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn run_avx2<K: Kernel>(kernel: K) {
    // SAFETY: the caller promises the instructions.
    kernel.run(unsafe { Avx2::assume() });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_name_is_one_way_to_round() {
        for isa in Isa::available() {
            assert_eq!(isa.name() != "portable", isa.has_fma(), "{}", isa.name());
        }
        assert!(Isa::available().last().is_some_and(|isa| isa.name().starts_with("portable")));
    }
}
