//! Rules about `unsafe`: it is allowed only in the files and crates of `HOMES`, and the other crates forbid it.

use super::{Violation, hit};
use crate::source::File;

/// Files and crates in which `unsafe` is allowed.
const HOMES: &[&str] = &[
    "crates/cpu/",
    "crates/exec/src/arena.rs",
    "crates/exec/src/disk.rs",
    "crates/exec/src/heap.rs",
    "crates/exec/src/scratch_file.rs",
    "crates/cuda/",
];

/// Crates without `unsafe`. Their root file forbids it, so that the compiler checks this too.
const SAFE_CRATES: &[&str] = &[
    "graph", "plan", "models", "runtime", "embed", "tools", "train", "virus", "plot", "report", "data",
    "plimsoll", "setting", "cli", "xtask",
];

/// `unsafe` occurs only in `HOMES`.
pub fn home(file: &File) -> Vec<Violation> {
    if !file.is_rust() || HOMES.iter().any(|home| file.path.starts_with(home)) {
        return Vec::new();
    }
    let places = file.words("unsafe").map(|at| file.line(at));
    places.map(|line| hit(line, format!("`unsafe` stands only in {}", HOMES.join(", ")))).collect()
}

/// The root file of a crate without `unsafe` forbids it.
pub fn forbidden(file: &File) -> Vec<Violation> {
    let root = ["src/lib.rs", "src/main.rs"].iter().any(|root| file.path.ends_with(root));
    let safe = SAFE_CRATES.contains(&file.crate_name());
    if !root || !safe || file.code.contains("#![forbid(unsafe_code)]") {
        return Vec::new();
    }
    vec![hit(1, "the crate's root lacks `#![forbid(unsafe_code)]`")]
}

#[cfg(test)]
mod tests {
    use super::super::tests::check;
    use super::*;

    #[test]
    fn homes() {
        let text = "//! A.\n// unsafe\nfn f() { unsafe { g() } }\n";
        check(home, "crates/cpu/src/matmul/linear_f32.rs", text, &[]);
        check(home, "crates/exec/src/arena.rs", text, &[]);
        check(home, "crates/exec/src/executor.rs", text, &[3]);
        check(home, "crates/graph/src/lib.rs", "//! \"unsafe\"\n", &[]);
    }

    #[test]
    fn safe_crates_forbid() {
        check(forbidden, "crates/graph/src/lib.rs", "//! A.\n", &[1]);
        check(forbidden, "crates/graph/src/lib.rs", "//! A.\n#![forbid(unsafe_code)]\n", &[]);
        check(forbidden, "crates/graph/src/lib.rs", "//! #![forbid(unsafe_code)]\n", &[1]);
        check(forbidden, "crates/exec/src/lib.rs", "//! A.\n", &[]);
        check(forbidden, "crates/graph/src/op.rs", "//! A.\n", &[]);
    }
}
