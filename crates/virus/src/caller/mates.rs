//! Names of mates (`--paired`). Invariant: two records are mates only if their names agree.

/// Name that the mates `first` and `second` share: both names without their ends `/1` and `/2`, or two equal names. `None`
/// if the records are not mates.
pub(crate) fn common_name<'a>(first: &'a str, second: &'a str) -> Option<&'a str> {
    match (first.strip_suffix("/1"), second.strip_suffix("/2")) {
        (Some(a), Some(b)) => (a == b && !a.is_empty()).then_some(a),
        (None, None) => (first == second).then_some(first),
        (Some(_), None) | (None, Some(_)) => None,
    }
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
        ] {
            assert_eq!(common_name(first, second), wanted, "{first} {second}");
        }
    }
}
