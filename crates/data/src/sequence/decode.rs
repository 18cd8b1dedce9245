//! Decompresses input, detecting the compression by the first bytes and never by the file name. Invariant: all members
//! of a concatenated stream are read, data behind the last member is an error, every checksum that is present is
//! verified, and memory is bounded whatever the stream requests.

use std::io::{self, BufReader, Read};

use bzip2::bufread::MultiBzDecoder;
use flate2::bufread::MultiGzDecoder;
use lzma_rust2::XzReader;

use super::stored::HashedReader;
use super::zstd::Zstd;

/// Buffer size for the stored bytes of compressed input.
const STORED_BUFFER: usize = 64 << 10;

/// Maximum memory that a stream may request for its decompression: the maximum of `zstd -d` and `xz -9`.
pub(super) const MAX_MEMORY: u64 = 128 << 20;

/// A supported compression format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// `.gz`, also with several members, as bgzip writes it.
    Gzip,
    /// `.bz2`, also with several streams, as pbzip2 writes it.
    Bzip2,
    /// `.zst`, also with several frames, with a window of at most 128 MiB.
    Zstd,
    /// `.xz`, also with several streams, with a dictionary of at most 128 MiB.
    Xz,
}

impl Compression {
    /// Returns the name of the format, which is also the name of its command-line tool.
    pub fn name(self) -> &'static str {
        match self {
            Compression::Gzip => "gzip",
            Compression::Bzip2 => "bzip2",
            Compression::Zstd => "zstd",
            Compression::Xz => "xz",
        }
    }

    /// Detects the compression from `start`, the first six bytes of a file. No sequence file starts with these
    /// signatures.
    pub(crate) fn of(start: &[u8]) -> Option<Self> {
        match start {
            [0x1f, 0x8b, ..] => Some(Compression::Gzip),
            [b'B', b'Z', b'h', b'1'..=b'9', ..] => Some(Compression::Bzip2),
            // A frame, or a skippable frame, which parallel compressors write first.
            [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Some(Compression::Zstd),
            [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => Some(Compression::Xz),
            _ => None,
        }
    }
}

/// The stored bytes together with their decoder.
pub(super) enum Body {
    Plain(HashedReader),
    Gzip(Box<MultiGzDecoder<BufReader<HashedReader>>>),
    Bzip2(Box<MultiBzDecoder<BufReader<HashedReader>>>),
    Zstd(Box<Zstd<BufReader<HashedReader>>>),
    Xz(Box<XzReader<BufReader<HashedReader>>>),
}

impl Body {
    /// Chooses the decoder by the first stored bytes.
    pub(super) fn new(stored: HashedReader) -> Self {
        let Some(compression) = Compression::of(stored.start()) else { return Body::Plain(stored) };
        let stored = BufReader::with_capacity(STORED_BUFFER, stored);
        match compression {
            Compression::Gzip => Body::Gzip(Box::new(MultiGzDecoder::new(stored))),
            Compression::Bzip2 => Body::Bzip2(Box::new(MultiBzDecoder::new(stored))),
            Compression::Zstd => Body::Zstd(Box::new(Zstd::new(stored, MAX_MEMORY))),
            Compression::Xz => {
                // The decoder's limit includes its own tables, which are below 1 MiB.
                let kib = (MAX_MEMORY >> 10) as u32 + 1024;
                Body::Xz(Box::new(XzReader::new_mem_limit(stored, true, kib)))
            }
        }
    }

    /// The compression that was detected; `None` for plain text.
    pub(super) fn compression(&self) -> Option<Compression> {
        match self {
            Body::Plain(_) => None,
            Body::Gzip(_) => Some(Compression::Gzip),
            Body::Bzip2(_) => Some(Compression::Bzip2),
            Body::Zstd(_) => Some(Compression::Zstd),
            Body::Xz(_) => Some(Compression::Xz),
        }
    }

    /// The reader of the stored bytes under the decoder.
    pub(super) fn stored(&self) -> &HashedReader {
        match self {
            Body::Plain(stored) => stored,
            Body::Gzip(decoder) => decoder.get_ref().get_ref(),
            Body::Bzip2(decoder) => decoder.get_ref().get_ref(),
            Body::Zstd(decoder) => decoder.get_ref().get_ref(),
            Body::Xz(decoder) => decoder.inner().get_ref(),
        }
    }

    /// Removes the decoder and returns the reader of the stored bytes.
    pub(super) fn into_stored(self) -> HashedReader {
        match self {
            Body::Plain(stored) => stored,
            Body::Gzip(decoder) => decoder.into_inner().into_inner(),
            Body::Bzip2(decoder) => decoder.into_inner().into_inner(),
            Body::Zstd(decoder) => decoder.into_inner().into_inner(),
            Body::Xz(decoder) => decoder.into_inner().into_inner(),
        }
    }
}

impl Read for Body {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        match self {
            Body::Plain(stored) => stored.read(out),
            Body::Gzip(decoder) => decoder.read(out),
            Body::Bzip2(decoder) => decoder.read(out),
            Body::Zstd(decoder) => decoder.read(out),
            Body::Xz(decoder) => decoder.read(out),
        }
    }
}
