//! A zstd stream: frames one after the other, and frames to be skipped between them (RFC 8878, 3.1).
//! Invariant: the stream ends where a frame ends, and a frame's checksum, if it has one, is that of its
//! content.

use std::error::Error;
use std::io::{self, BufRead, ErrorKind, Read};

use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

/// Decompresses all frames of `stored`; the decoder below knows one.
pub(super) struct Zstd<R> {
    stored: R,
    frame: FrameDecoder,
    /// Whether a frame was begun and has not ended.
    open: bool,
}

impl<R: BufRead> Zstd<R> {
    /// Frames with a window of more bytes than `most_window` are errors.
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

    /// Begins the next frame; false if it was one to be skipped, which then is behind.
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

    /// Some bytes of the frame; 0 at its end.
    fn inside(&mut self, out: &mut [u8]) -> io::Result<usize> {
        while self.frame.can_collect() == 0 && !self.frame.is_finished() {
            let one = BlockDecodingStrategy::UptoBlocks(1);
            self.frame.decode_blocks(&mut self.stored, one).map_err(wrong)?;
        }
        self.frame.read(out)
    }

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

/// What kind of error it is: too much memory, a dictionary that is not there, the end of the file (or
/// another error of it) below the decoder, or wrong data.
fn wrong(e: FrameDecoderError) -> io::Error {
    let kind = match &e {
        FrameDecoderError::WindowSizeTooBig { .. } => ErrorKind::OutOfMemory,
        FrameDecoderError::DictNotProvided { .. } => ErrorKind::Unsupported,
        other => below(other).unwrap_or(ErrorKind::InvalidData),
    };
    io::Error::new(kind, e)
}

fn below(e: &(dyn Error + 'static)) -> Option<ErrorKind> {
    match e.downcast_ref::<io::Error>() {
        Some(e) => Some(e.kind()),
        None => below(e.source()?),
    }
}
