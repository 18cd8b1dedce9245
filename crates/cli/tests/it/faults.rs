//! Tests of file errors: inputs that are damaged, deleted or unreadable, and outputs that cannot be written.
//! Invariant: exit code 1, a message with the path, and no incomplete file under the name of a result. The
//! journal of an interrupted run may remain, because the next run continues from it.

use crate::harness::{Folder, golden};
use flate2::Compression;
use flate2::write::GzEncoder;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Output, Stdio};

/// The file that is written last into the folder of a prediction; it marks the result as complete.
const RUN_RECORD: &str = "run.json";
const READ: &str = "ACGAAAGCAGCAGCAGCAGCTTTTAACGATCAGCATTACG";

/// A few reads with open reading frames, then 800 kB of long titles, so that damage near the end is read while the run
/// computes.
fn reads() -> String {
    let some: String = (0..20).map(|i| format!(">read{i}\n{READ}\n")).collect();
    let many: String = (0..800).map(|i| format!(">n{i} {}\nACGTACGT\n", "words ".repeat(165))).collect();
    some + &many
}

fn gzip(text: &str) -> Vec<u8> {
    let mut encoder = GzEncoder::new(vec![], Compression::none());
    encoder.write_all(text.as_bytes()).expect("memory");
    encoder.finish().expect("memory")
}

/// Contents of files by name.
type Files = BTreeMap<String, Vec<u8>>;

/// All files of a folder except journals; empty if the folder does not exist.
fn files(folder: &Folder, name: &str) -> Files {
    let Ok(entries) = fs::read_dir(folder.path(name)) else { return Files::new() };
    let is_result = |entry: &fs::DirEntry| !entry.file_name().to_string_lossy().ends_with(".journal");
    let read = |entry: fs::DirEntry| {
        let bytes = fs::read(entry.path()).unwrap_or_default();
        (entry.file_name().to_string_lossy().into_owned(), bytes)
    };
    entries.flatten().filter(is_result).map(read).collect()
}

fn predict(input: &str) -> Vec<String> {
    ["predict", input, "--weights", &golden(""), "-o", "out", "-q"].map(str::to_owned).to_vec()
}

fn embed(input: &str) -> Vec<String> {
    let model = if input.ends_with(".faa") { "esm2" } else { "dnabert_s" };
    ["embed", "--model", &golden(model), input, "-o", "out/e.npy", "-q"].map(str::to_owned).to_vec()
}

/// Replaces the folder `out` by an empty folder.
fn fresh(folder: &Folder) {
    let _ = fs::remove_dir_all(folder.path("out"));
    fs::create_dir(folder.path("out")).expect("a folder");
}

/// Asserts that `predict` and `embed` fail on `input` with a message that contains `says`, and leave no files.
fn check_input(folder: &Folder, input: &str, says: &str) {
    for words in [predict(input), embed(input)] {
        fresh(folder);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let ran = folder.run(&words);
        let said = ran.assert_code(1).stderr();
        assert!(said.starts_with(&format!("error: {input}")) && said.contains(says), "{said}");
        assert_eq!(files(folder, "out"), Files::new(), "{words:?}");
    }
}

#[test]
fn a_gzip_file_that_is_damaged() {
    let folder = Folder::new("fault_gzip");
    let whole = gzip(&reads());
    for end in [whole.len() / 2, whole.len() - 8, whole.len() - 1, 12] {
        folder.write("reads.fa.gz", &whole[..end]);
        check_input(&folder, "reads.fa.gz", "ends early");
    }
    // Damage in the length of the second deflate block, in a title (found by the checksum only), and behind
    // the end.
    let mut block = whole.clone();
    let first = usize::from(u16::from_le_bytes([whole[11], whole[12]]));
    block[10 + 5 + first + 1] ^= 0xff;
    let mut letter = whole.clone();
    letter[400_000] = b'W';
    for damaged in [block, letter, [&whole[..], b"text behind the end"].concat()] {
        folder.write("reads.fa.gz", &damaged);
        check_input(&folder, "reads.fa.gz", "corrupt");
    }
}

#[test]
fn text_that_breaks_off_in_the_middle() {
    let folder = Folder::new("fault_fastq");
    let fastq: String = (0..20).map(|i| format!("@r{i}\n{READ}\n+\n{READ}\n")).collect();
    folder.write("reads.fq", &fastq[..fastq.len() - 20]);
    check_input(&folder, "reads.fq", "qualities");
    folder.write("reads.fq", fastq + ">fasta\nACGT\n");
    check_input(&folder, "reads.fq", "FASTA records stand behind FASTQ records");
}

#[test]
fn inputs_that_are_no_files() {
    let folder = Folder::new("fault_folder");
    fs::create_dir(folder.path("reads.fa")).expect("a folder");
    check_input(&folder, "reads.fa", "a folder without sequence files");
    check_input(&folder, "nowhere.fa", "there is no such file");
    folder.write("closed.fa", reads());
    let mut closed = fs::metadata(folder.path("closed.fa")).expect("there").permissions();
    std::os::unix::fs::PermissionsExt::set_mode(&mut closed, 0);
    fs::set_permissions(folder.path("closed.fa"), closed).expect("ours");
    match File::open(folder.path("closed.fa")) {
        Ok(_) => println!("skipped: this user may read every file"),
        Err(_) => check_input(&folder, "closed.fa", "cannot be read"),
    }
}

/// Messages about wrong values name the flag or the file, and the next step.
#[test]
fn what_a_new_user_gets_wrong() {
    let folder = Folder::new("fault_user");
    folder.write("p.faa", ">a\nMKV\n");
    folder.write("text", "hello\n");
    let esm = golden("esm2");
    for (words, says) in [
        (
            &["embed", "p.faa", "--model", &esm, "-o", "e.npy", "--tokens", "-5"][..],
            "'--tokens <N>': give a number of tokens",
        ),
        (&["predict", "p.faa", "--threshold", "-0.1"], "'--threshold <SCORE>': give a score"),
        (&["plan", "--model", &esm, "--budget", "-3"], "`-3` is not a size"),
        (
            &["embed", "p.faa", "--model", &esm, "-o", "none/e.npy"],
            "none/e.npy: cannot be written, because its folder",
        ),
        (&["embed", "p.faa", "--model", &esm, "-o", "p.faa", "--per-input"], "p.faa: an input of this command"),
        (&["embed", "p.faa", "--model", &esm, "-o", "text", "--per-input"], "text is not a folder"),
        (&["plan", "--predict", "--input", "nowhere.fa"], "nowhere.fa: there is no such file"),
        (&["plan", "--predict", "--target", "h100", "--input", "text"], "text, line 1: not FASTA or FASTQ"),
        (
            &["merge", &esm, "-o", "m"],
            "adapter_config.json: there is no such file; give the folder of an adapter",
        ),
    ] {
        let said = folder.run(words).assert_code(1).stderr();
        assert!(said.contains(says), "{words:?}: {said}");
    }
}

/// The second input file is deleted while the first input, a pipe, is still open.
#[test]
fn an_input_that_vanishes() {
    let folder = Folder::new("fault_vanishes");
    folder.write("b.fa", reads());
    fs::create_dir(folder.path("out")).expect("a folder");
    let mut child = Command::new(env!("CARGO_BIN_EXE_plimsoll"))
        .args(["predict", "-", "b.fa", "--weights", &golden(""), "-o", "out"])
        .current_dir(folder.path(""))
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    let mut said = BufReader::new(child.stderr.take().expect("piped"));
    let mut lines = String::new();
    // The first line of output is logged after the models were opened and the inputs were checked.
    said.read_line(&mut lines).expect("text");
    fs::remove_file(folder.path("b.fa")).expect("there");
    write!(child.stdin.take().expect("piped"), ">a\n{READ}\n").expect("it reads");
    said.lines().for_each(|line| lines += &(line.expect("text") + "\n"));
    assert_eq!(child.wait().expect("it ends").code(), Some(1), "{lines}");
    assert!(lines.contains("error: b.fa: there is no such file"), "{lines}");
    assert_eq!(files(&folder, "out"), Files::new());
}

#[test]
fn an_output_in_the_place_of_something_else() {
    let folder = Folder::new("fault_output");
    folder.write("reads.fa", reads());
    folder.write("p.faa", ">a\nMKV\n");
    folder.write("file", "mine");
    fs::create_dir(folder.path("folder.npy")).expect("a folder");
    let esm = golden("esm2");
    let check = |words: &[&str], path: &str| {
        let ran = folder.run(words);
        assert!(ran.assert_code(1).stderr().contains(path), "{}", ran.stderr());
        assert_eq!(folder.read("file"), b"mine");
        let names: Vec<String> = files(&folder, "").into_keys().collect();
        assert_eq!(names, ["file", "folder.npy", "p.faa", "reads.fa"], "{words:?}");
        assert_eq!(files(&folder, "folder.npy"), Files::new());
    };
    for out in ["file", "file/out"] {
        check(&["predict", "reads.fa", "-o", out, "-q"], out);
    }
    for out in ["file/e.npy", "nowhere/e.npy", "folder.npy"] {
        check(&["embed", "--model", &esm, "p.faa", "-o", out, "-q", "--force"], out);
    }
}

/// Runs a shell script that starts the binary with `words` as `"$0" "$@"`.
fn by_shell(folder: &Folder, program: &str, before: &[&str], script: &str, words: &[String]) -> Output {
    let mut command = Command::new(program);
    command.args(before).args(["-c", script, env!("CARGO_BIN_EXE_plimsoll")]).args(words);
    command.current_dir(folder.path("")).stdin(Stdio::null()).output().expect("a shell")
}

/// Asserts that a run failed for lack of space and left no incomplete file: every file in `left` equals the
/// file of the complete result, and the file that is written last is missing. The list of a commit that was not completed
/// stays for the run that continues.
fn check_partial(ran: &Output, left: &Files, whole: &Files, last: &str) {
    let said = String::from_utf8_lossy(&ran.stderr);
    assert_eq!(ran.status.code(), Some(1), "{said}");
    let told = |line: &str| line.starts_with("error: out/") && line.contains("free space");
    assert!(said.lines().any(told), "{said}");
    assert!(!left.contains_key(last), "{last} is there");
    for (name, bytes) in left.iter().filter(|(name, _)| *name != ".commit.json") {
        assert!(whole.get(name) == Some(bytes), "{name}: {} bytes are left", bytes.len());
    }
}

/// A command, its complete results, and the name of the file that is written last.
type Whole = (Vec<String>, Files, &'static str);

/// Runs both commands to completion and returns their results.
fn whole(folder: &Folder) -> [Whole; 2] {
    folder.write("reads.fa", (0..40).map(|i| format!(">read{i}\n{}\n", READ.repeat(9))).collect::<String>());
    folder.write("p.faa", (0..400).map(|i| format!(">protein{i}\nMKVLAAGIVG\n")).collect::<String>());
    let mut predict = predict("reads.fa");
    predict.extend(["--keep-intermediate", "--save-embeddings", "npy"].map(str::to_owned));
    [(predict, RUN_RECORD), (embed("p.faa"), "e.npy")].map(|(words, last)| {
        fresh(folder);
        folder.run(&words.iter().map(String::as_str).collect::<Vec<_>>()).assert_code(0);
        (words, files(folder, "out"), last)
    })
}

/// The maximum file size grows from 0 blocks until the results fit.
#[test]
fn files_that_may_not_grow() {
    let folder = Folder::new("fault_limit");
    for (words, whole, last) in whole(&folder) {
        let mut failed = 0;
        for blocks in [0, 1, 4, 16, 64, 256, 4096] {
            fresh(&folder);
            // Ignoring SIGXFSZ makes writes fail with EFBIG; otherwise the signal would kill the process.
            let script = format!("trap '' XFSZ; ulimit -f {blocks}; exec \"$0\" \"$@\"");
            let ran = by_shell(&folder, "sh", &[], &script, &words);
            let left = files(&folder, "out");
            if ran.status.success() {
                assert_eq!(left.keys().collect::<Vec<_>>(), whole.keys().collect::<Vec<_>>());
                break;
            }
            check_partial(&ran, &left, &whole, last);
            failed += 1;
            if last == RUN_RECORD {
                // Without the limit the same command continues and gives identical results.
                folder.run(&words.iter().map(String::as_str).collect::<Vec<_>>()).assert_code(0);
                let mut found = files(&folder, "out");
                found.insert(RUN_RECORD.to_owned(), whole[RUN_RECORD].clone());
                assert!(found == whole, "{words:?} with {blocks} blocks");
            }
        }
        assert!((2..7).contains(&failed), "{words:?}: {failed} runs failed");
    }
}

/// Output to a file system of a few kB, mounted in a private mount namespace.
#[test]
fn a_disk_that_is_full() {
    let folder = Folder::new("fault_disk");
    let mount = |size: u32| format!("mount -t tmpfs -o size={size}k plimsoll out");
    fs::create_dir(folder.path("out")).expect("a folder");
    let may = Command::new("unshare").args(["-m", "sh", "-c", &mount(4)]).current_dir(folder.path("")).output();
    if !may.is_ok_and(|ran| ran.status.success()) {
        println!("skipped: this user may not mount a file system");
        return;
    }
    for (words, whole, last) in whole(&folder) {
        let mut failed = 0;
        for size in [4, 16, 32, 64, 256, 4096] {
            let script = format!("{} && \"$0\" \"$@\"; code=$?; cp -R out left; exit $code", mount(size));
            let ran = by_shell(&folder, "unshare", &["-m", "sh"], &script, &words);
            let left = files(&folder, "left");
            fs::remove_dir_all(folder.path("left")).expect("it was copied");
            if ran.status.success() {
                break;
            }
            check_partial(&ran, &left, &whole, last);
            failed += 1;
        }
        assert!((2..6).contains(&failed), "{words:?}: {failed} runs failed");
    }
}

/// Output to a read-only file system, mounted in a private mount namespace.
#[test]
fn a_disk_that_is_read_only() {
    let folder = Folder::new("fault_read_only");
    fs::create_dir(folder.path("out")).expect("a folder");
    let mount = "mount -t tmpfs -o ro plimsoll out";
    let may = Command::new("unshare").args(["-m", "sh", "-c", mount]).current_dir(folder.path("")).output();
    if !may.is_ok_and(|ran| ran.status.success()) {
        println!("skipped: this user may not mount a file system");
        return;
    }
    for (words, _, _) in whole(&folder) {
        let script = format!("{mount} && \"$0\" \"$@\"");
        let ran = by_shell(&folder, "unshare", &["-m", "sh"], &script, &words);
        let said = String::from_utf8_lossy(&ran.stderr);
        assert_eq!(ran.status.code(), Some(1), "{said}");
        assert!(said.starts_with("error: out/") && said.contains("Read-only file system"), "{said}");
    }
}

#[test]
fn standard_output_that_is_full() {
    let Ok(full) = File::options().write(true).open("/dev/full") else {
        println!("skipped: there is no /dev/full");
        return;
    };
    let ran = Command::new(env!("CARGO_BIN_EXE_plimsoll"))
        .args(["plan", "--model", "facebook/esm2_t6_8M_UR50D", "--tokens", "64"])
        .stdout(full)
        .output()
        .expect("the binary starts");
    let said = String::from_utf8_lossy(&ran.stderr);
    assert_eq!(ran.status.code(), Some(1), "{said}");
    assert!(said.contains("standard output"), "{said}");
}
