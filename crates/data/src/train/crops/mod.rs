//! Crops of genomes with classes, the data for training a classifier of DNA. Invariant: a crop is a function of the data,
//! the settings and its index alone, for any number of workers; a pack has no padding and never exceeds its bounds;
//! every record has a row in the table; host memory is bounded by figures that are known when the set is open.
//!
//! The records are in memory, two bits a base. A crop is made in these steps, each with its own random numbers: a length,
//! a record (`sampler`), a position, mutations and a strand (`draw`) or a shuffled sequence (`shuffle`), tokens
//! ([`codons`](crate::codons)), masks.

mod draw;
mod mask_bases;
mod packed;
mod sampler;
mod settings;
mod shuffle;
mod stream;
mod table;

use std::sync::Arc;

use sha2::{Digest, Sha256};

use self::packed::Packed;
use self::sampler::Sampler;
pub use self::settings::{
    CropObjective, CropSettings, CropTask, CropTokenizer, Mutations, SamplingLevel, ShuffledCrops,
    ValidationCrops,
};
pub use self::stream::{CropCounts, CropPack, CropPosition, CropStream};
use self::table::{RecordTable, UsedRow};
use super::dataset::refuse_notes;
use super::files;
use super::ledger::{DECODER, DataMemory, READER};
use super::settings::DatasetFormat;
use super::split::Split;
use crate::alphabet::{Alphabet, UnknownLetters};
use crate::bounded;
use crate::hex::hex;
use crate::sequence::{InputNote, Reader, Record};
use crate::{DataError, DataErrorKind};

/// Open records with their classes: the source of [`CropStream`]s. Cheap to clone.
#[derive(Clone)]
pub struct CropSet {
    inner: Arc<SharedCrops>,
}

/// State of a crop set, shared with the threads of its streams.
struct SharedCrops {
    settings: CropSettings,
    train: Vec<LabelledRecord>,
    validation: Vec<LabelledRecord>,
    /// Sampler of the training records, then one for each length of validation crops.
    samplers: Vec<Sampler>,
    /// Targets of shuffled crops.
    shuffled: Vec<i32>,
    stats: CropStats,
    digest: String,
    /// Bytes of the table of records and of the reader of the files, which are only held while the set is opened.
    opening: [u64; 2],
    /// Whether a file is compressed.
    compressed: bool,
    /// Notes on the files, and a line that names what was skipped in folders.
    notes: Vec<InputNote>,
    skipped: Option<String>,
}

/// A record with its targets, one for each task, and its values, one for each sampling level.
struct LabelledRecord {
    packed: Packed,
    targets: Box<[i32]>,
    values: Box<[u32]>,
}

/// Statistics of the records, collected when the set is opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CropStats {
    /// Training split.
    pub train: CropSplitSize,
    /// Validation split.
    pub validation: CropSplitSize,
    /// Number of records that the table leaves out.
    pub left_out: u64,
}

/// Size of a split.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CropSplitSize {
    /// Number of records from which crops are drawn.
    pub records: u64,
    /// Number of their bases.
    pub bases: u64,
    /// Number of these that are not A, C, G, T or U.
    pub unknown: u64,
    /// Number of records that are skipped because they are shorter than the shortest crop.
    pub short: u64,
}

impl CropSet {
    /// Opens the table and reads all records.
    ///
    /// # Errors
    /// Contradictory settings; a file that cannot be read; an invalid table; a record without a row, with the name of
    /// another, or that is no nucleotide sequence; a row without a record; no training record, or no validation record
    /// for a length of validation crops.
    pub fn open(settings: CropSettings) -> Result<Self, DataError> {
        settings.check()?;
        let shuffled =
            settings.shuffled_targets().map_err(|why| DataError::new(DataErrorKind::Malformed(why)))?;
        let mut inner = SharedCrops {
            settings,
            train: Vec::new(),
            validation: Vec::new(),
            samplers: Vec::new(),
            shuffled,
            stats: CropStats::default(),
            digest: String::new(),
            opening: [0; 2],
            compressed: false,
            notes: vec![],
            skipped: None,
        };
        inner.read()?;
        inner.make_samplers()?;
        Ok(CropSet { inner: Arc::new(inner) })
    }

    /// The settings.
    pub fn settings(&self) -> &CropSettings {
        &self.inner.settings
    }

    /// The statistics of the records.
    pub fn stats(&self) -> &CropStats {
        &self.inner.stats
    }

    /// Notes on the files: what was dropped from sequences, and files without a record.
    pub fn notes(&self) -> &[InputNote] {
        &self.inner.notes
    }

    /// A line that names what was skipped in folders; `None` if nothing was.
    pub fn skipped(&self) -> Option<&str> {
        self.inner.skipped.as_deref()
    }

    /// Digest of everything that determines the training crops, as 32 hexadecimal digits: the training records, their
    /// classes and sampling levels, the seed and the settings, with the bounds of a pack, apart from validation and
    /// workers. A position is valid only in data of equal digest.
    pub fn digest(&self) -> &str {
        &self.inner.digest
    }

    /// Maximum host memory of the set and of one stream, by purpose, apart from its packs.
    pub fn host_bytes(&self) -> Vec<DataMemory> {
        let inner = &self.inner;
        let records = [&inner.train, &inner.validation].into_iter();
        let records: usize = records
            .map(|records| {
                let inside: usize = records.iter().map(LabelledRecord::bytes).sum();
                // A vector that grows holds its old buffer too.
                inside + 2 * records.capacity() * size_of::<LabelledRecord>()
            })
            .sum();
        let samplers: usize = inner.samplers.iter().map(|s| s.bytes() + 2 * size_of::<Sampler>()).sum();
        // The list of the records from which a sampler is built.
        let listed = 2 * inner.train.len().max(inner.validation.len()) * size_of::<u32>();
        let [parcels, workers] = stream::bytes(inner);
        vec![
            DataMemory { what: "records", bytes: records as u64 },
            DataMemory { what: "sampling of records", bytes: (samplers + listed) as u64 },
            DataMemory { what: "table of records", bytes: inner.opening[0] },
            DataMemory { what: "reader", bytes: inner.opening[1] },
            DataMemory { what: "decompression", bytes: if inner.compressed { DECODER } else { 0 } },
            DataMemory { what: "parcels", bytes: parcels },
            DataMemory { what: "makers of crops", bytes: workers },
        ]
    }

    /// An empty pack with buffers that are large enough for the bounds.
    pub fn pack(&self) -> CropPack {
        let CropSettings { bounds, objective, tasks, .. } = &self.inner.settings;
        CropPack::with_capacity(bounds, *objective, tasks.len())
    }

    /// Size of a full pack in bytes.
    pub fn pack_bytes(&self) -> u64 {
        let CropSettings { bounds, objective, tasks, .. } = &self.inner.settings;
        CropPack::bytes(bounds, *objective, tasks.len())
    }

    /// The position of the first crop.
    pub fn start(&self) -> CropPosition {
        CropPosition { data: self.inner.digest.clone(), pack: 0, crop: 0 }
    }

    /// Streams the packs of a split, starting at a position. A training stream has no end; a validation stream is a
    /// single pass over the validation crops and must begin at [`CropSet::start`].
    ///
    /// # Errors
    /// A position of other data; a damaged position; no validation; a thread that cannot be started.
    pub fn stream(&self, split: Split, from: &CropPosition) -> Result<CropStream, DataError> {
        let what = match split {
            _ if from.data != self.inner.digest => {
                "the saved position belongs to other data: the records, their classes, the seed, the settings of crops \
                 or the size of a pack have changed; start over, or restore what was changed"
            }
            _ if from.crop > LARGEST_INDEX => "the saved position is after the last crop, so it is damaged",
            // Every pack has a crop.
            _ if from.pack > from.crop => "the saved position is after the last pack, so it is damaged",
            Split::Validation if self.inner.settings.validation.is_none() => {
                "there is no validation data; give the number and lengths of validation crops"
            }
            Split::Validation if *from != self.start() => "validation begins at the start",
            Split::Train | Split::Validation => {
                return CropStream::new(self.inner.clone(), split, from.clone());
            }
        };
        Err(DataError::new(DataErrorKind::Malformed(what.to_owned())))
    }
}

/// Largest index of a crop, low enough that the index of a parcel ahead of it does not overflow.
const LARGEST_INDEX: u64 = 1 << 62;

impl SharedCrops {
    /// The records of a split.
    fn records(&self, split: Split) -> &[LabelledRecord] {
        match split {
            Split::Train => &self.train,
            Split::Validation => &self.validation,
        }
    }

    /// Number of crops of a split; that of the training split is never reached.
    fn crops(&self, split: Split) -> u64 {
        match (split, &self.settings.validation) {
            (Split::Train, _) => u64::MAX >> 1,
            (Split::Validation, Some(ValidationCrops { crops, lengths })) => {
                crops.saturating_mul(lengths.len() as u64)
            }
            (Split::Validation, None) => 0,
        }
    }

    /// Lengths of validation crops.
    fn validation_lengths(&self) -> &[usize] {
        self.settings.validation.as_ref().map_or(&[], |validation| &validation.lengths)
    }

    /// Index into [`SharedCrops::validation_lengths`] of a validation crop.
    fn validation_length(&self, index: u64) -> usize {
        self.settings.validation.as_ref().map_or(0, |validation| (index / validation.crops) as usize)
    }

    /// Number of tokens of the longest crop of either split.
    fn longest_tokens(&self) -> usize {
        self.settings.tokens.tokens_of(self.settings.longest_crop())
    }

    /// Reads the table and the records, and computes the digest of the data.
    fn read(&mut self) -> Result<(), DataError> {
        let settings = self.settings.clone();
        let path = &settings.table;
        let text = bounded::read_text(path, table::LARGEST)
            .map_err(|e| DataError::at(path, DataErrorKind::Read(e)))?;
        let (mut table, names) = RecordTable::parse(path, &text, &settings)?;
        let listing = files::list(&settings.files, &DatasetFormat::Sequences, Some(Alphabet::Nucleotides))?;
        self.skipped = listing.skipped_line();
        let files = listing.paths();
        for file in &files {
            self.compressed |= files::is_compressed(file, &DatasetFormat::Sequences)?;
        }
        let mut hash = Sha256::new();
        let mut reader = Reader::open(&files)?;
        let mut record = Record::default();
        let mut longest = 0;
        let mut unknown = UnknownLetters::default();
        while reader.read_into(&mut record)? {
            longest = longest.max(record.seq.len() + record.description.len() + record.id.len());
            if let Some(why) = Alphabet::Nucleotides.refusal(&record.seq) {
                return Err(reader.error_at(&record, DataError::new(DataErrorKind::Malformed(why))));
            }
            unknown.count(Alphabet::Nucleotides.count_unknown(&record.seq), || record.id.clone());
            let row = table.take(&record.id);
            let row =
                row.map_err(|why| reader.error_at(&record, DataError::new(DataErrorKind::Malformed(why))))?;
            match row {
                Some(row) => self.add(&record.seq, &row, &names, &mut hash),
                None => self.stats.left_out += 1,
            }
        }
        self.notes = reader.take_notes();
        self.notes.extend(files.first().and_then(|file| unknown.note(file)));
        refuse_notes(settings.strict, &self.notes)?;
        table.check_found()?;
        self.opening = [(text.capacity() + table.bytes()) as u64, READER + 4 * longest as u64];
        hash.update(described(&settings));
        let digest: [u8; 32] = hash.finalize().into();
        self.digest = hex(&digest[..16]);
        Ok(())
    }

    /// Adds a record to its split, or counts it as short.
    fn add(&mut self, letters: &[u8], row: &UsedRow<'_>, names: &[Vec<&str>], hash: &mut Sha256) {
        // Without validation, its records are counted but not held.
        let (shortest, is_held) = match row.split {
            Split::Train => (self.settings.shortest, true),
            Split::Validation => {
                let shortest = self.validation_lengths().iter().min();
                (shortest.copied().unwrap_or(0), shortest.is_some())
            }
        };
        let (size, records) = match row.split {
            Split::Train => (&mut self.stats.train, &mut self.train),
            Split::Validation => (&mut self.stats.validation, &mut self.validation),
        };
        if letters.len() < shortest {
            size.short += 1;
            return;
        }
        let packed = Packed::new(letters);
        size.records += 1;
        size.bases += packed.len() as u64;
        size.unknown += packed.unknown() as u64;
        if !is_held {
            return;
        }
        if row.split == Split::Train {
            packed.hash(|bytes| hash.update(bytes));
            row.targets.iter().for_each(|target| hash.update(target.to_le_bytes()));
            for (names, &value) in names.iter().zip(row.values) {
                hash.update(names[value as usize]);
                hash.update([0]);
            }
        }
        records.push(LabelledRecord { packed, targets: row.targets.into(), values: row.values.into() });
    }

    /// Builds the samplers.
    ///
    /// # Errors
    /// No training record; a length of validation crops for which no record is long enough.
    fn make_samplers(&mut self) -> Result<(), DataError> {
        let powers: Vec<f64> = self.settings.levels.iter().map(|level| level.power).collect();
        let shortest = self.settings.shortest;
        let Some(of_train) = sampler(&self.train, shortest, &powers) else {
            let what = format!(
                "no record to train on: {} records of the split train have fewer than {shortest} bases, {} are left out",
                self.stats.train.short, self.stats.left_out
            );
            return Err(DataError::at(&self.settings.table, DataErrorKind::NoData(what)));
        };
        let mut samplers = vec![of_train];
        for &length in self.validation_lengths() {
            let Some(of_length) = sampler(&self.validation, length, &powers) else {
                let what = format!(
                    "no record of the split validation has the {length} bases of a validation crop; remove the length, or \
                     give longer records"
                );
                return Err(DataError::at(&self.settings.table, DataErrorKind::NoData(what)));
            };
            samplers.push(of_length);
        }
        self.samplers = samplers;
        Ok(())
    }
}

/// Builds a sampler of the records of at least `shortest` bases; `None` if there is none.
fn sampler(records: &[LabelledRecord], shortest: usize, powers: &[f64]) -> Option<Sampler> {
    let all = 0..records.len() as u32;
    let long = all.filter(|&record| records[record as usize].packed.len() >= shortest).collect();
    let bases = |record: u32| records[record as usize].packed.len() as u64;
    let value = |record: u32, level: usize| records[record as usize].values[level];
    Sampler::new(long, powers, &bases, &value)
}

impl LabelledRecord {
    /// Heap bytes, with an allowance for the allocator's headers.
    fn bytes(&self) -> usize {
        self.packed.bytes() + self.targets.len() * size_of::<i32>() + self.values.len() * size_of::<u32>() + 32
    }
}

/// The settings that determine the training crops, apart from the records, as text for the digest.
fn described(settings: &CropSettings) -> String {
    let CropSettings {
        tasks,
        tokens,
        objective,
        shortest,
        longest,
        mutations,
        shuffled,
        levels,
        seed,
        unlabelled,
        bounds,
        ..
    } = settings;
    let bounds = bounds.digest_text();
    format!(
        "{tasks:?} {tokens:?} {objective:?} {shortest} {longest} {mutations:?} {shuffled:?} {levels:?} {seed} \
         {unlabelled} {bounds}"
    )
}
