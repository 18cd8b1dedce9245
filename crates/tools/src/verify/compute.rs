//! An encoder that answers with everything it computes. Invariant: an answer belongs to its sequence, in whatever
//! company it was computed.

use data::pack::Order;
use exec::Param;
use graph::Graph;
use models::Output;
use runtime::session::bounds::bounds;
use runtime::session::{ModelId, Next, Part, Push, Request, Session, Stage, Start, WeightSource};
use runtime::{EncoderModel, RuntimeError, Settings, Silent};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// Tokens of a step where nothing else is asked for: what is verified is short.
const TOKENS: u64 = 1024;

/// The name of the encoder's plan.
const ENCODER: &str = "encoder";

/// A running encoder.
pub(super) struct Runner {
    session: Session,
    encoder: ModelId,
    /// The positions of the outputs.
    hidden: usize,
    mean: usize,
    logits: Option<usize>,
    /// Weights that were no finite numbers.
    pub(super) broken_weights: u64,
}

/// A model's weights, of which those that are no finite numbers are counted.
struct Counted<'a> {
    model: &'a EncoderModel,
    broken: AtomicU64,
}

impl WeightSource for Counted<'_> {
    fn read(&self, param: &Param, range: Range<u64>, out: &mut [f32]) -> Result<(), RuntimeError> {
        self.model.read(param, range, out)?;
        let broken = out.iter().filter(|x| !x.is_finite()).count() as u64;
        self.broken.fetch_add(broken, Ordering::Relaxed);
        Ok(())
    }

    fn stream(&self, _: &Graph) -> Option<exec::ParamSource> {
        None
    }
}

/// What a model says about a sequence.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Answer {
    /// (T, D).
    pub(super) hidden: Vec<f32>,
    /// (D).
    pub(super) mean: Vec<f32>,
    /// (T, V); empty without a language-model head.
    pub(super) logits: Vec<f32>,
}

impl Answer {
    /// All values, in a fixed order.
    pub(super) fn values(&self) -> impl Iterator<Item = f32> {
        [&self.hidden, &self.mean, &self.logits].into_iter().flatten().copied()
    }

    /// T.
    pub(super) fn tokens(&self) -> usize {
        self.hidden.len() / self.mean.len().max(1)
    }

    /// The largest logit of each token; none without a language-model head.
    pub(super) fn most_likely(&self) -> Vec<usize> {
        let columns = self.logits.len() / self.tokens().max(1);
        let largest = |row: &[f32]| (0..columns).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap_or(0);
        self.logits.chunks(columns.max(1)).map(largest).collect()
    }
}

impl Runner {
    /// Plans and loads; `longest` is that of all sequences that will come.
    pub(super) fn start(
        model: &EncoderModel,
        with_logits: bool,
        settings: &Settings,
        longest: u64,
    ) -> Result<Self, RuntimeError> {
        let outputs: &[Output] = match with_logits {
            true => &[Output::Hidden, Output::Mean, Output::Logits],
            false => &[Output::Hidden, Output::Mean],
        };
        let part = Part {
            name: ENCODER,
            graph: Box::new(|tokens| model.encoder.graph(bounds(tokens, longest), outputs)),
            policy: settings.policy()?,
            streams: false,
        };
        let stage = Stage::new(vec![part], longest);
        let planned = settings.plan(Request {
            alternatives: vec![vec![stage]],
            replicas: 1,
            tokens: settings.tokens.or(Some(longest.max(TOKENS))),
            budgets: vec![settings.read_budget()?],
        })?;
        let counted = Counted { model, broken: AtomicU64::new(0) };
        let start = Start { order: Order::Input, weights: vec![&counted], running: vec![], kept: "outputs" };
        let session = planned.start(0, start, &mut Silent)?;
        let encoder = session.model(ENCODER).ok_or_else(|| RuntimeError::bug("the program has no encoder"))?;
        let position = |name: &str| session.outputs(encoder).iter().position(|output| output.name == name);
        let (hidden, mean, logits) = (position("hidden"), position("mean"), position("logits"));
        let (Some(hidden), Some(mean)) = (hidden, mean) else {
            return Err(RuntimeError::bug("an encoder without its outputs"));
        };
        Ok(Self { session, encoder, hidden, mean, logits, broken_weights: counted.broken.into_inner() })
    }

    /// The answers in the order of the sequences, which are packed as they come.
    pub(super) fn answers<'a>(
        &mut self,
        sequences: impl Iterator<Item = &'a [i32]>,
    ) -> Result<Vec<Answer>, RuntimeError> {
        let mut answers = vec![];
        for sequence in sequences {
            let key = answers.len() as u64;
            answers.push(None);
            while self.session.push([(self.encoder, key, sequence)])? == Push::Full {
                self.collect(&mut answers)?;
            }
        }
        loop {
            self.session.flush();
            if !self.collect(&mut answers)? {
                break;
            }
        }
        answers.into_iter().map(|answer| answer.ok_or_else(unanswered)).collect()
    }

    /// The answer to one sequence alone.
    pub(super) fn answer(&mut self, sequence: &[i32]) -> Result<Answer, RuntimeError> {
        self.answers(std::iter::once(sequence))?.pop().ok_or_else(unanswered)
    }

    /// Waits for a step and takes its answers; false where nothing is in flight.
    fn collect(&mut self, answers: &mut [Option<Answer>]) -> Result<bool, RuntimeError> {
        let step = match self.session.next(&|| Ok(()))? {
            Next::Ready(step) => step,
            Next::Pending | Next::Finished => return Ok(false),
        };
        for (i, &key) in step.keys.iter().enumerate() {
            let values = |output: usize| step.values(output, i).to_vec();
            let logits = self.logits.map_or_else(Vec::new, values);
            answers[key as usize] =
                Some(Answer { hidden: values(self.hidden), mean: values(self.mean), logits });
        }
        self.session.recycle(step);
        Ok(true)
    }
}

fn unanswered() -> RuntimeError {
    RuntimeError::bug("a sequence has no answer")
}
