//! Tests that `--memory-budget` bounds the memory of the whole process. Invariant: the peak resident memory
//! reported by the kernel, mapped files included, is within the budget, or the command is refused with exit
//! code 4.

use crate::harness::{Folder, example, golden};
use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Read, Write};
use std::path::Path;
use std::process::Stdio;

/// Pseudo-random numbers with a fixed seed, so that every run of a test is identical.
struct Draws(u64);

impl Draws {
    fn below(&mut self, most: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % most
    }
}

/// Exit code, peak resident bytes and messages of a finished command.
struct Ended {
    code: Option<i32>,
    peak: u64,
    said: String,
}

/// Runs a command and polls its peak resident memory until it ends. The kernel's VmHWM never decreases, so the
/// last value read is the peak up to that time.
fn measured(folder: &Folder, words: &[String]) -> Ended {
    measured_with(folder, words, Stdio::null())
}

/// As [`measured`], with `input` as standard input.
fn measured_with(folder: &Folder, words: &[String], input: Stdio) -> Ended {
    let mut child = folder
        .command(&words.iter().map(String::as_str).collect::<Vec<_>>())
        .stdin(input)
        .stdout(Stdio::null())
        .spawn()
        .expect("the binary starts");
    let mut stderr = child.stderr.take().expect("piped");
    let said = std::thread::spawn(move || {
        let mut said = String::new();
        let _ = stderr.read_to_string(&mut said);
        said
    });
    let status = format!("/proc/{}/status", child.id());
    let mut peak = 0;
    let code = loop {
        if let Ok(file) = File::open(&status) {
            let line =
                BufReader::new(file).lines().map_while(Result::ok).find(|line| line.starts_with("VmHWM:"));
            let kib = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
            peak = peak.max(kib.unwrap_or(0) * 1024);
        }
        if let Some(status) = child.try_wait().expect("a child") {
            break status.code();
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    };
    Ended { code, peak, said: said.join().expect("text") }
}

/// Asserts that a command stays within its budget or is refused; returns whether it ran.
fn check(folder: &Folder, words: &[String], budget: u64) -> bool {
    let Ended { code, peak, said } = measured(folder, words);
    match code {
        Some(4) => {
            assert!(said.contains("--memory-budget") || said.contains("refused"), "{words:?}: {said}");
            false
        }
        Some(0) => {
            assert!(peak <= budget, "{words:?}: {peak} B at the peak\n{said}");
            true
        }
        code => panic!("{words:?}: exit code {code:?}\n{said}"),
    }
}

/// Writes `count` pseudo-random bases in lines of 80.
fn bases(out: &mut impl Write, draws: &mut Draws, count: usize) {
    let mut line = [b'\n'; 81];
    for first in (0..count).step_by(80) {
        let width = (count - first).min(80);
        line[..width].iter_mut().for_each(|base| *base = b"ACGT"[draws.below(4) as usize]);
        line[width] = b'\n';
        out.write_all(&line[..=width]).expect("written");
    }
}

/// Writes a FASTA file with `records` records of `length` bases.
fn write(path: &Path, draws: &mut Draws, records: usize, length: usize) {
    let mut out = BufWriter::new(File::create(path).expect("a file"));
    for record in 0..records {
        writeln!(out, ">record_{record}").expect("written");
        bases(&mut out, draws, length);
    }
    out.flush().expect("written");
}

fn words(list: &[&str]) -> Vec<String> {
    list.iter().map(|word| (*word).to_owned()).collect()
}

/// Runs of a caller with pseudo-random budgets, windows and threads over long, short, many and paired records.
#[test]
fn the_peak_of_a_caller_is_within_the_budget_or_the_run_is_refused() {
    let folder = Folder::new("memory_caller");
    let mut draws = Draws(23);
    let inputs = [("long.fa", 1, 500_000), ("short.fa", 3_000, 150), ("mates.fa", 2, 100_000)];
    for (name, records, length) in inputs {
        write(&folder.path(name), &mut draws, records, length);
    }
    let text = String::from_utf8(folder.read("mates.fa")).expect("text");
    folder.write("mates.fa", text.replace("record_0", "m/1").replace("record_1", "m/2"));
    // A calibration is for windows of one length.
    let callers = ["100", "333", "1000"].map(|window| {
        let caller = folder.path(&format!("caller{window}"));
        std::fs::create_dir(&caller).expect("a folder");
        for file in ["config.json", "model.safetensors"] {
            std::fs::copy(golden(&format!("caller/{file}")), caller.join(file)).expect("copied");
        }
        let text = std::fs::read_to_string(golden("caller/calibration.json")).expect("a calibration");
        let text = text.replace("\"window\": 1000", &format!("\"window\": {window}"));
        std::fs::write(caller.join("calibration.json"), text).expect("written");
        format!("caller{window}")
    });
    let mut ran = 0;
    let mut refused = 0;
    for case in 0..15 {
        let input = inputs[case % 3].0;
        let budget =
            [10, 56, 62, 66, 70, 80, 100, 300][draws.below(8) as usize] * 1_000_000 + draws.below(4_000_000);
        let size = budget.to_string();
        let output = format!("out{case}");
        let threads = (1 + draws.below(3)).to_string();
        let caller = &*callers[draws.below(3) as usize];
        let mut list =
            vec!["predict", input, "--caller", caller, "--memory-budget", &size, "--threads", &threads];
        list.extend(["--threshold", "0", "-q", "-o", &output]);
        list.extend((input == "mates.fa").then_some("--paired"));
        if check(&folder, &words(&list), budget) { ran += 1 } else { refused += 1 }
    }
    assert!(ran > 4 && refused > 0, "{ran} ran, {refused} were refused");
}

/// Sixty pseudo-random combinations of command, input, budget and threads.
#[test]
fn the_peak_is_within_the_budget_or_the_run_is_refused() {
    let folder = Folder::new("memory_budget");
    let mut draws = Draws(17);
    let inputs = [("few.fa", 40, 700), ("long.fa", 1, 300_000), ("short.fa", 4_000, 60), ("empty.fa", 0, 0)];
    for (name, records, length) in inputs {
        write(&folder.path(name), &mut draws, records, length);
    }
    let protein: String = (0..300).map(|i| format!(">p{i}\n{}\n", "MKVLAARW".repeat(1 + i % 20))).collect();
    folder.write("proteins.faa", protein);
    let esm = golden("esm2");
    let dnabert = golden("dnabert_s");
    let goldens = golden("");
    let classes: String = (0..300).map(|i| format!("p{i}\t{}\n", i % 2)).collect();
    folder.write("classes.tsv", classes);
    let classifier = format!(
        "model: {{kind: esm2, from: '{esm}', classes: 2}}\n\
         data: {{format: fasta, train: [proteins.faa], labels: classes.tsv, longest: 256, validation_fraction: 0}}\n\
         batch: {{tokens: 512}}\nschedule: {{warmup: 0}}\nrun: {{steps: 1}}\n"
    );
    folder.write("classifier.yaml", classifier);
    folder.run(&["train", "classifier.yaml", "-q", "-o", "classifier"]).assert_code(0);
    let caller = golden("caller");
    let few = ["predict", "few.fa", "--caller", &caller];
    for shard in ["1/2", "2/2"] {
        folder
            .run(&[&few[..], &["-q", "--shard", shard, "-o", &format!("shard{}", &shard[..1])]].concat())
            .assert_code(0);
    }
    let data = format!("data.train=[\"{}\"]", example("corpus.txt"));
    let mut ran = 0;
    let mut refused = 0;
    for case in 0..60 {
        // Budgets from 10 MB, too small for any command, to 400 MB.
        let budget = [10, 24, 32, 40, 48, 56, 64, 80, 100, 140, 200, 400][draws.below(12) as usize] * 1_000_000
            + draws.below(4_000_000);
        let size = budget.to_string();
        let input = inputs[draws.below(4) as usize].0;
        let threads = (1 + draws.below(4)).to_string();
        let output = format!("out{case}");
        let mut command = match draws.below(7) {
            0 => words(&["predict", input, "--caller", &caller, "-o", &output]),
            1 => words(&["predict", input, "--weights", &goldens, "-o", &output, "--keep-intermediate"]),
            2 => words(&["embed", "--model", &esm, "proteins.faa", "-o", &format!("{output}.npy")]),
            3 => {
                let file = format!("{output}.{}", ["npy", "safetensors", "parquet"][draws.below(3) as usize]);
                words(&["embed", "--model", &dnabert, input, "--truncate", "--max-length", "900", "-o", &file])
            }
            4 => words(&[
                "classify",
                "--model",
                "classifier/checkpoints/step-00000001",
                "proteins.faa",
                "-o",
                &format!("{output}.tsv"),
            ]),
            5 => words(&[&few[..], &["--merge", "shard1", "--merge", "shard2", "-o", &output]].concat()),
            _ => words(&[
                "train",
                &example("moe-mini.yaml"),
                "-q",
                "--set",
                "model.hidden=64",
                "--set",
                "model.layers=1",
                "--set",
                "run.steps=1",
                "--set",
                "schedule.warmup=0",
                "--set",
                &data,
                "-o",
                &output,
            ]),
        };
        command.extend(words(&["--memory-budget", &size]));
        if command[0] == "train" {
            command.extend(words(&["--set", &format!("run.threads={threads}")]))
        } else {
            command.extend(words(&["-q", "--threads", &threads]))
        }
        if check(&folder, &command, budget) { ran += 1 } else { refused += 1 }
    }
    assert!(ran >= 15 && refused >= 10, "{ran} ran, {refused} were refused");
}

/// A refusal names the smallest sufficient budget, and the command fits in that budget.
#[test]
fn the_least_that_a_refusal_names_is_enough() {
    let folder = Folder::new("memory_least");
    let reads = example("reads.fa");
    let run = |output: &str, budget: &str| {
        words(&["predict", &reads, "-o", output, "--memory-budget", budget, "--threads", "2"])
    };
    let refused = measured(&folder, &run("refused", "10MB"));
    assert_eq!(refused.code, Some(4), "{}", refused.said);
    assert!(refused.said.contains("process: code and tables"), "{}", refused.said);
    let least = refused.said.split("--memory-budget ").nth(1).and_then(|text| text.split(' ').next());
    let least: u64 = least.expect("a number").parse().expect("a number");
    assert!(check(&folder, &run("enough", &least.to_string()), least), "{least} B are refused");
}

/// A run with plans for several sizes stays within its budget too.
#[test]
fn the_peak_of_steps_of_several_sizes_is_within_the_budget() {
    let folder = Folder::new("memory_sizes");
    let reads = golden("pipeline/reads.fa");
    let weights = golden("");
    let mut ran = 0;
    for megabytes in [90, 110, 130, 170, 250] {
        let budget = format!("{megabytes}MB");
        let output = format!("out{megabytes}");
        let dynamic = "balanced,adjustment_frequency=1";
        let run = ["predict", &reads, "--weights", &weights, "-o", &output, "--memory-budget", &budget];
        let run = words(&[&run[..], &["--threads", "2", "--dynamic", dynamic]].concat());
        ran += usize::from(check(&folder, &run, megabytes * 1_000_000));
    }
    assert!(ran >= 2, "{ran} ran");
}

/// The size of input from a pipe is unknown before it is read. It gets a share of the budget; a record or a
/// number of records that exceeds the share ends the run before it is stored.
#[test]
fn a_pipe_is_held_to_its_share_of_the_line() {
    let folder = Folder::new("memory_pipe");
    let mut draws = Draws(8);
    write(&folder.path("few.fa"), &mut draws, 40, 700);
    write(&folder.path("long.fa"), &mut draws, 1, 30_000_000);
    folder.write("titled.fa", format!(">a {}\nACGT\n", "x".repeat(3_000_000)));
    // Stop codons in every frame leave no open reading frames to compute.
    folder.write("many.fa", ">a\nTAATTAATTAACTAATTAATTAACTAATTAATTAAC\n".repeat(500_000));
    folder.write("few.fq", "@a\nACGTACGT\n+\nIIIIIIII\n".repeat(40));
    folder.write("long.fq", format!("@a\n{}\n", "ACGT".repeat(5_000_000)));
    let dnabert = golden("dnabert_s");
    let budget = 100_000_000;
    let commands = [
        words(&["predict", "-", "--weights", &golden(""), "-q", "--threads", "2"]),
        words(&[
            "embed",
            "--model",
            &dnabert,
            "-",
            "--truncate",
            "--max-length",
            "400",
            "-q",
            "--threads",
            "2",
        ]),
    ];
    let refusals = [
        ("few.fa", None),
        ("few.fq", None),
        ("long.fa", Some("'record_0': a record has more than 1562500 letters, the limit under the memory")),
        ("long.fq", Some("'a': a record has more than 1562500 letters")),
        ("titled.fa", Some("a title has more than ")),
        ("many.fa", Some("there are more than 4")),
    ];
    for (k, command) in commands.iter().enumerate() {
        // `embed` would compute all 500 000 records of many.fa, which takes long.
        for (input, refusal) in refusals.into_iter().filter(|(input, _)| k == 0 || *input != "many.fa") {
            let output = format!("{input}.{k}{}", if k == 1 { ".npy" } else { "" });
            let more = words(&["-o", &output, "--memory-budget", &budget.to_string()]);
            let stdin = File::open(folder.path(input)).expect("a file");
            let Ended { code, peak, said } =
                measured_with(&folder, &[&command[..], &more].concat(), stdin.into());
            assert!(peak <= budget, "{command:?} {input}: {peak} B at the peak\n{said}");
            assert_eq!(code, Some(if refusal.is_some() { 4 } else { 0 }), "{command:?} {input}: {said}");
            assert!(refusal.is_none_or(|refusal| said.contains(refusal)), "{command:?} {input}: {said}");
        }
    }
    // More sequences in queues (`--prefetch 128`) fit in a larger budget.
    let more = words(&["-o", "queues.npy", "--prefetch", "128", "--memory-budget", "1GB"]);
    let stdin = File::open(folder.path("few.fa")).expect("a file");
    let Ended { code, said, .. } = measured_with(&folder, &[&commands[1][..], &more].concat(), stdin.into());
    assert_eq!(code, Some(0), "{said}");
}

/// A record of 1 million bases and 10 000 short reads; 100 times as large with `PLIMSOLL_LARGE_INPUTS=1`.
#[test]
fn one_long_record_and_many_short_reads() {
    let folder = Folder::new("memory_large");
    let large = std::env::var_os("PLIMSOLL_LARGE_INPUTS").is_some();
    let share = if large { 1 } else { 100 };
    let mut draws = Draws(4);
    // Stop codons in every frame leave almost nothing for the encoders, so the test measures readers and queues.
    let stops = "TAATTAATTAAC".repeat(100_000_000 / share / 12);
    let lines: Vec<&str> =
        stops.as_bytes().chunks(80).map(|line| std::str::from_utf8(line).expect("text")).collect();
    folder.write("long.fa", format!(">chromosome\n{}\n", lines.join("\n")));
    let mut out = BufWriter::new(File::create(folder.path("reads.fa")).expect("a file"));
    for read in 0..1_000_000 / share {
        writeln!(out, ">read_{read}").expect("written");
        match read % 500 {
            0 => bases(&mut out, &mut draws, 60),
            _ => out.write_all(b"TAATTAATTAACTAATTAATTAACTAATTAATTAAC\n").expect("written"),
        }
    }
    drop(out);
    for (input, name) in [("long.fa", "chromosome"), ("reads.fa", "names of records")] {
        let mut fitted = false;
        for budget in [60_000_000, 100_000_000, 250_000_000, 500_000_000] {
            let output = format!("{input}.{budget}");
            let command = words(&[
                "predict",
                input,
                "--weights",
                &golden(""),
                "-o",
                &output,
                "-q",
                "--threads",
                "2",
                "--memory-budget",
                &budget.to_string(),
            ]);
            let Ended { code, peak, said } = measured(&folder, &command);
            match code {
                Some(4) => assert!(!fitted && said.contains(name), "{command:?}: {said}"),
                Some(0) => assert!(peak <= budget, "{command:?}: {peak} B at the peak"),
                code => panic!("{command:?}: {code:?}\n{said}"),
            }
            fitted |= code == Some(0);
        }
        assert!(fitted, "{input} was refused with 500 MB");
    }
}
