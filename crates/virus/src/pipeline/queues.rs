//! Sizes of the queues of a prediction and upper bounds of the memory they hold. Invariant: results do not depend on
//! the sizes; the front end, the engine, the journal and the writers use exactly these sizes.

use crate::PredictOptions;
use crate::pipeline::resume::{EMBEDDINGS_JOURNAL, RESULTS_JOURNAL};
use crate::pipeline::shape::HostCosts;
use plimsoll_data::sequence::InputExtent;
use plimsoll_graph::Bytes;
use plimsoll_plan::Staging;
use plimsoll_runtime::process::{NAME, ProcessMemory};
use serde::Serialize;
use std::fs;
use std::mem::size_of;

/// Work of a run whose host memory is planned.
#[derive(Clone, Copy)]
pub(crate) struct HostWork<'a> {
    pub(crate) options: &'a PredictOptions,
    /// Host memory that the method needs.
    pub(crate) costs: HostCosts,
    /// Whether the models were trained; without trained models fewer files are written.
    pub(crate) is_trained: bool,
}

/// Sizes of the queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct QueueSizes {
    /// Bases per job of the front end.
    pub job_bases: usize,
    /// Maximum number of windows, record ends and notes per job, for records with few or no bases.
    pub job_parts: usize,
    /// Number of items per device that may wait behind an incomplete window before partly filled packs are flushed.
    pub items: usize,
    /// Bytes of sequences and texts per device that may wait behind an incomplete window before partly filled
    /// packs are flushed.
    pub bytes: usize,
    /// Size in bytes at which a block of the journal is committed.
    #[serde(rename = "journal_block_bytes")]
    pub block: usize,
    /// Bytes of lines that the sort of `prediction_results_highestscore.csv` holds in memory.
    #[serde(rename = "sorted_bytes")]
    pub sort: usize,
}

/// A choice of queue sizes, with the memory of the process that follows from it.
#[derive(Clone)]
pub(crate) struct QueueCandidate {
    pub(crate) queues: QueueSizes,
    /// Memory lines of the process; empty if host memory has no budget.
    pub(crate) process: Vec<Staging>,
}

impl QueueCandidate {
    /// The only candidate if host memory has no budget.
    pub(crate) const UNLIMITED: Self = Self { queues: QueueSizes::USUAL, process: vec![] };
}

impl QueueSizes {
    /// Sizes for a run without memory pressure.
    pub(crate) const USUAL: Self = Self {
        job_bases: 64 << 10,
        job_parts: 1 << 10,
        items: 1 << 16,
        bytes: 32 << 20,
        block: 8 << 20,
        sort: 16 << 20,
    };

    /// Candidate sizes, largest first.
    const SIZES: [Self; 3] = [
        Self::USUAL,
        Self {
            job_bases: 16 << 10,
            job_parts: 256,
            items: 1 << 13,
            bytes: 4 << 20,
            block: 1 << 20,
            sort: 2 << 20,
        },
        Self {
            job_bases: 4 << 10,
            job_parts: 64,
            items: 1 << 10,
            bytes: 1 << 19,
            block: 1 << 18,
            sort: 1 << 19,
        },
    ];

    /// Queues may take at most 1/`SHARE` of the host budget, unless they have the smallest size.
    const SHARE: u64 = 8;

    /// Returns the candidate sizes that take at most an eighth of the budget, largest first, and always the smallest: a
    /// plan that does not fit next to large queues may fit next to smaller ones.
    pub(crate) fn within(
        host_budget: Option<Bytes>,
        work: HostWork<'_>,
        extent: &InputExtent,
    ) -> impl Iterator<Item = Self> {
        let [.., smallest] = Self::SIZES;
        Self::SIZES.into_iter().filter(move |queues| {
            *queues == smallest
                || host_budget.is_none_or(|budget| queues.bytes_held(work, extent) <= budget.0 / Self::SHARE)
        })
    }

    /// Upper bound in bytes of the memory of all queues, without the records themselves.
    pub(crate) fn bytes_held(&self, work: HostWork<'_>, extent: &InputExtent) -> u64 {
        let options = work.options;
        let workers = options.workers as u64;
        let prefetch = options.prefetch as u64;
        // Jobs that wait in order, are in the workers, are queued for the workers, are being cut, and are in
        // the engine.
        let jobs = workers * prefetch + 2 * workers + 3;
        let window = options.length as u64;
        jobs * self.job_bytes(work.costs, window, extent)
            + self.waiting_bytes(window, extent)
            + 3 * self.block as u64
    }

    /// Upper bound in bytes of a tokenized job.
    fn job_bytes(&self, costs: HostCosts, window: u64, extent: &InputExtent) -> u64 {
        let bases = self.job_bases as u64 + window;
        bases * (2 + costs.token_bytes_per_base + costs.text_bytes_per_base)
            + self.max_parts(window) * self.part_bytes(extent)
    }

    /// Upper bound of the number of windows, record ends and notes in a job.
    fn max_parts(&self, window: u64) -> u64 {
        self.job_parts as u64 + 2 * self.job_bases as u64 / window.max(1)
    }

    /// Upper bound in bytes of a window, record end or note with its name, as event, item and text.
    fn part_bytes(&self, extent: &InputExtent) -> u64 {
        512 + 4 * extent.longest_name
    }

    /// Upper bound in bytes of the items that wait for their scores.
    fn waiting_bytes(&self, window: u64, extent: &InputExtent) -> u64 {
        // The capacity of the queue doubles when it is full.
        let items = 2 * (self.items as u64 + self.max_parts(window));
        items * size_of::<crate::pipeline::queue::OutputItem>() as u64
            + (self.items as u64 + self.max_parts(window)) * (128 + 2 * extent.longest_name)
            + self.bytes as u64
    }

    /// Adds the memory lines of a prediction to the memory lines of the process.
    pub(crate) fn bill(&self, work: HostWork<'_>, extent: &InputExtent, process: &mut ProcessMemory) {
        let HostWork { options, costs, is_trained } = work;
        let settings = &options.settings;
        process.add_threads(settings, options.workers + 1);
        process.add_queues(settings, self.bytes_held(work, extent));
        // The bases of a record are held once. With trained weights a record is held until it is scored, because it may
        // be called virus, while the next one is read; title and FASTQ qualities are held too. Buffers grow by an
        // eighth.
        let copies = costs.waiting_records + if is_trained { 3 } else { 1 };
        let letters = if is_trained && options.hits_format.has_qualities() { 2 } else { 1 };
        let record = copies * (letters * (extent.longest + extent.longest / 8) + 2 * extent.longest_title);
        let name = if extent.name.is_empty() {
            String::new()
        } else {
            format!(" ({})", plimsoll_data::printable::Name(&extent.name))
        };
        process.add(&format!("the longest record{name}"), record + READER_BYTES);
        if costs.bytes_per_window > 0 {
            // Windows that end at runs of unknown letters can be twice as many as those of known letters.
            let windows = 2 * (extent.longest / options.length as u64 + 1);
            process.add("windows of the longest record", windows * costs.bytes_per_window);
        }
        // The names given, and the ids of the input where a record needs another name than its id.
        process.add("names of records", 2 * extent.records * NAME + (64 << 10));
        let sorted = if is_trained { costs.sorted_files * 3 * self.sort as u64 } else { 0 };
        process.add("writers", MAX_OPEN_FILES * FILE_BUFFER_BYTES + sorted + costs.writer_bytes);
        let left = [RESULTS_JOURNAL, EMBEDDINGS_JOURNAL].map(|name| {
            fs::metadata(options.output_dir.join(name))
                .map_or(0, |file| file.len().min(Self::SIZES[0].block as u64))
        });
        process.add("journals of an earlier run", 3 * left.iter().sum::<u64>());
        if !options.merge.is_empty() {
            // For each shard: one block as stored and as decoded, and the list of ranges of windows that the journal
            // covers.
            let mut shards = 0;
            for folder in &options.merge {
                let bytes = fs::metadata(folder.join(RESULTS_JOURNAL)).map_or(0, |file| file.len());
                shards += 3 * bytes.min(Self::USUAL.block as u64) + bytes / 64;
            }
            process.add("journals of the shards", shards);
        }
    }
}

/// Bytes that a reader holds besides the record: compressed input and decompressed text.
const READER_BYTES: u64 = 1 << 20;

/// Maximum number of files written at the same time.
const MAX_OPEN_FILES: u64 = 12;
/// Size of the write buffer of a file in bytes.
const FILE_BUFFER_BYTES: u64 = 64 << 10;
