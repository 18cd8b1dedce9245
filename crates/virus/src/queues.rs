//! How large the queues of a prediction are, and what they hold at most. Invariant: results do not depend on it; every size
//! here is the one that the front end, the engine, the journal and the writers are given.

use super::Options;
use super::resume::{EMBEDDINGS, RESULTS};
use data::sequence::Extent;
use graph::Bytes;
use runtime::process::{NAME, Process};
use std::fs;
use std::mem::size_of;
use std::path::PathBuf;

/// Sizes of the queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Queues {
    /// Bases of a job of the front end.
    pub(crate) job_bases: usize,
    /// Chunks, ends of records and notes of a job, for records of few bases or none.
    pub(crate) job_parts: usize,
    /// Items that may wait for one open reading frame, for each device.
    pub(crate) items: usize,
    /// Bytes of sequences and texts that may wait so, for each device.
    pub(crate) bytes: usize,
    /// Bytes of a block of the journal.
    pub(crate) block: usize,
    /// Bytes of lines that are sorted in memory.
    pub(crate) sort: usize,
}

impl Queues {
    /// Those of a run that has memory.
    pub(crate) const USUAL: Self = Self {
        job_bases: 64 << 10,
        job_parts: 1 << 10,
        items: 1 << 16,
        bytes: 32 << 20,
        block: 8 << 20,
        sort: 16 << 20,
    };

    /// From the usual ones down.
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

    /// The part of a line that queues may take, if they can do with less.
    const SHARE: u64 = 8;

    /// Those to try, from the largest that take an eighth of a line down to the least: where a plan does not fit beside larger
    /// ones it may beside smaller ones.
    pub(crate) fn within(
        line: Option<Bytes>,
        options: &Options,
        extent: &Extent,
    ) -> impl Iterator<Item = Self> {
        let [.., least] = Self::SIZES;
        let fits =
            move |queues: &Self| line.is_none_or(|line| queues.held(options, extent) <= line.0 / Self::SHARE);
        Self::SIZES.into_iter().filter(move |queues| *queues == least || fits(queues))
    }

    /// The most that all of them hold, but for what a record holds.
    pub(crate) fn held(&self, options: &Options, extent: &Extent) -> u64 {
        let (workers, prefetch) = (options.workers as u64, options.prefetch as u64);
        // In order, with the workers, before them, being cut, and with the engine.
        let jobs = workers * prefetch + 2 * workers + 3;
        let window = options.length as u64;
        jobs * self.job(options, window, extent) + self.waiting(window, extent) + 3 * self.block as u64
    }

    /// A job when it is tokenized.
    fn job(&self, options: &Options, window: u64, extent: &Extent) -> u64 {
        // A base is in six frames: a token for each in the nucleotide encoder, one for each three in the other. Vectors grow
        // by doubling.
        const TOKENS: u64 = 6 * (4 + 2) * 2;
        let text = if options.keep_intermediate { 2 * (1 + 6 + 2) } else { 0 };
        let bases = self.job_bases as u64 + window;
        bases * (2 + TOKENS + text) + self.parts(window) * self.part(extent)
    }

    fn parts(&self, window: u64) -> u64 {
        self.job_parts as u64 + 2 * self.job_bases as u64 / window.max(1)
    }

    /// A chunk, the end of a record or a note, with its name: an event, an item, and text.
    fn part(&self, extent: &Extent) -> u64 {
        512 + 4 * extent.longest_name
    }

    /// What waits for its scores.
    fn waiting(&self, window: u64, extent: &Extent) -> u64 {
        // The queue doubles its room when it is full.
        let items = 2 * (self.items as u64 + self.parts(window));
        items * size_of::<super::queue::Item>() as u64
            + (self.items as u64 + self.parts(window)) * (128 + 2 * extent.longest_name)
            + self.bytes as u64
    }

    /// Adds the lines of a prediction to those of its process.
    pub(crate) fn bill(&self, options: &Options, extent: &Extent, trained: bool, process: &mut Process) {
        let settings = &options.settings;
        process.add_threads(settings, options.workers + 1);
        process.add_queues(settings, self.held(options, extent));
        // The bases of a record are held once; those of one that may be called virus until it is through, while the next one
        // is read, with its title and, for FASTQ, its qualities. A buffer grows by an eighth.
        let copies = if trained { 3 } else { 1 };
        let letters = if trained && options.hits_format.has_qualities() { 2 } else { 1 };
        let record = copies * (letters * (extent.longest + extent.longest / 8) + 2 * extent.longest_title);
        let name = if extent.name.is_empty() {
            String::new()
        } else {
            format!(" ({})", data::printable::Name(&extent.name))
        };
        process.add(&format!("the longest record{name}"), record + READER);
        process.add("names of records", extent.records * NAME + (64 << 10));
        let sorted = if trained { 3 * self.sort as u64 } else { 0 };
        let embeddings = if options.save_embeddings.is_some() { EMBEDDINGS_HELD } else { 0 };
        process.add("writers", FILES * BUFFER + sorted + embeddings);
        let left = [RESULTS, EMBEDDINGS].map(|name| {
            fs::metadata(options.output_dir.join(name))
                .map_or(0, |file| file.len().min(Self::SIZES[0].block as u64))
        });
        process.add("journals of an earlier run", 3 * left.iter().sum::<u64>());
        if !options.merge.is_empty() {
            // A block of each as stored and as read, and the windows that it covers: runs of them, of some bytes each.
            let shard = |folder: &PathBuf| {
                let bytes = fs::metadata(folder.join(RESULTS)).map_or(0, |file| file.len());
                3 * bytes.min(Self::USUAL.block as u64) + bytes / 64
            };
            process.add("journals of the shards", options.merge.iter().map(shard).sum());
        }
    }
}

/// What a reader holds beside the record: bytes as stored and as text.
const READER: u64 = 1 << 20;

/// Files that are written at a time, and the buffer of each.
const FILES: u64 = 12;
const BUFFER: u64 = 64 << 10;

/// A row group of embeddings, as values and encoded.
const EMBEDDINGS_HELD: u64 = 3 * (16 << 20);
