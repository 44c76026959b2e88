//! Writes pickles as CPython does, for snapshots that no run of torch gave us.

use std::collections::HashMap;
use std::rc::Rc;

/// A Python value. Containers are shared through the pickle's memo where the same `Rc` appears again.
#[derive(Clone, Debug)]
pub enum Py {
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(String),
    Tuple(Vec<Py>),
    List(Rc<Vec<Py>>),
    Dict(Rc<Vec<(Py, Py)>>),
}

impl From<&str> for Py {
    fn from(text: &str) -> Self {
        Self::Str(text.to_owned())
    }
}

impl From<i128> for Py {
    fn from(number: i128) -> Self {
        Self::Int(number)
    }
}

pub fn list(items: Vec<Py>) -> Py {
    Py::List(Rc::new(items))
}

pub fn dict<const N: usize>(pairs: [(&str, Py); N]) -> Py {
    Py::Dict(Rc::new(pairs.into_iter().map(|(key, value)| (key.into(), value)).collect()))
}

/// `pickle.dumps(value, protocol)`.
pub fn dumps(value: &Py, protocol: u8) -> Vec<u8> {
    let mut pickler =
        Pickler { out: vec![0x80, protocol], protocol, texts: HashMap::new(), shared: HashMap::new(), memo: 0 };
    if protocol >= 4 {
        pickler.out.push(0x95);
        pickler.out.extend([0; 8]);
    }
    pickler.save(value);
    pickler.out.push(b'.');
    if protocol >= 4 {
        let length = pickler.out.len() as u64 - 11;
        pickler.out[3..11].copy_from_slice(&length.to_le_bytes());
    }
    pickler.out
}

struct Pickler {
    out: Vec<u8>,
    protocol: u8,
    texts: HashMap<String, u32>,
    shared: HashMap<usize, u32>,
    memo: u32,
}

impl Pickler {
    fn save(&mut self, value: &Py) {
        match value {
            Py::None => self.out.push(b'N'),
            Py::Bool(flag) => self.out.push(if *flag { 0x88 } else { 0x89 }),
            Py::Int(number) => self.int(*number),
            Py::Float(number) => {
                self.out.push(b'G');
                self.out.extend(number.to_be_bytes());
            }
            Py::Str(text) => match self.texts.get(text) {
                Some(index) => self.get(*index),
                None => {
                    if self.protocol >= 4 && text.len() < 256 {
                        self.out.extend([0x8c, text.len() as u8]);
                    } else {
                        self.out.push(b'X');
                        self.out.extend((text.len() as u32).to_le_bytes());
                    }
                    self.out.extend(text.as_bytes());
                    let index = self.put();
                    self.texts.insert(text.clone(), index);
                }
            },
            Py::Tuple(items) => {
                if items.len() > 3 {
                    self.out.push(b'(');
                }
                items.iter().for_each(|item| self.save(item));
                self.out.push(match items.len() {
                    0 => b')',
                    1..=3 => 0x84 + items.len() as u8,
                    _ => b't',
                });
            }
            Py::List(items) => {
                if self.container(Rc::as_ptr(items) as usize, b']') {
                    return;
                }
                for batch in items.chunks(1000) {
                    if let [item] = batch {
                        self.save(item);
                        self.out.push(b'a');
                    } else {
                        self.out.push(b'(');
                        batch.iter().for_each(|item| self.save(item));
                        self.out.push(b'e');
                    }
                }
            }
            Py::Dict(pairs) => {
                if self.container(Rc::as_ptr(pairs) as usize, b'}') {
                    return;
                }
                for batch in pairs.chunks(1000) {
                    let single = batch.len() == 1;
                    if !single {
                        self.out.push(b'(');
                    }
                    for (key, value) in batch {
                        self.save(key);
                        self.save(value);
                    }
                    self.out.push(if single { b's' } else { b'u' });
                }
            }
        }
    }

    /// Begins a container; true if the memo had it already.
    fn container(&mut self, address: usize, code: u8) -> bool {
        if let Some(index) = self.shared.get(&address) {
            self.get(*index);
            return true;
        }
        self.out.push(code);
        let index = self.put();
        self.shared.insert(address, index);
        false
    }

    fn int(&mut self, number: i128) {
        if let Ok(byte) = u8::try_from(number) {
            self.out.extend([b'K', byte]);
        } else if let Ok(short) = u16::try_from(number) {
            self.out.push(b'M');
            self.out.extend(short.to_le_bytes());
        } else if let Ok(word) = i32::try_from(number) {
            self.out.push(b'J');
            self.out.extend(word.to_le_bytes());
        } else {
            let bytes = number.to_le_bytes();
            let sign = if number < 0 { 0xff } else { 0 };
            let mut length = 16;
            while length > 1 && bytes[length - 1] == sign && (bytes[length - 2] ^ sign) & 0x80 == 0 {
                length -= 1;
            }
            self.out.extend([0x8a, length as u8]);
            self.out.extend(&bytes[..length]);
        }
    }

    fn put(&mut self) -> u32 {
        let index = self.memo;
        self.memo += 1;
        match (self.protocol, u8::try_from(index)) {
            (4.., _) => self.out.push(0x94),
            (_, Ok(byte)) => self.out.extend([b'q', byte]),
            _ => {
                self.out.push(b'r');
                self.out.extend(index.to_le_bytes());
            }
        }
        index
    }

    fn get(&mut self, index: u32) {
        match u8::try_from(index) {
            Ok(byte) => self.out.extend([b'h', byte]),
            _ => {
                self.out.push(b'j');
                self.out.extend(index.to_le_bytes());
            }
        }
    }
}
