//! Checks of an encoder. Invariant: checks do not modify the model; a model that cannot be opened is a failed
//! check and does not end the verification.

use super::compute::{EncoderOutputs, ModelRunner};
use super::distance::{self, MeanEmbeddings};
use super::facts::{
    ANCHORS, CORNER_BOUND, DNA_WIDTH, MEAN_BOUND, PROTEIN_WIDTH, PublishedCorner, RELEASED, SUM_BOUND,
};
use super::reference::{RunSide, sets};
use super::sequences::{self, Golden, TestSequence};
use super::{Verdict, VerifyOptions, chain, decoder, facts, worst};
use crate::ToolError;
use crate::list::parameters;
use plimsoll_data::tokenize::esm;
use plimsoll_data::weights::HubEnv;
use plimsoll_models::{Encoder, KNOWN, SequenceModel, derived, known};
use plimsoll_plan::Precision;
use plimsoll_runtime::{EncoderModel, Level, Model, Observer, RuntimeError, Settings, Tokenizer};

/// Tolerance of reference outputs beside the weights: f32 compared with f32.
const ANSWER_BOUND: f32 = 1e-5;

/// Canonical names of the tensors of ESM-2's language-model head.
const LM_HEAD: [&str; 5] = [
    "lm_head.dense.weight",
    "lm_head.dense.bias",
    "lm_head.layer_norm.weight",
    "lm_head.layer_norm.bias",
    "lm_head.bias",
];

/// Why outputs of a language-model head were not checked.
const NO_HEAD: &str = "not checked, because the file has no language-model head";

/// Facts about an opened encoder that the checks of the head need.
pub(super) struct OpenedEncoder {
    /// Width of the hidden states, D.
    pub(super) width: u64,
    /// Mean embeddings in f32 and in a reduced precision, if one was requested.
    pub(super) means: Option<MeanEmbeddings>,
}

/// Verifies an encoder or a decoder; the second value is `None` for a decoder, and if the model could not be opened.
pub(super) fn verify(
    name: &str,
    options: &VerifyOptions,
    env: &HubEnv,
    observer: &mut dyn Observer,
) -> Result<(Verdict, Option<OpenedEncoder>), ToolError> {
    let precision = options.settings.precision()?;
    let mut verdict = Verdict::new(name);
    let model = match Model::open_with(name, env, observer) {
        Ok(Model::Encoder(model)) => model,
        Ok(Model::Decoder(model)) => {
            decoder::verify(&model, options, &mut verdict, observer)?;
            return Ok((verdict, None));
        }
        Err(error @ RuntimeError::Interrupted { .. }) => return Err(error.into()),
        Err(error) => {
            verdict.add("opens", false, chain(&error));
            return Ok((verdict, None));
        }
    };
    let width = model.encoder.hidden_size();
    verdict.about = format!("{} of width {width}", model.encoder.family());
    let missing: Vec<&str> = LM_HEAD.into_iter().filter(|tensor| model.find(tensor).is_none()).collect();
    let has_head = matches!(model.encoder, Encoder::Esm2(_)) && missing.is_empty();
    files(&model, has_head, &mut verdict)?;
    if !missing.is_empty() && missing.len() < LM_HEAD.len() {
        let text = format!("the language-model head is incomplete: the file lacks {}", missing.join(", "));
        verdict.add("weights", false, text);
    }
    rotary(&model, &mut verdict)?;
    sequences::round_trip(&model, released(&model.encoder).next().is_some(), &mut verdict)?;

    let own = sequences::own(&model.tokenizer)?;
    let golden = Golden::find(&model.weights, &model.tokenizer, &mut verdict)?;
    let references = references(&model, options, &mut verdict)?;
    let answered = golden.iter().flat_map(|g| &g.sequences);
    let all = own.iter().chain(answered).chain(references.iter().flat_map(|r| &r.sequences));
    let longest = all.clone().map(|s| s.tokens.len()).max().unwrap_or(0) as u64;
    // Published values and reference outputs are in f32.
    let wide = Settings { precision: Some(Precision::F32), ..options.settings.clone() };
    let mut runner = ModelRunner::start(&model, has_head, &wide, longest)?;
    observer.say(Level::Detail, &format!("{name} is loaded"));
    weights(&runner, &mut verdict);

    corners(&model, &mut runner, &mut verdict)?;
    if let Some(golden) = &golden {
        answers(golden, &mut runner, &mut verdict)?;
    }
    for reference in &references {
        reference.check(&mut runner, &mut verdict)?;
    }
    batch_invariance(&own, &mut runner, &mut verdict)?;
    match (&model.encoder, has_head) {
        (Encoder::Esm2(_), false) => verdict.note("language", format!("prediction of residues: {NO_HEAD}")),
        (Encoder::Esm2(_), true) if golden.is_none() => language(&own, &mut runner, &mut verdict)?,
        (Encoder::Esm2(_) | Encoder::DnabertS(_), _) => {}
    }
    if precision == Precision::F32 {
        return Ok((verdict, Some(OpenedEncoder { width, means: None })));
    }
    let wanted = runner.answers(all.clone().map(|s| &s.tokens[..]))?;
    drop(runner);
    observer.say(Level::Info, &format!("verifying {name} in {}", precision.name()));
    let mut runner = ModelRunner::start(&model, has_head, &options.settings, longest)?;
    let found = runner.answers(all.map(|s| &s.tokens[..]))?;
    let means = distance::answers(precision, &wanted, &found, &mut verdict);
    batch_invariance(&own, &mut runner, &mut verdict)?;
    Ok((verdict, Some(OpenedEncoder { width, means: Some(means) })))
}

/// Checks that all weights that were loaded are finite.
pub(super) fn weights(runner: &ModelRunner, verdict: &mut Verdict) {
    let broken = runner.broken_weights;
    verdict.add("weights", broken == 0, format!("{broken} weights are NaN or infinite"));
}

/// Hub ids of the known models with this configuration.
fn released(encoder: &Encoder) -> impl Iterator<Item = &'static str> {
    KNOWN.iter().map(|(id, _)| *id).filter(move |id| known(id).as_ref() == Some(encoder))
}

/// Reports the numbers of tensors and parameters, and whether the file is the hub's file.
fn files(model: &EncoderModel, has_head: bool, verdict: &mut Verdict) -> Result<(), ToolError> {
    let tensors = model.weights.tensors().count();
    let head = match (&model.encoder, has_head) {
        (Encoder::Esm2(_), true) => ", with the language-model head",
        (Encoder::Esm2(_), false) => " with a language-model head, which is not there",
        (Encoder::DnabertS(_), _) => "",
    };
    let count = parameters(&SequenceModel::Encoder(model.encoder.clone()))?;
    verdict.add("opens", true, format!("{tensors} tensors; {count} parameters{head}"));
    let ids: Vec<&str> = released(&model.encoder).collect();
    if ids.is_empty() {
        verdict.note("sizes", "not the configuration of a released model")
    } else {
        verdict.note("sizes", format!("those of {}", ids.join(" and ")))
    }
    let Some(facts) = RELEASED.iter().find(|facts| ids.contains(&facts.id)) else { return Ok(()) };
    let (start, end) = facts.sha256;
    for (file, digest) in model.weights.sha256()? {
        if digest.starts_with(start) && digest.ends_with(end) {
            verdict.add("digest", true, format!("{file} is the file on the hub ({start}..{end})"))
        } else {
            // A converted file has the same values in other bytes; the checks of published corners decide.
            verdict.note("digest", format!("{file} is another file than the hub's ({start}..{end})"))
        }
    }
    Ok(())
}

/// Checks the rotary frequencies of an ESM-2 file, which released files store rounded to binary16. Rounded and
/// exact frequencies give different rotation angles.
fn rotary(model: &EncoderModel, verdict: &mut Verdict) -> Result<(), ToolError> {
    let tensor = "encoder.layer.0.attention.self.rotary_embeddings.inv_freq";
    let Some(wanted) = derived(&model.encoder, tensor) else { return Ok(()) };
    let Some(name) = model.find(tensor) else {
        verdict.note("rotary", "the file has no frequencies; they are computed and rounded to binary16");
        return Ok(());
    };
    let mut found = vec![0.0; wanted.len()];
    model.weights.read_f32(&name, 0..wanted.len() as u64, &mut found)?;
    let relative = found.iter().zip(&wanted).map(|(f, w)| ((f - w) / w).abs()).fold(0.0, f32::max);
    let detail = format!("frequencies {relative:.1e} off theta 10000 rounded to binary16");
    match relative {
        0.0 => verdict.add("rotary", true, detail),
        // Rounding to the 11-bit significand of binary16 changes a normal value by at most 2^-11 relative, so a
        // difference of up to 2^-11 means that the file has exact frequencies, which no released file has.
        r if r <= 1.0 / 2048.0 => verdict.note("rotary", detail + ": not rounded, as no released file is"),
        _ => verdict.add("rotary", false, detail),
    }
    Ok(())
}

/// Compares with the published values of the released models that have this configuration.
fn corners(model: &EncoderModel, runner: &mut ModelRunner, verdict: &mut Verdict) -> Result<(), ToolError> {
    let ids: Vec<&str> = released(&model.encoder).collect();
    let facts = RELEASED.iter().filter(|facts| ids.contains(&facts.id));
    for PublishedCorner { ids, is_logits, values } in facts.flat_map(|facts| facts.corners) {
        if *is_logits && !runner.has_logits() {
            verdict.note("published", format!("logits of the released model: {NO_HEAD}"));
            continue;
        }
        let answer = runner.answer(ids)?;
        let (rows, what) =
            if *is_logits { (&answer.logits, "logits") } else { (&answer.hidden, "hidden states") };
        let columns = rows.len() / ids.len();
        let found: Vec<f32> =
            rows.chunks(columns.max(1)).take(3).flat_map(|row| row.iter().take(3)).copied().collect();
        let difference = worst(&found, &values.concat());
        verdict.near("published", &format!("{what} of the released model"), difference, CORNER_BOUND);
    }
    Ok(())
}

/// Compares with the outputs of a reference implementation that are stored beside the weights.
pub(super) fn answers(
    golden: &Golden,
    runner: &mut ModelRunner,
    verdict: &mut Verdict,
) -> Result<(), ToolError> {
    let found = runner.answers(golden.sequences.iter().map(|s| &s.tokens[..]))?;
    for (output, of) in [
        ("hidden", (|a: &EncoderOutputs| &a.hidden) as fn(&EncoderOutputs) -> &Vec<f32>),
        ("mean", |a| &a.mean),
        ("logits", |a| &a.logits),
    ] {
        let mut count = 0;
        let mut difference = 0f32;
        for (sequence, answer) in golden.sequences.iter().zip(&found) {
            if let Some(wanted) = golden.answer(&sequence.name, output)? {
                difference = difference.max(worst(of(answer), &wanted));
                count += 1;
            }
        }
        if count > 0 && output == "logits" && !runner.has_logits() {
            verdict.note("answers", format!("logits of {count} sequences beside the weights: {NO_HEAD}"));
        } else if count > 0 {
            verdict.near(
                "answers",
                &format!("{output} of {count} sequences beside the weights"),
                difference,
                ANSWER_BOUND,
            );
        }
    }
    Ok(())
}

/// Checks that outputs are finite, and bitwise equal whether sequences are computed alone, together, or
/// together in reverse order.
pub(super) fn batch_invariance(
    own: &[TestSequence],
    runner: &mut ModelRunner,
    verdict: &mut Verdict,
) -> Result<(), ToolError> {
    let together = runner.answers(own.iter().map(|s| &s.tokens[..]))?;
    let mut reversed = runner.answers(own.iter().rev().map(|s| &s.tokens[..]))?;
    reversed.reverse();
    let mut differ = vec![];
    for ((sequence, answer), other) in own.iter().zip(&together).zip(&reversed) {
        let alone = runner.answer(&sequence.tokens)?;
        if !alone.has_bits_of(answer) || !alone.has_bits_of(other) {
            differ.push(&*sequence.name);
        }
    }
    let broken: usize = together.iter().map(|a| a.values().filter(|x| !x.is_finite()).count()).sum();
    let count = own.len();
    verdict.add(
        "finite",
        broken == 0,
        format!("{broken} output values of {count} sequences are NaN or infinite"),
    );
    let detail = if differ.is_empty() {
        format!("{count} sequences alone, in one batch and in reversed order: identical bits")
    } else {
        format!("the outputs of {} depend on the other sequences of the batch", differ.join(", "))
    };
    verdict.add("company", differ.is_empty(), detail);
    Ok(())
}

/// Checks that the language model predicts most unmasked residues of known proteins; reports the share of
/// masked residues that it predicts.
fn language(own: &[TestSequence], runner: &mut ModelRunner, verdict: &mut Verdict) -> Result<(), ToolError> {
    // One residue in seven is about the 15 % that are masked in training.
    const EVERY: usize = 7;
    let proteins = own.iter().filter(|s| facts::PROTEINS.iter().any(|(name, _)| *name == s.name));
    let mut seen = ResidueCounts::default();
    let mut masked = ResidueCounts::default();
    for TestSequence { tokens, .. } in proteins {
        let residues = 1..tokens.len() - 1;
        let answer = runner.answer(tokens)?;
        seen.add(&answer, tokens, residues.clone());
        let hidden = residues.skip(EVERY / 2).step_by(EVERY);
        let mut input = tokens.clone();
        hidden.clone().for_each(|at| input[at] = esm::MASK);
        let answer = runner.answer(&input)?;
        masked.add(&answer, tokens, hidden);
    }
    let share = f64::from(seen.right) / f64::from(seen.all.max(1));
    let detail = format!(
        "{} of {} residues of known proteins are named, more than half is needed",
        seen.right, seen.all
    );
    verdict.add("language", share > facts::MIN_UNMASKED_ACCURACY, detail);
    verdict.note(
        "masked",
        format!("{} of {} masked residues are named; chance is about 1 in 20", masked.right, masked.all),
    );
    Ok(())
}

/// Number of residues that a language model was asked for, and of those that it predicts.
#[derive(Default)]
struct ResidueCounts {
    right: u32,
    all: u32,
}

impl ResidueCounts {
    /// Compares the most likely residue with `wanted` at each of `positions`. Special tokens are not considered.
    fn add(&mut self, answer: &EncoderOutputs, wanted: &[i32], positions: impl Iterator<Item = usize>) {
        let columns = answer.logits.len() / wanted.len();
        for position in positions {
            let row = &answer.logits[position * columns..(position + 1) * columns];
            let letters = (0..columns).filter(|&t| esm::letter(t as i32).is_some());
            let best = letters.max_by(|&a, &b| row[a].total_cmp(&row[b]));
            self.right += u32::from(best == Some(wanted[position] as usize));
            self.all += 1;
        }
    }
}

/// The VirNucPro runs of `--reference` with the files for this encoder; empty unless the model has the width of
/// the encoder that VirNucPro uses.
fn references(
    model: &EncoderModel,
    options: &VerifyOptions,
    verdict: &mut Verdict,
) -> Result<Vec<EncoderReference>, ToolError> {
    let Some(folder) = &options.reference else { return Ok(vec![]) };
    let width = model.encoder.hidden_size();
    let side = match (&model.tokenizer, width) {
        (Tokenizer::Bpe(_), DNA_WIDTH) => RunSide::Dna,
        (Tokenizer::Esm, PROTEIN_WIDTH) => RunSide::Protein,
        (Tokenizer::Bpe(_) | Tokenizer::Esm | Tokenizer::Text(_), _) => {
            let text = format!(
                "not compared: VirNucPro's embeddings have {DNA_WIDTH} values from DNABERT-S and \
                 {PROTEIN_WIDTH} from ESM-2, this model's have {width}"
            );
            verdict.note("reference", text);
            return Ok(vec![]);
        }
    };
    let mut references = vec![];
    for set in sets(folder)? {
        let mut sequences = vec![];
        for (name, letters) in set.sequences(side)? {
            let mut tokens = vec![];
            model.tokenizer.encode(&letters, &mut tokens)?;
            sequences.push(TestSequence { name, letters, tokens });
        }
        let wanted = set.embeddings(side)?.unwrap_or_default();
        references.push(EncoderReference { side, name: set.name, sequences, wanted });
    }
    Ok(references)
}

/// Sequences and embeddings of one VirNucPro run for one encoder.
struct EncoderReference {
    side: RunSide,
    name: String,
    sequences: Vec<TestSequence>,
    wanted: Vec<(String, Vec<f32>)>,
}

impl EncoderReference {
    fn check(&self, runner: &mut ModelRunner, verdict: &mut Verdict) -> Result<(), ToolError> {
        let found = runner.answers(self.sequences.iter().map(|s| &s.tokens[..]))?;
        let mut vectors = (0, 0f32);
        let mut anchors = (0, 0f32, 0f32);
        for (sequence, EncoderOutputs { mean, .. }) in self.sequences.iter().zip(&found) {
            if let Some((_, wanted)) = self.wanted.iter().find(|(id, _)| *id == sequence.name) {
                vectors = (vectors.0 + 1, vectors.1.max(worst(mean, wanted)));
            }
            if let Some(anchor) = ANCHORS.iter().find(|anchor| anchor.id == sequence.name) {
                let (first, sum, norm) = match self.side {
                    RunSide::Dna => anchor.dna,
                    RunSide::Protein => anchor.protein,
                };
                let values = mean.iter().map(|&x| f64::from(x));
                let totals = [values.clone().sum(), values.map(|x| x * x).sum::<f64>().sqrt()];
                let difference = worst(&mean[..3], &first);
                let total = worst(&totals.map(|x| x as f32), &[sum, norm]);
                anchors = (anchors.0 + 1, anchors.1.max(difference), anchors.2.max(total));
            }
        }
        if vectors.0 > 0 {
            verdict.near("reference", &format!("{}: {} means", self.name, vectors.0), vectors.1, MEAN_BOUND);
        }
        if anchors.0 > 0 {
            let what = format!("{}: first values of {} means", self.name, anchors.0);
            verdict.near("anchors", &what, anchors.1, MEAN_BOUND);
            verdict.near("anchors", &format!("{}: their sums and norms", self.name), anchors.2, SUM_BOUND);
        }
        if vectors.0 + anchors.0 == 0 {
            verdict.note("reference", format!("{}: none of its sequences has a reference result", self.name));
        }
        Ok(())
    }
}
