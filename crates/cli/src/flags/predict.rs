//! Flags of `plimsoll predict`; those of callers are in `caller.rs`. Invariant: contradicting flags are refused before a model is opened.

use super::caller::CallerFlags;
use super::machine::{DynamicFlag, MachineFlags, SortingFlags, StreamingFlags};
use super::messages::{MessageFlags, MonitorFlag};
use super::sequences::prefetch;
use super::virnucpro::VirnucproFlags;
use super::{at_least, at_least_one, print};
use crate::error::{CliError, usage};
use crate::report;
use crate::terminal::Terminal;
use clap::builder::PossibleValue;
use clap::{Args, ValueEnum};
use plimsoll_runtime::report::to_json;
use plimsoll_runtime::{HeadModel, Level, Observer, OutputGuard, Settings};
use plimsoll_virus::output::{EmbeddingFormat, HitsFormat};
use plimsoll_virus::{
    CallerOptions, Listing, MethodOptions, Models, PredictOptions, PredictReport, USUAL_LENGTH, USUAL_PREFETCH,
    VirNucProOptions, WindowShard, caller_window, nucleotide_files, predict, predict_each, stem, usual_workers,
};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// Predict for each DNA sequence whether it comes from a virus, with the built-in caller or with VirNucPro's models
///
/// Reads FASTA or FASTQ, plain or compressed, and cuts each sequence into windows. A caller, the built-in one or that of
/// --caller, scores every window from its codons in six frames; its scores are calibrated probabilities. With --head or
/// --weights, each window is translated in six frames, and each open reading frame is scored by VirNucPro's DNA model
/// and protein model.
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub struct PredictCommand {
    /// Sequence files: FASTA or FASTQ, plain or compressed (.gz, .bz2, .zst, .xz); a folder selects all sequence files
    /// in it, and - reads standard input
    #[arg(required = true, value_name = "INPUT")]
    inputs: Vec<PathBuf>,

    /// Output folder [default: the name of the first input with _plimsoll appended, in the current folder]
    #[arg(short, long, value_name = "DIR")]
    output_dir: Option<PathBuf>,

    /// Replace the results of an earlier run in the output folder
    #[arg(long, short_alias = 'f')]
    force: bool,

    /// Window length in bases, 3 to 1048576; the head must have been trained for it [default: the length in the head's
    /// file name, such as 300 for 300_model.pth, otherwise 500; for a caller the length of its calibration]
    #[arg(long, alias = "expected-length", short_alias = 'e', value_name = "BASES", value_parser = length)]
    length: Option<u64>,

    /// Drop codons that contain U, as VirNucPro does [default: read U as T]
    #[arg(long)]
    original_alphabet: bool,

    /// Minimum score of a sequence that is called virus, from 0 to 1 [default: 0.5; with a caller, the threshold of
    /// --preset]
    #[arg(long, value_name = "SCORE", value_parser = threshold)]
    threshold: Option<f64>,

    /// Also write the windows (chunked.fa), the open reading frames (nucleotide.fa) and their translations
    /// (protein.faa)
    #[arg(long, short_alias = 'k')]
    keep_intermediate: bool,

    /// Also write the embedding of each open reading frame, in this file format
    #[arg(long, value_enum, value_name = "FORMAT")]
    save_embeddings: Option<EmbeddingFlag>,

    /// File format of the records called virus: fasta (virus.fna), fastq (virus.fastq, requires FASTQ input), fasta.gz
    /// or fastq.gz
    #[arg(long, value_enum, default_value_t = HitsFlag(HitsFormat::Fasta), value_name = "FORMAT")]
    hits_format: HitsFlag,

    /// Fail with an error if the input has an anomaly: an empty record or file, a repeated id, characters that are dropped
    /// (white space, digits, gaps), letters other than A, C, G and T, or, with a caller, a run of more than 100 of them
    #[arg(long)]
    strict: bool,

    #[command(flatten)]
    models: ModelFlags,

    #[command(flatten)]
    caller: CallerFlags,

    #[command(flatten)]
    machine: MachineFlags,

    #[command(flatten)]
    streaming: StreamingFlags,

    #[command(flatten)]
    dynamic: DynamicFlag,

    #[command(flatten)]
    sorting: SortingFlags,

    /// Threads that translate and tokenize the input, 1 to 256 [default: the number of cores, at most 8 per device]
    #[arg(long, alias = "num-workers", short_alias = 'w', value_name = "N", value_parser = workers, help_heading = "Machine")]
    dataloader_workers: Option<u64>,

    /// Batches of input that each thread of --dataloader-workers prepares ahead, 1 to 1024; on a GPU also the number of
    /// steps that are queued on it
    #[arg(long, default_value_t = USUAL_PREFETCH as u64, value_name = "N", value_parser = prefetch, help_heading = "Machine")]
    prefetch: u64,

    /// Seconds between commits of finished windows to the journal, from which an interrupted run resumes, 0 to 3600; 0
    /// commits after every step
    #[arg(long, default_value_t = 5, value_name = "SECONDS", value_parser = seconds, help_heading = "Interrupted runs")]
    commit_every: u64,

    /// Compute only shard K of the N shards of the windows, and leave its results in the output folder for --merge
    #[arg(long, value_name = "K/N", value_parser = shard, conflicts_with_all = ["merge", "per_input"], help_heading = "Many inputs, many machines")]
    shard: Option<WindowShard>,

    /// Merge the computed shards in these folders into the output folder, without computing; give the flag once for
    /// each shard
    #[arg(long, value_name = "DIR", conflicts_with = "per_input", help_heading = "Many inputs, many machines")]
    merge: Vec<PathBuf>,

    /// Write one output folder for each input: DIR/<name> with -o DIR, otherwise <name>_plimsoll
    #[arg(long, help_heading = "Many inputs, many machines")]
    per_input: bool,

    /// Add a last column `source`, which names the input file of each row, to predictions.tsv and windows.tsv
    #[arg(long, help_heading = "Many inputs, many machines")]
    source: bool,

    #[command(flatten)]
    virnucpro: VirnucproFlags,

    #[command(flatten)]
    messages: MessageFlags,

    #[command(flatten)]
    monitor: MonitorFlag,
}

/// Selection of VirNucPro's models; without any of these flags, a caller is used.
#[derive(Debug, Args)]
#[command(next_help_heading = "VirNucPro's models")]
pub(super) struct ModelFlags {
    /// Folder that contains all models: dnabert_s/, esm2/ and a head (head.safetensors, head.pth, 500_model.pth or
    /// 300_model.pth)
    #[arg(long, value_name = "DIR")]
    pub(super) weights: Option<PathBuf>,

    /// DNA model: a folder, a weight file or a Hugging Face hub id; VirNucPro uses zhihan1996/DNABERT-S
    #[arg(long, value_name = "PATH|HUB_ID")]
    pub(super) dna_model: Option<String>,

    /// Protein model: a folder, a weight file or a Hugging Face hub id; VirNucPro uses facebook/esm2_t36_3B_UR50D
    #[arg(long, value_name = "PATH|HUB_ID")]
    pub(super) protein_model: Option<String>,

    /// Head: the classifier over the embeddings of both models, such as VirNucPro's 500_model.pth; without --weights, a
    /// DNA or protein model that is not named is the one that VirNucPro uses, from the Hugging Face hub
    #[arg(long, alias = "model-path", short_alias = 'p', value_name = "PATH")]
    pub(super) head: Option<PathBuf>,
}

/// File formats of saved embeddings.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum EmbeddingFlag {
    Npy,
    Safetensors,
    Parquet,
}

/// Format of the records called virus, parsed from its name.
#[derive(Clone, Copy, Debug)]
struct HitsFlag(HitsFormat);

impl ValueEnum for HitsFlag {
    fn value_variants<'a>() -> &'a [Self] {
        use HitsFormat::{Fasta, FastaGz, Fastq, FastqGz};
        &[Self(Fasta), Self(Fastq), Self(FastaGz), Self(FastqGz)]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(self.0.name()))
    }
}

pub(super) fn length(text: &str) -> Result<u64, String> {
    let number = at_least(3, text).ok().filter(|&n| n <= 1 << 20);
    number.ok_or_else(|| "give a window length from 3 (one codon) to 1048576 bases".to_owned())
}

fn threshold(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|t| (0.0..=1.0).contains(t));
    number.ok_or_else(|| "give a score between 0 and 1, such as 0.5".to_owned())
}

fn workers(text: &str) -> Result<u64, String> {
    let number = at_least_one(text).ok().filter(|&n| n <= 256);
    number.ok_or_else(|| "give a number of threads from 1 to 256".to_owned())
}

fn seconds(text: &str) -> Result<u64, String> {
    let number = text.parse::<u64>().ok().filter(|&n| n <= 3600);
    number.ok_or_else(|| "give a number of seconds from 0 to 3600".to_owned())
}

fn shard(text: &str) -> Result<WindowShard, String> {
    let parts = text.split_once('/').and_then(|(k, n)| Some((k.parse().ok()?, n.parse().ok()?)));
    let shard = parts.map(|(number, of)| WindowShard { number, of });
    let valid = shard.filter(|s| (1..=s.of).contains(&s.number) && s.of <= MAX_SHARDS);
    valid
        .ok_or_else(|| format!("give K/N such as 2/8: shard K, from 1 to N, of N shards, at most {MAX_SHARDS}"))
}

/// Largest accepted number of shards; more is taken for a typing error.
const MAX_SHARDS: u64 = 100_000;

impl PredictCommand {
    /// Runs the command.
    pub fn run(mut self) -> Result<ExitCode, CliError> {
        self.take_virnucpro_flags()?;
        let listing = nucleotide_files(&self.inputs)?;
        let options = self.options(&listing)?;
        let mut guard = OutputGuard::new(options.input_files(), false);
        let mut terminal = self.messages.terminal_with(&self.monitor, &mut guard)?;
        terminal.listen()?;
        if let Some(line) = listing.skipped_line() {
            terminal.say(Level::Warning, &line);
        }
        let done = if self.per_input {
            predict_each(&options, &mut terminal)
        } else {
            predict(&options, &mut terminal).map(|report| vec![report])
        };
        terminal.finish();
        let reports = done.map_err(CliError::from).inspect_err(|error| terminal.log(&error.chain()))?;
        for report in &reports {
            self.print_report(report, &mut terminal)?;
        }
        Ok(ExitCode::from(if reports.iter().any(|r| r.failed > 0) { 2 } else { 0 }))
    }

    /// Replaces our flags by the values of virnucpro-broad's flags.
    fn take_virnucpro_flags(&mut self) -> Result<(), CliError> {
        self.virnucpro.refuse()?;
        // Before the model type is interpreted, which fails without a head: with a caller, it is the model type that is wrong.
        self.caller_options()?;
        let ModelFlags { head, weights, .. } = &self.models;
        let length = self.virnucpro.length(head.as_ref(), weights.is_some())?;
        let device = self.virnucpro.device(self.machine.device())?;
        self.machine.override_with(device, self.virnucpro.threads());
        if let (Some(ours), Some(theirs)) = (self.length, length)
            && ours != theirs
        {
            let text = format!("--model-type {theirs} contradicts --length {ours}; omit one of them");
            return Err(usage(text));
        }
        self.length = self.length.or(length);
        Ok(())
    }

    /// The options of the caller; `None` if flags name VirNucPro's models.
    fn caller_options(&self) -> Result<Option<CallerOptions>, CliError> {
        let ModelFlags { weights, dna_model, protein_model, head } = &self.models;
        let models = [
            (weights.is_some(), "--weights"),
            (head.is_some(), "--head"),
            (dna_model.is_some(), "--dna-model"),
            (protein_model.is_some(), "--protein-model"),
        ];
        let of_virnucpro = [
            // Without a caller, `VirnucproFlags::length` says which head the model type needs.
            (self.virnucpro.has_model_type() && self.caller.is_named(), "--model-type"),
            (self.original_alphabet, "--original-alphabet"),
            (self.keep_intermediate, "--keep-intermediate"),
            (self.save_embeddings.is_some(), "--save-embeddings"),
        ];
        self.caller.options(self.threshold, &models, &of_virnucpro)
    }

    fn print_report(&self, report: &PredictReport, terminal: &mut Terminal) -> Result<(), CliError> {
        if report.already_complete {
            let what = if report.shard.is_some() { "shard" } else { "result" };
            let text = format!(
                "the {what} in {} is already complete",
                plimsoll_runtime::EscapedPath(&report.output_dir)
            );
            terminal.say(Level::Info, &text);
        }
        if self.messages.json() {
            return print(&format!("{:#}", to_json(&report.run_record)));
        }
        if self.messages.quiet() || report.already_complete {
            return Ok(());
        }
        print(&report::predicted(report))
    }

    fn options(&self, listing: &Listing) -> Result<PredictOptions, CliError> {
        let settings = self.streaming.applied_to(self.machine.settings(self.prefetch)?)?;
        let settings = Settings { dynamic: self.dynamic.dynamic, ..settings };
        let workers = self.dataloader_workers.map_or_else(|| usual_workers(&settings), |n| n as usize);
        let inputs = listing.paths();
        let caller = self.caller_options()?;
        let (method, length) = match caller {
            Some(caller) => {
                let length = match self.length {
                    Some(length) => length as usize,
                    None => caller_window(caller.folder.as_deref())?,
                };
                (MethodOptions::Caller(caller), length)
            }
            None => {
                let models = self.models.models(self.length)?;
                let length = window_length(self.length, &models);
                let method = VirNucProOptions {
                    models,
                    original_alphabet: self.original_alphabet,
                    threshold: self
                        .threshold
                        .map_or(VirNucProOptions::USUAL_THRESHOLD, |threshold| threshold as f32),
                    keep_intermediate: self.keep_intermediate,
                    save_embeddings: self.save_embeddings.map(|format| match format {
                        EmbeddingFlag::Npy => EmbeddingFormat::Npy,
                        EmbeddingFlag::Safetensors => EmbeddingFormat::Safetensors,
                        EmbeddingFlag::Parquet => EmbeddingFormat::Parquet,
                    }),
                };
                (MethodOptions::VirNucPro(method), length)
            }
        };
        Ok(PredictOptions {
            inputs,
            output_dir: self
                .output_dir
                .clone()
                .unwrap_or_else(|| if self.per_input { PathBuf::new() } else { default_folder(&self.inputs) }),
            force: self.force,
            method,
            length,
            hits_format: self.hits_format.0,
            strict: self.strict,
            workers,
            prefetch: self.prefetch as usize,
            commit_every: Duration::from_secs(self.commit_every),
            shard: self.shard,
            merge: self.merge.clone(),
            source: self.source,
            sort_by_length: self.sorting.by_length(),
            settings,
        })
    }
}

/// Window length in bases: the requested length, or the length in the head's file name.
fn window_length(requested: Option<u64>, models: &Models) -> usize {
    match requested {
        Some(length) => length as usize,
        None => models.head.as_deref().and_then(HeadModel::length_in_name).unwrap_or(USUAL_LENGTH),
    }
}

/// Options of a prediction with default settings.
pub(super) fn usual_options(
    inputs: Vec<PathBuf>,
    models: Models,
    length: Option<u64>,
    settings: Settings,
) -> PredictOptions {
    let length = window_length(length, &models);
    let method = MethodOptions::VirNucPro(VirNucProOptions::usual(models));
    PredictOptions {
        length,
        commit_every: Duration::ZERO,
        ..PredictOptions::usual(inputs, PathBuf::new(), method, settings)
    }
}

impl ModelFlags {
    /// The models for the application; a flag for a single model takes precedence over `--weights`.
    pub(super) fn models(&self, length: Option<u64>) -> Result<Models, CliError> {
        let Self { weights, dna_model, protein_model, head } = self;
        let Some(bundle) = weights else {
            let Some(head) = head else {
                if dna_model.is_some() || protein_model.is_some() {
                    let text = "--dna-model and --protein-model need the head that was trained with them; add --head, \
                                such as 500_model.pth, or give --weights with a folder of all models";
                    return Err(usage(text));
                }
                return Ok(Models { dna: None, protein: None, head: None });
            };
            // Check before gigabytes of encoders are downloaded.
            if !head.exists() {
                return Err(usage(format!(
                    "--head {}: there is no such file; check the path",
                    plimsoll_runtime::EscapedPath(head)
                )));
            }
            let dna = dna_model.clone().unwrap_or_else(|| DNA_ID.to_owned());
            let protein = protein_model.clone().unwrap_or_else(|| PROTEIN_ID.to_owned());
            return Ok(Models { dna: Some(dna), protein: Some(protein), head: Some(head.clone()) });
        };
        Ok(Models {
            dna: Some(dna_model.clone().map_or_else(|| part(bundle, "dnabert_s"), Ok)?),
            protein: Some(protein_model.clone().map_or_else(|| part(bundle, "esm2"), Ok)?),
            head: Some(head.clone().map_or_else(|| bundled_head(bundle, length), Ok)?),
        })
    }
}

/// VirNucPro's encoders on the hub, for a head given without encoders.
const DNA_ID: &str = "zhihan1996/DNABERT-S";
const PROTEIN_ID: &str = "facebook/esm2_t36_3B_UR50D";

/// An encoder's folder in the bundle. A missing folder is an error here, because a path that does not exist would be
/// taken for a hub id.
fn part(bundle: &Path, name: &str) -> Result<String, CliError> {
    let path = bundle.join(name);
    if path.exists() { Ok(path.display().to_string()) } else { Err(incomplete(bundle, name)) }
}

/// The head of a bundle; `length` selects among several heads.
fn bundled_head(bundle: &Path, length: Option<u64>) -> Result<PathBuf, CliError> {
    let mut heads = HeadModel::in_folder(bundle);
    let all = file_names(&heads);
    if let Some(length) = length {
        heads.retain(|head| HeadModel::length_in_name(head).is_none_or(|named| named as u64 == length));
    }
    match &heads[..] {
        [head] => Ok(head.clone()),
        [] if all.is_empty() => Err(incomplete(bundle, plimsoll_runtime::HEAD_NAMES)),
        [] => Err(usage(format!(
            "--weights {}: the folder contains {all}, but no head for --length {}; omit --length, or name a head with --head",
            plimsoll_runtime::EscapedPath(bundle),
            length.unwrap_or_default()
        ))),
        _ => Err(usage(format!(
            "--weights {}: the folder contains several heads, {}; choose one with --length or --head",
            plimsoll_runtime::EscapedPath(bundle),
            file_names(&heads)
        ))),
    }
}

/// The file names of paths, joined by "and".
fn file_names(paths: &[PathBuf]) -> String {
    let names = paths.iter().filter_map(|path| path.file_name()).map(|name| name.to_string_lossy());
    names.collect::<Vec<_>>().join(" and ")
}

fn incomplete(bundle: &Path, missing: &str) -> CliError {
    usage(format!(
        "--weights {}: the folder does not contain {missing}; it must contain dnabert_s/ ({DNA_ID} on the hub), esm2/ \
         ({PROTEIN_ID}) and a head ({}). To take both encoders from the hub, give --head 500_model.pth without --weights",
        plimsoll_runtime::EscapedPath(bundle),
        plimsoll_runtime::HEAD_NAMES
    ))
}

/// The default output folder, `<stem>_plimsoll` of the first input.
fn default_folder(inputs: &[PathBuf]) -> PathBuf {
    let first = inputs.first().map_or(Path::new("-"), PathBuf::as_path);
    PathBuf::from(format!("{}_plimsoll", stem(first)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_are_named_after_inputs() {
        let check = |inputs: &[&str], wanted: &str| {
            let inputs: Vec<PathBuf> = inputs.iter().map(PathBuf::from).collect();
            assert_eq!(default_folder(&inputs), Path::new(wanted), "{inputs:?}");
        };
        check(&["examples/reads.fa"], "reads_plimsoll");
        check(&["a.b.fastq.gz", "c.fa"], "a.b_plimsoll");
        check(&["x/y.fna.gz"], "y_plimsoll");
        check(&["y.fq"], "y_plimsoll");
        check(&["y.fasta"], "y_plimsoll");
        check(&["y.txt"], "y.txt_plimsoll");
        check(&["-"], "stdin_plimsoll");
    }

    #[test]
    fn shards_are_two_numbers() {
        for (text, wanted) in [("1/1", Some((1, 1))), ("3/8", Some((3, 8))), ("0/8", None), ("9/8", None)] {
            assert_eq!(shard(text).ok().map(|s| (s.number, s.of)), wanted, "{text}");
        }
        for text in ["", "3", "3/", "/3", "a/b", "1/0", "1/100001"] {
            assert!(shard(text).is_err(), "{text}");
        }
    }

    #[test]
    fn numbers_have_ranges() {
        for (text, wanted) in [("500", true), ("3", true), ("2", false), ("-1", false), ("x", false)] {
            assert_eq!(length(text).is_ok(), wanted, "{text}");
        }
        for (text, wanted) in [("0", true), ("1", true), ("0.5", true), ("1.1", false), ("NaN", false)] {
            assert_eq!(threshold(text).is_ok(), wanted, "{text}");
        }
        for (text, wanted) in [("1", true), ("8", true), ("0", false), ("100000", false)] {
            assert_eq!((workers(text).is_ok(), text), (wanted, text));
        }
    }
}
