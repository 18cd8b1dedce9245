//! Tests that shells and `man` can read the output of `plimsoll completions` and `plimsoll man`.

use crate::harness::Folder;
use std::process::Command;

const COMMANDS: [&str; 7] = ["predict", "embed", "classify", "merge", "plan", "bench", "doctor"];

#[test]
fn completions_know_every_command() {
    let folder = Folder::new("completions");
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let script = folder.run(&["completions", shell]).assert_code(0).stdout();
        for word in COMMANDS.into_iter().chain(["memory-budget"]) {
            assert!(script.contains(word), "{shell}: {word}");
        }
    }
    let said = folder.run(&["completions", "tcsh"]).assert_code(1).stderr();
    assert!(said.contains("bash") && said.contains("zsh"), "{said}");
}

#[test]
fn bash_reads_its_script() {
    let folder = Folder::new("completions_bash");
    folder.write("script", folder.run(&["completions", "bash"]).assert_code(0).stdout());
    let words =
        "COMP_WORDS=(plimsoll pre); COMP_CWORD=1; _plimsoll plimsoll pre plimsoll; echo ${COMPREPLY[0]}";
    let output = Command::new("bash")
        .args(["--norc", "-c", &format!("bash -n script && source ./script && {words}")])
        .current_dir(folder.path(""))
        .output()
        .expect("bash runs");
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "predict", "{output:?}");
}

/// The title line of a manual page: the first line that is not a conditional definition (`.ie`, `.el`).
fn title(page: &str) -> &str {
    let is_definition = |line: &str| line.starts_with(".ie") || line.starts_with(".el");
    page.lines().find(|line| !is_definition(line)).unwrap_or_default()
}

#[test]
fn every_command_has_a_page() {
    let folder = Folder::new("man");
    folder.run(&["man", "-o", "pages/man1"]).assert_code(0);
    let read = |name: &str| String::from_utf8(folder.read(&format!("pages/man1/{name}.1"))).expect("text");
    let program = read("plimsoll");
    assert!(title(&program).starts_with(".TH plimsoll 1 "), "{program}");
    let printed = folder.run(&["man"]).assert_code(0).stdout();
    for command in COMMANDS {
        let page = read(&format!("plimsoll-{command}"));
        assert!(title(&page).starts_with(&format!(".TH plimsoll-{command} 1 ")), "{page}");
        assert!(title(&page).contains("\"plimsoll "), "{page}");
        for section in [".SH NAME", ".SH SYNOPSIS", ".SH DESCRIPTION", ".SH OPTIONS"] {
            assert!(page.contains(section), "{command}: {section}");
        }
        assert!(printed.contains(page.trim_end()), "{command}");
        assert!(program.contains(&format!("plimsoll\\-{command}(1)")), "{program}");
    }
}

#[test]
fn a_folder_that_cannot_be_made_is_named() {
    let folder = Folder::new("man_refused");
    folder.write("file", "");
    let said = folder.run(&["man", "-o", "file/man1"]).assert_code(1).stderr();
    assert!(said.contains("file/man1"), "{said}");
}

/// The help of `train` lists the exit codes of its errors.
#[test]
fn the_exit_codes_of_training_are_told() {
    let folder = Folder::new("exit_codes");
    let all = folder.run(&["--help"]).assert_code(0).stdout();
    let codes = &all[all.find("Exit codes: ").expect("exit codes")..];
    assert!(
        codes.contains("for train its checkpoints") && codes.contains("train, from the checkpoint"),
        "{codes}"
    );
    let train = folder.run(&["train", "--help"]).assert_code(0).stdout();
    let codes = &train[train.find("Exit codes: ").expect("exit codes")..];
    for code in ["0 trained", "1 failure", "3 the run's folder", "4 does not fit", "129, 130, 138, 140 and 143"]
    {
        assert!(codes.replace('\n', " ").contains(code), "{code}: {codes}");
    }
}
