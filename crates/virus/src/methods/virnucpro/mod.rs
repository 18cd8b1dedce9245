//! VirNucPro's method: a window is translated in six frames; each frame without a stop codon, an *open reading frame*, is
//! computed by a DNA model and a protein model and scored by a classifier over both embeddings, the head. Source: the
//! repository VirNucPro of Li and others, whose files and scores it reproduces.

pub(crate) mod embeddings;
pub(crate) mod intermediate;
pub(crate) mod results;
pub(crate) mod tables;
pub mod verdict;

use crate::VirusError;
use crate::methods::{
    CutWindow, Method, MethodDigests, MethodWeights, PlannedMethod, PlannedModel, ResultsOptions,
    ResultsWriter, WindowBases, WindowNotes, WindowSource, WindowTokenizer,
};
use crate::options::{PredictOptions, VirNucProOptions};
use crate::output::OutputError;
use crate::pipeline::letters::{LetterCounts, WindowLetters};
use crate::pipeline::record::{MethodRecord, ModelsRecord};
use crate::pipeline::records::{SequenceTokens, WindowBatch};
use crate::pipeline::shape::{
    BuildGraph, EncoderShape, HEAD_CLASSES, HostCosts, MethodNames, MethodShape, StageNames,
};
use embeddings::EmbeddingFormat;
use plimsoll_data::intermediate::{orf_name, window_name, write_nucleotide, write_protein, write_window};
use plimsoll_data::translate::{Orf, OrfScratch, orfs};
use plimsoll_data::weights::HubEnv;
use plimsoll_data::window::record_windows;
use plimsoll_models::{Encoder, HeadConfig, Output};
use plimsoll_runtime::report::to_json;
use plimsoll_runtime::session::bounds::bounds;
use plimsoll_runtime::{
    EncoderModel, HeadModel, Level, Observer, RuntimeError, Silent, Tokenizer, identity, price,
};
use plimsoll_setting::Setting;
use results::{ResultOptions, VirNucProWriter};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Hub ids of the default encoders of plans, which are those of VirNucPro.
const DNA_ID: &str = "zhihan1996/DNABERT-S";
const PROTEIN_ID: &str = "facebook/esm2_t36_3B_UR50D";

/// Number of hidden units of VirNucPro's head.
const HIDDEN: u64 = 512;

/// Window length in bases above which a run warns, because windows are longer than most genes.
const LONG_WINDOW: usize = 1500;

/// Average number of bases per DNABERT-S token: measured with its tokenizer on 2600 random bases.
const BASES_PER_TOKEN: f64 = 4.6;

/// Number of special tokens that each encoder adds to a sequence.
const SPECIAL_TOKENS: u64 = 2;

/// Bytes of one row group of embeddings, as values and encoded.
const EMBEDDING_BUFFER_BYTES: u64 = 3 * (16 << 20);

/// VirNucPro's method with its models.
pub(crate) struct VirNucPro {
    dna: EncoderModel,
    protein: EncoderModel,
    head: HeadModel,
    options: VirNucProOptions,
    shape: MethodShape,
    digests: MethodDigests,
}

impl VirNucPro {
    /// Opens the encoders and the head, checks that they fit each other and the window length, and hashes their files.
    pub(crate) fn open(
        method: &VirNucProOptions,
        options: &PredictOptions,
        observer: &mut dyn Observer,
    ) -> Result<Self, VirusError> {
        let env = HubEnv::from_process();
        let models = &method.models;
        let dna = match &models.dna {
            Some(name) => EncoderModel::open(name, &env, observer)?,
            None => EncoderModel::builtin_dna()?,
        };
        let protein = match &models.protein {
            Some(name) => EncoderModel::open(name, &env, observer)?,
            None => EncoderModel::builtin_protein()?,
        };
        check_family(&dna.name, &dna.encoder, "DNABERT-S")?;
        check_family(&protein.name, &protein.encoder, "ESM-2")?;
        let dna_width = dna.encoder.hidden_size();
        let protein_width = protein.encoder.hidden_size();
        let head = match &models.head {
            Some(path) => HeadModel::open(path, dna_width, protein_width)?,
            None => HeadModel::builtin(dna_width, protein_width)?,
        };
        if !head.trained {
            let text = format!(
                "the built-in test models are UNTRAINED: scores are NA and calls read `untrained`; give trained models with {}",
                Setting::Weights
            );
            observer.say(Level::Warning, &text);
        }
        if let Some(of) = head.named_length().filter(|&l| l != options.length) {
            return Err(VirusError::HeadLength { head: head.name, of, length: options.length });
        }
        let digests = MethodDigests::from([
            ("dna", identity::digests(&dna.weights, &dna.described_by).map_err(RuntimeError::from)?),
            (
                "protein",
                identity::digests(&protein.weights, &protein.described_by).map_err(RuntimeError::from)?,
            ),
            ("head", identity::digests(&head.weights, &[]).map_err(RuntimeError::from)?),
        ]);
        if options.length > LONG_WINDOW {
            let text = format!(
                "windows of {} bases are longer than most genes: a frame is scored only if it has no stop codon in \
                    the whole window, so most windows will have no call; VirNucPro's heads are for 300 and 500 bases",
                options.length
            );
            observer.say(Level::Warning, &text);
        }
        let shape = shape(method, [dna.encoder.clone(), protein.encoder.clone()], head.config, options.length);
        Ok(Self { dna, protein, head, options: method.clone(), shape, digests })
    }
}

impl Method for VirNucPro {
    fn shape(&self) -> &MethodShape {
        &self.shape
    }

    fn weights(&self) -> MethodWeights<'_> {
        MethodWeights { encoders: vec![&self.dna, &self.protein], head: Some(&self.head) }
    }

    fn digests(&self) -> &MethodDigests {
        &self.digests
    }

    fn is_trained(&self) -> bool {
        self.head.trained
    }

    fn parameters(&self, options: &PredictOptions) -> Value {
        let method = &self.options;
        json!({
            "length": options.length,
            "threshold": method.threshold,
            "original_alphabet": method.original_alphabet,
            "keep_intermediate": method.keep_intermediate,
            "save_embeddings": method.save_embeddings.map(EmbeddingFormat::name),
            "hits_format": options.hits_format.name(),
            "source": options.source,
        })
    }

    fn record(&self) -> MethodRecord {
        let names = [("dna", &self.dna.name), ("protein", &self.protein.name), ("head", &self.head.name)];
        let names = names.map(|(role, name)| (role, name.clone()));
        let models = ModelsRecord { names: BTreeMap::from(names), trained: self.head.trained };
        MethodRecord { models: Some(models), calling: None }
    }

    fn saves_rows(&self) -> bool {
        self.options.save_embeddings.is_some()
    }

    fn window_source(&self, options: &PredictOptions, writes_results: bool) -> Arc<dyn WindowSource> {
        Arc::new(FrameWindows {
            length: options.length,
            dna: self.dna.tokenizer.clone(),
            protein: self.protein.tokenizer.clone(),
            original_alphabet: self.options.original_alphabet,
            writes_texts: self.options.keep_intermediate && writes_results,
        })
    }

    fn results(&self, run: &ResultsOptions<'_>) -> Result<Box<dyn ResultsWriter>, OutputError> {
        let mut metadata = vec![
            ("plimsoll", env!("CARGO_PKG_VERSION").to_owned()),
            ("model_sha256", to_json(&self.digests).to_string()),
        ];
        for name in ["precision", "device", "instructions"] {
            metadata.push((name, run.arithmetic[name].as_str().unwrap_or_default().to_owned()));
        }
        let options = ResultOptions {
            metadata,
            trained: self.head.trained,
            threshold: self.options.threshold,
            keep_intermediate: self.options.keep_intermediate,
            save_embeddings: self.options.save_embeddings,
            hits_format: run.options.hits_format,
            width: self.shape.widths().iter().sum(),
            source: run.options.source,
            length: run.options.length,
            sort_bytes: run.sort_bytes,
        };
        Ok(Box::new(VirNucProWriter::create(run.folder, options)?))
    }
}

/// Checks that an encoder is of the family `wanted`.
fn check_family(name: &str, encoder: &Encoder, wanted: &'static str) -> Result<(), VirusError> {
    let found = encoder.family();
    if found == wanted {
        return Ok(());
    }
    Err(VirusError::WrongModel { model: name.to_owned(), wanted, found })
}

/// Describes the models for plans; `encoders` are the DNA model and the protein model.
fn shape(options: &VirNucProOptions, encoders: [Encoder; 2], head: HeadConfig, length: usize) -> MethodShape {
    let [dna, protein] = encoders;
    // A DNA token has at least one base, and a residue is one token.
    let longest_dna = length as u64 + SPECIAL_TOKENS;
    let longest_protein = length as u64 / 3 + SPECIAL_TOKENS;
    MethodShape {
        encoders: vec![
            EncoderShape {
                plan: "nucleotide encoder",
                key: "nucleotide",
                seconds_key: "nucleotide_encoder",
                rows: "nucleotide embeddings",
                head_input: Some("dna"),
                width: head.dna as usize,
                longest: longest_dna,
                graph: graph_of(dna, longest_dna),
                streams: true,
                expected_tokens: |bases| bases as f64 / BASES_PER_TOKEN + SPECIAL_TOKENS as f64,
            },
            EncoderShape {
                plan: "protein encoder",
                key: "protein",
                seconds_key: "protein_encoder",
                rows: "protein embeddings",
                head_input: Some("protein"),
                width: head.protein as usize,
                longest: longest_protein,
                graph: graph_of(protein, longest_protein),
                streams: true,
                expected_tokens: |bases| bases as f64 / 3.0 + SPECIAL_TOKENS as f64,
            },
        ],
        head: Some(head),
        length: length as u64,
        sequences: |tokens| bounds(tokens, 1).sequences,
        window_lengths: |record, window| record_windows(record, window).map(|window| window.len).collect(),
        sequences_of_window: None,
        names: MethodNames {
            stages: StageNames {
                whole: "both encoders and the head",
                split: Some(["the nucleotide encoder", "the protein encoder and the head"]),
            },
            sequence: "open reading frame",
            sequences_key: "orfs",
            rows: "embeddings",
        },
        host: HostCosts {
            // Every base is in six frames, with up to one i32 token (4 bytes) per base for the DNA model and one per three
            // bases (4/3 bytes, rounded up to 2) for the protein model. The factor 2 covers vectors that grow by doubling.
            token_bytes_per_base: 6 * (4 + 2) * 2,
            // One byte in chunked.fa, six in nucleotide.fa (one per frame) and 6/3 in protein.faa, also doubled.
            text_bytes_per_base: if options.keep_intermediate { 2 * (1 + 6 + 2) } else { 0 },
            sorted_files: 1,
            writer_bytes: if options.save_embeddings.is_some() { EMBEDDING_BUFFER_BYTES } else { 0 },
            ..HostCosts::default()
        },
    }
}

/// Builds the graph of an encoder with mean-pooled embeddings as output.
fn graph_of(encoder: Encoder, longest: u64) -> BuildGraph {
    Box::new(move |tokens| encoder.graph(bounds(tokens, longest), &[Output::Mean]))
}

/// Describes VirNucPro's method for plans of windows of `length` bases, with its own models for those not given.
pub(crate) fn plan(options: &VirNucProOptions, length: usize) -> Result<PlannedMethod, VirusError> {
    let models = &options.models;
    let dna_name = models.dna.clone().unwrap_or_else(|| DNA_ID.to_owned());
    let protein_name = models.protein.clone().unwrap_or_else(|| PROTEIN_ID.to_owned());
    let dna = price::encoder(&dna_name)?;
    check_family(&dna_name, &dna, "DNABERT-S")?;
    let protein = price::encoder(&protein_name)?;
    check_family(&protein_name, &protein, "ESM-2")?;
    let dna_width = dna.hidden_size();
    let protein_width = protein.hidden_size();
    let (head, head_name) = match &models.head {
        Some(path) => (HeadModel::open(path, dna_width, protein_width)?.config, path.display().to_string()),
        None => {
            let classes = HEAD_CLASSES as u64;
            let config = HeadConfig { dna: dna_width, protein: protein_width, hidden: HIDDEN, classes };
            (config, format!("a head of {HIDDEN} hidden units"))
        }
    };
    let offline = HubEnv { offline: true, ..HubEnv::from_process() };
    let mut opened: Vec<EncoderModel> = vec![];
    for name in [&dna_name, &protein_name] {
        opened.extend(EncoderModel::open(name, &offline, &mut Silent).ok());
    }
    Ok(PlannedMethod {
        models: vec![
            PlannedModel { key: "dna", what: "DNA model", name: dna_name },
            PlannedModel { key: "protein", what: "protein model", name: protein_name },
            PlannedModel { key: "head", what: "head", name: head_name },
        ],
        shape: shape(options, [dna, protein], head, length),
        opened: Box::new(opened),
    })
}

/// Windows whose sequences are their open reading frames, tokenized for both encoders. The label of a sequence is the index of
/// its frame.
struct FrameWindows {
    /// Bases per window.
    length: usize,
    dna: Tokenizer,
    protein: Tokenizer,
    original_alphabet: bool,
    /// Whether batches have the texts of chunked.fa, nucleotide.fa and protein.faa.
    writes_texts: bool,
}

impl WindowSource for FrameWindows {
    fn cut<'a>(&self, record: &'a [u8]) -> Box<dyn Iterator<Item = CutWindow> + 'a> {
        let windows = record_windows(record.len(), self.length);
        Box::new(windows.map(|location| CutWindow { location, overlap: 0, left_out: LetterCounts::default() }))
    }

    fn tokenizer(&self) -> Box<dyn WindowTokenizer> {
        Box::new(FrameTokenizer {
            dna: self.dna.clone(),
            protein: self.protein.clone(),
            writes_texts: self.writes_texts,
            scratch: OrfScratch::default(),
            name: String::new(),
        })
    }

    fn notes(&self) -> &'static WindowNotes {
        &WindowNotes {
            non_iupac: "codons that contain U are dropped",
            all_n: "no open reading frame, no call",
            // All letters of a record are in windows.
            longest_gap: usize::MAX,
            gap: "",
        }
    }

    fn keeps_uracil(&self) -> bool {
        self.original_alphabet
    }
}

/// Finds and tokenizes the open reading frames of windows.
struct FrameTokenizer {
    dna: Tokenizer,
    protein: Tokenizer,
    writes_texts: bool,
    scratch: OrfScratch,
    /// Reused buffer for the names of windows and frames.
    name: String,
}

impl WindowTokenizer for FrameTokenizer {
    fn tokenize(
        &mut self,
        window: &WindowBases<'_>,
        batch: &mut WindowBatch,
    ) -> Result<WindowLetters, RuntimeError> {
        let WindowBases { record, cut, bases, is_journaled } = *window;
        let index = cut.location.index;
        let Self { dna, protein, writes_texts, scratch, name } = self;
        if *writes_texts {
            window_name(record, index, name);
            // Writing to a Vec cannot fail.
            let _ = write_window(&mut batch.texts[0], name, bases);
        }
        if is_journaled && !*writes_texts {
            return Ok(WindowLetters::default());
        }
        let mut failed = None;
        // The callback cannot return an error: the first one is stored.
        orfs(bases, scratch, |orf| {
            if *writes_texts {
                orf_name(record, index, orf.frame, name);
                let _ = write_nucleotide(&mut batch.texts[1], name, &orf);
                let _ = write_protein(&mut batch.texts[2], name, &orf);
            }
            if is_journaled {
                return;
            }
            if let Err(error) = encode(&orf, dna, protein, batch) {
                failed.get_or_insert(error);
            }
        });
        match failed {
            Some(error) => Err(error),
            None => Ok(WindowLetters::default()),
        }
    }
}

/// Appends the tokens of an open reading frame to the batch.
fn encode(
    orf: &Orf<'_>,
    dna: &Tokenizer,
    protein: &Tokenizer,
    batch: &mut WindowBatch,
) -> Result<(), RuntimeError> {
    let [dna_tokens, protein_tokens] = &mut batch.tokens;
    let starts = [dna_tokens.len(), protein_tokens.len()];
    dna.encode(orf.nucleotide, dna_tokens)?;
    protein.encode(orf.protein, protein_tokens)?;
    batch.sequences.push(SequenceTokens {
        label: orf.frame.index() as u8,
        bases: orf.nucleotide.len() as u32,
        tokens: [starts[0]..dna_tokens.len(), starts[1]..protein_tokens.len()],
    });
    Ok(())
}
