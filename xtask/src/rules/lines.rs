//! Rules on length and opening: a file or function past its limit is split, never excused.

use super::{Hit, hit};
use crate::source::{File, in_word};

/// Lines of a file, tests included. The goal is 500 without tests (`sizes` lists those above).
const FILE_LINES: usize = 600;
/// Lines of a function, from `fn` to its closing brace. The goal is 60, and most under 25.
const FN_LINES: usize = 80;

/// Every Rust file says first what it is and which invariant it keeps.
pub fn opening(file: &File) -> Vec<Hit> {
    if !file.is_rust() || file.text.starts_with("//!") {
        return Vec::new();
    }
    vec![hit(1, "the file does not open with `//!`")]
}

/// No code file is longer than [`FILE_LINES`].
pub fn file_length(file: &File) -> Vec<Hit> {
    let lines = file.line_count();
    if !file.is_code() || lines <= FILE_LINES {
        return Vec::new();
    }
    vec![hit(FILE_LINES + 1, format!("{lines} lines, at most {FILE_LINES}"))]
}

/// No function is longer than [`FN_LINES`].
pub fn fn_length(file: &File) -> Vec<Hit> {
    if !file.is_rust() {
        return Vec::new();
    }
    file.words("fn").filter_map(|at| long_function(file, at)).collect()
}

fn long_function(file: &File, at: usize) -> Option<Hit> {
    let rest = file.code[at + "fn".len()..].trim_start();
    let name = &rest[..rest.bytes().position(|b| !in_word(b))?];
    if name.is_empty() {
        return None; // the type `fn(..)`
    }
    let first = file.line(at);
    let lines = 1 + file.line(file.body(at)?.end) - first;
    let what = format!("`{name}` has {lines} lines, at most {FN_LINES}");
    (lines > FN_LINES).then(|| hit(first, what))
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

    #[test]
    fn long_files() {
        check(file_length, "a.rs", &"\n".repeat(600), &[]);
        check(file_length, "a.rs", &"\n".repeat(601), &[601]);
        check(file_length, "a.cu", &"\n".repeat(601), &[601]);
        check(file_length, "a.md", &"\n".repeat(601), &[]);
    }

    #[test]
    fn long_functions() {
        let function = |lines: usize| format!("//! A.\nfn f() {{{}}}\n", "\n".repeat(lines - 1));
        check(fn_length, "a.rs", &function(80), &[]);
        check(fn_length, "a.rs", &function(81), &[2]);
        let brace_in_string = function(81).replace("{\n", "{ \"}\";\n");
        check(fn_length, "a.rs", &brace_in_string, &[2]);
        let no_body = format!("type F = fn(u8);\ntrait T {{\nfn f();{}}}\n", "\n".repeat(100));
        check(fn_length, "a.rs", &no_body, &[]);
    }
}
