//! Tests that run in a process of their own.

use std::env;
use std::process::Command;

/// Whether the current process runs only the test `name`. If not, runs that test in a child process, which must
/// succeed, and returns false. For tests that measure the memory of the whole process.
pub fn in_own_process(name: &str) -> bool {
    const ALONE: &str = "PLIMSOLL_TEST_ALONE";
    if env::var_os(ALONE).is_some() {
        return true;
    }
    let mut child = Command::new(env::current_exe().expect("a test binary"));
    let output = child.args(["--exact", name, "--nocapture"]).env(ALONE, "1").output().expect("it starts");
    let [out, err] = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    println!("{out}");
    assert!(output.status.success(), "{err}");
    false
}
