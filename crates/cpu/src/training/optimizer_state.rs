//! Operand types of optimizers: states, which are read and written, and gradients of every element type.
//!
//! Invariant: an [`OptimizerState`] may be read and written at the same address. A kernel accesses each element of it from one
//! task only, and reads it before it writes it.

use crate::rows::cast::Float16;
use crate::simd::{LANES, Simd};
use core::marker::PhantomData;
use plimsoll_exec::half::{bf16_to_f32, f16_to_f32};

/// An optimizer state: where its old values are read and where its new values are written, either the same memory or
/// memory that does not overlap.
pub struct OptimizerState<'a, T> {
    old: *const T,
    new: *mut T,
    len: usize,
    life: PhantomData<&'a mut [T]>,
}

// SAFETY: tasks access disjoint elements, which are plain numbers.
unsafe impl<T: Send> Send for OptimizerState<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for OptimizerState<'_, T> {}

impl<'a, T> OptimizerState<'a, T> {
    /// A state that is updated in place.
    pub fn in_place(state: &'a mut [T]) -> Self {
        let new = state.as_mut_ptr();
        Self { old: new, new, len: state.len(), life: PhantomData }
    }

    /// A state whose new values go to other memory. Panics if the lengths differ.
    #[cfg(test)]
    pub(crate) fn out_of_place(old: &'a [T], new: &'a mut [T]) -> Self {
        assert_eq!(old.len(), new.len(), "old and new values of one length");
        Self { old: old.as_ptr(), new: new.as_mut_ptr(), len: old.len(), life: PhantomData }
    }

    /// A state that is updated in place (`old == new`) or in other memory.
    ///
    /// # Safety
    /// For `'a`, `len` elements must be readable at `old` and writable at `new`, which is equal to `old` or does not
    /// overlap it; only the kernel that receives this state may access them.
    pub unsafe fn from_raw(old: *const T, new: *mut T, len: usize) -> Self {
        Self { old, new, len, life: PhantomData }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Address of the old values, from element `i` on.
    #[inline(always)]
    pub(crate) fn read(&self, i: usize) -> *const T {
        self.old.wrapping_add(i)
    }

    /// Address of the new values, from element `i` on. After an update, they can be read there.
    #[inline(always)]
    pub(crate) fn write(&self, i: usize) -> *mut T {
        self.new.wrapping_add(i)
    }

    /// Makes the new values equal to the old ones.
    pub(crate) fn keep(self) {
        // SAFETY: `len` elements at both addresses, by the promise of the constructor; `copy` allows the two to be
        // equal.
        unsafe { core::ptr::copy(self.old, self.new, self.len) };
    }
}

/// A gradient, which optimizers only read.
#[derive(Clone, Copy, Debug)]
pub enum Gradient<'a> {
    /// f32 elements.
    F32(&'a [f32]),
    /// 16-bit elements: bf16 or f16.
    Float16(Float16, &'a [u16]),
}

impl Gradient<'_> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(g) => g.len(),
            Self::Float16(_, g) => g.len(),
        }
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Loads the `n` (at most 16) elements from `i` on as f32, zeros after them.
    ///
    /// # Safety
    /// Elements `i..i + n` must exist.
    #[inline(always)]
    pub(crate) unsafe fn load<S: Simd>(&self, s: S, i: usize, n: usize) -> S::V {
        match self {
            // SAFETY: as the caller promises.
            Self::F32(g) => unsafe { s.load_n(g.as_ptr().add(i), n) },
            // SAFETY: as the caller promises.
            Self::Float16(half, g) => unsafe { load_half(s, *half, g.as_ptr().add(i), n) },
        }
    }
}

/// Loads `n` (at most 16) 16-bit elements as f32, zeros after them.
///
/// # Safety
/// `n` elements must be readable at `p`.
#[inline(always)]
pub(crate) unsafe fn load_half<S: Simd>(s: S, half: Float16, p: *const u16, n: usize) -> S::V {
    let mut bits = [0; LANES];
    // SAFETY: the caller promises `n` readable elements; a full vector is a single load.
    unsafe {
        match n {
            LANES => bits = p.cast::<[u16; LANES]>().read_unaligned(),
            _ => core::ptr::copy_nonoverlapping(p, bits.as_mut_ptr(), n),
        }
    }
    let floats: [f32; LANES] = match half {
        Float16::Bf16 => core::array::from_fn(|i| bf16_to_f32(bits[i])),
        Float16::F16 => core::array::from_fn(|i| f16_to_f32(bits[i])),
    };
    // SAFETY: sixteen floats.
    unsafe { s.load(floats.as_ptr()) }
}
