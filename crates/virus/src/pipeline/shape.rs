//! The plans of a prediction: two encoders and the head, or a caller, over one arena. Invariant: embeddings and logits wait
//! in host memory; if the budget is for host memory, the ledger accounts for every byte of them.

use crate::methods::caller::windows::SHORTEST_WINDOW;
use crate::pipeline::stage::PredictStage;
use plimsoll_data::codons::tokens_of;
use plimsoll_graph::{Bounds, Bytes};
use plimsoll_graph::{Graph, VerifyError};
use plimsoll_models::{CallerConfig, Encoder, FRAMES, HeadConfig, Output, mlp_head};
use plimsoll_plan::{Policy, Precision, Program, Staging};
use plimsoll_runtime::session::bounds::{bounds, copies, in_flight_target, tokens};
use plimsoll_runtime::session::{self, PlanPart};

/// Index of the nucleotide encoder in [`PLANS`] and in arrays by encoder; likewise `PROTEIN` and `HEAD`.
pub(crate) const DNA: usize = 0;
pub(crate) const PROTEIN: usize = 1;
pub(crate) const HEAD: usize = 2;

/// Names of the models' plans in a program.
pub(crate) const PLANS: [&str; 3] = ["nucleotide encoder", "protein encoder", "head"];

/// Name of the caller's plan.
pub(crate) const CALLER: &str = "caller";

/// Rows per step of the head.
pub(crate) const HEAD_ROWS: u64 = 256;

/// Open reading frames in flight per sequence of a step, for one device with one step in flight: the pools of both
/// packers (four packs each) and the packs themselves.
const SLOTS_PER_SEQUENCE: u64 = 6;

/// Architecture of the models of a prediction, and the length of its windows.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub(crate) models: Architecture,
    /// Bases per window.
    pub(crate) length: u64,
}

/// Architecture of the models of a prediction.
#[derive(Clone, Debug)]
pub(crate) enum Architecture {
    /// VirNucPro's models.
    VirNucPro(Box<VirNucProShape>),
    /// A caller.
    Caller(CallerConfig),
}

/// Architecture of VirNucPro's models.
#[derive(Clone, Debug)]
pub(crate) struct VirNucProShape {
    pub(crate) dna: Encoder,
    pub(crate) protein: Encoder,
    pub(crate) head: HeadConfig,
}

impl Shape {
    /// Ways to divide the models into stages, in order of preference.
    pub(crate) fn alternatives(&self) -> &'static [&'static [PredictStage]] {
        match &self.models {
            // Two passes over the input cost less than streaming the weights in every step.
            Architecture::VirNucPro(_) => {
                &[&[PredictStage::Whole], &[PredictStage::Nucleotide, PredictStage::Protein]]
            }
            Architecture::Caller(_) => &[&[PredictStage::Caller]],
        }
    }

    /// The stage that computes all results from the input alone.
    pub(crate) fn single_stage(&self) -> PredictStage {
        match &self.models {
            Architecture::VirNucPro(_) => PredictStage::Whole,
            Architecture::Caller(_) => PredictStage::Caller,
        }
    }

    /// Number of values of a result row, by encoder: embeddings, or the logits of a caller in the place of the nucleotide
    /// embedding.
    pub(crate) fn widths(&self) -> [usize; 2] {
        match &self.models {
            Architecture::VirNucPro(shape) => [shape.head.dna as usize, shape.head.protein as usize],
            Architecture::Caller(config) => [config.logits() as usize, 0],
        }
    }

    /// Maximum number of tokens of a sequence of the nucleotide encoder: one per base, and two special tokens; or of a
    /// caller.
    pub(crate) fn longest_dna(&self) -> u64 {
        match &self.models {
            Architecture::VirNucPro(_) => self.length + 2,
            Architecture::Caller(_) => tokens_of(self.length as usize) as u64,
        }
    }

    /// Maximum number of tokens of a protein sequence: one per codon, and two special tokens.
    pub(crate) fn longest_protein(&self) -> u64 {
        self.length / 3 + 2
    }

    /// Maximum number of sequences of a step of `tokens` tokens.
    fn sequences(&self, tokens: u64) -> u64 {
        match &self.models {
            Architecture::VirNucPro(_) => bounds(tokens, self.longest_dna()).sequences,
            Architecture::Caller(_) => (tokens / tokens_of(SHORTEST_WINDOW) as u64).max(1),
        }
    }

    /// Number of sequences in flight for steps of `tokens` tokens, with `open` steps in flight on all devices together.
    pub(crate) fn slots(&self, tokens: u64, open: usize) -> u64 {
        (SLOTS_PER_SEQUENCE + open as u64 - 1) * self.sequences(tokens).max(64)
    }

    /// Returns the exact host memory of waiting data, as f32: embeddings of open reading frames, `copies` times
    /// the output embeddings of a step, and input rows for `open` steps of the head.
    pub(crate) fn waiting(&self, stage: PredictStage, tokens: u64, open: usize, copies: u64) -> Vec<Staging> {
        let wait = |label: &str, rows: u64, width: u64| Staging {
            label: label.to_owned(),
            bytes: Bytes(rows * width * 4),
        };
        let slots = self.slots(tokens, open);
        let widths = self.widths().map(|width| width as u64);
        let mut waiting = vec![];
        match stage {
            PredictStage::Caller => waiting.push(wait("logits", slots, widths[DNA])),
            // The stage `Protein` holds them too: it reads them from the journal for the head.
            PredictStage::Whole | PredictStage::Nucleotide | PredictStage::Protein => {
                waiting.push(wait("nucleotide embeddings", slots, widths[DNA]));
            }
        }
        if stage.runs(PROTEIN) {
            waiting.push(wait("protein embeddings", slots, widths[PROTEIN]));
        }
        let widest =
            widths.into_iter().enumerate().filter(|(encoder, _)| stage.runs(*encoder)).map(|(_, w)| w).max();
        let step = self.sequences(tokens) * copies;
        let label = if stage == PredictStage::Caller { "logits of a step" } else { "embeddings of a step" };
        waiting.push(wait(label, step, widest.unwrap_or(0)));
        if stage.scores() {
            waiting.push(wait("rows of the head", HEAD_ROWS * open as u64, widths[DNA] + widths[PROTEIN]));
        }
        waiting
    }

    /// Describes a stage for the session planner. The head's weights are always resident, in f32.
    pub(crate) fn planned(&self, stage: PredictStage, precision: Precision) -> session::SearchStage<'_> {
        let parts = match &self.models {
            Architecture::VirNucPro(shape) => self.parts(shape, stage, precision),
            Architecture::Caller(config) => vec![PlanPart {
                name: CALLER,
                graph: Box::new(move |tokens| {
                    let longest = self.longest_dna() / FRAMES;
                    config.graph(Bounds { tokens, sequences: self.sequences(tokens), longest, packs: 1 })
                }),
                policy: Policy { precision, ..Policy::default() },
                // The weights are a few megabytes.
                streams: false,
            }],
        };
        let beside = move |program: &Program, steps: usize, copies: u64| {
            self.waiting(stage, tokens(program), steps, copies)
        };
        session::SearchStage {
            parts,
            longest: self.longest(stage),
            // On a GPU the waiting data is not in the memory that the ledger accounts for; `journal` reports its size.
            finish: Box::new(move |program, replicas| match program.target().arena_in_host() {
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

    /// The models of a stage of VirNucPro's pipeline.
    fn parts<'a>(
        &self,
        shape: &'a VirNucProShape,
        stage: PredictStage,
        precision: Precision,
    ) -> Vec<PlanPart<'a>> {
        let encoder = |part: usize, encoder, longest| PlanPart {
            name: PLANS[part],
            graph: graph_of(encoder, longest),
            policy: Policy { precision, ..Policy::default() },
            streams: true,
        };
        let mut parts = vec![];
        if stage.runs(DNA) {
            parts.push(encoder(DNA, &shape.dna, self.longest_dna()));
        }
        if stage.runs(PROTEIN) {
            parts.push(encoder(PROTEIN, &shape.protein, self.longest_protein()));
        }
        if stage.scores() {
            let rows = Bounds { tokens: 1, sequences: HEAD_ROWS, longest: 1, packs: 1 };
            let graph = Box::new(move |_| mlp_head(&shape.head, rows));
            parts.push(PlanPart { name: PLANS[HEAD], graph, policy: Policy::default(), streams: false });
        }
        parts
    }

    /// Maximum number of tokens of a sequence in a stage.
    pub(crate) fn longest(&self, stage: PredictStage) -> u64 {
        let of = |encoder, longest| if stage.runs(encoder) { longest } else { 0 };
        of(DNA, self.longest_dna()).max(of(PROTEIN, self.longest_protein()))
    }

    /// Number of values that the journal of a stage stores for each sequence: embeddings or logits.
    pub(crate) fn kept_width(&self, stage: PredictStage, embeddings: bool) -> usize {
        let widths = self.widths();
        match stage {
            PredictStage::Nucleotide | PredictStage::Caller => widths[DNA],
            PredictStage::Whole | PredictStage::Protein if embeddings => widths[DNA] + widths[PROTEIN],
            PredictStage::Whole | PredictStage::Protein => 0,
        }
    }
}

/// Builds the graph of an encoder with mean-pooled embeddings as output.
fn graph_of(encoder: &Encoder, longest: u64) -> Box<dyn Fn(u64) -> Result<Graph, VerifyError> + '_> {
    Box::new(move |tokens| encoder.graph(bounds(tokens, longest), &[Output::Mean]))
}
