//! Loading of parameters into the arena, in the layout that the kernels read. Invariant: a parameter has the same
//! bytes whether it is loaded once or in every step, and loading allocates nothing.

use crate::Executor;
use crate::device::DeviceError;
use crate::persistent::{element, round};
use crate::scaled::{self, QuantizedFormat};
use crate::tiles;
use plimsoll_graph::{DType, Layout, Param, TensorSpec};
use plimsoll_plan::{PIECE as CHUNK, Plan, Program};
use std::error::Error;
use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::{Builder, ScopedJoinHandle};

/// Capacity, in parts of weights, of the queue before each device.
const PARTS_AHEAD: usize = 4;

/// The cause of a failed read.
pub type ReadError = Box<dyn Error + Send + Sync>;

/// Reads a range of elements of a parameter as f32. The range counts elements in C order, over the parameter's pieces
/// stacked along dimension 0.
pub type ReadParam<'a> = &'a mut dyn FnMut(&Param, Range<u64>, &mut [f32]) -> Result<(), ReadError>;

/// As [`ReadParam`], kept for as long as an executor runs. It is called in every step and should not allocate.
pub type ParamSource = Box<dyn FnMut(&Param, Range<u64>, &mut [f32]) -> Result<(), ReadError> + Send>;

/// Writes bytes to an address in the arena of one device, or of several.
pub(crate) type Upload<'a> = &'a mut dyn FnMut(u64, &[u8]) -> Result<(), DeviceError>;

/// As [`ReadParam`], callable from several threads concurrently.
pub type ReadShared<'a> = &'a (dyn Fn(&Param, Range<u64>, &mut [f32]) -> Result<(), ReadError> + Sync);

/// Reads the resident parameters of a plan once, with `readers` threads, and uploads them to all executors, which
/// must run the same program. Replicas that share their weights receive them once. Each parameter is read and packed
/// by one thread; each device has one further thread for uploads.
///
/// # Errors
/// Errors of reading and of the devices. The weights are then incomplete and must not be used.
pub fn load_all(
    executors: &mut [Executor],
    plan: usize,
    readers: usize,
    read: ReadShared<'_>,
) -> Result<(), DeviceError> {
    let mut executors: Vec<&mut Executor> =
        executors.iter_mut().filter(|executor| executor.device().takes_weights()).collect();
    let weights: Vec<Weight> = match executors.as_mut_slice() {
        [] => return Ok(()),
        [one] if readers < 2 => return one.load(plan, &mut |param, range, out| read(param, range, out)),
        [first, ..] => Weight::resident(first.program(), plan).collect(),
    };
    let next = AtomicUsize::new(0);
    let refused = |source| DeviceError::Thread { source };
    std::thread::scope(|scope| {
        let (mut senders, mut devices) = (vec![], vec![]);
        for executor in executors {
            let (sender, parts) = sync_channel::<Part>(PARTS_AHEAD);
            let mut put = move |(at, part): Part| executor.device_mut().upload(at, &part);
            let work = move || parts.iter().try_for_each(&mut put);
            devices.push(Builder::new().name("load".to_owned()).spawn_scoped(scope, work).map_err(refused)?);
            senders.push(sender);
        }
        let (weights, next) = (&weights, &next);
        let reader = |_| {
            let senders = senders.clone();
            let work = move || read_weights(weights, next, &senders, read);
            Builder::new().name("weights".to_owned()).spawn_scoped(scope, work).map_err(refused)
        };
        // When all senders are dropped every upload thread ends, so the scope ends after an error as well.
        let readers: Result<Vec<_>, _> = (0..readers.clamp(1, weights.len().max(1))).map(reader).collect();
        drop(senders);
        let loaded = readers?.into_iter().map(ended).fold(Ok(()), Result::and);
        devices.into_iter().map(ended).fold(Ok(()), Result::and).and(loaded)
    })
}

/// Bytes for the arena, and their address.
type Part = (u64, Arc<[u8]>);

/// Takes weights from the list until none is left, reads them, and sends their parts to every device.
fn read_weights(
    weights: &[Weight],
    next: &AtomicUsize,
    devices: &[SyncSender<Part>],
    read: ReadShared<'_>,
) -> Result<(), DeviceError> {
    let mut upload = |at: u64, part: &[u8]| {
        let part: Arc<[u8]> = part.into();
        // Sending fails if the device's thread has ended after an error; that thread returns the error.
        devices.iter().for_each(|device| drop(device.send((at, Arc::clone(&part)))));
        Ok(())
    };
    let mut read = |param: &Param, range: Range<u64>, out: &mut [f32]| read(param, range, out);
    while let Some(weight) = weights.get(next.fetch_add(1, Ordering::Relaxed)) {
        weight.load(&mut upload, &mut Buffers::of(std::iter::once(weight)), &mut read)?;
    }
    Ok(())
}

/// Joins a thread and propagates its panic.
fn ended(thread: ScopedJoinHandle<'_, Result<(), DeviceError>>) -> Result<(), DeviceError> {
    thread.join().unwrap_or_else(|panic| resume_unwind(panic))
}

/// A parameter, its address in the arena and its layout.
pub(crate) struct Weight {
    pub(crate) at: u64,
    param: Param,
    shape: Shape,
}

/// The layout of a parameter in the arena. `Rows` is row-major, converted to `dtype`.
#[derive(Clone, Copy)]
enum Shape {
    Rows {
        elements: u64,
        dtype: DType,
    },
    /// f32 (n, k) in panels of `width` rows.
    Panels {
        width: u64,
        n: u64,
        k: u64,
    },
    /// bf16 (n, k) in tiles.
    Tiles {
        n: u64,
        k: u64,
    },
    /// Quantized (n, k), row-major, followed by one scale per row.
    Scaled {
        of: QuantizedFormat,
        n: u64,
        k: u64,
    },
    /// int8 (n, k) in tiles, followed by one scale per row.
    ScaledTiles {
        n: u64,
        k: u64,
    },
}

/// Buffers for reading and packing a parameter: the only copies of it outside the arena.
#[derive(Default)]
pub(crate) struct Buffers {
    rows: Vec<f32>,
    panel: Vec<f32>,
    narrow: Vec<u16>,
    codes: Vec<u8>,
    packed: Vec<u8>,
    scales: Vec<f32>,
}

/// Reader and buffers for the parameters that a plan streams in every step.
pub(crate) struct Source {
    pub(crate) read: ParamSource,
    pub(crate) buffers: Buffers,
}

impl Weight {
    /// The parameters of a plan that are loaded once, before its first step.
    pub(crate) fn resident(program: &Program, plan: usize) -> impl Iterator<Item = Self> {
        let p = &program.plans()[plan].1;
        let persistent =
            move |v| p.memory.slice(v).is_some_and(|s| s.region == plimsoll_plan::Region::Persistent);
        let values = p.graph.param_values().map(|(v, ..)| v).filter(move |&v| persistent(v));
        values.filter_map(move |v| Self::of(program, plan, v))
    }

    /// The parameter of a value; `None` if the value is no parameter or has no address.
    pub(crate) fn of(program: &Program, plan: usize, v: plimsoll_graph::ValueId) -> Option<Self> {
        let p: &Plan = &program.plans()[plan].1;
        let (.., param) = p.graph.param_values().find(|(value, ..)| *value == v)?;
        let slice = p.memory.slice(v)?;
        let shape = Shape::of(p.graph.spec(v), p);
        Some(Self { at: program.address(plan, slice), param: param.clone(), shape })
    }

    /// Reads the parameter, packs it and uploads it.
    pub(crate) fn load(
        &self,
        upload: Upload<'_>,
        buffers: &mut Buffers,
        read: ReadParam<'_>,
    ) -> Result<(), DeviceError> {
        let fail = |source| DeviceError::Load { param: self.param.name.clone(), source };
        let mut read = |range: Range<u64>, out: &mut [f32]| read(&self.param, range, out).map_err(fail);
        match self.shape {
            Shape::Rows { elements, dtype } => load_rows(upload, self.at, elements, dtype, buffers, &mut read),
            Shape::Scaled { of, n, k } => load_scaled(upload, self.at, of, (n, k), buffers, &mut read),
            Shape::ScaledTiles { n, k } => load_scaled_tiles(upload, self.at, n, k, buffers, &mut read),
            Shape::Tiles { n, k } => load_tiles(upload, self.at, n, k, buffers, &mut read),
            Shape::Panels { width, n, k } => {
                for first in (0..n).step_by(width as usize) {
                    let rows = &mut buffers.rows[..(width * k) as usize];
                    let (there, beyond) = rows.split_at_mut(((n - first).min(width) * k) as usize);
                    read(first * k..first * k + there.len() as u64, there)?;
                    beyond.fill(0.0);
                    let panel = &mut buffers.panel[..rows.len()];
                    transpose(rows, k as usize, panel, width as usize);
                    upload(self.at + first * k * DType::F32.size(), bytemuck::cast_slice(panel))?;
                }
                Ok(())
            }
        }
    }

    /// The error of a step whose plan has no attached reader.
    pub(crate) fn unattached(&self) -> DeviceError {
        let why = "the plan streams it, and no reader was attached to the plan";
        DeviceError::Load { param: self.param.name.clone(), source: why.into() }
    }
}

impl Shape {
    fn of(spec: &TensorSpec, plan: &Plan) -> Self {
        let full = plan.graph.bounds.full();
        match spec.layout {
            Layout::RowMajor => Self::Rows { elements: spec.elements_at(full), dtype: spec.dtype },
            Layout::Packed { rows, .. } => {
                let (n, k) = (spec.rows(full), spec.row_elements());
                match spec.dtype {
                    DType::F32 => Self::Panels { width: u64::from(rows), n, k },
                    DType::Bf16 => Self::Tiles { n, k },
                    DType::I8 => Self::ScaledTiles { n, k },
                    // No kernel reads packed weights of these types, and graph verification rejects them.
                    DType::F16 | DType::F8 | DType::I32 | DType::U8 => {
                        Self::Rows { elements: spec.elements_at(full), dtype: spec.dtype }
                    }
                }
            }
            Layout::Scaled => {
                let of = if spec.dtype == DType::I8 { QuantizedFormat::Int8 } else { QuantizedFormat::E4m3 };
                Self::Scaled { of, n: spec.rows(full), k: spec.row_elements() }
            }
        }
    }
}

impl Buffers {
    /// Buffers large enough for each of the given weights.
    pub(crate) fn of<'a>(weights: impl Iterator<Item = &'a Weight>) -> Self {
        let (mut rows, mut panel, mut narrow, mut codes, mut packed, mut scales) = (0, 0, 0, 0, 0, 0);
        for weight in weights {
            match weight.shape {
                Shape::Rows { elements, dtype } => {
                    rows = rows.max(elements.min(CHUNK));
                    if let DType::Bf16 | DType::F16 = dtype {
                        narrow = narrow.max(elements.min(CHUNK));
                    }
                }
                Shape::Panels { width, k, .. } => {
                    rows = rows.max(width * k);
                    panel = panel.max(width * k);
                }
                Shape::Tiles { k, .. } => {
                    rows = rows.max(tiles::STEP as u64 * k);
                    narrow = narrow.max(tiles::panel(k as usize) as u64);
                }
                Shape::ScaledTiles { n, k } => {
                    rows = rows.max(tiles::STEP as u64 * k);
                    codes = codes.max(tiles::codes_panel(k as usize));
                    packed = packed.max(tiles::codes_panel(k as usize));
                    scales = scales.max(n.next_multiple_of(tiles::STEP as u64));
                }
                Shape::Scaled { n, k, .. } => {
                    let together = scaled_rows(n, k);
                    rows = rows.max(together * k);
                    codes = codes.max(together as usize * scaled::stride(k as usize));
                    scales = scales.max(n);
                }
            }
        }
        let (rows, panel) = (vec![0.0; rows as usize], vec![0.0; panel as usize]);
        let (codes, packed, scales) = (vec![0; codes], vec![0; packed], vec![0.0; scales as usize]);
        Self { rows, panel, narrow: vec![0; narrow as usize], codes, packed, scales }
    }
}

/// Reads a range of one parameter's elements.
type ReadElements<'a> = &'a mut dyn FnMut(Range<u64>, &mut [f32]) -> Result<(), DeviceError>;

/// Loads a row-major parameter, one window of `CHUNK` elements at a time.
fn load_rows(
    upload: Upload<'_>,
    at: u64,
    elements: u64,
    dtype: DType,
    buffers: &mut Buffers,
    read: ReadElements<'_>,
) -> Result<(), DeviceError> {
    let Buffers { rows, narrow, .. } = buffers;
    for first in (0..elements).step_by(CHUNK as usize) {
        let part = &mut rows[..(elements - first).min(CHUNK) as usize];
        read(first..first + part.len() as u64, part)?;
        let to = at + first * dtype.size();
        match dtype {
            DType::F32 => upload(to, bytemuck::cast_slice(part))?,
            DType::Bf16 | DType::F16 => {
                let narrow = &mut narrow[..part.len()];
                round(part, dtype, narrow);
                upload(to, bytemuck::cast_slice(narrow))?;
            }
            // So far no parameter has an integer type, so this path may allocate.
            DType::F8 | DType::I8 | DType::I32 | DType::U8 => {
                let bytes: Vec<u8> = part.iter().flat_map(|&x| element(x, dtype)).collect();
                upload(to, &bytes)?;
            }
        }
    }
    Ok(())
}

/// Loads a bf16 parameter in tiles, panel by panel.
fn load_tiles(
    upload: Upload<'_>,
    at: u64,
    n: u64,
    k: u64,
    buffers: &mut Buffers,
    read: ReadElements<'_>,
) -> Result<(), DeviceError> {
    let panel = &mut buffers.narrow[..tiles::panel(k as usize)];
    for (i, first) in (0..n).step_by(tiles::STEP).enumerate() {
        let rows = &mut buffers.rows[..((n - first).min(tiles::STEP as u64) * k) as usize];
        read(first * k..first * k + rows.len() as u64, rows)?;
        tiles::pack(rows, k as usize, panel);
        upload(at + (i * size_of_val(panel)) as u64, bytemuck::cast_slice(panel))?;
    }
    Ok(())
}

/// Number of rows of a quantized matrix that are read at a time.
fn scaled_rows(n: u64, k: u64) -> u64 {
    (CHUNK / k.max(1)).clamp(1, n.max(1))
}

/// Loads a parameter quantized by rows; the scales follow all rows.
fn load_scaled(
    upload: Upload<'_>,
    at: u64,
    of: QuantizedFormat,
    (n, k): (u64, u64),
    buffers: &mut Buffers,
    read: ReadElements<'_>,
) -> Result<(), DeviceError> {
    let (stride, together) = (scaled::stride(k as usize), scaled_rows(n, k));
    let scales = &mut buffers.scales[..n as usize];
    for (first, scales) in (0..n).step_by(together as usize).zip(scales.chunks_mut(together as usize)) {
        let rows = &mut buffers.rows[..scales.len() * k as usize];
        read(first * k..first * k + rows.len() as u64, rows)?;
        let codes = &mut buffers.codes[..scales.len() * stride];
        for ((row, codes), scale) in rows.chunks(k as usize).zip(codes.chunks_mut(stride)).zip(scales) {
            *scale = of.quantise_weights(row, codes);
        }
        upload(at + first * stride as u64, codes)?;
    }
    upload(at + n * stride as u64, bytemuck::cast_slice(scales))
}

/// Loads an int8 parameter in tiles; the scales follow all panels.
fn load_scaled_tiles(
    upload: Upload<'_>,
    at: u64,
    n: u64,
    k: u64,
    buffers: &mut Buffers,
    read: ReadElements<'_>,
) -> Result<(), DeviceError> {
    let (stride, panel) = (tiles::codes_stride(k as usize), tiles::codes_panel(k as usize));
    let scales = &mut buffers.scales[..(n as usize).next_multiple_of(tiles::STEP)];
    scales.fill(0.0);
    for (i, scales) in scales.chunks_mut(tiles::STEP).enumerate() {
        let first = (i * tiles::STEP) as u64;
        let rows = &mut buffers.rows[..((n - first).min(tiles::STEP as u64) * k) as usize];
        read(first * k..first * k + rows.len() as u64, rows)?;
        let codes = &mut buffers.codes[..rows.len() / k as usize * stride];
        for ((row, codes), scale) in rows.chunks(k as usize).zip(codes.chunks_mut(stride)).zip(scales) {
            *scale = QuantizedFormat::Int8.quantise_weights(row, codes);
        }
        tiles::pack_codes(codes, stride, &mut buffers.packed[..panel]);
        upload(at + (i * panel) as u64, &buffers.packed[..panel])?;
    }
    upload(at + (scales.len() / tiles::STEP * panel) as u64, bytemuck::cast_slice(scales))
}

/// Transposes `width` rows of `k` elements to `k` rows of `width`.
fn transpose(rows: &[f32], k: usize, panel: &mut [f32], width: usize) {
    for (j, column) in panel.chunks_exact_mut(width).enumerate() {
        for (r, x) in column.iter_mut().enumerate() {
            *x = rows[r * k + j];
        }
    }
}
