//! The program of a prediction: two encoders and the head over one arena. Invariant: embeddings wait for
//! each other inside of the arena; every byte of them is in the ledger.

use crate::session::bounds;
use graph::{Bounds, Bytes};
use models::{Encoder, HeadConfig, Output, mlp_head};
use plan::{PlanError, Policy, Program, Staging, Target, compile};

/// Plans of the program.
pub(crate) const DNA: usize = 0;
pub(crate) const PROTEIN: usize = 1;
pub(crate) const HEAD: usize = 2;

/// Rows of a step of the head.
pub(crate) const HEAD_ROWS: u64 = 256;

/// Open reading frames in flight for each sequence that a step can hold: the pools of both packers (four
/// packs each) and the packs themselves.
const SLOTS_PER_SEQUENCE: u64 = 6;

/// What a prediction computes with.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub(crate) dna: Encoder,
    pub(crate) protein: Encoder,
    pub(crate) head: HeadConfig,
    /// Bases of a chunk.
    pub(crate) length: u64,
}

impl Shape {
    /// Tokens of the longest nucleotide sequence: one for each base, and two more.
    pub(crate) fn longest_dna(&self) -> u64 {
        self.length + 2
    }

    /// Tokens of the longest protein.
    pub(crate) fn longest_protein(&self) -> u64 {
        self.length / 3 + 2
    }

    /// Open reading frames that can be in flight at `tokens`.
    pub(crate) fn slots(&self, tokens: u64) -> u64 {
        SLOTS_PER_SEQUENCE * bounds(tokens, self.longest_dna()).sequences.max(64)
    }

    /// The program for steps of `tokens`.
    pub(crate) fn program(&self, target: &Target, tokens: u64) -> Result<Program, PlanError> {
        let plan = |graph: Result<graph::Graph, graph::VerifyError>| {
            let graph = graph.map_err(|source| PlanError::Verify { after: "build", source })?;
            compile(&graph, &Policy::default(), target)
        };
        let dna = plan(self.dna.graph(bounds(tokens, self.longest_dna()), &[Output::Mean]))?;
        let protein = plan(self.protein.graph(bounds(tokens, self.longest_protein()), &[Output::Mean]))?;
        let rows = Bounds { tokens: 1, sequences: HEAD_ROWS, longest: 1 };
        let head = plan(mlp_head(&self.head, rows))?;
        let row = |width: u64| Bytes(self.slots(tokens) * width * 4);
        let staging = vec![
            Staging { label: "nucleotide embeddings".to_owned(), bytes: row(self.head.dna) },
            Staging { label: "protein embeddings".to_owned(), bytes: row(self.head.protein) },
        ];
        let named = |name: &str, plan| (name.to_owned(), plan);
        let plans =
            vec![named("nucleotide encoder", dna), named("protein encoder", protein), named("head", head)];
        Ok(Program::new(target.clone(), plans, staging))
    }
}
