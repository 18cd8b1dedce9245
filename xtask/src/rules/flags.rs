//! Rule about the words of messages: libraries name settings and commands by `plimsoll_setting`, and only the command line has
//! flags.

use super::{Violation, hit};
use crate::source::{File, in_word};

/// Flags of other programs that string literals of a file may have.
struct ForeignFlags {
    file: &'static str,
    flags: &'static [&'static str],
}

const FOREIGN: &[ForeignFlags] = &[
    // Options of the compiler of CUDA kernels.
    ForeignFlags {
        file: "crates/cuda/src/compile.rs",
        flags: &["--ptxas-options", "--gpu-architecture", "--std", "--define-macro"],
    },
    // The command that downloads a model from the hub.
    ForeignFlags { file: "crates/data/src/weights/error.rs", flags: &["--revision"] },
    // VirNucPro's own command.
    ForeignFlags { file: "crates/plot/src/error.rs", flags: &["--keep-intermediate"] },
    // The script examples/caller/calibrate.py.
    ForeignFlags { file: "crates/virus/src/error.rs", flags: &["--start"] },
];

/// Crates under `crates/` that are no libraries of a front end: the command line, and what only tests use.
const NO_LIBRARIES: &[&str] = &["cli", "testing"];

/// Subcommands of the command line.
const SUBCOMMANDS: &[&str] = &[
    "predict",
    "embed",
    "classify",
    "train",
    "evaluate",
    "monitor",
    "plan",
    "plot",
    "report",
    "bench",
    "doctor",
    "list",
    "convert",
    "merge",
    "verify",
    "completions",
    "man",
    "licenses",
];

/// No string of a library, outside of tests, has a flag or a command of the command line.
pub fn flags(file: &File) -> Vec<Violation> {
    if !file.is_rust() || !is_library(&file.path) || NO_LIBRARIES.contains(&file.crate_name()) {
        return Vec::new();
    }
    let foreign = FOREIGN.iter().find(|row| row.file == file.path).map_or(&[][..], |row| row.flags);
    let tests = file.test_items();
    let mut hits = Vec::new();
    for literal in file.strings() {
        if tests.iter().any(|test| test.contains(&literal.start)) {
            continue;
        }
        let text = joined(&file.text[literal.clone()]);
        for found in flags_in(&text).into_iter().filter(|flag| !foreign.contains(flag)) {
            let what =
                format!("`{found}` belongs to the command line: name a setting or command of plimsoll_setting");
            hits.push(hit(file.line(literal.start), what));
        }
    }
    hits
}

/// Whether a path is of the sources of a crate, and not of a module of tests.
fn is_library(path: &str) -> bool {
    path.starts_with("crates/")
        && path.contains("/src/")
        && !path.split('/').any(|part| part == "tests" || part == "tests.rs")
}

/// The content of a string literal, whose lines that end with a backslash are joined.
fn joined(literal: &str) -> String {
    let mut pieces = literal.split("\\\n");
    let first = pieces.next().unwrap_or_default().to_owned();
    let text = pieces.fold(first, |text, piece| text + piece.trim_start());
    text.trim_start_matches(['r', 'b', 'c', '#', '"']).trim_end_matches(['#', '"']).to_owned()
}

/// The flags and commands in a text: `--name`, `-o` and `plimsoll` with a subcommand, each at the start of a word.
fn flags_in(text: &str) -> Vec<&str> {
    let mut found = Vec::new();
    for (at, _) in text.match_indices(['-', 'p']) {
        let before = text[..at].chars().next_back();
        if before.is_some_and(|c| !c.is_whitespace() && !"(`'[=|".contains(c)) {
            continue;
        }
        let rest = &text[at..];
        let end = rest.find(|c: char| !(c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-'));
        let word = &rest[..end.unwrap_or(rest.len())];
        let is_flag = word == "-o"
            || word.strip_prefix("--").is_some_and(|name| name.starts_with(|c: char| c.is_ascii_lowercase()));
        if is_flag {
            found.push(word);
        } else if let Some(after) = rest.strip_prefix("plimsoll ") {
            let end = after.bytes().position(|byte| !in_word(byte)).unwrap_or(after.len());
            if SUBCOMMANDS.contains(&&after[..end]) {
                found.push(&rest[.."plimsoll ".len() + end]);
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::tests::check;
    use super::*;

    #[test]
    fn libraries_have_no_flags() {
        let check = |text: &str, lines: &[usize]| check(flags, "crates/plan/src/a.rs", text, lines);
        check("f(\"use --force\");\n", &[1]);
        check("\nf(\"--budget\");\n", &[2]);
        check("f(r#\"(--strict)\"#);\n", &[1]);
        check("f(\"another folder with -o\");\n", &[1]);
        check("f(\"run `plimsoll \\\n    train` again\");\n", &[1]);
        check("f(\"a version of plimsoll that plans\");\n", &[]);
        check("f(\"models--org--name, a - b, -1, -offset, x--y\");\n", &[]);
        check("// use --force\nf(); // plimsoll train\n", &[]);
        check("#[cfg(test)]\nmod tests {\n    const A: &str = \"--force\";\n}\n", &[]);
    }

    #[test]
    fn other_files_may_have_flags() {
        let text = "f(\"--std=c++17\", \"--force\");\n";
        check(flags, "crates/cli/src/words.rs", text, &[]);
        check(flags, "crates/plan/src/a/tests.rs", text, &[]);
        check(flags, "crates/plan/tests/it/a.rs", text, &[]);
        check(flags, "xtask/src/main.rs", text, &[]);
        check(flags, "crates/cuda/src/compile.rs", text, &[1]);
        check(flags, "crates/cuda/src/device.rs", text, &[1, 1]);
    }
}
