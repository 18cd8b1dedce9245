//! PNG encoding of a scene. Invariant: equal scenes and resolutions give equal bytes; fonts of the system are
//! not used.

use super::font::{self, Placed};
use super::scene::{Color, Paint, PathStep, Scene, SceneItem, SceneText, TextAnchor};
use plimsoll_setting::Setting;
use std::collections::HashMap;
use std::io;
use tiny_skia::{FillRule, Path, PathBuilder, Pixmap, PremultipliedColorU8, Stroke, StrokeDash, Transform};
use ttf_parser::OutlineBuilder;

/// Points per inch.
const INCH: f64 = 72.0;

/// Maximum number of pixels of a picture; encoding holds six bytes per pixel.
const MAX_PIXELS: f64 = 40e6;

/// Renders the scene with `dpi` pixels per inch and returns the bytes of the file.
pub fn write(scene: &Scene, dpi: u32) -> io::Result<Vec<u8>> {
    let scale = f64::from(dpi) / INCH;
    let [width, height] = [scene.width, scene.height].map(|points| (points * scale).round().max(1.0));
    if width * height > MAX_PIXELS {
        let text = format!(
            "{width} x {height} pixels are more than {} million; lower {} or {}",
            MAX_PIXELS / 1e6,
            Setting::Dpi,
            Setting::Width
        );
        return Err(io::Error::other(text));
    }
    let mut bitmap = Pixmap::new(width as u32, height as u32).ok_or(io::ErrorKind::OutOfMemory)?;
    bitmap.fill(tiny_skia::Color::WHITE);
    let mut canvas = Canvas { bitmap, scale };
    for item in &scene.items {
        match item {
            SceneItem::Shape(steps, paint) => canvas.shape(steps, paint),
            SceneItem::Text(text) => canvas.letters(text),
        }
    }
    encode(&canvas.bitmap, dpi)
}

/// Bitmap on which a scene is painted.
struct Canvas {
    bitmap: Pixmap,
    /// Pixels per point.
    scale: f64,
}

impl Canvas {
    /// Converts a coordinate or a length in points to pixels.
    fn pixels(&self, points: f64) -> f32 {
        (points * self.scale) as f32
    }

    fn shape(&mut self, steps: &[PathStep], paint: &Paint) {
        let mut path = PathBuilder::new();
        for step in steps {
            match *step {
                PathStep::Move(x, y) => path.move_to(self.pixels(x), self.pixels(y)),
                PathStep::Line(x, y) => path.line_to(self.pixels(x), self.pixels(y)),
                PathStep::Close => path.close(),
            }
        }
        let Some(path) = path.finish() else { return };
        match *paint {
            Paint::Fill(ink) => self.fill(&path, ink, true),
            Paint::Cells(ink) => self.fill(&path, ink, false),
            Paint::Stroke { ink, width, dash } => {
                let dash = dash.map(|lengths| lengths.map(|length| self.pixels(length)).to_vec());
                let dash = dash.and_then(|lengths| StrokeDash::new(lengths, 0.0));
                let stroke = Stroke { width: self.pixels(width), dash, ..Stroke::default() };
                self.bitmap.stroke_path(&path, &solid(ink, true), &stroke, Transform::identity(), None);
            }
        }
    }

    fn letters(&mut self, line: &SceneText) {
        let width = font::width(&line.text, line.kind);
        let start = match line.anchor {
            TextAnchor::Start => line.x,
            TextAnchor::Middle => line.x - width / 2.0,
            TextAnchor::End => line.x - width,
        };
        let mut pen = Pen { path: PathBuilder::new(), x: 0.0, y: 0.0, scale: 0.0, pixels: self.scale };
        font::outline(&line.text, line.kind, start, line.y, &mut pen);
        if let Some(path) = pen.path.finish() {
            self.fill(&path, line.kind.ink, true);
        }
    }

    fn fill(&mut self, path: &Path, ink: Color, smooth: bool) {
        self.bitmap.fill_path(path, &solid(ink, smooth), FillRule::Winding, Transform::identity(), None);
    }
}

fn solid(Color(r, g, b): Color, smooth: bool) -> tiny_skia::Paint<'static> {
    let mut paint = tiny_skia::Paint { anti_alias: smooth, ..tiny_skia::Paint::default() };
    paint.set_color_rgba8(r, g, b, 255);
    paint
}

/// Transforms the outlines of glyphs to pixels and collects them in a path.
struct Pen {
    path: PathBuilder,
    x: f64,
    y: f64,
    scale: f64,
    pixels: f64,
}

impl Pen {
    /// The y axis of fonts points up, that of pictures down.
    fn at(&self, x: f32, y: f32) -> (f32, f32) {
        let x = self.x + f64::from(x) * self.scale;
        let y = self.y - f64::from(y) * self.scale;
        ((x * self.pixels) as f32, (y * self.pixels) as f32)
    }
}

impl Placed for Pen {
    fn place(&mut self, x: f64, y: f64, scale: f64) {
        self.x = x;
        self.y = y;
        self.scale = scale;
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
        let (x1, y1) = self.at(x1, y1);
        let (x, y) = self.at(x, y);
        self.path.quad_to(x1, y1, x, y);
    }

    fn curve_to(&mut self, x1: f32, y1: f32, x2: f32, y2: f32, x: f32, y: f32) {
        let (x1, y1) = self.at(x1, y1);
        let (x2, y2) = self.at(x2, y2);
        let (x, y) = self.at(x, y);
        self.path.cubic_to(x1, y1, x2, y2, x, y);
    }

    fn close(&mut self) {
        self.path.close();
    }
}

/// Encodes a PNG with a palette. It states the resolution, so that documents show it in its size.
fn encode(pixels: &Pixmap, dpi: u32) -> io::Result<Vec<u8>> {
    let colours = palette(pixels.pixels());
    let indices = palette_indices(pixels.pixels(), &colours);
    let mut bytes = vec![];
    let mut encoder = png::Encoder::new(&mut bytes, pixels.width(), pixels.height());
    encoder.set_color(png::ColorType::Indexed);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.set_palette(colours.into_flattened());
    encoder.set_compression(png::Compression::High);
    // Filters encode differences between neighbours, which are not small between palette indices.
    encoder.set_filter(png::Filter::NoFilter);
    let per_metre = (f64::from(dpi) / 0.0254).round() as u32;
    let dims = png::PixelDimensions { xppu: per_metre, yppu: per_metre, unit: png::Unit::Meter };
    encoder.set_pixel_dims(Some(dims));
    let mut writer = encoder.write_header()?;
    writer.write_image_data(&indices)?;
    writer.finish()?;
    Ok(bytes)
}

/// Red, green and blue.
type Colour = [u8; 3];

/// Colour of an opaque pixel. Its alpha is 1, so premultiplied and plain components are equal.
fn opaque(pixel: PremultipliedColorU8) -> Colour {
    [pixel.red(), pixel.green(), pixel.blue()]
}

/// The 256 most frequent colours. A picture has few colours, and some hundred more from the anti-aliasing of
/// text and slanted lines. Replacing rare colours by similar ones halves the file (175 kB to 81 kB for an
/// overview).
fn palette(pixels: &[PremultipliedColorU8]) -> Vec<Colour> {
    let mut counts: HashMap<Colour, usize> = HashMap::new();
    for run in pixels.chunk_by(|a, b| a == b) {
        *counts.entry(opaque(run[0])).or_default() += run.len();
    }
    let mut colours: Vec<(usize, Colour)> = counts.into_iter().map(|(colour, count)| (count, colour)).collect();
    colours.sort_unstable_by(|a, b| b.cmp(a));
    colours.into_iter().take(256).map(|(_, colour)| colour).collect()
}

/// The palette index of every pixel: its colour, or the nearest colour in RGB.
fn palette_indices(pixels: &[PremultipliedColorU8], colours: &[Colour]) -> Vec<u8> {
    let mut known: HashMap<Colour, u8> = HashMap::new();
    let mut indices = Vec::with_capacity(pixels.len());
    // Most pixels equal their neighbour, so a look-up for each run of equal pixels is enough.
    for run in pixels.chunk_by(|a, b| a == b) {
        let colour = opaque(run[0]);
        let index = *known.entry(colour).or_insert_with(|| nearest_index(colours, colour));
        indices.resize(indices.len() + run.len(), index);
    }
    indices
}

/// Index of the palette colour that is nearest to `wanted`; of several, the first.
fn nearest_index(colours: &[Colour], wanted: Colour) -> u8 {
    let nearest = (0..=255).zip(colours).min_by_key(|(_, colour)| squared_distance(**colour, wanted));
    nearest.map_or(0, |(index, _)| index)
}

/// Squared Euclidean distance of two colours in RGB.
fn squared_distance(a: Colour, b: Colour) -> u32 {
    a.iter().zip(b).map(|(&a, b)| u32::from(a.abs_diff(b)).pow(2)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequent_colours_are_exact_and_rare_ones_near() {
        let pixel = |red, green| PremultipliedColorU8::from_rgba(red, green, 0, 255).unwrap();
        let mut pixels = vec![pixel(0, 0); 10];
        pixels.extend((0..=255).flat_map(|red| [pixel(red, 0); 5]));
        pixels.push(pixel(9, 1));
        let colours = palette(&pixels);
        assert_eq!((colours.len(), colours[0]), (256, [0, 0, 0]));
        let shown: Vec<Colour> =
            palette_indices(&pixels, &colours).iter().map(|&n| colours[usize::from(n)]).collect();
        let mut wanted: Vec<Colour> = pixels.iter().map(|p| opaque(*p)).collect();
        *wanted.last_mut().unwrap() = [9, 0, 0];
        assert_eq!(shown, wanted);
    }
}
