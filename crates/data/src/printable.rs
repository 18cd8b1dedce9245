//! Escapes names and paths that come from files or from the user, for use in messages. Invariant: an escaped text stays
//! on one line, contains no terminal control sequence and does not change the direction of the text after it; a name
//! takes a bounded part of the line.

use std::fmt::{self, Display, Formatter, Write};
use std::path::Path;

/// Characters of a [`Name`] that are displayed; the rest is replaced by an ellipsis.
const LONGEST: usize = 200;

/// Displays a name that comes from a file (of a record, tensor or archive entry), cut after 200 characters.
/// Non-printable characters appear as Rust escapes: `\n`, `\u{1b}`.
#[derive(Clone, Copy, Debug)]
pub struct Name<'a>(pub &'a str);

impl Display for Name<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write_escaped(self.0.chars().take(LONGEST), f)?;
        match self.0.chars().nth(LONGEST) {
            Some(_) => f.write_char('…'),
            None => Ok(()),
        }
    }
}

/// Displays a path with the escapes of [`Name`], but uncut: the system bounds the length of a path.
#[derive(Clone, Copy, Debug)]
pub struct EscapedPath<'a>(pub &'a Path);

impl Display for EscapedPath<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write_escaped(self.0.to_string_lossy().chars(), f)
    }
}

/// Writes `text`, with Rust escapes in place of non-printable characters.
fn write_escaped(text: impl Iterator<Item = char>, f: &mut Formatter<'_>) -> fmt::Result {
    for c in text {
        if is_printable(c) { f.write_char(c)? } else { c.escape_default().try_for_each(|c| f.write_char(c))? }
    }
    Ok(())
}

/// Returns whether `c` can be displayed without side effects: it is no control character, no line or paragraph
/// separator, no bidirectional formatting character (Unicode Technical Report 36, section 2.10.4), and no other
/// character without a shape of its own (soft hyphen, zero-width space, byte order mark, tags), which would make two
/// texts look equal. Zero-width joiners are printable, because the spelling of words needs them.
pub fn is_printable(c: char) -> bool {
    !c.is_control()
        && !matches!(
            c,
            '\u{ad}'
                | '\u{61c}'
                | '\u{180e}'
                | '\u{200b}'
                | '\u{200e}'
                | '\u{200f}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}'
                | '\u{feff}'
                | '\u{fff9}'..='\u{fffb}'
                | '\u{e0000}'..='\u{e007f}'
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_on_their_line() {
        let check = |text: &str, shown: &str| {
            assert_eq!(Name(text).to_string(), shown);
            assert_eq!(EscapedPath(Path::new(text)).to_string(), shown);
        };
        check("sp|P1|../é 中", "sp|P1|../é 中");
        check("\x1b[2J\nerror: \0\u{9b}\u{7f}", "\\u{1b}[2J\\nerror: \\u{0}\\u{9b}\\u{7f}");
        check("a\u{202e}b\u{2066}c\u{2028}d\u{85}", "a\\u{202e}b\\u{2066}c\\u{2028}d\\u{85}");
        check("\u{feff}a\u{200b}\u{ad}", "\\u{feff}a\\u{200b}\\u{ad}");
        assert_eq!(Name(&"é".repeat(200)).to_string(), "é".repeat(200));
        assert_eq!(Name(&"é".repeat(1 << 20)).to_string(), "é".repeat(200) + "…");
    }
}
