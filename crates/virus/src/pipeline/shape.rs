//! The models of a method as data, and the plans made from them: encoders and a head over one arena. Invariant: rows of
//! encoders wait in host memory; if the budget is for host memory, the ledger accounts for every byte of them.

use crate::pipeline::stage::PredictStage;
use plimsoll_graph::{Bounds, Bytes};
use plimsoll_graph::{Graph, VerifyError};
use plimsoll_models::{HeadConfig, mlp_head};
use plimsoll_plan::{Policy, Precision, Staging};
use plimsoll_runtime::session::bounds::{copies, in_flight_target, tokens};
use plimsoll_runtime::session::{self, PlanPart};

/// Maximum number of encoders of a method.
pub(crate) const ENCODERS: usize = 2;

/// Maximum number of sequences of a window: one for each reading frame.
pub(crate) const SEQUENCES: usize = 6;

/// Number of classes of a head: others and virus. Every entry of the journal has this number of scores.
pub(crate) const HEAD_CLASSES: usize = 2;

/// Name of the head's plan.
pub(crate) const HEAD: &str = "head";

/// Rows per step of the head.
pub(crate) const HEAD_ROWS: u64 = 256;

/// Sequences in flight per sequence of a step, for one device with one step in flight: the pools of both packers (four packs
/// each) and the packs themselves.
const SLOTS_PER_SEQUENCE: u64 = 6;

/// Builds the graph of a model for steps of a number of tokens.
pub(crate) type BuildGraph = Box<dyn Fn(u64) -> Result<Graph, VerifyError> + Send + Sync>;

/// An encoder of a method: a model that computes a row of values for each sequence.
pub(crate) struct EncoderShape {
    /// Name of the encoder's plan.
    pub(crate) plan: &'static str,
    /// Key of the encoder in run.json.
    pub(crate) key: &'static str,
    /// Key of the seconds of its steps in run.json.
    pub(crate) seconds_key: &'static str,
    /// Name of its rows, such as `protein embeddings`.
    pub(crate) rows: &'static str,
    /// Name of the head's input that takes its rows; `None` for a method without a head.
    pub(crate) head_input: Option<&'static str>,
    /// Number of values of a row.
    pub(crate) width: usize,
    /// Maximum number of tokens of a sequence.
    pub(crate) longest: u64,
    pub(crate) graph: BuildGraph,
    /// Whether its weights may be streamed.
    pub(crate) streams: bool,
    /// Average number of tokens of a sequence of a window of a number of bases, for the expected speed.
    pub(crate) expected_tokens: fn(usize) -> f64,
}

/// Description of a method for plans: its models, their sizes, and the host memory beside them.
pub(crate) struct MethodShape {
    /// The encoders, at most [`ENCODERS`]. Without any, results follow from the records alone.
    pub(crate) encoders: Vec<EncoderShape>,
    /// The head, which scores the rows of all encoders; without one, the rows of the encoders are the results.
    pub(crate) head: Option<HeadConfig>,
    /// Bases per window.
    pub(crate) length: u64,
    /// Maximum number of sequences of a step of a number of tokens.
    pub(crate) sequences: fn(u64) -> u64,
    /// Lengths of the windows of a record, by the lengths of record and window in bases.
    pub(crate) window_lengths: fn(usize, usize) -> Vec<usize>,
    /// Number of sequences of a window; `None` if it depends on its bases.
    pub(crate) sequences_of_window: Option<u64>,
    pub(crate) names: MethodNames,
    pub(crate) host: HostCosts,
}

/// Names of the parts of a method, for messages and run.json.
#[derive(Clone, Copy)]
pub(crate) struct MethodNames {
    pub(crate) stages: StageNames,
    /// Name of a sequence.
    pub(crate) sequence: &'static str,
    /// Key of the number of sequences in run.json.
    pub(crate) sequences_key: &'static str,
    /// Name of the rows of all encoders.
    pub(crate) rows: &'static str,
}

/// Names of the models that run in each stage.
#[derive(Clone, Copy)]
pub(crate) struct StageNames {
    /// All models.
    pub(crate) whole: &'static str,
    /// The models of the first and of the second pass; `None` for a method that always has one pass.
    pub(crate) split: Option<[&'static str; 2]>,
}

/// Host memory that a method needs beside its models.
#[derive(Clone, Copy, Default)]
pub(crate) struct HostCosts {
    /// Bytes of the tokens of a base, in vectors that grow by doubling.
    pub(crate) token_bytes_per_base: u64,
    /// Bytes of text of a base for the method's own files, in vectors that grow by doubling.
    pub(crate) text_bytes_per_base: u64,
    /// Number of records that wait for a later one.
    pub(crate) waiting_records: u64,
    /// Bytes of each window of a record, held until the record ends.
    pub(crate) bytes_per_window: u64,
    /// Number of sorted files.
    pub(crate) sorted_files: u64,
    /// Bytes that the method's own writers hold.
    pub(crate) writer_bytes: u64,
}

impl MethodShape {
    /// Ways to divide the models into stages, in order of preference.
    pub(crate) fn alternatives(&self) -> &'static [&'static [PredictStage]] {
        if self.encoders.len() > 1 {
            // Two passes over the input cost less than streaming the weights in every step.
            &[&[PredictStage::Whole], &[PredictStage::First, PredictStage::Rest]]
        } else {
            &[&[PredictStage::Whole]]
        }
    }

    /// Describes a stage in words.
    pub(crate) fn about(&self, stage: PredictStage) -> &'static str {
        let StageNames { whole, split } = self.names.stages;
        match (stage, split) {
            (PredictStage::Whole, _) | (_, None) => whole,
            (PredictStage::First, Some([first, _])) => first,
            (PredictStage::Rest, Some([_, rest])) => rest,
        }
    }

    /// Whether the head runs in a stage.
    pub(crate) fn scores(&self, stage: PredictStage) -> bool {
        self.head.is_some() && stage != PredictStage::First
    }

    /// Number of values of a row, by encoder.
    pub(crate) fn widths(&self) -> [usize; ENCODERS] {
        let mut widths = [0; ENCODERS];
        for (width, encoder) in widths.iter_mut().zip(&self.encoders) {
            *width = encoder.width;
        }
        widths
    }

    /// The encoders that run in a stage.
    fn running_encoders(&self, stage: PredictStage) -> impl Iterator<Item = &EncoderShape> {
        self.encoders.iter().enumerate().filter(move |(i, _)| stage.runs(*i)).map(|(_, encoder)| encoder)
    }

    /// The encoders whose rows a stage holds.
    fn encoders_with_rows(&self, stage: PredictStage) -> impl Iterator<Item = &EncoderShape> {
        self.encoders.iter().enumerate().filter(move |(i, _)| self.holds(stage, *i)).map(|(_, encoder)| encoder)
    }

    /// Whether a stage holds the rows of the encoder with this index: a running encoder, and, for the head, an encoder of an
    /// earlier stage.
    pub(crate) fn holds(&self, stage: PredictStage, encoder: usize) -> bool {
        encoder < self.encoders.len() && (self.scores(stage) || stage.runs(encoder))
    }

    /// Number of sequences in flight for steps of `tokens` tokens, with `in_flight` steps on all devices together.
    pub(crate) fn slots(&self, tokens: u64, in_flight: usize) -> u64 {
        // Every further step in flight holds one more pack of sequences.
        (SLOTS_PER_SEQUENCE + in_flight as u64 - 1) * (self.sequences)(tokens).max(64)
    }

    /// Returns the exact host memory of waiting data, as f32: rows of sequences, `copies` times the output rows of a step, and
    /// input rows for `in_flight` steps of the head.
    pub(crate) fn waiting(
        &self,
        stage: PredictStage,
        tokens: u64,
        in_flight: usize,
        copies: u64,
    ) -> Vec<Staging> {
        let slots = self.slots(tokens, in_flight);
        let mut waiting: Vec<Staging> = self
            .encoders_with_rows(stage)
            .map(|encoder| rows_in_host(encoder.rows.to_owned(), slots, encoder.width))
            .collect();
        let widest = self.running_encoders(stage).map(|encoder| encoder.width).max();
        let step = (self.sequences)(tokens) * copies;
        waiting.push(rows_in_host(format!("{} of a step", self.names.rows), step, widest.unwrap_or(0)));
        if self.scores(stage) {
            let width = self.widths().iter().sum();
            waiting.push(rows_in_host("rows of the head".to_owned(), HEAD_ROWS * in_flight as u64, width));
        }
        waiting
    }

    /// Describes a stage for the session planner.
    pub(crate) fn planned(&self, stage: PredictStage, precision: Precision) -> session::SearchStage<'_> {
        session::SearchStage {
            parts: self.parts(stage, precision),
            longest: self.longest(stage),
            // On a GPU the waiting data is not in the memory that the ledger accounts for; `kept` reports its size.
            finish: Box::new(move |program, replicas| {
                if !program.target().arena_in_host() {
                    return program;
                }
                let waiting =
                    self.waiting(stage, tokens(&program), in_flight_target(replicas), copies(replicas));
                program.host_extra(waiting)
            }),
            kept: Box::new(move |program, steps| {
                self.waiting(stage, tokens(program), steps, steps as u64).iter().map(|rows| rows.bytes).sum()
            }),
        }
    }

    /// The models of a stage. The head's weights are always resident, in f32.
    fn parts(&self, stage: PredictStage, precision: Precision) -> Vec<PlanPart<'_>> {
        let mut parts: Vec<PlanPart<'_>> = self
            .running_encoders(stage)
            .map(|encoder| PlanPart {
                name: encoder.plan.to_owned(),
                graph: Box::new(|tokens| (encoder.graph)(tokens)),
                policy: Policy { precision, ..Policy::default() },
                streams: encoder.streams,
            })
            .collect();
        if let Some(head) = self.head.filter(|_| self.scores(stage)) {
            let rows = Bounds { tokens: 1, sequences: HEAD_ROWS, longest: 1, packs: 1 };
            let graph = Box::new(move |_| mlp_head(&head, rows));
            parts.push(PlanPart { name: HEAD.to_owned(), graph, policy: Policy::default(), streams: false });
        }
        parts
    }

    /// Maximum number of tokens of a sequence in a stage.
    fn longest(&self, stage: PredictStage) -> u64 {
        self.running_encoders(stage).map(|encoder| encoder.longest).max().unwrap_or(0)
    }

    /// Number of values that the journal of a stage stores for each sequence: its rows if they are the results of the stage,
    /// or are saved.
    pub(crate) fn journal_width(&self, stage: PredictStage, saves_rows: bool) -> usize {
        if self.scores(stage) && !saves_rows {
            return 0;
        }
        self.encoders_with_rows(stage).map(|encoder| encoder.width).sum()
    }
}

/// The memory line of `rows` rows of `width` f32 values.
fn rows_in_host(label: String, rows: u64, width: usize) -> Staging {
    Staging { label, bytes: Bytes(rows * width as u64 * 4) }
}
