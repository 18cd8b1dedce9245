//! The input `packs` of training graphs: i32 (P, 6), a row for each pack of the step. Invariant: the packs follow one another
//! and cover all tokens and sequences of the step.
//!
//! A pack is a number of whole sequences that belong together in training. Which sequences are in a pack depends on the data
//! and the seed alone, and a step joins as many packs as the memory holds. What is not a sum over tokens is therefore that of
//! a pack: the losses of routers, the capacity of experts, and the random numbers of dropout.

/// Number of words of a row.
pub const WORDS: usize = 6;

/// Word of the first token of a pack; the next word is the end of its tokens, exclusive.
pub const TOKENS: usize = 0;

/// Word of the first sequence of a pack; the next word is the end of its sequences, exclusive.
pub const SEQUENCES: usize = 2;

/// Word of the number of targets of a pack.
pub const TARGETS: usize = 4;

/// Word of the global number of a pack, counted from 0 over the whole run, modulo 2^32.
pub const NUMBER: usize = 5;
