//! Writer of pickles, protocol 2. Invariant: every reader that follows the protocol reads the written value, with the keys
//! of dictionaries in the written order.
//!
//! Opcodes: module `pickletools` of the Python standard library.

/// A value of a pickle.
#[derive(Clone, Debug, PartialEq)]
pub enum PickleValue {
    /// A bool.
    Bool(bool),
    /// An int.
    Int(i64),
    /// A str.
    Str(String),
    /// A list.
    List(Vec<PickleValue>),
    /// A dict with text keys.
    Dict(Vec<(&'static str, PickleValue)>),
}

impl PickleValue {
    /// A str.
    pub fn text(text: impl Into<String>) -> Self {
        Self::Str(text.into())
    }

    /// An int; numbers above the largest `i64` become that number.
    pub fn count(number: u64) -> Self {
        Self::Int(i64::try_from(number).unwrap_or(i64::MAX))
    }

    /// The pickle's bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = vec![0x80, 2];
        self.write(&mut out);
        out.push(b'.');
        out
    }

    fn write(&self, out: &mut Vec<u8>) {
        match self {
            Self::Bool(true) => out.push(0x88),
            Self::Bool(false) => out.push(0x89),
            Self::Int(number) => write_int(*number, out),
            Self::Str(text) => write_text(text, out),
            Self::List(items) => {
                out.extend(b"](");
                items.iter().for_each(|item| item.write(out));
                out.push(b'e');
            }
            Self::Dict(entries) => {
                out.extend(b"}(");
                for (key, value) in entries {
                    write_text(key, out);
                    value.write(out);
                }
                out.push(b'u');
            }
        }
    }
}

/// BININT1, BININT2 and BININT are the short forms of small numbers; LONG1 holds any other.
fn write_int(number: i64, out: &mut Vec<u8>) {
    if let Ok(byte) = u8::try_from(number) {
        out.extend([b'K', byte]);
    } else if let Ok(word) = u16::try_from(number) {
        out.push(b'M');
        out.extend(word.to_le_bytes());
    } else if let Ok(word) = i32::try_from(number) {
        out.push(b'J');
        out.extend(word.to_le_bytes());
    } else {
        out.extend([0x8a, 8]);
        out.extend(number.to_le_bytes());
    }
}

/// BINUNICODE. A text that is longer than its 32-bit length can say is cut at a character.
fn write_text(text: &str, out: &mut Vec<u8>) {
    let cut = text.floor_char_boundary(u32::MAX as usize);
    out.push(b'X');
    out.extend((cut as u32).to_le_bytes());
    out.extend(&text.as_bytes()[..cut]);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Python reads larger pickles in `tests/it/timeline.rs`.
    #[test]
    fn values_have_their_opcodes() {
        let cases: [(PickleValue, &[u8]); 8] = [
            (PickleValue::Bool(true), b"\x88"),
            (PickleValue::Int(255), b"K\xff"),
            (PickleValue::Int(256), b"M\x00\x01"),
            (PickleValue::Int(-1), b"J\xff\xff\xff\xff"),
            (PickleValue::Int(1 << 40), b"\x8a\x08\x00\x00\x00\x00\x00\x01\x00\x00"),
            (PickleValue::text("é"), b"X\x02\x00\x00\x00\xc3\xa9"),
            (PickleValue::List(vec![PickleValue::Int(1)]), b"](K\x01e"),
            (PickleValue::Dict(vec![("a", PickleValue::Int(1))]), b"}(X\x01\x00\x00\x00aK\x01u"),
        ];
        for (value, bytes) in cases {
            assert_eq!(value.to_bytes(), [b"\x80\x02", bytes, b"."].concat(), "{value:?}");
        }
    }
}
