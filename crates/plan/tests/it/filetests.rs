//! Text tests: every `tests/filetests/**/*.graph` holds a graph, a command and the expected output. `UPDATE=1` writes
//! the output into the files instead of comparing it.
//!
//! A file begins with `;` comments and a line `test COMMAND`; the graph follows, then a line `---`, then the output:
//! - `test print`: the graph, parsed and printed again;
//! - `test verify`: `ok`, or the broken rule;
//! - `test pass NAME [ARGUMENTS]`: the graph after a pass, or the refusal;
//! - `test plan TARGET [FLAGS]`: instructions, kernels, addresses and ledger, or the refusal;
//! - `test bill TARGET BYTES [FLAGS]`: the bill under a budget.
//!
//! Flags of `plan` and `bill`: a precision, `streamed`, `trained`, `unfused`, `gradients`.

use crate::cases::FROM_FILE;
use crate::symbolic::meaning;
use plimsoll_graph::{Bytes, Graph, Space};
use plimsoll_plan::{
    AutodiffPolicy, Fuse, Instr, Offload, Plan, PlanError, Policy, Precision, Program, RecomputePolicy, Region,
    Slice, Target, Weights, Window, compile, moved, passes,
};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

/// Minimum number of test files; fewer indicate that the directory was not found.
const MIN_FILES: usize = 60;

#[test]
fn filetests() {
    let mut files = vec![];
    collect(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/filetests"), &mut files);
    files.sort();
    assert!(files.len() >= MIN_FILES, "{} files", files.len());
    let update = std::env::var_os("UPDATE").is_some_and(|v| v == "1");
    let mut failed = String::new();
    for path in &files {
        let text = fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let (input, wanted) = text.split_once("\n---\n").unwrap_or((text.trim_end(), ""));
        let found = run(input).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        if update {
            let text = format!("{input}\n---\n{found}");
            fs::write(path, text).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        } else if found != wanted {
            let _ = writeln!(failed, "{}\n found:\n{found}\n wanted:\n{wanted}", path.display());
        }
    }
    assert!(failed.is_empty(), "{failed}\nif this is right, run again with UPDATE=1");
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display())) {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            collect(&path, files);
        } else if path.extension().is_some_and(|e| e == "graph") {
            files.push(path);
        }
    }
}

/// Runs the command of a test file and returns its output; `Err` if the file itself is malformed.
fn run(input: &str) -> Result<String, String> {
    let (mut command, mut graph) = (None, String::new());
    for line in input.lines() {
        match line.strip_prefix("test ") {
            Some(text) => command = Some(text),
            // Keeps line numbers, which errors of the parser contain.
            None => graph += line,
        }
        graph.push('\n');
    }
    let words: Vec<&str> = command.ok_or("there is no line `test COMMAND`")?.split(' ').collect();
    let parsed: Graph = graph.parse().map_err(|e| format!("{e}"))?;
    let with_newline = |text: String| if text.ends_with('\n') { text } else { text + "\n" };
    Ok(with_newline(match words[..] {
        ["print"] => {
            let again: Graph = parsed.to_string().parse().map_err(|e| format!("printed again: {e}"))?;
            assert_eq!(again, parsed);
            parsed.to_string()
        }
        ["verify"] => parsed.verify().map_or_else(|e| e.to_string(), |()| "ok".to_owned()),
        ["pass", name, ref arguments @ ..] => {
            verified("input", &parsed);
            match pass(&parsed, name, arguments)? {
                Ok(after) => {
                    verified(name, &after);
                    after.to_string()
                }
                Err(error) => format!("error: {error}"),
            }
        }
        ["plan", target, ref flags @ ..] => match planned(&parsed, target, flags)? {
            Ok(program) => listing(&program),
            Err(error) => format!("error: {error}"),
        },
        ["bill", target, budget, ref flags @ ..] => {
            let budget = Bytes(budget.parse().map_err(|_| format!("`{budget}` is not a number of bytes"))?);
            match planned(&parsed, target, flags)?.and_then(|program| program.within(budget)) {
                Ok(program) => format!("fits with {}", program.peak()),
                Err(error) => format!("error: {error}"),
            }
        }
        _ => return Err(format!("unknown command `{}`", words.join(" "))),
    }))
}

fn verified(what: &str, graph: &Graph) {
    graph.verify().unwrap_or_else(|e| panic!("{what}: {e}\n{graph}"));
}

fn pass(graph: &Graph, name: &str, arguments: &[&str]) -> Result<Result<Graph, PlanError>, String> {
    let kept = |after: Graph| {
        assert_eq!(meaning(graph), meaning(&after), "{name} changes the meaning");
        Ok(Ok(after))
    };
    match (name, arguments) {
        ("autodiff", outputs) => {
            let role = |name: &&str| {
                let Ok(role) = name.parse();
                role
            };
            let outputs = outputs.iter().map(role).collect();
            Ok(passes::autodiff(graph, &AutodiffPolicy { outputs }))
        }
        ("remat", ["full"]) => Ok(passes::remat(graph, &RecomputePolicy::Full)),
        ("remat", ["every", n]) => {
            let n = n.parse().map_err(|_| format!("`{n}` is not a number"))?;
            Ok(passes::remat(graph, &RecomputePolicy::EveryN(n)))
        }
        ("remat", ["ops", ops @ ..]) => {
            let ops = ops.iter().map(|op| (*op).to_owned()).collect();
            Ok(passes::remat(graph, &RecomputePolicy::Selective(ops)))
        }
        ("precision", [precision]) => Ok(passes::inference(graph, precision_of(precision)?)),
        ("fuse", []) => kept(passes::fuse(graph.clone(), Weights::Resident)),
        ("fuse", ["trained"]) => kept(passes::fuse(graph.clone(), Weights::Trained)),
        ("fuse_gates", []) => match target_of("h200")?.kernels.fusions().fuse_gates {
            Some(gates) => kept(passes::fuse_gates(graph, gates)),
            None => Err("the h200 fuses no gates".to_owned()),
        },
        ("fuse_norms", [widest]) => {
            kept(passes::fuse_norms(graph, widest.parse().map_err(|_| format!("`{widest}` is not a number"))?))
        }
        ("dce", []) => kept(passes::dce(graph)),
        ("offload", [space, arena]) => {
            let to = if *space == "file" { Space::File } else { Space::Host };
            kept(passes::offload(graph, &Offload::parameters(to), *arena == "arena"))
        }
        ("split_updates", [bytes, alignment]) => {
            let number = |text: &str| text.parse().map_err(|_| format!("`{text}` is not a number"));
            let offload = Offload { optimizer: true, masters: true, to: Space::Host, ..Offload::default() };
            let limit = Some(Bytes(number(bytes)?));
            Ok(Ok(passes::split_updates(graph, &offload, limit, number(alignment)?)))
        }
        ("updates", []) => kept(passes::store_updates(graph.clone())),
        ("operands", [precision]) => Ok(passes::operands(graph, precision_of(precision)?)),
        ("layout", [target]) => Ok(passes::layout(graph, &target_of(target)?)),
        _ => Err(format!("unknown pass `{name} {}`", arguments.join(" "))),
    }
}

fn precision_of(name: &str) -> Result<Precision, String> {
    Precision::named(name).ok_or_else(|| format!("`{name}` is no precision"))
}

fn target_of(name: &str) -> Result<Target, String> {
    Target::named(name).map_err(|e| e.to_string())
}

fn planned(graph: &Graph, target: &str, flags: &[&str]) -> Result<Result<Program, PlanError>, String> {
    let mut policy = Policy::default();
    for flag in flags {
        match *flag {
            "from_file" => policy.weights = FROM_FILE,
            "from_host" => policy.weights = Weights::Streamed { from: Space::Host, prefetch: true },
            "at_once" => policy.window = Window::CLOSED,
            "trained" => policy.weights = Weights::Trained,
            "unfused" => policy.fuse = Fuse::Nothing,
            "gradients" => policy.autodiff = Some(AutodiffPolicy { outputs: vec!["y".into()] }),
            precision => policy.precision = precision_of(precision)?,
        }
    }
    let target = target_of(target)?;
    let program = |plan| Program::new(target.clone(), vec![("step".to_owned(), plan)], vec![]);
    Ok(compile(graph, &policy, &target).map(program))
}

/// Formats a plan: instructions with kernels and addresses, resident parameters and states, and the ledger.
fn listing(program: &Program) -> String {
    let plan = &program.plans()[0].1;
    let mut text = String::new();
    let put = |text: &mut String, line: String| {
        text.push_str(line.trim_end());
        text.push('\n');
    };
    for (v, value) in plan.graph.sources() {
        if let Some(slice) = plan.memory.persistent_slice(v) {
            put(&mut text, format!("{v}: {} at {}", value.spec, range(&slice)));
        }
    }
    for (_, v) in &plan.graph.inputs {
        put(&mut text, format!("input {}", placed(plan, *v)));
    }
    for (i, instr) in plan.schedule.instrs.iter().enumerate() {
        let line = match *instr {
            Instr::Start(id) => {
                let (from, to) = moved(&plan.graph, id).expect("a move");
                format!("start {} = {from}", placed(plan, to))
            }
            Instr::Wait(id) => format!("wait {}", moved(&plan.graph, id).expect("a move").1),
            Instr::Launch(id) => {
                let node = plan.graph.node(id);
                let outs: Vec<String> = node.outputs.iter().flatten().map(|&v| placed(plan, v)).collect();
                let ins: Vec<String> = node.inputs.iter().map(ToString::to_string).collect();
                format!("{} = {} {}", outs.join(", "), plan.kernels[id.index()].name(), ins.join(", "))
            }
        };
        let workspace = plan.memory.workspaces[i].map(|s| format!("  workspace {}", range(&s)));
        put(&mut text, line + &workspace.unwrap_or_default());
    }
    text + &program.ledger().to_string()
}

fn placed(plan: &Plan, v: plimsoll_graph::ValueId) -> String {
    let slice = plan.memory.slice(v).map_or_else(|| "nowhere".to_owned(), |s| range(&s));
    format!("{v}: {} at {slice}", plan.graph.spec(v))
}

/// Formats a slice; `p` denotes the persistent region, `t` the transient one, after the space if it is not the arena.
fn range(slice: &Slice) -> String {
    let space = match slice.space {
        Space::Device => "",
        Space::Host => "host ",
        Space::File => "file ",
    };
    let region = match slice.region {
        Region::Persistent => 'p',
        Region::Transient => 't',
    };
    format!("{space}{region}{}..{}", slice.offset, slice.end())
}
