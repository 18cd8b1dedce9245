//! Codes of DNA and RNA letters. Invariant: A, C, G, T are 0, 1, 2, 3 in upper and lower case, U is read as T, and the
//! complement of a code is 3 less the code.

/// Code of a letter that is no base.
pub const OTHER: u8 = 4;

/// Code of each letter.
pub(crate) const CODES: [u8; 256] = {
    let mut table = [OTHER; 256];
    let letters = *b"ACGTUacgtu";
    let mut at = 0;
    while at < letters.len() {
        table[letters[at] as usize] = if at % 5 == 4 { 3 } else { (at % 5) as u8 };
        at += 1;
    }
    table
};

/// Code of a letter: 0 to 3, or [`OTHER`].
pub fn code(letter: u8) -> u8 {
    CODES[usize::from(letter)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_letter_has_its_code() {
        for (letters, wanted) in [("Aa", 0), ("Cc", 1), ("Gg", 2), ("TtUu", 3)] {
            assert!(letters.bytes().all(|letter| code(letter) == wanted), "{letters}");
        }
        let others = (0..=255).filter(|letter| !b"ACGTUacgtu".contains(letter));
        assert!(others.map(code).all(|code| code == OTHER));
    }
}
