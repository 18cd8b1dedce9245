//! Words of settings and commands. The test has a binary of its own, because words are registered once in a process.

use plimsoll_setting::{Command, MessageWords, Setting, set_words};

#[test]
fn settings_have_names_until_words_are_registered() {
    let tokens = Setting::Tokens.to(512);
    let key = Setting::key("optimizer.kind").to("adamw8bit");
    assert_eq!(format!("{} or {}", Setting::Force, Setting::MemoryBudget), "force or memory_budget");
    assert_eq!(format!("{tokens} or {key}"), "tokens=512 or optimizer.kind=adamw8bit");
    assert_eq!(Setting::key(String::from("run.steps")).to_string(), "run.steps");
    assert_eq!(format!("{} or {:#}", Command::Merge, Command::StandardInput), "merge or stdin");

    set_words(MessageWords {
        setting: |setting, value, f| match value {
            Some(value) => write!(f, "<{} {value}>", setting.name()),
            None => write!(f, "<{}>", setting.name()),
        },
        command: |command, f| match f.alternate() {
            true => write!(f, "({})", command.name()),
            false => write!(f, "(program {})", command.name()),
        },
    });
    assert_eq!(format!("{} or {}", Setting::Force, Setting::key("run.steps")), "<force> or <run.steps>");
    assert_eq!(format!("{tokens} or {key}"), "<tokens 512> or <optimizer.kind adamw8bit>");
    assert_eq!(format!("{} or {:#}", Command::Merge, Command::Merge), "(program merge) or (merge)");

    // Words that are registered later have no effect.
    set_words(MessageWords { setting: |_, _, _| Ok(()), command: |_, _| Ok(()) });
    assert_eq!(Setting::Force.to_string(), "<force>");
    assert_eq!(Setting::Force.name(), "force");
}
