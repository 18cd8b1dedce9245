//! Linear layers on a CUDA device, compared to loops in f64: every variant and odd shapes; a row has equal bits
//! in any batch.

use plimsoll_cuda::{CudaDevice, cards};
use plimsoll_exec::scaled::QuantizedFormat;
use plimsoll_exec::{Allocation, Device, DeviceError, Launch, Operand};
use plimsoll_graph::ops::{Epilogue, LayerNorm, Linear, OperandFormat, Prologue};
use plimsoll_graph::{Bytes, Counts, DType, Dim, GRANULE, Op, TensorSpec};
use plimsoll_plan::{CudaKernel, KernelId, Location};

/// Tokens of a full step.
const FULL: u64 = 1000;
const DTYPES: [DType; 4] = [DType::F32, DType::Bf16, DType::F16, DType::F8];

/// Element types whose matmuls the device supports.
fn dtypes() -> impl Iterator<Item = DType> {
    let old = cards().is_ok_and(|cards| cards[0].capability < (8, 9));
    DTYPES.into_iter().filter(move |&dtype| !(old && dtype == DType::F8))
}

/// Whether the machine has a CUDA device; prints a line if not.
pub fn found() -> bool {
    let found = cards().is_ok_and(|cards| !cards.is_empty());
    if !found {
        println!("skipped: no CUDA device");
    }
    found
}

/// Whether the first device is a Hopper device, for which the crate has wgmma kernels.
pub fn on_hopper() -> bool {
    let hopper = cards().is_ok_and(|cards| cards.first().is_some_and(|card| card.capability == (9, 0)));
    if !hopper {
        println!("skipped: no CUDA device of compute capability 9.0");
    }
    hopper
}

/// A linear layer with its operands in a device's arena.
struct Case {
    device: CudaDevice,
    op: Op,
    ins: Vec<Operand>,
    out: Operand,
    workspace: (u64, Bytes),
    /// Rows of a full step.
    rows: u64,
    values: Vec<Vec<f64>>,
}

impl Case {
    /// Creates a prepared case with random operands; with `in_place` the residual and the output share their memory.
    fn new(n: u64, k: u64, dtype: DType, linear: Linear, in_place: bool) -> Self {
        Self::on(CudaDevice::without_timing(0).expect("a card"), (n, k), dtype, linear, in_place)
    }

    fn on(device: CudaDevice, shape: (u64, u64), dtype: DType, linear: Linear, in_place: bool) -> Self {
        Self::of(device, [FULL, shape.0, shape.1], dtype, linear, in_place)
    }

    /// Creates a case with the given number of rows in a full step.
    fn of(
        mut device: CudaDevice,
        [rows, n, k]: [u64; 3],
        dtype: DType,
        linear: Linear,
        in_place: bool,
    ) -> Self {
        let t = Dim::Tokens(1);
        let weight_rows = if linear.epilogue == Epilogue::Gate { 2 * n } else { n };
        let mut shapes = vec![vec![t, Dim::Fixed(k)], vec![Dim::Fixed(weight_rows), Dim::Fixed(k)]];
        shapes.extend(linear.bias.then(|| vec![Dim::Fixed(weight_rows)]));
        let residual = linear.epilogue == Epilogue::Residual;
        shapes.extend(residual.then(|| vec![t, Dim::Fixed(n)]));
        let norm = linear.prologue != Prologue::None;
        shapes.extend([Dim::Fixed(k), Dim::Fixed(k)].map(|dim| vec![dim]).into_iter().filter(|_| norm));
        shapes.push(vec![t, Dim::Fixed(n)]);
        let mut end = 0;
        // With quantized x and w, all other operands are bf16.
        let others = if dtype == DType::F8 { DType::Bf16 } else { dtype };
        let of = |i| match i {
            0 | 1 => dtype,
            i if norm && (linear.norm_at()..linear.norm_at() + 2).contains(&i) => DType::F32,
            _ => others,
        };
        let mut operands: Vec<Operand> = shapes
            .into_iter()
            .enumerate()
            .map(|(i, shape)| {
                let spec = TensorSpec::activation(shape, of(i));
                let at = end;
                end += spec.bytes_at(full(rows)).align_up(256).0;
                Operand { at, spec }
            })
            .collect();
        let mut out = operands.pop().expect("the output");
        if residual && in_place {
            out.at = operands.last().expect("the residual").at;
        }
        let scratch = Bytes(32 << 20);
        device.allocate(&Allocation::arena(Bytes(end + scratch.0))).expect("memory");
        device.fill(Location::in_arena(0), Bytes(end), 0xFF).expect("fill");
        let format = if dtype == DType::F8 { OperandFormat::E4m3 } else { linear.operands };
        let (op, workspace) = (Op::Linear(Linear { operands: format, ..linear }), (end, scratch));
        let mut case = Self { device, op, ins: operands, out, workspace, rows, values: vec![] };
        case.launch(rows, true);
        case.values = case.ins.iter().enumerate().map(|(i, operand)| random(operand, i as u64, rows)).collect();
        if linear.operands == OperandFormat::Tf32 {
            case.values[..2].iter_mut().flatten().for_each(|x| *x = cut_to_tf32(*x));
        }
        case
    }

    fn launch(&mut self, rows: u64, preparing: bool) {
        let result = self.issue(rows, preparing);
        result.unwrap_or_else(|error| panic!("{}: {error}: {error:?}", self.name()));
    }

    /// Prepares a full step, which the device must refuse, and returns the error.
    fn refusal(&mut self) -> String {
        self.issue(FULL, true).expect_err("a refusal").to_string()
    }

    fn issue(&mut self, rows: u64, preparing: bool) -> Result<(), DeviceError> {
        let counts = Counts { tokens: rows, sequences: 1, packs: 1 };
        let outs = [Some(self.out.clone())];
        let (op, ins, workspace) = (&self.op, &self.ins[..], Some(self.workspace));
        let launch = Launch { op, kernel: kernel_of(ins[0].spec.dtype), ins, outs: &outs, workspace, counts };
        if preparing {
            self.device.prepare(std::slice::from_ref(&launch), &mut |_| {})
        } else {
            self.device.launch(&launch)
        }
    }

    /// Runs a step of `rows` rows, starting with row `shift` of the operands, and returns the bytes of the
    /// whole output.
    fn run(&mut self, rows: u64, shift: usize) -> Vec<u8> {
        let mut bytes = vec![0; self.out.bytes(full(self.rows)).0 as usize];
        self.device.fill(Location::in_arena(self.out.at), Bytes(bytes.len() as u64), 0xFF).expect("fill");
        for (operand, values) in self.ins.iter().zip(&self.values) {
            let by_token = operand.spec.shape[0] == Dim::Tokens(1);
            let mut values = values.clone();
            if by_token {
                values.rotate_left(shift * operand.spec.row_elements() as usize);
            }
            let fed = if by_token { rows * operand.spec.row_elements() } else { values.len() as u64 };
            let data = encode(&values[..fed as usize], &operand.spec);
            self.device.upload(Location::in_arena(operand.at), &data).expect("upload");
        }
        self.launch(rows, false);
        self.device.download(Location::in_arena(self.out.at), &mut bytes).expect("download");
        bytes
    }

    /// Takes the operands of a case with a fused norm; its rows are normalised by a separate kernel here.
    fn normalised_of(&mut self, case: &Self, linear: Linear, norm: LayerNorm) {
        let rows = normalised(case, linear, norm);
        self.values = [vec![rows], case.values[1..linear.norm_at()].to_vec()].concat();
    }

    fn row(&self) -> usize {
        (self.out.spec.row_elements() * self.out.spec.dtype.size()) as usize
    }

    fn name(&self) -> String {
        format!("{:?} {} x {}, {:?}", self.op, self.ins[1].spec, self.ins[0].spec, self.device.matmul_kernels())
    }

    /// Returns (value, allowed error) of an element. The error of f32 sums grows with the square root of their
    /// length; 16-bit results are rounded, twice if GELU follows.
    fn expected(&self, linear: Linear, row: usize, column: usize) -> (f64, f64) {
        if linear.epilogue == Epilogue::Gate {
            let plain = Linear { epilogue: Epilogue::None, ..linear };
            let n = self.out.spec.row_elements() as usize;
            let [(gate, error), (passed, other)] = [column, n + column].map(|at| self.expected(plain, row, at));
            let (error, value) = (1.2 * error, gelu(gate) * passed);
            return (
                value,
                error * (passed.abs() + other) + gelu(gate).abs() * other + value.abs() * 2f64.powi(-8),
            );
        }
        let k = self.ins[0].spec.row_elements() as usize;
        let (x, w) = (self.row_of_x(linear, row), &self.values[1][column * k..][..k]);
        let products = x.iter().zip(w).map(|(x, w)| x * w);
        let squares: f64 = products.clone().map(|p| p * p).sum();
        let n = self.out.spec.row_elements() as usize;
        let mut s: f64 = products.sum();
        s += if linear.bias { self.values[2][column] } else { 0.0 };
        let rounding = match self.out.spec.dtype {
            DType::F32 => 2f64.powi(-23),
            DType::Bf16 => 2f64.powi(-8),
            DType::F16 => 2f64.powi(-11),
            DType::F8 | DType::I8 | DType::I32 | DType::U8 => panic!("no matmul"),
        };
        let mut summing = 2f64.powi(-22) * (k as f64 * squares).sqrt().max(s.abs()) + 1e-7;
        if linear.operands == OperandFormat::Tf32 {
            // Tensor cores truncate the last bits when they add.
            summing *= 4.0;
        }
        if linear.prologue != Prologue::None {
            // Normalised rows are rounded: ten times the error that half a unit in the last place of each adds up to.
            summing += 3.0 * rounding * squares.sqrt();
        }
        if self.ins[0].spec.dtype == DType::F8 {
            // FP8 tensor cores keep about 14 bits of a sum and drop the lower ones after every instruction, which
            // adds 32 terms. The error allowed for that is 2^-13 of the sum for each instruction.
            summing += 2f64.powi(-13) * (k as f64 / 32.0).ceil() * s.abs().max(2.0 * squares.sqrt());
        }
        match linear.epilogue {
            Epilogue::None => (s, summing + rounding * s.abs()),
            Epilogue::Residual => {
                // cuBLASLt may round the product, and the product with its bias, before it adds the residual.
                let residual = self.values[2 + usize::from(linear.bias)][row * n + column];
                let product = s - if linear.bias { self.values[2][column] } else { 0.0 };
                let rounded = product.abs() + s.abs() + (s + residual).abs();
                (s + residual, summing + rounding * rounded)
            }
            Epilogue::Gate | Epilogue::SiluGate => unreachable!("two sums"),
            Epilogue::Gelu => (gelu(s), 1.2 * (summing + rounding * s.abs()) + rounding * gelu(s).abs()),
        }
    }

    /// A row of the left operand of the matmul: as uploaded, or normalised.
    fn row_of_x(&self, linear: Linear, row: usize) -> Vec<f64> {
        let k = self.ins[0].spec.row_elements() as usize;
        let x = &self.values[0][row * k..][..k];
        let Prologue::LayerNorm(LayerNorm { eps }) = linear.prologue else { return x.to_vec() };
        let [gamma, beta] = [0, 1].map(|i| &self.values[linear.norm_at() + i]);
        let mean = x.iter().sum::<f64>() / k as f64;
        let variance = x.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / k as f64;
        let rstd = 1.0 / (variance + f64::from(eps)).sqrt();
        x.iter().zip(gamma).zip(beta).map(|((x, g), b)| (x - mean) * rstd * g + b).collect()
    }

    /// Runs the full step, checks a sample of its rows, and returns the bytes of the output.
    fn check(&mut self, linear: Linear) -> Vec<u8> {
        let (full, n) = (self.run(FULL, 0), self.out.spec.row_elements() as usize);
        let values = decode(&full, &self.out.spec);
        for row in [0, 1, 31, 32, 127, 128, 500, FULL as usize - 1] {
            for column in 0..n {
                let (value, (expected, allowed)) =
                    (values[row * n + column], self.expected(linear, row, column));
                let error = (value - expected).abs();
                assert!(error <= allowed, "{}: ({row}, {column}): {value}, not {expected}", self.name());
            }
        }
        full
    }

    /// Checks that rows have equal bits in steps of fewer rows and at other positions, and that nothing behind
    /// them is written.
    fn check_batches(&mut self, full: &[u8]) {
        let row = self.row();
        for rows in [1, 2, 31, 32, 33, 999] {
            let few = self.run(rows as u64, 0);
            let (given, rest) = few.split_at(rows * row);
            assert!(given == &full[..rows * row], "{}: {rows} rows have other bits", self.name());
            // `run` has filled the output with 0xFF; the bytes behind the rows of this step must be unchanged.
            assert!(rest.iter().all(|byte| *byte == 0xFF), "{}: wrote behind {rows} rows", self.name());
        }
        let shifted = self.run(FULL, 777);
        let (there, here) = (&full[777 * row..], &shifted[..(FULL as usize - 777) * row]);
        assert!(there == here, "{}: other bits in another place", self.name());
    }
}

/// Truncates x to the 10 bits of mantissa of TF32.
fn cut_to_tf32(x: f64) -> f64 {
    f64::from(f32::from_bits((x as f32).to_bits() & !0x1fff))
}

pub fn full(rows: u64) -> Counts {
    Counts { tokens: rows, sequences: 1, packs: 1 }
}

/// Random numbers in [-1, 1) that are representable in the element type.
pub fn random(operand: &Operand, seed: u64, rows: u64) -> Vec<f64> {
    let mut state = 0x9e37_79b9_7f4a_7c15 ^ (seed + 1);
    let mut next = || {
        // xorshift64 (Marsaglia 2003).
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f64 / f64::from(1 << 23) - 1.0
    };
    let elements: u64 = operand.spec.shape.iter().map(|d| d.at(full(rows))).product();
    let values: Vec<f64> = (0..elements).map(|_| next()).collect();
    decode(&encode(&values, &operand.spec), &operand.spec)
}

/// Encodes values in the element type of `spec`. f32, bf16 and f16 truncate, so that a representable value is
/// unchanged. e4m3 quantizes every row to nearest, with a scale of its own; decoded rows that are encoded again keep
/// their e4m3 values, but a scale may differ in its last bit.
pub fn encode(values: &[f64], spec: &TensorSpec) -> Vec<u8> {
    let half = |value: f64| {
        let bits = (value as f32).to_bits();
        let exponent = (bits >> 23 & 0xff) as i32 - 127 + 15;
        let magnitude = match exponent {
            ..=0 => (value.abs() * 2f64.powi(24)) as u32,
            _ => (exponent as u32) << 10 | bits >> 13 & 0x3ff,
        };
        (bits >> 16 & 0x8000 | magnitude) as u16
    };
    match spec.dtype {
        DType::F8 => QuantizedFormat::E4m3.encode(values, spec.row_elements() as usize),
        DType::F32 => values.iter().flat_map(|v| (*v as f32).to_le_bytes()).collect(),
        DType::Bf16 => {
            values.iter().flat_map(|v| (((*v as f32).to_bits() >> 16) as u16).to_le_bytes()).collect()
        }
        DType::F16 => values.iter().flat_map(|v| half(*v).to_le_bytes()).collect(),
        DType::I8 | DType::I32 | DType::U8 => panic!("no matmul"),
    }
}

pub fn decode(bytes: &[u8], spec: &TensorSpec) -> Vec<f64> {
    let words = || bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]));
    let half = |bits: u16| {
        let (exponent, mantissa) = (i32::from(bits >> 10 & 31), f64::from(bits & 0x3ff));
        let magnitude = match exponent {
            0 => mantissa * 2f64.powi(-24),
            31 => f64::NAN,
            normal => (1.0 + mantissa / 1024.0) * 2f64.powi(normal - 15),
        };
        if bits >> 15 == 1 { -magnitude } else { magnitude }
    };
    match spec.dtype {
        DType::F8 => {
            let columns = spec.row_elements() as usize;
            let row = columns.next_multiple_of(GRANULE as usize) + 4;
            QuantizedFormat::E4m3.decode(bytes, bytes.len() / row, columns)
        }
        DType::F32 => {
            bytes.chunks_exact(4).map(|b| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]]))).collect()
        }
        DType::Bf16 => words().map(|bits| f64::from(f32::from_bits(u32::from(bits) << 16))).collect(),
        DType::F16 => words().map(half).collect(),
        DType::I8 | DType::I32 | DType::U8 => panic!("no matmul"),
    }
}

/// `s * Phi(s)`, with erf by its series (Abramowitz and Stegun 7.1.6), which converges wherever sums lie here.
fn gelu(s: f64) -> f64 {
    let x = s.abs() / 2f64.sqrt();
    if x > 5.0 {
        return s.max(0.0);
    }
    let (mut term, mut sum) = (x, x);
    for i in 1..200 {
        term *= 2.0 * x * x / f64::from(2 * i + 1);
        sum += term;
    }
    let erf = sum * (-x * x).exp() * 2.0 / std::f64::consts::PI.sqrt();
    0.5 * s * (1.0 + erf.copysign(s))
}

#[test]
fn every_form_is_the_sum_in_f64() {
    if !found() {
        return;
    }
    for dtype in dtypes() {
        for (n, k) in [(640, 320), (7, 5)] {
            for bias in [false, true] {
                let forms = [
                    (Epilogue::None, false),
                    (Epilogue::Gelu, false),
                    (Epilogue::Residual, false),
                    (Epilogue::Residual, true),
                    (Epilogue::Gate, false),
                ];
                let unsupported = |epilogue| dtype == DType::F8 && epilogue == Epilogue::Gate;
                for (epilogue, in_place) in forms.into_iter().filter(|&(epilogue, _)| !unsupported(epilogue)) {
                    let linear = Linear::new(bias, epilogue);
                    Case::new(n, k, dtype, linear, in_place).check(linear);
                    if dtype == DType::F32 {
                        let linear = Linear { operands: OperandFormat::Tf32, ..linear };
                        Case::new(n, k, dtype, linear, in_place).check(linear);
                    }
                }
            }
        }
    }
}

#[test]
fn rows_have_the_same_bits_in_any_batch() {
    if !found() {
        return;
    }
    let whole = Linear::new(true, Epilogue::None);
    let cut = (DType::F32, Linear { operands: OperandFormat::Tf32, ..whole });
    for (dtype, linear) in dtypes().map(|dtype| (dtype, whole)).chain([cut]) {
        for (n, k) in [(1920, 640), (640, 2560), (512, 1152), (2, 512), (33, 2), (33, 1), (1, 33), (65, 130)] {
            let mut case = Case::new(n, k, dtype, linear, false);
            let full = case.check(linear);
            case.check_batches(&full);
        }
    }
}

#[test]
fn f32_is_cut_to_tf32_by_name_alone() {
    if !found() {
        return;
    }
    let (n, k) = (640, 2560);
    let of = |operands, timed| {
        let linear = Linear { operands, ..Linear::new(false, Epilogue::None) };
        let device = if timed { CudaDevice::new(0) } else { CudaDevice::without_timing(0) };
        let mut case = Case::on(device.expect("a card"), (n, k), DType::F32, linear, false);
        // Factors that are not cut to TF32, for both runs.
        case.values = case.ins.iter().enumerate().map(|(i, operand)| random(operand, i as u64, FULL)).collect();
        let found = decode(&case.run(FULL, 0), &case.out.spec);
        let plain = Linear::new(false, Epilogue::None);
        let wanted = (0..64).map(|row| case.expected(plain, row, row).0).collect::<Vec<f64>>();
        let found = (0..64).map(|row| found[row * n as usize + row]);
        let error: f64 = found.zip(&wanted).map(|(f, w)| (f - w).powi(2)).sum();
        let distance = (error / wanted.iter().map(|w| w * w).sum::<f64>()).sqrt();
        println!("{:?}: relative L2 {distance:.2e}", case.device.matmul_kernels());
        distance
    };
    for timed in [false, true] {
        let (whole, cut) = (of(OperandFormat::Stored, timed), of(OperandFormat::Tf32, timed));
        // bf16's 8 bits of mantissa would give 2e-3.
        assert!(whole < 2e-6 && (5e-5..1e-3).contains(&cut), "{whole} and {cut}");
    }
}

#[test]
fn our_own_kernel_on_hopper_is_the_sum_in_f64() {
    if !on_hopper() {
        return;
    }
    for name in CudaDevice::hopper_tiles() {
        for dtype in [DType::Bf16, DType::F16] {
            // Complete and incomplete tiles, several tiles per block, and sums that end inside of a stage.
            for (n, k) in [(2560, 640), (320, 480), (200, 16), (8, 8), (1032, 1288)] {
                let forms = [Epilogue::None, Epilogue::Gelu, Epilogue::Residual, Epilogue::Gate];
                for epilogue in forms {
                    let in_place = epilogue == Epilogue::Residual;
                    let linear = Linear::new(n != 320 && epilogue != Epilogue::Gate, epilogue);
                    let device = CudaDevice::with_matmul(0, name).expect("a card");
                    let mut case = Case::on(device, (n, k), dtype, linear, in_place);
                    let chosen = case.device.matmul_kernels();
                    // The largest tile has no registers for a residual, and its halves are no whole pieces; a
                    // gate takes two blocks.
                    let without: &[&str] = match epilogue {
                        Epilogue::None | Epilogue::Gelu => &[],
                        Epilogue::Residual => &["128x192-turns"],
                        Epilogue::Gate => &["128x192-turns", "128x128-alone"],
                        Epilogue::SiluGate => unreachable!("no form"),
                    };
                    if !without.contains(&name) {
                        assert!(chosen[0].ends_with(&format!("wgmma {name}")), "{chosen:?}");
                    }
                    let full = case.check(linear);
                    if !in_place {
                        case.check_batches(&full);
                    }
                }
            }
        }
    }
}

/// Normalises the rows of a case by a separate layer norm kernel on another device handle.
fn normalised(case: &Case, linear: Linear, norm: LayerNorm) -> Vec<f64> {
    let mut device = CudaDevice::without_timing(0).expect("a card");
    let (at, params) = (&case.ins[0], linear.norm_at());
    let op = Op::LayerNorm(norm);
    let ins = [at.clone(), case.ins[params].clone(), case.ins[params + 1].clone()];
    // Behind all operands, at the offset where the case has its workspace.
    let y = Operand { at: case.workspace.0, ..at.clone() };
    let counts = full(case.rows);
    device.allocate(&Allocation::arena(Bytes(y.at) + y.bytes(counts))).expect("memory");
    let outs = [Some(y.clone()), None, None];
    let launch = Launch {
        op: &op,
        kernel: KernelId::Cuda(CudaKernel::LayerNorm),
        ins: &ins,
        outs: &outs,
        workspace: None,
        counts,
    };
    device.prepare(std::slice::from_ref(&launch), &mut |_| {}).expect("a norm");
    for (operand, values) in ins.iter().zip([&case.values[0], &case.values[params], &case.values[params + 1]]) {
        device.upload(Location::in_arena(operand.at), &encode(values, &operand.spec)).expect("upload");
    }
    device.launch(&launch).expect("a norm");
    let mut bytes = vec![0; y.bytes(counts).0 as usize];
    device.download(Location::in_arena(y.at), &mut bytes).expect("download");
    decode(&bytes, &y.spec)
}

#[test]
fn a_norm_in_front_has_the_bits_of_the_two_apart() {
    if !on_hopper() {
        return;
    }
    let norm = LayerNorm { eps: 1e-5 };
    for (name, dtype) in
        CudaDevice::hopper_norm_tiles().into_iter().zip([DType::Bf16, DType::F16].into_iter().cycle())
    {
        // Shapes of ESM-2, incomplete tiles, and rows that end inside of a stage or of a lane's access.
        for (n, k) in [(1280, 320), (1440, 480), (1920, 640), (200, 72), (8, 8), (264, 536)] {
            for epilogue in [Epilogue::None, Epilogue::Gelu] {
                let plain = Linear::new(n != 1440, epilogue);
                let linear = Linear { prologue: Prologue::LayerNorm(norm), ..plain };
                let device = CudaDevice::with_matmul(0, name).expect("a card");
                let mut case = Case::on(device, (n, k), dtype, linear, false);
                assert!(case.device.matmul_kernels()[0].ends_with(&format!("wgmma {name}")), "{}", case.name());
                let full = case.check(linear);
                case.check_batches(&full);
                let device = CudaDevice::with_matmul(0, CudaDevice::hopper_tiles()[0]).expect("a card");
                let mut apart = Case::on(device, (n, k), dtype, plain, false);
                apart.normalised_of(&case, linear, norm);
                assert!(apart.run(FULL, 0) == full, "{}: not the bits of {}", case.name(), apart.name());
                // For few rows two separate kernels are chosen unless the kernel is named.
                let device = CudaDevice::without_timing(0).expect("a card");
                let mut few = Case::on(device, (n, k), dtype, linear, false);
                few.values = case.values.clone();
                assert!(few.run(FULL, 0) == full, "{}: not the bits of {}", few.name(), case.name());
            }
        }
    }
}

/// A small input with complete and incomplete tiles, stages and accesses, so that compute-sanitizer finishes in
/// seconds (`bench/sanitize.sh`).
#[test]
fn a_norm_in_front_of_two_tiles() {
    if !on_hopper() {
        return;
    }
    let norm = LayerNorm { eps: 1e-5 };
    for name in CudaDevice::hopper_norm_tiles() {
        for k in [8, 72] {
            let ([rows, n], dtype) = ([131, 72], DType::Bf16);
            let plain = Linear::new(true, Epilogue::Gelu);
            let linear = Linear { prologue: Prologue::LayerNorm(norm), ..plain };
            let [one, two] = [name, CudaDevice::hopper_tiles()[0]]
                .map(|name| CudaDevice::with_matmul(0, name).expect("a card"));
            let mut case = Case::of(one, [rows, n, k], dtype, linear, false);
            let mut apart = Case::of(two, [rows, n, k], dtype, plain, false);
            apart.normalised_of(&case, linear, norm);
            assert!(
                apart.run(rows, 0) == case.run(rows, 0),
                "{}: not the bits of {}",
                case.name(),
                apart.name()
            );
        }
    }
}

#[test]
fn norms_that_no_kernel_has_are_refused() {
    if !found() {
        return;
    }
    let prologue = Prologue::LayerNorm(LayerNorm { eps: 1e-5 });
    for (k, dtype, epilogue) in [
        (648, DType::Bf16, Epilogue::None),
        (320, DType::F32, Epilogue::None),
        (320, DType::Bf16, Epilogue::Residual),
        (324, DType::Bf16, Epilogue::Gelu),
    ] {
        let plain = Linear::new(false, epilogue);
        let mut case = Case::new(64, k, dtype, plain, false);
        case.op = Op::Linear(Linear { prologue, ..plain });
        let spec = TensorSpec::activation(vec![Dim::Fixed(k)], DType::F32);
        case.ins.extend([0, 0].map(|at| Operand { at, spec: spec.clone() }));
        let error = case.refusal();
        assert!(error.contains("norms are in front of matmuls of 16 bits with at most 640 columns"), "{error}");
    }
}

#[test]
fn what_is_chosen_is_told_and_is_no_part_of_the_arithmetic() {
    if !found() {
        return;
    }
    let linear = Linear::new(true, Epilogue::None);
    let [one, same, other] = [640, 640, 320].map(|n| Case::new(n, 320, DType::Bf16, linear, false).device);
    assert!(one.matmul_kernels()[0].starts_with("640 320 bf16 bias -: "), "{:?}", one.matmul_kernels());
    assert_eq!(one.matmul_kernels(), same.matmul_kernels());
    assert_ne!(one.matmul_kernels(), other.matmul_kernels());
    assert_eq!(one.info().arithmetic, other.info().arithmetic);
    let name = &one.card().name;
    assert!(
        one.info().arithmetic.starts_with(name) && one.info().arithmetic.contains("products 3 ("),
        "{}",
        one.info().arithmetic
    );
}

fn epilogues(dtype: DType, biases: &[bool]) -> Vec<Linear> {
    let all = [Epilogue::None, Epilogue::Gelu, Epilogue::Residual, Epilogue::Gate];
    let of = |epilogue| biases.iter().map(move |&bias| Linear::new(bias, epilogue));
    all.into_iter().filter(|&e| !(dtype == DType::F8 && e == Epilogue::Gate)).flat_map(of).collect()
}

/// (N, K) of linear layers: widths of models with their projections, and vocabularies that are no multiple of 8.
const SHAPES: [(u64, u64); 14] = [
    (33, 33),
    (99, 33),
    (64, 64),
    (256, 64),
    (72, 72),
    (96, 384),
    (288, 96),
    (33, 320),
    (1280, 320),
    (480, 480),
    (640, 2560),
    (1920, 640),
    (4105, 96),
    (1280, 1280),
];

/// Forces every admitted algorithm in turn, and checks that each has the bits of the canonical kernel and that
/// none changes the arithmetic that a run records.
fn check_every_candidate(dtype: DType, operands: OperandFormat) {
    if !found() || !dtypes().any(|there| there == dtype) {
        return;
    }
    let (mut forced, mut refused) = (0, 0);
    for (n, k) in SHAPES {
        for linear in epilogues(dtype, &[true, false]) {
            let linear = Linear { operands, ..linear };
            let mut case = Case::new(n, k, dtype, linear, false);
            let expected = case.run(FULL, 0);
            let arithmetic = case.device.info().arithmetic;
            let surveyed = Case::on(CudaDevice::surveying(0).expect("a card"), (n, k), dtype, linear, false);
            let candidates = surveyed.device.candidates();
            refused += candidates.iter().filter(|one| one.equal == Some(false)).count();
            for one in candidates.iter().filter(|one| one.equal != Some(false)) {
                let device = CudaDevice::with_matmul(0, &one.name).expect("a card");
                let mut case = Case::on(device, (n, k), dtype, linear, false);
                let chosen = case.device.matmul_kernels().join("");
                assert!(chosen.ends_with(&format!(": {}", one.name)), "{chosen}: not {}", one.name);
                assert!(case.run(FULL, 0) == expected, "{}: other bits", case.name());
                assert_eq!(case.device.info().arithmetic, arithmetic);
                if linear.epilogue == Epilogue::Residual {
                    let device = CudaDevice::with_matmul(0, &one.name).expect("a card");
                    let mut case = Case::on(device, (n, k), dtype, linear, true);
                    assert!(case.run(FULL, 0) == expected, "{}: other bits in place", case.name());
                }
                forced += 1;
            }
            // Scalar loops round after every term and tensor cores do not. The comparison must detect this
            // difference, or it would detect nothing.
            if let Some(loops) = candidates.iter().find(|one| one.name == "own" && one.equal.is_some()) {
                assert_eq!(loops.equal, Some(false), "{n} {k} {dtype:?} {linear:?}");
                assert!(!loops.modes[2] && !loops.modes[3], "{n} {k} {dtype:?} {linear:?}: {loops:?}");
            }
        }
    }
    println!("{dtype:?}, {operands:?}: {forced} candidates were forced, {refused} were refused");
}

/// Checks that a row has equal bits in steps of any number of rows, each with algorithms timed for that number.
fn check_steps(dtype: DType, operands: OperandFormat) {
    if !found() || !dtypes().any(|there| there == dtype) {
        return;
    }
    for (n, k) in SHAPES {
        for linear in epilogues(dtype, &[true]) {
            let linear = Linear { operands, ..linear };
            let largest = if (n, k) == (64, 64) || (n, k) == (33, 33) { 65_536 } else { 3000 };
            let mut known: Vec<u8> = vec![];
            for rows in [1, 100, 1100, largest] {
                let device = CudaDevice::new(0).expect("a card");
                let mut case = Case::of(device, [rows, n, k], dtype, linear, false);
                let found = case.run(rows, 0);
                assert!(found.starts_with(&known), "{}: {rows} rows have other bits", case.name());
                known = found;
            }
        }
    }
}

// One test per element type, so that they run in parallel.

#[test]
fn every_candidate_of_bf16_has_the_canonical_bits() {
    check_every_candidate(DType::Bf16, OperandFormat::Stored);
}

#[test]
fn every_candidate_of_f16_has_the_canonical_bits() {
    check_every_candidate(DType::F16, OperandFormat::Stored);
}

#[test]
fn every_candidate_of_f32_has_the_canonical_bits() {
    check_every_candidate(DType::F32, OperandFormat::Stored);
}

#[test]
fn every_candidate_of_tf32_has_the_canonical_bits() {
    check_every_candidate(DType::F32, OperandFormat::Tf32);
}

#[test]
fn every_candidate_of_fp8_has_the_canonical_bits() {
    check_every_candidate(DType::F8, OperandFormat::E4m3);
}

#[test]
fn steps_of_any_size_have_the_same_bits_in_bf16() {
    check_steps(DType::Bf16, OperandFormat::Stored);
}

#[test]
fn steps_of_any_size_have_the_same_bits_in_f16() {
    check_steps(DType::F16, OperandFormat::Stored);
}

#[test]
fn steps_of_any_size_have_the_same_bits_in_f32() {
    check_steps(DType::F32, OperandFormat::Stored);
}

#[test]
fn steps_of_any_size_have_the_same_bits_in_tf32() {
    check_steps(DType::F32, OperandFormat::Tf32);
}

#[test]
fn steps_of_any_size_have_the_same_bits_in_fp8() {
    check_steps(DType::F8, OperandFormat::E4m3);
}

#[test]
fn mixed_types_are_refused() {
    if !found() {
        return;
    }
    let mut case = Case::new(64, 64, DType::F32, Linear::new(false, Epilogue::None), false);
    case.ins[1].spec.dtype = DType::Bf16;
    let error = case.refusal();
    assert!(error.contains("one float type, not f32, bf16, f32"), "{error}");
}

/// The kernel of a matmul with operands of this type.
fn kernel_of(dtype: DType) -> KernelId {
    KernelId::Cuda(if dtype == DType::F8 { CudaKernel::GemmFp8 } else { CudaKernel::Gemm })
}
