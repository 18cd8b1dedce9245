//! Typed indices into the tables of a [`Graph`](crate::Graph). Invariant: an id is only created for a row of
//! the table that it indexes.

use serde::{Deserialize, Serialize};
use std::fmt;

macro_rules! ids {
    ($($(#[$doc:meta])* $name:ident $sigil:literal)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub(crate) u32);

        impl $name {
            /// Position in the table.
            pub fn index(self) -> usize {
                self.0 as usize
            }

            /// Returns the id of position `index`, for iterating over a whole table.
            ///
            /// # Panics
            /// If `index` does not fit in 32 bits.
            pub fn at(index: usize) -> Self {
                Self(u32::try_from(index).expect("a table of at most 2^32 rows"))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($sigil, "{}"), self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(self, f)
            }
        }
    )*};
}

ids! {
    /// Index of a node: one op applied to values.
    NodeId "n"
    /// Index of a value: a tensor, defined exactly once.
    ValueId "%"
    /// Index of a parameter: a tensor that is read from the weight file.
    ParamId "p"
    /// Index of a state: a tensor that persists across steps and is not stored in a weight file.
    StateId "s"
}
