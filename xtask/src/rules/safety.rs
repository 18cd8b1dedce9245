//! Rules about `unsafe`: it is allowed only in the files and crates of `HOMES`, and every use has a comment why
//! it is sound.

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

/// Every `unsafe` block and impl has a `SAFETY:` comment in its line or directly above.
pub fn why(file: &File) -> Vec<Violation> {
    if !file.is_rust() {
        return Vec::new();
    }
    let text: Vec<&str> = file.text.lines().collect();
    let code: Vec<&str> = file.code.lines().collect();
    let uses = file.words("unsafe").filter(|&at| {
        let next = file.code[at + "unsafe".len()..].trim_start();
        next.starts_with('{') || next.starts_with("impl")
    });
    let bare = uses.map(|at| file.line(at)).filter(|&line| !explained(&text, &code, line));
    bare.map(|line| hit(line, "no `// SAFETY:` line says why this is sound")).collect()
}

/// Whether a SAFETY comment is in this line (numbered from 1), or above it within one statement.
fn explained(text: &[&str], code: &[&str], line: usize) -> bool {
    let safe = |text: &str| text.contains("// SAFETY:");
    // Walk up to the end of the preceding statement, block or match arm, or to an empty line.
    let above = (0..line - 1).rev().take_while(|&i| {
        let ends = |ends: &str| code[i].trim_end().trim_end_matches(',').ends_with(ends);
        !text[i].trim().is_empty() && ![";", "{", "}"].into_iter().any(ends)
    });
    safe(text[line - 1]) || above.into_iter().any(|i| safe(text[i]))
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
    fn reasons() {
        let path = "crates/cuda/src/ffi.rs";
        check(why, path, "// SAFETY: g reads nothing.\nunsafe { g() }\n", &[]);
        check(why, path, "let x = unsafe { g() }; // SAFETY: g reads nothing.\n", &[]);
        check(why, path, "unsafe { g() }\n", &[1]);
        check(why, path, "unsafe impl Send for X {}\n", &[1]);
        check(why, path, "unsafe fn f() {}\n", &[]);
        check(why, path, "// SAFETY: a, and\n// b.\n#[inline]\nlet x =\n    unsafe { g() };\n", &[]);
        check(why, path, "// SAFETY: a.\nunsafe { g() };\nunsafe { h() }\n", &[3]);
        check(why, path, "// SAFETY: a.\nA => unsafe { g() },\nB => unsafe { h() },\n", &[3]);
        check(why, path, "// SAFETY: a.\n\nunsafe { h() }\n", &[3]);
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
