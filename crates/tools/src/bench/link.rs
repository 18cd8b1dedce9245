//! Measures the link between pinned host memory and a GPU with plans like those of runs: tables that lie in host memory are
//! fetched before a kernel reads them, and results of kernels are stored there. Invariant: a copy is timed as a plan runs
//! it, started early and waited for late, among others of its size and direction.

use super::case::{BenchCase, numbers, one_sequence};
use super::median;
use plimsoll_graph::ops::{Embed, Epilogue, Linear, Scale};
use plimsoll_graph::{
    Builder, Bytes, DType, Dim, Graph, Moment, Op, Space, StateDef, StateRole, ValueId, VerifyError,
};
use plimsoll_plan::{Fuse, Link, Offload, PlanError, Policy, Weights, Window};
use plimsoll_runtime::{RuntimeError, Settings};
use serde::{Serialize, Serializer};

/// Sizes of the copies in bytes.
const SIZES: [u64; 7] = [64 << 10, 512 << 10, 4 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30];

/// Sizes up to this one show what a copy costs beside its bytes.
const SMALL: u64 = 4 << 20;

/// Size of the copies that show how much they slow down kernels.
const LARGE: u64 = 64 << 20;

/// Columns of a table: 1 KiB a row.
const COLUMNS: u64 = 256;

/// Rows and width of the matmuls: a linear layer from 8192 to 8192 features.
const MATMUL: (u64, u64) = (512, 8192);

/// Share of the time of the copies that the matmuls beside them take, so that the copies decide the time of a pass.
const BESIDE: f64 = 0.7;

/// Direction of copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CopyDirection {
    ToDevice,
    ToHost,
    /// As many copies to the device as to the host.
    Both,
}

impl CopyDirection {
    fn has_stores(self) -> bool {
        matches!(self, Self::ToHost | Self::Both)
    }

    fn has_fetches(self) -> bool {
        matches!(self, Self::ToDevice | Self::Both)
    }
}

/// Rates of the copies of one size in bytes per second.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct CopyRates {
    /// Bytes of a copy.
    pub bytes: u64,
    /// To the device: alone, and beside matmuls.
    #[serde(serialize_with = "alone_and_beside")]
    pub to_device: [f64; 2],
    /// To the host: alone, and beside matmuls.
    #[serde(serialize_with = "alone_and_beside")]
    pub to_host: [f64; 2],
}

/// Serializes the rate of a copy alone and its rate beside matmuls under their names.
fn alone_and_beside<S: Serializer>(rates: &[f64; 2], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(["alone", "beside_matmuls"].iter().zip(rates))
}

/// Measures the link of the device of the settings, a GPU. Sizes for which the memory budget or the host has no room are left
/// out.
pub(super) fn measure(settings: &Settings, repeats: usize) -> Result<(Link, Vec<CopyRates>), RuntimeError> {
    let matmul_seconds = seconds(settings, &LinkCase { matmuls: 64, ..LinkCase::NOTHING }, repeats)? / 64.0;
    let bench = LinkBench { settings, matmul_seconds, repeats };
    let mut rows = vec![];
    for bytes in SIZES {
        match bench.row(bytes) {
            Ok(row) => rows.push(row),
            // Larger sizes need more.
            Err(error) if lacks_room(&error) && !rows.is_empty() => break,
            Err(error) => return Err(error),
        }
    }
    let rates = link(&rows);
    for row in rows.iter().rev().filter(|row| row.bytes <= LARGE) {
        match bench.slowdowns(row, rates) {
            // Slowdowns need room for more copies than the rates of the same size.
            Err(error) if lacks_room(&error) && row.bytes > SIZES[0] => {}
            measured => return Ok((measured?, rows)),
        }
    }
    Ok((rates, rows))
}

/// Whether the memory budget or the host has no room for a measurement.
fn lacks_room(error: &RuntimeError) -> bool {
    matches!(error, RuntimeError::Plan(PlanError::OverBudget(_) | PlanError::OverRoom { .. }))
}

/// The rates and the latency of the link from the rates of all sizes: the rates of the largest copies beside matmuls, and the
/// median of the time of small copies that their bytes do not explain.
fn link(rows: &[CopyRates]) -> Link {
    let Some(largest) = rows.last() else { return Link::default() };
    let mut latencies = vec![];
    for row in rows.iter().filter(|row| row.bytes <= SMALL) {
        for (measured, best) in [(row.to_device, largest.to_device), (row.to_host, largest.to_host)] {
            latencies.push(row.bytes as f64 / measured[0] - row.bytes as f64 / best[0]);
        }
    }
    let [_, to_device] = largest.to_device;
    let [_, to_host] = largest.to_host;
    Link { to_device, to_host, latency: median(&latencies).max(1e-7), ..Link::default() }
}

/// Measurements of a link.
struct LinkBench<'a> {
    settings: &'a Settings,
    /// Seconds of one matmul without copies.
    matmul_seconds: f64,
    /// Number of passes of which a measurement is the median.
    repeats: usize,
}

impl LinkBench<'_> {
    /// Median seconds of a pass.
    fn seconds(&self, case: &LinkCase) -> Result<f64, RuntimeError> {
        seconds(self.settings, case, self.repeats)
    }

    /// The rates of copies of `bytes` bytes.
    fn row(&self, bytes: u64) -> Result<CopyRates, RuntimeError> {
        // Enough copies for the time of some matmuls, and at least three, so that one is queued when another ends.
        let copies = ((128 << 20) / bytes).clamp(3, 512) as usize;
        let to_device = self.copy_rates(bytes, CopyDirection::ToDevice, copies)?;
        let to_host = self.copy_rates(bytes, CopyDirection::ToHost, copies)?;
        Ok(CopyRates { bytes, to_device, to_host })
    }

    /// Bytes per second of `copies` copies in one direction: alone, and beside matmuls.
    fn copy_rates(
        &self,
        bytes: u64,
        direction: CopyDirection,
        copies: usize,
    ) -> Result<[f64; 2], RuntimeError> {
        let alone = LinkCase { bytes, copies: Some((direction, copies)), matmuls: 0 };
        let alone_seconds = self.seconds(&alone)?;
        let matmuls = ((BESIDE * alone_seconds / self.matmul_seconds) as usize).max(1);
        let beside = self.seconds(&LinkCase { matmuls, ..alone })?;
        let all = (bytes * copies as u64) as f64;
        Ok([all / alone_seconds, all / beside])
    }

    /// Adds the factors by which copies of the size of `row` slow down kernels and each other to the rates of a link.
    fn slowdowns(&self, row: &CopyRates, rates: Link) -> Result<Link, RuntimeError> {
        let to_device = self.slower_matmuls(CopyDirection::ToDevice, row.bytes, row.to_device[0])?;
        let to_host = self.slower_matmuls(CopyDirection::ToHost, row.bytes, row.to_host[0])?;
        let slower_copies = self.slower_copies(row.bytes)?;
        Ok(Link { slower_kernels: to_device.max(to_host), slower_copies, ..rates })
    }

    /// Factor by which copies of one direction, which run at `rate` bytes per second alone, slow down the matmuls beside them:
    /// from a pass whose matmuls take twice as long as its copies.
    fn slower_matmuls(&self, direction: CopyDirection, bytes: u64, rate: f64) -> Result<f64, RuntimeError> {
        let copies = 8;
        let copied = (bytes * copies as u64) as f64 / rate;
        let matmuls = (2.0 * copied / self.matmul_seconds).ceil() as usize;
        let beside = self.seconds(&LinkCase { bytes, copies: Some((direction, copies)), matmuls })?;
        let alone = self.seconds(&LinkCase { matmuls, ..LinkCase::NOTHING })?;
        // Kernels are slower only while copies run, so the delay is divided by the time in which both run, the shorter
        // of the two times. Divided by the time of the matmuls, it would be half as large.
        Ok(1.0 + ((beside - alone) / copied.min(alone)).max(0.0))
    }

    /// Factor by which copies of one direction slow down those of the other.
    fn slower_copies(&self, bytes: u64) -> Result<f64, RuntimeError> {
        let case = LinkCase { bytes, ..LinkCase::NOTHING };
        let to_device = self.seconds(&LinkCase { copies: Some((CopyDirection::ToDevice, 16)), ..case })?;
        let to_host = self.seconds(&LinkCase { copies: Some((CopyDirection::ToHost, 16)), ..case })?;
        let both = self.seconds(&LinkCase { copies: Some((CopyDirection::Both, 16)), ..case })?;
        Ok((both / to_device.max(to_host)).max(1.0))
    }
}

/// A pass of copies and matmuls.
#[derive(Clone, Copy)]
struct LinkCase {
    /// Bytes of a copy.
    bytes: u64,
    /// Direction and number of the copies.
    copies: Option<(CopyDirection, usize)>,
    /// Number of matmuls, spread evenly among the copies.
    matmuls: usize,
}

impl LinkCase {
    const NOTHING: Self = Self { bytes: SIZES[0], copies: None, matmuls: 0 };

    /// The graph of the pass. A fetched table is read by a kernel that reads one row of it; a stored value is computed by a
    /// kernel that writes all of it.
    fn graph(&self) -> Result<Graph, VerifyError> {
        let (rows, width) = MATMUL;
        let mut g = Builder::new(one_sequence(rows));
        let ids = g.input("ids", &[Dim::Tokens(1)], DType::I32);
        let mut x = g.input("x", &[Dim::Tokens(1), Dim::Fixed(width)], DType::F32);
        let table = [Dim::Fixed(self.bytes / (COLUMNS * DType::F32.size())), Dim::Fixed(COLUMNS)];
        let source = g.input("source", &table, DType::F32);
        let weight = g.param("linear.weight", &[width, width]);
        let mut narrow: Vec<ValueId> = vec![x, weight];
        let count = self.copies.map_or(0, |(_, count)| count);
        let mut done = 0;
        for k in 0..count.max(1) {
            // A store runs beside the matmuls behind it, a fetch beside those before the kernel that reads it.
            if self.copies.is_some_and(|(direction, _)| direction.has_stores()) {
                let state = g.state(table_state(format!("stored.{k}")), &table, DType::F32);
                let computed = g.one(Op::Scale(Scale { factor: 0.5 }), &[source]);
                g.update(state, computed);
            }
            // Matmuls up to the share of the copies that are queued, so that both are spread evenly over the pass.
            while done < self.matmuls * (k + 1) / count.max(1) {
                x = g.one(Op::Linear(Linear::new(false, Epilogue::None)), &[x, weight]);
                narrow.push(x);
                done += 1;
            }
            if self.copies.is_some_and(|(direction, _)| direction.has_fetches()) {
                let state = g.state(table_state(format!("fetched.{k}")), &table, DType::F32);
                let read = g.one(Op::Embed(Embed { token_dropout: None, row: false }), &[ids, state]);
                g.output(format!("read.{k}").as_str(), read);
            }
        }
        g.output("x", x);
        let mut graph = g.finish()?;
        for v in narrow {
            graph.values[v.index()].spec.dtype = DType::Bf16;
        }
        Ok(graph)
    }
}

/// An optimizer state, which an offloading plan keeps in host memory.
fn table_state(param: String) -> StateDef {
    StateDef::zeros(StateRole::Moment { param, which: Moment::First })
}

/// Policy of the passes: the tables and results lie in host memory, and the next copies are queued when one ends.
fn policy(case: &LinkCase) -> Policy {
    Policy {
        weights: Weights::Trained,
        fuse: Fuse::Nothing,
        offload: Offload { optimizer: true, to: Space::Host, ..Offload::default() },
        window: Window::Bytes(Bytes(4 * case.bytes)),
        ..Policy::default()
    }
}

/// Median seconds of a pass.
fn seconds(settings: &Settings, case: &LinkCase, repeats: usize) -> Result<f64, RuntimeError> {
    let (rows, width) = MATMUL;
    let mut timed = BenchCase::single(settings, &policy(case), rows, case.graph())?;
    timed.write("ids", &vec![0; rows as usize * 4])?;
    // The upper halves of f32 numbers; products of zeros can be faster.
    let halves = numbers(1).take((rows * width) as usize).flat_map(|x| x.to_le_bytes().into_iter().skip(2));
    timed.write("x", &halves.collect::<Vec<u8>>())?;
    timed.seconds(repeats)
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_plan::{Instr, Target, compile, moved};

    /// Copies at a constant rate with a constant latency give that rate and latency, whatever the largest size was.
    #[test]
    fn the_link_is_found_in_its_rates() {
        let of = |rate: f64, latency: f64, bytes: u64| bytes as f64 / (latency + bytes as f64 / rate);
        for (to_device, to_host, latency, sizes) in
            [(5e10, 4e10, 1e-5, 7), (2.5e10, 2.5e10, 3e-6, 5), (1e10, 2e10, 2e-5, 3)]
        {
            let row = |&bytes: &u64| CopyRates {
                bytes,
                to_device: [of(to_device, latency, bytes), 0.9 * of(to_device, latency, bytes)],
                to_host: [of(to_host, latency, bytes), 0.8 * of(to_host, latency, bytes)],
            };
            let rows: Vec<CopyRates> = SIZES[..sizes].iter().map(row).collect();
            let found = link(&rows);
            let close = |found: f64, wanted: f64| (found / wanted - 1.0).abs() < 0.2;
            assert!(close(found.to_device, 0.9 * to_device), "{found:?}");
            assert!(close(found.to_host, 0.8 * to_host), "{found:?}");
            assert!(close(found.latency, latency), "{found:?}");
        }
    }

    /// Every copy of a case is a move of its bytes in its direction, and the matmuls are spread among the copies.
    #[test]
    fn cases_copy_what_they_say() {
        let target = Target::named("h100").expect("a target");
        let directions = [CopyDirection::ToDevice, CopyDirection::ToHost, CopyDirection::Both].into_iter();
        for (direction, matmuls) in directions.flat_map(|direction| [(direction, 0), (direction, 3)]) {
            let case = LinkCase { bytes: SIZES[1], copies: Some((direction, 6)), matmuls };
            let plan = compile(&case.graph().expect("a graph"), &policy(&case), &target).expect("planned");
            let graph = &plan.graph;
            let copies: Vec<_> = graph.nodes().filter_map(|(id, _)| moved(graph, id)).collect();
            let spaces = |&(from, to): &(ValueId, ValueId)| [from, to].map(|v| graph.spec(v).space);
            let count = |wanted| copies.iter().filter(|copy| spaces(copy) == wanted).count();
            let counts = [[Space::Host, Space::Device], [Space::Device, Space::Host]].map(count);
            assert_eq!(
                counts,
                [direction.has_fetches(), direction.has_stores()].map(|has| 6 * usize::from(has))
            );
            for (from, _) in copies {
                assert_eq!(graph.spec(from).bytes(&graph.bounds), Bytes(case.bytes));
            }
            let linear = |instr: &&Instr| matches!(instr, Instr::Launch(id) if matches!(graph.node(*id).op, Op::Linear(_)));
            assert_eq!(plan.schedule.instrs.iter().filter(linear).count(), matmuls);
        }
    }
}
