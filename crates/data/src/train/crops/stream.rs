//! Streams of packs of crops. Invariant: a crop is a function of the seed, the split and its index alone; crops enter
//! packs in the order of their indices, so the packs do not depend on the number of workers, and a stream started at
//! the position after a pack continues with the next pack.
//!
//! Worker `w` of `n` makes the parcels w, w + n, w + 2n and so on; the consumer receives parcels from the workers in turn.
//! Parcels return to the worker that made them, so a worker without a free parcel waits.

use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use serde::{Deserialize, Serialize};

use super::super::mask::TokenMasking;
use super::super::random::RandomKey;
use super::super::settings::{MaskRates, PackLimits};
use super::super::split::Split;
use super::super::stream::lost;
use super::draw::{self, CropChange, Cropper};
use super::mask_bases::BaseMasker;
use super::settings::{CropObjective, Mutations};
use super::{LabelledRecord, SharedCrops};
use crate::limits::spawn;
use crate::{DataError, DataErrorKind};

/// Key words of the crops of each split ("trai" and "vali" in ASCII).
const TRAIN: u64 = 0x7472_6169;
const VALIDATION: u64 = 0x7661_6c69;

/// Key words that separate the draws of a crop.
const LENGTH: u64 = 1;
const RECORD: u64 = 2;
const LETTERS: u64 = 3;
const IS_SHUFFLED: u64 = 4;
const MASKS: u64 = 5;

/// Number of tokens of a parcel, unless a single crop has more.
const PARCEL: usize = 1 << 16;
/// Maximum number of crops of a parcel.
const CROPS: usize = 64;

/// Number of crops in succession without a target after which a stream ends with an error. Without it, a stream of data
/// without targets would never return.
const SKIPPED: u64 = 1 << 16;

/// A pack of S crops with T tokens. Its buffers are reused.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CropPack {
    /// Global pack number: number of the pack in the run, from 0. After the last validation crop, where the pack is empty,
    /// the number of the next pack.
    pub number: u64,
    /// Token ids of all crops, concatenated: (T).
    pub ids: Vec<i32>,
    /// Start and end of each crop in `ids`, the end exclusive: (S, 2). A crop has all its frames.
    pub spans: Vec<[i32; 2]>,
    /// Classification: for each task the class of each crop, -1 where it has no target, (S). Masked tokens: one vector
    /// with the target id of each token, -100 where nothing is predicted, (T).
    pub targets: Vec<Vec<i32>>,
    /// Number of targets in each vector of `targets` that contribute to the loss.
    pub target_counts: Vec<u64>,
    /// Length of each crop in bases: (S).
    pub bases: Vec<u32>,
    /// Position in the data after this pack; `None` until the pack is filled for the first time.
    pub position_after: Option<CropPosition>,
}

/// Position in the crops of a split, stored in checkpoints.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CropPosition {
    /// Digest of the data set ([`CropSet::digest`](super::CropSet::digest)) for which the position is valid.
    pub data: String,
    /// Global pack number of the next pack: the number of packs of the run before it.
    pub pack: u64,
    /// Index of the next crop.
    pub crop: u64,
}

/// Counters of a stream since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CropCounts {
    /// Number of packs.
    pub packs: u64,
    /// Number of crops in the packs.
    pub crops: u64,
    /// Number of bases of these crops.
    pub bases: u64,
    /// Number of tokens.
    pub tokens: u64,
    /// Number of targets that contribute to the loss, in all tasks.
    pub targets: u64,
    /// Number of crops that were skipped because they have no target.
    pub skipped: u64,
}

impl CropPack {
    /// An empty pack with buffers that are large enough for the bounds.
    pub(super) fn with_capacity(bounds: &PackLimits, objective: CropObjective, tasks: usize) -> Self {
        let (vectors, length) = shape(bounds, objective, tasks);
        CropPack {
            number: 0,
            ids: Vec::with_capacity(bounds.tokens),
            spans: Vec::with_capacity(bounds.sequences),
            targets: (0..vectors).map(|_| Vec::with_capacity(length)).collect(),
            target_counts: vec![0; vectors],
            bases: Vec::with_capacity(bounds.sequences),
            position_after: None,
        }
    }

    /// Bytes of the buffers of a pack.
    pub(super) fn bytes(bounds: &PackLimits, objective: CropObjective, tasks: usize) -> u64 {
        let (vectors, length) = shape(bounds, objective, tasks);
        let vector = length * size_of::<i32>() + size_of::<Vec<i32>>() + size_of::<u64>();
        let crop = size_of::<[i32; 2]>() + size_of::<u32>();
        (bounds.tokens * size_of::<i32>() + bounds.sequences * crop + vectors * vector) as u64
    }

    /// Clears the contents and keeps the buffers.
    fn clear(&mut self, vectors: usize) {
        self.ids.clear();
        self.spans.clear();
        self.bases.clear();
        self.targets.resize_with(vectors, Vec::new);
        self.targets.iter_mut().for_each(Vec::clear);
        self.target_counts.clear();
        self.target_counts.resize(vectors, 0);
    }
}

/// Number of target vectors of a pack, and their maximum length.
fn shape(bounds: &PackLimits, objective: CropObjective, tasks: usize) -> (usize, usize) {
    match objective {
        CropObjective::Classify => (tasks, bounds.sequences),
        CropObjective::Masked(_) | CropObjective::MaskedBases { .. } => (1, bounds.tokens),
    }
}

/// Crops of consecutive indices.
struct Parcel {
    crops: Vec<ParcelCrop>,
    /// Tokens of all crops, concatenated.
    ids: Vec<i32>,
    /// Masked tokens: the target of each token.
    targets: Vec<i32>,
}

/// A crop of a parcel.
struct ParcelCrop {
    /// End of its tokens in the parcel; they start at the end of the crop before.
    end: usize,
    bases: u32,
    /// Index of its record among those of the split.
    record: u32,
    is_shuffled: bool,
    /// Masked tokens: number of targets.
    masked: u64,
}

impl Parcel {
    fn new(inner: &SharedCrops) -> Self {
        let tokens = parcel_crops(inner) * inner.longest_tokens();
        let masked = inner.settings.objective != CropObjective::Classify;
        Parcel {
            crops: Vec::with_capacity(parcel_crops(inner)),
            ids: Vec::with_capacity(tokens),
            targets: Vec::with_capacity(if masked { tokens } else { 0 }),
        }
    }
}

/// Number of crops of a parcel.
fn parcel_crops(inner: &SharedCrops) -> usize {
    (PARCEL / inner.longest_tokens()).clamp(1, CROPS)
}

/// Bytes of the parcels and of the buffers of the workers of a stream.
pub(super) fn bytes(inner: &SharedCrops) -> [u64; 2] {
    let settings = &inner.settings;
    let vectors = match settings.objective {
        CropObjective::Classify => 1,
        CropObjective::Masked(_) | CropObjective::MaskedBases { .. } => 2,
    };
    let tokens = vectors * inner.longest_tokens() * size_of::<i32>();
    let parcel = parcel_crops(inner) * (tokens + size_of::<ParcelCrop>());
    let parcels = settings.workers * (parcels_of_worker(settings.prefetch) * (parcel + size_of::<Parcel>()));
    let worker = CropMaker::bytes(inner) + CHANNELS;
    [parcels as u64, (settings.workers * worker) as u64]
}

/// Allowance in bytes for the channels of a worker and the handle of its thread.
const CHANNELS: usize = 4096;

/// Number of parcels of a worker: one that it makes, one with the consumer, and `prefetch` between them.
fn parcels_of_worker(prefetch: usize) -> usize {
    2 + prefetch
}

/// Makes the crops of a split.
struct CropMaker {
    inner: Arc<SharedCrops>,
    split: Split,
    cropper: Cropper,
    masker: Masker,
}

/// Masking of a crop, with its buffers.
enum Masker {
    Nothing,
    Tokens {
        rates: MaskRates,
        /// Tokens of a crop before they are masked.
        tokens: Vec<i32>,
        /// Ids that may be masked.
        ordinary: Vec<i32>,
    },
    Bases(BaseMasker),
}

impl CropMaker {
    fn new(inner: Arc<SharedCrops>, split: Split) -> Self {
        let longest = inner.settings.longest_crop();
        let tokens = inner.settings.tokens;
        let masker = match inner.settings.objective {
            CropObjective::Classify => Masker::Nothing,
            CropObjective::Masked(rates) => Masker::Tokens {
                rates,
                tokens: Vec::with_capacity(inner.longest_tokens()),
                ordinary: tokens.ordinary(),
            },
            CropObjective::MaskedBases { rates, span } => {
                Masker::Bases(BaseMasker::new(tokens, rates, span, longest))
            }
        };
        CropMaker { split, cropper: Cropper::new(longest), masker, inner }
    }

    fn bytes(inner: &SharedCrops) -> usize {
        let longest = inner.settings.longest_crop();
        let tokens = inner.settings.tokens;
        let masker = match inner.settings.objective {
            CropObjective::Classify => 0,
            CropObjective::Masked(_) => (inner.longest_tokens() + tokens.vocabulary()) * size_of::<i32>(),
            CropObjective::MaskedBases { .. } => BaseMasker::bytes(tokens, longest),
        };
        Cropper::bytes(longest) + masker
    }

    /// Replaces the contents of a parcel by the crops of a range of indices.
    fn fill(&mut self, parcel: &mut Parcel, crops: Range<u64>) {
        parcel.crops.clear();
        parcel.ids.clear();
        parcel.targets.clear();
        crops.for_each(|index| self.push(parcel, index));
    }

    /// Appends the crop of an index to a parcel.
    fn push(&mut self, parcel: &mut Parcel, index: u64) {
        let CropMaker { inner, split, cropper, masker } = self;
        let settings = &inner.settings;
        let split_word = match split {
            Split::Train => TRAIN,
            Split::Validation => VALIDATION,
        };
        let key = RandomKey::new(settings.seed).with(split_word).with(index);
        let (length, sampler, change) = match split {
            Split::Train => {
                let length = draw::length(settings.shortest, settings.longest, key.with(LENGTH));
                let shuffled = key.with(IS_SHUFFLED).unit() < settings.shuffled.share;
                let change =
                    if shuffled { CropChange::Shuffled } else { CropChange::Mutated(settings.mutations) };
                (length, &inner.samplers[0], change)
            }
            Split::Validation => {
                let at = inner.validation_length(index);
                (
                    inner.validation_lengths()[at],
                    &inner.samplers[1 + at],
                    CropChange::Mutated(Mutations::default()),
                )
            }
        };
        let record = sampler.draw(key.with(RECORD));
        let LabelledRecord { packed, .. } = &inner.records(*split)[record as usize];
        let length = length.min(packed.len());
        let letters = cropper.make(packed, length, change, key.with(LETTERS));
        let masked = match masker {
            Masker::Nothing => {
                settings.tokens.encode(letters, &mut parcel.ids);
                0
            }
            Masker::Bases(masker) => {
                let Parcel { ids, targets, .. } = parcel;
                masker.push(settings.tokens, letters, key.with(MASKS), ids, targets)
            }
            Masker::Tokens { rates, tokens, ordinary } => {
                tokens.clear();
                settings.tokens.encode(letters, tokens);
                let masking = TokenMasking { rates: *rates, mask: settings.tokens.mask(), ordinary };
                masking.push(tokens, 0, key.with(MASKS), &mut parcel.ids, &mut parcel.targets)
            }
        };
        parcel.crops.push(ParcelCrop {
            end: parcel.ids.len(),
            bases: length as u32,
            record,
            is_shuffled: change == CropChange::Shuffled,
            masked,
        });
    }
}

/// A worker as the consumer sees it.
struct CropWorker {
    made: Receiver<Parcel>,
    free: SyncSender<Parcel>,
    thread: JoinHandle<()>,
}

/// Stream of the packs of a split. Its own threads make crops ahead.
pub struct CropStream {
    inner: Arc<SharedCrops>,
    split: Split,
    workers: Vec<CropWorker>,
    /// The worker from which the next parcel is received.
    next: usize,
    /// The parcel that is partly consumed, and the number of its consumed crops.
    parcel: Option<(Parcel, usize)>,
    at: CropPosition,
    counts: CropCounts,
    /// Number of crops in succession without a target.
    skipped: u64,
    ended: bool,
}

impl CropStream {
    pub(super) fn new(inner: Arc<SharedCrops>, split: Split, from: CropPosition) -> Result<Self, DataError> {
        let settings = &inner.settings;
        let crops = parcel_crops(&inner) as u64;
        let end = inner.crops(split);
        let count = settings.workers as u64;
        let prefetch = settings.prefetch;
        let mut workers = Vec::with_capacity(settings.workers);
        for worker in 0..count {
            // The channels hold all parcels of the worker, so sending never waits.
            let (done, made) = sync_channel(parcels_of_worker(prefetch));
            let (free, pool) = sync_channel::<Parcel>(parcels_of_worker(prefetch));
            for _ in 0..parcels_of_worker(prefetch) {
                let _ = free.send(Parcel::new(&inner));
            }
            let mut maker = CropMaker::new(inner.clone(), split);
            let first = from.crop + worker * crops;
            let work = move || {
                let starts = (first..end).step_by((count * crops) as usize);
                for (start, mut parcel) in starts.zip(pool) {
                    maker.fill(&mut parcel, start..(start + crops).min(end));
                    if done.send(parcel).is_err() {
                        break;
                    }
                }
            };
            let thread = spawn("crops", work).map_err(|e| DataError::new(DataErrorKind::Thread(e)))?;
            workers.push(CropWorker { made, free, thread });
        }
        let counts = CropCounts::default();
        let parcel = None;
        Ok(CropStream { inner, split, workers, next: 0, parcel, at: from, counts, skipped: 0, ended: false })
    }

    /// Fills `pack` with the next pack, reusing its buffers. Returns `false` and an empty pack after the last
    /// validation crop; a training stream has no end.
    ///
    /// # Errors
    /// Many crops in succession without a target. After an error the stream has ended and returns `false`.
    pub fn fill(&mut self, pack: &mut CropPack) -> Result<bool, DataError> {
        let settings = &self.inner.settings;
        pack.clear(shape(&settings.bounds, settings.objective, settings.tasks.len()).0);
        pack.number = self.at.pack;
        let filled = if self.ended { Ok(()) } else { self.fill_from_parcels(pack) };
        self.ended |= filled.is_err() || pack.spans.is_empty();
        match &mut pack.position_after {
            Some(position) => {
                // `clone_from` of the position itself would allocate its digest anew.
                position.data.clone_from(&self.at.data);
                position.pack = self.at.pack;
                position.crop = self.at.crop;
            }
            none => *none = Some(self.at.clone()),
        }
        filled.map(|()| !pack.spans.is_empty())
    }

    /// The position of the next pack.
    pub fn position(&self) -> &CropPosition {
        &self.at
    }

    /// The counters since the stream was opened.
    pub fn counts(&self) -> CropCounts {
        self.counts
    }

    /// Moves crops into the pack until the next one does not fit or the split ends.
    fn fill_from_parcels(&mut self, pack: &mut CropPack) -> Result<(), DataError> {
        let end = self.inner.crops(self.split);
        while self.at.crop < end {
            let (parcel, consumed) = match self.parcel.take() {
                Some(parcel) => parcel,
                None => (self.workers[self.next].made.recv().map_err(|_| lost())?, 0),
            };
            if consumed == parcel.crops.len() {
                // Fails only if the worker has ended because it has no more parcels to make.
                let _ = self.workers[self.next].free.send(parcel);
                self.next = (self.next + 1) % self.workers.len();
                continue;
            }
            let fits = self.take(&parcel, consumed, pack);
            self.parcel = Some((parcel, consumed + usize::from(fits)));
            if !fits {
                break;
            }
            self.at.crop += 1;
            if self.skipped >= SKIPPED {
                return Err(self.without_targets());
            }
        }
        let packs = u64::from(!pack.spans.is_empty());
        self.counts.packs += packs;
        self.at.pack += packs;
        Ok(())
    }

    /// Adds a crop of a parcel to the pack, or skips it if it has no target and would therefore cost time and contribute no
    /// gradient. Returns whether it is consumed; it is not if it does not fit.
    fn take(&mut self, parcel: &Parcel, at: usize, pack: &mut CropPack) -> bool {
        let inner = &self.inner;
        let PackLimits { tokens, sequences, .. } = inner.settings.bounds;
        let made = &parcel.crops[at];
        let start = at.checked_sub(1).map_or(0, |before| parcel.crops[before].end);
        let targets: &[i32] = match (inner.settings.objective, made.is_shuffled) {
            (CropObjective::Masked(_) | CropObjective::MaskedBases { .. }, _) => &[],
            (CropObjective::Classify, true) => &inner.shuffled,
            (CropObjective::Classify, false) => &inner.records(self.split)[made.record as usize].targets,
        };
        let is_needed = self.split == Split::Train && inner.settings.unlabelled;
        if made.masked == 0 && targets.iter().all(|&target| target < 0) && !is_needed {
            self.counts.skipped += 1;
            self.skipped += 1;
            return true;
        }
        if pack.spans.len() == sequences || pack.ids.len() + made.end - start > tokens {
            return false;
        }
        let first = pack.ids.len() as i32;
        pack.ids.extend_from_slice(&parcel.ids[start..made.end]);
        pack.spans.push([first, pack.ids.len() as i32]);
        pack.bases.push(made.bases);
        match inner.settings.objective {
            CropObjective::Classify => {
                let vectors = pack.targets.iter_mut().zip(&mut pack.target_counts);
                for ((vector, count), &target) in vectors.zip(targets) {
                    vector.push(target);
                    *count += u64::from(target >= 0);
                    self.counts.targets += u64::from(target >= 0);
                }
            }
            CropObjective::Masked(_) | CropObjective::MaskedBases { .. } => {
                pack.targets[0].extend_from_slice(&parcel.targets[start..made.end]);
                pack.target_counts[0] += made.masked;
                self.counts.targets += made.masked;
            }
        }
        self.skipped = 0;
        self.counts.crops += 1;
        self.counts.bases += u64::from(made.bases);
        self.counts.tokens += (made.end - start) as u64;
        true
    }

    fn without_targets(&self) -> DataError {
        let why = match self.inner.settings.objective {
            CropObjective::Classify => {
                "its records have ? in every task; give classes, or sample other records"
            }
            CropObjective::Masked(_) | CropObjective::MaskedBases { .. } => {
                "its records have no known codons; check the files"
            }
        };
        let what = format!("{SKIPPED} crops in succession have no target: {why}");
        DataError::at(&self.inner.settings.table, DataErrorKind::NoData(what))
    }
}

impl Drop for CropStream {
    fn drop(&mut self) {
        // Both channel ends of a worker are dropped before the join: a worker that waits on a channel wakes up and ends
        // only when the opposite end is gone.
        for CropWorker { made, free, thread } in self.workers.drain(..) {
            drop((made, free));
            // `join` fails if the thread panicked; the panic hook has already printed the message.
            let _ = thread.join();
        }
    }
}
