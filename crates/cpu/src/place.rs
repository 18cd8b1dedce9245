//! Vectors of optimizers: states that are read and written, gradients of every element type.
//!
//! Invariant: a [`Place`] may be read and written at the same address; whoever has one touches each element of it
//! from one task only, and reads it before writing it.

use super::cast::Half;
use super::simd::{LANES, Simd};
use core::marker::PhantomData;
use exec::half::{bf16_to_f32, f16_to_f32};

/// Where a state is read and where its new values go: the same place, or one that does not overlap it.
pub struct Place<'a, T> {
    old: *const T,
    new: *mut T,
    len: usize,
    life: PhantomData<&'a mut [T]>,
}

// SAFETY: tasks touch elements apart from each other, of plain numbers.
unsafe impl<T: Send> Send for Place<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Place<'_, T> {}

impl<'a, T> Place<'a, T> {
    /// Updated where it is.
    pub fn within(state: &'a mut [T]) -> Self {
        let new = state.as_mut_ptr();
        Self { old: new, new, len: state.len(), life: PhantomData }
    }

    /// Updated elsewhere. Panics if the lengths differ.
    pub fn apart(old: &'a [T], new: &'a mut [T]) -> Self {
        assert_eq!(old.len(), new.len(), "old and new values of one length");
        Self { old: old.as_ptr(), new: new.as_mut_ptr(), len: old.len(), life: PhantomData }
    }

    /// Either.
    ///
    /// # Safety
    /// For `'a`, `len` elements must be readable at `old` and writable at `new`, which is the same or apart from
    /// it, by nobody but the kernel that gets this.
    pub unsafe fn from_raw(old: *const T, new: *mut T, len: usize) -> Self {
        Self { old, new, len, life: PhantomData }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The old values from element `i` on.
    #[inline(always)]
    pub(super) fn read(&self, i: usize) -> *const T {
        self.old.wrapping_add(i)
    }

    /// Where the new values from element `i` on go. In a place that was updated they are read there.
    #[inline(always)]
    pub(super) fn write(&self, i: usize) -> *mut T {
        self.new.wrapping_add(i)
    }

    /// The new values are the old ones.
    pub(super) fn keep(self) {
        // SAFETY: `len` elements at both, as whoever made it promised; `copy` allows both to be one.
        unsafe { core::ptr::copy(self.old, self.new, self.len) };
    }
}

/// A gradient; only read.
#[derive(Clone, Copy, Debug)]
pub enum Gradient<'a> {
    /// Of 32 bits.
    F32(&'a [f32]),
    /// Of 16 bits.
    Half(Half, &'a [u16]),
}

impl Gradient<'_> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(g) => g.len(),
            Self::Half(_, g) => g.len(),
        }
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The `n` (at most 16) elements from `i` on, zeros after them.
    ///
    /// # Safety
    /// They must exist.
    #[inline(always)]
    pub(super) unsafe fn load<S: Simd>(&self, s: S, i: usize, n: usize) -> S::V {
        match self {
            // SAFETY: as the caller promises.
            Self::F32(g) => unsafe { s.load_n(g.as_ptr().add(i), n) },
            // SAFETY: as the caller promises.
            Self::Half(half, g) => unsafe { load_half(s, *half, g.as_ptr().add(i), n) },
        }
    }
}

/// `n` (at most 16) elements widened, zeros after them.
///
/// # Safety
/// They must be readable at `p`.
#[inline(always)]
pub(super) unsafe fn load_half<S: Simd>(s: S, half: Half, p: *const u16, n: usize) -> S::V {
    let mut bits = [0; LANES];
    // SAFETY: the caller promises `n` readable elements; a whole vector is one load.
    unsafe {
        match n {
            LANES => bits = p.cast::<[u16; LANES]>().read_unaligned(),
            _ => core::ptr::copy_nonoverlapping(p, bits.as_mut_ptr(), n),
        }
    }
    let floats: [f32; LANES] = match half {
        Half::Bf16 => core::array::from_fn(|i| bf16_to_f32(bits[i])),
        Half::F16 => core::array::from_fn(|i| f16_to_f32(bits[i])),
    };
    // SAFETY: sixteen floats.
    unsafe { s.load(floats.as_ptr()) }
}
