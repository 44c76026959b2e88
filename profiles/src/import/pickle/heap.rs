//! What a pickle builds: values, and the containers they point to, in one vector. Nothing here recurses, whatever points where.

use crate::error::{At, Error};
use crate::limits::Meter;

/// A value, as the stack and containers hold it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::import) enum Value {
    None,
    Bool,
    Int(i64),
    /// An integer beyond 64 signed bits; the flag says below.
    Wide(bool),
    Float(f64),
    Text(u32),
    /// Bytes, whose content nobody needs.
    Bytes,
    Node(u32),
}

/// A container, or what a [`Digest`] made of it.
#[derive(Debug)]
pub(in crate::import) enum Node<F> {
    List(Vec<Value>),
    Tuple,
    Dict(Vec<(Value, Value)>),
    Fact(F),
}

/// Turns complete containers into facts.
pub(in crate::import) trait Digest {
    /// What is kept of a container.
    type Fact: Copy;

    /// The container at `node` is put into a list: what to keep in its place, if it is one of interest.
    fn item(&mut self, heap: &mut Heap<Self::Fact>, node: u32, at: At) -> Result<Option<Self::Fact>, Error>;
}

/// Everything a pickle has built so far.
pub(in crate::import) struct Heap<F> {
    pub(super) nodes: Vec<Node<F>>,
    pub(super) texts: Vec<Box<str>>,
    pub(super) meter: Meter,
}

/// A node in a vector that doubles.
pub(super) const NODE_COST: u64 = 2 * size_of::<Node<u64>>() as u64;
/// A value in one.
pub(super) const VALUE_COST: u64 = 2 * size_of::<Value>() as u64;
/// A key and its value.
pub(super) const PAIR_COST: u64 = 2 * VALUE_COST;

impl<F: Copy> Heap<F> {
    /// The text, if the value is one.
    pub fn text(&self, value: Value) -> Option<&str> {
        match value {
            Value::Text(index) => Some(&self.texts[index as usize]),
            _ => None,
        }
    }

    /// The container, if the value is one.
    pub fn node(&self, value: Value) -> Option<&Node<F>> {
        match value {
            Value::Node(index) => Some(&self.nodes[index as usize]),
            _ => None,
        }
    }

    /// The pairs, if the value is a dictionary.
    pub fn dict(&self, value: Value) -> Option<&[(Value, Value)]> {
        match self.node(value) {
            Some(Node::Dict(pairs)) => Some(pairs),
            _ => None,
        }
    }

    /// The items, if the value is a list.
    pub fn list(&self, value: Value) -> Option<&[Value]> {
        match self.node(value) {
            Some(Node::List(items)) => Some(items),
            _ => None,
        }
    }

    /// The fact, if the value was digested.
    pub fn fact(&self, value: Value) -> Option<F> {
        match self.node(value) {
            Some(Node::Fact(fact)) => Some(*fact),
            _ => None,
        }
    }

    /// The value of a key that is a text.
    pub fn get(&self, value: Value, key: &str) -> Option<Value> {
        // The last one counts, as it would in a dictionary.
        self.dict(value)?.iter().rev().find(|(k, _)| self.text(*k) == Some(key)).map(|(_, value)| *value)
    }

    /// Puts a fact in the place of a container, whose memory is given back.
    pub fn replace(&mut self, node: u32, fact: F) {
        let freed = match std::mem::replace(&mut self.nodes[node as usize], Node::Fact(fact)) {
            Node::List(items) => items.len() as u64 * VALUE_COST,
            Node::Dict(pairs) => pairs.len() as u64 * PAIR_COST,
            Node::Tuple | Node::Fact(_) => 0,
        };
        self.meter.release(freed);
    }

    pub(super) fn push(&mut self, node: Node<F>, at: At) -> Result<Value, Error> {
        self.meter.charge(NODE_COST, at)?;
        let index = u32::try_from(self.nodes.len()).map_err(|_| self.meter.too_large(at))?;
        self.nodes.push(node);
        Ok(Value::Node(index))
    }
}
