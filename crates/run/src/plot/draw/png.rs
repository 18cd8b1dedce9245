//! A picture as PNG. Invariant: the same scene and resolution give the same bytes; no font of the machine is
//! looked at.

use super::font::{self, Placed};
use super::scene::{Anchor, Ink, Item, Paint, Scene, Step, Type};
use std::io;
use tiny_skia::{Color, FillRule, Path, PathBuilder, Pixmap, Stroke, StrokeDash, Transform};
use ttf_parser::OutlineBuilder;

/// Points of an inch.
const INCH: f64 = 72.0;

/// No side has more pixels: a picture must fit in memory.
pub const MOST_PIXELS: f64 = 20_000.0;

/// The file's bytes, with `dpi` pixels an inch.
pub fn write(scene: &Scene, dpi: u32) -> io::Result<Vec<u8>> {
    let scale = f64::from(dpi) / INCH;
    let [width, height] = [scene.width, scene.height].map(|points| (points * scale).round().max(1.0));
    if width.max(height) > MOST_PIXELS {
        let text = format!("{width} x {height} pixels, at most {MOST_PIXELS} a side; lower --dpi or --width");
        return Err(io::Error::other(text));
    }
    let mut pixels = Pixmap::new(width as u32, height as u32).ok_or(io::ErrorKind::OutOfMemory)?;
    pixels.fill(Color::WHITE);
    let mut canvas = Canvas { pixels, scale };
    for item in &scene.items {
        match item {
            Item::Shape(steps, paint) => canvas.shape(steps, paint),
            Item::Text { x, y, anchor, kind, text } => canvas.letters((*x, *y), *anchor, kind, text),
        }
    }
    encode(&canvas.pixels, dpi)
}

struct Canvas {
    pixels: Pixmap,
    /// Pixels of a point.
    scale: f64,
}

impl Canvas {
    fn shape(&mut self, steps: &[Step], paint: &Paint) {
        let mut path = PathBuilder::new();
        let at = |number: f64| (number * self.scale) as f32;
        for step in steps {
            match *step {
                Step::Move(x, y) => path.move_to(at(x), at(y)),
                Step::Line(x, y) => path.line_to(at(x), at(y)),
                Step::Close => path.close(),
            }
        }
        let Some(path) = path.finish() else { return };
        match *paint {
            Paint::Fill(ink) => self.fill(&path, ink, true),
            Paint::Cells(ink) => self.fill(&path, ink, false),
            Paint::Stroke { ink, width, dash } => {
                let dash = dash.and_then(|dash| StrokeDash::new(dash.map(at).to_vec(), 0.0));
                let stroke = Stroke { width: at(width), dash, ..Stroke::default() };
                self.pixels.stroke_path(&path, &solid(ink, true), &stroke, Transform::identity(), None);
            }
        }
    }

    fn letters(&mut self, (x, y): (f64, f64), anchor: Anchor, kind: &Type, text: &str) {
        let width = font::width(text, *kind);
        let start = match anchor {
            Anchor::Start => x,
            Anchor::Middle => x - width / 2.0,
            Anchor::End => x - width,
        };
        let mut pen = Pen { path: PathBuilder::new(), x: 0.0, y: 0.0, scale: 0.0, pixels: self.scale };
        font::outline(text, *kind, start, y, &mut pen);
        if let Some(path) = pen.path.finish() {
            self.fill(&path, kind.ink, true);
        }
    }

    fn fill(&mut self, path: &Path, ink: Ink, smooth: bool) {
        self.pixels.fill_path(path, &solid(ink, smooth), FillRule::Winding, Transform::identity(), None);
    }
}

fn solid(Ink(r, g, b): Ink, smooth: bool) -> tiny_skia::Paint<'static> {
    let mut paint = tiny_skia::Paint { anti_alias: smooth, ..tiny_skia::Paint::default() };
    paint.set_color_rgba8(r, g, b, 255);
    paint
}

/// Writes outlines of letters where they belong.
struct Pen {
    path: PathBuilder,
    x: f64,
    y: f64,
    scale: f64,
    pixels: f64,
}

impl Pen {
    /// The font's y points up.
    fn at(&self, x: f32, y: f32) -> (f32, f32) {
        let (x, y) = (self.x + f64::from(x) * self.scale, self.y - f64::from(y) * self.scale);
        ((x * self.pixels) as f32, (y * self.pixels) as f32)
    }
}

impl Placed for Pen {
    fn place(&mut self, x: f64, y: f64, scale: f64) {
        (self.x, self.y, self.scale) = (x, y, scale);
    }
}

impl OutlineBuilder for Pen {
    fn move_to(&mut self, x: f32, y: f32) {
        let (x, y) = self.at(x, y);
        self.path.move_to(x, y);
    }

    fn line_to(&mut self, x: f32, y: f32) {
        let (x, y) = self.at(x, y);
        self.path.line_to(x, y);
    }

    fn quad_to(&mut self, x1: f32, y1: f32, x: f32, y: f32) {
        let ((x1, y1), (x, y)) = (self.at(x1, y1), self.at(x, y));
        self.path.quad_to(x1, y1, x, y);
    }

    fn curve_to(&mut self, x1: f32, y1: f32, x2: f32, y2: f32, x: f32, y: f32) {
        let ((x1, y1), (x2, y2), (x, y)) = (self.at(x1, y1), self.at(x2, y2), self.at(x, y));
        self.path.cubic_to(x1, y1, x2, y2, x, y);
    }

    fn close(&mut self) {
        self.path.close();
    }
}

/// Three bytes a pixel, and the resolution, so that the picture has its size in a document.
fn encode(pixels: &Pixmap, dpi: u32) -> io::Result<Vec<u8>> {
    let mut bytes = vec![];
    let mut encoder = png::Encoder::new(&mut bytes, pixels.width(), pixels.height());
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.set_compression(png::Compression::High);
    let per_metre = (f64::from(dpi) / 0.0254).round() as u32;
    let dims = png::PixelDimensions { xppu: per_metre, yppu: per_metre, unit: png::Unit::Meter };
    encoder.set_pixel_dims(Some(dims));
    let opaque: Vec<u8> = pixels.pixels().iter().flat_map(|p| [p.red(), p.green(), p.blue()]).collect();
    let mut writer = encoder.write_header()?;
    writer.write_image_data(&opaque)?;
    writer.finish()?;
    Ok(bytes)
}
