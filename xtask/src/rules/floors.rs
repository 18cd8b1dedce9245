//! The floors of ARCHITECTURE.md: which crates of the workspace a crate may depend on, and a reason beside
//! every external dependency. Parses the text of the manifests, because the reason is a comment.

use super::{Violation, hit};
use crate::source::File;

/// A crate of the workspace.
struct CrateFloor {
    name: &'static str,
    /// Floor of the crate. Its tests may depend on crates on this floor or below.
    floor: u8,
    /// Crates that it may depend on outside of tests.
    may: &'static [&'static str],
}

/// The table of ARCHITECTURE.md. A crate that is missing here is a violation.
const TABLE: &[CrateFloor] = &[
    CrateFloor { name: "graph", floor: 0, may: &[] },
    CrateFloor { name: "setting", floor: 0, may: &[] },
    CrateFloor { name: "data", floor: 0, may: &["setting"] },
    CrateFloor { name: "plan", floor: 1, may: &["graph", "setting"] },
    CrateFloor { name: "models", floor: 1, may: &["graph"] },
    CrateFloor { name: "exec", floor: 2, may: &["graph", "plan"] },
    CrateFloor { name: "cpu", floor: 2, may: &["graph", "plan", "exec"] },
    CrateFloor { name: "cuda", floor: 2, may: &["graph", "setting", "plan", "exec"] },
    // Only for tests: crates name it in [dev-dependencies] alone.
    CrateFloor { name: "testing", floor: 2, may: &["graph", "plan", "exec", "cpu"] },
    CrateFloor {
        name: "runtime",
        floor: 3,
        may: &["graph", "setting", "plan", "exec", "cpu", "models", "data"],
    },
    CrateFloor {
        name: "embed",
        floor: 4,
        may: &["graph", "setting", "plan", "exec", "models", "data", "runtime"],
    },
    CrateFloor {
        name: "tools",
        floor: 4,
        may: &["graph", "setting", "plan", "exec", "cpu", "models", "data", "runtime"],
    },
    CrateFloor {
        name: "train",
        floor: 4,
        may: &["graph", "setting", "plan", "exec", "models", "data", "runtime"],
    },
    CrateFloor {
        name: "virus",
        floor: 4,
        may: &["graph", "setting", "plan", "exec", "models", "data", "runtime"],
    },
    CrateFloor { name: "plot", floor: 5, may: &["setting", "data", "runtime", "train", "virus"] },
    CrateFloor { name: "report", floor: 5, may: &["setting", "data", "runtime", "train", "virus"] },
    CrateFloor {
        name: "plimsoll",
        floor: 5,
        may: &[
            "graph", "setting", "plan", "exec", "cpu", "cuda", "models", "data", "runtime", "embed", "train",
            "virus",
        ],
    },
    CrateFloor {
        name: "cli",
        floor: 6,
        may: &["setting", "runtime", "embed", "tools", "train", "virus", "plot", "report", "cuda"],
    },
];

/// Every manifest in `crates/` depends on crates of the workspace only as the table allows.
pub fn floors(file: &File) -> Vec<Violation> {
    if !file.path.starts_with("crates/") || !file.path.ends_with("/Cargo.toml") {
        return Vec::new();
    }
    let Some(row) = row(file.crate_name()) else {
        return vec![hit(1, format!("`{}` has no row in the table of floors", file.crate_name()))];
    };
    let mut hits = Vec::new();
    for entry in dependencies_of(&file.text) {
        let Some(on) = entry.workspace_crate() else { continue };
        if !allowed(row, on, entry.table) {
            let what = format!("`{}` may not have `{on}` in [{}]", row.name, entry.table);
            hits.push(hit(entry.line, what));
        }
    }
    hits
}

/// Every external dependency has a comment with its reason beside or above it. A dependency with `workspace =
/// true` has it in the manifest of the workspace.
pub fn reason(file: &File) -> Vec<Violation> {
    if !file.path.ends_with("Cargo.toml") {
        return Vec::new();
    }
    let bare = dependencies_of(&file.text).into_iter().filter(|entry| {
        entry.workspace_crate().is_none() && !entry.text.contains("workspace = true") && !entry.has_reason
    });
    bare.map(|entry| hit(entry.line, format!("no comment says why `{}` is needed", entry.name))).collect()
}

fn row(name: &str) -> Option<&'static CrateFloor> {
    TABLE.iter().find(|row| row.name == name)
}

fn allowed(row: &CrateFloor, on: &str, table: &str) -> bool {
    let listed = row.may.contains(&on);
    if !table.contains("dev-dependencies") {
        return listed;
    }
    // Only `cli` and the library `plimsoll` depend on `cuda`, and the tests of `exec`, which run on every
    // device. A crate is not a dependency of its own tests.
    let is_below = self::row(on).is_some_and(|on| on.floor <= row.floor);
    listed || (is_below && (on != "cuda" || row.name == "exec") && on != row.name)
}

/// A dependency in a manifest.
struct Dependency<'a> {
    line: usize,
    table: &'a str,
    name: &'a str,
    /// All lines of the entry, without comments.
    text: String,
    has_reason: bool,
}

impl Dependency<'_> {
    /// Name of the workspace's crate that this is, by its name, package or path; `None` for an external crate.
    fn workspace_crate(&self) -> Option<&str> {
        let package = quoted(&self.text, "package").unwrap_or(self.name);
        let package = package.strip_prefix("plimsoll-").unwrap_or(package);
        let folder = quoted(&self.text, "path").and_then(|path| path.rsplit('/').next());
        Some(package).filter(|name| row(name).is_some()).or(folder)
    }
}

/// The text in quotes after `key =`.
fn quoted<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    let (_, after) = text.split_once(&format!("{key} ="))?;
    after.split('"').nth(1)
}

/// All dependencies of a manifest.
fn dependencies_of(text: &str) -> Vec<Dependency<'_>> {
    let mut found: Vec<Dependency> = Vec::new();
    let mut table = "";
    // Whether the line above is a comment, and whether the entry of the line above goes on in this line.
    let mut comment_above = false;
    let mut is_open = false;
    for (index, line) in text.lines().enumerate() {
        let (code, comment) = line.split_once('#').map_or((line, false), |(code, _)| (code, true));
        let code = code.trim();
        if let Some(entry) = found.last_mut().filter(|_| is_open) {
            entry.text.push_str(code);
            entry.has_reason |= comment;
            is_open = !balanced(&entry.text);
        } else if code.starts_with('[') {
            table = code.trim_matches(['[', ']']);
            // `[dependencies.name]` is a table with one dependency, whose keys are the lines that follow.
            if let Some((_, name)) = table.split_once("dependencies.") {
                let has_reason = comment_above || comment;
                found.push(Dependency { line: index + 1, table, name, text: String::new(), has_reason });
            }
        } else if table.contains("dependencies.") && !code.is_empty() {
            found.last_mut().into_iter().for_each(|entry| entry.text.push_str(code));
        } else if let Some((key, _)) = code.split_once('=').filter(|_| lists_dependencies(table)) {
            let name = key.split('.').next().unwrap_or(key).trim().trim_matches('"');
            let text = code.to_owned();
            let has_reason = comment_above || comment;
            is_open = !balanced(&text);
            found.push(Dependency { line: index + 1, table, name, text, has_reason });
        }
        comment_above = comment && code.is_empty();
    }
    found
}

/// Whether a table lists dependencies: `[dependencies]`, `[dev-dependencies]`, `[workspace.dependencies]`,
/// `[target.*.dependencies]`.
fn lists_dependencies(table: &str) -> bool {
    table.ends_with("dependencies")
}

/// Whether all curly and square brackets are closed.
fn balanced(text: &str) -> bool {
    text.matches('{').count() == text.matches('}').count()
        && text.matches('[').count() == text.matches(']').count()
}

#[cfg(test)]
mod tests {
    use super::super::tests::check;
    use super::*;

    #[test]
    fn floors_point_down() {
        let check = |name: &str, text: &str, lines: &[usize]| {
            check(floors, &format!("crates/{name}/Cargo.toml"), text, lines);
        };
        check("plan", "[dependencies]\ngraph.workspace = true\n", &[]);
        check("plan", "[dependencies]\nexec.workspace = true\n", &[2]);
        check("models", "[dependencies]\nplan = { workspace = true }\n", &[2]);
        check("models", "[dependencies]\np = { path = \"../plan\" }\n", &[2]);
        check("models", "[dependencies]\np = { package = \"plimsoll-plan\", path = \"x\" }\n", &[2]);
        check("models", "[dependencies.plan]\npath = \"../plan\"\n", &[1]);
        check("graph", "[target.'cfg(unix)'.dependencies]\ndata.workspace = true\n", &[2]);
        check("graph", "[build-dependencies]\ndata.workspace = true\n", &[2]);
        check("cli", "[dependencies]\nrun.workspace = true\ndata.workspace = true\n", &[3]);
        check("runtime", "[dependencies]\ncuda.workspace = true\n", &[2]);
        check("extra", "[dependencies]\n", &[1]);
        check("train", "[dependencies]\ntesting.workspace = true\n", &[2]);
    }

    #[test]
    fn tests_may_look_down_but_not_up() {
        let check = |name: &str, dev: &str, lines: &[usize]| {
            let text = format!("[dev-dependencies]\n{dev}.workspace = true\n");
            check(floors, &format!("crates/{name}/Cargo.toml"), &text, lines);
        };
        check("exec", "models", &[]);
        check("cli", "plan", &[]);
        check("plan", "exec", &[2]);
        check("graph", "plan", &[2]);
        check("runtime", "cuda", &[2]);
        check("plan", "plan", &[2]);
        check("train", "testing", &[]);
        check("data", "testing", &[2]);
    }

    #[test]
    fn dependencies_have_reasons() {
        let check = |text: &str, lines: &[usize]| {
            check(reason, "crates/data/Cargo.toml", &format!("[dependencies]\n{text}"), lines);
        };
        check("flate2 = \"1\" # gzip\n", &[]);
        check("# gzip\nflate2 = \"1\"\n", &[]);
        check("flate2 = \"1\"\n", &[2]);
        check("# gzip\nflate2 = \"1\"\nsha2 = \"1\"\n", &[4]);
        check("# of nothing\n\nflate2 = \"1\"\n", &[4]);
        check("flate2 = { version = \"1\", features = [\n  \"a\", # pure Rust\n] }\n", &[]);
        check("flate2 = { version = \"1\", features = [\n  \"a\",\n] }\n", &[2]);
        check("flate2.workspace = true\ngraph.workspace = true\n", &[]);
        check("[dependencies.flate2]\nversion = \"1\"\n", &[2]);
        check("# gzip\n[dependencies.flate2]\nversion = \"1\"\nfeatures = []\n", &[]);
        check("[features]\nfast = []\n", &[]);
    }

    #[test]
    fn the_table_points_down() {
        for crate_row in TABLE {
            for on in crate_row.may {
                let dependency = row(on).expect("a crate of the table");
                let is_same_floor = matches!(
                    (crate_row.name, *on),
                    ("cpu" | "cuda" | "testing", "exec") | ("testing", "cpu") | ("data", "setting")
                );
                assert!(dependency.floor < crate_row.floor || is_same_floor, "{} -> {on}", crate_row.name);
            }
        }
    }
}
