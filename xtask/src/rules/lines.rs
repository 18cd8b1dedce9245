//! Rule about the first line of a file.

use super::{Violation, hit};
use crate::source::File;

/// Every Rust file starts with a `//!` comment that describes the file and its invariant.
pub fn opening(file: &File) -> Vec<Violation> {
    if !file.is_rust() || file.text.starts_with("//!") {
        return Vec::new();
    }
    vec![hit(1, "the file does not open with `//!`")]
}

#[cfg(test)]
mod tests {
    use super::super::tests::check;
    use super::*;

    #[test]
    fn openings() {
        check(opening, "a.rs", "//! What it is.\n", &[]);
        check(opening, "a.rs", "// What it is.\n", &[1]);
        check(opening, "a.rs", "\n//! What it is.\n", &[1]);
        check(opening, "a.toml", "# what it is\n", &[]);
    }
}
