//! Rules about the whole tree: the lock file.

use super::{Violation, hit};
use crate::source::File;

/// The only allowed source of a locked package.
const SOURCE: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// `Cargo.lock` exists, and every package in it belongs to the workspace or comes from the public registry.
pub fn lock(files: &[File]) -> Vec<(String, Violation)> {
    let path = "Cargo.lock".to_owned();
    let Some(lock) = files.iter().find(|file| file.path == path) else {
        return vec![(path, hit(1, "missing: it is committed, so that every build is the same"))];
    };
    let mut hits = Vec::new();
    for (index, line) in lock.text.lines().enumerate() {
        let source = line.strip_prefix("source = ").map(|source| source.trim_matches('"'));
        if let Some(source) = source.filter(|&source| source != SOURCE) {
            hits.push((path.clone(), hit(index + 1, format!("a package from `{source}`"))));
        }
    }
    hits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locks() {
        assert_eq!(lock(&[]).len(), 1);
        let check = |text: &str, lines: &[usize]| {
            let found = lock(&[File::new("Cargo.lock", text)]);
            assert_eq!(found.iter().map(|(_, hit)| hit.line).collect::<Vec<_>>(), lines, "{text}");
        };
        check(&format!("name = \"gemm\"\nsource = \"{SOURCE}\"\n"), &[]);
        check("name = \"gemm\"\nsource = \"git+https://example.org/gemm\"\n", &[2]);
    }
}
