//! Embeddings of sequences in memory. Invariant: the values are identical to the values that
//! [`embed`](crate::embed) writes for a file with the same sequences.

use crate::engine::{EmbedEngine, RowWriter};
use crate::input::SequenceRecord;
use crate::states::LayerSelection;
use crate::{EmbedError, Pooling, UnknownTokens, warn};
use plimsoll_runtime::observer::stopped;
use plimsoll_runtime::session::{Session, SessionRequest, StopCheck};
use plimsoll_runtime::{EncoderModel, Level, Observer, Settings};

/// Options of [`embed_sequences`].
#[derive(Clone, Copy, Debug)]
pub struct InMemoryOptions<'a> {
    /// Pooling of the hidden states of a sequence.
    pub pool: Pooling,
    /// Layers of the embeddings, see [`EmbedOptions::layers`](crate::EmbedOptions::layers); `None` for the last layer.
    pub layers: Option<&'a [i64]>,
    /// Device, threads, memory budget and precision.
    pub settings: &'a Settings,
}

/// Computes the embedding of each sequence with an encoder and returns the embeddings in the order of the sequences.
///
/// `sequences` are letters as in a FASTA file, in upper or lower case: residues for ESM-2 (a trailing `*` is ignored), bases for
/// DNABERT-S (U is read as T). White space, digits and gaps are dropped. Only memory limits the length; ESM-2 was trained on sequences of up to
/// [`ESM_LENGTH`](crate::ESM_LENGTH) residues.
///
/// Each embedding is row-major, with D the [hidden size](plimsoll_models::Encoder::hidden_size) of the model: `(D)` for
/// [`Pooling::Mean`] and [`Pooling::Cls`], `(tokens, D)` for [`Pooling::Tokens`]. With `layers`, the result has one such
/// row per layer (and token), in the order of `layers`; layer 0 is the token embedding, and negative numbers
/// count from the last layer. The memory of `settings` does not include the tokens and the embeddings of all
/// sequences. Warnings of the devices, and the number of unknown tokens, go to `observer`.
///
/// # Errors
/// A sequence is empty or contains letters of another alphabet, a layer does not exist, the plan does not fit
/// in the memory budget of `settings`, a value is not finite, or `observer` requests a stop. Sequences are
/// named by their position: `sequence 0` is the first.
///
/// # Examples
/// The built-in protein encoder has random weights; [`EncoderModel::open`] opens a model by its folder or name.
/// ```
/// use plimsoll_embed::{InMemoryOptions, Pooling, embed_sequences};
/// use plimsoll_runtime::{EncoderModel, Settings, Silent};
///
/// # fn main() -> Result<(), plimsoll_embed::EmbedError> {
/// let model = EncoderModel::builtin_protein()?;
/// let proteins = ["MKTAYIAKQRQISFVKSHFSRQ", "MVLSPADKTNVKAAW"];
/// let options = InMemoryOptions { pool: Pooling::Mean, layers: None, settings: &Settings::default() };
/// let embeddings = embed_sequences(&model, &proteins, &options, &mut Silent)?;
/// assert_eq!(embeddings.len(), 2);
/// assert_eq!(embeddings[0].len() as u64, model.encoder.hidden_size());
/// # Ok(())
/// # }
/// ```
pub fn embed_sequences(
    model: &EncoderModel,
    sequences: &[impl AsRef<[u8]>],
    options: &InMemoryOptions<'_>,
    observer: &mut dyn Observer,
) -> Result<Vec<Vec<f32>>, EmbedError> {
    let InMemoryOptions { pool, layers, settings } = *options;
    if pool == Pooling::Last {
        return Err(EmbedError::LastOfEncoder { family: model.encoder.family() });
    }
    let outputs = LayerSelection::new(pool, layers, model.encoder.layers())?.outputs();
    let mut encoded = vec![];
    let mut unknowns = UnknownTokens::default();
    for (position, letters) in sequences.iter().enumerate() {
        let mut tokens = vec![];
        let unknown = model.tokenizer.encode_sequence(position as u64, letters.as_ref(), &mut tokens)?;
        if unknown > 0 {
            unknowns.count(unknown, || name(position));
        }
        encoded.push(tokens);
    }
    if let Some(text) = unknowns.text() {
        observer.say(Level::Warning, &text);
    }
    let Some(longest) = encoded.iter().map(Vec::len).max() else { return Ok(vec![]) };
    let request = SessionRequest {
        outputs,
        longest: Some(longest as u64),
        sequences: Some(encoded.len() as u64),
        settings: settings.clone(),
        ..SessionRequest::default()
    };
    let planned = Session::plan(&[model], &request)?;
    let session = planned.start_with(observer)?;
    let mut engine = EmbedEngine::new(session, pool, &model.tokenizer, InMemory(vec![]));
    for (position, tokens) in encoded.iter().enumerate() {
        let length = sequences[position].as_ref().len() as u64;
        let sequence = SequenceRecord { id: name(position), length, result: 0 };
        let stop: StopCheck<'_> = &|| stopped(observer, STOPPED);
        let pushed = stop().map_err(EmbedError::from).and_then(|()| engine.push(&sequence, tokens, stop));
        warn(&mut engine, observer);
        pushed?;
    }
    loop {
        let drained = engine.drain(&|| stopped(observer, STOPPED));
        warn(&mut engine, observer);
        if !drained? {
            return engine.finish();
        }
    }
}

/// Hint after a signal: the state of the results.
const STOPPED: &str = "no embedding is returned";

/// The name of a sequence in errors.
fn name(position: usize) -> String {
    format!("sequence {position}")
}

/// Collects the values of each sequence.
struct InMemory(Vec<Vec<f32>>);

impl RowWriter for InMemory {
    type Written = Vec<Vec<f32>>;

    fn write(&mut self, _: &SequenceRecord, values: &[f32]) -> Result<(), EmbedError> {
        self.0.push(values.to_vec());
        Ok(())
    }

    fn finish(self) -> Result<Vec<Vec<f32>>, EmbedError> {
        Ok(self.0)
    }
}
