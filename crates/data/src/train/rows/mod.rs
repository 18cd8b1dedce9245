//! Rows of precomputed embeddings with class labels, the data for training a head. Invariant: as for documents, the
//! packs are a function of the data, the settings and the position; equal rows are in the same split; every value is
//! finite and every row has a class.
//!
//! Only the index is in memory; rows are read from their files pack by pack. Each epoch permutes all training rows.

mod files;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use self::files::RowFile;
use super::dataset::{DatasetStats, SplitSize};
use super::labels::{Classes, Labels};
use super::ledger::DataMemory;
use super::position::LARGEST_PACK;
use super::random::RandomKey;
use super::split::Split;
use crate::hex::hex;
use crate::printable::Name;
use crate::{DataError, DataErrorKind};

/// Settings that, with the data, determine the packs.
#[derive(Clone, Debug)]
pub struct RowSettings {
    /// Parts of an input, such as nucleotide and protein embeddings. The first part determines which rows exist and
    /// their order; the other parts must have a row of each name, and their additional rows are ignored.
    pub parts: Vec<RowGroupPart>,
    /// Table of names and classes, which gives the class of each row.
    pub labels: PathBuf,
    /// Names of the classes.
    pub classes: Classes,
    /// Fraction of the rows in the validation split, in [0, 1). Equal rows are in the same split.
    pub validation: f64,
    /// Seed of the choice of validation rows.
    pub validation_seed: u64,
    /// Seed of the order of training rows.
    pub seed: u64,
    /// Maximum number of rows of a pack.
    pub rows: usize,
}

/// A part of an input.
#[derive(Clone, Debug)]
pub struct RowGroupPart {
    /// Files of rows: `.npy` with their `.ids.txt`, `.safetensors` with a matrix or with a tensor for each name.
    pub files: Vec<PathBuf>,
    /// Pattern of the names of tensors that are rows, with `*` for the name of the row: `*`, or for example `*.mean`.
    pub tensors: String,
}

/// A pack of S rows and their classes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RowPack {
    /// Global pack number: number of the pack in the run, over all epochs, from 0. At the end of an epoch, where the
    /// pack is empty, the number of the next pack.
    pub number: u64,
    /// Values of each part, (S, D) with the width D of the part.
    pub parts: Vec<Vec<f32>>,
    /// Class of each row, (S).
    pub targets: Vec<i32>,
    /// Position after this pack; `None` before the first pack.
    pub position_after: Option<RowPosition>,
}

/// Position in the rows, stored in checkpoints.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RowPosition {
    /// Digest of the data and its order, in hexadecimal, for which the position is valid.
    pub data: String,
    /// Global pack number of the next pack: the number of packs of the run before it, over all epochs.
    pub pack: u64,
    /// Epoch, counted from 0.
    pub epoch: u64,
    /// Number of rows of the epoch that are consumed.
    pub row: u64,
}

/// Open files of rows. Cheap to clone.
#[derive(Clone)]
pub struct RowSet {
    inner: Arc<SharedRows>,
}

/// Data shared by the streams of a [`RowSet`].
struct SharedRows {
    settings: RowSettings,
    /// Files of each part.
    files: Vec<Vec<RowFile>>,
    widths: Vec<usize>,
    train: Vec<ExampleRow>,
    validation: Vec<ExampleRow>,
    census: DatasetStats,
    digest: String,
}

/// Class of a row and the locations of its parts.
#[derive(Clone)]
struct ExampleRow {
    class: i32,
    /// Index of the file and of the row in the file, for each part.
    places: Vec<(u32, u32)>,
}

impl RowSet {
    /// Opens the files and reads all rows once.
    ///
    /// # Errors
    /// No files, a pack of 0 rows, or a validation fraction outside [0, 1); a file that cannot be read, or files of
    /// one part with rows of different widths; a repeated row name; a row without a class, without one of its parts, or
    /// with a value that is not finite; no training rows, or no validation rows although the fraction is above 0.
    pub fn open(settings: RowSettings) -> Result<Self, DataError> {
        if settings.parts.iter().any(|part| part.files.is_empty()) || settings.parts.is_empty() {
            return Err(DataError::new(DataErrorKind::Malformed("no file of rows is named".to_owned())));
        }
        if settings.rows == 0 || !(0.0..1.0).contains(&settings.validation) {
            return Err(DataError::new(DataErrorKind::Malformed(
                "a pack needs a row, and the validation fraction must be at least 0 and below 1".to_owned(),
            )));
        }
        let labels = Labels::read(&settings.labels, &settings.classes)?;
        let mut files = Vec::new();
        for part in &settings.parts {
            let open = part.files.iter().map(|path| RowFile::open(path, &part.tensors));
            files.push(open.collect::<Result<Vec<_>, _>>()?);
        }
        let widths = settings.parts.iter().zip(&files).map(|(part, files)| width(part, files));
        let widths = widths.collect::<Result<Vec<_>, _>>()?;
        let named = rows(&settings, &mut files, &labels)?;
        let mut new = SharedRows {
            settings,
            files,
            widths,
            train: Vec::new(),
            validation: Vec::new(),
            census: DatasetStats::default(),
            digest: String::new(),
        };
        new.split(named)?;
        new.check()?;
        Ok(RowSet { inner: Arc::new(new) })
    }

    /// Returns the number of values of a row in each part.
    pub fn widths(&self) -> &[usize] {
        &self.inner.widths
    }

    /// Returns the number of rows (as documents) and bytes of each split.
    pub fn census(&self) -> &DatasetStats {
        &self.inner.census
    }

    /// Returns the number of packs of an epoch: as [`RowStream::fill`] divides the training rows.
    pub fn packs_of_epoch(&self) -> u64 {
        let max_rows = self.inner.settings.rows as u64;
        let mut left = self.inner.train.len() as u64;
        let mut packs = 0;
        while left > 0 {
            left -= rows_of_pack(left, max_rows);
            packs += 1;
        }
        packs
    }

    /// Returns a digest of the values of the rows in file order, their classes, the validation fraction, the seeds and
    /// the rows of a pack, in hexadecimal.
    pub fn digest(&self) -> &str {
        &self.inner.digest
    }

    /// Returns the host memory of the index, by purpose, without the packs.
    pub fn host_bytes(&self) -> Vec<DataMemory> {
        let parts = self.inner.widths.len();
        let row = size_of::<ExampleRow>() + parts * size_of::<(u32, u32)>();
        let rows = self.inner.train.capacity() + self.inner.validation.capacity();
        let order = size_of::<u32>() * self.inner.train.len();
        vec![
            DataMemory { what: "index of rows", bytes: (rows * row) as u64 },
            DataMemory { what: "order of rows", bytes: order as u64 },
        ]
    }

    /// Size of a full pack in bytes.
    pub fn pack_bytes(&self) -> u64 {
        let values: usize = self.inner.widths.iter().sum();
        (self.inner.settings.rows * (values * size_of::<f32>() + size_of::<i32>())) as u64
    }

    /// The first position.
    pub fn start(&self) -> RowPosition {
        RowPosition { data: self.inner.digest.clone(), pack: 0, epoch: 0, row: 0 }
    }

    /// Streams the packs of a split, starting at a position: an unlimited number of epochs of the training split, or
    /// a single pass over the validation split in file order.
    ///
    /// # Errors
    /// A position of other data, or after the last row; a validation split without rows, or a position other than
    /// [`RowSet::start`] for it.
    pub fn stream(&self, split: Split, from: &RowPosition) -> Result<RowStream, DataError> {
        let rows = self.inner.side(split).len();
        let what = match split {
            _ if from.data != self.inner.digest => {
                "the saved position belongs to other data: the rows, their classes, the seed or the rows of a pack \
                 have changed"
            }
            _ if from.row > rows as u64 => "the saved position is after the last row, so it is damaged",
            _ if from.pack > LARGEST_PACK => "the saved position is after the last pack, so it is damaged",
            Split::Validation if rows == 0 => "there is no validation data; set a validation fraction",
            Split::Validation if *from != self.start() => "validation begins at the start",
            Split::Train | Split::Validation => {
                let order = (0..rows as u32).collect();
                let mut stream =
                    RowStream { set: self.inner.clone(), split, at: from.clone(), order, ended: false };
                stream.shuffle();
                return Ok(stream);
            }
        };
        Err(DataError::new(DataErrorKind::Malformed(what.to_owned())))
    }
}

impl SharedRows {
    fn side(&self, split: Split) -> &[ExampleRow] {
        match split {
            Split::Train => &self.train,
            Split::Validation => &self.validation,
        }
    }

    fn read(&self, row: &ExampleRow, part: usize, out: &mut [f32]) -> Result<(), DataError> {
        let (file, at) = row.places[part];
        self.files[part][file as usize].read(at as usize, out)
    }

    /// Reads every row, checks that its values are finite, and assigns it to the training or validation split by the
    /// hash of its values.
    fn split(&mut self, named: Vec<(String, ExampleRow)>) -> Result<(), DataError> {
        // 2^64 times the fraction: rows whose hash is below this value belong to the validation split.
        let below = (self.settings.validation * 18_446_744_073_709_551_616.0) as u64;
        let mut all = Sha256::new();
        let mut values = vec![0.0; self.widths.iter().copied().max().unwrap_or(0)];
        for (name, row) in named {
            let mut hash = Sha256::new();
            hash.update(self.settings.validation_seed.to_le_bytes());
            for (part, &width) in self.widths.iter().enumerate() {
                let values = &mut values[..width];
                self.read(&row, part, values)?;
                if !values.iter().all(|value| value.is_finite()) {
                    let what = "it contains a NaN or infinite value; compute it again, or remove it".to_owned();
                    let path = &self.settings.parts[part].files[row.places[part].0 as usize];
                    return Err(DataError::at(path, DataErrorKind::Malformed(what)).with_id(name));
                }
                values.iter().for_each(|value| hash.update(value.to_le_bytes()));
            }
            let digest: [u8; 32] = hash.finalize().into();
            all.update(digest);
            all.update(row.class.to_le_bytes());
            let word = digest.iter().take(8).fold(0, |word, &byte| word << 8 | u64::from(byte));
            let (side, rows) = if word < below {
                (&mut self.census.validation, &mut self.validation)
            } else {
                (&mut self.census.train, &mut self.train)
            };
            side.documents += 1;
            side.bytes += 4 * self.widths.iter().sum::<usize>() as u64;
            rows.push(row);
        }
        let RowSettings { validation, seed, rows, .. } = self.settings;
        all.update(format!("{validation} {seed} {rows}"));
        let digest: [u8; 32] = all.finalize().into();
        self.digest = hex(&digest[..16]);
        Ok(())
    }

    /// Returns an error if a split that is needed has no rows.
    fn check(&self) -> Result<(), DataError> {
        let SplitSize { documents: train, .. } = self.census.train;
        let all = self.train.len() + self.validation.len();
        let fraction = self.settings.validation;
        let why = match (train, self.validation.len()) {
            (0, 0) => "no row to train on: the files are empty".to_owned(),
            (0, _) => format!(
                "no row to train on: with the validation fraction {fraction} all {all} are validated on"
            ),
            (_, 0) if fraction > 0.0 => {
                format!(
                    "no row to validate on: with the validation fraction {fraction} all {all} are trained on"
                )
            }
            _ => return Ok(()),
        };
        Err(DataError::at(&self.settings.parts[0].files[0], DataErrorKind::NoData(why)))
    }
}

/// Returns name, class and the locations in all parts of each row of the first part. Errors if a row is missing in
/// another part or has no class.
fn rows(
    settings: &RowSettings,
    files: &mut [Vec<RowFile>],
    labels: &Labels,
) -> Result<Vec<(String, ExampleRow)>, DataError> {
    let mut parts = files.iter_mut().zip(&settings.parts);
    let Some((first, part)) = parts.next() else { return Ok(Vec::new()) };
    let (names, _) = places(first, part)?;
    let mut others = Vec::new();
    for (files, part) in parts {
        others.push((places(files, part)?.1, &part.files[0]));
    }
    let mut rows = Vec::with_capacity(names.len());
    for (name, place) in names {
        let mut places = vec![place];
        for (other, path) in &others {
            let Some(&place) = other.get(&name) else {
                let what = "no row of this name in these files, though in those of the first part";
                return Err(DataError::malformed(path, what).with_id(name.as_str()));
            };
            places.push(place);
        }
        let class = labels.of(&name)?;
        rows.push((name, ExampleRow { class, places }));
    }
    Ok(rows)
}

/// Locations (file, row) of the rows of a part: with their names in file order, and by name.
type RowPlaces = (Vec<(String, (u32, u32))>, HashMap<String, (u32, u32)>);

/// Collects the locations of all rows of a part. Errors if two rows have one name.
fn places(files: &mut [RowFile], part: &RowGroupPart) -> Result<RowPlaces, DataError> {
    let mut order = Vec::new();
    let mut by_name = HashMap::new();
    for (number, (file, path)) in (0..).zip(files.iter_mut().zip(&part.files)) {
        for (row, name) in (0..).zip(std::mem::take(&mut file.names)) {
            if by_name.insert(name.clone(), (number, row)).is_some() {
                let what = format!("a second row '{}'; names are those of one row", Name(&name));
                return Err(DataError::at(path, DataErrorKind::Malformed(what)));
            }
            order.push((name, (number, row)));
        }
    }
    Ok((order, by_name))
}

/// Returns the width of a part's rows; errors if its files differ in width.
fn width(part: &RowGroupPart, files: &[RowFile]) -> Result<usize, DataError> {
    let first = files[0].width();
    match files.iter().zip(&part.files).find(|(file, _)| file.width() != first) {
        Some((file, path)) => {
            Err(DataError::at(path, DataErrorKind::RowWidth { found: file.width(), expected: first }))
        }
        None => Ok(first),
    }
}

/// Number of rows of the next pack of at most `max_rows` rows, if `left` rows of the epoch are left.
fn rows_of_pack(left: u64, max_rows: u64) -> u64 {
    if left == max_rows + 1 && max_rows > 2 { max_rows - 1 } else { left.min(max_rows) }
}

/// Stream of the packs of a split.
pub struct RowStream {
    set: Arc<SharedRows>,
    split: Split,
    at: RowPosition,
    order: Vec<u32>,
    ended: bool,
}

impl RowStream {
    /// Fills `pack` with the next rows, reusing its buffers. Returns `false` and an empty pack at the end of an
    /// epoch. On a training stream the next call starts the next epoch; on a validation stream every further call
    /// returns `false`.
    ///
    /// A pack that would leave a single row for the last pack is one row shorter if packs have more than two rows,
    /// because batch normalization needs the variance of at least two rows.
    pub fn fill(&mut self, pack: &mut RowPack) -> Result<bool, DataError> {
        let RowStream { set, split, at, order, .. } = self;
        let rows = set.side(*split);
        let left = if self.ended { 0 } else { order.len() - at.row as usize };
        let taken = rows_of_pack(left as u64, set.settings.rows as u64) as usize;
        pack.number = at.pack;
        pack.targets.clear();
        pack.parts.resize_with(set.widths.len(), Vec::new);
        let chosen = &order[at.row as usize..][..taken];
        pack.targets.extend(chosen.iter().map(|&row| rows[row as usize].class));
        for (part, (values, &width)) in pack.parts.iter_mut().zip(&set.widths).enumerate() {
            values.resize(taken * width, 0.0);
            for (&row, out) in chosen.iter().zip(values.chunks_exact_mut(width)) {
                set.read(&rows[row as usize], part, out)?;
            }
        }
        at.row += taken as u64;
        at.pack += u64::from(taken > 0);
        if taken == 0 && !self.ended {
            (at.epoch, at.row) = (at.epoch + 1, 0);
            self.ended = *split == Split::Validation;
            self.shuffle();
        }
        pack.position_after = Some(self.at.clone());
        Ok(taken > 0)
    }

    /// Position of the next pack.
    pub fn position(&self) -> &RowPosition {
        &self.at
    }

    /// Sets the order of the rows for the current epoch: a permutation derived from seed and epoch for training, file
    /// order for validation.
    fn shuffle(&mut self) {
        // Sorting first makes the permutation independent of earlier epochs, so a resumed run has the same order.
        self.order.sort_unstable();
        if self.split == Split::Train {
            RandomKey::new(self.set.settings.seed).with(self.at.epoch).shuffle(&mut self.order);
        }
    }
}
