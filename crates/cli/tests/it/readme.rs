//! Tests that the output shown in README is real: blocks that begin with `$ plimsoll` are run and compared.

use crate::harness::Folder;

#[test]
fn readme_shows_what_the_program_says() {
    let readme = include_str!("../../../../README.md");
    let folder = Folder::new("readme");
    let mut blocks = 0;
    for block in readme.split("```\n$ plimsoll ").skip(1) {
        let (command, shown) = block.split_once('\n').expect("a command and its output");
        let shown = shown.split("\n```").next().expect("the end of the block");
        let words: Vec<&str> = command.split_whitespace().collect();
        let ran = folder.run(&words);
        let said = format!("{}{}", ran.stdout(), ran.stderr());
        assert_eq!(said.trim_end(), shown.trim_end(), "plimsoll {command}: README shows something else");
        blocks += 1;
    }
    assert_eq!(blocks, 2);
}
