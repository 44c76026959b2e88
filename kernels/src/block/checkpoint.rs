//! The safetensors files of a checkpoint: which tensor lies where, and its bytes when asked for. Headers are read when it is
//! opened, and a tensor when it is needed, so a checkpoint may be larger than memory. The only file that names safetensors.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use safetensors::tensor::Metadata;

use super::error::BlockError;
use crate::view::Dtype;

/// The longest header that is read, as in the format's own reader.
const MOST_HEADER: u64 = 100_000_000;

/// An opened checkpoint: a safetensors file, or a folder of them.
#[derive(Debug)]
pub struct Checkpoint {
    name: String,
    files: Vec<PathBuf>,
    tensors: HashMap<String, Place>,
}

/// Where a tensor lies.
#[derive(Debug)]
struct Place {
    file: usize,
    /// Bytes from the file's beginning.
    start: u64,
    bytes: u64,
    dtype: Option<Dtype>,
    dtype_name: String,
    shape: Vec<usize>,
}

/// A tensor that was read.
pub(super) struct Weight {
    pub name: String,
    pub dtype: Dtype,
    pub bytes: Vec<u8>,
}

impl Checkpoint {
    /// Reads the headers of a safetensors file, or of every one in a folder.
    ///
    /// # Errors
    /// [`BlockError::File`]: no such file, none in the folder, or one that is no safetensors file.
    pub fn open(path: &Path) -> Result<Self, BlockError> {
        let name = path.display().to_string();
        let failed = |error: std::io::Error| BlockError::File { file: name.clone(), reason: error.to_string() };
        let mut files = vec![path.to_path_buf()];
        if path.is_dir() {
            files.clear();
            for entry in std::fs::read_dir(path).map_err(failed)? {
                let path = entry.map_err(failed)?.path();
                if path.extension().is_some_and(|ending| ending == "safetensors") {
                    files.push(path);
                }
            }
            files.sort();
        }
        if files.is_empty() {
            let reason = "there is no .safetensors file in this folder".to_owned();
            return Err(BlockError::File { file: name, reason });
        }
        let mut checkpoint = Self { name, files: Vec::new(), tensors: HashMap::new() };
        for file in files {
            checkpoint.add(file)?;
        }
        Ok(checkpoint)
    }

    fn add(&mut self, path: PathBuf) -> Result<(), BlockError> {
        let wrong = |reason: String| BlockError::File { file: path.display().to_string(), reason };
        let (header, length) = header(&path).map_err(|error| wrong(error.to_string()))?;
        let metadata: Metadata =
            serde_json::from_slice(&header).map_err(|error| wrong(format!("it is no safetensors file: {error}")))?;
        let data = 8 + header.len() as u64;
        for (name, info) in metadata.tensors() {
            let (start, end) = info.data_offsets;
            let (start, end) = (start as u64, end as u64);
            let dtype = match info.dtype {
                safetensors::Dtype::BF16 => Some(Dtype::Bf16),
                safetensors::Dtype::F16 => Some(Dtype::F16),
                safetensors::Dtype::F32 => Some(Dtype::F32),
                _ => None,
            };
            let elements = info.shape.iter().try_fold(1_u64, |product, side| product.checked_mul(*side as u64));
            let expected = dtype.and_then(|dtype| elements?.checked_mul(dtype.bytes()));
            let inside = start <= end && end.checked_add(data).is_some_and(|end| end <= length);
            if !inside || expected.is_some_and(|bytes| bytes != end - start) {
                return Err(wrong(format!("{name} does not lie in the file as its header says")));
            }
            let place = Place {
                file: self.files.len(),
                start: data + start,
                bytes: end - start,
                dtype,
                dtype_name: format!("{:?}", info.dtype),
                shape: info.shape.clone(),
            };
            self.tensors.insert(name, place);
        }
        self.files.push(path);
        Ok(())
    }

    /// Whether a layer has this tensor.
    pub(super) fn has(&self, layer: u64, name: &str) -> bool {
        self.find(layer, name).is_some()
    }

    /// A tensor of a layer, whatever stands before `layers.` in its name, in one of three types and of that shape.
    pub(super) fn read(&self, layer: u64, name: &str, shape: &[u64]) -> Result<Weight, BlockError> {
        let Some((whole, place)) = self.find(layer, name) else {
            return Err(BlockError::NoWeight { file: self.name.clone(), layer, name: name.to_owned() });
        };
        let file = self.files[place.file].display().to_string();
        let same = place.shape.len() == shape.len() && place.shape.iter().zip(shape).all(|(a, b)| *a as u64 == *b);
        if !same {
            let (name, given) = (whole.clone(), place.shape.clone());
            return Err(BlockError::WeightShape { name, file, expected: shape.to_vec(), given });
        }
        let Some(dtype) = place.dtype else {
            let reason = format!("{whole} is {}; expected BF16, F16 or F32", place.dtype_name);
            return Err(BlockError::File { file, reason });
        };
        let bytes = read(&self.files[place.file], place.start, place.bytes)
            .map_err(|error| BlockError::File { file, reason: format!("{whole} cannot be read: {error}") })?;
        Ok(Weight { name: whole.clone(), dtype, bytes })
    }

    /// The heads that guess further tokens have layers of the same names under `mtp`.
    fn find(&self, layer: u64, name: &str) -> Option<(&String, &Place)> {
        let ending = format!("layers.{layer}.{name}");
        let is = |whole: &str| {
            whole.strip_suffix(&ending).is_some_and(|front| {
                (front.is_empty() || front.ends_with('.')) && !front.split('.').any(|part| part == "mtp")
            })
        };
        self.tensors.iter().find(|(whole, _)| is(whole))
    }
}

/// The header's text and the file's length.
fn header(path: &Path) -> std::io::Result<(Vec<u8>, u64)> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    let mut size = [0; 8];
    file.read_exact(&mut size)?;
    let size = u64::from_le_bytes(size);
    if size > MOST_HEADER || size > length.saturating_sub(8) {
        let reason = format!("it is no safetensors file: its header would have {size} bytes");
        return Err(std::io::Error::new(std::io::ErrorKind::InvalidData, reason));
    }
    let mut header = vec![0; size as usize];
    file.read_exact(&mut header)?;
    Ok((header, length))
}

fn read(path: &Path, start: u64, bytes: u64) -> std::io::Result<Vec<u8>> {
    let mut file = File::open(path)?;
    file.seek(SeekFrom::Start(start))?;
    let mut all = vec![0; bytes as usize];
    file.read_exact(&mut all)?;
    Ok(all)
}
