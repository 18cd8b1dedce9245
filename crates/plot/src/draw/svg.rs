//! SVG encoding of a scene. Invariant: equal scenes give equal bytes, and the file is well-formed XML for any
//! text.

use super::scene::{Paint, PathStep, Scene, SceneItem, SceneText, TextAnchor, point};
use std::fmt::{self, Display, Write};

/// Points per millimetre.
pub const POINTS: f64 = 72.0 / 25.4;

/// Font families: Noto Sans, with which widths are computed, then fonts that common systems provide.
const FONTS: &str = "Noto Sans, Helvetica Neue, Helvetica, Arial, Liberation Sans, sans-serif";

/// The content of the file.
pub fn write(scene: &Scene) -> String {
    let mut out = String::new();
    // Writing to a String cannot fail.
    let _ = write_to(scene, &mut out);
    out
}

fn write_to(scene: &Scene, out: &mut String) -> fmt::Result {
    let width = Short(scene.width / POINTS);
    let height = Short(scene.height / POINTS);
    writeln!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}mm\" height=\"{height}mm\" \
         viewBox=\"0 0 {} {}\" role=\"img\" font-family=\"{FONTS}\">",
        Short(scene.width),
        Short(scene.height)
    )?;
    writeln!(out, "<title>{}</title>", Escaped(&scene.title))?;
    writeln!(out, "<path fill=\"#ffffff\" d=\"M0 0H{}V{}H0Z\"/>", Short(scene.width), Short(scene.height))?;
    for item in &scene.items {
        match item {
            SceneItem::Shape(steps, paint) => shape(out, steps, paint)?,
            SceneItem::Text(text) => letters(out, text)?,
        }
    }
    out.write_str("</svg>\n")
}

/// Writes a path. Horizontal and vertical lines use the shorter commands `H` and `V`.
fn shape(out: &mut String, steps: &[PathStep], paint: &Paint) -> fmt::Result {
    match paint {
        Paint::Fill(ink) => write!(out, "<path fill=\"{}\" d=\"", Hex(*ink))?,
        Paint::Cells(ink) => write!(out, "<path shape-rendering=\"crispEdges\" fill=\"{}\" d=\"", Hex(*ink))?,
        Paint::Stroke { ink, width, dash } => {
            write!(out, "<path fill=\"none\" stroke=\"{}\" stroke-width=\"{}\"", Hex(*ink), Short(*width))?;
            if let Some([on, off]) = dash {
                write!(out, " stroke-dasharray=\"{} {}\"", Short(*on), Short(*off))?;
            }
            out.write_str(" d=\"")?;
        }
    }
    // End of the step before; NaN equals no coordinate.
    let mut at = point(f64::NAN, f64::NAN);
    for step in steps {
        match *step {
            PathStep::Move(x, y) => write!(out, "M{} {}", Short(x), Short(y))?,
            PathStep::Line(x, y) if y == at.y => write!(out, "H{}", Short(x))?,
            PathStep::Line(x, y) if x == at.x => write!(out, "V{}", Short(y))?,
            PathStep::Line(x, y) => write!(out, "L{} {}", Short(x), Short(y))?,
            PathStep::Close => out.write_str("Z")?,
        }
        if let PathStep::Move(x, y) | PathStep::Line(x, y) = *step {
            at = point(x, y);
        }
    }
    out.write_str("\"/>\n")
}

/// Writes a text element.
fn letters(out: &mut String, line: &SceneText) -> fmt::Result {
    let anchor = match line.anchor {
        TextAnchor::Start => "",
        TextAnchor::Middle => " text-anchor=\"middle\"",
        TextAnchor::End => " text-anchor=\"end\"",
    };
    let weight = if line.kind.bold { " font-weight=\"700\"" } else { "" };
    let x = Short(line.x);
    let y = Short(line.y);
    let size = Short(line.kind.size);
    let ink = Hex(line.kind.ink);
    let text = Escaped(&line.text);
    writeln!(out, "<text x=\"{x}\" y=\"{y}\" font-size=\"{size}\"{anchor}{weight} fill=\"{ink}\">{text}</text>")
}

struct Hex(super::scene::Color);

impl Display for Hex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let super::scene::Color(r, g, b) = self.0;
        write!(f, "#{r:02x}{g:02x}{b:02x}")
    }
}

/// A coordinate with at most two decimals.
struct Short(f64);

impl Display for Short {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = format!("{:.2}", self.0);
        let text = text.trim_end_matches('0').trim_end_matches('.');
        f.write_str(if text == "-0" { "0" } else { text })
    }
}

/// A text escaped for XML. Characters that XML does not allow, and control characters of bidirectional text,
/// which could reorder the line, become replacement characters.
struct Escaped<'a>(&'a str);

impl Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for letter in self.0.chars() {
            match letter {
                '&' => f.write_str("&amp;")?,
                '<' => f.write_str("&lt;")?,
                '>' => f.write_str("&gt;")?,
                '"' => f.write_str("&quot;")?,
                '\'' => f.write_str("&#39;")?,
                '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{fffe}' | '\u{ffff}' => {
                    f.write_char('\u{fffd}')?;
                }
                _ if letter.is_control() => f.write_char('\u{fffd}')?,
                _ => f.write_char(letter)?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_escaped() {
        let check = |text: &str, wanted: &str| assert_eq!(Escaped(text).to_string(), wanted);
        check("NC_1|a.b é 日", "NC_1|a.b é 日");
        check("<script>alert('&')</script>", "&lt;script&gt;alert(&#39;&amp;&#39;)&lt;/script&gt;");
        check("\"><g onload=\"x", "&quot;&gt;&lt;g onload=&quot;x");
        check("a\0b\u{1b}c\u{202e}d\u{ffff}", "a\u{fffd}b\u{fffd}c\u{fffd}d\u{fffd}");
        check("]]>", "]]&gt;");
    }

    #[test]
    fn coordinates_are_short() {
        for (number, wanted) in [(1.0, "1"), (0.125, "0.12"), (-0.001, "0"), (10.50, "10.5"), (-3.456, "-3.46")]
        {
            assert_eq!(Short(number).to_string(), wanted);
        }
    }
}
