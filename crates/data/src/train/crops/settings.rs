//! Settings of training crops, as plain data. Invariant: [`CropSettings::check`] rejects contradictory settings before
//! any file is opened; no field has a hidden default.

use std::path::PathBuf;

use super::super::settings::{MaskRates, PackLimits};
use crate::printable::Name;
use crate::{DataError, DataErrorKind, codons};

/// Settings of a [`CropSet`](super::CropSet): everything apart from the data that determines the packs.
#[derive(Clone, Debug)]
pub struct CropSettings {
    /// FASTA files, plain or compressed, and folders of them.
    pub files: Vec<PathBuf>,
    /// Table of the records: tab-separated, with a header line. The column `id` has the name of a record, the column
    /// `split` one of `train`, `validation` and `-` (left out). Other columns have the classes of tasks and the values of
    /// sampling levels. Every record of the files needs a row; a row that is not left out needs a record.
    pub table: PathBuf,
    /// Classification tasks; empty if the objective is masked tokens.
    pub tasks: Vec<CropTask>,
    /// Tokens of a crop.
    pub tokens: CropTokenizer,
    /// Training objective.
    pub objective: CropObjective,
    /// Minimum length of a crop in bases. Shorter records of the training split are skipped and counted in
    /// [`CropSplitSize::short`](super::CropSplitSize::short).
    pub shortest: usize,
    /// Maximum length of a crop in bases. The length is log-uniform between the two, and at most that of the record.
    pub longest: usize,
    /// Mutations of training crops.
    pub mutations: Mutations,
    /// Training crops that are shuffled.
    pub shuffled: ShuffledCrops,
    /// Levels at which a record is drawn, outermost first. Without levels a record is drawn in proportion to its bases.
    pub levels: Vec<SamplingLevel>,
    /// Whether training crops without a target in any task are in the packs; otherwise they are skipped. A model that
    /// learns from the predictions of another one needs no target.
    pub unlabelled: bool,
    /// Whether a note on the files is an error (see [`CropSet::notes`](super::CropSet::notes)).
    pub strict: bool,
    /// Validation crops; `None` for no validation.
    pub validation: Option<ValidationCrops>,
    /// Seed of all random draws.
    pub seed: u64,
    /// Maximum size of a pack. `longest` is the maximum number of tokens of a frame, that is, of the part of a
    /// crop within which tokens attend to one another.
    pub bounds: PackLimits,
    /// Number of threads that make crops. The packs do not depend on it.
    pub workers: usize,
    /// Number of finished parcels (groups of crops) queued per worker.
    pub prefetch: usize,
}

/// A classification task: a column of the table and its classes. The value `?` and the empty value mean that a record has
/// no target in the task; every other value must be a class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CropTask {
    /// Name of the task and of the column.
    pub name: String,
    /// Names of the classes, numbered from 0 in this order.
    pub classes: Vec<String>,
}

impl CropTask {
    /// The number of a class; -1 for `?` and for the empty text; `None` if there is no such class.
    pub(super) fn target(&self, text: &str) -> Option<i32> {
        match text {
            "" | "?" => Some(-1),
            _ => self.classes.iter().position(|class| class == text).map(|class| class as i32),
        }
    }
}

/// Tokenizer of crops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CropTokenizer {
    /// Codons in six reading frames ([`codons`]).
    Codons,
}

impl CropTokenizer {
    /// Number of tokens of a crop.
    pub fn tokens_of(self, bases: usize) -> usize {
        match self {
            Self::Codons => codons::tokens_of(bases),
        }
    }

    /// Number of tokens of a frame of a crop.
    pub fn frame_of(self, bases: usize) -> usize {
        match self {
            Self::Codons => codons::frame_of(bases),
        }
    }

    /// Number of ids.
    pub fn vocabulary(self) -> usize {
        match self {
            Self::Codons => codons::VOCABULARY,
        }
    }

    /// Minimum length in bases of a crop with a token.
    pub(super) fn shortest(self) -> usize {
        match self {
            Self::Codons => 5,
        }
    }

    /// The mask token.
    pub(super) fn mask(self) -> i32 {
        match self {
            Self::Codons => codons::MASK,
        }
    }

    /// The id of a token with an unknown letter.
    pub(super) fn unknown(self) -> i32 {
        match self {
            Self::Codons => codons::UNKNOWN,
        }
    }

    /// The ids that may be masked, ascending.
    pub(super) fn ordinary(self) -> Vec<i32> {
        match self {
            Self::Codons => (0..codons::UNKNOWN).collect(),
        }
    }

    /// Appends the tokens of a crop.
    pub(super) fn encode(self, letters: &[u8], out: &mut Vec<i32>) {
        match self {
            Self::Codons => codons::encode(letters, out),
        }
    }
}

/// Objective of training on crops.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum CropObjective {
    /// Predict the classes of each crop.
    Classify,
    /// Predict the masked tokens.
    Masked(MaskRates),
    /// Predict the codons that contain a base of a masked span.
    MaskedBases {
        /// Rates: the fraction of the codons that are selected, and what becomes of the bases of a span.
        rates: MaskRates,
        /// Bases of a span, at least 1.
        span: usize,
    },
}

/// Mutations of training crops. A crop keeps its length: it takes as many more or fewer bases of the record as its
/// deletions and insertions require.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Mutations {
    /// Maximum rate of substitutions, at least 0 and below 1. Each crop draws its own rate uniformly between 0 and this
    /// rate; each of its bases is replaced with that probability by one of the three other bases.
    pub substitutions: f64,
    /// Probability that an insertion or a deletion (equally likely) begins at a base, at least 0 and at most 0.2. Each is
    /// 1 to 3 bases long (equally likely); inserted bases are uniform. A deletion for which the record has no further
    /// bases is left out.
    pub indels: f64,
}

/// Training crops whose letters are shuffled such that the counts of dinucleotides are kept. They are not mutated.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ShuffledCrops {
    /// Fraction of the crops, at least 0 and below 1.
    pub share: f64,
    /// Names of tasks and of the class that shuffled crops have in them; no target in the other tasks.
    pub targets: Vec<(String, String)>,
}

/// A level at which a record is drawn: a value of the column is drawn with a probability proportional to the power of
/// the number of bases of the records with this value, among the records with the values of the levels before.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingLevel {
    /// Column of the table. The empty value is a value like any other.
    pub column: String,
    /// Power, at least 0: 0 draws all values equally often, 1 in proportion to their bases.
    pub power: f64,
}

/// Validation crops: the same number of crops of each length, drawn as in training from the records of the validation
/// split that have this length at least; neither mutated nor shuffled. They depend on the seed and on their index alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ValidationCrops {
    /// Number of crops of each length.
    pub crops: u64,
    /// Lengths in bases; the crops come in this order.
    pub lengths: Vec<usize>,
}

/// Longest masked span in bases.
const LONGEST_SPAN: usize = 1000;

/// Largest length of a crop in bases.
const LARGEST: usize = 1 << 26;

impl CropSettings {
    /// Checks the settings for contradictions, without opening a file.
    ///
    /// # Errors
    /// The first rule that the settings violate.
    pub fn check(&self) -> Result<(), DataError> {
        let Mutations { substitutions, indels } = self.mutations;
        let share = self.shuffled.share;
        let shortest_crop = self.tokens.shortest();
        let rules = [
            (!self.files.is_empty(), "no file of sequences is named"),
            (
                self.shortest >= shortest_crop && self.shortest <= self.longest && self.longest <= LARGEST,
                "the shortest crop must have at least 5 bases and at most those of the longest, and the longest at most \
                 67108864",
            ),
            (
                (0.0..1.0).contains(&substitutions) && (0.0..=0.2).contains(&indels),
                "the rate of substitutions must be at least 0 and below 1, and that of indels 0 to 0.2",
            ),
            ((0.0..1.0).contains(&share), "the share of shuffled crops must be at least 0 and below 1"),
            (
                (share > 0.0) != self.shuffled.targets.is_empty(),
                "shuffled crops need a share above 0 and a target in at least one task; give both or neither",
            ),
            (
                self.levels.iter().all(|level| level.power >= 0.0 && level.power.is_finite()),
                "the power of a sampling level must be a number of at least 0",
            ),
            (
                self.validation
                    .as_ref()
                    .is_none_or(|v| v.crops > 0 && v.crops < 1 << 32 && !v.lengths.is_empty()),
                "validation needs at least one crop, below 4294967296, and at least one length",
            ),
            (
                self.validation
                    .iter()
                    .flat_map(|v| &v.lengths)
                    .all(|length| (shortest_crop..=LARGEST).contains(length)),
                "a validation crop must have 5 to 67108864 bases",
            ),
            (self.workers > 0 && self.prefetch > 0, "at least one worker and one parcel for it"),
        ];
        if let Some((_, why)) = rules.into_iter().find(|(kept, _)| !kept) {
            return Err(DataError::new(DataErrorKind::Malformed(why.to_owned())));
        }
        if let Err(why) = self.check_tasks() {
            return Err(DataError::new(DataErrorKind::Malformed(why)));
        }
        self.check_bounds()
    }

    /// The targets of shuffled crops, one for each task.
    pub(super) fn shuffled_targets(&self) -> Result<Vec<i32>, String> {
        let mut targets = vec![-1; self.tasks.len()];
        for (name, class) in &self.shuffled.targets {
            let place = self.tasks.iter().position(|task| task.name == *name);
            let place = place.ok_or_else(|| {
                format!("shuffled crops have a target in the task '{}', and there is no such task", Name(name))
            })?;
            let class = self.tasks[place].target(class).filter(|&class| class >= 0).ok_or_else(|| {
                format!(
                    "shuffled crops have the class '{}' in the task '{}'; its classes are {}",
                    Name(class),
                    Name(name),
                    listed(&self.tasks[place].classes)
                )
            })?;
            if targets[place] >= 0 {
                return Err(format!("shuffled crops have two targets in the task '{}'", Name(name)));
            }
            targets[place] = class;
        }
        Ok(targets)
    }

    /// Length in bases of the longest crop of either split.
    pub(super) fn longest_crop(&self) -> usize {
        let lengths = self.validation.iter().flat_map(|v| &v.lengths);
        lengths.copied().fold(self.longest, usize::max)
    }

    fn check_tasks(&self) -> Result<(), String> {
        match self.objective {
            CropObjective::Classify if self.tasks.is_empty() => {
                return Err("classification needs a task".to_owned());
            }
            CropObjective::Masked(_) | CropObjective::MaskedBases { .. } if !self.tasks.is_empty() => {
                return Err("masked tokens have no tasks; leave the tasks out".to_owned());
            }
            CropObjective::MaskedBases { span, .. } if !(1..=LONGEST_SPAN).contains(&span) => {
                return Err(format!("a masked span has 1 to {LONGEST_SPAN} bases, not {span}"));
            }
            CropObjective::Masked(rates) | CropObjective::MaskedBases { rates, .. } => {
                rates.check().map_err(str::to_owned)?
            }
            CropObjective::Classify => {}
        }
        for (at, task) in self.tasks.iter().enumerate() {
            let name = Name(&task.name);
            if self.tasks[..at].iter().any(|other| other.name == task.name) {
                return Err(format!("two tasks are called '{name}'"));
            }
            if task.classes.is_empty() {
                return Err(format!("the task '{name}' has no classes"));
            }
            for (at, class) in task.classes.iter().enumerate() {
                if class.is_empty() || class == "?" {
                    return Err(format!(
                        "a class of the task '{name}' is called '{class}', which means no target; rename it"
                    ));
                }
                if task.classes[..at].contains(class) {
                    return Err(format!("the task '{name}' has the class '{}' twice", Name(class)));
                }
            }
        }
        self.shuffled_targets().map(|_| ())
    }

    fn check_bounds(&self) -> Result<(), DataError> {
        let PackLimits { tokens, sequences, longest } = self.bounds;
        let crop = self.longest_crop();
        let frame = self.tokens.frame_of(crop);
        let all = self.tokens.tokens_of(crop);
        let why = match () {
            () if sequences == 0 => "a pack must hold a crop".to_owned(),
            () if tokens > i32::MAX as usize => "a pack has more tokens than spans can count".to_owned(),
            () if frame > longest => format!(
                "a crop of {crop} bases has frames of {frame} tokens, at most {longest} fit; raise the longest sequence or \
                 shorten the crops"
            ),
            () if all > tokens => format!(
                "a crop of {crop} bases has {all} tokens, a pack at most {tokens}; raise the tokens of a \
                 pack or shorten the crops"
            ),
            () => return Ok(()),
        };
        Err(DataError::new(DataErrorKind::Malformed(why)))
    }
}

/// The first names of a list, for a message.
pub(super) fn listed(names: &[String]) -> String {
    const SHOWN: usize = 12;
    let mut shown: Vec<String> = names.iter().take(SHOWN).map(|name| Name(name).to_string()).collect();
    if names.len() > SHOWN {
        shown.push(format!("and {} others", names.len() - SHOWN));
    }
    shown.join(", ")
}
