//! Callers: a caller is a classifier of DNA windows that scores every window from its codons in six frames. Its logits become
//! calibrated probabilities, calls with reasons, false discovery rates and regions. Invariant: a probability is never shown
//! without the calibration that belongs to the weights.

pub(crate) mod calibration;
pub(crate) mod fdr;
pub(crate) mod regions;
pub(crate) mod regions_table;
pub(crate) mod results;
pub(crate) mod score;
pub(crate) mod windows;

pub use calibration::{
    Calibration, ErrorBounds, LengthCalibration, OperatingPoint, RegionParameters, ThresholdPreset,
};
pub use score::{CallLimits, Threshold};

use crate::VirusError;
use crate::methods::{
    CutWindow, Method, MethodDigests, MethodWeights, PlannedMethod, PlannedModel, ResultsOptions,
    ResultsWriter, WindowBases, WindowNotes, WindowSource, WindowTokenizer,
};
use crate::options::{CallerOptions, PredictOptions};
use crate::output::OutputError;
use crate::pipeline::letters::{LetterCounts, WindowLetters};
use crate::pipeline::record::{CallingRecord, MethodRecord, ModelsRecord};
use crate::pipeline::records::{SequenceTokens, WindowBatch};
use crate::pipeline::shape::{EncoderShape, HostCosts, MethodNames, MethodShape, StageNames};
use calibration::CALIBRATION;
use plimsoll_data::codons::{VOCABULARY, encode_known, frame_of, tokens_of};
use plimsoll_data::hex::hex;
use plimsoll_graph::Bounds;
use plimsoll_models::{CallerConfig, FRAMES};
use plimsoll_runtime::{CallerModel, RuntimeError, identity};
use regions::BYTES_PER_WINDOW;
use results::{CallerResultOptions, CallerWriter, LogitLayout};
use score::CallRules;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use windows::{LONGEST_GAP, SHORTEST_WINDOW, window_lengths, windows};

/// A caller with its calibration.
pub(crate) struct Caller {
    model: CallerModel,
    calibration: Calibration,
    layout: LogitLayout,
    options: CallerOptions,
    shape: MethodShape,
    digests: MethodDigests,
}

impl Caller {
    /// Opens a caller, checks that it has the tasks of a prediction and that no option contradicts it, and hashes its files.
    pub(crate) fn open(caller: &CallerOptions, options: &PredictOptions) -> Result<Self, VirusError> {
        if let Some(length) = caller.limits.min_length.filter(|&length| length < SHORTEST_WINDOW as u64) {
            return Err(VirusError::ShortMinLength { length, shortest: SHORTEST_WINDOW });
        }
        if caller.paired && options.inputs.len() > 1 && !options.inputs.len().is_multiple_of(2) {
            return Err(VirusError::PairedFiles { files: options.inputs.len() });
        }
        let (model, calibration) = open_for_windows(caller, options.length)?;
        let layout = layout(&model)?;
        let described = [
            ("config.json", hex(&Sha256::digest(model.config_text.as_bytes()))),
            (CALIBRATION, calibration.sha256.clone()),
        ];
        let files = identity::digests(&model.weights, &described).map_err(RuntimeError::from)?;
        let digests = MethodDigests::from([("caller", files)]);
        let shape = shape(caller, model.config.clone(), options.length);
        Ok(Self { model, calibration, layout, options: caller.clone(), shape, digests })
    }
}

impl Method for Caller {
    fn shape(&self) -> &MethodShape {
        &self.shape
    }

    fn weights(&self) -> MethodWeights<'_> {
        MethodWeights { encoders: vec![&self.model], head: None }
    }

    fn digests(&self) -> &MethodDigests {
        &self.digests
    }

    /// A caller has a calibration, so it was trained.
    fn is_trained(&self) -> bool {
        true
    }

    fn parameters(&self, options: &PredictOptions) -> Value {
        let CallerOptions { threshold, max_fdr, prevalence, paired, limits, .. } = &self.options;
        json!({
            "length": options.length,
            "hits_format": options.hits_format.name(),
            "source": options.source,
            "calling": {
                "threshold": threshold.name(),
                "max_fdr": max_fdr,
                "prevalence": prevalence,
                "paired": paired,
                "min_length": limits.min_length,
                "max_n": limits.max_n,
                "min_complexity": limits.min_complexity,
            },
        })
    }

    fn record(&self) -> MethodRecord {
        let CallerOptions { threshold, max_fdr, prevalence, paired, limits, .. } = &self.options;
        let calling = CallingRecord {
            threshold: threshold.name(),
            max_fdr: *max_fdr,
            prevalence: *prevalence,
            training_prior: 0.5,
            paired: *paired,
            min_length: limits.min_length.unwrap_or(self.calibration.shortest()),
            max_n: limits.max_n,
            min_complexity: limits.min_complexity,
            calibration: self.calibration.json.clone(),
        };
        let names = BTreeMap::from([("caller", self.model.name.clone())]);
        MethodRecord { models: Some(ModelsRecord { names, trained: true }), calling: Some(calling) }
    }

    fn window_source(&self, options: &PredictOptions, _writes_results: bool) -> Arc<dyn WindowSource> {
        Arc::new(CodonWindows { length: options.length, paired: self.options.paired })
    }

    fn results(&self, run: &ResultsOptions<'_>) -> Result<Box<dyn ResultsWriter>, OutputError> {
        let CallerOptions { threshold, max_fdr, prevalence, limits, .. } = self.options;
        let options = CallerResultOptions {
            rules: CallRules::new(self.calibration.clone(), threshold, prevalence, limits),
            max_fdr,
            hits_format: run.options.hits_format,
            source: run.options.source,
            layout: self.layout.clone(),
            sort_bytes: run.sort_bytes,
        };
        Ok(Box::new(CallerWriter::create(run.folder, options)?))
    }
}

/// Opens a caller and its calibration for windows of `length` bases.
fn open_for_windows(caller: &CallerOptions, length: usize) -> Result<(CallerModel, Calibration), VirusError> {
    if length < SHORTEST_WINDOW {
        return Err(VirusError::ShortWindows { length, shortest: SHORTEST_WINDOW });
    }
    let (model, calibration) = open_files(caller.folder.as_deref())?;
    if calibration.window != length as u64 {
        return Err(VirusError::OtherWindows { length, window: calibration.window });
    }
    Ok((model, calibration))
}

/// Opens a caller and its calibration; without a folder, the built-in ones.
pub(crate) fn open_files(folder: Option<&Path>) -> Result<(CallerModel, Calibration), VirusError> {
    match folder {
        // The model before its calibration: for the folder of another kind of model, the error must name its family, not a
        // missing calibration.
        Some(folder) => Ok((CallerModel::open(folder)?, Calibration::open(folder)?)),
        None => Ok((CallerModel::builtin()?, Calibration::builtin()?)),
    }
}

/// Finds the tasks of a prediction in a caller's logits.
fn layout(caller: &CallerModel) -> Result<LogitLayout, VirusError> {
    let vocabulary = caller.config.vocab_size;
    if vocabulary != VOCABULARY as u64 {
        let what = format!("its vocabulary has {vocabulary} tokens, and codons have {VOCABULARY}");
        return Err(unsuitable(caller, what));
    }
    let mut first = 0;
    let mut virus = None;
    let mut classes = None;
    for task in &caller.config.tasks {
        let logits = first..first + task.classes.len();
        first = logits.end;
        match &*task.name {
            "virus" => {
                // Training may have put the two classes in either order.
                let order: Vec<&str> = task.classes.iter().map(String::as_str).collect();
                virus = match order[..] {
                    ["other", "virus"] => Some((logits.start, logits.start + 1)),
                    ["virus", "other"] => Some((logits.start + 1, logits.start)),
                    _ => {
                        let what = "the classes of its task `virus` are not `other` and `virus`";
                        return Err(unsuitable(caller, what));
                    }
                };
            }
            "class" => classes = Some((logits, task.classes.clone())),
            _ => {}
        }
    }
    let (other, virus) = virus.ok_or_else(|| unsuitable(caller, "its config.json has no task `virus`"))?;
    let (classes, names) = classes.unwrap_or_default();
    Ok(LogitLayout { other, virus, classes, names })
}

/// The error for a caller that cannot be used for a prediction.
fn unsuitable(caller: &CallerModel, what: impl Into<String>) -> VirusError {
    VirusError::CallerModel { model: caller.name.clone(), what: what.into() }
}

/// Describes a caller for plans of windows of `length` bases.
fn shape(options: &CallerOptions, config: CallerConfig, length: usize) -> MethodShape {
    let longest = tokens_of(length) as u64;
    MethodShape {
        encoders: vec![EncoderShape {
            plan: "caller",
            key: "caller",
            seconds_key: "caller",
            rows: "logits",
            head_input: None,
            width: config.logits() as usize,
            longest,
            graph: Box::new(move |tokens| {
                config.graph(Bounds {
                    tokens,
                    sequences: sequences(tokens),
                    longest: longest / FRAMES,
                    packs: 1,
                })
            }),
            // The weights are a few megabytes.
            streams: false,
            expected_tokens: |bases| tokens_of(bases).max(1) as f64,
        }],
        head: None,
        length: length as u64,
        sequences,
        window_lengths: |record, window| window_lengths(record, window).collect(),
        sequences_of_window: Some(1),
        names: MethodNames {
            stages: StageNames { whole: "the caller", split: None },
            sequence: "window",
            sequences_key: "windows",
            rows: "logits",
        },
        host: HostCosts {
            // One i32 token for each codon of six frames, in vectors that grow by doubling.
            token_bytes_per_base: 2 * 4 * 2,
            // Both mates of a pair are held until the pair is scored.
            waiting_records: if options.paired { 2 } else { 0 },
            // See `RegionFinder::add`.
            bytes_per_window: BYTES_PER_WINDOW,
            // By score and by number.
            sorted_files: 2,
            ..HostCosts::default()
        },
    }
}

/// Maximum number of windows of a step of `tokens` tokens.
fn sequences(tokens: u64) -> u64 {
    (tokens / tokens_of(SHORTEST_WINDOW) as u64).max(1)
}

/// Describes a caller for plans of windows of `length` bases.
pub(crate) fn plan(options: &CallerOptions, length: usize) -> Result<PlannedMethod, VirusError> {
    let (model, _) = open_for_windows(options, length)?;
    Ok(PlannedMethod {
        models: vec![PlannedModel { key: "caller", what: "caller", name: model.name.clone() }],
        shape: shape(options, model.config.clone(), length),
        opened: Box::new(model),
    })
}

/// Windows that are one sequence each: the codons of their six frames.
struct CodonWindows {
    /// Bases per window.
    length: usize,
    paired: bool,
}

impl WindowSource for CodonWindows {
    fn cut<'a>(&self, record: &'a [u8]) -> Box<dyn Iterator<Item = CutWindow> + 'a> {
        Box::new(windows(record, self.length))
    }

    fn tokenizer(&self) -> Box<dyn WindowTokenizer> {
        Box::new(CodonTokenizer)
    }

    fn notes(&self) -> &'static WindowNotes {
        &WindowNotes {
            non_iupac: "codons that contain them are left out",
            all_n: "no codon is known, no call",
            longest_gap: LONGEST_GAP,
            gap: "windows end at runs of more than 100 unknown letters",
        }
    }

    fn is_paired(&self) -> bool {
        self.paired
    }
}

/// Counts the letters of windows and tokenizes their codons.
struct CodonTokenizer;

impl WindowTokenizer for CodonTokenizer {
    fn tokenize(
        &mut self,
        window: &WindowBases<'_>,
        batch: &mut WindowBatch,
    ) -> Result<WindowLetters, RuntimeError> {
        // The overlap was counted with the window before: the counts of all windows must add up to those of the record.
        let (overlap, new) = window.bases.split_at(window.cut.overlap);
        let overlap = LetterCounts::of(overlap);
        let new = LetterCounts::of(new);
        if !window.is_journaled {
            encode(window.bases, batch);
        }
        Ok(WindowLetters { new, left_out: window.cut.left_out, known: overlap.known() + new.known() })
    }
}

/// Appends the tokens of a window to the batch; nothing if it is shorter than the shortest window or a frame of it has fewer
/// known codons.
fn encode(bases: &[u8], batch: &mut WindowBatch) {
    if bases.len() < SHORTEST_WINDOW {
        return;
    }
    let [tokens, _] = &mut batch.tokens;
    let start = tokens.len();
    if encode_known(bases, tokens) < frame_of(SHORTEST_WINDOW) {
        tokens.truncate(start);
        return;
    }
    let range = start..tokens.len();
    batch.sequences.push(SequenceTokens { label: 0, bases: bases.len() as u32, tokens: [range, 0..0] });
}

/// The logistic function.
pub(crate) fn sigmoid(log_odds: f64) -> f64 {
    1.0 / (1.0 + (-log_odds).exp())
}

/// Log odds of a probability: infinite for 0 and 1.
pub(crate) fn logit(probability: f64) -> f64 {
    (probability / (1.0 - probability)).ln()
}
