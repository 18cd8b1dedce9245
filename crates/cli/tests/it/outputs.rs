//! Tests of where commands write: a command that is refused changes nothing, and a command that runs replaces only what it
//! may. Invariant: no output is an input, through whatever path or link, and a file that no run wrote is replaced only with
//! `--force`.

use crate::harness::{Folder, example, golden};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{FileTypeExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

const READ: &str = "ACGAAAGCAGCAGCAGCAGCTTTTAACGATCAGCATTACG";

/// A training run of one step on a corpus of a few lines.
const CONFIG: &str = "model: {hidden: 64, layers: 1, heads: 2, intermediate: 64}\ndata: {train: [corpus.txt], longest: 32}\n\
                      batch: {tokens: 64}\nrun: {steps: 1, evaluate_every: 1}\nschedule: {kind: constant, warmup: 0}\n";

/// A folder with inputs of every command, results of a prediction and of a training run, and files of somebody else.
fn folder(name: &str) -> Folder {
    let folder = Folder::new(name);
    let fasta = format!(">a\n{READ}\n>b\n{READ}\n");
    for path in ["w/virus.fna", "w2/chunked.fa", "reads.fa", "other.fa"] {
        folder.write(path, &fasta);
    }
    folder.write("other.fa", format!(">c\n{READ}\n"));
    for name in ["predictions.tsv", "virus.fna", "regions.fna", "windows.tsv", "progress.json", "thesis.tex"] {
        folder.write(&format!("theirs/{name}/{name}"), "theirs");
    }
    for name in ["theirs.html", "theirs.json", "theirs.toml", "theirs.npy", "theirs.txt", "man/plimsoll.1"] {
        folder.write(name, "theirs");
    }
    folder.write("p.faa", ">a\nMKVLAA\n>b\nMKV\n");
    for entry in fs::read_dir(golden("esm2")).expect("goldens").flatten() {
        folder.write(&format!("M/{}", entry.file_name().display()), fs::read(entry.path()).expect("read"));
    }
    folder.write("corpus.txt", "to be or not to be\n\nthat is the question\n".repeat(40));
    folder.write("c.yaml", CONFIG);
    for (target, name) in [("M/model.safetensors", "alias.safetensors"), ("reads.fa", "w3/virus.fna")] {
        fs::create_dir_all(folder.path(name).parent().expect("a folder")).expect("created");
        symlink(folder.path(target), folder.path(name)).expect("linked");
    }
    fs::hard_link(folder.path("p.faa"), folder.path("p.npy")).expect("linked");
    folder.run(&["predict", "reads.fa", "--weights", &golden(""), "-o", "results", "-q"]).assert_code(0);
    fs::hard_link(folder.path("results/predictions.tsv"), folder.path("table.svg")).expect("linked");
    folder.run(&["train", "c.yaml", "-o", "run", "-q"]).assert_code(0);
    for name in ["pipe.yaml", "pipe.toml"] {
        let made = Command::new("mkfifo").arg(folder.path(name)).status();
        assert!(made.is_ok_and(|made| made.success()), "mkfifo");
    }
    folder
}

/// Content of every file of a folder and of its subfolders, and target of every link, by path.
fn tree(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir(folder).expect("read").flatten() {
        let path = entry.path();
        let of = entry.file_type().expect("a type");
        if of.is_dir() {
            all.extend(tree(&path));
        } else if of.is_symlink() {
            let target = fs::read_link(&path).expect("a link");
            all.insert(path, target.into_os_string().into_encoded_bytes());
        } else if !of.is_fifo() {
            let bytes = fs::read(&path).expect("read");
            all.insert(path, bytes);
        }
    }
    all
}

/// Whether a file is a temporary file, apart from the one of somebody else.
fn is_part(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending == "part") && !path.ends_with(".page.html.x.part")
}

/// Commands that are refused, and what the error says. `G` stands for the folder of models.
const REFUSED: [(&str, &str); 64] = [
    // An input in the output folder.
    ("predict w/virus.fna --weights G -o w", "w/virus.fna: an input of this command cannot be its output too"),
    ("predict w/virus.fna --weights G -o w --force", "an input of this command"),
    ("predict w/virus.fna --weights G -o ./w/../w --force", "w/virus.fna, an input of this command"),
    ("predict w/virus.fna -o w --force", "an input of this command"),
    ("predict w2/chunked.fa --weights G -o w2 --keep-intermediate --force", "an input of this command"),
    ("predict reads.fa --weights G -o w3 --force", "reads.fa, an input of this command"),
    ("predict results/virus.fna --weights G -o results --force", "an input of this command"),
    // Files of somebody else in the output folder.
    (
        "predict reads.fa --weights G -o theirs/predictions.tsv",
        "predictions.tsv: no run of plimsoll wrote this file",
    ),
    ("predict reads.fa --weights G -o theirs/virus.fna", "virus.fna: no run of plimsoll wrote this file"),
    ("predict reads.fa --weights G -o theirs/regions.fna", "regions.fna: no run of plimsoll wrote this file"),
    ("predict reads.fa -o theirs/windows.tsv", "windows.tsv: no run of plimsoll wrote this file"),
    ("predict reads.fa --weights G -o theirs/progress.json", "(`progress.json`)"),
    ("predict reads.fa --weights G -o theirs/thesis.tex", "(`thesis.tex`)"),
    ("predict reads.fa --weights G -o theirs/thesis.tex --force", "(`thesis.tex`)"),
    ("predict reads.fa --weights G -o .", "files that do not belong to a prediction"),
    ("predict reads.fa --weights G -o . --force", "files that do not belong to a prediction"),
    ("predict reads.fa --weights G -o run", "contains the result of another run"),
    ("predict reads.fa --weights G -o run --force", "files that do not belong to a prediction"),
    ("predict other.fa --weights G -o results", "contains the result of another run"),
    // Files that are inputs, and files that exist.
    ("embed p.faa --model M -o p.npy --force", "p.npy: this file is p.faa, an input of this command"),
    ("embed p.faa --model M -o alias.safetensors --force", "model.safetensors, an input of this command"),
    ("embed p.faa --model M -o M/model.safetensors --force", "an input of this command"),
    ("embed p.faa --model M -o theirs.npy", "theirs.npy: the file already exists; use --force"),
    (
        "embed p.faa --model M -o M/vocab.npy --log-file M/vocab.npy",
        "M/vocab.npy: this file is also the output M/vocab.npy",
    ),
    ("classify p.faa --model M -o p.faa --force", "an input of this command"),
    ("classify p.faa --model M -o M/config.json --force", "an input of this command"),
    ("classify p.faa --model M -o theirs.txt", "theirs.txt: the file already exists"),
    ("convert M/model.safetensors -o M/model.safetensors --force", "an input of this command"),
    ("convert M -o alias.safetensors --force", "an input of this command"),
    ("report results -o results/run.json --force", "an input of this command"),
    ("report results -o results/predictions.tsv --force", "an input of this command"),
    ("report run -o run/metrics.jsonl --force", "an input of this command"),
    ("report results -o theirs.html", "theirs.html: the file already exists"),
    ("plot results -o table.svg --force", "predictions.tsv, an input of this command"),
    ("evaluate run/checkpoints/step-00000001 -o run/config.yaml --force", "an input of this command"),
    ("evaluate run/checkpoints/step-00000001 -o corpus.txt --force", "an input of this command"),
    (
        "evaluate run/checkpoints/step-00000001 -o run/checkpoints/step-00000001/model.safetensors --force",
        "an input of this",
    ),
    ("plan --model M --html M/model.safetensors", "an input of this command"),
    ("plan --model M --trace M/config.json --force", "an input of this command"),
    ("plan --model M --memory-viz alias.safetensors --force", "an input of this command"),
    ("plan --model M --html theirs.html", "theirs.html: the file already exists"),
    ("plan --model M --html new.html --trace ./new.html", "new.html: this file is also the output new.html"),
    ("plan --model M --html new.html --target pipe.toml", "a pipe; this file must be a regular file"),
    ("plan --model M --force", "--force replaces the files of --html"),
    ("plan --train c.yaml --html corpus.txt --force", "an input of this command"),
    ("plan --train c.yaml --html c.yaml --force", "an input of this command"),
    ("plan --train pipe.yaml", "a pipe; this file must be a regular file"),
    ("bench --model M --trace M/config.json --force", "an input of this command"),
    ("bench --model M --timeline theirs.html", "theirs.html: the file already exists"),
    ("bench --calibrate theirs.toml", "theirs.toml: the file already exists"),
    ("man -o man", "man/plimsoll.1: the file already exists"),
    // Training.
    ("train c.yaml -o results", "results contains the results of a prediction"),
    ("train c.yaml -o theirs", "and no run.json of a training run"),
    ("train c.yaml -o .", "and no run.json of a training run"),
    ("train c.yaml -o /", "and no run.json of a training run"),
    ("train c.yaml -o new --timeline corpus.txt", "corpus.txt: an input of this command"),
    ("train c.yaml -o new --timeline ./corpus.txt --force", "corpus.txt, an input of this command"),
    ("train c.yaml -o new --timeline theirs.html", "theirs.html: the file already exists"),
    ("train pipe.yaml -o new", "a pipe; this file must be a regular file"),
    // Logs.
    ("train c.yaml -o new --log-file corpus.txt", "corpus.txt: an input of this command"),
    ("train c.yaml -o new --log-file c.yaml", "c.yaml: an input of this command"),
    ("predict reads.fa --weights G -o new --log-file reads.fa", "reads.fa: an input of this command"),
    ("embed p.faa --model M -o new.npy --log-file M/config.json", "an input of this command"),
    ("embed p.faa --model M -o new.npy --log-file theirs.txt", "has other content than a log of plimsoll"),
];

#[test]
fn a_refused_command_changes_nothing() {
    let folder = folder("outputs_refused");
    let before = tree(&folder.path(""));
    for (command, says) in REFUSED {
        let models = golden("");
        let words: Vec<&str> =
            command.split(' ').map(|word| if word == "G" { &*models } else { word }).collect();
        let ran = folder.run(&words);
        assert!(matches!(ran.code(), 1 | 3), "{command}: {}\n{}", ran.code(), ran.stderr());
        assert!(ran.stderr().contains(says), "{command}: {}", ran.stderr());
        let after = tree(&folder.path(""));
        let changed =
            before.iter().find(|(path, bytes)| after.get(*path) != Some(*bytes)).map(|(path, _)| path);
        assert_eq!(changed, None, "{command}");
        let new = after.keys().find(|path| !before.contains_key(*path));
        assert_eq!(new, None, "{command}");
    }
}

/// Commands that run, in this order, and the files of somebody else that they replace. `G` stands for the folder of models.
const ALLOWED: [(&str, &[&str]); 16] = [
    ("predict reads.fa --weights G -o results", &[]),
    ("predict other.fa --weights G -o results --force", &[]),
    ("predict reads.fa --weights G -o theirs/virus.fna --force", &["theirs/virus.fna/virus.fna"]),
    ("embed p.faa --model M -o theirs.npy --force", &["theirs.npy", "theirs.json"]),
    ("convert M -o new.safetensors --log-file new.log", &[]),
    ("convert M -o new.safetensors --force --log-file new.log", &[]),
    ("report results -o theirs.html --force", &["theirs.html"]),
    ("report results -o results/page.html", &[]),
    ("report results -o results/page.html --force", &[]),
    ("plan --model M --html page.html --trace M/trace.new", &[]),
    ("plan --model M --html page.html --force", &[]),
    ("plan --model M --html link.html --force", &["linked.html"]),
    ("plan --model M --trace /dev/null", &[]),
    ("man -o man --force", &["man/plimsoll.1"]),
    ("train c.yaml -o run --timeline step.html", &[]),
    ("train c.yaml -o run --timeline step.html", &[]),
];

#[test]
fn a_command_replaces_only_what_it_may() {
    let folder = folder("outputs_allowed");
    folder.write("linked.html", "theirs");
    symlink("linked.html", folder.path("link.html")).expect("linked");
    // A result by name that no run wrote, and a temporary file of a killed process.
    folder.write("results/embeddings.npy", "theirs");
    folder.write(".page.html.4194305-0.part", "half");
    folder.write(".page.html.x.part", "theirs");
    let is_theirs = |bytes: &Vec<u8>| bytes == b"theirs";
    let mut theirs: Vec<PathBuf> =
        tree(&folder.path("")).into_iter().filter(|(_, b)| is_theirs(b)).map(|(p, _)| p).collect();
    for (command, replaced) in ALLOWED {
        let models = golden("");
        let words: Vec<&str> =
            command.split(' ').map(|word| if word == "G" { &*models } else { word }).collect();
        let ran = folder.run(&words);
        assert_eq!(ran.code(), 0, "{command}: {}", ran.stderr());
        for name in replaced {
            let path = folder.path(name);
            assert_ne!(fs::read(&path).expect("written"), b"theirs", "{command}: {name}");
            theirs.retain(|other| *other != path);
        }
        let lost = theirs.iter().find(|path| fs::read(path).ok().as_deref() != Some(b"theirs"));
        assert_eq!(lost, None, "{command}");
    }
    assert!(fs::symlink_metadata(folder.path("link.html")).expect("there").is_symlink(), "a link stays");
    assert!(!folder.path(".page.html.4194305-0.part").exists(), "the file of a killed process goes");
    let parts: Vec<PathBuf> = tree(&folder.path("")).into_keys().filter(|path| is_part(path)).collect();
    assert_eq!(parts, Vec::<PathBuf>::new());
}

/// A page that is written to standard output is alone there, and the link in `/dev` stays.
#[test]
fn standard_output_is_written_to() {
    let folder = folder("outputs_stream");
    let before = fs::read_link("/dev/stdout").ok();
    for command in ["plan --model M --html /dev/stdout", "report results -o /dev/fd/1"] {
        let ran = folder.run(&command.split(' ').collect::<Vec<_>>());
        let page = ran.assert_code(0).stdout();
        assert!(page.starts_with("<!") && page.trim_end().ends_with("</html>"), "{command}: {page}");
    }
    assert_eq!(fs::read_link("/dev/stdout").ok(), before);
}

/// Names that spreadsheets would run, or that hide what they are.
#[test]
fn names_are_no_formulas() {
    let folder = Folder::new("outputs_formulas");
    let ids = ["=cmd|'/C'!A0", "+a", "-b", "@c", "gpj.\u{202e}exe", "'=d"];
    let fasta: String = ids.iter().map(|id| format!(">{id}\n{READ}\n")).collect();
    folder.write("=reads.fa", fasta);
    let words =
        ["predict", "./=reads.fa", "--weights", &golden(""), "--threshold", "0", "--source", "-o", "out", "-q"];
    folder.run(&words).assert_code(0);
    let shown = ["'=cmd|'/C'!A0", "'+a", "'-b", "'@c", "gpj.\\u{202e}exe", "\\'=d"];
    for (file, rows) in [("predictions.tsv", 1), ("windows.tsv", 1), ("prediction_results.txt", 1)] {
        let text = String::from_utf8(folder.read(&format!("out/{file}"))).expect("UTF-8");
        let cells = text.lines().skip(rows).flat_map(|line| line.split('\t'));
        let is_run = |cell: &str| cell.len() > 1 && cell.starts_with(['=', '+', '-', '@']);
        assert_eq!(cells.clone().find(|cell| is_run(cell)), None, "{file}");
        assert!(shown.iter().all(|id| cells.clone().any(|cell| cell.starts_with(id))), "{file}: {text}");
    }
    let sample = String::from_utf8(folder.read("out/plimsoll_mqc.tsv")).expect("UTF-8");
    assert!(sample.lines().any(|line| line.starts_with("'=reads\t")), "{sample}");
    // The readers of the tables know the names.
    folder.run(&["plot", "out", "--record", "=cmd|'/C'!A0", "-o", "a.svg"]).assert_code(0);
    folder.run(&["plot", "out", "--record", "\\'=d", "-o", "d.svg"]).assert_code(0);
}

/// A file that reaches the limit of the system on its size is an error that names the limit, and leaves nothing behind.
#[test]
fn a_limit_on_the_size_of_files() {
    if Command::new("prlimit").arg("--version").output().is_err() {
        println!("skipped: there is no prlimit here");
        return;
    }
    let folder = folder("outputs_limit");
    let reads = example("reads.fa");
    let before = tree(&folder.path(""));
    for command in [
        vec!["embed", "p.faa", "--model", "M", "-o", "new.npy", "-q"],
        vec!["plan", "--model", "M", "--html", "new.html"],
        vec!["report", "results", "-o", "new.html"],
        vec!["predict", &reads, "-o", "new", "-q"],
    ] {
        let mut limited = Command::new("prlimit");
        limited.args(["--fsize=300", "--core=0"]).arg(env!("CARGO_BIN_EXE_plimsoll")).args(&command);
        let ran =
            limited.current_dir(folder.path("")).env("HF_HUB_OFFLINE", "1").output().expect("prlimit starts");
        let said = String::from_utf8_lossy(&ran.stderr);
        assert_eq!(ran.status.code(), Some(1), "{command:?}: {:?} {said}", ran.status);
        assert!(
            said.contains("limit: the limit on file size in bytes (ulimit -f) is 300"),
            "{command:?}: {said}"
        );
        let after = tree(&folder.path(""));
        let left: Vec<_> = after.keys().filter(|path| !before.contains_key(*path)).collect();
        assert!(
            left.iter().all(|path| path.ends_with("progress.journal") || path.ends_with("new.npy.journal")),
            "{command:?}: {left:?}"
        );
        let _ = fs::remove_dir_all(folder.path("new"));
        let _ = fs::remove_file(folder.path("new.npy.journal"));
    }
}
