//! A source file as the rules see it: its lines, its code without comments and literals, and its brackets.
//! Invariant: `code` has the length and the line breaks of `text`, so byte offsets and line numbers are valid
//! in both.

use std::ops::Range;

/// A text file of the workspace.
pub struct File {
    /// Path relative to the root of the workspace, with `/` as separator.
    pub path: String,
    /// The content of the file.
    pub text: String,
    /// The content with comments, strings and characters replaced by spaces; empty unless the file is Rust or
    /// CUDA code.
    pub code: String,
}

impl File {
    /// Creates a file from its path and content.
    pub fn new(path: impl Into<String>, text: impl Into<String>) -> Self {
        let path = path.into();
        let text = text.into();
        let code = if is_code(&path) { blank(&text) } else { String::new() };
        File { path, text, code }
    }

    /// Whether the file is Rust code.
    pub fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    /// Whether `sizes` counts the lines of the file.
    pub fn is_code(&self) -> bool {
        is_code(&self.path)
    }

    /// Name of the crate's folder: `graph` for `crates/graph/src/op.rs`, `xtask` for `xtask/..`.
    pub fn crate_name(&self) -> &str {
        let path = self.path.strip_prefix("crates/").unwrap_or(&self.path);
        path.split_once('/').map_or("", |(name, _)| name)
    }

    /// Line number, from 1, of a byte offset.
    pub fn line(&self, offset: usize) -> usize {
        1 + self.text.as_bytes()[..offset].iter().filter(|&&b| b == b'\n').count()
    }

    /// Number of lines.
    pub fn line_count(&self) -> usize {
        self.text.lines().count()
    }

    /// Byte offsets at which `word` occurs in the code as a whole word.
    pub fn words<'a>(&'a self, word: &'a str) -> impl Iterator<Item = usize> + 'a {
        let bytes = self.code.as_bytes();
        self.code.match_indices(word).map(|(at, _)| at).filter(move |&at| {
            let before = at.checked_sub(1).map(|i| bytes[i]);
            let after = bytes.get(at + word.len()).copied();
            !before.is_some_and(in_word) && !after.is_some_and(in_word)
        })
    }

    /// The first block `{..}` after `from` that is not inside round or square brackets, as the offsets of its
    /// braces; `None` if a `;` comes first or a bracket is not closed.
    pub fn body(&self, from: usize) -> Option<Range<usize>> {
        let bytes = self.code.as_bytes();
        let mut at = from;
        while at < bytes.len() {
            match bytes[at] {
                b'(' | b'[' => at = self.close(at)?,
                b'{' => return Some(at..self.close(at)?),
                b';' => return None,
                _ => {}
            }
            at += 1;
        }
        None
    }

    /// Offset of the bracket that closes the bracket at `open`.
    pub fn close(&self, open: usize) -> Option<usize> {
        let mut depth = 0_usize;
        for (at, byte) in self.code.bytes().enumerate().skip(open) {
            match byte {
                b'(' | b'[' | b'{' => depth += 1,
                b')' | b']' | b'}' => depth = depth.checked_sub(1)?,
                _ => {}
            }
            if depth == 0 {
                return Some(at);
            }
        }
        None
    }

    /// Number of lines of items with `#[cfg(test)]`. Lines of nested items count once.
    pub fn inner_test_lines(&self) -> usize {
        let mut count = 0;
        let mut counted_to = 0;
        for test in self.test_items() {
            let first = self.line(test.start).max(counted_to + 1);
            let last = self.line(test.end);
            count += (last + 1).saturating_sub(first);
            counted_to = counted_to.max(last);
        }
        count
    }

    /// Byte ranges of the items with `#[cfg(test)]`, each from the attribute to the last byte.
    pub fn test_items(&self) -> Vec<Range<usize>> {
        self.test_marks().map(|at| self.attributed_item(at)).collect()
    }

    /// Byte range of the item whose attribute is at `at`. An item without a block, such as `mod name;`, ends at its semicolon.
    fn attributed_item(&self, at: usize) -> Range<usize> {
        let item = self.after_attribute(at);
        let semicolon = self.code[item..].find(';').map_or(at, |i| item + i);
        at..self.body(item).map_or(semicolon, |body| body.end)
    }

    /// Byte ranges of the string literals, with their quotes.
    pub fn strings(&self) -> Vec<Range<usize>> {
        let mut found = Vec::new();
        let mut at = 0;
        while at < self.text.len() {
            let Some(end) = literal_end(&self.text, at).map(|end| end.min(self.text.len())) else {
                // No literal starts inside of a character.
                at += self.text[at..].chars().next().map_or(1, char::len_utf8);
                continue;
            };
            if !self.text[at..].starts_with(['/', '\'']) {
                found.push(at..end);
            }
            at = end;
        }
        found
    }

    /// Names of modules declared as `#[cfg(test)] mod name;`, whose files consist of tests.
    pub fn test_modules(&self) -> Vec<&str> {
        let declared = self.test_marks().filter_map(|at| {
            let item = &self.code[self.after_attribute(at)..];
            let (item, _) = item.split_once(';').filter(|(item, _)| !item.contains('{'))?;
            item.split_once("mod ").map(|(_, name)| name.trim())
        });
        declared.collect()
    }

    /// Offsets of the attributes that mark test items.
    fn test_marks(&self) -> impl Iterator<Item = usize> {
        let marks = ["#[cfg(test)]", "#[cfg(all(test,"];
        marks.into_iter().flat_map(|mark| self.code.match_indices(mark)).map(|(at, _)| at)
    }

    /// Offset after the attribute at `at`.
    fn after_attribute(&self, at: usize) -> usize {
        self.close(at + 1).map_or(at, |end| end + 1)
    }
}

/// Whether a byte can be part of an identifier. Bytes of non-ASCII characters count.
pub fn in_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || byte >= 0x80
}

fn is_code(path: &str) -> bool {
    path.ends_with(".rs") || path.ends_with(".cu")
}

/// Replaces every byte of comments, strings and character literals, except line breaks, by a space.
fn blank(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    while out.len() < bytes.len() {
        let at = out.len();
        match literal_end(text, at) {
            Some(end) => {
                let literal = &bytes[at..end.min(bytes.len())];
                out.extend(literal.iter().map(|&b| if b == b'\n' { b'\n' } else { b' ' }));
            }
            None => out.push(bytes[at]),
        }
    }
    // The text stays valid UTF-8, because only whole literals are replaced and no character is split.
    String::from_utf8(out).unwrap_or_default()
}

/// End of the comment, string or character literal that starts at `at`; `None` if none starts there.
fn literal_end(text: &str, at: usize) -> Option<usize> {
    let bytes = text.as_bytes();
    let rest = &bytes[at..];
    let in_name = at > 0 && in_word(bytes[at - 1]);
    match rest {
        [b'/', b'/', ..] => Some(find(bytes, at, b"\n")),
        [b'/', b'*', ..] => Some(block_comment_end(bytes, at)),
        [b'"', ..] => Some(string_end(bytes, at)),
        [b'r', ..] if !in_name => raw_string_end(bytes, at + 1),
        [b'b' | b'c', b'r', ..] if !in_name => raw_string_end(bytes, at + 2),
        // The search starts after the escaped character, which can be a quote itself: `'\''`.
        [b'\'', b'\\', ..] => Some(find(bytes, at + 3, b"'") + 1),
        [b'\'', ..] => {
            // `'x'` is a character; without the second quote it is a lifetime.
            let width = text[at + 1..].chars().next()?.len_utf8();
            (bytes.get(at + 1 + width) == Some(&b'\'')).then_some(at + width + 2)
        }
        _ => None,
    }
}

/// Offset of the first `needle` from `from` on, or the length of `bytes`.
fn find(bytes: &[u8], from: usize, needle: &[u8]) -> usize {
    let from = from.min(bytes.len());
    let found = bytes[from..].windows(needle.len()).position(|w| w == needle);
    found.map_or(bytes.len(), |i| from + i)
}

/// End of the string whose opening quote is at `at`.
fn string_end(bytes: &[u8], at: usize) -> usize {
    let mut at = at + 1;
    while at < bytes.len() && bytes[at] != b'"' {
        at += if bytes[at] == b'\\' { 2 } else { 1 };
    }
    at + 1
}

/// End of a raw string; `at` is the offset after its `r`. `None` if no raw string follows.
fn raw_string_end(bytes: &[u8], at: usize) -> Option<usize> {
    let hashes = bytes[at..].iter().take_while(|&&b| b == b'#').count();
    if bytes.get(at + hashes) != Some(&b'"') {
        return None;
    }
    let mut closing = vec![b'"'];
    closing.resize(1 + hashes, b'#');
    Some(find(bytes, at + hashes + 1, &closing) + closing.len())
}

/// End of the block comment at `at`. Block comments of Rust nest.
fn block_comment_end(bytes: &[u8], at: usize) -> usize {
    let mut at = at + 2;
    let mut depth = 1;
    while at < bytes.len() && depth > 0 {
        let step = match &bytes[at..] {
            [b'/', b'*', ..] => 1,
            [b'*', b'/', ..] => -1,
            _ => 0,
        };
        depth += step;
        // Both bytes of a delimiter are passed over, so that `/*/` is not closed by its own opening.
        at += if step == 0 { 1 } else { 2 };
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn literals_and_comments_are_blanked() {
        let check = |text: &str, expected: &str| assert_eq!(blank(text), expected, "{text}");
        check("a // b\nc", "a     \nc");
        check("a /* b /* c */ d */ e", "a                   e");
        check(r#"f("a\"b", x)"#, "f(      , x)");
        check("r#\"a\"b\"# + br\"c\" + r#match", "         +       + r#match");
        let lifetime = format!("{}&'a str", " ".repeat(23));
        check("'a' '\\'' '\\u{7f}' 'é' &'a str", &lifetime);
        check("for_\"x\"\ny", "for_   \ny");
        check("\"open\n", "     \n");
    }

    #[test]
    fn strings_are_found() {
        let file = File::new("a.rs", "f(\"é\", 'x', r#\"b\"#) // \"c\"\n");
        let found: Vec<&str> = file.strings().into_iter().map(|range| &file.text[range]).collect();
        assert_eq!(found, ["\"é\"", "r#\"b\"#"]);
    }

    #[test]
    fn words_are_whole() {
        let file = File::new("a.rs", "unsafe { forbid(unsafe_code) } // unsafe");
        assert_eq!(file.words("unsafe").collect::<Vec<_>>(), [0]);
    }

    #[test]
    fn bodies_pass_over_brackets() {
        let file = File::new("a.rs", "fn f(a: [u8; { 3 }]) -> T { { } }\nfn g();\n");
        assert_eq!(file.body(0), Some(26..32));
        assert_eq!(file.body(33), None);
    }

    #[test]
    fn test_lines_are_counted_once() {
        let check = |text: &str, lines: usize| {
            assert_eq!(File::new("a.rs", text).inner_test_lines(), lines, "{text}");
        };
        check("fn f() {}\n", 0);
        check("fn f() {}\n#[cfg(test)]\nmod tests {\n    fn t() {}\n}\n", 4);
        check("#[cfg(test)]\nmod tests {\n    #[cfg(test)]\n    fn t() {}\n}\n", 5);
        check("#[cfg(test)]\nmod cases;\nfn f() {}\n", 2);
    }

    #[test]
    fn test_modules_are_named() {
        let text = "#[cfg(test)]\npub(crate) mod cases;\n#[cfg(test)]\nmod tests { mod x; }\n";
        assert_eq!(File::new("a.rs", text).test_modules(), ["cases"]);
    }

    #[test]
    fn crates_are_named() {
        assert_eq!(File::new("crates/graph/src/op.rs", "").crate_name(), "graph");
        assert_eq!(File::new("xtask/src/main.rs", "").crate_name(), "xtask");
        assert_eq!(File::new("README.md", "").crate_name(), "");
    }
}
