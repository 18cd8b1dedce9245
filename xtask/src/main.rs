//! Development tool of the workspace. `tidy` checks the house rules of ARCHITECTURE.md, `sizes` counts lines;
//! both only read and print. `regen` writes generated files, and `fuzz` feeds damaged files to the readers.
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::process::ExitCode;

mod fuzz;
mod habits;
mod regen;
mod rules;
mod sizes;
mod source;
mod tree;

const USAGE: &str = "\
usage: cargo run -p xtask -- <command>
  tidy               check the house rules; prints `path:line: rule: what`, exits 1 on any finding
  sizes [--base REV] lines of each crate and constructs that make code hard to read, and the change since a git revision
  regen bundle       makes the built-in models again
  regen corpus       makes the text of the examples again
  regen licenses     lists the licences of the dependencies and collects their texts
  fuzz [--count N] [--seed N] [--format NAME]
                     feeds N damaged files of each format to its reader; exits 1 on any finding";

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let done = match words[..] {
        ["tidy"] => tidy(&root()),
        ["regen", "bundle"] => regen::bundle(&root()),
        ["regen", "corpus"] => regen::corpus::write(&root()),
        ["fuzz", ref rest @ ..] => match fuzz::request(rest) {
            Some(request) => fuzz::run(&root(), &request),
            None => Err(USAGE.to_owned()),
        },
        ["regen", "licenses"] => regen::licenses::write(&root()),
        ["sizes"] => sizes::print(&root(), None),
        ["sizes", "--base", revision] => sizes::print(&root(), Some(revision)),
        _ => Err(USAGE.to_owned()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("{why}");
            ExitCode::FAILURE
        }
    }
}

/// Prints every violation of a house rule; `Err` if there is one.
fn tidy(root: &Path) -> Result<(), String> {
    let files = tree::read(root)?;
    let findings = rules::check(&files);
    for finding in &findings {
        println!("{finding}");
    }
    match findings.len() {
        0 => {
            println!("tidy: {} files, {} rules", files.len(), rules::names().len());
            Ok(())
        }
        n => Err(format!("tidy: {n} findings")),
    }
}

/// Turns I/O errors at `path` into messages that begin with the path.
fn io_error(path: &Path) -> impl Fn(std::io::Error) -> String {
    move |error| format!("{}: {error}", path.display())
}

/// Root folder of the workspace: the folder above this crate.
fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_path_buf()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_workspace_is_tidy() {
        let files = tree::read(&root()).unwrap();
        assert!(files.len() > 20, "the walk found only {} files", files.len());
        let findings: Vec<String> = rules::check(&files).iter().map(ToString::to_string).collect();
        assert!(findings.is_empty(), "\n{}", findings.join("\n"));
    }
}
