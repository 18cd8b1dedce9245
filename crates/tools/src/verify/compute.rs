//! An encoder that answers with everything it computes. Invariant: an answer belongs to its sequence, in whatever
//! company it was computed.

use exec::Executor;
use graph::Counts;
use models::Output;
use plan::{PlanError, Program, compile};
use runtime::session::{bounds, load};
use runtime::{EncoderModel, RuntimeError, Settings};

/// Tokens of a step where nothing else is asked for: what is verified is short.
const TOKENS: u64 = 1024;

/// The only plan of the program.
const ENCODER: usize = 0;

/// A running encoder.
pub(super) struct Runner {
    executor: Executor,
    width: usize,
    /// Columns of the logits; 0 without a language-model head.
    vocabulary: usize,
    /// Weights that were no finite numbers.
    pub(super) broken_weights: u64,
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
        let tokens = settings.tokens.or(Some(longest.max(TOKENS)));
        let settings = Settings { tokens, budget: Some(settings.line()?), ..settings.clone() };
        let (target, policy) = (settings.target()?, settings.policy()?);
        let outputs: &[Output] = match with_logits {
            true => &[Output::Hidden, Output::Mean, Output::Logits],
            false => &[Output::Hidden, Output::Mean],
        };
        let program = settings.fit(longest, &mut |tokens| {
            let graph = model.encoder.graph(bounds(tokens, longest), outputs);
            let graph = graph.map_err(|source| PlanError::Verify { after: "build", source })?;
            let plan = compile(&graph, &policy, &target)?;
            Ok(Program::new(target.clone(), vec![("encoder".to_owned(), plan)], vec![]))
        })?;
        let mut executor = settings.start_one(program)?;
        let mut broken_weights = 0;
        load(&mut executor, ENCODER, |param, range, out| {
            model.read(param, range, out)?;
            broken_weights += out.iter().filter(|x| !x.is_finite()).count() as u64;
            Ok(())
        })?;
        let vocabulary = if with_logits { model.encoder.vocab_size() as usize } else { 0 };
        Ok(Self { executor, width: model.encoder.hidden_size() as usize, vocabulary, broken_weights })
    }

    /// The answers in the order of the sequences, which are packed as they come.
    pub(super) fn answers<'a>(
        &mut self,
        sequences: impl Iterator<Item = &'a [i32]>,
    ) -> Result<Vec<Answer>, RuntimeError> {
        let bounds = self.executor.program().plans()[ENCODER].1.graph.bounds;
        let (mut answers, mut tokens, mut spans) = (vec![], vec![], vec![]);
        for sequence in sequences {
            let full = tokens.len() + sequence.len() > bounds.tokens as usize;
            if full || spans.len() as u64 == bounds.sequences {
                self.step(&tokens, &spans, &mut answers)?;
                tokens.clear();
                spans.clear();
            }
            spans.push([tokens.len(), tokens.len() + sequence.len()]);
            tokens.extend_from_slice(sequence);
        }
        if !spans.is_empty() {
            self.step(&tokens, &spans, &mut answers)?;
        }
        Ok(answers)
    }

    /// The answer to one sequence alone.
    pub(super) fn answer(&mut self, sequence: &[i32]) -> Result<Answer, RuntimeError> {
        let mut answers = vec![];
        self.step(sequence, &[[0, sequence.len()]], &mut answers)?;
        answers
            .pop()
            .ok_or_else(|| RuntimeError::Refused("a sequence has no answer; this is a bug of ours".to_owned()))
    }

    fn step(
        &mut self,
        tokens: &[i32],
        spans: &[[usize; 2]],
        answers: &mut Vec<Answer>,
    ) -> Result<(), RuntimeError> {
        let flat: Vec<i32> = spans.iter().flatten().map(|&row| row as i32).collect();
        self.executor.input_i32(ENCODER, "ids", tokens)?;
        self.executor.input_i32(ENCODER, "spans", &flat)?;
        self.executor.run(ENCODER, Counts { tokens: tokens.len() as u64, sequences: spans.len() as u64 })?;
        let mut read = |name: &str, values: usize| {
            let mut out = vec![f32::NAN; values];
            self.executor.output_f32(ENCODER, name, &mut out).map(|()| out)
        };
        let hidden = read("hidden", tokens.len() * self.width)?;
        let mean = read("mean", spans.len() * self.width)?;
        let logits = if self.vocabulary > 0 { read("logits", tokens.len() * self.vocabulary)? } else { vec![] };
        for ([start, end], mean) in spans.iter().zip(mean.chunks(self.width)) {
            let rows = |values: &[f32], columns: usize| values[start * columns..end * columns].to_vec();
            let (hidden, logits) = (rows(&hidden, self.width), rows(&logits, self.vocabulary));
            answers.push(Answer { hidden, mean: mean.to_vec(), logits });
        }
        Ok(())
    }
}
