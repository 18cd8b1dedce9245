//! Loading of parameters into the memory of a device, in the layout that the kernels read: into the arena, or where they
//! lie between their uses. Invariant: a parameter has the same bytes in every space.

use crate::Executor;
use crate::device::DeviceError;
use crate::persistent::{element, round};
use crate::progress::{OnStart, StartProgress, StartStage};
use crate::scaled::{self, QuantizedFormat};
use crate::tiles;
use plimsoll_graph::{DType, Layout, Param, TensorSpec};
use plimsoll_plan::{Location, PIECE as CHUNK, Plan, Program};
use std::error::Error;
use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, SyncSender, channel, sync_channel};
use std::thread::{Builder, ScopedJoinHandle};

/// Capacity, in parts of weights, of the queue before each device.
const PARTS_AHEAD: usize = 4;

/// Number of elements of a row-major parameter that one thread takes at a time. Larger parameters are divided, so that no
/// thread is left alone with a large one at the end.
const WINDOW: u64 = 16 * CHUNK;

/// The cause of a failed read.
pub type ReadError = Box<dyn Error + Send + Sync>;

/// Reads a range of elements of a parameter as f32. The range counts elements in C order, over the parameter's pieces
/// stacked along dimension 0.
pub type ReadParam<'a> = &'a mut dyn FnMut(&Param, Range<u64>, &mut [f32]) -> Result<(), ReadError>;

/// Writes bytes to a position in the memory of one device, or of several.
pub(crate) type Upload<'a> = &'a mut dyn FnMut(Location, &[u8]) -> Result<(), DeviceError>;

/// As [`ReadParam`], callable from several threads concurrently.
pub type ReadShared<'a> = &'a (dyn Fn(&Param, Range<u64>, &mut [f32]) -> Result<(), ReadError> + Sync);

/// Reads the resident parameters of a plan once, with `readers` threads, and uploads them to all executors, which
/// must run the same program. Replicas that share their weights receive them once. Each device has one further thread
/// for uploads. The bytes in the arenas do not depend on the number of readers.
///
/// # Errors
/// Errors of reading and of the devices. The weights are then incomplete and must not be used.
pub fn load_all(
    executors: &mut [Executor],
    plan: usize,
    readers: usize,
    read: ReadShared<'_>,
) -> Result<(), DeviceError> {
    let Some(first) = executors.first() else { return Ok(()) };
    let weights = Weight::resident(first.program(), plan).collect();
    load_weights(&mut executors.iter_mut().collect::<Vec<_>>(), weights, readers, read, &mut |_| {})
}

/// Loads `weights` as [`load_all`] does, and reports the number of elements that were read.
pub(crate) fn load_weights(
    executors: &mut [&mut Executor],
    weights: Vec<Weight>,
    readers: usize,
    read: ReadShared<'_>,
    report: OnStart<'_>,
) -> Result<(), DeviceError> {
    let mut executors: Vec<&mut Executor> = executors
        .iter_mut()
        .map(|executor| &mut **executor)
        .filter(|executor| executor.device().info().takes_weights)
        .collect();
    let weights: Vec<Weight> = weights.iter().flat_map(Weight::windows).collect();
    let total = weights.iter().map(Weight::elements).sum();
    let mut done = 0;
    match executors.as_mut_slice() {
        [] => return Ok(()),
        [one] if readers < 2 => {
            for weight in &weights {
                let buffers = &mut Buffers::of(std::iter::once(weight));
                weight.load(
                    &mut |at, part| one.device_mut().upload(at, part),
                    buffers,
                    &mut |param, range, out| read(param, range, out),
                )?;
                done += weight.elements();
                report(StartProgress { stage: StartStage::Load, done, total });
            }
            return Ok(());
        }
        _ => {}
    }
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let mut senders = vec![];
        let mut devices = vec![];
        for executor in executors {
            let (sender, parts) = sync_channel::<WeightPart>(PARTS_AHEAD);
            let thread = Builder::new().name("load".to_owned()).spawn_scoped(scope, move || {
                parts.iter().try_for_each(|(at, part)| executor.device_mut().upload(at, &part))
            });
            devices.push(thread.map_err(|source| DeviceError::Thread { source })?);
            senders.push(sender);
        }
        let weights = &weights;
        let next = &next;
        let (read_elements, elements) = channel();
        let count = readers.clamp(1, weights.len().max(1));
        let threads: Result<Vec<_>, _> = (0..count)
            .map(|_| {
                let senders = senders.clone();
                let read_elements = read_elements.clone();
                Builder::new()
                    .name("weights".to_owned())
                    .spawn_scoped(scope, move || read_weights(weights, next, &senders, &read_elements, read))
                    .map_err(|source| DeviceError::Thread { source })
            })
            .collect();
        // When all senders are dropped every upload thread ends, so the scope ends after an error as well.
        drop((senders, read_elements));
        // The observer of a run belongs to this thread. The loop ends when every reader has ended.
        for elements in elements {
            done += elements;
            report(StartProgress { stage: StartStage::Load, done, total });
        }
        let loaded = threads?.into_iter().map(ended).fold(Ok(()), Result::and);
        devices.into_iter().map(ended).fold(Ok(()), Result::and).and(loaded)
    })
}

/// Bytes of a weight, and their position.
type WeightPart = (Location, Arc<[u8]>);

/// Takes weights from the list until none is left, reads them, and sends their parts to every device. Sends the number of
/// elements of each weight to `elements`.
fn read_weights(
    weights: &[Weight],
    next: &AtomicUsize,
    devices: &[SyncSender<WeightPart>],
    elements: &Sender<u64>,
    read: ReadShared<'_>,
) -> Result<(), DeviceError> {
    while let Some(weight) = weights.get(next.fetch_add(1, Ordering::Relaxed)) {
        // Buffers of the size of this weight, so that no reader holds the memory of the largest weight all the time.
        let buffers = &mut Buffers::of(std::iter::once(weight));
        weight.load(&mut |at, part| send(devices, at, part), buffers, &mut |param, range, out| {
            read(param, range, out)
        })?;
        // The receiver is dropped only after all readers have ended.
        let _ = elements.send(weight.elements());
    }
    Ok(())
}

/// Sends the same bytes to the thread of each device.
fn send(devices: &[SyncSender<WeightPart>], at: Location, part: &[u8]) -> Result<(), DeviceError> {
    let part: Arc<[u8]> = part.into();
    for device in devices {
        // Sending fails if the device's thread has ended after an error; that thread returns the error.
        let _ = device.send((at, Arc::clone(&part)));
    }
    Ok(())
}

/// Joins a thread and propagates its panic.
fn ended(thread: ScopedJoinHandle<'_, Result<(), DeviceError>>) -> Result<(), DeviceError> {
    thread.join().unwrap_or_else(|panic| resume_unwind(panic))
}

/// A parameter or a window of its rows, its position and its layout.
pub(crate) struct Weight {
    pub(crate) at: Location,
    /// Positions of further copies of the parameter, row-major in f32.
    copies: Copies,
    param: Param,
    layout: WeightLayout,
}

/// The layout of a parameter. `Rows` is row-major, converted to `dtype`.
#[derive(Clone, Copy)]
enum WeightLayout {
    Rows {
        /// Range of elements to load: all of the parameter's, or a window of them.
        first: u64,
        end: u64,
        dtype: DType,
    },
    /// f32 (n, k) in panels of `width` rows.
    Panels { width: u64, n: u64, k: u64 },
    /// bf16 (n, k) in tiles.
    Tiles { n: u64, k: u64 },
    /// Quantized (n, k), row-major, followed by one scale per row.
    Scaled { format: QuantizedFormat, n: u64, k: u64 },
    /// int8 (n, k) in tiles, followed by one scale per row.
    ScaledTiles { n: u64, k: u64 },
}

/// Positions of further copies of a parameter: the master copy of the optimizer, and the average of the parameter.
pub type Copies = [Option<Location>; 2];

/// Buffers for reading and packing a parameter: the only copies of it outside the device's memory.
#[derive(Default)]
pub(crate) struct Buffers {
    rows: Vec<f32>,
    panel: Vec<f32>,
    narrow: Vec<u16>,
    quantized: Vec<u8>,
    packed: Vec<u8>,
    scales: Vec<f32>,
}

impl Weight {
    /// The parameters of a plan, which are loaded once, before its first step.
    pub(crate) fn resident(program: &Program, plan: usize) -> impl Iterator<Item = Self> {
        let p: &Plan = &program.plans()[plan].1;
        p.graph.param_values().filter_map(move |(v, _, param)| {
            let at = program.location(plan, p.memory.persistent_slice(v)?);
            Some(Self {
                at,
                copies: [None; 2],
                param: param.clone(),
                layout: WeightLayout::of(p.graph.spec(v), p),
            })
        })
    }

    /// Returns the weight with further copies of its values, row-major in f32.
    pub(crate) fn with_copies(self, copies: Copies) -> Self {
        Self { copies, ..self }
    }

    /// Number of elements to load.
    fn elements(&self) -> u64 {
        match self.layout {
            WeightLayout::Rows { first, end, .. } => end - first,
            WeightLayout::Panels { n, k, .. }
            | WeightLayout::Tiles { n, k }
            | WeightLayout::Scaled { n, k, .. }
            | WeightLayout::ScaledTiles { n, k } => n * k,
        }
    }

    /// Divides a row-major weight into windows of [`WINDOW`] elements; other layouts stay whole.
    fn windows(&self) -> Vec<Self> {
        match self.layout {
            WeightLayout::Rows { first, end, dtype } => (first..end)
                .step_by(WINDOW as usize)
                .map(|first| {
                    self.with_layout(WeightLayout::Rows { first, end: end.min(first + WINDOW), dtype })
                })
                .collect(),
            layout @ (WeightLayout::Panels { .. }
            | WeightLayout::Tiles { .. }
            | WeightLayout::Scaled { .. }
            | WeightLayout::ScaledTiles { .. }) => vec![self.with_layout(layout)],
        }
    }

    /// The same parameter with another layout or window.
    fn with_layout(&self, layout: WeightLayout) -> Self {
        Self { param: self.param.clone(), layout, ..*self }
    }

    /// Reads the parameter, packs it and uploads it, also to its further copies.
    pub(crate) fn load(
        &self,
        upload: Upload<'_>,
        buffers: &mut Buffers,
        read: ReadParam<'_>,
    ) -> Result<(), DeviceError> {
        let mut loading = Loading { weight: self, upload, read };
        match self.layout {
            WeightLayout::Rows { first, end, dtype } => load_rows(&mut loading, first..end, dtype, buffers),
            WeightLayout::Scaled { format, n, k } => {
                load_scaled(&mut loading, format, ScaledShape { n, k }, buffers)
            }
            WeightLayout::ScaledTiles { n, k } => load_scaled_tiles(&mut loading, n, k, buffers),
            WeightLayout::Tiles { n, k } => load_tiles(&mut loading, n, k, buffers),
            WeightLayout::Panels { width, n, k } => {
                for first in (0..n).step_by(width as usize) {
                    let rows = &mut buffers.rows[..(width * k) as usize];
                    let (there, beyond) = rows.split_at_mut(((n - first).min(width) * k) as usize);
                    loading.read(first * k, there)?;
                    beyond.fill(0.0);
                    let panel = &mut buffers.panel[..rows.len()];
                    transpose(rows, k as usize, panel, width as usize);
                    loading.upload(first * k * DType::F32.size(), bytemuck::cast_slice(panel))?;
                }
                Ok(())
            }
        }
    }
}

/// The load of one weight: reads its elements and writes its bytes.
struct Loading<'a, 'b, 'c> {
    weight: &'a Weight,
    upload: Upload<'b>,
    read: ReadParam<'c>,
}

impl Loading<'_, '_, '_> {
    /// Reads elements from `first` on, and uploads them to the further copies of the weight.
    fn read(&mut self, first: u64, out: &mut [f32]) -> Result<(), DeviceError> {
        let Weight { param, copies, .. } = self.weight;
        let read = (self.read)(param, first..first + out.len() as u64, out);
        read.map_err(|source| DeviceError::Load { param: param.name.clone(), source })?;
        copies.iter().flatten().try_for_each(|&copy| {
            (self.upload)(behind(copy, first * DType::F32.size()), bytemuck::cast_slice(out))
        })
    }

    /// Writes bytes at an offset from the start of the weight.
    fn upload(&mut self, offset: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        (self.upload)(behind(self.weight.at, offset), bytes)
    }
}

/// The position `offset` bytes behind another.
fn behind(start: Location, offset: u64) -> Location {
    Location { at: start.at + offset, ..start }
}

impl WeightLayout {
    fn of(spec: &TensorSpec, plan: &Plan) -> Self {
        let full = plan.graph.bounds.full();
        match spec.layout {
            Layout::RowMajor => Self::Rows { first: 0, end: spec.elements_at(full), dtype: spec.dtype },
            Layout::Packed { rows, .. } => {
                let n = spec.rows(full);
                let k = spec.row_elements();
                match spec.dtype {
                    DType::F32 => Self::Panels { width: u64::from(rows), n, k },
                    DType::Bf16 => Self::Tiles { n, k },
                    DType::I8 => Self::ScaledTiles { n, k },
                    // No kernel reads packed weights of these types, and graph verification rejects them.
                    DType::F16 | DType::F8 | DType::I32 | DType::U8 => {
                        Self::Rows { first: 0, end: spec.elements_at(full), dtype: spec.dtype }
                    }
                }
            }
            Layout::Scaled => {
                let format =
                    if spec.dtype == DType::I8 { QuantizedFormat::Int8 } else { QuantizedFormat::E4m3 };
                Self::Scaled { format, n: spec.rows(full), k: spec.row_elements() }
            }
        }
    }
}

impl Buffers {
    /// Buffers large enough for each of the given weights.
    pub(crate) fn of<'a>(weights: impl Iterator<Item = &'a Weight>) -> Self {
        let mut rows = 0;
        let mut panel = 0;
        let mut narrow = 0;
        let mut quantized = 0;
        let mut packed = 0;
        let mut scales = 0;
        for weight in weights {
            match weight.layout {
                WeightLayout::Rows { first, end, dtype } => {
                    rows = rows.max((end - first).min(CHUNK));
                    if let DType::Bf16 | DType::F16 = dtype {
                        narrow = narrow.max((end - first).min(CHUNK));
                    }
                }
                WeightLayout::Panels { width, k, .. } => {
                    rows = rows.max(width * k);
                    panel = panel.max(width * k);
                }
                WeightLayout::Tiles { k, .. } => {
                    rows = rows.max(tiles::STEP as u64 * k);
                    narrow = narrow.max(tiles::panel(k as usize) as u64);
                }
                WeightLayout::ScaledTiles { n, k } => {
                    rows = rows.max(tiles::STEP as u64 * k);
                    quantized = quantized.max(tiles::codes_panel(k as usize));
                    packed = packed.max(tiles::codes_panel(k as usize));
                    scales = scales.max(n.next_multiple_of(tiles::STEP as u64));
                }
                WeightLayout::Scaled { n, k, .. } => {
                    let rows_per_read = scaled_rows(n, k);
                    rows = rows.max(rows_per_read * k);
                    quantized = quantized.max(rows_per_read as usize * scaled::stride(k as usize));
                    scales = scales.max(n);
                }
            }
        }
        let rows = vec![0.0; rows as usize];
        let panel = vec![0.0; panel as usize];
        let quantized = vec![0; quantized];
        let packed = vec![0; packed];
        let scales = vec![0.0; scales as usize];
        Self { rows, panel, narrow: vec![0; narrow as usize], quantized, packed, scales }
    }
}

/// Loads a range of a row-major parameter, `CHUNK` elements at a time.
fn load_rows(
    loading: &mut Loading<'_, '_, '_>,
    range: Range<u64>,
    dtype: DType,
    buffers: &mut Buffers,
) -> Result<(), DeviceError> {
    let Buffers { rows, narrow, .. } = buffers;
    let end = range.end;
    for first in range.step_by(CHUNK as usize) {
        let part = &mut rows[..(end - first).min(CHUNK) as usize];
        loading.read(first, part)?;
        let to = first * dtype.size();
        match dtype {
            DType::F32 => loading.upload(to, bytemuck::cast_slice(part))?,
            DType::Bf16 | DType::F16 => {
                let narrow = &mut narrow[..part.len()];
                round(part, dtype, narrow);
                loading.upload(to, bytemuck::cast_slice(narrow))?;
            }
            // So far no parameter has an integer type, so this path may allocate.
            DType::F8 | DType::I8 | DType::I32 | DType::U8 => {
                let bytes: Vec<u8> = part.iter().flat_map(|&x| element(x, dtype)).collect();
                loading.upload(to, &bytes)?;
            }
        }
    }
    Ok(())
}

/// Loads a bf16 parameter in tiles, panel by panel.
fn load_tiles(
    loading: &mut Loading<'_, '_, '_>,
    n: u64,
    k: u64,
    buffers: &mut Buffers,
) -> Result<(), DeviceError> {
    let panel = &mut buffers.narrow[..tiles::panel(k as usize)];
    for (i, first) in (0..n).step_by(tiles::STEP).enumerate() {
        let rows = &mut buffers.rows[..((n - first).min(tiles::STEP as u64) * k) as usize];
        loading.read(first * k, rows)?;
        tiles::pack(rows, k as usize, panel);
        loading.upload((i * size_of_val(panel)) as u64, bytemuck::cast_slice(panel))?;
    }
    Ok(())
}

/// Number of rows of a quantized matrix that are read at a time.
fn scaled_rows(n: u64, k: u64) -> u64 {
    (CHUNK / k.max(1)).clamp(1, n.max(1))
}

/// Size of a matrix that is quantized by rows.
#[derive(Clone, Copy)]
struct ScaledShape {
    n: u64,
    k: u64,
}

/// Loads a parameter quantized by rows; the scales follow all rows.
fn load_scaled(
    loading: &mut Loading<'_, '_, '_>,
    format: QuantizedFormat,
    shape: ScaledShape,
    buffers: &mut Buffers,
) -> Result<(), DeviceError> {
    let ScaledShape { n, k } = shape;
    let stride = scaled::stride(k as usize);
    let rows_per_read = scaled_rows(n, k);
    let scales = &mut buffers.scales[..n as usize];
    for (first, scales) in (0..n).step_by(rows_per_read as usize).zip(scales.chunks_mut(rows_per_read as usize))
    {
        let rows = &mut buffers.rows[..scales.len() * k as usize];
        loading.read(first * k, rows)?;
        let quantized = &mut buffers.quantized[..scales.len() * stride];
        for ((row, quantized), scale) in rows.chunks(k as usize).zip(quantized.chunks_mut(stride)).zip(scales) {
            *scale = format.quantise_weights(row, quantized);
        }
        loading.upload(first * stride as u64, quantized)?;
    }
    loading.upload(n * stride as u64, bytemuck::cast_slice(scales))
}

/// Loads an int8 parameter in tiles; the scales follow all panels.
fn load_scaled_tiles(
    loading: &mut Loading<'_, '_, '_>,
    n: u64,
    k: u64,
    buffers: &mut Buffers,
) -> Result<(), DeviceError> {
    let stride = tiles::codes_stride(k as usize);
    let panel = tiles::codes_panel(k as usize);
    let scales = &mut buffers.scales[..(n as usize).next_multiple_of(tiles::STEP)];
    scales.fill(0.0);
    for (i, scales) in scales.chunks_mut(tiles::STEP).enumerate() {
        let first = (i * tiles::STEP) as u64;
        let rows = &mut buffers.rows[..((n - first).min(tiles::STEP as u64) * k) as usize];
        loading.read(first * k, rows)?;
        let quantized = &mut buffers.quantized[..rows.len() / k as usize * stride];
        for ((row, quantized), scale) in rows.chunks(k as usize).zip(quantized.chunks_mut(stride)).zip(scales) {
            *scale = QuantizedFormat::Int8.quantise_weights(row, quantized);
        }
        tiles::pack_codes(quantized, stride, &mut buffers.packed[..panel]);
        loading.upload((i * panel) as u64, &buffers.packed[..panel])?;
    }
    loading.upload((scales.len() / tiles::STEP * panel) as u64, bytemuck::cast_slice(scales))
}

/// Transposes `width` rows of `k` elements to `k` rows of `width`.
fn transpose(rows: &[f32], k: usize, panel: &mut [f32], width: usize) {
    for (j, column) in panel.chunks_exact_mut(width).enumerate() {
        for (r, x) in column.iter_mut().enumerate() {
            *x = rows[r * k + j];
        }
    }
}
