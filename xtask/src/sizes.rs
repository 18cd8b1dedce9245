//! Counts the lines of the workspace's Rust and CUDA files, split into code and tests. Tests are folders
//! `tests`, `benches` and `examples`, files `tests.rs`, modules declared with `#[cfg(test)]`, and items marked
//! with it. Below the lines it prints the table of [`Habits`] of the Rust files.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;
use std::process::Command;

use crate::habits::Habits;
use crate::source::File;
use crate::tree;

/// Numbers of lines.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Lines {
    /// Lines outside of tests.
    pub code: usize,
    /// Lines of tests.
    pub test: usize,
}

/// Counts the lines of each crate.
pub fn count(files: &[File]) -> BTreeMap<String, Lines> {
    let mut crates: BTreeMap<String, Lines> = BTreeMap::new();
    for (file, lines) in files.iter().zip(by_file(files)) {
        if file.is_code() {
            let sum = crates.entry(file.crate_name().to_owned()).or_default();
            sum.code += lines.code;
            sum.test += lines.test;
        }
    }
    crates
}

/// Prints the table; with `base` also the change since that git revision.
///
/// # Errors
/// The tree cannot be read, or git fails, for example because the revision is unknown.
pub fn print(root: &Path, base: Option<&str>) -> Result<(), String> {
    let files = tree::read(root)?;
    let before = base.map(|base| at_revision(root, base)).transpose()?;
    print!("{}", table(&count(&files), before.as_deref().map(count).as_ref()));
    println!();
    if let Some(before) = &before {
        print!("before\n{}\nnow\n", habits(before));
    }
    print!("{}", habits(&files));
    Ok(())
}

/// Formats the table of habits: one row per crate, and the sum. Files of tests are left out.
fn habits(files: &[File]) -> String {
    let modules = test_modules(files);
    let mut crates: BTreeMap<&str, Habits> = BTreeMap::new();
    let mut all = Habits::default();
    for file in files.iter().filter(|file| file.is_rust() && !is_test(file, &modules)) {
        let found = Habits::of(file);
        *crates.entry(file.crate_name()).or_default() += &found;
        all += &found;
    }
    let mut text = Habits::heading();
    for (name, found) in &crates {
        text += &found.row(name);
    }
    text + &all.row("all")
}

/// Formats the table: one row per crate, and their sum.
fn table(now: &BTreeMap<String, Lines>, before: Option<&BTreeMap<String, Lines>>) -> String {
    let mut names: Vec<&String> = now.keys().chain(before.into_iter().flat_map(BTreeMap::keys)).collect();
    names.sort();
    names.dedup();
    let mut text = format!("{:<8} {:>8} {:>8}\n", "crate", "code", "test");
    let mut sum = Lines::default();
    let mut sum_before = Lines::default();
    for name in names {
        let lines = now.get(name).copied().unwrap_or_default();
        let old = before.map(|before| before.get(name).copied().unwrap_or_default());
        text += &row(name, lines, old);
        sum = sum.plus(lines);
        sum_before = sum_before.plus(old.unwrap_or_default());
    }
    text + &row("all", sum, before.map(|_| sum_before))
}

fn row(name: &str, now: Lines, before: Option<Lines>) -> String {
    let mut text = format!("{name:<8} {:>8} {:>8}", now.code, now.test);
    if let Some(old) = before {
        let code = now.code.cast_signed() - old.code.cast_signed();
        let test = now.test.cast_signed() - old.test.cast_signed();
        text += &format!(" {code:>+8} {test:>+8}");
    }
    text + "\n"
}

impl Lines {
    fn plus(self, other: Lines) -> Lines {
        Lines { code: self.code + other.code, test: self.test + other.test }
    }
}

/// Lines of each file, in the order of `files`.
fn by_file(files: &[File]) -> Vec<Lines> {
    let modules = test_modules(files);
    files.iter().map(|file| lines_of(file, &modules)).collect()
}

/// Lines of one file; `modules` are the paths of all test modules.
fn lines_of(file: &File, modules: &HashSet<String>) -> Lines {
    let all = file.line_count();
    let test = if is_test(file, modules) { all } else { file.inner_test_lines().min(all) };
    Lines { code: all - test, test }
}

/// Paths, without `.rs`, of modules that are declared as `#[cfg(test)] mod name;`.
fn test_modules(files: &[File]) -> HashSet<String> {
    let mut modules = HashSet::new();
    for file in files {
        let (folder, name) = file.path.rsplit_once('/').unwrap_or(("", &file.path));
        let inside = match name {
            "lib.rs" | "main.rs" | "mod.rs" => folder.to_owned(),
            _ => format!("{folder}/{}", name.trim_end_matches(".rs")),
        };
        modules.extend(file.test_modules().iter().map(|module| format!("{inside}/{module}")));
    }
    modules
}

/// Whether all lines of a file are tests.
fn is_test(file: &File, modules: &HashSet<String>) -> bool {
    let folders = ["/tests/", "/benches/", "/examples/", "/tests.rs"];
    let stem = file.path.trim_end_matches(".rs");
    folders.iter().any(|part| file.path.contains(part))
        || modules.iter().any(|module| {
            stem.strip_prefix(module.as_str()).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        })
}

/// The code files of a git revision.
fn at_revision(root: &Path, revision: &str) -> Result<Vec<File>, String> {
    let paths = git(root, &["ls-tree", "-r", "--name-only", revision])?;
    let code = paths.lines().filter(|path| File::new(*path, "").is_code());
    code.map(|path| Ok(File::new(path, git(root, &["show", &format!("{revision}:{path}")])?))).collect()
}

/// Runs git in the workspace and returns its output.
fn git(root: &Path, words: &[&str]) -> Result<String, String> {
    let run = Command::new("git").arg("-C").arg(root).args(words).output();
    let out = run.map_err(|e| format!("git: {e}"))?;
    if !out.status.success() {
        return Err(format!("git {}: {}", words.join(" "), String::from_utf8_lossy(&out.stderr).trim()));
    }
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_split() {
        let files = [
            File::new("crates/plan/src/lib.rs", "//! P.\n#[cfg(test)]\nmod cases;\nmod a;\n"),
            File::new("crates/plan/src/cases.rs", "//! C.\n\n"),
            File::new("crates/plan/src/a.rs", "//! A.\n#[cfg(test)]\nmod tests {\n}\n"),
            File::new("crates/plan/tests/it/main.rs", "//! T.\n"),
            File::new("crates/plan/Cargo.toml", "[package]\n"),
        ];
        let counted = count(&files);
        assert_eq!(counted["plan"], Lines { code: 3, test: 2 + 2 + 3 + 1 });
    }

    #[test]
    fn changes_are_signed() {
        let lines = |code, test| Lines { code, test };
        let now = BTreeMap::from([("exec".to_owned(), lines(10, 5)), ("plan".to_owned(), lines(7, 0))]);
        let before = BTreeMap::from([("exec".to_owned(), lines(12, 5)), ("old".to_owned(), lines(1, 1))]);
        let expected = "\
crate        code     test
exec           10        5       -2       +0
old             0        0       -1       -1
plan            7        0       +7       +0
all            17        5       +4       -1
";
        assert_eq!(table(&now, Some(&before)), expected);
        assert_eq!(table(&now, None).lines().last(), Some("all            17        5"));
    }
}
