//! A tiny model, a batch, and the reference results of PyTorch.

use crate::rig::{ByName, one_pack};
use plimsoll_data::weights::Weights as File;
use plimsoll_exec::{Data, Executor};
use plimsoll_graph::{Bounds, Counts, Graph, Param, ParamPiece};
use plimsoll_models::{DecoderConfig, Encoder, HeadConfig, Training, TrainingTask, candidates, derived};
use std::path::PathBuf;

/// Tolerance relative to the largest value of a tensor.
const TOLERANCE: f32 = 1e-5;

/// The values of an input.
pub enum Value {
    I32(Vec<i32>),
    F32(Vec<f32>),
}

impl Value {
    pub fn data(&self) -> Data<'_> {
        match self {
            Self::I32(values) => Data::I32(values),
            Self::F32(values) => Data::F32(values),
        }
    }
}

/// A model of the fixtures.
pub enum Model {
    Decoder(DecoderConfig),
    Encoder(Encoder),
    Head(HeadConfig),
}

pub struct Fixture {
    pub name: &'static str,
    pub model: Model,
    weights: File,
    pub answers: File,
}

impl Fixture {
    pub fn open(name: &'static str) -> Self {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/training").join(name);
        let config = || std::fs::read_to_string(folder.join("config.json")).expect("a fixture");
        let model = match name {
            "head" => Model::Head(HeadConfig { dna: 6, protein: 5, hidden: 8, classes: 2 }),
            "esm2" | "dnabert_s" => Model::Encoder(Encoder::from_json(&config()).expect("an encoder")),
            _ => Model::Decoder(DecoderConfig::from_json(&config()).expect("a decoder")),
        };
        let open = |file: &str| File::open(&folder.join(file)).expect("a fixture");
        Self { name, model, weights: open("model.safetensors"), answers: open("answers.safetensors") }
    }

    pub fn graph(&self, bounds: Bounds) -> Graph {
        self.dropping(bounds, 0.0)
    }

    /// The training graph with dropout, for which the fixture has no reference results.
    pub fn dropping(&self, bounds: Bounds, dropout: f32) -> Graph {
        // Chunks of few rows, so that there are several.
        let training = Training { chunk: 8, dropout, ..Training::default() };
        match &self.model {
            Model::Decoder(c) => c.train_graph(bounds, &training).expect("verified"),
            Model::Encoder(c) => {
                c.train_graph(bounds, TrainingTask::MaskedLm, &training, None).expect("a graph")
            }
            Model::Head(c) => c.train_graph(bounds, &training).expect("verified"),
        }
    }

    /// The values of a piece in `file`, whose names start with `prefix`.
    fn piece(&self, file: &File, prefix: &str, piece: &ParamPiece) -> Option<Vec<f32>> {
        let names = match &self.model {
            Model::Encoder(c) => candidates(c, &piece.tensor),
            Model::Decoder(_) | Model::Head(_) => vec![piece.tensor.clone()],
        };
        let name = names.iter().map(|n| format!("{prefix}{n}")).find(|n| file.get(n).is_some())?;
        let row: u64 = piece.shape.iter().skip(1).product();
        let mut out = vec![0.0; ((piece.rows.1 - piece.rows.0) * row) as usize];
        file.read_f32(&name, piece.rows.0 * row..piece.rows.1 * row, &mut out).expect("read");
        Some(out)
    }

    /// The values of a parameter: from the file, or as defined by the configuration.
    pub fn parameter(&self, param: &Param) -> Vec<f32> {
        let value = |p: &ParamPiece| {
            let found = self.piece(&self.weights, "", p);
            found.or_else(|| match &self.model {
                Model::Decoder(c) => c.derived(&p.tensor),
                Model::Encoder(c) => derived(c, &p.tensor),
                Model::Head(_) => None,
            })
        };
        let values = param.pieces.iter().map(|p| value(p).unwrap_or_else(|| panic!("no {}", p.tensor)));
        values.flatten().collect()
    }

    pub fn answer(&self, prefix: &str, param: &Param) -> Vec<f32> {
        let value = |p| self.piece(&self.answers, prefix, p).unwrap_or_else(|| panic!("no {prefix}{p:?}"));
        param.pieces.iter().flat_map(value).collect()
    }

    pub fn floats(&self, name: &str) -> Vec<f32> {
        let mut out = vec![0.0; self.answers.tensor(name).expect(name).elements() as usize];
        self.answers.read_f32(name, 0..out.len() as u64, &mut out).expect("read");
        out
    }

    pub fn integers(&self, name: &str) -> Vec<i32> {
        let mut out = vec![0; self.answers.tensor(name).expect(name).elements() as usize];
        self.answers.read_i64(name, 0..out.len() as u64, &mut out).expect("read");
        out.into_iter().map(|v| v as i32).collect()
    }

    /// Number of rows of a step.
    pub fn counts(&self) -> Counts {
        match &self.model {
            Model::Head(_) => Counts { tokens: 0, sequences: self.integers("targets").len() as u64, packs: 1 },
            Model::Decoder(_) | Model::Encoder(_) => Counts {
                tokens: self.integers("ids").len() as u64,
                sequences: self.integers("spans").len() as u64 / 2,
                packs: 1,
            },
        }
    }

    /// Bounds larger than the counts of a step: plans are made for maximum sizes.
    pub fn bounds(&self) -> Bounds {
        let Counts { tokens, sequences, .. } = self.counts();
        Bounds { tokens: tokens + 7, sequences: sequences + 2, longest: tokens + 3, packs: 1 }
    }

    /// Number of targets that contribute to the loss.
    pub fn targets(&self) -> usize {
        self.integers("targets").iter().filter(|&&t| t >= 0).count()
    }

    /// The value of an input of a training graph: the batch, and cotangent 1 for a loss. `None` for other inputs.
    pub fn value(&self, name: &str) -> Option<Value> {
        Some(match name {
            "ids" | "spans" | "targets" => Value::I32(self.integers(name)),
            "dna" | "protein" => Value::F32(self.floats(name)),
            "seed" => Value::I32(vec![7, -9]),
            "packs" => Value::I32(one_pack(self.counts(), self.targets()).to_vec()),
            "d loss" | "d aux" => Value::F32(vec![1.0]),
            _ => return None,
        })
    }

    /// Writes the batch to the inputs of a plan. Inputs without a value in the batch are skipped.
    pub fn give(&self, executor: &mut Executor, plan: usize) {
        let inputs = executor.program().plans()[plan].1.graph.inputs.clone();
        for (name, _) in &inputs {
            let given = match self.value(name) {
                Some(Value::I32(values)) => executor.input_i32(plan, name, &values),
                Some(Value::F32(values)) => executor.input_f32(plan, name, &values),
                None => Ok(()),
            };
            given.unwrap_or_else(|e| panic!("{name}: {e}"));
        }
    }
}

/// The largest magnitude.
pub fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |a, x| a.max(x.abs()))
}

/// Asserts that `found` equals `wanted` within [`TOLERANCE`] times the larger of its largest value and `least`.
pub fn check(found: &[f32], wanted: &[f32], least: f32, what: &str) {
    assert_eq!(found.len(), wanted.len(), "{what}");
    let off = found.iter().zip(wanted).map(|(f, w)| (f - w).abs()).fold(0.0, f32::max);
    let scale = largest(wanted).max(least);
    let finite = found.iter().all(|x| x.is_finite());
    assert!(finite && off <= TOLERANCE * scale, "{what}: off by {off} of {scale}");
}
