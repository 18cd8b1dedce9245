//! The frame of a page: head, style, script and sections. Invariant: a page refers to nothing outside itself, and its
//! content security policy allows no other script than its own.

use crate::html::escape;
use sha2::{Digest, Sha256};
use std::fmt::Write;

const TEMPLATE: &str = include_str!("page.html");
const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

/// A section of a page.
pub struct PageSection {
    /// Identifier, for links.
    pub id: &'static str,
    /// Heading, plain text.
    pub title: &'static str,
    /// Content, HTML.
    pub body: String,
}

/// A page.
pub struct HtmlPage {
    /// Title, plain text.
    pub title: String,
    /// Summary and warnings below the title, HTML.
    pub lead: String,
    /// Sections in order.
    pub sections: Vec<PageSection>,
    /// Last line of the page, plain text.
    pub footer: String,
    /// Style sheet of this kind of page, after that of all pages; may be empty.
    pub own_style: &'static str,
    /// Script of this kind of page, after that of all pages; may be empty.
    pub own_script: &'static str,
}

impl HtmlPage {
    /// The page as HTML.
    pub fn html(&self) -> String {
        let mut links = String::new();
        let mut sections = String::new();
        for PageSection { id, title, body } in &self.sections {
            let title = escape(title);
            let _ = writeln!(links, "<a href=\"#{id}\">{title}</a>");
            let _ = writeln!(
                sections,
                "<section id=\"{id}\" aria-labelledby=\"{id}-title\">\n<h2 id=\"{id}-title\">{title}</h2>\n{body}</section>"
            );
        }
        let title = escape(&self.title);
        let style = format!("{STYLE}{}", self.own_style);
        let script = format!("{SCRIPT}{}", self.own_script);
        // The content security policy of the page allows the script with this digest and no other.
        let digest = base64(&Sha256::digest(script.as_bytes()));
        fill(&[
            ("digest", &digest),
            ("title", &title),
            ("style", &style),
            ("lead", &self.lead),
            ("links", &links),
            ("sections", &sections),
            ("footer", &escape(&self.footer)),
            ("script", &script),
        ])
    }
}

/// Replaces `{{name}}` in the template. Values are inserted as they are: a `{{name}}` in a value is not replaced.
fn fill(values: &[(&str, &str)]) -> String {
    let mut page = String::new();
    let mut rest = TEMPLATE;
    while let Some((before, after)) = rest.split_once("{{") {
        page.push_str(before);
        let (name, after) = after.split_once("}}").unwrap_or((after, ""));
        let value = values.iter().find(|(known, _)| *known == name);
        page.push_str(value.map_or("", |(_, value)| value));
        rest = after;
    }
    page + rest
}

/// Base64 of RFC 4648, with padding.
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for group in bytes.chunks(3) {
        let word =
            group.iter().fold(0_u32, |word, &byte| word << 8 | u32::from(byte)) << (8 * (3 - group.len()));
        for place in 0..4 {
            if place <= group.len() {
                text.push(char::from(DIGITS[(word >> (18 - 6 * place)) as usize & 63]))
            } else {
                text.push('=')
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_of_the_rfc() {
        for (bytes, text) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("foobar", "Zm9vYmFy"),
        ] {
            assert_eq!(base64(bytes.as_bytes()), text);
        }
    }

    #[test]
    fn a_page_refers_to_nothing_outside() {
        let section = PageSection { id: "one", title: "One & two", body: "{{script}}".to_owned() };
        let title = "<script>{{style}}".to_owned();
        let page = HtmlPage {
            title,
            lead: String::new(),
            sections: vec![section],
            footer: "end".to_owned(),
            own_style: "",
            own_script: "",
        }
        .html();
        assert!(
            page.contains("<title>&lt;script&gt;{{style}}</title>") && page.contains("One &amp; two"),
            "{page}"
        );
        // Values are not searched for names.
        assert_eq!((page.matches("{{script}}").count(), page.matches(SCRIPT).count()), (1, 1));
        for foreign in ["http:", "https:", "//cdn", "@import", "innerHTML", "src=", "url("] {
            assert!(!page.contains(foreign), "{foreign}");
        }
        // The element `script` would end inside the script.
        assert!(!SCRIPT.contains("</script") && !SCRIPT.contains("<!--"));
    }
}
