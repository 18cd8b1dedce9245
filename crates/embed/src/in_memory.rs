//! Embeddings of sequences that are in memory. Invariant: the values are those that [`embed`](crate::embed) writes for a
//! file with these sequences.

use crate::engine::{ENCODER, Engine, Reading, Rows};
use crate::front::Sequence;
use crate::states::States;
use crate::{EmbedError, Pool, SHORTEST};
use data::alphabet::{Alphabet, uracil_to_thymine};
use data::pack::{MOST_PACKS, Order};
use data::tokenize::esm;
use graph::Bytes;
use runtime::session::bounds::{bounds, copies, output_bytes, with_outputs};
use runtime::session::{Part, Request, Stage, Start};
use runtime::{EncoderModel, Observer, Settings, Tokenizer};

/// Computes the embedding of each sequence with an encoder and returns the embeddings in the order of the sequences.
///
/// `sequences` are letters as in a FASTA file: residues for ESM-2 (one `*` at the end is left out), bases for DNABERT-S (U is
/// read as T). There is no limit of the length but the memory; ESM-2 was trained on sequences of up to
/// [`ESM_LENGTH`](crate::ESM_LENGTH) residues.
///
/// Each embedding is row-major, with D the [hidden size](models::Encoder::hidden_size) of the model: `(D)` for [`Pool::Mean`]
/// and [`Pool::Cls`], `(tokens, D)` for [`Pool::Tokens`]. With `layers`, the embeddings of these layers follow one another;
/// layer 0 is the token embedding, and negative numbers count from the last layer.
///
/// # Errors
/// A sequence is empty or of another alphabet, a layer does not exist, the plan does not fit in the memory budget of
/// `settings`, or a value is not finite. Sequences are named by their position: `sequence 0` is the first.
///
/// # Examples
/// The built-in protein encoder has random weights; [`EncoderModel::open`] opens a model by its folder or name.
/// ```
/// use plimsoll_embed::{Pool, embed_sequences};
/// use runtime::{EncoderModel, Settings, Silent};
///
/// # fn main() -> Result<(), plimsoll_embed::EmbedError> {
/// let model = EncoderModel::builtin_protein()?;
/// let proteins = ["MKTAYIAKQRQISFVKSHFSRQ", "MVLSPADKTNVKAAW"];
/// let embeddings = embed_sequences(&model, &proteins, Pool::Mean, None, &Settings::default(), &mut Silent)?;
/// assert_eq!(embeddings.len(), 2);
/// assert_eq!(embeddings[0].len() as u64, model.encoder.hidden_size());
/// # Ok(())
/// # }
/// ```
pub fn embed_sequences(
    model: &EncoderModel,
    sequences: &[impl AsRef<[u8]>],
    pool: Pool,
    layers: Option<&[i64]>,
    settings: &Settings,
    observer: &mut dyn Observer,
) -> Result<Vec<Vec<f32>>, EmbedError> {
    let states = States::new(pool, layers, &model.encoder)?;
    let mut encoded = vec![];
    for (position, letters) in sequences.iter().enumerate() {
        encoded.push(encode(model, position, letters.as_ref())?);
    }
    let Some(longest) = encoded.iter().map(Vec::len).max() else { return Ok(vec![]) };
    let longest = (longest as u64).max(SHORTEST);

    let outputs = states.outputs();
    let (turns, count) = (MOST_PACKS as u64, encoded.len() as u64);
    let part = Part {
        name: ENCODER,
        graph: Box::new(|tokens| model.encoder.graph(bounds(tokens, longest), &outputs)),
        policy: settings.policy()?,
        streams: true,
    };
    let stage = Stage {
        parts: vec![part],
        longest,
        finish: Box::new(|program, replicas| with_outputs(program, copies(replicas), turns, Some(count))),
        kept: Box::new(|program, steps| Bytes(output_bytes(program).0 * (steps as u64 + turns))),
    };
    let planned = settings.plan(Request {
        alternatives: vec![vec![stage]],
        replicas: settings.most_replicas(None),
        tokens: settings.tokens,
        budgets: vec![settings.read_budget()?],
    })?;
    let start = Start { order: Order::ByLength, weights: vec![model], running: vec![], kept: "outputs" };
    let session = planned.start(0, start, observer)?;

    let width = model.encoder.hidden_size() as usize;
    let names = outputs.iter().map(|output| output.name()).collect();
    let reading = Reading { pool, outputs: names, width, order: Order::ByLength };
    let mut engine = Engine::new(session, &model.encoder, reading, InMemory(vec![]))?;
    for (position, tokens) in encoded.iter().enumerate() {
        let id = name(position);
        let length = sequences[position].as_ref().len() as u64;
        engine.push(&Sequence { id, length, result: 0 }, tokens, &|| Ok(()))?;
    }
    engine.drain(&|| Ok(()))?;
    engine.finish()
}

/// The name of a sequence in errors.
fn name(position: usize) -> String {
    format!("sequence {position}")
}

/// The tokens of a sequence.
fn encode(model: &EncoderModel, position: usize, letters: &[u8]) -> Result<Vec<i32>, EmbedError> {
    let mut tokens = vec![];
    let mut letters = letters.to_vec();
    let alphabet = match &model.tokenizer {
        Tokenizer::Esm => Alphabet::AminoAcids,
        Tokenizer::Bpe(_) => Alphabet::Nucleotides,
    };
    let refusal = match esm::residues(&letters).is_empty() {
        true => Some("it has no letters".to_owned()),
        false => alphabet.refusal(&letters),
    };
    if let Some(reason) = refusal {
        return Err(EmbedError::Refused { id: name(position), reason });
    }
    if alphabet == Alphabet::Nucleotides {
        uracil_to_thymine(&mut letters);
    }
    model.tokenizer.encode(&letters, &mut tokens)?;
    Ok(tokens)
}

/// Collects the values of each sequence.
struct InMemory(Vec<Vec<f32>>);

impl Rows for InMemory {
    type Written = Vec<Vec<f32>>;

    fn write(&mut self, _: &Sequence, values: &[f32]) -> Result<(), EmbedError> {
        self.0.push(values.to_vec());
        Ok(())
    }

    fn finish(self) -> Result<Vec<Vec<f32>>, EmbedError> {
        Ok(self.0)
    }
}
