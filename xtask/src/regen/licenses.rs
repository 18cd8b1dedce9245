//! Licences of the dependencies: `packages.tsv`, the licence of every package of Cargo.lock, and `texts.txt`, the licence
//! texts that `plimsoll licenses` prints. Invariant: the same Cargo.lock gives the same bytes.
//!
//! The tests hold `packages.tsv` to Cargo.lock and to the allowed licences of `deny.toml`, so a new dependency fails
//! them until the files are made again and its licence is allowed.

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

/// Folder of both files.
const FOLDER: &str = "crates/cli/licenses";

/// Platforms that the binary is built for.
const PLATFORMS: [&str; 3] =
    ["x86_64-unknown-linux-gnu", "x86_64-unknown-linux-musl", "aarch64-unknown-linux-gnu"];

/// Beginnings of the names of licence files, in capitals.
const LICENSE_FILES: [&str; 6] = ["LICENSE", "LICENCE", "COPYING", "NOTICE", "UNLICENSE", "COPYRIGHT"];

/// The licence expression of a package and whether the package is part of the binary.
type Packages = BTreeMap<(String, String), (String, bool)>;

/// Writes both files.
///
/// # Errors
/// `cargo metadata` fails (the packages must be downloaded: `cargo fetch`), a package of the binary has no licence
/// text, a file cannot be read or written.
pub fn write(root: &Path) -> Result<(), String> {
    let everything = metadata(root, &[])?;
    let mut packages = Packages::new();
    for package in external(&everything) {
        let license = package["license"].as_str().ok_or_else(|| format!("{}: no licence", package["id"]))?;
        packages.insert(key(package), (license.to_owned(), false));
    }
    let mut texts: BTreeMap<String, (String, BTreeSet<String>)> = BTreeMap::new();
    for platform in PLATFORMS {
        let metadata = metadata(root, &["--filter-platform", platform])?;
        for package in linked(&metadata)? {
            let of_binary =
                packages.get_mut(&key(package)).map(|(_, of_binary)| std::mem::replace(of_binary, true));
            if of_binary == Some(false) {
                for (name, text) in license_texts(root, package)? {
                    // Texts that differ in line breaks alone are one text.
                    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
                    texts.entry(words).or_insert((text, BTreeSet::new())).1.insert(name);
                }
            }
        }
    }

    let mut table =
        "# Made by `cargo run -p xtask -- regen licenses`: package, version, licence, where it is used\n"
            .to_owned();
    for ((name, version), (license, of_binary)) in &packages {
        let place = if *of_binary { "binary" } else { "tests, tools or other platforms" };
        let _ = writeln!(table, "{name}\t{version}\t{license}\t{place}");
    }
    super::write(&root.join(FOLDER).join("packages.tsv"), table.as_bytes())?;

    let mut sections: Vec<(&BTreeSet<String>, &String)> =
        texts.values().map(|(text, names)| (names, text)).collect();
    sections.sort();
    let mut shipped = "Plimsoll is licensed under MIT or Apache-2.0, at your option. The binary contains the packages below, each under the\n\
        licence that follows its name.\n"
        .to_owned();
    for (names, text) in sections {
        let names = names.iter().map(String::as_str).collect::<Vec<_>>().join("\n");
        let _ = write!(shipped, "\n{}\n{names}\n{}\n\n{}\n", "=".repeat(80), "-".repeat(80), text.trim_end());
    }
    super::write(&root.join(FOLDER).join("texts.txt"), shipped.as_bytes())
}

/// `cargo metadata` of the workspace.
fn metadata(root: &Path, options: &[&str]) -> Result<Value, String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--format-version", "1", "--locked"])
        .args(options)
        .current_dir(root)
        .output()
        .map_err(|e| format!("cargo metadata: {e}"))?;
    if !output.status.success() {
        return Err(format!("cargo metadata: {}", String::from_utf8_lossy(&output.stderr)));
    }
    serde_json::from_slice(&output.stdout).map_err(|e| format!("cargo metadata: {e}"))
}

/// Elements of a JSON array; none for other values.
fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// The packages that come from a registry.
fn external(metadata: &Value) -> impl Iterator<Item = &Value> {
    list(&metadata["packages"]).filter(|package| !package["source"].is_null())
}

/// Name and version of a package.
fn key(package: &Value) -> (String, String) {
    let name = package["name"].as_str().unwrap_or_default();
    let version = package["version"].as_str().unwrap_or_default();
    (name.to_owned(), version.to_owned())
}

/// Registry packages that are linked into the binary: all packages that the package of the command reaches
/// through normal dependencies, without build and test dependencies.
fn linked(metadata: &Value) -> Result<Vec<&Value>, String> {
    let nodes: BTreeMap<&str, &Value> =
        list(&metadata["resolve"]["nodes"]).filter_map(|node| Some((node["id"].as_str()?, node))).collect();
    let command = list(&metadata["packages"]).find(|package| {
        list(&package["targets"]).any(|t| t["name"] == "plimsoll" && list(&t["kind"]).any(|kind| kind == "bin"))
    });
    let command =
        command.and_then(|package| package["id"].as_str()).ok_or("no package has the binary `plimsoll`")?;
    let mut reached = BTreeSet::new();
    let mut pending = vec![command];
    while let Some(id) = pending.pop() {
        if !reached.insert(id) {
            continue;
        }
        let node = nodes.get(id).ok_or_else(|| format!("{id}: not in the resolved graph"))?;
        let normal =
            // `cargo metadata` gives the kind null to normal dependencies.
            list(&node["deps"]).filter(|dep| list(&dep["dep_kinds"]).any(|kind| kind["kind"].is_null()));
        pending.extend(normal.filter_map(|dep| dep["pkg"].as_str()));
    }
    Ok(external(metadata)
        .filter(|package| package["id"].as_str().is_some_and(|id| reached.contains(id)))
        .collect())
}

/// The licence texts in the folder of a package, each with the package's name, version and licence.
fn license_texts(root: &Path, package: &Value) -> Result<Vec<(String, String)>, String> {
    let (name, version) = key(package);
    let license = package["license"].as_str().unwrap_or_default();
    let manifest = Path::new(package["manifest_path"].as_str().unwrap_or_default());
    let folder = manifest.parent().unwrap_or(manifest);
    let mut texts = vec![];
    for folder in [folder.to_path_buf(), folder.join("fonts")] {
        let Ok(entries) = fs::read_dir(&folder) else { continue };
        for entry in entries.filter_map(Result::ok).filter(|entry| entry.path().is_file()) {
            let file = entry.file_name().to_string_lossy().into_owned();
            if LICENSE_FILES.iter().any(|start| file.to_uppercase().starts_with(start)) {
                let bytes = fs::read(entry.path()).map_err(|e| format!("{}: {e}", entry.path().display()))?;
                let text = String::from_utf8_lossy(&bytes).replace("\r\n", "\n");
                texts.push((format!("{name} {version} ({license}), {file}"), text));
            }
        }
    }
    // Some packages, such as flatbuffers, are published without the text of their licence.
    if texts.is_empty() && license == "Apache-2.0" {
        let text =
            fs::read_to_string(root.join("LICENSE-APACHE")).map_err(|e| format!("LICENSE-APACHE: {e}"))?;
        texts.push((format!("{name} {version} ({license})"), text));
    }
    if texts.is_empty() {
        Err(format!("{name} {version}: no licence text in {}", folder.display()))
    } else {
        Ok(texts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spdx::{Expression, ParseMode};

    fn read(path: &str) -> String {
        fs::read_to_string(crate::root().join(path)).unwrap()
    }

    /// Name, version, licence and place of each row of `packages.tsv`.
    fn rows(table: &str) -> Vec<[&str; 4]> {
        let lines = table.lines().filter(|line| !line.starts_with('#'));
        lines.map(|line| <[&str; 4]>::try_from(line.split('\t').collect::<Vec<_>>()).unwrap()).collect()
    }

    #[test]
    fn the_table_has_the_packages_of_the_lock_file() {
        let lock: toml::Table = read("Cargo.lock").parse().unwrap();
        let mut locked = BTreeSet::new();
        for package in lock["package"].as_array().unwrap() {
            if package.get("source").is_some() {
                let text = |key: &str| package[key].as_str().unwrap().to_owned();
                locked.insert((text("name"), text("version")));
            }
        }
        let table = read(&format!("{FOLDER}/packages.tsv"));
        let listed: BTreeSet<(String, String)> = rows(&table)
            .iter()
            .map(|[name, version, ..]| ((*name).to_owned(), (*version).to_owned()))
            .collect();
        assert_eq!(listed, locked, "run `cargo run -p xtask -- regen licenses`");
    }

    /// Whether a licence expression is satisfied by the allowed licences.
    fn allowed(license: &str, allow: &[String]) -> bool {
        // Old manifests separate alternatives by a slash.
        let expression =
            Expression::parse_mode(license, ParseMode::LAX).unwrap_or_else(|e| panic!("{license}: {e}"));
        expression.evaluate(|term| term.license.id().is_some_and(|id| allow.iter().any(|name| name == id.name)))
    }

    #[test]
    fn every_licence_is_allowed_by_deny_toml() {
        let deny: toml::Table = read("deny.toml").parse().unwrap();
        let allow: Vec<String> = deny["licenses"]["allow"].clone().try_into().unwrap();
        for [name, version, license, _] in rows(&read(&format!("{FOLDER}/packages.tsv"))) {
            assert!(allowed(license, &allow), "{name} {version}: `{license}` is not allowed by deny.toml");
        }
        assert!(allowed("MIT/Apache-2.0", &allow));
        assert!(!allowed("GPL-3.0", &allow) && !allowed("MIT AND GPL-3.0", &allow));
    }

    #[test]
    fn the_texts_name_every_package_of_the_binary_and_the_font() {
        let texts = read(&format!("{FOLDER}/texts.txt"));
        let table = read(&format!("{FOLDER}/packages.tsv"));
        let mut of_binary = 0;
        for [name, version, license, place] in rows(&table) {
            if place == "binary" {
                of_binary += 1;
                assert!(texts.contains(&format!("\n{name} {version} ({license})")), "{name} {version}");
            }
        }
        assert!(of_binary > 100, "{of_binary} packages");
        assert!(texts.contains("SIL OPEN FONT LICENSE Version 1.1"), "the font of the figures");
    }
}
