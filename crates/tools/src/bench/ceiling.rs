//! Peak arithmetic rate of a device, against which the rate of the work is compared. Invariant: the peak is
//! measured in the precision of the work, alternating with it in one process.

use super::case::BenchCase;
use plimsoll_cpu::Cpu;
use plimsoll_cpu::peak::{self, FactorType};
use plimsoll_graph::DType;
use plimsoll_runtime::{RuntimeError, Settings};

/// M, N and K of the GEMMs on devices other than the CPU.
const GEMM_SIZE: u64 = 8192;
/// Number of consecutive GEMMs in a step.
const COUNT: u32 = 3;

/// Measurement of the peak rate.
pub(super) enum PeakRate {
    /// CPU: loops of arithmetic instructions on registers, without memory traffic.
    Loops(Cpu),
    /// Other devices: large GEMMs with the same kernels as a model's linear layers.
    Gemms(Box<BenchCase>),
}

impl PeakRate {
    pub(super) fn of(settings: &Settings) -> Result<Self, RuntimeError> {
        if settings.is_on_host() {
            Ok(Self::Loops(Cpu::start(settings.threads).map_err(RuntimeError::thread("compute"))?))
        } else {
            Ok(Self::Gemms(Box::new(BenchCase::gemm_chain(settings, GEMM_SIZE, GEMM_SIZE, COUNT)?)))
        }
    }

    /// Name of the measurement and its GFLOP/s for matmuls of `dtype`, measured for about `seconds`; `None` if
    /// the CPU has no such loop. Other devices ignore `dtype`: their GEMMs already have the precision of the
    /// settings.
    pub(super) fn rate(
        &mut self,
        dtype: DType,
        seconds: f64,
    ) -> Result<Option<(&'static str, f64)>, RuntimeError> {
        match self {
            Self::Loops(cpu) => Ok(raw_loop(cpu, dtype, seconds)),
            Self::Gemms(case) => Ok(Some(("gemm", case.linear_gflops(seconds)?))),
        }
    }
}

/// Operations per second of square linear layers in the precision of the settings: with the width of ESM-2 3B
/// on GPUs, of ESM-2 650M on the CPU.
pub(super) fn raw_gemm_rate(settings: &Settings) -> Result<f64, RuntimeError> {
    /// Minimum duration of the measurement.
    const SECONDS: f64 = 0.3;
    let (rows, width) = if settings.is_on_host() { (2048, 1280) } else { (16_384, 2560) };
    let mut gemms = BenchCase::gemm_chain(settings, rows, width, COUNT)?;
    gemms.passes(1)?;
    Ok(1e9 * gemms.linear_gflops(SECONDS)?)
}

fn raw_loop(cpu: &Cpu, dtype: DType, seconds: f64) -> Option<(&'static str, f64)> {
    match dtype {
        // With AMX, an f32 matmul is the sum of six bf16 matmuls (the `bf16x3` split), so the peak is a sixth.
        DType::F32 => Some(match peak::amx_gflops(cpu, FactorType::Bf16, seconds) {
            Some(rate) => ("amx/6", rate / 6.0),
            None => ("fma", peak::fma_gflops(cpu, seconds)),
        }),
        // Without AMX and bf16 dot products, a bf16 matmul widens its operands and uses f32 FMA.
        DType::Bf16 => Some(
            peak::amx_gflops(cpu, FactorType::Bf16, seconds)
                .map(|rate| ("amx", rate))
                .or_else(|| peak::dot_gflops(cpu, FactorType::Bf16, seconds).map(|rate| ("dots", rate)))
                .unwrap_or_else(|| ("fma", peak::fma_gflops(cpu, seconds))),
        ),
        DType::I8 => peak::amx_gflops(cpu, FactorType::Int8, seconds)
            .map(|rate| ("amx/int8", rate))
            .or_else(|| peak::dot_gflops(cpu, FactorType::Int8, seconds).map(|rate| ("vnni", rate))),
        DType::F16 | DType::F8 | DType::I32 | DType::U8 => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_of_products_is_theirs_alone() {
        let settings = Settings { threads: 1, ..Settings::default() };
        let mut gemms = BenchCase::gemm_chain(&settings, 64, 96, 2).expect("planned");
        let rate = gemms.linear_gflops(0.0).expect("timed");
        assert!(rate.is_finite() && rate > 0.0, "{rate}");
        let seconds = gemms.instructions().expect("timed");
        assert_eq!(seconds.len(), gemms.plan().schedule.instrs.len());
    }
}
