//! Spans of the frames of a sequence: attention of a caller stays within one reading frame, and a sequence holds all
//! frames of a window, which are equally long. Invariant: the frames of a sequence cover it without gaps, in order.

use crate::RuntimeError;
use plimsoll_graph::Dim;
use plimsoll_plan::{InputId, Program};

/// The input `frames` of a plan: i32 (n S, 2), the first row and the row after the last of every frame.
#[derive(Clone, Copy, Debug)]
pub(super) struct FramesInput {
    pub(super) input: InputId,
    /// n, the number of frames of a sequence.
    pub(super) count: usize,
}

impl FramesInput {
    /// The input of a plan; `None` if the plan's graph has no frames.
    pub(super) fn of(program: &Program, plan: usize) -> Option<Self> {
        let input = program.input(plan, "frames")?;
        match program.plans()[plan].1.graph.spec(input.value).shape.first() {
            Some(&Dim::Sequences(count)) => Some(Self { input, count: count as usize }),
            Some(Dim::Fixed(_) | Dim::Tokens(_) | Dim::Packs(_)) | None => None,
        }
    }

    /// The frames of all sequences with these spans.
    pub(super) fn of_spans(self, spans: &[[i32; 2]]) -> impl Iterator<Item = [i32; 2]> + '_ {
        let count = self.count as i32;
        spans.iter().flat_map(move |&[start, end]| {
            // Exact: `check` has refused sequences that do not divide.
            let length = (end - start) / count;
            (0..count).map(move |frame| [start + frame * length, start + (frame + 1) * length])
        })
    }

    /// An error if a sequence of `tokens` tokens cannot be divided into frames of equal length.
    pub(super) fn check(self, tokens: usize) -> Result<(), RuntimeError> {
        if tokens.is_multiple_of(self.count) {
            Ok(())
        } else {
            Err(RuntimeError::bug(format!(
                "a sequence of {tokens} tokens does not have {} frames of equal length",
                self.count
            )))
        }
    }
}
