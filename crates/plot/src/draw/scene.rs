//! A picture as a list of shapes and texts; coordinates are in points (1/72 inch) from the top left. Invariant:
//! SVG and PNG are made from the same list, and all colours are opaque.

/// An opaque colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Color(pub u8, pub u8, pub u8);

impl Color {
    /// Linear interpolation to `other`; `part` is clamped to 0..=1.
    pub fn towards(self, other: Color, part: f64) -> Color {
        let part = part.clamp(0.0, 1.0);
        Color(mix(self.0, other.0, part), mix(self.1, other.1, part), mix(self.2, other.2, part))
    }
}

/// Linear interpolation from `a` to `b` of one colour component.
fn mix(a: u8, b: u8, part: f64) -> u8 {
    (f64::from(a) + (f64::from(b) - f64::from(a)) * part).round() as u8
}

/// A point of a picture, in points (1/72 inch) from its top left.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScenePoint {
    /// Distance from the left edge.
    pub x: f64,
    /// Distance from the top edge.
    pub y: f64,
}

/// The point at (`x`, `y`).
pub fn point(x: f64, y: f64) -> ScenePoint {
    ScenePoint { x, y }
}

/// Segment of a path.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PathStep {
    /// Starts a subpath at this point.
    Move(f64, f64),
    /// Straight line to this point.
    Line(f64, f64),
    /// Closes the subpath.
    Close,
}

/// Paint of a path.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Paint {
    /// Fills the interior.
    Fill(Color),
    /// Fills the interior without anti-aliasing, so that adjacent cells have no gap between them.
    Cells(Color),
    /// Strokes the path.
    Stroke {
        /// Colour.
        ink: Color,
        /// Line width in points.
        width: f64,
        /// Lengths of dashes and gaps in points; `None` for a solid line.
        dash: Option<[f64; 2]>,
    },
}

/// Point of a text that is at its x coordinate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TextAnchor {
    /// Left end.
    Start,
    /// Centre.
    Middle,
    /// Right end.
    End,
}

/// Style of a text.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TextStyle {
    /// Font size in points.
    pub size: f64,
    /// Whether the text is bold.
    pub bold: bool,
    /// Colour.
    pub ink: Color,
}

/// Element of a picture; later elements are painted on top.
#[derive(Clone, Debug, PartialEq)]
pub enum SceneItem {
    /// A path of lines and areas.
    Shape(Vec<PathStep>, Paint),
    /// A text on one line.
    Text(SceneText),
}

/// A text on one line.
#[derive(Clone, Debug, PartialEq)]
pub struct SceneText {
    /// Coordinate of the anchor.
    pub x: f64,
    /// Coordinate of the baseline.
    pub y: f64,
    /// Point of the text that is at `x`.
    pub anchor: TextAnchor,
    /// Style.
    pub kind: TextStyle,
    /// The text.
    pub text: String,
}

/// A picture.
#[derive(Clone, Debug, PartialEq)]
pub struct Scene {
    /// Width in points.
    pub width: f64,
    /// Height in points.
    pub height: f64,
    /// Text alternative of the picture for screen readers.
    pub title: String,
    /// Elements in painting order.
    pub items: Vec<SceneItem>,
}

impl Scene {
    /// An empty scene. Its height is set when the page is complete.
    pub fn new(width: f64, title: String) -> Self {
        Scene { width, height: 0.0, title, items: vec![] }
    }

    /// Adds a path, unless it is empty.
    pub fn shape(&mut self, steps: Vec<PathStep>, paint: Paint) {
        if !steps.is_empty() {
            self.items.push(SceneItem::Shape(steps, paint));
        }
    }

    /// Adds a straight line.
    pub fn line(&mut self, from: ScenePoint, to: ScenePoint, ink: Color, width: f64) {
        self.shape(segment(from, to).to_vec(), Paint::Stroke { ink, width, dash: None });
    }

    /// Adds a dashed line.
    pub fn dashed(&mut self, from: ScenePoint, to: ScenePoint, ink: Color, width: f64) {
        self.shape(segment(from, to).to_vec(), Paint::Stroke { ink, width, dash: Some([2.4, 1.8]) });
    }

    /// Adds a filled rectangle.
    pub fn rectangle(&mut self, x: f64, y: f64, width: f64, height: f64, ink: Color) {
        if width > 0.0 && height > 0.0 {
            self.shape(rectangle(x, y, width, height).to_vec(), Paint::Fill(ink));
        }
    }

    /// Adds a text.
    pub fn text(&mut self, x: f64, y: f64, anchor: TextAnchor, kind: TextStyle, text: impl Into<String>) {
        self.items.push(SceneItem::Text(SceneText { x, y, anchor, kind, text: text.into() }));
    }
}

/// Path of a straight line.
pub fn segment(from: ScenePoint, to: ScenePoint) -> [PathStep; 2] {
    [PathStep::Move(from.x, from.y), PathStep::Line(to.x, to.y)]
}

/// Path of a rectangle.
pub fn rectangle(x: f64, y: f64, width: f64, height: f64) -> [PathStep; 5] {
    let right = x + width;
    let below = y + height;
    [
        PathStep::Move(x, y),
        PathStep::Line(right, y),
        PathStep::Line(right, below),
        PathStep::Line(x, below),
        PathStep::Close,
    ]
}

/// Path of 45-degree hatching that fills a rectangle and continues across adjacent rectangles.
pub fn hatch(x: f64, y: f64, width: f64, height: f64, gap: f64) -> Vec<PathStep> {
    // On each line, x + y is a constant multiple of `gap`, so that lines of adjacent rectangles meet.
    let first = ((x + y) / gap).ceil() as i64;
    let last = ((x + width + y + height) / gap).floor() as i64;
    let mut steps = vec![];
    for number in first..=last {
        let sum = number as f64 * gap;
        let left = x.max(sum - y - height);
        let right = (x + width).min(sum - y);
        if right - left > 1e-6 {
            steps.extend(segment(point(left, sum - left), point(right, sum - right)));
        }
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hatch_stays_inside() {
        for (x, y, width, height) in [(0.0, 0.0, 10.0, 10.0), (3.3, 7.1, 0.4, 12.0), (100.0, 2.0, 55.0, 1.0)] {
            let steps = hatch(x, y, width, height, 2.5);
            for step in &steps {
                let (PathStep::Move(a, b) | PathStep::Line(a, b)) = *step else { panic!("closed") };
                let a = a - x;
                let b = b - y;
                assert!(a > -1e-9 && a < width + 1e-9 && b > -1e-9 && b < height + 1e-9, "{step:?}");
            }
        }
        assert_eq!(hatch(0.0, 0.0, 10.0, 10.0, 5.0).len(), 6);
    }

    #[test]
    fn colours_mix() {
        let a = Color(0, 100, 200);
        let b = Color(100, 0, 200);
        assert_eq!([a.towards(b, 0.0), a.towards(b, 0.5), a.towards(b, 7.0)], [a, Color(50, 50, 200), b]);
    }
}
