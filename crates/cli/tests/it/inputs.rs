//! Tests of the files that commands read: what is dropped with a note, refused with its place, skipped in folders, or named as a
//! file of another format. Invariant: one table for each kind of input; a row is the files, the command and what is wanted.

use crate::harness::{Folder, golden};

/// A row: files, command, exit code, and texts that the output contains.
type Row<'a> = (&'a [(&'a str, &'a [u8])], &'a [&'a str], i32, &'a [&'a str]);

/// Runs each row in a folder of its own. `ESM`, `DNA` and `CALLER` in a command are the golden models.
fn check(test: &str, rows: &[Row<'_>]) {
    let models = [("ESM", golden("esm2")), ("DNA", golden("dnabert_s")), ("CALLER", golden("caller"))];
    for (number, (files, words, code, wanted)) in rows.iter().enumerate() {
        let folder = Folder::new(&format!("inputs_{test}_{number}"));
        for (name, bytes) in *files {
            folder.write(name, bytes);
        }
        let of_model = |word: &&str| {
            let model = models.iter().find(|(name, _)| name == word).map(|(_, path)| path.clone());
            model.unwrap_or_else(|| (*word).to_owned())
        };
        let words: Vec<String> = words.iter().map(of_model).collect();
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let ran = folder.run(&words);
        let output = ran.assert_code(*code).stderr() + &ran.stdout();
        for text in *wanted {
            assert!(output.contains(text), "{words:?}: no `{text}` in\n{output}");
        }
    }
}

const DNA: &[u8] = b">a\nACGAAAGCAGCAGCAGCA\n";

#[test]
fn what_is_odd_is_noted_or_refused_by_every_command() {
    let embed = &["embed", "--model", "ESM", "p.faa", "-o", "e.npy"][..];
    let strict = &["embed", "--model", "ESM", "p.faa", "-o", "e.npy", "--strict"][..];
    let predict = &["predict", "r.fa", "--caller", "CALLER", "-o", "out"][..];
    let strictly = &["predict", "r.fa", "--caller", "CALLER", "-o", "out", "--strict"][..];
    let stop = &[("p.faa", &b">a\nMKVL\n>b\nMK*VLAJ\n"[..])][..];
    let note = "2 unknown tokens in 1 record, the first is 'b'";
    check(
        "odd",
        &[
            (stop, embed, 0, &[note]),
            (stop, strict, 1, &["--strict: 'b' has 2 unknown tokens"]),
            (&[("p.faa", b">a\nMK-V.L\n")], embed, 0, &["p.faa: 2 gaps ('-' and '.') in 1 record"]),
            (&[("p.faa", b">a\nMK-V.L\n")], strict, 1, &["--strict: p.faa: 2 gaps"]),
            (
                &[("p.faa", b">a\nM#?J*KVAA*\n>b\nMK#?J??\n")],
                embed,
                1,
                &["line 3, 'b'", "no protein: 2 of 7 letters"],
            ),
            (&[("p.faa", b">a\nMK<mask>V\n")], embed, 1, &["p.faa, line 2, 'a': byte 3 of the line is '<'"]),
            (&[("p.faa", b"")], embed, 0, &["p.faa: the file has no record"]),
            (&[("p.faa", b"")], strict, 1, &["--strict: p.faa: the file has no record"]),
            (&[("r.fa", b">a\nACGT>b\nACGT\n")], predict, 1, &["r.fa, line 2, 'a': byte 5 of the line is '>'"]),
            (&[("r.fa", b"        1 acgt acgt\n")], predict, 1, &["not FASTA"]),
            (
                &[("r.fa", b">a\n1 acgt\n")],
                predict,
                0,
                &["r.fa: 2 blanks and digits in sequence lines of 1 record"],
            ),
            (&[("r.fa", b">a\nAC-GT\n")], strictly, 1, &["--strict: 'a': gaps: r.fa: 1 gap"]),
            (&[("r.fa", b"\n")], predict, 0, &["r.fa: the file has no record"]),
            (&[("r.fa", b"\n")], strictly, 1, &["--strict: 'r.fa': no_records"]),
        ],
    );
}

/// DNABERT-S has tokens of upper-case letters alone.
#[test]
fn case_uracil_and_gaps_do_not_change_an_embedding() {
    let folder = Folder::new("inputs_case");
    folder.write("upper.fa", ">a\nACGTTGCATGACCATTAGCA\n");
    folder.write("lower.fa", ">a\nacguugcaug-accauu 1 agca\n");
    for name in ["upper", "lower"] {
        let input = format!("{name}.fa");
        let output = format!("{name}.npy");
        let words = ["embed", "--model", &golden("dnabert_s"), &input, "-o", &output];
        folder.run(&words).assert_code(0);
    }
    assert!(folder.read("upper.npy") == folder.read("lower.npy"));
}

#[test]
fn folders_are_read_by_endings_and_the_model() {
    let files: &[(&str, &[u8])] = &[
        ("in/a.FA", DNA),
        ("in/b.fsa", DNA),
        ("in/c.contigs", DNA),
        ("in/d.fa.txt", DNA),
        ("in/x.fna", DNA),
        ("in/x.faa", b">p\nMKVLATGSER\n"),
        ("in/README.md", b"text"),
        ("in/sub/e.fa", DNA),
    ];
    let skipped = "skipped in folders: README.md, sub/ (a folder), x.faa (proteins)";
    check(
        "folders",
        &[
            (files, &["predict", "in", "--caller", "CALLER", "-o", "out"], 0, &[skipped, "records", "5"]),
            (files, &["embed", "--model", "DNA", "in", "-o", "e.npy"], 0, &[skipped, "sequences", "5"]),
            (
                &files[4..],
                &["embed", "--model", "ESM", "in", "-o", "out", "--per-input"],
                0,
                &["README.md, sub/ (a folder), x.fna (nucleotides)", "out/x.npy"],
            ),
            (&files[5..6], &["predict", "in", "--caller", "CALLER"], 1, &["it has files of proteins"]),
        ],
    );
}

#[test]
fn files_of_other_formats_and_missing_paths_are_named() {
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n";
    let config = std::fs::read(golden("esm2/config.json")).expect("a golden");
    let plan = &["plan", "--model", "m"][..];
    let embed = &["embed", "--model", "m", "p.faa", "-o", "e.npy"][..];
    let protein: (&str, &[u8]) = ("p.faa", b">a\nMKV\n");
    check(
        "formats",
        &[
            (
                &[("a.sam", b"@HD\tVN:1.6\n")],
                &["predict", "a.sam"],
                1,
                &["this is a SAM file", "samtools fasta"],
            ),
            (
                &[("p.faa", b"PK\x03\x04")],
                &["embed", "--model", "ESM", "p.faa", "-o", "e.npy"],
                1,
                &["a zip archive"],
            ),
            (&[("m/config.json", pointer)], plan, 1, &["m/config.json", "git lfs pull"]),
            (
                &[protein, ("m/config.json", &config), ("m/model.safetensors", pointer)],
                embed,
                1,
                &["git lfs pull"],
            ),
            (
                &[protein, ("cls1/best/config.json", &config)],
                &["embed", "--model", "clsl1/best", "p.faa", "-o", "e.npy"],
                1,
                &["there is no file or folder `clsl1/best`; did you mean `cls1/best`?"],
            ),
            (
                &[("org/x", b"")],
                &["plan", "--model", "org/esm2"],
                1,
                &["there is no file or folder `org/esm2`"],
            ),
            (&[], &["plan", "--model", "a/b/c"], 1, &["there is no file or folder `a/b/c`"]),
        ],
    );
}
