//! Decoder for a zstd stream: frames in sequence, with skippable frames between them (RFC 8878, 3.1). Invariant: the
//! stream ends at the end of a frame, and a frame's checksum, if present, matches its content.

use std::error::Error;
use std::io::{self, BufRead, ErrorKind, Read};

use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

/// Decompresses all frames of `stored`; `FrameDecoder` decodes only one frame.
pub(super) struct Zstd<R> {
    stored: R,
    frame: FrameDecoder,
    /// Whether a frame was started and has not ended.
    open: bool,
}

impl<R: BufRead> Zstd<R> {
    /// Creates a decoder; a frame with a window of more than `most_window` bytes is an error.
    pub(super) fn new(stored: R, most_window: u64) -> Self {
        let mut frame = FrameDecoder::new();
        frame.set_max_window_size(most_window);
        Zstd { stored, frame, open: false }
    }

    pub(super) fn get_ref(&self) -> &R {
        &self.stored
    }

    pub(super) fn into_inner(self) -> R {
        self.stored
    }

    /// Starts the next frame; returns false for a skippable frame, which is consumed.
    fn begin(&mut self) -> io::Result<bool> {
        use FrameDecoderError::ReadFrameHeaderError as Header;
        let length = match self.frame.reset(&mut self.stored) {
            Ok(()) => return Ok(true),
            Err(Header(ReadFrameHeaderError::SkipFrame { length, .. })) => u64::from(length),
            Err(e) => return Err(wrong(e)),
        };
        let skipped = io::copy(&mut self.stored.by_ref().take(length), &mut io::sink())?;
        if skipped < length { Err(ErrorKind::UnexpectedEof.into()) } else { Ok(false) }
    }

    /// Decodes some bytes of the current frame; returns 0 at its end.
    fn inside(&mut self, out: &mut [u8]) -> io::Result<usize> {
        while self.frame.can_collect() == 0 && !self.frame.is_finished() {
            let one = BlockDecodingStrategy::UptoBlocks(1);
            self.frame.decode_blocks(&mut self.stored, one).map_err(wrong)?;
        }
        self.frame.read(out)
    }

    /// Compares the frame's checksum, if it has one, with that of the decoded content.
    fn check(&self) -> io::Result<()> {
        match self.frame.get_checksum_from_data() {
            Some(sum) if self.frame.get_calculated_checksum() != Some(sum) => Err(io::Error::new(
                ErrorKind::InvalidData,
                "the checksum of a frame is not that of its content",
            )),
            Some(_) | None => Ok(()),
        }
    }
}

impl<R: BufRead> Read for Zstd<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if out.is_empty() {
            return Ok(0);
        }
        loop {
            if self.open {
                let n = self.inside(out)?;
                if n > 0 {
                    return Ok(n);
                }
                self.check()?;
                self.open = false;
            }
            if self.stored.fill_buf()?.is_empty() {
                return Ok(0);
            }
            self.open = self.begin()?;
        }
    }
}

/// Converts a decoder error to an I/O error. Its kind is `OutOfMemory` (window too large), `Unsupported` (missing
/// dictionary), the kind of the I/O error that caused it (such as the end of the file), or `InvalidData`.
fn wrong(e: FrameDecoderError) -> io::Error {
    let kind = match &e {
        FrameDecoderError::WindowSizeTooBig { .. } => ErrorKind::OutOfMemory,
        FrameDecoderError::DictNotProvided { .. } => ErrorKind::Unsupported,
        other => below(other).unwrap_or(ErrorKind::InvalidData),
    };
    io::Error::new(kind, e)
}

/// Returns the kind of the I/O error among the causes of `e`.
fn below(e: &(dyn Error + 'static)) -> Option<ErrorKind> {
    match e.downcast_ref::<io::Error>() {
        Some(e) => Some(e.kind()),
        None => below(e.source()?),
    }
}
