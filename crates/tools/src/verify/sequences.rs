//! Test sequences for `verify`: built-in sequences, and sequences with reference outputs (golden files) beside
//! the weights. Invariant: built-in sequences are identical on every run.

use super::Verdict;
use super::facts::{ODD_PROTEINS, PROTEINS};
use crate::ToolError;
use plimsoll_data::bounded;
use plimsoll_data::printable::Name;
use plimsoll_data::sequence::Reader;
use plimsoll_data::tokenize::esm;
use plimsoll_data::weights::Weights;
use plimsoll_runtime::{EncoderModel, RuntimeError, Tokenizer};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// A tokenized test sequence.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct TestSequence {
    pub(super) name: String,
    /// Empty if only the tokens are known.
    pub(super) letters: Vec<u8>,
    pub(super) tokens: Vec<i32>,
}

/// Returns the built-in test sequences for a tokenizer: known and unusual proteins, pseudo-random DNA of 1, 30, 150
/// and 500 bases, or texts.
pub(super) fn own(tokenizer: &Tokenizer) -> Result<Vec<TestSequence>, ToolError> {
    let letters: Vec<(String, Vec<u8>)> = match tokenizer {
        Tokenizer::Esm => {
            let all = PROTEINS.iter().chain(&ODD_PROTEINS);
            all.map(|(name, letters)| ((*name).to_owned(), letters.as_bytes().to_vec())).collect()
        }
        Tokenizer::Bpe(_) => [1, 30, 150, 500].map(|n| (format!("{n} bases"), dna(n))).to_vec(),
        Tokenizer::Text(_) => texts(),
    };
    letters
        .into_iter()
        .map(|(name, letters)| {
            let mut tokens = vec![];
            tokenizer.encode(&letters, &mut tokens)?;
            Ok(TestSequence { name, letters, tokens })
        })
        .collect()
}

/// Texts of 1 to some hundred bytes: English, other scripts, and pseudo-random bases.
fn texts() -> Vec<(String, Vec<u8>)> {
    let english =
        "A plimsoll line is the mark on the hull of a ship that shows how deep it may lie in the water.";
    let all = [
        ("one letter", "a".as_bytes().to_vec()),
        ("a sentence", english.as_bytes().to_vec()),
        ("three sentences", [english; 3].join(" ").into_bytes()),
        ("other scripts", "Ladelinie, ligne de charge, 満載喫水線, грузовая марка: 12.5 m".as_bytes().to_vec()),
        ("150 bases", dna(150)),
    ];
    all.map(|(name, text)| (name.to_owned(), text)).to_vec()
}

/// Pseudo-random bases: the two upper bits of Knuth's linear congruential generator, because its lower bits
/// have short periods.
fn dna(length: usize) -> Vec<u8> {
    let mut state = length as u64;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        b"ACGT"[(state >> 62) as usize]
    };
    std::iter::repeat_with(next).take(length).collect()
}

/// Checks that decoding the tokens of the built-in sequences restores their letters and, for the released
/// DNABERT models, the ids of the special tokens.
pub(super) fn round_trip(
    model: &EncoderModel,
    is_released: bool,
    verdict: &mut Verdict,
) -> Result<(), ToolError> {
    let own = own(&model.tokenizer)?;
    let mut tokens = 0;
    let mut letters = 0;
    let mut wrong = vec![];
    for sequence in &own {
        let inside = sequence.tokens.get(1..sequence.tokens.len() - 1).unwrap_or_default();
        if read_back(&model.tokenizer, inside).as_deref() != Some(&*sequence.letters) {
            wrong.push(&*sequence.name);
        }
        tokens += inside.len();
        letters += sequence.letters.len();
    }
    let detail = if wrong.is_empty() {
        format!(
            "{} sequences are restored by decoding; {:.2} letters a token",
            own.len(),
            letters as f64 / tokens as f64
        )
    } else {
        format!("decoding the tokens does not restore {}", wrong.join(", "))
    };
    verdict.add("tokens", wrong.is_empty(), detail);
    if is_released && matches!(model.tokenizer, Tokenizer::Bpe(_)) {
        let mut found = vec![];
        model.tokenizer.encode(b"NN", &mut found)?;
        let detail = format!("NN is {found:?}; [UNK] is 0, [CLS] 1, [SEP] 2 in the released tokenizer");
        verdict.add("special tokens", found == [1, 0, 0, 2], detail);
    }
    Ok(())
}

/// Decodes tokens to letters; `None` if a token has no text.
fn read_back(tokenizer: &Tokenizer, tokens: &[i32]) -> Option<Vec<u8>> {
    match tokenizer {
        Tokenizer::Esm => tokens.iter().map(|&t| esm::letter(t)).collect(),
        Tokenizer::Bpe(bpe) => {
            let words: Option<Vec<String>> = tokens.iter().map(|&t| bpe.token(t)).collect();
            words.map(|words| words.concat().into_bytes())
        }
        // Decoders are not checked for it: a normalizer may change the text.
        Tokenizer::Text(_) => None,
    }
}

/// Reference outputs beside the weights: `golden.safetensors` with `NAME.hidden`, `NAME.mean` or `NAME.logits`.
/// The sequences are the tensors `NAME.ids` or `NAME.tokens` of that file, records of FASTA files beside it, or texts of
/// `golden.jsonl`: objects with `id` and `text`, one a line.
pub(super) struct Golden {
    pub(super) sequences: Vec<TestSequence>,
    answers: Weights,
}

/// File name of the reference outputs.
const GOLDEN: &str = "golden.safetensors";
/// File name of the texts of the reference outputs of a decoder.
const TEXTS: &str = "golden.jsonl";
/// Largest accepted file of texts, in bytes.
const LARGEST_TEXTS: u64 = 16 << 20;
const OUTPUTS: [&str; 3] = [".hidden", ".mean", ".logits"];

impl Golden {
    /// Opens the golden file beside a model's weights; `None` if there is no such file. For a sequence with both token
    /// ids in the file and a FASTA record, the verdict gets a check that the tokenizer produces these ids. Outputs
    /// without a sequence are noted in the verdict and omitted.
    pub(super) fn find(
        weights: &Weights,
        tokenizer: &Tokenizer,
        verdict: &mut Verdict,
    ) -> Result<Option<Self>, ToolError> {
        let folder = weights.files().first().and_then(|file| file.parent());
        // A path without a folder refers to the current folder.
        let folder = folder.map(|folder| if folder.as_os_str().is_empty() { Path::new(".") } else { folder });
        let Some(folder) = folder.filter(|folder| folder.join(GOLDEN).exists()) else { return Ok(None) };
        let answers = Weights::open(&folder.join(GOLDEN))?;
        let names = answers.tensors().map(|t| t.name());
        let names: BTreeSet<&str> =
            names.filter_map(|name| OUTPUTS.iter().find_map(|output| name.strip_suffix(output))).collect();
        let records = records(folder)?;
        let mut sequences = vec![];
        let mut same = (0, 0);
        let mut without = vec![];
        for name in names {
            let letters = records.iter().find(|(id, _)| id == name).map(|(_, letters)| letters.clone());
            let mut tokens = vec![];
            if let Some(letters) = &letters {
                tokenizer.encode(letters, &mut tokens)?;
            }
            if let Some(ids) = ids(&answers, name)? {
                if letters.is_some() {
                    same = (same.0 + u32::from(ids == tokens), same.1 + 1);
                }
                tokens = ids;
            }
            if tokens.is_empty() {
                without.push(name.to_owned())
            } else {
                sequences.push(TestSequence {
                    name: name.to_owned(),
                    letters: letters.unwrap_or_default(),
                    tokens,
                })
            }
        }
        if same.1 > 0 {
            verdict.add(
                "tokens",
                same.0 == same.1,
                format!("{} of {} sequences have the ids beside the weights", same.0, same.1),
            );
        }
        if !without.is_empty() {
            verdict.note(
                "answers",
                format!("{} in {GOLDEN}: there is no such sequence", Name(&without.join(", "))),
            );
        }
        Ok(Some(Self { sequences, answers }))
    }

    /// Values of the reference output `name.output`; `None` if the file does not have it.
    pub(super) fn answer(&self, name: &str, output: &str) -> Result<Option<Vec<f32>>, ToolError> {
        let name = format!("{name}.{output}");
        let Some(tensor) = self.answers.get(&name) else { return Ok(None) };
        let mut values = vec![0.0; tensor.elements() as usize];
        self.answers.read_f32(&name, 0..tensor.elements(), &mut values)?;
        Ok(Some(values))
    }
}

/// Token ids of a sequence in the golden file; `None` if it has none.
fn ids(answers: &Weights, name: &str) -> Result<Option<Vec<i32>>, ToolError> {
    let tensor = ["ids", "tokens"].iter().find_map(|kind| answers.get(&format!("{name}.{kind}")));
    let Some(tensor) = tensor else { return Ok(None) };
    let mut ids = vec![0; tensor.elements() as usize];
    answers.read_i64(tensor.name(), 0..tensor.elements(), &mut ids)?;
    Ok(Some(ids.into_iter().map(|id| id as i32).collect()))
}

/// The texts (id, text) of a folder, and the records (id, letters) of its FASTA files in order of file names.
fn records(folder: &Path) -> Result<Vec<(String, Vec<u8>)>, ToolError> {
    let entries = fs::read_dir(folder).map_err(RuntimeError::io(folder))?.flatten().map(|e| e.path());
    let mut files: Vec<PathBuf> = entries
        .filter(|path| path.extension().is_some_and(|e| ["fa", "faa", "fna", "fasta"].iter().any(|f| e == *f)))
        .collect();
    files.sort();
    let mut all = texts_of(&folder.join(TEXTS))?;
    if files.is_empty() {
        return Ok(all);
    }
    let mut reader = Reader::open(files)?;
    reader.keep_bytes();
    for record in reader.records() {
        let record = record?;
        all.push((record.id, record.seq));
    }
    Ok(all)
}

/// The texts of a file of JSON lines; none if the file does not exist.
fn texts_of(path: &Path) -> Result<Vec<(String, Vec<u8>)>, ToolError> {
    if !path.exists() {
        return Ok(vec![]);
    }
    let text = bounded::read_text(path, LARGEST_TEXTS).map_err(RuntimeError::io(path))?;
    let mut texts = vec![];
    for (number, line) in text.lines().enumerate() {
        let bad = || ToolError::BadTexts { path: path.to_owned(), line: number + 1 };
        texts.push(text_of_line(line).ok_or_else(bad)?);
    }
    Ok(texts)
}

/// Id and text of a line of JSON; `None` for a line in another form.
fn text_of_line(line: &str) -> Option<(String, Vec<u8>)> {
    let value: serde_json::Value = serde_json::from_str(line).ok()?;
    Some((value["id"].as_str()?.to_owned(), value["text"].as_str()?.as_bytes().to_vec()))
}
