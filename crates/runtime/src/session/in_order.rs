//! Results in the order of the input. Invariant: an item leaves when its values and those of all items before it are there,
//! and no item has values twice.

use crate::RuntimeError;
use std::collections::VecDeque;

/// Items that wait for their values, in the order in which they were added.
pub struct InOrder<T> {
    waiting: VecDeque<(T, Option<Vec<f32>>)>,
    /// The key of the oldest item: keys count items.
    first: u64,
    /// Buffers of values that were taken.
    spare: Vec<Vec<f32>>,
}

impl<T> Default for InOrder<T> {
    fn default() -> Self {
        Self { waiting: VecDeque::new(), first: 0, spare: vec![] }
    }
}

impl<T> InOrder<T> {
    /// The key of the item that is added next.
    pub fn next_key(&self) -> u64 {
        self.first + self.waiting.len() as u64
    }

    /// Adds an item with the key [`InOrder::next_key`].
    pub fn add(&mut self, item: T) {
        self.waiting.push_back((item, None));
    }

    /// An empty buffer for the values of an item, and the item.
    ///
    /// # Errors
    /// A fault of this program: the item has values already, or was never added.
    pub fn values_of(&mut self, key: u64) -> Result<(&T, &mut Vec<f32>), RuntimeError> {
        let at = key.checked_sub(self.first).map(|at| at as usize);
        match at.and_then(|at| self.waiting.get_mut(at)) {
            Some((item, values @ None)) => {
                let mut buffer = self.spare.pop().unwrap_or_default();
                buffer.clear();
                Ok((item, values.insert(buffer)))
            }
            _ => Err(RuntimeError::bug(format!("sequence {key} has two results"))),
        }
    }

    /// Gives the oldest items with their values to `take`, up to the first that has none.
    ///
    /// # Errors
    /// The error of `take`.
    pub fn take<E>(&mut self, mut take: impl FnMut(&T, &[f32]) -> Result<(), E>) -> Result<(), E> {
        while let Some((item, Some(values))) = self.waiting.front_mut() {
            take(item, values)?;
            self.spare.push(std::mem::take(values));
            self.waiting.pop_front();
            self.first += 1;
        }
        Ok(())
    }

    /// Items that were taken so far.
    pub fn taken(&self) -> u64 {
        self.first
    }

    /// The oldest item that waits.
    pub fn oldest(&self) -> Option<&T> {
        self.waiting.front().map(|(item, _)| item)
    }
}
