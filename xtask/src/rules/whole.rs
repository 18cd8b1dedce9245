//! Rules over the whole tree: the lock file and the workspace's size.

use super::{Hit, hit};
use crate::sizes;
use crate::source::File;

/// Non-test lines of the whole workspace: a reader should be able to know it all. 45 000 for inference; training
/// brought 34 ops with their gradients and kernels, data, a trainer and a search of its own; GPUs a backend of 7 000 lines,
/// kernels included, fp8, and work shared among devices (75 000); CPUs without AMX products of bf16, and all of them lanes.
const WORKSPACE_LINES: usize = 77_000;

/// The only source a locked package may come from.
const SOURCE: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// `Cargo.lock` exists, and every package in it is ours or from the public registry.
pub fn lock(files: &[File]) -> Vec<(String, Hit)> {
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

/// The workspace stays under [`WORKSPACE_LINES`].
pub fn workspace_size(files: &[File]) -> Vec<(String, Hit)> {
    let lines: usize = sizes::count(files).values().map(|lines| lines.code).sum();
    if lines < WORKSPACE_LINES {
        return Vec::new();
    }
    let what = format!("{lines} non-test lines in the workspace, under {WORKSPACE_LINES} allowed");
    vec![("Cargo.toml".to_owned(), hit(1, what))]
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

    #[test]
    fn sizes_are_bounded() {
        let files = |lines: usize| {
            let file = |i| File::new(format!("crates/run/src/f{i}.rs"), "\n".repeat(lines / 100));
            (0..100).map(file).collect::<Vec<_>>()
        };
        assert!(workspace_size(&files(WORKSPACE_LINES - 100)).is_empty());
        assert_eq!(workspace_size(&files(WORKSPACE_LINES)).len(), 1);
        let tests = File::new("crates/run/tests/it/main.rs", "\n".repeat(WORKSPACE_LINES));
        assert!(workspace_size(&[tests]).is_empty());
    }
}
