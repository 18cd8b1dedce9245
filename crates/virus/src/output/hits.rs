//! Writer of the records called virus, with their titles, scores and calls. Invariant: letters and qualities
//! are written unchanged; equal runs write equal bytes, also in compressed formats.

use super::OutputError;
use flate2::write::GzEncoder;
use flate2::{Compression, GzBuilder};
use plimsoll_data::atomic::AtomicFile;
use plimsoll_data::intermediate::write_lines;
use std::io::{self, Write};
use std::path::Path;

/// Format of the file of records called virus.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HitsFormat {
    /// `virus.fna`: FASTA with lines of 60 letters.
    #[default]
    Fasta,
    /// `virus.fastq`: FASTQ; requires FASTQ input.
    Fastq,
    /// `virus.fna.gz`: as `Fasta`, compressed with gzip.
    FastaGz,
    /// `virus.fastq.gz`: as `Fastq`, compressed with gzip.
    FastqGz,
}

impl HitsFormat {
    /// Name of the format: the value of `--hits-format`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fasta => "fasta",
            Self::Fastq => "fastq",
            Self::FastaGz => "fasta.gz",
            Self::FastqGz => "fastq.gz",
        }
    }

    /// Name of the file.
    pub const fn file(self) -> &'static str {
        match self {
            Self::Fasta => "virus.fna",
            Self::Fastq => "virus.fastq",
            Self::FastaGz => "virus.fna.gz",
            Self::FastqGz => "virus.fastq.gz",
        }
    }

    /// Whether the format stores qualities.
    pub(crate) fn has_qualities(self) -> bool {
        matches!(self, Self::Fastq | Self::FastqGz)
    }

    fn is_compressed(self) -> bool {
        matches!(self, Self::FastaGz | Self::FastqGz)
    }
}

/// Text of an input record other than its id, for the file of records called virus.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecordText {
    /// Description: the rest of the title line after the id.
    pub description: Vec<u8>,
    /// Letters of the sequence.
    pub sequence: Vec<u8>,
    /// FASTQ qualities, one byte per letter; empty for FASTA input.
    pub quality: Vec<u8>,
}

impl RecordText {
    /// Total length in bytes.
    pub fn bytes(&self) -> usize {
        self.description.len() + self.sequence.len() + self.quality.len()
    }
}

/// A record or region that is written to the file of records called virus.
#[derive(Clone, Copy, Debug)]
pub struct Hit<'a> {
    /// Name of the record or region.
    pub id: &'a str,
    /// Description, letters and qualities.
    pub text: &'a RecordText,
    /// The score, as in the tables.
    pub score: &'a str,
    /// The call, as in the tables.
    pub call: &'a str,
}

/// Writer of the file of records called virus.
pub struct Hits {
    format: HitsFormat,
    writer: HitsStream,
}

enum HitsStream {
    Plain(AtomicFile),
    // Boxed because the compressor's state is much larger than the other variant.
    Gzip(Box<GzEncoder<AtomicFile>>),
}

impl Hits {
    /// Creates the file in `folder`.
    pub fn create(folder: &Path, format: HitsFormat) -> Result<Self, OutputError> {
        let file = AtomicFile::create(folder.join(format.file()))?;
        let writer = if format.is_compressed() {
            // The default gzip header has no file name and a modification time of 0, so equal runs write equal
            // bytes.
            HitsStream::Gzip(Box::new(GzBuilder::new().write(file, Compression::default())))
        } else {
            HitsStream::Plain(file)
        };
        Ok(Self { format, writer })
    }

    /// Writes a record with the title `ID DESCRIPTION virus_score=0.987654 prediction=virus`.
    ///
    /// # Errors
    /// A FASTQ format and a record with a different number of qualities than letters; a file that cannot be
    /// written.
    pub fn write(&mut self, hit: &Hit<'_>) -> Result<(), OutputError> {
        let qualities = self.format.has_qualities();
        let RecordText { sequence, quality, .. } = hit.text;
        if qualities && quality.len() != sequence.len() {
            let what = format!("{} qualities for {} letters", quality.len(), sequence.len());
            return Err(OutputError::mismatch(hit.id, what));
        }
        let written = match &mut self.writer {
            HitsStream::Plain(file) => write_record(file, qualities, hit),
            HitsStream::Gzip(file) => write_record(&mut **file, qualities, hit),
        };
        written.map_err(|error| self.file().error(error).into())
    }

    /// Finishes the compressed stream, if any, and returns the file, ready to be committed.
    pub fn into_file(mut self) -> Result<AtomicFile, OutputError> {
        if let HitsStream::Gzip(file) = &mut self.writer
            && let Err(error) = file.try_finish()
        {
            return Err(self.file().error(error).into());
        }
        match self.writer {
            HitsStream::Plain(file) => Ok(file),
            HitsStream::Gzip(file) => {
                file.finish().map_err(|source| OutputError::Folder { path: self.format.file().into(), source })
            }
        }
    }

    fn file(&self) -> &AtomicFile {
        match &self.writer {
            HitsStream::Plain(file) => file,
            HitsStream::Gzip(file) => file.get_ref(),
        }
    }
}

fn write_record(out: &mut impl Write, qualities: bool, hit: &Hit<'_>) -> io::Result<()> {
    let Hit { id, text, score, call } = *hit;
    out.write_all(if qualities { b"@" } else { b">" })?;
    out.write_all(id.as_bytes())?;
    if !text.description.is_empty() {
        out.write_all(b" ")?;
        out.write_all(&text.description)?;
    }
    writeln!(out, " virus_score={score} prediction={call}")?;
    if qualities {
        for part in [&text.sequence[..], b"\n+\n", &text.quality, b"\n"] {
            out.write_all(part)?;
        }
        return Ok(());
    }
    write_lines(out, &text.sequence)
}
