//! Returns results in input order. Invariant: an item is released once its values and the values of all earlier items
//! have arrived, and an item receives values only once.

use crate::RuntimeError;
use std::collections::VecDeque;

/// Queue of items in insertion order, each waiting for its values.
pub(super) struct InOrder<T> {
    /// Items with their values, oldest first; `None` until the values arrive.
    waiting: VecDeque<(T, Option<Vec<f32>>)>,
    /// Key of the oldest waiting item; keys number the items consecutively from 0.
    first: u64,
    /// Value buffers of released items, for reuse.
    spare: Vec<Vec<f32>>,
}

impl<T> Default for InOrder<T> {
    fn default() -> Self {
        Self { waiting: VecDeque::new(), first: 0, spare: vec![] }
    }
}

impl<T> InOrder<T> {
    /// Key that the next added item will have.
    pub(super) fn next_key(&self) -> u64 {
        self.first + self.waiting.len() as u64
    }

    /// Appends an item; its key is [`InOrder::next_key`].
    pub(super) fn add(&mut self, item: T) {
        self.waiting.push_back((item, None));
    }

    /// Returns the item with the given key and an empty buffer for its values.
    ///
    /// # Errors
    /// The item already has values, or was never added: a bug.
    pub(super) fn values_of(&mut self, key: u64) -> Result<(&T, &mut Vec<f32>), RuntimeError> {
        // Keys are consecutive, so the offset from the oldest key is the position in the queue. A released key is below it.
        let index = key.checked_sub(self.first).map(|index| index as usize);
        match index.and_then(|index| self.waiting.get_mut(index)) {
            Some((item, values @ None)) => {
                let mut buffer = self.spare.pop().unwrap_or_default();
                buffer.clear();
                Ok((item, values.insert(buffer)))
            }
            _ => Err(RuntimeError::bug(format!("sequence {key} has two results"))),
        }
    }

    /// Releases the oldest item with its values; `None` if it has no values yet.
    pub(super) fn pop(&mut self) -> Option<(T, Vec<f32>)> {
        // Checked before anything is changed: the oldest item stays in the queue until its values have arrived.
        self.waiting.front()?.1.as_ref()?;
        self.first += 1;
        let (item, values) = self.waiting.pop_front()?;
        Some((item, values?))
    }

    /// Takes back the buffer of a released item.
    pub(super) fn recycle(&mut self, buffer: Vec<f32>) {
        self.spare.push(buffer);
    }

    /// Number of items released so far.
    pub(super) fn taken(&self) -> u64 {
        self.first
    }

    /// Number of items that were added and not released.
    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }
}
