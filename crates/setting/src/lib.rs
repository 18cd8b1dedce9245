//! Settings and commands that messages of the libraries name, as data. Errors and remedies carry [`Setting`]s and
//! [`Assignment`]s, and a front end chooses how they are written: the command line registers its flags with [`set_words`].
//! Invariant: without registered words, every setting and command is written by its name in the libraries.
#![forbid(unsafe_code)]

use std::borrow::Cow;
use std::fmt;
use std::sync::OnceLock;

/// A setting that a message of a library names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Setting {
    /// Whether a protein model takes sequences that look like DNA.
    AllowDna,
    /// Model that an adapter was trained on.
    Base,
    /// Memory budget of a plan or of a training run.
    Budget,
    /// Target file that a calibration writes.
    Calibrate,
    /// Whether the answer of a search for the largest value is tried.
    Confirm,
    /// Devices that compute.
    Device,
    /// Tokens of a step of the DNA model of a prediction.
    DnaTokens,
    /// Pixels per inch of a picture.
    Dpi,
    /// Profile of steps whose size follows the free memory.
    Dynamic,
    /// Whether a plan is explained.
    Explain,
    /// Whether existing outputs are replaced.
    Force,
    /// Format of an output.
    Format,
    /// Configuration of another trainer, which is translated.
    FromConfig,
    /// Trainer that the configuration in [`Setting::FromConfig`] belongs to.
    FromFormat,
    /// Weights of a head.
    Head,
    /// Format of the sequences that are called viral.
    HitsFormat,
    /// Budget of the host's memory beside a GPU.
    HostMemory,
    /// Whether results are printed as JSON.
    Json,
    /// Dimension whose largest value is searched.
    Largest,
    /// Layers whose states are embeddings.
    Layers,
    /// Length of a window in bases.
    Length,
    /// Whether axes are logarithmic where the values allow it.
    Log,
    /// Maximum number of letters of a sequence.
    MaxLength,
    /// Memory budget of a run.
    MemoryBudget,
    /// File of a plan's memory for PyTorch's viewer.
    MemoryViz,
    /// Folders of the shards that are merged.
    Merge,
    /// Length of the shortest record that is called, in bases.
    MinLength,
    /// Model by its folder or its name on the hub.
    Model,
    /// Whether progress is not shown.
    NoProgress,
    /// Output file or folder.
    Output,
    /// Values of keys that override those of a training configuration.
    Overrides,
    /// Whether records are mates of pairs.
    Paired,
    /// Whether every input has an output of its own.
    PerInput,
    /// How the rows of a sequence become its embedding.
    Pool,
    /// Number format of matmuls.
    Precision,
    /// Whether a prediction is planned.
    Predict,
    /// Whether a configuration is printed instead of run.
    PrintConfig,
    /// Tokens of a step of the protein model of a prediction.
    ProteinTokens,
    /// Whether only warnings and errors are printed.
    Quiet,
    /// Records of which pictures are drawn.
    Records,
    /// Folder of the results that a verification compares with.
    Reference,
    /// Whether a training run continues, and from which checkpoint.
    Resume,
    /// Whether the schema of training configurations is printed.
    Schema,
    /// Charts that are drawn.
    Series,
    /// Part of the input that is computed.
    Shard,
    /// When weights are streamed.
    StreamWeights,
    /// Whether notes on the input are errors.
    Strict,
    /// Machine that a plan is for.
    Target,
    /// Number of threads.
    Threads,
    /// Page with the measured timeline of a training step.
    Timeline,
    /// Tokens of a step.
    Tokens,
    /// File of a plan's timeline as JSON.
    Trace,
    /// Whether sequences are cut at the maximum length.
    Truncate,
    /// Whether details are printed.
    Verbose,
    /// Folder of the models and the head of a prediction.
    Weights,
    /// Width of a picture in millimetres.
    Width,
    /// A key of a training configuration, with dots between section and name, such as `optimizer.lr`.
    Key(Cow<'static, str>),
}

impl Setting {
    /// The key of a training configuration with this path.
    pub fn key(path: impl Into<Cow<'static, str>>) -> Self {
        Self::Key(path.into())
    }

    /// The name in the libraries: that of a field of an options struct, or the path of a key.
    pub fn name(&self) -> &str {
        match self {
            Self::AllowDna => "allow_dna",
            Self::Base => "base",
            Self::Budget => "budget",
            Self::Calibrate => "calibrate",
            Self::Confirm => "confirm",
            Self::Device => "device",
            Self::DnaTokens => "dna_tokens",
            Self::Dpi => "dpi",
            Self::Dynamic => "dynamic",
            Self::Explain => "explain",
            Self::Force => "force",
            Self::Format => "format",
            Self::FromConfig => "from_config",
            Self::FromFormat => "from_format",
            Self::Head => "head",
            Self::HitsFormat => "hits_format",
            Self::HostMemory => "host_memory",
            Self::Json => "json",
            Self::Largest => "largest",
            Self::Layers => "layers",
            Self::Length => "length",
            Self::Log => "log",
            Self::MaxLength => "max_length",
            Self::MemoryBudget => "memory_budget",
            Self::MemoryViz => "memory_viz",
            Self::Merge => "merge",
            Self::MinLength => "min_length",
            Self::Model => "model",
            Self::NoProgress => "no_progress",
            Self::Output => "output",
            Self::Overrides => "overrides",
            Self::Paired => "paired",
            Self::PerInput => "per_input",
            Self::Pool => "pool",
            Self::Precision => "precision",
            Self::Predict => "predict",
            Self::PrintConfig => "print_config",
            Self::ProteinTokens => "protein_tokens",
            Self::Quiet => "quiet",
            Self::Records => "records",
            Self::Reference => "reference",
            Self::Resume => "resume",
            Self::Schema => "schema",
            Self::Series => "series",
            Self::Shard => "shard",
            Self::StreamWeights => "stream_weights",
            Self::Strict => "strict",
            Self::Target => "target",
            Self::Threads => "threads",
            Self::Timeline => "timeline",
            Self::Tokens => "tokens",
            Self::Trace => "trace",
            Self::Truncate => "truncate",
            Self::Verbose => "verbose",
            Self::Weights => "weights",
            Self::Width => "width",
            Self::Key(path) => path,
        }
    }

    /// The assignment of a value to this setting.
    pub fn to(self, value: impl fmt::Display) -> Assignment {
        Assignment { setting: self, value: value.to_string() }
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match WORDS.get() {
            Some(words) => (words.setting)(self, None, f),
            None => f.write_str(self.name()),
        }
    }
}

/// A setting and a value for it, such as `tokens=512`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assignment {
    /// The setting.
    pub setting: Setting,
    /// The value as text.
    pub value: String,
}

impl fmt::Display for Assignment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { setting, value } = self;
        match WORDS.get() {
            Some(words) => (words.setting)(setting, Some(value), f),
            None => write!(f, "{}={value}", setting.name()),
        }
    }
}

/// A command, or a function of the libraries, that a message names. The alternate form `{:#}` is shorter where a front end
/// has a shorter one: the command line then omits the name of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Measures kernels and models.
    Bench,
    /// Computes embeddings of sequences.
    Embed,
    /// Merges the adapters of a checkpoint into a model.
    Merge,
    /// Plans the memory of a run.
    Plan,
    /// Finds viral sequences.
    Predict,
    /// Writes an HTML page about results.
    Report,
    /// Any command that reads sequences, with its standard input as the input.
    StandardInput,
    /// Trains a model.
    Train,
}

impl Command {
    /// The name in the libraries.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bench => "bench",
            Self::Embed => "embed",
            Self::Merge => "merge",
            Self::Plan => "plan",
            Self::Predict => "predict",
            Self::Report => "report",
            Self::StandardInput => "stdin",
            Self::Train => "train",
        }
    }
}

impl fmt::Display for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match WORDS.get() {
            Some(words) => (words.command)(*self, f),
            None => f.write_str(self.name()),
        }
    }
}

/// How a front end writes settings and commands.
#[derive(Clone, Copy, Debug)]
pub struct MessageWords {
    /// Writes a setting, or its assignment if there is a value.
    pub setting: fn(&Setting, Option<&str>, &mut fmt::Formatter<'_>) -> fmt::Result,
    /// Writes a command; in its short form if the formatter is in alternate mode.
    pub command: fn(Command, &mut fmt::Formatter<'_>) -> fmt::Result,
}

static WORDS: OnceLock<MessageWords> = OnceLock::new();

/// Registers the words of the front end, once, before the first message. Later calls have no effect.
///
/// The words apply to the whole process, as the language of a program does: they belong to the front end that started it, and
/// `Display` of an error, which any thread may call, has no argument that could carry them.
pub fn set_words(words: MessageWords) {
    // The first front end keeps its words: messages that were already written have them.
    let _ = WORDS.set(words);
}
