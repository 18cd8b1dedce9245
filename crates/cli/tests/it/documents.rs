//! Tests of the commands in README and `docs/`. Each command of a `sh` block is run; a command that needs a GPU
//! or a file that is not in the repository is only parsed. The outputs and table rows of
//! docs/training-memory.md are compared with the program's output.

use crate::harness::Folder;
use serde_json::Value;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

const DOCUMENT: &str = include_str!("../../../../docs/training-memory.md");

/// A folder with the configurations that docs/training-memory.md uses.
fn examples(test: &str) -> Folder {
    let folder = Folder::new(test);
    folder.write("examples/dense-7b.yaml", include_str!("../../../../examples/dense-7b.yaml"));
    folder.write("examples/moe-4b.yaml", include_str!("../../../../examples/moe-4b.yaml"));
    folder
}

/// The shown lines must occur in the output in this order; a line `...` stands for any number of omitted lines.
#[test]
fn training_memory_shows_what_the_program_says() {
    let folder = examples("document_blocks");
    let mut blocks = 0;
    for block in DOCUMENT.split("```\n$ plimsoll ").skip(1) {
        let (command, shown) = block.split_once('\n').expect("a command and its output");
        let shown = shown.split("\n```").next().expect("the end of the block");
        let ran = folder.run(&command.split_whitespace().collect::<Vec<_>>());
        let said = format!("{}{}", ran.stdout(), ran.stderr());
        let mut rest = said.trim_end().lines();
        let mut any = false;
        for line in shown.lines() {
            if line == "..." {
                any = true;
                continue;
            }
            let found = if any { rest.find(|said| *said == line) } else { rest.next() };
            assert_eq!(found, Some(line), "plimsoll {command}: {said}");
            any = false;
        }
        assert!(any || rest.next().is_none(), "plimsoll {command} says more: {said}");
        blocks += 1;
    }
    assert_eq!(blocks, 6);
}

/// Each row of a table has flags for the last command before the table, and numbers from the resulting plan.
#[test]
fn training_memory_has_the_numbers_of_plans() {
    let folder = examples("document_tables");
    let mut command = "";
    let mut columns = vec![];
    let mut rows = 0;
    for line in DOCUMENT.lines() {
        command = line.strip_prefix("plimsoll ").unwrap_or(command);
        let Some(row) = line.strip_prefix("| ").and_then(|row| row.strip_suffix(" |")) else { continue };
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        if cells[0] == "what" {
            columns = cells[2..].to_vec();
            continue;
        }
        let flags = cells[1].trim_matches('`').split_whitespace();
        let words: Vec<&str> = command.split_whitespace().chain(flags).chain(["--json"]).collect();
        let plan: Value = serde_json::from_str(&folder.run(&words).assert_code(0).stdout()).expect("JSON");
        for (column, cell) in columns.iter().zip(&cells[2..]) {
            let number = match *column {
                "peak" => plan["peak_bytes"].as_f64(),
                "tokens/s" => plan["tokens_per_second"].as_f64().map(f64::round),
                line => Some(plan["ledger"][line].as_f64().unwrap_or(0.0)),
            };
            let shown: f64 = cell.replace(' ', "").parse().expect("a number");
            assert_eq!(number, Some(shown), "{column}: {row}");
        }
        rows += 1;
    }
    assert_eq!(rows, 18);
}

/// Parts of commands that refer to files, models or devices of the reader; such commands are only parsed.
const READERS_OWN: [&str; 13] = [
    "facebook/",
    "zhihan1996/",
    " proteins.faa",
    " reads.fa",
    " samples/",
    " pond_1.fastq.gz",
    " theirs.json",
    " next.yaml",
    " run.yaml",
    " merged ",
    "RUN/",
    "--device cuda",
    "--calibrate",
];

/// Commands that the pages show as refused, with their exit codes.
const REFUSED: [(&str, i32); 1] =
    [("plan --model facebook/esm2_t36_3B_UR50D --target 4090 --tokens 655360", 4)];

/// Runs the commands of a page in order, in one folder with the repository's fixtures and examples, and asserts
/// their number. Commands of other programs are skipped.
fn run_page(name: &str, commands: usize) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = fs::read_to_string(root.join(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
    let folder = Folder::new(&format!("page-{}", name.replace('/', "-")));
    for linked in ["fixtures", "examples"] {
        symlink(root.join(linked).canonicalize().expect("a folder"), folder.path(linked)).expect("a link");
    }
    // Replaces the file that `bench --calibrate` would write, because a calibration takes a minute.
    folder.write("my-machine.toml", include_str!("../../../plan/src/targets/null.toml"));
    let mut found = 0;
    for block in page.split("```sh\n").skip(1) {
        let block = block.split("```").next().expect("the end of the block");
        for command in block.lines().filter_map(|line| line.strip_prefix("plimsoll ")) {
            let mut words: Vec<&str> = command.split_whitespace().collect();
            let planned = words[0] == "plan";
            let parsed_only = !planned && READERS_OWN.iter().any(|own| command.contains(own));
            if parsed_only {
                // With --help at the end nothing is run, but unknown flags before it are refused.
                words.push("--help");
            }
            let refused = REFUSED.iter().find(|(refused, _)| *refused == command);
            folder.run(&words).assert_code(refused.map_or(0, |(_, code)| *code));
            found += 1;
        }
    }
    assert_eq!(found, commands, "{name}");
}

#[test]
fn commands_of_the_readme() {
    run_page("README.md", 6);
}

#[test]
fn commands_of_predict() {
    run_page("docs/predict.md", 12);
}

#[test]
fn commands_of_embed() {
    run_page("docs/embed.md", 13);
}

#[test]
fn commands_of_train() {
    run_page("docs/train.md", 16);
}

#[test]
fn commands_of_plan() {
    run_page("docs/plan.md", 17);
}

#[test]
fn commands_of_the_other_pages() {
    for (page, commands) in [
        ("docs/clusters.md", 3),
        ("docs/configuration.md", 3),
        ("docs/gpus.md", 6),
        ("docs/leaks.md", 0),
        ("docs/models.md", 1),
        ("docs/monitor.md", 5),
        ("docs/report.md", 6),
        ("docs/training-gpu.md", 2),
        ("docs/validation.md", 1),
    ] {
        run_page(page, commands);
    }
}

/// A misspelt flag is refused although the command ends with --help.
#[test]
fn parsing_refuses_unknown_flags() {
    let folder = Folder::new("page-flags");
    for words in [["embed", "--modle", "m", "--help"], ["predict", "--weigths", "w", "--help"]] {
        folder.run(&words).assert_code(1);
    }
}

/// BENCHMARKS.md is what `bench/tables.py` writes from `bench/results/*.json`.
#[test]
fn benchmarks_are_written_from_results() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    match Command::new("python3").arg(root.join("bench/tables.py")).arg("--check").output() {
        Ok(checked) => assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr)),
        Err(error) => println!("skipped: python3 does not start: {error}"),
    }
}
