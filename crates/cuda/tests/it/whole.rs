//! Whole encoders on a CUDA device: results have equal bits for steps of any size, whichever algorithms were
//! chosen by timing.

use plimsoll_cuda::{CudaDevice, CudaMachine, Options, cards};
use plimsoll_exec::{Device, Executor, Machine};
use plimsoll_graph::{Bounds, Counts, Param};
use plimsoll_models::{Encoder, Output};
use plimsoll_plan::{Policy, Precision, Program, compile};
use std::ops::Range;

/// Tokens of a full step and of the longest sequence.
const TOKENS: [u64; 5] = [1100, 2048, 3000, 8192, 16_384];
const LONGEST: u64 = 1024;
/// Width, heads and layers: heads of 8, 16, 24, 32 and 64.
const SIZES: [(u64, u64, u64); 8] =
    [(40, 5, 2), (64, 4, 2), (72, 3, 2), (96, 3, 2), (320, 20, 3), (480, 20, 2), (640, 20, 2), (1280, 20, 2)];

/// Pseudo-random weights that depend on their index only; about 1 for the weights of norms.
fn weights(param: &Param, range: Range<u64>, out: &mut [f32]) {
    let norm = param.name.to_ascii_lowercase().ends_with("norm.weight");
    let seed = param.name.bytes().fold(1u64, |sum, byte| sum.wrapping_mul(31).wrapping_add(u64::from(byte)));
    for (x, i) in out.iter_mut().zip(range) {
        let bits = (i ^ seed << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let number =
            ((bits ^ bits >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 40) as f32 / (1 << 23) as f32 - 1.0;
        *x = if norm { 1.0 + 0.1 * number } else { 0.06 * number };
    }
}

/// Mean embeddings of all sequences, computed in steps of at most the given number of tokens.
fn means(
    device: Box<dyn Device>,
    encoder: &Encoder,
    width: u64,
    precision: Precision,
    tokens: u64,
) -> Vec<u32> {
    let lengths: Vec<u64> = (0..60).map(|i| 20 + i * i * 37 % 700).collect();
    let bounds = Bounds { tokens, sequences: lengths.len() as u64, longest: LONGEST, packs: 1 };
    let graph = encoder.graph(bounds, &[Output::Mean]).expect("verified");
    let target = CudaMachine::new(0, Options::default()).expect("a card").target().expect("a target");
    let plan = compile(&graph, &Policy { precision, ..Policy::default() }, &target).expect("planned");
    let program = Program::new(target, vec![("encoder".to_owned(), plan)], vec![]);
    let mut executor = Executor::new(device, program).expect("started");
    let read = |param: &Param, range: Range<u64>, out: &mut [f32]| {
        weights(param, range, out);
        Ok(())
    };
    executor.load(0, &mut { read }).expect("loaded");
    let (mut bits, mut next) = (vec![], 0);
    while next < lengths.len() {
        let (mut ids, mut spans) = (vec![], vec![]);
        while next < lengths.len() && ids.len() as u64 + lengths[next] <= tokens {
            let first = ids.len() as i32;
            ids.extend((0..lengths[next]).map(|i| 4 + ((i * 7 + next as u64 * 13) % 20) as i32));
            spans.extend([first, ids.len() as i32]);
            next += 1;
        }
        let sequences = spans.len() as u64 / 2;
        executor.write_i32(executor.input(0, "ids").expect("an input"), &ids).expect("ids");
        executor.write_i32(executor.input(0, "spans").expect("an input"), &spans).expect("spans");
        executor.run(0, Counts { tokens: ids.len() as u64, sequences, packs: 1 }).expect("a step");
        let mut out = vec![0f32; (sequences * width) as usize];
        executor
            .read_f32(executor.output(0, Output::Mean.name()).expect("an output"), &mut out)
            .expect("means");
        assert!(out.iter().all(|x| x.is_finite()), "{width} {precision:?}");
        bits.extend(out.iter().map(|x| x.to_bits()));
    }
    bits
}

fn check(precision: Precision) {
    if cards().is_ok_and(|cards| !cards.is_empty()) {
        for (width, heads, layers) in SIZES {
            let config = include_str!("../../../../fixtures/goldens/esm2/config.json");
            let config = config
                .replace("\"hidden_size\": 40", &format!("\"hidden_size\": {width}"))
                .replace("\"num_hidden_layers\": 2", &format!("\"num_hidden_layers\": {layers}"))
                .replace("\"num_attention_heads\": 5", &format!("\"num_attention_heads\": {heads}"))
                .replace("\"intermediate_size\": 160", &format!("\"intermediate_size\": {}", 4 * width));
            let encoder = Encoder::from_json(&config).expect("known");
            let machine = CudaMachine::new(0, Options::default()).expect("a card");
            let run = |device, tokens| means(device, &encoder, width, precision, tokens);
            let expected = run(machine.open().expect("a device").remove(0), TOKENS[0]);
            for tokens in &TOKENS[1..] {
                let found = run(machine.open().expect("a device").remove(0), *tokens);
                assert!(found == expected, "width {width}, {precision:?}: {tokens} tokens have other bits");
            }
            // Once with algorithms timed as with an empty cache, once without timing.
            let devices = [CudaDevice::surveying(0), CudaDevice::without_timing(0)];
            for (device, tokens) in devices.into_iter().zip([3000, 1100]) {
                let found = run(Box::new(device.expect("a card")), tokens);
                assert!(
                    found == expected,
                    "width {width}, {precision:?}: matmul kernels chosen anew have other bits"
                );
            }
        }
    } else {
        println!("skipped: no CUDA device");
    }
}

#[test]
fn an_encoder_has_the_same_bits_in_bf16_for_any_step() {
    check(Precision::Bf16);
}

#[test]
fn an_encoder_has_the_same_bits_in_fp16_for_any_step() {
    check(Precision::Fp16);
}

#[test]
fn an_encoder_has_the_same_bits_in_tf32_for_any_step() {
    check(Precision::Tf32);
}

#[test]
fn an_encoder_has_the_same_bits_in_f32_for_any_step() {
    check(Precision::F32);
}

#[test]
fn an_encoder_has_the_same_bits_in_fp8_for_any_step() {
    if cards().is_ok_and(|cards| cards.iter().all(|card| card.capability >= (8, 9))) {
        check(Precision::Fp8);
    }
}
