//! Formats digests as text. Invariant: two lower-case hexadecimal digits per byte.

use std::fmt::Write as _;

/// Returns the bytes in hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}
