//! A match on a closed enum has no catch-all arm, so that the compiler reports every such match when a variant
//! is added. In the kernel tables, an `else` after a pattern on an op is a catch-all too. The rule is a heuristic on
//! text, without types: it inspects matches with a pattern that names the enum.

use super::{Violation, hit};
use crate::source::{File, in_word};

/// Enums whose variants every match must list.
const CLOSED: &[&str] = &["Op", "Role", "DType", "FileDType", "Layout", "SafetensorsLayout", "KernelId"];
/// Crates that use these enums; `data` is not among them, because it has element types of its own.
const CRATES: &[&str] =
    &["graph", "plan", "exec", "cpu", "models", "cuda", "runtime", "embed", "tools", "train", "virus"];

/// Folder of the kernel tables.
const KERNEL_TABLES: &str = "crates/plan/src/kernels/";

/// Finds catch-all arms in matches on a closed enum, and in the kernel tables `else` after a pattern on an op.
pub fn catch_all(file: &File) -> Vec<Violation> {
    if !file.is_rust() || !CRATES.contains(&file.crate_name()) {
        return Vec::new();
    }
    let arms = file.words("match").flat_map(|at| catch_alls(file, at));
    arms.chain(else_branches(file)).collect()
}

/// Violations in a kernel table: `if let` and `let` with an `else`, whose pattern names an op. A new op would take the
/// `else` without a decision; in a row, its kernel states the property or has that of the named row.
fn else_branches(file: &File) -> Vec<Violation> {
    if !file.path.starts_with(KERNEL_TABLES) {
        return Vec::new();
    }
    let on_op = file.words("let").filter(|&at| {
        let pattern = file.code[at..].split_once('=').map_or("", |(pattern, _)| pattern);
        names(pattern, "Op") && has_else(file, at + pattern.len())
    });
    on_op
        .map(|at| hit(file.line(at), "`else` after a pattern on `Op`: the property belongs to a row"))
        .collect()
}

/// Whether the first block after `from` is the block of an `else` or is followed by one.
fn has_else(file: &File, from: usize) -> bool {
    file.body(from).is_some_and(|block| {
        let before = file.code[from..block.start].trim_end();
        let after = file.code[block.end + 1..].trim_start();
        before.ends_with("else") || after.starts_with("else")
    })
}

/// Violations of the match at `at`.
fn catch_alls(file: &File, at: usize) -> Vec<Violation> {
    let arms = arms(file, at);
    let own = enclosing_type(&file.code[..at]);
    let Some(closed) = CLOSED.iter().find(|name| {
        let by_self = own == **name && arms.iter().any(|(_, arm)| arm.contains("Self::"));
        by_self || arms.iter().any(|(_, arm)| names(arm, name))
    }) else {
        return Vec::new();
    };
    let all = arms.iter().filter(|(_, arm)| catches_all(arm));
    all.map(|(at, arm)| hit(file.line(*at), format!("`{arm} =>` in a match on `{closed}`"))).collect()
}

/// Patterns of the match at `at` with their offsets.
fn arms(file: &File, at: usize) -> Vec<(usize, &str)> {
    let Some(body) = file.body(at) else {
        return Vec::new();
    };
    let bytes = file.code.as_bytes();
    let mut arms = Vec::new();
    let mut start = body.start + 1;
    let mut i = body.start + 1;
    while i < body.end {
        match bytes[i] {
            b'(' | b'[' | b'{' => i = file.close(i).unwrap_or(body.end),
            b',' => start = i + 1,
            // Brackets are passed over above, so this arrow is of an arm and not of a match inside of an arm.
            b'=' if bytes[i + 1] == b'>' => {
                arms.push(pattern(&file.code, start, i));
                i = block_end(file, i + 2).unwrap_or(i + 1);
                start = i + 1;
            }
            _ => {}
        }
        i += 1;
    }
    arms
}

/// Offset and text of the pattern between two offsets, without surrounding spaces and attributes.
fn pattern(code: &str, start: usize, end: usize) -> (usize, &str) {
    let mut text = code[start..end].trim();
    while let Some((_, rest)) = text.strip_prefix("#[").and_then(|text| text.split_once(']')) {
        text = rest.trim_start();
    }
    (start + code[start..end].rfind(text).unwrap_or(0), text)
}

/// Offset of the closing brace of an arm whose body is a block, after which no comma is needed; `None` for
/// other arms.
fn block_end(file: &File, from: usize) -> Option<usize> {
    let rest = file.code[from..].trim_start();
    let rest = rest.strip_prefix("unsafe").unwrap_or(rest).trim_start();
    rest.starts_with('{').then(|| file.close(file.code.len() - rest.len()))?
}

/// Whether a pattern matches every value: `_`, a variable, or a tuple of them.
fn catches_all(pattern: &str) -> bool {
    let parts = pattern.trim_start_matches('(').trim_end_matches(')').split(',');
    parts.map(str::trim).filter(|part| !part.is_empty()).all(|part| {
        let word = part.bytes().all(in_word);
        let name = word && part.bytes().next().is_some_and(|b| b == b'_' || b.is_ascii_lowercase());
        name && part != "true" && part != "false"
    })
}

/// Whether a pattern contains the path `name::`, as a whole word.
fn names(pattern: &str, name: &str) -> bool {
    let path = format!("{name}::");
    let mut places = pattern.match_indices(&path);
    places.any(|(at, _)| at == 0 || !in_word(pattern.as_bytes()[at - 1]))
}

/// The type of the last `impl` before this point, which `Self::` refers to.
fn enclosing_type(before: &str) -> &str {
    let header = before.rfind("\nimpl").map_or("", |at| &before[at + 1..]);
    let header = header.split('{').next().unwrap_or("").trim_end();
    header.rsplit([' ', ':']).next().unwrap_or("")
}

#[cfg(test)]
mod tests {
    use super::super::tests::check;
    use super::*;

    const PATH: &str = "crates/plan/src/fuse.rs";

    #[test]
    fn catch_alls_are_found() {
        let check = |text: &str, lines: &[usize]| check(catch_all, PATH, text, lines);
        check("match op {\n Op::Add => 1,\n _ => 2,\n}", &[3]);
        check("match op {\n Op::Add(a) => { f(a) }\n _ => {}\n}", &[3]);
        check("match op {\n Op::Add(a) => unsafe { f(a) }\n other => {}\n}", &[3]);
        check("match x {\n Some(plimsoll_graph::DType::F32) => 1,\n _ => 2,\n}", &[3]);
        check("match (a, b) {\n (Role::Grad, Role::Grad) => 1,\n (_, _) => 2,\n}", &[3]);
        check("match op {\n Op::Add { a, .. } | Op::Sub { a } => f::<A, B>(a),\n _ => 2,\n}", &[3]);
        check("match op {\n Op::Add => 1,\n #[cfg(test)]\n _ => 2,\n}", &[4]);
        check("x\nimpl Kind for Op {\n fn f(&self) { match self { Self::Add => 1,\n _ => 2 } } }", &[4]);
        check("match a {\n 1 => match op {\n Op::Add => 1,\n _ => 2,\n },\n _ => 3,\n}", &[4]);
    }

    #[test]
    fn spelled_out_matches_pass() {
        let check = |text: &str| check(catch_all, PATH, text, &[]);
        check("match op { Op::Add => 1, Op::Sub => 2 }");
        check("match n { 1 => Op::Add, _ => Op::Sub }");
        check("match op { MyOp::Add => 1, _ => 2 }");
        check("match a { 1 => match op { Op::Add => 1, Op::Sub => 2 }, _ => 3 }");
        check("match (a, b) { (Role::Grad, _) => 1, (Role::State(_), true) => 2 }");
        check("// match op { Op::Add => 1, _ => 2 }");
    }

    #[test]
    fn an_else_after_an_op_is_found_in_kernel_tables_only() {
        let table = "crates/plan/src/kernels/cuda.rs";
        let check = |path: &str, text: &str, lines: &[usize]| check(catch_all, path, text, lines);
        let chain =
            "if let Op::Add(a) = op {\n 1\n} else if let Op::Sub(_) | Op::Neg(_) = op {\n 2\n} else {\n 3\n}";
        check(table, chain, &[1, 3]);
        check(PATH, chain, &[]);
        check(table, "let Op::Linear(Linear { bias: true, .. }) = &node.op else { return };", &[1]);
        check(table, "let x = if let (Op::Add(_), true) = (op, f(1)) { 1 } else { 2 };", &[1]);
        check(table, "if let Op::Move(_) = op { return; }\nlet Some(y) = x else { return };", &[]);
        check(table, "let op = Op::Add(Add {});\nif a { 1 } else { 2 }", &[]);
        check(table, "if let OpKind::Add = kind { 1 } else { 2 }", &[]);
    }

    #[test]
    fn other_crates_are_left_alone() {
        let text = "match t { DType::F32 => 1, _ => 2 }";
        super::super::tests::check(catch_all, "crates/data/src/weights/zip.rs", text, &[]);
    }
}
