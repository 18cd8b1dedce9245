//! Rules about words and names: no ignored tests, one binary of integration tests, no paths of a single machine.

use super::{Violation, hit};
use crate::source::{File, in_word};

/// Absolute paths and package registries. Each is written in two pieces, so that the rule does not find this
/// table.
const MACHINES: &[&str] = &[
    concat!("/ro", "ot/"),
    concat!("/wo", "rk/"),
    concat!("/ho", "me/"),
    concat!("/Us", "ers/"),
    concat!("index.", "crates.io"),
    concat!("static.", "crates.io"),
    concat!("pypi.", "org"),
    concat!("python", "hosted.org"),
    concat!("download.", "pytorch.org"),
    concat!("artif", "actory"),
];

/// No test is ignored.
pub fn ignored(file: &File) -> Vec<Violation> {
    if !file.is_rust() {
        return Vec::new();
    }
    let places = whole_words(&file.code, "#[ignore").map(|at| file.line(at));
    places.map(|line| hit(line, "`#[ignore`: a test runs, or prints why it skips")).collect()
}

/// A crate has one binary of integration tests: `tests/it/main.rs`.
pub fn test_binary(file: &File) -> Vec<Violation> {
    let folder = format!("crates/{}/tests/", file.crate_name());
    let Some(inside) = file.path.strip_prefix(&folder).filter(|_| file.is_rust()) else {
        return Vec::new();
    };
    let binary = !inside.contains('/') || (inside.ends_with("/main.rs") && inside != "it/main.rs");
    binary.then(|| hit(1, "a second test binary: make it a module of tests/it/main.rs")).into_iter().collect()
}

/// No file contains an absolute path of a machine or the host of a package registry.
pub fn machine_paths(file: &File) -> Vec<Violation> {
    // The lock file names its sources by necessity; `deny.toml` restricts them.
    if file.path == "Cargo.lock" {
        return Vec::new();
    }
    let mut hits = Vec::new();
    for (index, line) in file.text.lines().enumerate() {
        for needle in MACHINES.iter().filter(|needle| whole_words(line, needle).next().is_some()) {
            hits.push(hit(index + 1, format!("`{needle}` belongs to one machine, not to the project")));
        }
    }
    hits
}

/// Offsets of `needle` in `text` that are not preceded by a character of a name or path.
fn whole_words<'a>(text: &'a str, needle: &'a str) -> impl Iterator<Item = usize> + 'a {
    let places = text.match_indices(needle).map(|(at, _)| at);
    places.filter(move |&at| {
        let before = at.checked_sub(1).map(|i| text.as_bytes()[i]);
        !before.is_some_and(|b| in_word(b) || b == b'.' || b == b'-')
    })
}

#[cfg(test)]
mod tests {
    use super::super::tests::check;
    use super::*;

    #[test]
    fn ignored_tests() {
        check(ignored, "a.rs", "#[test]\n#[ignore]\nfn f() {}\n", &[2]);
        check(ignored, "a.rs", "#[test]\n#[ignore = \"slow\"]\nfn f() {}\n", &[2]);
        check(ignored, "a.rs", "// #[ignore]\n\"#[ignore]\"\n", &[]);
    }

    #[test]
    fn one_test_binary() {
        check(test_binary, "crates/runtime/tests/it/main.rs", "", &[]);
        check(test_binary, "crates/runtime/tests/it/predict.rs", "", &[]);
        check(test_binary, "crates/runtime/src/predict/tests/mod.rs", "", &[]);
        check(test_binary, "crates/runtime/tests/predict.rs", "", &[1]);
        check(test_binary, "crates/runtime/tests/other/main.rs", "", &[1]);
    }

    #[test]
    fn machine_text() {
        for needle in MACHINES {
            check(machine_paths, "README.md", &format!("fine\nsee {needle}x\n"), &[2]);
        }
        check(machine_paths, "README.md", concat!("../net/wo", "rk/x\n"), &[]);
        check(machine_paths, "Cargo.lock", MACHINES[4], &[]);
    }
}
