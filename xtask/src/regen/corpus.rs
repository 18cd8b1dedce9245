//! A text to train on, made by a grammar: entries of a harbour's log. Invariant: the same source gives the same
//! bytes.
//!
//! It is meant to be learned quickly and in steps: letters, then some three hundred words, then the sentences
//! around them, then what an entry has said before: its ship, master, cargo and port come again, so that a model
//! that looks back is better than one that does not. Entries are paragraphs, which is what a document is.

use std::fmt::Write as _;
use std::path::Path;

use super::Random;

/// About the bytes of the text.
const BYTES: usize = 500_000;

const FIRST: &[&str] = &[
    "Mary", "Anne", "Alice", "Ellen", "Grace", "Jane", "Rose", "Clara", "Agnes", "Edith", "Hope", "Star",
    "Pride", "Spirit", "Queen", "Maid", "Lady", "Belle", "Daughter", "Light",
];
const SECOND: &[&str] = &[
    "Jenkins",
    "of the Tyne",
    "of Leith",
    "Morgan",
    "of the Forth",
    "Harding",
    "of Cardiff",
    "Sinclair",
    "of the North",
    "of the Isles",
    "Bell",
    "Carter",
    "of the Humber",
    "Walker",
    "of Hull",
    "Thomas",
];
const MASTERS: &[&str] = &[
    "Hughes", "Fraser", "Pike", "Ross", "Miller", "Lawson", "Evans", "Grant", "Reid", "Shaw", "Barker", "Owen",
    "Palmer", "Stone", "Webb", "Young", "Drake", "Holt", "Innes", "Kerr",
];
const CARGOES: &[&str] = &[
    "coal",
    "timber",
    "salt",
    "iron ore",
    "barley",
    "wool",
    "slate",
    "herring",
    "tea",
    "copper",
    "grain",
    "sugar",
    "cotton",
    "wine",
    "tallow",
    "flax",
    "rope",
    "china clay",
    "oats",
    "jute",
];
const PORTS: &[&str] = &[
    "London",
    "Liverpool",
    "Bristol",
    "Hamburg",
    "Bergen",
    "Lisbon",
    "Dublin",
    "Antwerp",
    "Riga",
    "Danzig",
    "Oporto",
    "Cadiz",
    "Boston",
    "Halifax",
    "Calcutta",
    "Genoa",
    "Naples",
    "Havana",
    "Rouen",
    "Malta",
];
const WINDS: &[&str] =
    &["north", "north-east", "east", "south-east", "south", "south-west", "west", "north-west"];
const WEATHER: &[&str] = &[
    "with rain",
    "with fog until noon",
    "with a heavy swell",
    "with snow on the hills",
    "with a clear sky",
    "with a falling glass",
    "with squalls at night",
    "with a calm sea",
];
const DAYS: &[&str] = &["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];
const NUMBERS: &[&str] = &[
    "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "fourteen",
    "fifteen", "twenty", "thirty", "forty",
];
const HANDS: &[&str] = &[
    "the mate",
    "the carpenter",
    "the cook",
    "the pilot",
    "the harbour master",
    "the surveyor",
    "the clerk",
    "the owner",
    "the youngest boy",
    "the boatswain",
];
const REMARKS: &[&str] = &[
    "would not sail on a Friday",
    "asked for his wages before the tide",
    "counted the sacks twice",
    "found the pumps in good order",
    "wrote the draught in the book",
    "said that the mark was under water",
    "said that the mark was dry",
    "saw that the hatches were closed",
    "had the deck load taken off",
    "sent for more rope",
    "slept through the night watch",
    "lit the lamp on the quay",
    "looked at the line on her side and shook his head",
    "looked at the line on her side and was content",
    "put his name to the paper",
    "would hear of no delay",
];

/// Writes `examples/corpus.txt`.
pub fn write(root: &Path) -> Result<(), String> {
    super::write(&root.join("examples/corpus.txt"), text().as_bytes())
}

/// The whole text.
fn text() -> String {
    let mut random = Random(0x0050_4c49_4d53_4f4c);
    let mut text = String::with_capacity(BYTES + 1000);
    while text.len() < BYTES {
        if !text.is_empty() {
            text.push('\n');
        }
        entry(&mut random, &mut text);
    }
    text
}

/// What an entry is about.
struct Ship {
    name: String,
    master: &'static str,
    cargo: &'static str,
    from: &'static str,
    to: &'static str,
}

/// One paragraph: a ship comes, is loaded, and leaves, or is kept back.
fn entry(random: &mut Random, text: &mut String) {
    let from = random.pick(PORTS);
    let to = loop {
        let to = random.pick(PORTS);
        if to != from {
            break to;
        }
    };
    let ship = Ship {
        name: format!("{} {}", random.pick(FIRST), random.pick(SECOND)),
        master: random.pick(MASTERS),
        cargo: random.pick(CARGOES),
        from,
        to,
    };
    let day = random.pick(DAYS);
    let Ship { name, master, from, .. } = &ship;
    // Writing to a String cannot fail.
    let _ = writeln!(
        text,
        "{day}. Wind {}, {}. The {name}, Captain {master}, came in from {from}.",
        random.pick(WINDS),
        random.pick(WEATHER)
    );
    for _ in 0..2 + random.below(4) {
        let sentence = sentence(&ship, random);
        let _ = writeln!(text, "{sentence}");
    }
    let _ = writeln!(text, "{}", end(&ship, random));
}

fn sentence(ship: &Ship, random: &mut Random) -> String {
    let Ship { name, master, cargo, from, to } = ship;
    match random.below(7) {
        0 => format!("She took {} hundred tons of {cargo} for {to}.", random.pick(NUMBERS)),
        1 => format!("The {cargo} was brought to the quay in {} carts.", random.pick(NUMBERS)),
        2 => format!("Captain {master} said that {} {}.", random.pick(HANDS), random.pick(REMARKS)),
        3 => format!("On the {name} {} {}.", random.pick(HANDS), random.pick(REMARKS)),
        4 => format!("In {} days there will be no more {cargo} in {from}.", random.pick(NUMBERS)),
        5 => format!("Captain {master} asked what {cargo} is worth in {to}.",),
        _ => {
            format!("When {} came aboard, {} {}.", random.pick(HANDS), random.pick(HANDS), random.pick(REMARKS))
        }
    }
}

fn end(ship: &Ship, random: &mut Random) -> String {
    let Ship { name, master, cargo, to, .. } = ship;
    match random.below(4) {
        0 => format!(
            "The {name} was too deep, and Captain {master} had to land {} tons of {cargo}.",
            random.pick(NUMBERS)
        ),
        1 => format!("On {} the {name} left for {to} with the tide.", random.pick(DAYS)),
        2 => format!("The {name} lies at the quay until {}, and Captain {master} waits.", random.pick(DAYS)),
        _ => format!("So the {name} sailed for {to}, with {cargo}, and her mark was above the water."),
    }
}

impl Random {
    fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.next()) * n as u128) >> 64) as usize
    }

    /// One of them, the first ones more often, as words are (Zipf 1949): the smaller of two draws.
    fn pick(&mut self, from: &[&'static str]) -> &'static str {
        from[self.below(from.len()).min(self.below(from.len()))]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shipped_text_is_the_one_made_here() {
        let path = crate::root().join("examples/corpus.txt");
        assert!(std::fs::read(path).unwrap() == text().as_bytes(), "cargo run -p xtask -- regen corpus");
    }

    #[test]
    fn there_is_more_to_learn_than_pairs_of_bytes() {
        let text = text();
        let order_1 = data::train::order_1(text.as_bytes());
        assert!((1.9..2.6).contains(&order_1), "{order_1} nats a byte");
        // Far below that: what a byte is worth to an archiver that sees repeated phrases.
        let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
        std::io::Write::write_all(&mut packed, text.as_bytes()).unwrap();
        let nats = packed.finish().unwrap().len() as f64 * 8.0 * 2_f64.ln() / text.len() as f64;
        assert!(nats < 0.6 * order_1, "{nats} nats a byte, {order_1} by pairs");
    }
}
