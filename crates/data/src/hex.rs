//! Digests as text. Invariant: two lower-case hexadecimal digits for each byte.

use std::fmt::Write as _;

/// The bytes in hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}
