//! Typed indices into a graph's tables. Invariant: an id is only made by the table that it indexes.

use serde::{Deserialize, Serialize};
use std::fmt;

macro_rules! ids {
    ($($(#[$doc:meta])* $name:ident $sigil:literal)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub(crate) u32);

        impl $name {
            /// The position in its table.
            pub fn index(self) -> usize {
                self.0 as usize
            }

            /// The id of position `index`. Meant for walks over a whole table.
            ///
            /// # Panics
            /// If a table has more than 2^32 rows, which no graph has.
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
    /// A node: one op applied to values.
    NodeId "n"
    /// A value: a tensor, defined once.
    ValueId "%"
    /// A parameter: a tensor read from the weight file.
    ParamId "p"
    /// A state: a tensor that survives the step and is in no weight file.
    StateId "s"
}
