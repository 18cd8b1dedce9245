//! Ops on packs on a CUDA device: the results of a pack have equal bits in any step, and packs that do not divide the
//! tokens of the step are refused.

use crate::matmuls::found;
use plimsoll_cuda::CudaDevice;
use plimsoll_exec::{Allocation, Device, DeviceError, Launch, Operand};
use plimsoll_graph::ops::{Dropout, Route, RouterLoss, RouterLossGrad};
use plimsoll_graph::{Bytes, Counts, DType, Dim, Op, TensorSpec, packs};
use plimsoll_plan::{CudaKernel, KernelId, Location, route_bytes, router_loss_bytes, router_loss_grad_bytes};

const EXPERTS: u64 = 40;
const TOP_K: u64 = 2;

/// The pack whose results are compared: several chunks of every kernel, and a rest.
const COMPARED: Pack = Pack { tokens: 700, targets: 900, number: 5 };
/// A pack that adds nothing to the losses.
const UNTARGETED: Pack = Pack { tokens: 100, targets: 0, number: 7 };

#[derive(Clone, Copy)]
struct Pack {
    tokens: u64,
    targets: i32,
    number: i32,
}

/// An input of an op.
#[derive(Clone, Copy)]
enum Input {
    /// f32 (T, columns), noise in [-4, 4) that depends on the pack's number and the position in the pack.
    Noise { columns: u64 },
    /// i32 (T, k), different experts of each token.
    Experts,
    /// i32 (P, 6)
    Packs,
    /// f32 (1)
    Gradient,
    /// i32 (2)
    Seed,
}

/// An op with a kernel, its inputs, the shapes of its first outputs, and its workspace in a step.
struct PackedOp {
    op: Op,
    kernel: CudaKernel,
    inputs: Vec<Input>,
    outputs: Vec<[Dim; 2]>,
    workspace: fn(Counts) -> u64,
}

fn ops() -> Vec<PackedOp> {
    let tokens = |columns| [Dim::Tokens(1), Dim::Fixed(columns)];
    let one = [Dim::Fixed(1), Dim::Fixed(1)];
    let balance = 0.75;
    let z = 0.125;
    let logits = Input::Noise { columns: EXPERTS };
    let dropout = |columns| PackedOp {
        op: Op::Dropout(Dropout { p: 0.4, stream: 3 }),
        kernel: CudaKernel::Dropout,
        inputs: vec![Input::Noise { columns }, Input::Seed, Input::Packs],
        outputs: vec![tokens(columns)],
        workspace: |_| 0,
    };
    let experts = EXPERTS as u32;
    let top_k = TOP_K as u32;
    let route = PackedOp {
        op: Op::Route(Route { experts, top_k, renormalise: true, capacity: 900 }),
        kernel: CudaKernel::Route,
        inputs: vec![logits, Input::Packs],
        outputs: vec![tokens(TOP_K)],
        workspace: |counts| route_bytes(counts, EXPERTS, TOP_K).parts.iter().sum(),
    };
    let loss = PackedOp {
        op: Op::RouterLoss(RouterLoss { balance, z }),
        kernel: CudaKernel::RouterLoss,
        inputs: vec![logits, Input::Experts, Input::Packs],
        outputs: vec![one; 3],
        workspace: |counts| router_loss_bytes(counts, EXPERTS).parts.iter().sum(),
    };
    let grad = PackedOp {
        op: Op::RouterLossGrad(RouterLossGrad { balance, z }),
        kernel: CudaKernel::RouterLossGrad,
        inputs: vec![Input::Gradient, logits, Input::Experts, Input::Packs],
        outputs: vec![tokens(EXPERTS)],
        workspace: |counts| router_loss_grad_bytes(counts, EXPERTS).parts.iter().sum(),
    };
    vec![dropout(64), dropout(33), route, loss, grad]
}

/// The last step of SplitMix64 (Steele, Lea and Flood 2014).
fn mixed(x: u64) -> u64 {
    let x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

impl Input {
    fn spec(self) -> TensorSpec {
        match self {
            Self::Noise { columns } => {
                TensorSpec::activation([Dim::Tokens(1), Dim::Fixed(columns)], DType::F32)
            }
            Self::Experts => TensorSpec::activation([Dim::Tokens(1), Dim::Fixed(TOP_K)], DType::I32),
            Self::Packs => TensorSpec::activation([Dim::Packs(1), Dim::Fixed(packs::WORDS as u64)], DType::I32),
            Self::Gradient => TensorSpec::activation([Dim::Fixed(1)], DType::F32),
            Self::Seed => TensorSpec::activation([Dim::Fixed(2)], DType::I32),
        }
    }

    fn bytes(self, step: &[Pack], words: &[i32]) -> Vec<u8> {
        let random = |pack: &Pack, i| mixed((pack.number as u64) << 32 | i);
        let integers = |values: Vec<i32>| values.into_iter().flat_map(i32::to_le_bytes).collect();
        match self {
            Self::Noise { columns } => {
                let of_pack = |pack| (0..columns * pack_tokens(pack)).map(move |i| random(pack, i));
                let noise = |bits: u64| (bits >> 40) as f32 / (1 << 21) as f32 - 4.0;
                step.iter().flat_map(of_pack).flat_map(|bits| noise(bits).to_le_bytes()).collect()
            }
            Self::Experts => {
                let of_pack = |pack| (0..pack_tokens(pack)).map(move |i| random(pack, i) % EXPERTS);
                let of_token = |first| (0..TOP_K).map(move |j| ((first + j) % EXPERTS) as i32);
                integers(step.iter().flat_map(of_pack).flat_map(of_token).collect())
            }
            Self::Packs => integers(words.to_vec()),
            Self::Gradient => 1.5_f32.to_le_bytes().to_vec(),
            Self::Seed => integers(vec![17, -4]),
        }
    }
}

fn pack_tokens(pack: &Pack) -> u64 {
    pack.tokens
}

/// The input `packs` of a step.
fn words(step: &[Pack]) -> Vec<i32> {
    let mut first = 0;
    let mut words = vec![];
    for (sequence, pack) in (0..).zip(step) {
        let end = first + pack.tokens as i32;
        words.extend([first, end, sequence, sequence + 1, pack.targets, pack.number]);
        first = end;
    }
    words
}

impl PackedOp {
    /// Runs the op on a step with the given input `packs`, and returns the bytes of its outputs.
    fn run(&self, step: &[Pack], words: &[i32]) -> Result<Vec<Vec<u8>>, DeviceError> {
        let mut device = CudaDevice::without_timing(0).expect("a card");
        let tokens = step.iter().map(pack_tokens).sum();
        let counts = Counts { tokens, sequences: step.len() as u64, packs: step.len() as u64 };
        let mut end = 0;
        let mut place = |spec: TensorSpec| {
            let at = end;
            end += spec.bytes_at(counts).align_up(256).0;
            Operand { at, spec }
        };
        let ins: Vec<Operand> = self.inputs.iter().map(|input| place(input.spec())).collect();
        let outs: Vec<Option<Operand>> =
            self.outputs.iter().map(|shape| Some(place(TensorSpec::activation(*shape, DType::F32)))).collect();
        let workspace = Some((end, Bytes((self.workspace)(counts))));
        device.allocate(&Allocation::arena(Bytes(end + (self.workspace)(counts))))?;
        device.fill(Location::in_arena(0), Bytes(end + (self.workspace)(counts)), 0xFF)?;
        for (operand, input) in ins.iter().zip(&self.inputs) {
            device.upload(Location::in_arena(operand.at), &input.bytes(step, words))?;
        }
        let kernel = KernelId::Cuda(self.kernel);
        let launch = Launch { op: &self.op, kernel, ins: &ins, outs: &outs, workspace, counts };
        device.prepare(std::slice::from_ref(&launch), &mut |_| {})?;
        device.launch(&launch)?;
        let mut results = vec![];
        for out in outs.iter().flatten() {
            let mut bytes = vec![0; out.bytes(counts).0 as usize];
            device.download(Location::in_arena(out.at), &mut bytes)?;
            results.push(bytes);
        }
        Ok(results)
    }

    /// Runs the op on a step and returns the bytes of the rows of pack `at`, and of outputs without rows all bytes.
    fn run_pack(&self, step: &[Pack], at: usize) -> Vec<Vec<u8>> {
        let mut results = self.run(step, &words(step)).expect("a step");
        for (result, shape) in results.iter_mut().zip(&self.outputs) {
            let [Dim::Tokens(1), Dim::Fixed(columns)] = shape else { continue };
            let bytes_of = |packs: &[Pack]| packs.iter().map(|pack| 4 * columns * pack.tokens).sum::<u64>();
            let before = bytes_of(&step[..at]);
            *result = result[before as usize..][..bytes_of(&step[at..=at]) as usize].to_vec();
        }
        results
    }
}

#[test]
fn a_pack_has_equal_bits_in_any_step() {
    if !found() {
        return;
    }
    for op in ops() {
        let alone = op.run_pack(&[COMPARED], 0);
        let steps = [
            (vec![UNTARGETED, COMPARED], 1),
            (vec![COMPARED, UNTARGETED, UNTARGETED], 0),
            ([vec![UNTARGETED; 50], vec![COMPARED, Pack { tokens: 0, ..UNTARGETED }]].concat(), 50),
        ];
        for (step, at) in steps {
            assert!(op.run_pack(&step, at) == alone, "{:?}, pack {at} of {}", op.op, step.len());
        }
    }
}

#[test]
fn packs_that_do_not_divide_the_step_are_refused() {
    if !found() {
        return;
    }
    let step = [UNTARGETED, COMPARED, UNTARGETED];
    let second = packs::WORDS;
    for op in ops() {
        // (word, its value): a gap, packs that overlap, rows outside of the step, an end before its start, and tokens
        // behind the last pack.
        let wrong = [
            (0, -5),
            (second, 110),
            (second, 90),
            (second + 1, 100_000),
            (second + 1, 20),
            (2 * second + 1, 850),
        ];
        for (word, value) in wrong {
            let mut words = words(&step);
            words[word] = value;
            let found = op.run(&step, &words);
            let refused =
                matches!(&found, Err(DeviceError::Machine { source }) if source.to_string().contains("packs"));
            assert!(refused, "{:?}, word {word} is {value}: {:?}", op.op, found.map(|_| "no error"));
        }
    }
}
