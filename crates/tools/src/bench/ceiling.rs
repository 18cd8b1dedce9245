//! What a device computes when nothing else is in the way: the measure of the work. Invariant: it takes turns with the work
//! in one process, in the work's precision.

use super::subject::Subject;
use cpu::Cpu;
use cpu::peak::{self, Factors};
use graph::DType;
use runtime::{RuntimeError, Settings};

/// Rows, columns and depth of the products, and how many of them follow each other.
const PRODUCT: u64 = 8192;
const COUNT: u32 = 3;

/// What is timed beside the work.
pub(super) enum Ceiling {
    /// Loops that read nothing.
    Loops(Cpu),
    /// Large products by the device's own way: what a model of nothing else would reach.
    Products(Box<Subject>),
}

impl Ceiling {
    pub(super) fn of(settings: &Settings) -> Result<Self, RuntimeError> {
        match settings.is_on_host() {
            true => Ok(Self::Loops(Cpu::start(settings.threads).map_err(RuntimeError::thread("compute"))?)),
            false => Ok(Self::Products(Box::new(Subject::products(settings, PRODUCT, PRODUCT, COUNT)?))),
        }
    }

    /// What it is and its GFLOP/s over about `seconds`, for products of a type; `None` where there is none.
    pub(super) fn rate(
        &mut self,
        dtype: DType,
        seconds: f64,
    ) -> Result<Option<(&'static str, f64)>, RuntimeError> {
        match self {
            Self::Loops(cpu) => Ok(raw_loop(cpu, dtype, seconds)),
            Self::Products(products) => Ok(Some(("product", products.linear_gflops(seconds)?))),
        }
    }
}

/// Operations per second of products as large as those of ESM-2 3B on a card, of 650M on the CPU, in the precision of the
/// settings.
pub(super) fn raw_products(settings: &Settings) -> Result<f64, RuntimeError> {
    /// Seconds of measuring.
    const SECONDS: f64 = 0.3;
    let (rows, width) = if settings.is_on_host() { (2048, 1280) } else { (16_384, 2560) };
    let mut products = Subject::products(settings, rows, width, COUNT)?;
    products.passes(1)?;
    Ok(1e9 * products.linear_gflops(SECONDS)?)
}

fn raw_loop(cpu: &Cpu, dtype: DType, seconds: f64) -> Option<(&'static str, f64)> {
    match dtype {
        // On tiles an f32 product is made of six bf16 products.
        DType::F32 => Some(match peak::amx_gflops(cpu, Factors::Bf16, seconds) {
            Some(rate) => ("amx/6", rate / 6.0),
            None => ("fma", peak::fma_gflops(cpu, seconds)),
        }),
        // Without tiles and dot products a bf16 product is one of f32 on widened numbers.
        DType::Bf16 => Some(
            peak::amx_gflops(cpu, Factors::Bf16, seconds)
                .map(|rate| ("amx", rate))
                .or_else(|| peak::dot_gflops(cpu, Factors::Bf16, seconds).map(|rate| ("dots", rate)))
                .unwrap_or_else(|| ("fma", peak::fma_gflops(cpu, seconds))),
        ),
        DType::I8 => peak::amx_gflops(cpu, Factors::Int8, seconds)
            .map(|rate| ("amx/int8", rate))
            .or_else(|| peak::dot_gflops(cpu, Factors::Int8, seconds).map(|rate| ("vnni", rate))),
        DType::F16 | DType::F8 | DType::I32 | DType::U8 => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_of_products_is_theirs_alone() {
        let settings = Settings { threads: 1, ..Settings::default() };
        let mut products = Subject::products(&settings, 64, 96, 2).expect("planned");
        let rate = products.linear_gflops(0.0).expect("timed");
        assert!(rate.is_finite() && rate > 0.0, "{rate}");
        let seconds = products.instructions().expect("timed");
        assert_eq!(seconds.len(), products.plan().schedule.instrs.len());
    }
}
