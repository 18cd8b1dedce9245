//! File names for record ids, and suggestions for an unknown id. Invariant: for any ids, file names consist of
//! ASCII letters, digits, `.`, `_` and `-`, have at most 110 bytes, and are distinct within a run, also on file
//! systems that ignore case.

use plimsoll_data::hex::hex;
use sha2::{Digest, Sha256};
use std::collections::HashSet;

/// Maximum characters of an id in a file name.
const SHOWN: usize = 80;

/// Maximum characters of an id that are compared: the time of an edit distance grows with their square.
const COMPARED: usize = 64;

/// Maximum number of ids in a hint.
const HINTS: usize = 3;

/// A distinct file name, without extension, for each id, in order.
pub fn file_names<'a>(ids: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut taken = HashSet::new();
    let mut names = vec![];
    for id in ids {
        let name = file_name(id);
        let numbered = (2..).map(|number| format!("{name}-{number}"));
        let mut candidates = std::iter::once(name.clone()).chain(numbered);
        names.push(candidates.find(|name| taken.insert(name.to_lowercase())).unwrap_or(name));
    }
    names
}

/// File name of an id. Other characters are replaced and long ids are cut; a digest of the id then
/// distinguishes names that would be equal.
fn file_name(id: &str) -> String {
    let shown: String = id
        .chars()
        .take(SHOWN)
        .map(|letter| match letter {
            'a'..='z' | 'A'..='Z' | '0'..='9' | '.' | '_' | '-' => letter,
            _ => '_',
        })
        .collect();
    if shown == id {
        return format!("record_{shown}");
    }
    format!("record_{shown}-{}", hex(&Sha256::digest(id.as_bytes())[..4]))
}

/// Streaming selection of the ids nearest to a wanted id.
pub struct Nearest {
    wanted: String,
    /// The nearest ids so far with their edit distances, in order of distance.
    found: Vec<(usize, String)>,
}

impl Nearest {
    /// Starts a search for the ids nearest to `wanted`.
    pub fn new(wanted: &str) -> Self {
        Nearest { wanted: fold(wanted), found: vec![] }
    }

    /// Considers an id.
    pub fn offer(&mut self, id: &str) {
        let folded = fold(id);
        // Users often know a part of an id, or the name of one of its windows (`ID_chunk_N`): these match with
        // distance 0.
        let part = folded.contains(&self.wanted) || self.wanted.starts_with(&folded);
        let distance = if part { 0 } else { strsim::levenshtein(&self.wanted, &folded) };
        let place = self.found.partition_point(|(other, _)| *other <= distance);
        if place < HINTS && !self.found.iter().any(|(_, other)| other == id) {
            self.found.truncate(HINTS - 1);
            self.found.insert(place, (distance, id.to_owned()));
        }
    }

    /// The end of an error message that lists the nearest ids.
    pub fn hint(&self) -> String {
        let names: Vec<String> = self.found.iter().map(|(_, id)| format!("`{}`", cut(id))).collect();
        if names.is_empty() {
            "; predictions.tsv lists none".to_owned()
        } else {
            format!("; the nearest ids in predictions.tsv: {}", names.join(", "))
        }
    }
}

/// The form in which ids are compared: the first [`COMPARED`] characters in lower case.
fn fold(id: &str) -> String {
    id.chars().take(COMPARED).collect::<String>().to_lowercase()
}

/// The first [`SHOWN`] characters of an id, with an ellipsis if it is longer.
fn cut(id: &str) -> String {
    match id.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", &id[..end]),
        None => id.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_safe_and_apart() {
        let long = "x".repeat(1000);
        let ids =
            ["NC_1.1", "a/b", "a_b", "A_B", "../../etc", "<script>", "", "a/b", "日本", &long, "con", "."];
        let names = file_names(ids.into_iter());
        assert_eq!(names[0], "record_NC_1.1");
        assert_eq!(names[2..4], ["record_a_b", "record_A_B-2"]);
        assert!(names[1].starts_with("record_a_b-") && names[7] == format!("{}-2", names[1]));
        let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        for name in &names {
            assert!(name.starts_with("record_") && name.chars().all(plain) && name.len() <= 110, "{name}");
        }
        let apart: HashSet<String> = names.iter().map(|name| name.to_lowercase()).collect();
        assert_eq!(apart.len(), ids.len());
    }

    #[test]
    fn the_nearest_ids_are_named() {
        let check = |wanted: &str, hint: &str| {
            let mut nearest = Nearest::new(wanted);
            for id in ["contig_1", "contig_2", "NC_001422.1", "phage", "contig_2", "zzz"] {
                nearest.offer(id);
            }
            assert_eq!(nearest.hint(), format!("; the nearest ids in predictions.tsv: {hint}"));
        };
        check("contig_3", "`contig_1`, `contig_2`, `phage`");
        check("001422", "`NC_001422.1`, `phage`, `zzz`");
        check("contig_2_chunk_7", "`contig_2`, `contig_1`, `NC_001422.1`");
        assert_eq!(Nearest::new("x").hint(), "; predictions.tsv lists none");
    }
}
