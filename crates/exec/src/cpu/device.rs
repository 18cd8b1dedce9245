//! The CPU as a device: an arena of host memory and, for each op, the kernel that the target's table names.
//! Invariant: operands come from a checked plan, so their ranges are inside the arena and overlap only where
//! the op's alias rule allows it; token ids and spans come from outside and are checked at every launch.

use super::attention::{self, Rope};
use super::gemm::{self, Act};
use super::norm::BatchNorm;
use super::{Cpu, Isa, Rows, RowsMut, elementwise, embed, norm, reduce, rope};
use crate::arena::Arena;
use crate::device::{Device, DeviceError, Launch, Operand};
use graph::ops::{Attention, Bias, Embed, Epilogue, Linear, Mask, Qkv, alibi_slopes};
use graph::{Bytes, DType, Layout, Op};
use plan::{KernelRow, Workspace};

/// As many heads as a launch can have without allocating their slopes.
const MAX_HEADS: usize = 128;

/// Kernels in f32 on the host's cores.
pub struct CpuDevice {
    cpu: Cpu,
    arena: Option<Arena>,
}

impl CpuDevice {
    /// On `threads` threads with the best instructions of this machine.
    pub fn new(threads: usize) -> Self {
        Self { cpu: Cpu::new(threads), arena: None }
    }

    /// On `threads` threads with chosen instructions.
    pub fn with_isa(threads: usize, isa: Isa) -> Self {
        Self { cpu: Cpu::with_isa(threads, isa), arena: None }
    }

    fn arena(&self) -> Result<&Arena, DeviceError> {
        self.arena.as_ref().ok_or(DeviceError::OutsideArena { at: 0, bytes: Bytes::ZERO })
    }

    fn arena_mut(&mut self) -> Result<&mut Arena, DeviceError> {
        self.arena.as_mut().ok_or(DeviceError::OutsideArena { at: 0, bytes: Bytes::ZERO })
    }
}

/// (op, kernel): what `launch` runs.
const KERNELS: &[(&str, &str)] = &[
    ("add", "add_f32"),
    ("attention", "flash_f32"),
    ("batch_norm", "batch_norm_f32"),
    ("concat", "copy_f32"),
    ("embed", "gather_f32"),
    ("gelu", "gelu_erf_f32"),
    ("glu", "geglu_f32"),
    ("layer_norm", "layer_norm_f32"),
    ("linear", "gemm_f32"),
    ("relu", "relu_f32"),
    ("rotary_table", "rotary_table_f32"),
    ("segment_mean", "segment_mean_f32"),
    ("select_rows", "gather_f32"),
    ("softmax", "softmax_f32"),
];

impl Device for CpuDevice {
    fn name(&self) -> String {
        format!("cpu ({}, {} threads)", self.cpu.isa().name(), self.cpu.threads())
    }

    fn kernels(&self) -> Vec<KernelRow> {
        let row = |&(op, kernel): &(&str, &str)| {
            let (weights, workspace) = match op {
                "linear" => (Layout::Panels { width: gemm::PANEL as u32 }, gemm::WORKSPACE),
                "attention" => (Layout::RowMajor, attention::WORKSPACE),
                _ => (Layout::RowMajor, Workspace::default()),
            };
            KernelRow {
                op: op.to_owned(),
                dtypes: vec![DType::F32],
                kernel: kernel.to_owned(),
                weights,
                workspace,
            }
        };
        KERNELS.iter().map(row).collect()
    }

    fn units(&self) -> u64 {
        self.cpu.threads() as u64
    }

    fn alloc_arena(&mut self, bytes: Bytes) -> Result<(), DeviceError> {
        self.arena = None;
        self.arena = Some(Arena::new(bytes)?);
        Ok(())
    }

    fn upload(&mut self, at: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        self.arena_mut()?.bytes_mut(at, Bytes(bytes.len() as u64))?.copy_from_slice(bytes);
        Ok(())
    }

    fn download(&mut self, at: u64, out: &mut [u8]) -> Result<(), DeviceError> {
        out.copy_from_slice(self.arena()?.bytes(at, Bytes(out.len() as u64))?);
        Ok(())
    }

    fn fill(&mut self, at: u64, bytes: Bytes, byte: u8) -> Result<(), DeviceError> {
        self.arena_mut()?.bytes_mut(at, bytes)?.fill(byte);
        Ok(())
    }

    fn copy(&mut self, from: u64, to: u64, bytes: Bytes) -> Result<(), DeviceError> {
        self.arena_mut()?.copy(from, to, bytes)
    }

    fn launch(&mut self, launch: &Launch<'_>) -> Result<(), DeviceError> {
        let l = Operands { arena: self.arena()?, launch };
        let cpu = &self.cpu;
        match launch.op {
            Op::Add(_) => elementwise::add(cpu, l.input(0)?, l.input(1)?, l.output(0)?),
            Op::Attention(op) => l.attention(cpu, op)?,
            Op::BatchNorm(op) => {
                let [gamma, beta, mean, var] = [l.vector(1)?, l.vector(2)?, l.vector(3)?, l.vector(4)?];
                let norm = BatchNorm { gamma, beta, mean, var, eps: op.eps };
                norm::batch_norm(cpu, l.input(0)?, norm, l.output(0)?);
            }
            Op::Concat(_) => {
                let mut y = l.output(0)?;
                let mut column = 0;
                for i in 0..launch.ins.len() {
                    let x = l.input(i)?;
                    elementwise::copy(cpu, x, y.columns(column, x.cols()));
                    column += x.cols();
                }
            }
            Op::Embed(op) => l.embed(cpu, op)?,
            Op::Gelu(_) => elementwise::gelu(cpu, l.input(0)?, l.output(0)?),
            Op::Glu(_) => elementwise::glu(cpu, l.input(0)?, l.output(0)?),
            Op::LayerNorm(op) => {
                let (gamma, beta, y) = (l.vector(1)?, l.vector(2)?, l.output(0)?);
                let (mean, rstd) = (l.vector_out(1)?, l.vector_out(2)?);
                norm::layer_norm(cpu, l.input(0)?, gamma, beta, op.eps, y, mean, rstd);
            }
            Op::Linear(op) => l.linear(cpu, op)?,
            Op::Relu(_) => elementwise::relu(cpu, l.input(0)?, l.output(0)?),
            Op::RotaryTable(_) => {
                let inv_freq = l.vector(0)?;
                let (cos, sin) = (l.flat_out(0)?, l.flat_out(1)?);
                rope::table(inv_freq, cos.len() / inv_freq.len().max(1), cos, sin);
            }
            Op::SegmentMean(op) => {
                let x = l.input(0)?;
                let (first, last) = (op.skip_first as usize, op.skip_last as usize);
                reduce::segment_mean(cpu, x, l.spans(1, x.rows())?, first, last, l.output(0)?);
            }
            Op::SelectRows(_) => {
                let x = l.input(0)?;
                embed::gather(cpu, l.ids(1, x.rows())?, x, None, l.output(0)?);
            }
            Op::Softmax(_) => reduce::softmax(cpu, l.input(0)?, l.output(0)?),
            Op::AttentionGrad(_)
            | Op::GeluGrad(_)
            | Op::LayerNormGrad(_)
            | Op::LinearInputGrad(_)
            | Op::LinearWeightGrad(_) => {
                return Err(l.refuse("the CPU has no kernel for it".to_owned()));
            }
        }
        Ok(())
    }
}

/// The operands of a launch as the kernels take them.
struct Operands<'a> {
    arena: &'a Arena,
    launch: &'a Launch<'a>,
}

impl<'a> Operands<'a> {
    fn refuse(&self, why: String) -> DeviceError {
        DeviceError::Kernel { op: self.launch.op.name(), why }
    }

    /// The first element of an operand whose bytes lie inside the arena.
    fn start(&self, o: &Operand) -> Result<*mut f32, DeviceError> {
        if o.spec.dtype != DType::F32 && o.spec.dtype != DType::I32 {
            return Err(self.refuse(format!("no kernel for {}", o.spec)));
        }
        Ok(self.arena.range(o.at, o.bytes(self.launch.counts))?.as_ptr().cast())
    }

    fn input(&self, i: usize) -> Result<Rows<'a>, DeviceError> {
        let o = &self.launch.ins[i];
        let (rows, columns) = o.matrix(self.launch.counts);
        // SAFETY: the bytes are inside the arena; only an output that may alias overlaps them.
        Ok(unsafe { Rows::from_raw(self.start(o)?, rows, columns, columns) })
    }

    fn wanted(&self, k: usize) -> Result<&'a Operand, DeviceError> {
        self.launch.outs[k].as_ref().ok_or_else(|| self.refuse(format!("output {k} has no storage")))
    }

    fn output(&self, k: usize) -> Result<RowsMut<'a>, DeviceError> {
        let o = self.wanted(k)?;
        let (rows, columns) = o.matrix(self.launch.counts);
        // SAFETY: the bytes are inside the arena; only inputs that the op may write over overlap them.
        Ok(unsafe { RowsMut::from_raw(self.start(o)?, rows, columns, columns) })
    }

    /// An input as one run of floats.
    fn vector(&self, i: usize) -> Result<&'a [f32], DeviceError> {
        let o = &self.launch.ins[i];
        let len = o.spec.elements_at(self.launch.counts) as usize;
        // SAFETY: inside the arena; the checker admits no writer of a parameter or table while it is read.
        Ok(unsafe { std::slice::from_raw_parts(self.start(o)?, len) })
    }

    /// An output as one run of floats.
    fn flat_out(&self, k: usize) -> Result<&'a mut [f32], DeviceError> {
        let o = self.wanted(k)?;
        let len = o.spec.elements_at(self.launch.counts) as usize;
        // SAFETY: inside the arena; outputs overlap nothing but inputs that the op may write over.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.start(o)?, len) })
    }

    /// An output as one run of floats, if it is wanted.
    fn vector_out(&self, k: usize) -> Result<Option<&'a mut [f32]>, DeviceError> {
        self.launch.outs[k].as_ref().map(|_| self.flat_out(k)).transpose()
    }

    fn workspace(&self) -> Result<&'a mut [f32], DeviceError> {
        let Some((at, bytes)) = self.launch.workspace else { return Ok(&mut []) };
        let start = self.arena.range(at, bytes)?.as_ptr().cast();
        // SAFETY: inside the arena; a workspace overlaps no operand.
        Ok(unsafe { std::slice::from_raw_parts_mut(start, bytes.0 as usize / 4) })
    }

    /// Row indices below `rows`.
    fn ids(&self, i: usize, rows: usize) -> Result<&'a [u32], DeviceError> {
        let o = &self.launch.ins[i];
        let len = o.spec.elements_at(self.launch.counts) as usize;
        // SAFETY: inside the arena; every bit pattern is a u32.
        let ids: &[u32] = unsafe { std::slice::from_raw_parts(self.start(o)?.cast(), len) };
        match ids.iter().find(|&&id| id as usize >= rows) {
            Some(id) => Err(self.refuse(format!("row {} of a table of {rows}", *id as i32))),
            None => Ok(ids),
        }
    }

    /// Ascending (start, end) pairs inside of `rows`.
    fn spans(&self, i: usize, rows: usize) -> Result<&'a [[u32; 2]], DeviceError> {
        let o = &self.launch.ins[i];
        let len = o.spec.rows(self.launch.counts) as usize;
        // SAFETY: inside the arena; (S, 2) elements in C order are S pairs.
        let spans: &[[u32; 2]] = unsafe { std::slice::from_raw_parts(self.start(o)?.cast(), len) };
        let mut before = 0;
        for &[start, end] in spans {
            if start < before || end < start || end as usize > rows {
                return Err(self.refuse(format!("span {start}..{end} of {rows} rows")));
            }
            before = end;
        }
        Ok(spans)
    }

    fn embed(&self, cpu: &Cpu, op: &Embed) -> Result<(), DeviceError> {
        let table = self.input(1)?;
        let ids = self.ids(0, table.rows())?;
        let y = self.output(0)?;
        let plus = op.row.then(|| self.vector(2)).transpose()?;
        match op.token_dropout {
            Some(dropout) => {
                let spans = self.spans(2 + usize::from(op.row), ids.len())?;
                embed::gather_esm(cpu, ids, spans, dropout.mask_id as u32, dropout.keep, table, plus, y);
            }
            None => embed::gather(cpu, ids, table, plus, y),
        }
        Ok(())
    }

    fn linear(&self, cpu: &Cpu, op: &Linear) -> Result<(), DeviceError> {
        let bias = op.bias.then(|| self.vector(2)).transpose()?;
        let after = 2 + usize::from(op.bias);
        let (act, residual) = match op.epilogue {
            Epilogue::None => (Act::None, None),
            Epilogue::Gelu => (Act::Gelu, None),
            Epilogue::Residual => (Act::None, Some(self.input(after)?)),
        };
        let epilogue = gemm::Epilogue { bias, act, residual };
        gemm::linear(cpu, self.input(0)?, self.vector(1)?, epilogue, self.output(0)?, self.workspace()?);
        Ok(())
    }

    fn attention(&self, cpu: &Cpu, op: &Attention) -> Result<(), DeviceError> {
        if op.mask != Mask::Full || op.kv_heads != op.heads {
            return Err(self.refuse("the CPU's kernel has no masks and no shared heads".to_owned()));
        }
        let width = op.width() as usize;
        let [q, k, v] = match op.qkv {
            Qkv::Separate => [self.input(0)?, self.input(1)?, self.input(2)?],
            Qkv::Fused => {
                let qkv = self.input(0)?;
                [0, 1, 2].map(|i| qkv.columns(i * width, width))
            }
        };
        let after = op.operands();
        let spans = self.spans(after, q.rows())?;
        let rope = if op.rotary {
            Some(Rope { cos: self.vector(after + 1)?, sin: self.vector(after + 2)? })
        } else {
            None
        };
        let mut slopes = [0.0; MAX_HEADS];
        let heads = op.heads as usize;
        if heads > MAX_HEADS {
            return Err(self.refuse(format!("{heads} heads are more than {MAX_HEADS}")));
        }
        let slopes = match op.bias {
            Bias::None => None,
            Bias::Alibi => {
                for (slot, slope) in slopes.iter_mut().zip(alibi_slopes(op.heads)) {
                    *slot = slope;
                }
                Some(&slopes[..heads])
            }
        };
        let shape =
            attention::Attention { heads, head_dim: op.head_dim as usize, scale: op.scale, rope, slopes };
        let lse = self.launch.outs[1].as_ref().map(|_| self.output(1)).transpose()?;
        attention::attention(cpu, shape, q, k, v, spans, self.output(0)?, lse, self.workspace()?);
        Ok(())
    }
}
