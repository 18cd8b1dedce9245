//! The house rules, one row each. A rule is a pure function from a file to its violations, and has a test with a planted
//! violation.
//!
//! What a linter checks has no rule here: `undocumented_unsafe_blocks`, `todo`, `unimplemented` and `dbg_macro` of clippy are
//! denied in the workspace's `Cargo.toml`, `cargo deny` restricts the sources of packages (`[sources]` in `deny.toml`), and
//! `--locked` needs `Cargo.lock`.

use std::fmt;

use crate::source::File;

mod flags;
mod floors;
mod lines;
mod matches;
mod safety;
mod text;

/// Violation of a rule in one file.
#[derive(Debug, PartialEq)]
pub struct Violation {
    /// Line number from 1.
    pub line: usize,
    /// The violation and, where helpful, how to fix it.
    pub what: String,
}

/// A violation with its file and rule; formatted as `path:line: rule: what`.
pub struct Finding {
    path: String,
    rule: &'static str,
    hit: Violation,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Finding { path, rule, hit } = self;
        write!(f, "{path}:{}: {rule}: {}", hit.line, hit.what)
    }
}

type FileRule = fn(&File) -> Vec<Violation>;

/// Rules about a single file. Each rule selects the files it applies to.
const FILE_RULES: &[(&str, FileRule)] = &[
    ("floors", floors::floors),
    ("reason", floors::reason),
    ("opening", lines::opening),
    ("unsafe-home", safety::home),
    ("unsafe-forbidden", safety::forbidden),
    ("catch-all", matches::catch_all),
    ("ignore", text::ignored),
    ("test-binary", text::test_binary),
    ("machine-path", text::machine_paths),
    ("flags", flags::flags),
];

/// Applies all rules; returns the violations in order of path and line.
pub fn check(files: &[File]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in files {
        for &(rule, check) in FILE_RULES {
            let hits = check(file).into_iter();
            findings.extend(hits.map(|hit| Finding { path: file.path.clone(), rule, hit }));
        }
    }
    findings.sort_by(|a, b| (&a.path, a.hit.line, a.rule).cmp(&(&b.path, b.hit.line, b.rule)));
    findings
}

/// Names of all rules.
pub fn names() -> Vec<&'static str> {
    FILE_RULES.iter().map(|(name, _)| *name).collect()
}

fn hit(line: usize, what: impl Into<String>) -> Violation {
    Violation { line, what: what.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs `rule` on a planted file and compares the line numbers of its violations.
    pub fn check(rule: FileRule, path: &str, text: &str, lines: &[usize]) {
        let hits = rule(&File::new(path, text));
        let found: Vec<usize> = hits.iter().map(|hit| hit.line).collect();
        assert_eq!(found, lines, "{path}:\n{text}\n{hits:?}");
    }

    #[test]
    fn findings_are_sorted_and_printed_with_place_and_rule() {
        let late = File::new("xtask/src/b.rs", "//! B.\n#[ignore]\n");
        let early = File::new("xtask/src/a.rs", "fn f() {}\n");
        let found: Vec<String> = super::check(&[late, early]).iter().map(ToString::to_string).collect();
        assert_eq!(found[0], "xtask/src/a.rs:1: opening: the file does not open with `//!`");
        assert!(found[1].starts_with("xtask/src/b.rs:2: ignore: "), "{found:?}");
        assert_eq!(found.len(), 2);
    }

    #[test]
    fn names_are_distinct() {
        let mut names = names();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), FILE_RULES.len());
    }
}
