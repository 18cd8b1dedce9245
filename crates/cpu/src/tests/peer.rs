//! Matmul of the `linear_f32` crate: the oracle of the matmul tests and the competitor in the kernels example, which
//! includes this file. Invariant: safe to call with any slices; sizes are checked.

/// Computes `y = x W^T` on `threads` threads with the crate's best instruction set: x (m, k), w (n, k), y (m, n), all
/// row-major; (m, n, k) = `sizes`. Panics if a slice has another size.
pub fn linear(threads: usize, sizes: (usize, usize, usize), x: &[f32], w: &[f32], y: &mut [f32]) {
    let (m, n, k) = sizes;
    assert_eq!((x.len(), w.len(), y.len()), (m * k, n * k, m * n));
    let threads = if threads == 1 { ::gemm::Parallelism::None } else { ::gemm::Parallelism::Rayon(threads) };
    let kk = k as isize;
    let nn = n as isize;
    // SAFETY: x (m, k), w (n, k) read as (k, n), y (m, n), all row-major and of these sizes.
    unsafe {
        let y = y.as_mut_ptr();
        let x = x.as_ptr();
        let w = w.as_ptr();
        ::gemm::gemm(m, n, k, y, 1, nn, false, x, 1, kk, w, kk, 1, 0.0, 1.0, false, false, false, threads);
    }
}
