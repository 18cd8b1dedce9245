//! docs/training-memory.md shows real output: its blocks are run and compared, and so is every row of its tables.

use crate::harness::Folder;
use serde_json::Value;

const DOCUMENT: &str = include_str!("../../../../docs/training-memory.md");

/// A folder with the configurations that the document plans.
fn examples(test: &str) -> Folder {
    let folder = Folder::new(test);
    folder.write("examples/dense-7b.yaml", include_str!("../../../../examples/dense-7b.yaml"));
    folder.write("examples/moe-4b.yaml", include_str!("../../../../examples/moe-4b.yaml"));
    folder
}

/// Lines are shown as they are, in order; `...` stands for any others.
#[test]
fn training_memory_shows_what_the_program_says() {
    let folder = examples("document_blocks");
    let mut blocks = 0;
    for block in DOCUMENT.split("```\n$ plimsoll ").skip(1) {
        let (command, shown) = block.split_once('\n').expect("a command and its output");
        let shown = shown.split("\n```").next().expect("the end of the block");
        let ran = folder.run(&command.split_whitespace().collect::<Vec<_>>());
        let said = format!("{}{}", ran.stdout(), ran.stderr());
        let (mut rest, mut any) = (said.trim_end().lines(), false);
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
    assert_eq!(blocks, 7);
}

/// The command of a block without output is what the flags of the next table are added to.
#[test]
fn training_memory_has_the_numbers_of_plans() {
    let folder = examples("document_tables");
    let (mut command, mut columns, mut rows) = ("", vec![], 0);
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
        let plan: Value = serde_json::from_str(&folder.run(&words).ended(0).stdout()).expect("JSON");
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
