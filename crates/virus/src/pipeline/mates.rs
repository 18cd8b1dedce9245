//! Mates of a pair of reads. Invariant: two records are mates only if their names agree.

use std::sync::Arc;

/// The pair of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mate {
    /// Name of the pair.
    pub(crate) pair: Arc<str>,
    /// Whether the record is the second of the pair.
    pub(crate) is_second: bool,
}

/// Name that the mates `first` and `second` share: both names without their ends `/1` and `/2`, or `.1` and `.2` behind the
/// number of a spot, as SRA writes them (`RUN.SPOT.1`), or two equal names. `None` if the records are not mates.
pub(crate) fn common_name<'a>(first: &'a str, second: &'a str) -> Option<&'a str> {
    match (first.strip_suffix("/1"), second.strip_suffix("/2")) {
        (Some(a), Some(b)) => return (a == b && !a.is_empty()).then_some(a),
        (Some(_), None) | (None, Some(_)) => return None,
        (None, None) => {}
    }
    if first == second {
        return Some(first);
    }
    // `RUN.1` and `RUN.2` are two spots of a run, and no mates.
    let spot = first.strip_suffix(".1").filter(|spot| second.strip_suffix(".2") == Some(*spot))?;
    let (run, number) = spot.rsplit_once('.')?;
    let is_number = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
    (is_number && !run.is_empty()).then_some(spot)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mates_have_one_name() {
        for (first, second, wanted) in [
            ("r/1", "r/2", Some("r")),
            ("r", "r", Some("r")),
            ("", "", Some("")),
            ("r/1", "r", None),
            ("r/2", "r/1", None),
            ("r/1", "s/2", None),
            ("r", "s", None),
            ("/1", "/2", None),
            ("SRR1.7.1", "SRR1.7.2", Some("SRR1.7")),
            ("SRR1.7", "SRR1.7", Some("SRR1.7")),
            ("SRR1.1", "SRR1.2", None),
            ("SRR1.7.1", "SRR1.8.2", None),
            ("SRR1.7.2", "SRR1.7.1", None),
            ("SRR1.7.1", "SRR1.7.1", Some("SRR1.7.1")),
            (".7.1", ".7.2", None),
            ("a.x.1", "a.x.2", None),
        ] {
            assert_eq!(common_name(first, second), wanted, "{first} {second}");
        }
    }
}
