//! Attention kernels on a CUDA device in bf16 and f16: narrow heads, heads of 64 columns (on Hopper two
//! kernels, by length of the sequences) with and without rotary embedding, heads of 128 columns, and wider ones. Results
//! are close to the f64 reference for scores of any magnitude, and a sequence has equal bits alone and in a
//! batch.

use plimsoll_cuda::{CudaDevice, cards};
use plimsoll_exec::reference::{Tensor, eval};
use plimsoll_exec::{Allocation, Device, Launch, Operand};
use plimsoll_graph::ops::{Attention, Bias, Mask, Qkv};
use plimsoll_graph::{Bytes, Counts, DType, Dim, Op, TensorSpec};
use plimsoll_plan::{CudaKernel, KernelId, Location};

/// Number of heads; not a multiple of the number of heads that one block processes.
const HEADS: u32 = 5;
/// Lengths of sequences: single tokens, complete and incomplete blocks of 16 keys, more than a block of queries
/// and more than a tile of keys.
const LENGTHS: [usize; 11] = [1, 2, 15, 16, 17, 50, 64, 65, 170, 192, 450];

struct Batch {
    device: CudaDevice,
    op: Attention,
    dtype: DType,
    lengths: Vec<usize>,
}

impl Batch {
    fn new((head_dim, rotary): (u32, bool), dtype: DType, lengths: Vec<usize>) -> Self {
        let (scale, mask, bias) = ((head_dim as f32).sqrt().recip(), Mask::Full, Bias::None);
        let op =
            Attention { heads: HEADS, kv_heads: HEADS, head_dim, scale, mask, bias, rotary, qkv: Qkv::Fused };
        Self { device: CudaDevice::without_timing(0).expect("a card"), op, dtype, lengths }
    }

    /// Runs the kernel on packed q, k and v, given per sequence, and returns the bytes of o per sequence.
    fn run(&mut self, rows: &[Vec<f64>]) -> Vec<Vec<u8>> {
        let tokens: usize = self.lengths.iter().sum();
        let counts = Counts { tokens: tokens as u64, sequences: self.lengths.len() as u64, packs: 1 };
        let (t, half) = (Dim::Tokens(1), u64::from(self.op.head_dim) / 2);
        let longest = self.longest() as u64;
        let shapes = [
            (vec![t, Dim::Fixed(3 * self.op.width())], self.dtype),
            (vec![Dim::Sequences(1), Dim::Fixed(2)], DType::I32),
            (vec![Dim::Fixed(longest), Dim::Fixed(half)], DType::F32),
            (vec![Dim::Fixed(longest), Dim::Fixed(half)], DType::F32),
            (vec![t, Dim::Fixed(self.op.width())], self.dtype),
        ];
        let mut end = 0;
        let place = |(shape, dtype)| {
            let spec = TensorSpec::activation(shape, dtype);
            let at = end;
            end += spec.bytes_at(counts).align_up(256).0;
            Operand { at, spec }
        };
        let mut ins: Vec<Operand> = shapes.into_iter().map(place).collect();
        let out = ins.pop().expect("the output");
        ins.truncate(if self.op.rotary { 4 } else { 2 });
        self.device.allocate(&Allocation::arena(Bytes(end))).expect("memory");
        self.device.fill(Location::in_arena(0), Bytes(end), 0xFF).expect("fill");
        let op = Op::Attention(self.op);
        let launch = Launch {
            op: &op,
            kernel: KernelId::Cuda(CudaKernel::Flash),
            ins: &ins,
            outs: &[Some(out.clone()), None],
            workspace: None,
            counts,
        };
        self.device.prepare(std::slice::from_ref(&launch), &mut |_| {}).expect("a kernel");
        let qkv: Vec<u8> = rows.iter().flatten().flat_map(|&x| narrow(x, self.dtype).to_le_bytes()).collect();
        let spans: Vec<u8> = self.spans().into_iter().flat_map(i32::to_le_bytes).collect();
        let [cosines, sines] =
            self.tables().map(|t| t.into_iter().flat_map(f32::to_le_bytes).collect::<Vec<u8>>());
        for (operand, bytes) in ins.iter().zip([qkv, spans, cosines, sines]) {
            self.device.upload(Location::in_arena(operand.at), &bytes).expect("upload");
        }
        self.device.launch(&launch).expect("launch");
        let mut bytes = vec![0; out.spec.bytes_at(counts).0 as usize];
        self.device.download(Location::in_arena(out.at), &mut bytes).expect("download");
        let row = self.op.width() as usize * 2;
        self.spans().chunks(2).map(|s| bytes[s[0] as usize * row..s[1] as usize * row].to_vec()).collect()
    }

    fn longest(&self) -> usize {
        self.lengths.iter().copied().max().unwrap_or(0)
    }

    fn spans(&self) -> Vec<i32> {
        let mut end = 0;
        let span = |&n: &usize| {
            end += n as i32;
            [end - n as i32, end]
        };
        self.lengths.iter().flat_map(span).collect()
    }

    fn tables(&self) -> [Vec<f32>; 2] {
        let half = self.op.head_dim / 2;
        let frequency = |j: u32| 10_000f64.powf(-f64::from(j) / f64::from(half));
        let angles = (0..self.longest()).flat_map(|p| (0..half).map(move |j| p as f64 * frequency(j)));
        let angles: Vec<f64> = angles.collect();
        [f64::cos, f64::sin].map(|of| angles.iter().map(|&a| of(a) as f32).collect())
    }

    /// Relative L2 distance of all rows of o from the reference implementation in f64.
    fn distance(&self, rows: &[Vec<f64>], found: &[Vec<u8>]) -> f64 {
        let (tokens, width) = (self.lengths.iter().sum::<usize>(), self.op.width() as usize);
        let half = self.op.head_dim as usize / 2;
        let qkv = Tensor::f64(&[tokens, 3 * width], rows.concat());
        let spans = Tensor::i32(&[self.lengths.len(), 2], self.spans());
        let [cosines, sines] = self.tables().map(|table| Tensor::f32(&[self.longest(), half], table));
        let ins = [&qkv, &spans, &cosines, &sines];
        let ins = if self.op.rotary { &ins[..] } else { &ins[..2] };
        let wanted = eval(&Op::Attention(self.op), ins, &[Some(vec![tokens, width]), None]);
        let wanted = wanted.expect("defined").swap_remove(0).expect("wanted");
        let words = found.iter().flatten().copied().collect::<Vec<u8>>();
        let found = words.chunks_exact(2).map(|b| widen(u16::from_le_bytes([b[0], b[1]]), self.dtype));
        let (mut error, mut norm) = (0.0, 0.0);
        for (found, wanted) in found.zip(wanted.floats().expect("floats")) {
            error += (found - wanted).powi(2);
            norm += wanted * wanted;
        }
        (error / norm).sqrt()
    }
}

/// Random rows of q, k and v per sequence, representable in the element type: k and v in -1 .. 1, q times
/// `amplitude`.
fn random(batch: &Batch, amplitude: f64) -> Vec<Vec<f64>> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        // xorshift64 (Marsaglia 2003).
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f64 / f64::from(1 << 23) - 1.0
    };
    let width = batch.op.width() as usize;
    let mut row = || {
        let factor = |column| if column < width { amplitude } else { 1.0 };
        let of = |column| widen(narrow(factor(column) * next(), batch.dtype), batch.dtype);
        (0..3 * width).map(of).collect::<Vec<f64>>()
    };
    batch.lengths.iter().map(|&n| (0..n).flat_map(|_| row()).collect()).collect()
}

/// Truncates to the bits of the element type; numbers below the normal range of f16 become zero.
fn narrow(x: f64, dtype: DType) -> u16 {
    let bits = (x as f32).to_bits();
    let exponent = (bits >> 23 & 0xff) as i32 - 112;
    let magnitude = if exponent <= 0 { 0 } else { (exponent as u32) << 10 | bits >> 13 & 0x3ff };
    if dtype == DType::Bf16 { (bits >> 16) as u16 } else { (bits >> 16 & 0x8000 | magnitude) as u16 }
}

fn widen(bits: u16, dtype: DType) -> f64 {
    if dtype == DType::Bf16 {
        return f64::from(f32::from_bits(u32::from(bits) << 16));
    }
    let (exponent, mantissa) = (i32::from(bits >> 10 & 31), f64::from(bits & 0x3ff));
    let magnitude = match exponent {
        0 => mantissa * 2f64.powi(-24),
        31 => f64::NAN,
        normal => (1.0 + mantissa / 1024.0) * 2f64.powi(normal - 15),
    };
    if bits >> 15 == 1 { -magnitude } else { magnitude }
}

#[test]
fn heads_are_the_definition_and_have_the_same_bits_in_any_company() {
    if !cards().is_ok_and(|cards| !cards.is_empty()) {
        println!("skipped: no CUDA device");
        return;
    }
    for (dtype, limit) in [(DType::Bf16, 2f64.powi(-7)), (DType::F16, 2f64.powi(-10))] {
        let narrow = [(16, true), (24, true), (32, true), (64, true), (64, false)];
        for head in narrow.into_iter().chain([(128, true), (192, true), (256, true)]) {
            // The largest amplitude makes exponentials overflow f32, so that rows are computed again relative
            // to their maximum.
            for amplitude in [1.0, 8.0, 400.0] {
                let mut all = Batch::new(head, dtype, LENGTHS.to_vec());
                let rows = random(&all, amplitude);
                let found = all.run(&rows);
                let (distance, of) = (all.distance(&rows, &found), (dtype, head, amplitude));
                // Rotary embedding rounds q and k: the error of a score grows with the score, and is a relative
                // error of its weight.
                let limit = limit * (amplitude / 4.0).max(1.0);
                assert!(distance <= limit, "{of:?}: {distance:e}");
                for (i, n) in LENGTHS.into_iter().enumerate() {
                    let mut alone = Batch::new(head, dtype, vec![n]);
                    assert!(alone.run(&rows[i..=i])[0] == found[i], "{of:?}: {n} tokens alone have other bits");
                }
            }
        }
    }
}

/// Small inputs with complete and incomplete tiles of queries and keys, and with enough short sequences that a
/// persistent block processes several items, so that compute-sanitizer finishes in seconds
/// (`bench/sanitize.sh`).
fn few_tokens(heads: &[(u32, bool)]) {
    if !cards().is_ok_and(|cards| !cards.is_empty()) {
        println!("skipped: no CUDA device");
        return;
    }
    for &head in heads {
        // Short and long sequences have kernels or variants of their own.
        for lengths in [vec![1, 17, 66], vec![200, 131], vec![3; 400]] {
            let mut batch = Batch::new(head, DType::Bf16, lengths);
            batch.op.bias = if batch.op.rotary { Bias::None } else { Bias::Alibi };
            let rows = random(&batch, 1.0);
            let found = batch.run(&rows);
            let distance = batch.distance(&rows, &found);
            assert!(distance <= 2f64.powi(-7), "{head:?}: {distance:e}");
        }
    }
}

#[test]
fn few_tokens_of_narrow_heads() {
    few_tokens(&[(16, true), (24, true), (32, false)]);
}

#[test]
fn few_tokens_of_heads_of_64_columns() {
    few_tokens(&[(64, true), (64, false)]);
}

#[test]
fn few_tokens_of_heads_of_128_columns() {
    few_tokens(&[(128, true), (128, false)]);
}

#[test]
fn few_tokens_of_wide_heads() {
    few_tokens(&[(192, true), (192, false), (256, true), (256, false)]);
}
