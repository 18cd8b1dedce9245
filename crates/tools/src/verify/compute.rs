//! Runs an encoder or a decoder and returns all of its outputs. Invariant: a sequence's outputs do not depend on the other
//! sequences of its batch or on their order.

use plimsoll_data::pack::Order;
use plimsoll_exec::Param;
use plimsoll_models::Output;
use plimsoll_runtime::session::bounds::bounds;
use plimsoll_runtime::session::{
    ModelId, Next, PlanPart, Push, SearchStage, SessionModel, StageStart, StagesRequest, StepSession,
    WeightSource,
};
use plimsoll_runtime::{RuntimeError, Settings, Silent};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// Default number of tokens of a step; the sequences of `verify` are short.
const TOKENS: u64 = 1024;

/// Name of the encoder's plan in the program.
const ENCODER: &str = "encoder";

/// A model with loaded weights that is ready to run.
pub(super) struct ModelRunner {
    session: StepSession<'static>,
    encoder: ModelId,
    /// Index of the output `hidden`; `mean` and `logits` are the indices of theirs.
    hidden: usize,
    mean: usize,
    logits: Option<usize>,
    /// Number of weights that are NaN or infinite.
    pub(super) broken_weights: u64,
}

/// Weight source that counts the values that are NaN or infinite while they are loaded.
struct Counted<'a> {
    model: &'a dyn WeightSource,
    broken: AtomicU64,
}

impl WeightSource for Counted<'_> {
    fn read(&self, param: &Param, range: Range<u64>, out: &mut [f32]) -> Result<(), RuntimeError> {
        self.model.read(param, range, out)?;
        let broken = out.iter().filter(|x| !x.is_finite()).count() as u64;
        self.broken.fetch_add(broken, Ordering::Relaxed);
        Ok(())
    }
}

/// Outputs of the model for one sequence of T tokens, with D columns and a vocabulary of V.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct EncoderOutputs {
    /// Hidden states of the last layer, `(T, D)`.
    pub(super) hidden: Vec<f32>,
    /// Mean of the hidden states over the sequence, `(D)`.
    pub(super) mean: Vec<f32>,
    /// Logits `(T, V)`; empty without a language-model head.
    pub(super) logits: Vec<f32>,
}

impl EncoderOutputs {
    /// All output values, in the order hidden states, mean, logits.
    pub(super) fn values(&self) -> impl Iterator<Item = f32> {
        [&self.hidden, &self.mean, &self.logits].into_iter().flatten().copied()
    }

    /// Whether all values of both have the same bits; unlike `==`, this holds for equal NaNs and not for 0 and -0.
    pub(super) fn has_bits_of(&self, other: &Self) -> bool {
        self.values().map(f32::to_bits).eq(other.values().map(f32::to_bits))
    }

    /// Number of tokens T.
    pub(super) fn tokens(&self) -> usize {
        self.hidden.len() / self.mean.len().max(1)
    }

    /// Token id with the largest logit at each position; empty without a language-model head.
    pub(super) fn most_likely(&self) -> Vec<usize> {
        let columns = self.logits.len() / self.tokens().max(1);
        self.logits
            .chunks(columns.max(1))
            .map(|row| (0..columns).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap_or(0))
            .collect()
    }
}

impl ModelRunner {
    /// Plans the model and loads its weights. `longest` is the number of tokens of the longest sequence that
    /// will be passed to [`Self::answers`].
    pub(super) fn start(
        model: &dyn SessionModel,
        with_logits: bool,
        settings: &Settings,
        longest: u64,
    ) -> Result<Self, RuntimeError> {
        let outputs: &[Output] = if with_logits {
            &[Output::Hidden, Output::Mean, Output::Logits]
        } else {
            &[Output::Hidden, Output::Mean]
        };
        let part = PlanPart {
            name: ENCODER.to_owned(),
            graph: Box::new(|tokens| model.graph(bounds(tokens, longest), outputs)),
            policy: settings.policy()?,
            streams: false,
        };
        let stage = SearchStage::new(vec![part], longest);
        let planned = settings.plan_stages(StagesRequest {
            alternatives: vec![vec![stage]],
            replicas: 1,
            tokens: settings.tokens.or(Some(longest.max(TOKENS))),
            budgets: vec![settings.read_budget()?],
        })?;
        let counted = Counted { model: model.weights(), broken: AtomicU64::new(0) };
        let start =
            StageStart { order: Order::Input, weights: vec![&counted], running: vec![], kept: "outputs" };
        let session = planned.start(0, start, &mut Silent)?.detached();
        let encoder = session.model(ENCODER).ok_or_else(|| RuntimeError::bug("the program has no encoder"))?;
        let outputs = session.outputs(encoder);
        let hidden = outputs.iter().position(|output| output.name == "hidden");
        let mean = outputs.iter().position(|output| output.name == "mean");
        let logits = outputs.iter().position(|output| output.name == "logits");
        let (Some(hidden), Some(mean)) = (hidden, mean) else {
            return Err(RuntimeError::bug("an encoder without its outputs"));
        };
        Ok(Self { session, encoder, hidden, mean, logits, broken_weights: counted.broken.into_inner() })
    }

    /// Outputs of all sequences, in their order. Sequences are packed into steps in their order.
    pub(super) fn answers<'a>(
        &mut self,
        sequences: impl Iterator<Item = &'a [i32]>,
    ) -> Result<Vec<EncoderOutputs>, RuntimeError> {
        let mut answers = vec![];
        for sequence in sequences {
            let key = answers.len() as u64;
            answers.push(None);
            while self.session.push([(self.encoder, key, sequence)])? == Push::Full {
                self.collect(&mut answers)?;
            }
        }
        // The last pack is usually not full: without a flush its sequences would never be computed.
        loop {
            self.session.flush();
            if !self.collect(&mut answers)? {
                break;
            }
        }
        answers.into_iter().map(|answer| answer.ok_or_else(unanswered)).collect()
    }

    /// Whether the outputs include logits.
    pub(super) fn has_logits(&self) -> bool {
        self.logits.is_some()
    }

    /// Outputs of one sequence computed alone.
    pub(super) fn answer(&mut self, sequence: &[i32]) -> Result<EncoderOutputs, RuntimeError> {
        self.answers(std::iter::once(sequence))?.pop().ok_or_else(unanswered)
    }

    /// Waits for the next step and stores its outputs; `false` if no step is in flight.
    fn collect(&mut self, answers: &mut [Option<EncoderOutputs>]) -> Result<bool, RuntimeError> {
        let step = match self.session.next(&|| Ok(()))? {
            Next::Ready(step) => step,
            Next::Pending | Next::Finished => return Ok(false),
        };
        for (i, &key) in step.keys.iter().enumerate() {
            answers[key as usize] = Some(EncoderOutputs {
                hidden: step.values(self.hidden, i).to_vec(),
                mean: step.values(self.mean, i).to_vec(),
                logits: self.logits.map_or_else(Vec::new, |logits| step.values(logits, i).to_vec()),
            });
        }
        self.session.recycle(step);
        Ok(true)
    }
}

fn unanswered() -> RuntimeError {
    RuntimeError::bug("a sequence has no answer")
}
