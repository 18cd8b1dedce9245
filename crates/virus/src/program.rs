//! The plans of a prediction: two encoders and the head over one arena. Invariant: embeddings wait in host memory; if
//! the budget is for host memory, the ledger accounts for every byte of them.

use super::stage::PredictStage;
use plimsoll_graph::{Bounds, Bytes};
use plimsoll_graph::{Graph, VerifyError};
use plimsoll_models::{Encoder, HeadConfig, Output, mlp_head};
use plimsoll_plan::{HOST, Policy, Precision, Program, Staging};
use plimsoll_runtime::session::bounds::{bounds, copies, in_flight_target, tokens};
use plimsoll_runtime::session::{self, PlanPart};

/// Index of the nucleotide encoder in [`PLANS`] and in arrays by encoder; likewise `PROTEIN` and `HEAD`.
pub(crate) const DNA: usize = 0;
pub(crate) const PROTEIN: usize = 1;
pub(crate) const HEAD: usize = 2;

/// Names of the models' plans in a program.
pub(crate) const PLANS: [&str; 3] = ["nucleotide encoder", "protein encoder", "head"];

/// Rows per step of the head.
pub(crate) const HEAD_ROWS: u64 = 256;

/// Open reading frames in flight per sequence of a step, for one device with one step in flight: the pools of both
/// packers (four packs each) and the packs themselves.
const SLOTS_PER_SEQUENCE: u64 = 6;

/// Architecture of the models of a prediction.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub(crate) dna: Encoder,
    pub(crate) protein: Encoder,
    pub(crate) head: HeadConfig,
    /// Bases per window.
    pub(crate) length: u64,
}

impl Shape {
    /// Maximum number of tokens of a nucleotide sequence: one per base, and two special tokens.
    pub(crate) fn longest_dna(&self) -> u64 {
        self.length + 2
    }

    /// Maximum number of tokens of a protein sequence: one per codon, and two special tokens.
    pub(crate) fn longest_protein(&self) -> u64 {
        self.length / 3 + 2
    }

    /// Number of open reading frames in flight for steps of `tokens` tokens, with `open` steps in flight on all devices
    /// together.
    pub(crate) fn slots(&self, tokens: u64, open: usize) -> u64 {
        (SLOTS_PER_SEQUENCE + open as u64 - 1) * bounds(tokens, self.longest_dna()).sequences.max(64)
    }

    /// Returns the exact host memory of waiting data, as f32: embeddings of open reading frames, `copies` times
    /// the output embeddings of a step, and input rows for `open` steps of the head.
    pub(crate) fn waiting(&self, stage: PredictStage, tokens: u64, open: usize, copies: u64) -> Vec<Staging> {
        let wait = |label: &str, rows: u64, width: u64| Staging {
            label: label.to_owned(),
            bytes: Bytes(rows * width * 4),
        };
        let slots = self.slots(tokens, open);
        let widths = [self.head.dna, self.head.protein];
        // The stage `Protein` holds them too: it reads them from the journal for the head.
        let mut waiting = vec![wait("nucleotide embeddings", slots, widths[DNA])];
        if stage.runs(PROTEIN) {
            waiting.push(wait("protein embeddings", slots, widths[PROTEIN]));
        }
        let widest =
            widths.into_iter().enumerate().filter(|(encoder, _)| stage.runs(*encoder)).map(|(_, w)| w).max();
        let step = bounds(tokens, 1).sequences * copies;
        waiting.push(wait("embeddings of a step", step, widest.unwrap_or(0)));
        if stage.scores() {
            waiting.push(wait("rows of the head", HEAD_ROWS * open as u64, widths[DNA] + widths[PROTEIN]));
        }
        waiting
    }

    /// Describes a stage for the session planner. The head's weights are always resident, in f32.
    pub(crate) fn planned(&self, stage: PredictStage, precision: Precision) -> session::SearchStage<'_> {
        let encoder = |part: usize, encoder, longest| PlanPart {
            name: PLANS[part],
            graph: graph_of(encoder, longest),
            policy: Policy { precision, ..Policy::default() },
            streams: true,
        };
        let mut parts = vec![];
        if stage.runs(DNA) {
            parts.push(encoder(DNA, &self.dna, self.longest_dna()));
        }
        if stage.runs(PROTEIN) {
            parts.push(encoder(PROTEIN, &self.protein, self.longest_protein()));
        }
        if stage.scores() {
            let rows = Bounds { tokens: 1, sequences: HEAD_ROWS, longest: 1 };
            let graph = Box::new(move |_| mlp_head(&self.head, rows));
            parts.push(PlanPart { name: PLANS[HEAD], graph, policy: Policy::default(), streams: false });
        }
        let beside = move |program: &Program, steps: usize, copies: u64| {
            self.waiting(stage, tokens(program), steps, copies)
        };
        session::SearchStage {
            parts,
            longest: self.longest(stage),
            // On a GPU the waiting data is not in the memory that the ledger accounts for; `journal` reports its size.
            finish: Box::new(move |program, replicas| match program.target().space == HOST {
                true => {
                    let waiting = beside(&program, in_flight_target(replicas), copies(replicas));
                    program.host_extra(waiting)
                }
                false => program,
            }),
            kept: Box::new(move |program, steps| {
                beside(program, steps, steps as u64).iter().map(|wait| wait.bytes).sum()
            }),
        }
    }

    /// Maximum number of tokens of a sequence in a stage.
    pub(crate) fn longest(&self, stage: PredictStage) -> u64 {
        let of = |encoder, longest| if stage.runs(encoder) { longest } else { 0 };
        of(DNA, self.longest_dna()).max(of(PROTEIN, self.longest_protein()))
    }

    /// Number of embedding values that the journal of a stage stores per open reading frame.
    pub(crate) fn kept_width(&self, stage: PredictStage, embeddings: bool) -> usize {
        match stage {
            PredictStage::Nucleotide => self.head.dna as usize,
            PredictStage::Whole | PredictStage::Protein if embeddings => {
                (self.head.dna + self.head.protein) as usize
            }
            PredictStage::Whole | PredictStage::Protein => 0,
        }
    }
}

/// Builds the graph of an encoder with mean-pooled embeddings as output.
fn graph_of(encoder: &Encoder, longest: u64) -> Box<dyn Fn(u64) -> Result<Graph, VerifyError> + '_> {
    Box::new(move |tokens| encoder.graph(bounds(tokens, longest), &[Output::Mean]))
}
