//! Pickle interpreter that executes no code. Invariant: an opcode or global outside the allow-lists is an error that
//! names it, and memory is linear in the length of the pickle: an opcode creates at most three nodes and copies only
//! bytes of the pickle. Source of the opcodes: CPython's Lib/pickletools.py.

use std::collections::BTreeMap;

use super::globals::{self, Global};
use super::pickle::{NodeId, PickleError, PickleNode};

/// Interprets `bytes` up to STOP and returns all nodes and the id of the root.
pub(super) fn run(bytes: &[u8]) -> Result<(Vec<PickleNode>, NodeId), PickleError> {
    // Node ids have 32 bits, and the number of nodes is at most the number of bytes.
    if u32::try_from(bytes.len()).is_err() {
        return Err(PickleError::Malformed("more than 4 GiB", 0));
    }
    let mut machine = PickleMachine {
        bytes,
        at: 0,
        nodes: Vec::new(),
        stack: Vec::new(),
        marks: Vec::new(),
        memo: BTreeMap::new(),
    };
    while !machine.step()? {}
    let root = machine.pop()?;
    Ok((machine.nodes, root))
}

struct PickleMachine<'a> {
    bytes: &'a [u8],
    at: usize,
    nodes: Vec<PickleNode>,
    stack: Vec<NodeId>,
    /// Height of the stack at each open MARK, the innermost last.
    marks: Vec<usize>,
    memo: BTreeMap<u32, NodeId>,
}

impl<'a> PickleMachine<'a> {
    /// Executes one opcode; true at STOP.
    fn step(&mut self) -> Result<bool, PickleError> {
        let start = self.at;
        let [opcode] = self.take_array()?;
        match opcode {
            b'.' => return Ok(true),
            0x80 => self.protocol()?,
            // FRAME is a hint for buffered reading; its length is ignored.
            0x95 => drop(self.take_array::<8>()?),
            b'N' | 0x88 | 0x89 | b'J' | b'K' | b'M' | 0x8a | 0x8b | b'G' => self.scalar(opcode)?,
            b'X' | 0x8c | 0x8d | b'U' | b'T' | b'C' | b'B' | 0x8e | 0x96 => self.text(opcode)?,
            b']' | b'}' | b')' | 0x8f | b'(' | b'l' | b't' | b'd' | 0x85..=0x87 | 0x91 => self.make(opcode)?,
            b'a' | b'e' | b's' | b'u' | 0x90 => self.fill(opcode)?,
            b'0' | b'1' | b'2' => self.shuffle(opcode)?,
            b'q' | b'r' | b'h' | b'j' | 0x94 => self.memoise(opcode)?,
            b'c' => self.global()?,
            0x93 => self.stack_global()?,
            // INST names a class: an error names the class if it is not allowed, and otherwise the opcode.
            b'i' => {
                self.global()?;
                return Err(PickleError::Opcode(opcode, start as u64));
            }
            b'Q' => self.persistent_id()?,
            b'R' => self.reduce()?,
            0x81 => self.new_object()?,
            b'b' => self.build()?,
            _ => return Err(PickleError::Opcode(opcode, start as u64)),
        }
        Ok(false)
    }

    fn protocol(&mut self) -> Result<(), PickleError> {
        match self.take_array()? {
            [2..=5] => Ok(()),
            _ => Err(self.wrong("a protocol other than 2 to 5")),
        }
    }

    fn scalar(&mut self, opcode: u8) -> Result<(), PickleError> {
        let node = match opcode {
            b'N' => PickleNode::None,
            0x88 => PickleNode::Bool(true),
            0x89 => PickleNode::Bool(false),
            b'J' => PickleNode::Int(i64::from(i32::from_le_bytes(self.take_array()?))),
            b'K' => PickleNode::Int(i64::from(u8::from_le_bytes(self.take_array()?))),
            b'M' => PickleNode::Int(i64::from(u16::from_le_bytes(self.take_array()?))),
            b'G' => PickleNode::Float(f64::from_be_bytes(self.take_array()?)),
            _ => {
                let len = if opcode == 0x8a { self.length::<1>()? } else { self.length::<4>()? };
                long(self.take(len)?)
            }
        };
        self.push(node);
        Ok(())
    }

    fn text(&mut self, opcode: u8) -> Result<(), PickleError> {
        let len = match opcode {
            0x8c | b'U' | b'C' => self.length::<1>()?,
            b'X' | b'T' | b'B' => self.length::<4>()?,
            _ => self.length::<8>()?,
        };
        let bytes = self.take(len)?;
        let node = match (opcode, std::str::from_utf8(bytes)) {
            (b'X' | 0x8c | 0x8d | b'U' | b'T', Ok(text)) => PickleNode::Str(text.into()),
            (b'X' | 0x8c | 0x8d, Err(_)) => return Err(self.wrong("a string that is not UTF-8")),
            // Bytes, and strings of Python 2 that are not UTF-8.
            _ => PickleNode::Bytes(bytes.into()),
        };
        self.push(node);
        Ok(())
    }

    fn make(&mut self, opcode: u8) -> Result<(), PickleError> {
        let node = match opcode {
            b'(' => {
                self.marks.push(self.stack.len());
                return Ok(());
            }
            b']' => PickleNode::List(Vec::new()),
            b'}' => PickleNode::Dict(Vec::new()),
            b')' => PickleNode::Tuple(Vec::new()),
            0x8f => PickleNode::Set(Vec::new()),
            b'l' => PickleNode::List(self.pop_mark()?),
            b't' => PickleNode::Tuple(self.pop_mark()?),
            0x91 => PickleNode::Set(self.pop_mark()?),
            b'd' => PickleNode::Dict(self.pop_pairs()?),
            _ => PickleNode::Tuple(self.pop_many(usize::from(opcode - 0x84))?),
        };
        self.push(node);
        Ok(())
    }

    /// APPEND(S), SETITEM(S) and ADDITEMS: adds items to the container, which is below them on the stack.
    fn fill(&mut self, opcode: u8) -> Result<(), PickleError> {
        let (items, pairs) = match opcode {
            b'a' => (self.pop_many(1)?, Vec::new()),
            b's' => (Vec::new(), pair_up(self.pop_many(2)?)),
            b'u' => (Vec::new(), self.pop_pairs()?),
            _ => (self.pop_mark()?, Vec::new()),
        };
        let target = self.top()?;
        match (&mut self.nodes[target.0 as usize], opcode) {
            (PickleNode::List(list), b'a' | b'e') => list.extend(items),
            (PickleNode::Set(set), 0x90) => set.extend(items),
            (PickleNode::Dict(dict), b's' | b'u') => dict.extend(pairs),
            _ => return Err(self.wrong("items for an object that is not a container of their kind")),
        }
        Ok(())
    }

    fn shuffle(&mut self, opcode: u8) -> Result<(), PickleError> {
        match opcode {
            b'0' => drop(self.pop()?),
            b'1' => drop(self.pop_mark()?),
            _ => {
                let top = self.top()?;
                self.stack.push(top);
            }
        }
        Ok(())
    }

    fn memoise(&mut self, opcode: u8) -> Result<(), PickleError> {
        let key = match opcode {
            b'q' | b'h' => u32::from(u8::from_le_bytes(self.take_array()?)),
            b'r' | b'j' => u32::from_le_bytes(self.take_array()?),
            _ => self.memo.len() as u32,
        };
        if matches!(opcode, b'h' | b'j') {
            let id = *self.memo.get(&key).ok_or_else(|| self.wrong("a memo entry that was never set"))?;
            self.stack.push(id);
        } else {
            let top = self.top()?;
            self.memo.insert(key, top);
        }
        Ok(())
    }

    /// GLOBAL: module and name are two lines of text.
    fn global(&mut self) -> Result<(), PickleError> {
        let module = self.line()?;
        let name = self.line()?;
        let module = self.add(PickleNode::Str(module));
        let name = self.add(PickleNode::Str(name));
        self.push_global(module, name)
    }

    /// STACK_GLOBAL: module and name are two strings on the stack.
    fn stack_global(&mut self) -> Result<(), PickleError> {
        let name = self.pop()?;
        let module = self.pop()?;
        self.push_global(module, name)
    }

    fn push_global(&mut self, module: NodeId, name: NodeId) -> Result<(), PickleError> {
        let (PickleNode::Str(module_text), PickleNode::Str(name_text)) = (self.node(module), self.node(name))
        else {
            return Err(self.wrong("a global whose name is not a string"));
        };
        let global = globals::lookup(module_text, name_text)
            .ok_or_else(|| PickleError::Global(format!("{module_text}.{name_text}")))?;
        self.push(PickleNode::Global { global, module, name });
        Ok(())
    }

    /// BINPERSID: ("storage", storage class, key, location, elements). Source:
    /// torch/serialization.py, `persistent_id` in `_save`.
    fn persistent_id(&mut self) -> Result<(), PickleError> {
        let id = self.pop()?;
        let storage = match self.node(id) {
            PickleNode::Tuple(parts) => match parts[..] {
                [kind, class, key, _, elements] => self.storage(kind, class, key, elements),
                _ => None,
            },
            _ => None,
        };
        let storage = storage.ok_or_else(|| self.wrong("a persistent id that is not a storage"))?;
        self.push(storage);
        Ok(())
    }

    fn storage(&self, kind: NodeId, class: NodeId, key: NodeId, elements: NodeId) -> Option<PickleNode> {
        match (self.node(kind), self.node(class), self.node(key), self.node(elements)) {
            (
                PickleNode::Str(kind),
                PickleNode::Global { global: Global::Storage(dtype), .. },
                PickleNode::Str(_),
                PickleNode::Int(elements),
            ) if **kind == *"storage" => {
                Some(PickleNode::Storage { key, dtype: *dtype, elements: u64::try_from(*elements).ok()? })
            }
            _ => None,
        }
    }

    /// REDUCE: replaces the call of an allowed global by an equivalent node. Nothing is called.
    fn reduce(&mut self) -> Result<(), PickleError> {
        let args_id = self.pop()?;
        let callee = self.pop()?;
        let PickleNode::Global { global, module, name } = *self.node(callee) else {
            return Err(self.wrong("a call of an object that is not a global"));
        };
        let PickleNode::Tuple(args) = self.node(args_id) else {
            return Err(self.wrong("a call whose arguments are not a tuple"));
        };
        let node = match (global, &args[..]) {
            (Global::OrderedDict, []) => PickleNode::Dict(Vec::new()),
            (Global::RebuildTensor, &[storage, offset, shape, stride, ..]) => {
                self.tensor(storage, offset, shape, stride)?
            }
            // A parameter is represented by its tensor, and torch.Size by its argument, a tuple.
            (Global::RebuildParameter, &[inner, ..]) | (Global::Size, &[inner]) => {
                self.stack.push(inner);
                return Ok(());
            }
            (Global::Reconstructor, &[class, _, _]) => self.instance(class)?,
            (Global::Data, _) => PickleNode::Object { class: callee, state: Some(args_id) },
            _ => return Err(self.refused_call(module, name)),
        };
        self.push(node);
        Ok(())
    }

    fn tensor(
        &self,
        storage: NodeId,
        offset: NodeId,
        shape: NodeId,
        stride: NodeId,
    ) -> Result<PickleNode, PickleError> {
        match (self.node(storage), self.node(offset), self.node(shape), self.node(stride)) {
            (
                PickleNode::Storage { .. },
                &PickleNode::Int(offset @ 0..),
                PickleNode::Tuple(_),
                PickleNode::Tuple(_),
            ) => Ok(PickleNode::Tensor { storage, offset: offset as u64, shape, stride }),
            _ => Err(self.wrong("a tensor whose storage, offset, shape or stride is none")),
        }
    }

    /// Executes the opcode NEWOBJ: pops the arguments, which are ignored, and the class, and pushes an instance of
    /// the class without state.
    fn new_object(&mut self) -> Result<(), PickleError> {
        self.pop()?;
        let class = self.pop()?;
        let node = self.instance(class)?;
        self.push(node);
        Ok(())
    }

    fn instance(&self, class: NodeId) -> Result<PickleNode, PickleError> {
        match *self.node(class) {
            PickleNode::Global { global: Global::Class, .. } => Ok(PickleNode::Object { class, state: None }),
            PickleNode::Global { global: Global::OrderedDict, .. } => Ok(PickleNode::Dict(Vec::new())),
            PickleNode::Global { module, name, .. } => Err(self.refused_call(module, name)),
            _ => Err(self.wrong("an instance of an object that is not a class")),
        }
    }

    /// BUILD: sets the state of an instance. The attributes of a dict (`_metadata` of a state dict) are ignored,
    /// because they contain no weights.
    fn build(&mut self) -> Result<(), PickleError> {
        let state = self.pop()?;
        let target = self.top()?;
        match &mut self.nodes[target.0 as usize] {
            PickleNode::Object { state: slot, .. } => *slot = Some(state),
            PickleNode::Dict(_) => {}
            _ => return Err(self.wrong("state for an object that is not an instance")),
        }
        Ok(())
    }

    fn refused_call(&self, module: NodeId, name: NodeId) -> PickleError {
        match (self.node(module), self.node(name)) {
            (PickleNode::Str(module), PickleNode::Str(name)) => {
                PickleError::Global(format!("{module}.{name}(...)"))
            }
            _ => self.wrong("a global whose name is not a string"),
        }
    }

    fn node(&self, id: NodeId) -> &PickleNode {
        &self.nodes[id.0 as usize]
    }

    fn add(&mut self, node: PickleNode) -> NodeId {
        // The cast is lossless: an opcode of n bytes adds at most n nodes, and the pickle has less than 4 GiB.
        let id = NodeId(self.nodes.len() as u32);
        self.nodes.push(node);
        id
    }

    fn push(&mut self, node: PickleNode) {
        let id = self.add(node);
        self.stack.push(id);
    }

    /// Returns the lowest stack index above the innermost open MARK; values below it must not be popped.
    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    fn top(&self) -> Result<NodeId, PickleError> {
        if self.stack.len() > self.floor() {
            Ok(self.stack[self.stack.len() - 1])
        } else {
            Err(self.wrong("a stack that is empty"))
        }
    }

    fn pop(&mut self) -> Result<NodeId, PickleError> {
        let top = self.top()?;
        self.stack.pop();
        Ok(top)
    }

    fn pop_many(&mut self, count: usize) -> Result<Vec<NodeId>, PickleError> {
        if self.stack.len() - self.floor() >= count {
            Ok(self.stack.split_off(self.stack.len() - count))
        } else {
            Err(self.wrong("a stack with too few values"))
        }
    }

    /// Removes the innermost MARK and returns all values above it.
    fn pop_mark(&mut self) -> Result<Vec<NodeId>, PickleError> {
        let mark = self.marks.pop().ok_or_else(|| self.wrong("a mark that was never set"))?;
        Ok(self.stack.split_off(mark))
    }

    fn pop_pairs(&mut self) -> Result<Vec<(NodeId, NodeId)>, PickleError> {
        let items = self.pop_mark()?;
        match items.len() % 2 {
            0 => Ok(pair_up(items)),
            _ => Err(self.wrong("a key without a value")),
        }
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8], PickleError> {
        let end = self.at.checked_add(len).filter(|&end| end <= self.bytes.len());
        let end = end.ok_or_else(|| self.wrong("an end in the middle of an opcode"))?;
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn take_array<const N: usize>(&mut self) -> Result<[u8; N], PickleError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    /// Reads a little-endian length of N bytes; `take` later checks it against the remaining bytes.
    fn length<const N: usize>(&mut self) -> Result<usize, PickleError> {
        let mut wide = [0; 8];
        wide[..N].copy_from_slice(self.take(N)?);
        usize::try_from(u64::from_le_bytes(wide)).map_err(|_| self.wrong("a length that is too large"))
    }

    /// Reads text up to a newline, which is removed, and so is a carriage return before it.
    fn line(&mut self) -> Result<Box<str>, PickleError> {
        let rest = &self.bytes[self.at..];
        let len = rest.iter().position(|&b| b == b'\n').ok_or_else(|| self.wrong("a line without an end"))?;
        let text = std::str::from_utf8(&rest[..len]).map_err(|_| self.wrong("a name that is not UTF-8"))?;
        let text = text.strip_suffix('\r').unwrap_or(text).into();
        self.at += len + 1;
        Ok(text)
    }

    fn wrong(&self, what: &'static str) -> PickleError {
        PickleError::Malformed(what, self.at as u64)
    }
}

fn pair_up(items: Vec<NodeId>) -> Vec<(NodeId, NodeId)> {
    items.as_chunks::<2>().0.iter().map(|&[key, value]| (key, value)).collect()
}

/// Decodes the integer of LONG1 and LONG4: little-endian two's complement of any length.
fn long(bytes: &[u8]) -> PickleNode {
    if bytes.len() > 8 {
        return PickleNode::BigInt;
    }
    let fill = if bytes.last().is_some_and(|b| b & 0x80 != 0) { 0xff } else { 0 };
    let mut wide = [fill; 8];
    wide[..bytes.len()].copy_from_slice(bytes);
    PickleNode::Int(i64::from_le_bytes(wide))
}
