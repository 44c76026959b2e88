//! Prompts through the layers, chunk by chunk, and tokens after them; and what is held about every step.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::time::Instant;

use serde::Serialize;
use terrace_kernels::Device;
use terrace_kernels::block::{Geometry, fill};
use terrace_profiles::units::DeviceSpan;
use terrace_profiles::{Memory, Recorder};

use super::host::{Meter, STREAM, copy_in, copy_out, wait};
use super::{Failure, Kind, Runtime, wrong};

/// Rows of the stream, from its end, that the hash looks at.
const HASHED_ROWS: u64 = 1 << 16;

/// What came of a run.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The model's id or file.
    pub model: String,
    /// Whose processors.
    pub device: String,
    /// The type of activations.
    pub element: String,
    /// Layers, each with its weights.
    pub layers: u64,
    /// Tokens of a prompt.
    pub tokens: u64,
    /// Tokens resident at once; none for all of a chunk.
    pub window: Option<u64>,
    /// Why that many.
    pub why: String,
    /// Tokens of a step.
    pub chunk: u64,
    /// Tokens decoded after each prompt.
    pub decode: u64,
    /// Bytes for activations and states.
    pub budget: u64,
    /// What the plans said that activations need.
    pub predicted_peak: u64,
    /// No arena is smaller.
    pub lower_bound: u64,
    /// The most bytes of activations that were alive at once.
    pub measured_peak: u64,
    /// Of it, the residual stream.
    pub residual: u64,
    /// Bytes of the states of all layers.
    pub states: u64,
    /// Bytes of their weights.
    pub weights: u64,
    /// Allocations of the driver before the first step, and after the last.
    pub driver_allocations: [u64; 2],
    /// Bytes of free device memory that were lost after the first prompt; none on the host.
    pub free_lost: Option<i64>,
    /// Steps, and those that ran exactly as planned.
    pub steps: u64,
    /// As planned from the first event to the last.
    pub steps_on_script: u64,
    /// Bytes that no plan held, at their most.
    pub overflow_peak: u64,
    /// Kinds of steps whose first was compared with the prediction, event by event; a difference is an error.
    pub kinds_as_predicted: u64,
    /// Numbers of rows for which no pinned projection was to be had; none on the CPU.
    pub unpinned_projections: Option<u64>,
    /// Prompts.
    pub rounds: u64,
    /// Of the first prompt, which warms up.
    pub first_prefill_seconds: f64,
    /// Of the other prompts, the median; of the first, where there is no other.
    pub prefill_seconds: f64,
    /// Prompt tokens through all layers in a second.
    pub prefill_tokens_per_second: f64,
    /// Of a decoded token, the median over prompts.
    pub decode_seconds_per_token: Option<f64>,
    /// From the first step to the last.
    pub seconds: f64,
    /// Where the bytes of the reservation were when the first step began.
    pub boot_summary: String,
    /// Of the stream at the end of the first prompt, and of the first layer's state after it.
    pub hash: String,
}

impl Runtime {
    /// Runs what was asked for. `progress` hears of tokens done and to be done.
    ///
    /// # Errors
    /// A step that asked for something else than predicted, or left its plan; a device or a file that fails.
    pub fn run(&mut self, progress: &mut dyn FnMut(u64, u64)) -> Result<Report, Failure> {
        let allocations = self.reservations();
        let started = Instant::now();
        let (mut prefills, mut decodes) = (Vec::new(), Vec::new());
        let (mut measured, mut round, mut hash, mut free) = (0, 0, String::new(), None);
        while round < self.options.rounds.max(1) || started.elapsed().as_secs() < self.options.seconds {
            self.layers.iter_mut().for_each(|(_, state)| state.reset());
            let (peak, seconds, hashed) = self.prompt(round, progress)?;
            prefills.push(seconds);
            measured = measured.max(peak);
            if let Some(hashed) = hashed {
                hash = hashed;
            }
            if self.options.decode > 0 {
                let (peak, seconds) = self.decode(round)?;
                measured = measured.max(peak);
                decodes.push(seconds / self.options.decode as f64);
            }
            // Free memory is known once everything has been loaded that ever is.
            free = free.or_else(|| self.free());
            round += 1;
        }
        let seconds = started.elapsed().as_secs_f64();
        let stats = self.arena.stats();
        let first = prefills[0];
        let prefill = if prefills.len() > 1 { median(&mut prefills[1..]) } else { first };
        let chunk = self.chunk();
        // A statement of its own: the lock lasts as long as the statement that takes it.
        let device = self.arena.device().backing().name();
        let report = Report {
            model: self.options.model.clone(),
            device,
            element: self.geometry.element().to_string(),
            layers: self.options.layers,
            tokens: self.options.tokens,
            window: self.choice.window,
            why: self.choice.why.clone(),
            chunk,
            decode: self.options.decode,
            budget: self.choice.budget.get(),
            predicted_peak: self.choice.arena.get(),
            lower_bound: self.choice.lower_bound.get(),
            measured_peak: measured,
            residual: self.geometry.residual(chunk).map_err(wrong)?.get(),
            states: self.states.get(),
            weights: self.weights.get(),
            driver_allocations: [allocations, self.reservations()],
            free_lost: free.zip(self.free()).map(|(before, after)| before.cast_signed() - after.cast_signed()),
            steps: stats.steps,
            steps_on_script: stats.steps_on_script,
            overflow_peak: stats.overflow_peak,
            kinds_as_predicted: self.steps.iter().filter(|step| !step.new).count() as u64,
            unpinned_projections: match &self.device {
                Device::Cuda(cuda) => Some(cuda.unpinned_projections()),
                _ => None,
            },
            rounds: round,
            first_prefill_seconds: first,
            prefill_seconds: prefill,
            prefill_tokens_per_second: self.options.tokens as f64 / prefill,
            decode_seconds_per_token: (!decodes.is_empty()).then(|| median(&mut decodes)),
            seconds,
            boot_summary: self.boot.clone(),
            hash,
        };
        report.hold()?;
        Ok(report)
    }

    /// One prompt: the peak, the seconds, and after the first a hash of what came out.
    fn prompt(
        &mut self,
        round: u64,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(u64, f64, Option<String>), Failure> {
        let (tokens, chunk) = (self.options.tokens, self.chunk());
        let mut output = match (&self.options.output, round) {
            (Some(path), 0) => Some(File::create(path).map_err(|error| wrong(format!("{}: {error}", path.display())))?),
            _ => None,
        };
        let (mut peak, mut seconds, mut hash) = (0, 0.0, 0xcbf2_9ce4_8422_2325);
        let mut first = 0;
        while first < tokens {
            let len = chunk.min(tokens - first);
            let (high, took, bytes) = self.step(len, false, first, round == 0, output.is_some())?;
            peak = peak.max(high);
            seconds += took;
            hash = fold(hash, &bytes);
            if let Some(file) = &mut output {
                file.write_all(&bytes).map_err(wrong)?;
            }
            first += len;
            progress(first, tokens);
        }
        if round > 0 {
            return Ok((peak, seconds, None));
        }
        let (_, state) = &self.layers[0];
        for part in state.parts(&self.geometry) {
            // SAFETY: the state's spans are memory of the device, and a prompt has been through them.
            hash = fold(hash, &unsafe { copy_out(&self.device, part, 0, part.bytes.get()) }?);
        }
        Ok((peak, seconds, Some(format!("{hash:016x}"))))
    }

    /// Tokens one by one: the peak, and the seconds of all.
    fn decode(&mut self, round: u64) -> Result<(u64, f64), Failure> {
        let (mut peak, started) = (0, Instant::now());
        for token in 0..self.options.decode {
            let place = self.options.tokens + round * self.options.decode + token;
            let (high, ..) = self.step(1, true, place, false, false)?;
            peak = peak.max(high);
        }
        wait(&self.device)?;
        Ok((peak, started.elapsed().as_secs_f64()))
    }

    /// One step: the peak, the seconds of a prefill, and the bytes at its end where they are wanted.
    fn step(
        &mut self,
        tokens: u64,
        decode: bool,
        first: u64,
        keep: bool,
        keep_all: bool,
    ) -> Result<(u64, f64, Vec<u8>), Failure> {
        let known = self.steps.iter_mut().find(|step| (step.tokens, step.decode) == (tokens, decode));
        let known = known.ok_or_else(|| wrong(format!("a step of {tokens} tokens was not planned")))?;
        let input = self.options.input.as_ref().filter(|_| !decode);
        let row = self.geometry.residual(1).map_err(wrong)?.get();
        let mut step = self.arena.step(known.key().as_bytes(), STREAM).map_err(wrong)?;
        let mut meter = Meter::over(&mut step);
        let mut recorder = Recorder::over(&mut meter);
        let residual = recorder.alloc(self.geometry.residual(tokens).map_err(wrong)?, "residual").map_err(wrong)?;
        let from = Stream { device: &self.device, residual, row };
        match input {
            Some(path) => from.read(path, first, tokens)?,
            None => from.make_up(&self.geometry, first, tokens)?,
        }
        if !decode {
            wait(&self.device)?;
        }
        let started = Instant::now();
        for (layer, state) in &mut self.layers {
            // SAFETY: the arena's spans are memory of the device, aligned to 512 bytes; all work is queued on one stream, in the
            // order of the requests.
            let ran = unsafe {
                if decode {
                    layer.decode(&mut recorder, residual, tokens, state)
                } else {
                    layer.prefill(&mut recorder, residual, tokens, state, self.choice.window)
                }
            };
            ran.map_err(wrong)?;
        }
        if !decode {
            wait(&self.device)?;
        }
        let seconds = started.elapsed().as_secs_f64();
        let bytes = match (keep, keep_all) {
            (false, _) => Vec::new(),
            (true, all) => {
                let rows = if all { tokens } else { tokens.min(HASHED_ROWS) };
                // SAFETY: the stream is memory of the device, and the step has been through it.
                unsafe { copy_out(&self.device, residual, (tokens - rows) * row, rows * row) }?
            }
        };
        recorder.free(residual);
        let ran = recorder.into_profile("");
        if known.new && (ran.events != known.predicted.events || ran.labels != known.predicted.labels) {
            let at = ran.events.iter().zip(&known.predicted.events).position(|(ran, predicted)| ran != predicted);
            let at = at.unwrap_or(ran.events.len().min(known.predicted.events.len()));
            return Err(wrong(format!("{} asked for something else than predicted at event {at}", known.key())));
        }
        known.new = false;
        Ok((meter.peak, seconds, bytes))
    }

    fn chunk(&self) -> u64 {
        self.options.chunk.unwrap_or(self.options.tokens).min(self.options.tokens)
    }

    fn reservations(&self) -> u64 {
        self.arena.device().backing().reservations()
    }

    /// Free memory of a GPU; that of a host is everybody's.
    fn free(&self) -> Option<u64> {
        if self.options.device == Kind::Cpu {
            return None;
        }
        self.arena.device().backing().memory().map(|(_, free)| free.get())
    }
}

/// Where a step's stream comes from.
struct Stream<'a> {
    device: &'a Device,
    residual: DeviceSpan,
    /// Bytes of a token.
    row: u64,
}

impl Stream<'_> {
    fn read(&self, path: &std::path::Path, first: u64, tokens: u64) -> Result<(), Failure> {
        let failed = |error: std::io::Error| wrong(format!("{}: {error}", path.display()));
        let mut file = File::open(path).map_err(failed)?;
        file.seek(SeekFrom::Start(first * self.row)).map_err(failed)?;
        let mut bytes = vec![0; (tokens * self.row) as usize];
        file.read_exact(&mut bytes).map_err(failed)?;
        // SAFETY: the stream has room for so many rows, and its step has not begun.
        unsafe { copy_in(self.device, self.residual, &bytes) }
    }

    /// The same numbers in every window and every run that cuts the prompt alike.
    fn make_up(&self, geometry: &Geometry, first: u64, tokens: u64) -> Result<(), Failure> {
        let count = tokens * geometry.rank().hidden;
        // SAFETY: the stream is memory of the device, and its step has not begun.
        unsafe { fill(self.device, self.residual, geometry.element(), count, first, 1.0) }.map_err(wrong)
    }
}

impl Report {
    /// What every run must show.
    fn hold(&self) -> Result<(), Failure> {
        let held = [
            (self.measured_peak <= self.predicted_peak, "a step had more bytes alive than was predicted"),
            (self.driver_allocations == [1, 1], "the driver was asked for memory more than once"),
            (self.free_lost.unwrap_or(0) == 0, "free device memory changed after the first prompt"),
            (self.steps_on_script == self.steps, "a step left its plan"),
            (self.overflow_peak == 0, "bytes were served that no plan held"),
        ];
        held.iter().find(|(holds, _)| !holds).map_or(Ok(()), |(_, broken)| Err(wrong(broken)))
    }
}

/// The median; of two, the larger.
fn median(seconds: &mut [f64]) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

/// FNV-1a over words; a rest of less than a word counts as one.
fn fold(hash: u64, bytes: &[u8]) -> u64 {
    bytes.chunks(8).fold(hash, |hash, word| {
        let mut whole = [0; 8];
        whole[..word.len()].copy_from_slice(word);
        (hash ^ u64::from_le_bytes(whole)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}
