//! Lines that are drawn again in place on a terminal. Invariant: the cursor stays visible below the lines and no mode of the
//! terminal is changed, so there is nothing to restore after an error, a signal or a kill.

use console::Term;
use plimsoll_tools::monitor;
use std::fmt::Write as _;
use std::io::Write as _;

/// Lines at the bottom of a terminal.
pub struct Screen {
    terminal: Term,
    /// The lines that are on the terminal.
    lines: Vec<String>,
}

impl Screen {
    /// Draws on standard error.
    pub fn on_stderr() -> Self {
        Self { terminal: Term::stderr(), lines: vec![] }
    }

    /// Draws on standard output.
    pub fn on_stdout() -> Self {
        Self { terminal: Term::stdout(), lines: vec![] }
    }

    /// Columns of a line, of the size that the terminal has now. The last column stays empty, because terminals differ
    /// in where the cursor is after a character in it.
    pub fn width(&self) -> usize {
        self.size().1.saturating_sub(1)
    }

    /// Rows and columns of the terminal.
    fn size(&self) -> (usize, usize) {
        let (rows, columns) = self.terminal.size();
        (usize::from(rows), usize::from(columns))
    }

    /// Replaces the lines; those that the terminal has no row for are left out.
    pub fn draw(&mut self, mut lines: Vec<String>) {
        let (rows, columns) = self.size();
        // The last row is that of the cursor. A line that has scrolled off the top cannot be erased: CUU ends at row 1.
        lines.truncate(rows.saturating_sub(1).max(1));
        let text = replaced(&self.lines, &lines, columns);
        self.lines = lines;
        self.write(&text);
    }

    /// Calls `print`, which writes lines above those of this screen.
    pub fn above(&mut self, print: impl FnOnce()) {
        // Taken, so that `draw` erases nothing: the lines are gone by then, and the cursor is below the printed text.
        let lines = std::mem::take(&mut self.lines);
        self.write(&replaced(&lines, &[], self.size().1));
        print();
        self.draw(lines);
    }

    /// Removes the lines.
    pub fn clear(&mut self) {
        self.draw(vec![]);
    }

    /// Writes to the terminal in one piece. An error is ignored: a terminal that is gone must not stop a run.
    fn write(&mut self, text: &str) {
        let _ = self.terminal.write_all(text.as_bytes()).and_then(|()| self.terminal.flush());
    }
}

/// The text that replaces the lines `old` above the cursor by `new` on a terminal with `columns` columns, which may have had
/// more when `old` was drawn: a longer line now takes several rows.
fn replaced(old: &[String], new: &[String], columns: usize) -> String {
    let up: usize = old.iter().map(|line| monitor::columns(line).div_ceil(columns.max(1)).max(1)).sum();
    let mut text = String::new();
    if up > 0 {
        // To the first column of the first line (CR, CUU), then erase to the end of the screen (ED). Writing to a String
        // cannot fail.
        let _ = write!(text, "\r\x1b[{up}A\x1b[J");
    }
    new.iter().for_each(|line| text.extend([line, "\n"]));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_replaced_where_they_are() {
        let check = |old: &[&str], new: &[&str], columns, wanted: &str| {
            let lines = |lines: &[&str]| lines.iter().map(|&line| line.to_owned()).collect::<Vec<_>>();
            assert_eq!(replaced(&lines(old), &lines(new), columns), wanted);
        };
        check(&[], &["a", "b"], 80, "a\nb\n");
        check(&["a", "b"], &["c"], 80, "\r\x1b[2A\x1b[Jc\n");
        check(&["c", ""], &[], 80, "\r\x1b[2A\x1b[J");
        // The terminal became narrower, and wrapped the first line into three rows.
        check(&["0123456789", "ä"], &["x"], 4, "\r\x1b[4A\x1b[Jx\n");
        check(&["中文字", "e\u{301}"], &["x"], 4, "\r\x1b[3A\x1b[Jx\n");
        check(&["a"], &["b"], 0, "\r\x1b[1A\x1b[Jb\n");
    }
}
