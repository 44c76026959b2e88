//! A reader for pickles that hold only data: numbers, texts, lists, tuples and dictionaries, protocols 2 to 5.
//!
//! A pickle is a program for a small stack machine. The one here has no operation that could run code; a pickle that asks
//! for one is refused by that operation's name. Values are indices into a heap, so however deep a pickle nests, nothing
//! recurses, and what the pickle shares through its memo is stored once.
//!
//! A snapshot is mostly small dictionaries in long lists. As each is put into a list it is complete, and [`Digest::item`]
//! may replace it by a fact of its own: the pairs are given back at once, and the heap stays small.

use std::io::{BufRead, BufReader, Read};

use super::source::Source;
use crate::error::{At, Error};
use crate::limits::Meter;

pub(super) use heap::{Digest, Heap, Node, Value};
use heap::{NODE_COST, PAIR_COST, VALUE_COST};
use tape::{Memo, Tape};

mod heap;
mod tape;

/// The first byte of every pickle since protocol 2.
pub(super) const PROTO: u8 = 0x80;

/// Runs the pickle to its end and returns its one value.
pub(super) fn load<D: Digest>(
    source: Source<'_>,
    meter: &Meter,
    digest: &mut D,
) -> Result<(Heap<D::Fact>, Value), Error> {
    let input = BufReader::with_capacity(1 << 16, source.input);
    let heap = Heap { nodes: Vec::new(), texts: Vec::new(), meter: meter.clone() };
    let tape = Tape { name: source.name.to_owned(), input, position: 0 };
    let (stack, marks, memo) = (Vec::new(), Vec::new(), Memo::default());
    let mut machine = Machine { tape, heap, stack, marks, memo, start: 0, deepest: [0; 2] };
    machine.begin()?;
    let value = loop {
        machine.start = machine.tape.position;
        let code = machine.tape.byte()?;
        if code == b'.' {
            break machine.pop()?;
        }
        machine.step(code, digest)?;
    };
    machine.tape.end()?;
    Ok((machine.heap, value))
}

struct Machine<R, F> {
    tape: Tape<R>,
    heap: Heap<F>,
    stack: Vec<Value>,
    /// Heights of the stack at the marks.
    marks: Vec<usize>,
    memo: Memo,
    /// Position of the operation at work.
    start: u64,
    /// The tallest that the stack and the marks were, which is what their vectors hold.
    deepest: [usize; 2],
}

impl<R: BufRead, F: Copy> Machine<R, F> {
    fn begin(&mut self) -> Result<(), Error> {
        let wrong =
            |tape: &Tape<R>, what: String| tape.wrong(0, format!("{what}; pickles of protocol 2 to 5 are read"));
        if self.tape.byte()? != PROTO {
            return Err(wrong(&self.tape, "the file does not begin as a pickle".to_owned()));
        }
        let protocol = self.tape.byte()?;
        if !(2..=5).contains(&protocol) {
            return Err(wrong(&self.tape, format!("the pickle has protocol {protocol}")));
        }
        Ok(())
    }

    fn step<D: Digest<Fact = F>>(&mut self, code: u8, digest: &mut D) -> Result<(), Error> {
        match code {
            // Framing says how much to read ahead; a stream needs no such advice.
            0x95 => self.tape.skip(8),
            PROTO => self.tape.skip(1),
            b'N' => self.push(Value::None),
            0x88 | 0x89 => self.push(Value::Bool),
            b'K' => self.int::<1>(),
            b'M' => self.int::<2>(),
            b'J' => {
                let number = i32::from_le_bytes(self.tape.array()?);
                self.push(Value::Int(number.into()))
            }
            0x8a => {
                let length = self.tape.byte()?;
                self.long(length.into())
            }
            0x8b => {
                let length = self.length::<4>()?;
                self.long(length)
            }
            b'G' => {
                let number = f64::from_be_bytes(self.tape.array()?);
                self.push(Value::Float(number))
            }
            0x8c | b'U' => self.length::<1>().and_then(|length| self.text(length)),
            b'X' | b'T' => self.length::<4>().and_then(|length| self.text(length)),
            0x8d => self.length::<8>().and_then(|length| self.text(length)),
            b'C' => self.length::<1>().and_then(|length| self.skip_bytes(length)),
            b'B' => self.length::<4>().and_then(|length| self.skip_bytes(length)),
            0x8e | 0x96 => self.length::<8>().and_then(|length| self.skip_bytes(length)),
            b'}' => self.push_node(Node::Dict(Vec::new())),
            b']' => self.push_node(Node::List(Vec::new())),
            b')' => self.push_node(Node::Tuple),
            0x85..=0x87 => {
                for _ in 0..=code - 0x85 {
                    self.pop()?;
                }
                self.push_node(Node::Tuple)
            }
            b't' => {
                self.take_marked()?;
                self.push_node(Node::Tuple)
            }
            b'(' => {
                self.deepest[1] = self.grow(self.deepest[1], self.marks.len())?;
                self.marks.push(self.stack.len());
                Ok(())
            }
            b'a' => {
                let item = self.pop()?;
                self.append(vec![item], digest)
            }
            b'e' => {
                let items = self.take_marked()?;
                self.append(items, digest)
            }
            b's' => {
                let value = self.pop()?;
                let key = self.pop()?;
                self.set(&[key, value])
            }
            b'u' => {
                let items = self.take_marked()?;
                self.set(&items)
            }
            b'0' => self.pop().map(drop),
            b'1' => self.take_marked().map(drop),
            b'2' => {
                let top = self.top()?;
                self.push(top)
            }
            0x94 => {
                let index = self.memo.len();
                self.put(index)
            }
            b'q' => self.length::<1>().and_then(|index| self.put(index)),
            b'r' => self.length::<4>().and_then(|index| self.put(index)),
            b'p' => self.decimal().and_then(|index| self.put(index)),
            b'h' => self.length::<1>().and_then(|index| self.get(index)),
            b'j' => self.length::<4>().and_then(|index| self.get(index)),
            b'g' => self.decimal().and_then(|index| self.get(index)),
            _ => Err(self.refuse(code)),
        }
    }

    /// Why an operation is not one of the above.
    fn refuse(&self, code: u8) -> Error {
        let runs = match code {
            b'c' => "GLOBAL",
            0x93 => "STACK_GLOBAL",
            b'R' => "REDUCE",
            b'b' => "BUILD",
            b'i' => "INST",
            b'o' => "OBJ",
            0x81 => "NEWOBJ",
            0x92 => "NEWOBJ_EX",
            0x82 => "EXT1",
            0x83 => "EXT2",
            0x84 => "EXT4",
            b'P' => "PERSID",
            b'Q' => "BINPERSID",
            _ => {
                return self.wrong(format!(
                    "operation {code:#04x} does not occur in a snapshot; the file is damaged or no snapshot"
                ));
            }
        };
        self.wrong(format!("this pickle asks to run code ({runs}), which a snapshot never does; it is refused"))
    }

    fn append<D: Digest<Fact = F>>(&mut self, items: Vec<Value>, digest: &mut D) -> Result<(), Error> {
        let at = self.at();
        for item in &items {
            if let Value::Node(node) = *item
                && let Some(fact) = digest.item(&mut self.heap, node, at)?
            {
                self.heap.replace(node, fact);
            }
        }
        let list = self.top()?;
        self.heap.meter.charge(items.len() as u64 * VALUE_COST, at)?;
        match list {
            Value::Node(index) => match &mut self.heap.nodes[index as usize] {
                Node::List(list) => list.extend(items),
                Node::Fact(_) => return Err(self.wrong("a list grows after it was put into another")),
                _ => return Err(self.wrong("what is appended to is no list")),
            },
            _ => return Err(self.wrong("what is appended to is no list")),
        }
        Ok(())
    }

    fn set(&mut self, items: &[Value]) -> Result<(), Error> {
        let dict = self.top()?;
        self.heap.meter.charge(items.len() as u64 / 2 * PAIR_COST, self.at())?;
        let (pairs, []) = items.as_chunks::<2>() else {
            return Err(self.wrong("a key has no value"));
        };
        match dict {
            Value::Node(index) => match &mut self.heap.nodes[index as usize] {
                Node::Dict(dict) => dict.extend(pairs.iter().map(|[key, value]| (*key, *value))),
                Node::Fact(_) => return Err(self.wrong("a dictionary changes after it was put into a list")),
                _ => return Err(self.wrong("what gets a key is no dictionary")),
            },
            _ => return Err(self.wrong("what gets a key is no dictionary")),
        }
        Ok(())
    }

    fn int<const N: usize>(&mut self) -> Result<(), Error> {
        let number = self.length::<N>()?;
        self.push(Value::Int(number as i64))
    }

    /// A little-endian two's complement integer of any length.
    fn long(&mut self, length: u64) -> Result<(), Error> {
        let mut low = [0_u8; 8];
        let mut last = 0;
        let mut same_above = true;
        for index in 0..length {
            last = self.tape.byte()?;
            match low.get_mut(index as usize) {
                Some(byte) => *byte = last,
                // All further bytes must repeat the sign of the eighth.
                None => same_above &= last == if low[7] & 0x80 == 0 { 0 } else { 0xff },
            }
        }
        let negative = last & 0x80 != 0;
        if negative {
            low[(length as usize).min(8)..].fill(0xff);
        }
        let fits = same_above && (low[7] & 0x80 != 0) == negative;
        self.push(if fits { Value::Int(i64::from_le_bytes(low)) } else { Value::Wide(negative) })
    }

    fn text(&mut self, length: u64) -> Result<(), Error> {
        let at = self.at();
        let mut bytes = Vec::new();
        let mut left = length;
        // A piece at a time: the length is only a claim.
        while left > 0 {
            let piece = left.min(1 << 16);
            self.heap.meter.charge(2 * piece, at)?;
            let read = (&mut self.tape.input).take(piece).read_to_end(&mut bytes);
            let read = read.map_err(|e| Error::from_read(&self.tape.name, e))?;
            self.tape.position += read as u64;
            if (read as u64) < piece {
                return Err(self.tape.truncated());
            }
            left -= piece;
        }
        let text = String::from_utf8(bytes).map_err(|_| self.wrong("the text is not UTF-8"))?;
        self.heap.meter.charge(NODE_COST, at)?;
        let index = u32::try_from(self.heap.texts.len()).map_err(|_| self.heap.meter.too_large(at))?;
        self.heap.texts.push(text.into());
        self.push(Value::Text(index))
    }

    fn skip_bytes(&mut self, length: u64) -> Result<(), Error> {
        self.tape.skip(length)?;
        self.push(Value::Bytes)
    }

    fn length<const N: usize>(&mut self) -> Result<u64, Error> {
        let mut wide = [0; 8];
        wide[..N].copy_from_slice(&self.tape.array::<N>()?);
        Ok(u64::from_le_bytes(wide))
    }

    /// The decimal line that the text forms of memo operations carry.
    fn decimal(&mut self) -> Result<u64, Error> {
        let mut number = 0_u64;
        let mut digits = 0;
        loop {
            match self.tape.byte()? {
                b'\n' if digits > 0 => return Ok(number),
                digit @ b'0'..=b'9' if digits < 10 => {
                    number = number * 10 + u64::from(digit - b'0');
                    digits += 1;
                }
                _ => return Err(self.wrong("an index of the memo is not a number")),
            }
        }
    }

    fn put(&mut self, index: u64) -> Result<(), Error> {
        let top = self.top()?;
        self.heap.meter.charge(VALUE_COST, self.at())?;
        self.memo.put(index, top);
        Ok(())
    }

    fn get(&mut self, index: u64) -> Result<(), Error> {
        let value = self.memo.get(index).ok_or_else(|| self.wrong(format!("the memo has no entry {index}")))?;
        self.push(value)
    }

    fn push_node(&mut self, node: Node<F>) -> Result<(), Error> {
        let value = self.heap.push(node, self.at())?;
        self.push(value)
    }

    fn push(&mut self, value: Value) -> Result<(), Error> {
        self.deepest[0] = self.grow(self.deepest[0], self.stack.len())?;
        self.stack.push(value);
        Ok(())
    }

    /// Charges for one more in a vector that has held `deepest` before and holds `length`.
    fn grow(&self, deepest: usize, length: usize) -> Result<usize, Error> {
        if length < deepest {
            return Ok(deepest);
        }
        self.heap.meter.charge(VALUE_COST, self.at())?;
        Ok(length + 1)
    }

    fn pop(&mut self) -> Result<Value, Error> {
        self.above_mark().ok_or_else(|| self.empty())?;
        self.stack.pop().ok_or_else(|| self.empty())
    }

    fn top(&self) -> Result<Value, Error> {
        self.above_mark().ok_or_else(|| self.empty())
    }

    /// The top of the stack, if it is not below a mark.
    fn above_mark(&self) -> Option<Value> {
        let floor = self.marks.last().copied().unwrap_or(0);
        self.stack.get(floor..)?.last().copied()
    }

    fn take_marked(&mut self) -> Result<Vec<Value>, Error> {
        let height = self.marks.pop().ok_or_else(|| self.wrong("there is no mark on the stack"))?;
        Ok(self.stack.split_off(height))
    }

    fn empty(&self) -> Error {
        self.wrong("the operation needs more values than the stack has")
    }

    fn at(&self) -> At {
        At::Byte(self.start)
    }

    fn wrong(&self, reason: impl Into<String>) -> Error {
        self.tape.wrong(self.start, reason)
    }
}
