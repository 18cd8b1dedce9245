//! Shared by the examples that time a kernel: consecutive operands in the arena, noise, and the median batch of
//! launches.
//!
//! Invariant: preparation and the first batch, which warms up the device, are not timed.

use plimsoll_cuda::CudaDevice;
use plimsoll_exec::{Device, DeviceError, Launch, Operand};
use plimsoll_graph::{Counts, DType, Dim, TensorSpec};
use std::time::Instant;

/// Number of launches per timed batch.
const LAUNCHES: u32 = 10;

/// Places operands of these shapes one behind the other; returns them and the offset of their end.
pub fn place(shapes: Vec<(Vec<Dim>, DType)>, counts: Counts) -> (Vec<Operand>, u64) {
    let mut end = 0;
    let operands = shapes
        .into_iter()
        .map(|(shape, dtype)| {
            let spec = TensorSpec::activation(shape, dtype);
            let at = end;
            end += spec.bytes_at(counts).align_up(256).0;
            Operand { at, spec }
        })
        .collect();
    (operands, end)
}

/// Seconds per launch, as the median over `batches` batches.
pub fn seconds(device: &mut CudaDevice, launch: &Launch<'_>, batches: usize) -> Result<f64, DeviceError> {
    let mut seconds = vec![];
    for _ in 0..=batches {
        let start = Instant::now();
        (0..LAUNCHES).try_for_each(|_| device.launch(launch))?;
        device.synchronize()?;
        seconds.push(start.elapsed().as_secs_f64() / f64::from(LAUNCHES));
    }
    let seconds = &mut seconds[1..];
    seconds.sort_by(f64::total_cmp);
    Ok(seconds[batches / 2])
}

/// Endless iterator of pseudo-random bits: xorshift32 (Marsaglia 2003).
pub fn noise() -> impl Iterator<Item = u32> {
    let mut state = 0x9e37_79b9_u32;
    std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state
    })
}
