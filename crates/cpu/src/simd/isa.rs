//! Detection of the CPU's vector instruction set, and dispatch of kernels to code compiled for it.
//!
//! Invariant: a `Simd` value exists only inside [`Isa::run`], within a function that enables its target features,
//! on a CPU that was detected to have them.

#[cfg(target_arch = "x86_64")]
use crate::simd::x86::{Avx2, Avx512};
use crate::simd::{Portable, Simd};
use plimsoll_plan::InstructionSet;

/// The vector instruction set that kernels use. A value proves that this CPU supports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Isa(IsaKind);

/// The supported instruction sets, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum IsaKind {
    /// AVX-512, and AMX tiles for matmuls.
    #[cfg(target_arch = "x86_64")]
    Amx,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Portable,
}

impl Isa {
    /// The best instruction set of this CPU.
    pub fn detect() -> Isa {
        Isa::available().next().unwrap_or(Isa(IsaKind::Portable))
    }

    /// All instruction sets of this CPU, best first; the last is always the portable one.
    pub fn available() -> impl Iterator<Item = Isa> {
        [
            #[cfg(target_arch = "x86_64")]
            (IsaKind::Amx, has_avx512() && crate::simd::amx::available()),
            #[cfg(target_arch = "x86_64")]
            (IsaKind::Avx512, has_avx512()),
            #[cfg(target_arch = "x86_64")]
            (IsaKind::Avx2, has_avx2()),
            (IsaKind::Portable, true),
        ]
        .into_iter()
        .filter_map(|(kind, has)| has.then_some(Isa(kind)))
    }

    /// Name of the arithmetic, on which the bits of results may depend: `avx512+amx`, `avx512+bf16`, `avx512`,
    /// `avx2`, `portable+fma` or `portable`.
    pub fn name(self) -> &'static str {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            IsaKind::Amx => "avx512+amx",
            #[cfg(target_arch = "x86_64")]
            IsaKind::Avx512 if self.has_dots() => "avx512+bf16",
            #[cfg(target_arch = "x86_64")]
            IsaKind::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            IsaKind::Avx2 => "avx2",
            // Portable code on aarch64 has FMA. On x86-64 without FMA, `fma` rounds twice and gives other bits,
            // so the name differs.
            IsaKind::Portable if self.has_fma() => "portable+fma",
            IsaKind::Portable => "portable",
        }
    }

    /// The instruction set as the kernel tables know it.
    pub fn set(self) -> InstructionSet {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            IsaKind::Amx => InstructionSet::Amx,
            #[cfg(target_arch = "x86_64")]
            IsaKind::Avx512 => InstructionSet::Avx512,
            #[cfg(target_arch = "x86_64")]
            IsaKind::Avx2 => InstructionSet::Avx2,
            IsaKind::Portable => InstructionSet::Portable,
        }
    }

    /// Instruction sets that `--precision auto` chooses from on a CPU, best first, each with its precision.
    /// [`Isa::best`] is one of these entries.
    pub const CHAIN: [&str; 4] = ["AMX bf16", "AVX-512 f32", "AVX2+FMA f32", "portable"];

    /// The entry of [`Isa::CHAIN`] for this instruction set.
    pub fn best(self) -> &'static str {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            IsaKind::Amx => "AMX bf16",
            #[cfg(target_arch = "x86_64")]
            IsaKind::Avx512 => "AVX-512 f32",
            #[cfg(target_arch = "x86_64")]
            IsaKind::Avx2 => "AVX2+FMA f32",
            IsaKind::Portable => "portable",
        }
    }

    /// Whether matmuls with weights run on AMX tiles. There, an f32 matmul is computed as six bf16 matmuls: with the
    /// accuracy of f32, but with other bits than on vector units.
    pub fn has_tiles(self) -> bool {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            IsaKind::Amx => true,
            #[cfg(target_arch = "x86_64")]
            IsaKind::Avx512 | IsaKind::Avx2 => false,
            IsaKind::Portable => false,
        }
    }

    /// Whether bf16 matmuls may use dot products of pairs (AVX512-BF16): twice the rate of f32 lanes with the
    /// same bits, except for denormals (see `dot::Bf16Pairs`).
    pub fn has_dots(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        // VBMI is required too, because attention with these dot products needs it: a CPU that had only one of the
        // two would need a name of its own.
        return self.has_avx512()
            && is_x86_feature_detected!("avx512bf16")
            && is_x86_feature_detected!("avx512vbmi");
        #[cfg(not(target_arch = "x86_64"))]
        false
    }

    /// Whether int8 matmuls may use VNNI dot products, which do twice the multiplications of a bf16 dot product per
    /// instruction.
    pub(crate) fn has_vnni(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return self.has_avx512() && is_x86_feature_detected!("avx512vnni");
        #[cfg(not(target_arch = "x86_64"))]
        false
    }

    /// Whether SIMD vectors are AVX-512 registers.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn has_avx512(self) -> bool {
        match self.0 {
            IsaKind::Amx | IsaKind::Avx512 => true,
            IsaKind::Avx2 | IsaKind::Portable => false,
        }
    }

    /// Whether `fma` rounds once. All instruction sets that do give the same bits, except for matmuls on AMX tiles.
    pub fn has_fma(self) -> bool {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            IsaKind::Amx | IsaKind::Avx512 | IsaKind::Avx2 => true,
            IsaKind::Portable => cfg!(any(target_feature = "fma", target_arch = "aarch64")),
        }
    }

    /// Rows of the tallest register tile of a matmul. Row blocks are multiples of it.
    pub(crate) fn tile_rows(self) -> usize {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            IsaKind::Amx | IsaKind::Avx512 => Avx512::ROWS,
            #[cfg(target_arch = "x86_64")]
            IsaKind::Avx2 => Avx2::ROWS,
            IsaKind::Portable => Portable::ROWS,
        }
    }

    /// Runs `kernel`, compiled for this instruction set.
    #[inline]
    pub(crate) fn run<K: SimdKernel>(self, kernel: K) {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: only `available` makes these kinds, after it detected the instructions.
            IsaKind::Amx | IsaKind::Avx512 => unsafe { run_avx512(kernel) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: only `available` makes this kind, after it detected the instructions.
            IsaKind::Avx2 => unsafe { run_avx2(kernel) },
            IsaKind::Portable => kernel.run(Portable),
        }
    }
}

/// Work that is written once, generic over the instruction set. `run` and everything that it calls must be
/// `#[inline(always)]`, so that all of it is compiled inside the function that enables the target features.
pub(crate) trait SimdKernel {
    /// Does the work with the SIMD operations of `s`.
    fn run<S: Simd>(self, s: S);
}

/// Whether this CPU has the features that `run_avx2` enables.
#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")
}

/// Whether this CPU has the features that `run_avx512` enables.
#[cfg(target_arch = "x86_64")]
fn has_avx512() -> bool {
    has_avx2()
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
}

/// Runs a kernel compiled for AVX-512.
///
/// # Safety
/// `has_avx512()` must be true.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn run_avx512<K: SimdKernel>(kernel: K) {
    // SAFETY: the caller promises that the CPU has the instructions.
    kernel.run(unsafe { Avx512::assume() });
}

/// Runs a kernel compiled for AVX2 and FMA.
///
/// # Safety
/// `has_avx2()` must be true.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn run_avx2<K: SimdKernel>(kernel: K) {
    // SAFETY: the caller promises that the CPU has the instructions.
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
