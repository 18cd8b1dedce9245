//! Text of a page: escapes, numbers and dates. Invariant: text from files enters a page only through [`escape`] and
//! [`json`], so it can neither open a tag nor end a script.

use serde_json::Value;
use std::fmt::Write;

/// Escapes text for element content and for attribute values in double quotes.
pub fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            _ => safe.push(letter),
        }
    }
    safe
}

/// Escapes a JSON text for a `script` element. `<` can only be inside strings of a JSON text, where the escape stands
/// for the same character; without `<`, neither `</script` nor `<!--` can occur. U+2028 and U+2029 end a line in old
/// JavaScript.
pub fn json(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '<' | '\u{2028}' | '\u{2029}' => {
                // Writing to a string cannot fail.
                let _ = write!(safe, "\\u{:04x}", u32::from(letter));
            }
            _ => safe.push(letter),
        }
    }
    safe
}

/// A JSON string literal for a `script` element.
pub fn json_string(text: &str) -> String {
    json(&Value::from(text).to_string())
}

/// A whole number with narrow no-break spaces between groups of three digits; numbers of four digits have none.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    if digits.len() <= 4 {
        return digits;
    }
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push('\u{202f}');
        }
        text.push(digit);
    }
    text
}

/// A share of a total as a percentage: `12.3 %`. Shares above 0 are never shown as 0, and shares below 1 never as 100.
pub fn percent(part: u64, total: u64) -> String {
    if total == 0 {
        return "–".to_owned();
    }
    let share = 100.0 * part as f64 / total as f64;
    match share {
        _ if part == 0 => "0 %".to_owned(),
        _ if part == total => "100 %".to_owned(),
        _ if share < 0.1 => "&lt; 0.1 %".to_owned(),
        _ if share > 99.9 => "&gt; 99.9 %".to_owned(),
        _ => format!("{share:.1} %"),
    }
}

/// A number of bases with its unit: `950 b`, `12.5 kb`, `3.2 Mb`.
pub fn bases(number: u64) -> String {
    // The limits are those from which on one decimal rounds to 1000.0 of the smaller unit.
    let (unit, name) = match number {
        0..1_000 => return format!("{number} b"),
        1_000..999_950 => (1e3, "kb"),
        999_950..999_950_000 => (1e6, "Mb"),
        999_950_000.. => (1e9, "Gb"),
    };
    let text = format!("{:.1}", number as f64 / unit);
    format!("{} {name}", text.strip_suffix(".0").unwrap_or(&text))
}

/// A number with at most `digits` decimals, without zeros at its end.
pub fn decimal(number: f64, digits: usize) -> String {
    let text = format!("{number:.digits$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

/// A time in seconds since 1970 as `2026-11-25 14:03 UTC`.
pub fn date(seconds: u64) -> String {
    // Days to a date of the Gregorian calendar: "civil_from_days" of Howard Hinnant,
    // https://howardhinnant.github.io/date_algorithms.html. Years begin on 1 March, so that a leap day is the last.
    let days = seconds / 86_400 + 719_468;
    let era = days / 146_097;
    let day = days % 146_097;
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = year + era * 400 + u64::from(month <= 2);
    let hour = seconds / 3_600 % 24;
    let minute = seconds / 60 % 60;
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02} UTC")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_text_stays_text() {
        assert_eq!(escape("<b a=\"x\" c='y'>&amp;"), "&lt;b a=&quot;x&quot; c=&#39;y&#39;&gt;&amp;amp;");
        let name = "</script><!--<script>\u{2028}\u{2029}\"\\é";
        let literal = json_string(name);
        assert_eq!(literal, r#""\u003c/script>\u003c!--\u003cscript>\u2028\u2029\"\\é""#);
        assert_eq!(serde_json::from_str::<String>(&literal).expect("JSON"), name);
    }

    #[test]
    fn numbers_are_short() {
        for (number, text) in
            [(0, "0"), (9999, "9999"), (10_000, "10\u{202f}000"), (1_234_567, "1\u{202f}234\u{202f}567")]
        {
            assert_eq!(grouped(number), text);
        }
        for (part, total, text) in [
            (0, 0, "–"),
            (0, 7, "0 %"),
            (7, 7, "100 %"),
            (1, 8, "12.5 %"),
            (1, 1_000_000, "&lt; 0.1 %"),
            (999_999, 1_000_000, "&gt; 99.9 %"),
        ] {
            assert_eq!(percent(part, total), text);
        }
        for (number, text) in [
            (0, "0 b"),
            (999, "999 b"),
            (1_000, "1 kb"),
            (12_540, "12.5 kb"),
            (999_950, "1 Mb"),
            (3_200_000, "3.2 Mb"),
            (u64::MAX, "18446744073.7 Gb"),
        ] {
            assert_eq!(bases(number), text);
        }
        assert_eq!(
            (decimal(0.5, 4), decimal(100.0, 0), decimal(0.00004, 4)),
            ("0.5".into(), "100".into(), "0".into())
        );
    }

    #[test]
    fn dates_are_of_the_gregorian_calendar() {
        for (seconds, text) in [
            (0, "1970-01-01 00:00 UTC"),
            (951_782_399, "2000-02-28 23:59 UTC"),
            (951_782_400, "2000-02-29 00:00 UTC"),
            (1_772_323_200, "2026-03-01 00:00 UTC"),
            (4_107_542_399, "2100-02-28 23:59 UTC"),
            (4_107_542_400, "2100-03-01 00:00 UTC"),
        ] {
            assert_eq!(date(seconds), text);
        }
    }
}
