//! Tests of the models against the outputs of the reference implementations: fair-esm 2.0.0, and the DNABERT-S code
//! in pure f32. Invariant: the f32 error is at most 1e-5 (absolute) on every device, whatever else is in the batch.

use crate::rig::{ByName, On, load, output, run, stream};
use plimsoll_cpu::Isa;
use plimsoll_data::weights::Weights;
use plimsoll_exec::Executor;
use plimsoll_graph::{Bounds, Counts, Param};
use plimsoll_models::{Encoder, Output, candidates};
use plimsoll_plan::Precision;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

/// Absolute tolerance; the reference values are of order 1.
const TOLERANCE: f32 = 1e-5;

struct Golden {
    encoder: Encoder,
    weights: Arc<Weights>,
    answers: Weights,
}

/// Name of the reference outputs, and the tokens of a sequence.
type Sequence = (String, Vec<i32>);

impl Golden {
    fn open(name: &str) -> Self {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/goldens").join(name);
        let config = std::fs::read_to_string(folder.join("config.json")).expect("a fixture");
        Self {
            encoder: Encoder::from_json(&config).expect("a known model"),
            weights: Arc::new(Weights::open(&folder).expect("weights")),
            answers: Weights::open(&folder.join("golden.safetensors")).expect("answers"),
        }
    }

    fn executor(&self, on: On, bounds: Bounds, outputs: &[Output], fuse: bool) -> Executor {
        let graph = self.encoder.graph(bounds, outputs).expect("verified");
        load(on, &graph, fuse, self.reader()).unwrap_or_else(|e| panic!("{e}"))
    }

    /// An executor whose parameters are streamed in every step.
    fn streaming(&self, on: On, bounds: Bounds, outputs: &[Output], fuse: bool) -> Executor {
        let graph = self.encoder.graph(bounds, outputs).expect("verified");
        stream(on, &graph, fuse, self.reader()).unwrap_or_else(|e| panic!("{e}"))
    }

    fn reader(&self) -> impl FnMut(&Param, Range<u64>, &mut [f32]) + Send + use<> {
        let encoder = self.encoder.clone();
        let weights = self.weights.clone();
        move |param, range, out| {
            let mut rows = vec![];
            for piece in &param.pieces {
                let names = candidates(&encoder, &piece.tensor);
                let name = names.iter().find(|n| weights.get(n).is_some()).expect("a tensor");
                let row: u64 = piece.shape.iter().skip(1).product();
                let mut part = vec![0.0; ((piece.rows.1 - piece.rows.0) * row) as usize];
                weights.read_f32(name, piece.rows.0 * row..piece.rows.1 * row, &mut part).expect("read");
                rows.extend(part);
            }
            out.copy_from_slice(&rows[range.start as usize..range.end as usize]);
        }
    }

    fn integers(&self, name: &str) -> Vec<i32> {
        let n = self.answers.tensor(name).expect("an answer").elements();
        let mut values = vec![0; n as usize];
        self.answers.read_i64(name, 0..n, &mut values).expect("read");
        values.into_iter().map(|v| v as i32).collect()
    }

    /// Relative L2 distance of the hidden states from the reference, over all sequences.
    fn distance(&self, sequences: &[Sequence], found: &[(Vec<f32>, Vec<f32>)]) -> f64 {
        let mut error = 0.0;
        let mut norm = 0.0;
        for ((name, _), (hidden, _)) in sequences.iter().zip(found) {
            let name = format!("{name}.hidden");
            let Some(tensor) = self.answers.get(&name) else { continue };
            let mut wanted = vec![0.0; tensor.elements() as usize];
            self.answers.read_f32(&name, 0..tensor.elements(), &mut wanted).expect("read");
            for (f, w) in hidden.iter().zip(wanted) {
                error += f64::from(f - w).powi(2);
                norm += f64::from(w).powi(2);
            }
        }
        assert!(norm > 0.0, "no answers");
        (error / norm).sqrt()
    }

    fn check(&self, name: &str, found: &[f32], what: &str) {
        let Some(tensor) = self.answers.get(name) else { return };
        let mut wanted = vec![0.0; tensor.elements() as usize];
        self.answers.read_f32(name, 0..tensor.elements(), &mut wanted).expect("read");
        assert_eq!(found.len(), wanted.len(), "{name} on {what}");
        let worst = found.iter().zip(&wanted).map(|(f, w)| (f - w).abs()).fold(0.0, f32::max);
        let finite = found.iter().all(|x| x.is_finite());
        assert!(finite && worst <= TOLERANCE, "{name} on {what}: off by {worst}");
    }
}

fn esm2() -> (Golden, Vec<Sequence>) {
    let golden = Golden::open("esm2");
    let path = format!("{}/../../fixtures/goldens/esm2/proteins.faa", env!("CARGO_MANIFEST_DIR"));
    let reader = plimsoll_data::sequence::Reader::open([path]).expect("a fixture");
    let mut sequences: Vec<Sequence> = reader
        .records()
        .map(|record| {
            let record = record.expect("a record");
            let mut tokens = vec![];
            plimsoll_data::tokenize::esm::encode(&record.seq, &mut tokens);
            (record.id, tokens)
        })
        .collect();
    sequences.push(("masked".to_owned(), golden.integers("masked.tokens")));
    (golden, sequences)
}

fn dnabert_s() -> (Golden, Vec<Sequence>) {
    let golden = Golden::open("dnabert_s");
    let sequences = (0..7).map(|i| (format!("d{i}"), golden.integers(&format!("d{i}.ids")))).collect();
    (golden, sequences)
}

/// Packs `sequences` and runs them; returns the (hidden, mean) rows of each sequence.
fn encode(executor: &mut Executor, d: usize, sequences: &[Sequence]) -> Vec<(Vec<f32>, Vec<f32>)> {
    let mut tokens = vec![];
    let mut spans = vec![];
    for (_, ids) in sequences {
        spans.push([tokens.len() as i32, (tokens.len() + ids.len()) as i32]);
        tokens.extend_from_slice(ids);
    }
    let counts = Counts { tokens: tokens.len() as u64, sequences: sequences.len() as u64, packs: 1 };
    let flat: Vec<i32> = spans.iter().flatten().copied().collect();
    let give = |e: &mut Executor| {
        e.input_i32(0, "ids", &tokens).expect("ids");
        e.input_i32(0, "spans", &flat).expect("spans");
    };
    run(executor, give, counts);
    let hidden = output(executor, "hidden", tokens.len() * d);
    let mean = output(executor, "mean", sequences.len() * d);
    let rows = |[start, end]: &[i32; 2]| hidden[*start as usize * d..*end as usize * d].to_vec();
    spans.iter().zip(mean.chunks(d)).map(|(span, mean)| (rows(span), mean.to_vec())).collect()
}

fn everything(golden: &Golden, sequences: &[Sequence], on: On, fuse: bool) {
    let tokens: usize = sequences.iter().map(|(_, ids)| ids.len()).sum();
    let longest = sequences.iter().map(|(_, ids)| ids.len()).max().unwrap_or(0);
    // Larger than the batch: plans are made for maximum sizes.
    let bounds = Bounds { tokens: tokens as u64 + 9, sequences: 20, longest: longest as u64 + 3, packs: 1 };
    let mut executor = golden.executor(on, bounds, &[Output::Hidden, Output::Mean], fuse);
    let d = golden.encoder.hidden_size() as usize;
    let what = format!("{} (fuse {fuse})", on.name());
    let together = encode(&mut executor, d, sequences);
    for ((name, ids), (hidden, mean)) in sequences.iter().zip(&together) {
        golden.check(&format!("{name}.hidden"), hidden, &what);
        golden.check(&format!("{name}.mean"), mean, &what);
        let alone = encode(&mut executor, d, &[(name.clone(), ids.clone())]);
        assert!(alone[0] == (hidden.clone(), mean.clone()), "{name} on {what}: its company changes its bits");
    }
    let reversed: Vec<Sequence> = sequences.iter().rev().cloned().collect();
    let mut back = encode(&mut executor, d, &reversed);
    back.reverse();
    assert!(back == together, "{what}: the order changes bits");
}

#[test]
fn esm2_on_the_reference() {
    let (golden, sequences) = esm2();
    everything(&golden, &sequences, On::Reference, false);
}

#[test]
fn esm2_on_the_cpu() {
    let (golden, sequences) = esm2();
    for on in On::every_cpu() {
        everything(&golden, &sequences, on, true);
    }
    everything(&golden, &sequences, On::every_cpu()[0], false);
}

#[test]
fn dnabert_s_on_the_reference() {
    let (golden, sequences) = dnabert_s();
    everything(&golden, &sequences, On::Reference, false);
}

#[test]
fn dnabert_s_on_the_cpu() {
    let (golden, sequences) = dnabert_s();
    for on in On::every_cpu() {
        everything(&golden, &sequences, on, true);
    }
}

/// (precision, upper bound of the relative L2 error of all hidden states)
const NARROW: [(Precision, f64); 5] = [
    (Precision::Tf32, 2e-3),
    (Precision::Bf16, 1e-2),
    (Precision::Fp16, 1e-2),
    (Precision::Fp8, 5e-2),
    (Precision::Int8, 2e-2),
];

/// Checks the error of the hidden states, and that their bits do not depend on the rest of the batch.
fn narrow(on: On, limit: f64) {
    for (golden, sequences) in [esm2(), dnabert_s()] {
        let tokens: usize = sequences.iter().map(|(_, ids)| ids.len()).sum();
        let bounds = Bounds { tokens: tokens as u64 + 9, sequences: 20, longest: 1200, packs: 1 };
        let mut executor = golden.executor(on, bounds, &[Output::Hidden, Output::Mean], true);
        let d = golden.encoder.hidden_size() as usize;
        let together = encode(&mut executor, d, &sequences);
        let distance = golden.distance(&sequences, &together);
        println!("{}: relative L2 of hidden states {distance:.2e}", on.name());
        assert!(distance < limit, "{}: {distance}", on.name());
        for (sequence, wanted) in sequences.iter().zip(&together) {
            let alone = encode(&mut executor, d, std::slice::from_ref(sequence));
            assert!(alone[0] == *wanted, "{} on {}: its company changes its bits", sequence.0, on.name());
        }
    }
}

#[test]
fn both_models_on_the_cpu_in_bf16() {
    for on in On::every_cpu_in(Precision::Bf16) {
        narrow(on, 1e-2);
    }
}

#[test]
fn both_models_on_the_cpu_in_int8() {
    for on in On::every_cpu_in(Precision::Int8) {
        narrow(on, 2e-2);
    }
}

#[test]
fn a_sequence_has_the_same_bits_in_steps_of_any_number_of_rows() {
    any_number_of_rows(Precision::Bf16);
    any_number_of_rows(Precision::Int8);
}

/// Row counts of steps, with one sequence or as many sequences as rows: multiples of a tile, one row more and
/// one less.
fn any_number_of_rows(precision: Precision) {
    let (golden, sequences) = esm2();
    let bounds = Bounds { tokens: 600, sequences: 70, longest: 600, packs: 1 };
    let letters: Vec<i32> = sequences.iter().flat_map(|(_, ids)| ids).copied().collect();
    let of = |ids: &[i32]| (String::new(), ids.to_vec());
    for isa in Isa::available() {
        let [mut one, mut many] = [1, 3].map(|threads| {
            let on = On::CpuNarrow(isa, threads, precision);
            golden.executor(on, bounds, &[Output::Hidden, Output::Mean], true)
        });
        for rows in [1, 2, 31, 32, 33] {
            let whole = of(&letters[..rows]);
            let alone = encode(&mut one, 40, std::slice::from_ref(&whole));
            // Placed behind another sequence, so that it does not start at the first row of a tile.
            let together = encode(&mut many, 40, &[of(&letters[rows..rows + 5]), whole]);
            assert!(together[1] == alone[0], "{} rows on {}", rows, isa.name());
            let single: Vec<Sequence> = letters[..rows].iter().map(|&id| of(&[id])).collect();
            for (sequence, found) in single.iter().zip(encode(&mut many, 40, &single)) {
                let alone = encode(&mut one, 40, std::slice::from_ref(sequence));
                assert!(found == alone[0], "one row of {rows} on {}", isa.name());
            }
        }
    }
}

#[test]
fn both_models_on_the_reference_in_tf32_16_and_8_bits() {
    for (precision, limit) in NARROW {
        narrow(On::Narrow(precision), limit);
    }
}

/// Quantization of streamed weights uses the same code, and gives the same values, as of resident weights.
#[test]
fn streamed_codes_give_the_bits_of_resident_ones() {
    let on = On::Narrow(Precision::Fp8);
    for (golden, sequences) in [esm2(), dnabert_s()] {
        let bounds = Bounds { tokens: 2500, sequences: 20, longest: 1200, packs: 1 };
        let d = golden.encoder.hidden_size() as usize;
        let outputs = [Output::Hidden, Output::Mean];
        let mut resident = golden.executor(on, bounds, &outputs, true);
        let mut streamed = golden.streaming(on, bounds, &outputs, true);
        assert!(encode(&mut streamed, d, &sequences) == encode(&mut resident, d, &sequences));
    }
}

#[test]
fn both_models_on_cuda() {
    let Some(on) = On::cuda(Precision::F32) else { return };
    for fuse in [true, false] {
        for (golden, sequences) in [esm2(), dnabert_s()] {
            everything(&golden, &sequences, on, fuse);
        }
    }
}

#[test]
fn both_models_on_cuda_in_tf32_16_and_8_bits() {
    for (precision, limit) in NARROW.into_iter().filter(|(precision, _)| *precision != Precision::Int8) {
        let Some(on) = On::cuda(precision) else { return };
        narrow(on, limit);
    }
}

#[test]
fn logits_of_esm2() {
    let (golden, sequences) = esm2();
    let bounds = Bounds { tokens: 1200, sequences: 1, longest: 1200, packs: 1 };
    for on in [On::Reference, On::every_cpu()[0]] {
        let mut executor = golden.executor(on, bounds, &[Output::Logits], true);
        for (name, ids) in &sequences {
            let give = |e: &mut Executor| {
                e.input_i32(0, "ids", ids).expect("ids");
                e.input_i32(0, "spans", &[0, ids.len() as i32]).expect("spans");
            };
            run(&mut executor, give, Counts { tokens: ids.len() as u64, sequences: 1, packs: 1 });
            let logits = output(&mut executor, "logits", ids.len() * 33);
            golden.check(&format!("{name}.logits"), &logits, &on.name());
        }
    }
}

#[test]
fn bits_do_not_depend_on_threads_or_fused_instructions() {
    let (golden, sequences) = esm2();
    let bounds = Bounds { tokens: 2000, sequences: 20, longest: 1200, packs: 1 };
    let bits = |on: On| {
        let mut executor = golden.executor(on, bounds, &[Output::Hidden, Output::Mean], true);
        encode(&mut executor, 40, &sequences)
    };
    type OpenDevice = fn(Isa, usize) -> On;
    // Attention in bf16 has different bits with AMX tiles and with dot-product instructions, so these sets are
    // left out.
    let ways: [(OpenDevice, bool); 3] = [
        (On::Cpu, false),
        (|isa, threads| On::CpuNarrow(isa, threads, Precision::Bf16), true),
        (|isa, threads| On::CpuNarrow(isa, threads, Precision::Int8), true),
    ];
    for (on, narrow) in ways {
        let one = bits(on(Isa::detect(), 1));
        for threads in [2, 3, 8] {
            assert!(one == bits(on(Isa::detect(), threads)), "{threads} threads change bits");
        }
        let fused = |isa: &Isa| isa.has_fma() && !isa.has_tiles() && !(narrow && isa.has_dots());
        let sets: Vec<_> = Isa::available().filter(fused).map(|isa| (isa, bits(on(isa, 2)))).collect();
        for pair in sets.windows(2) {
            assert!(pair[0].1 == pair[1].1, "{} and {} differ", pair[0].0.name(), pair[1].0.name());
        }
    }
}

/// Every step of a streamed plan starts with NaN at the addresses of streamed parameters.
#[test]
fn streamed_weights_give_the_bits_of_resident_ones() {
    for (golden, sequences) in [esm2(), dnabert_s()] {
        let bounds = Bounds { tokens: 2500, sequences: 20, longest: 1200, packs: 1 };
        let d = golden.encoder.hidden_size() as usize;
        let narrow = [Precision::Bf16, Precision::Int8].into_iter().flat_map(On::every_cpu_in);
        let cpus = On::every_cpu().into_iter().chain(narrow);
        for (on, fuse) in cpus.map(|on| (on, true)).chain([(On::Reference, false)]) {
            let outputs = [Output::Hidden, Output::Mean];
            let mut resident = golden.executor(on, bounds, &outputs, fuse);
            let mut streamed = golden.streaming(on, bounds, &outputs, fuse);
            let wanted = encode(&mut resident, d, &sequences);
            assert!(wanted.iter().all(|(hidden, mean)| hidden.iter().chain(mean).all(|x| x.is_finite())));
            for step in 1..3 {
                let found = encode(&mut streamed, d, &sequences);
                assert!(found == wanted, "step {step} on {}, fuse {fuse}", on.name());
            }
            assert!(streamed.program().peak() < resident.program().peak(), "{}", on.name());
        }
    }
}

/// The tied embedding is read twice in a step: as rows at its start, for the logits at its end.
#[test]
fn streamed_tied_weights_give_the_same_logits() {
    let (golden, sequences) = esm2();
    let bounds = Bounds { tokens: 1200, sequences: 1, longest: 1200, packs: 1 };
    let (_, ids) = &sequences[0];
    for on in [On::Reference, On::every_cpu()[0]] {
        let [resident, streamed] = [Golden::executor, Golden::streaming].map(|start| {
            let mut executor = start(&golden, on, bounds, &[Output::Logits], true);
            let give = |e: &mut Executor| {
                e.input_i32(0, "ids", ids).expect("ids");
                e.input_i32(0, "spans", &[0, ids.len() as i32]).expect("spans");
            };
            run(&mut executor, give, Counts { tokens: ids.len() as u64, sequences: 1, packs: 1 });
            output(&mut executor, "logits", ids.len() * 33)
        });
        assert!(resident == streamed, "{}", on.name());
    }
}
