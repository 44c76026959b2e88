//! Off script: the long way of a request and of a free, where every span is looked up before it is handed out.
//!
//! ```text
//!   request --> of a graph pool | between steps | still on script | leaves the script: matched with a slot
//!                                                                       slot free of anything live -> its span
//!                                                                       otherwise                  -> the space outside
//! ```

use std::sync::Arc;

use terrace_profiles::units::{Bytes, DeviceSpan};

use crate::backing::Stream;
use crate::device::{Beyond, Block, BlockState, Device, FREED, round};
use crate::divergence::Divergence;
use crate::error::Error;
use crate::order::After;
use crate::record::Request;
use crate::script::{Kind, Script};
use crate::step::Mode;

/// A step that asks for more is not written down any further: its end was probably forgotten.
const MOST_REQUESTS: usize = 1 << 20;

impl Device {
    #[cold]
    pub(crate) fn alloc_off_script(&mut self, bytes: Bytes, stream: Stream, label: &str) -> Result<DeviceSpan, Error> {
        if bytes.is_zero() {
            return Ok(DeviceSpan { address: 0, bytes });
        }
        self.stats.slow_allocs += 1;
        if let Some(id) = self.capturing_pool(stream) {
            return self.alloc_in_pool(id, bytes, round(bytes.get(), self.config.align), stream, label);
        }
        if self.config.debug {
            let outer = self.serve(Self::padded(bytes), stream, label)?;
            return Ok(self.guard(outer, bytes, stream));
        }
        self.serve(bytes, stream, label)
    }

    fn serve(&mut self, bytes: Bytes, stream: Stream, label: &str) -> Result<DeviceSpan, Error> {
        let size = round(bytes.get(), self.config.align);
        if self.open.is_none() || self.is_outside() {
            return self.alloc_outside(bytes, size, stream, label, None, false);
        }
        if let Some(served) = self.next_on_script(bytes, size, stream, label) {
            return served;
        }
        self.leave_script();
        self.alloc_in_open_step(bytes, size, stream, label)
    }

    /// What still counts as on script: the first request of a stream, and one that outlives the step, of whatever size,
    /// since it is served outside anyway.
    fn next_on_script(
        &mut self,
        bytes: Bytes,
        size: u64,
        stream: Stream,
        label: &str,
    ) -> Option<Result<DeviceSpan, Error>> {
        let on = self.script.as_ref()?;
        let op = *on.script.ops.get(on.cursor)?;
        let new = op.lane as usize == on.streams.len() && !on.streams.contains(&stream);
        if !new && on.streams.get(op.lane as usize) != Some(&stream) {
            return None;
        }
        if new && !self.order_in_claimed(stream) {
            return None;
        }
        let on = self.script.as_ref()?;
        let span = match op.kind {
            Kind::Alloc if op.seen == size => DeviceSpan { address: self.span.address + op.offset, bytes },
            Kind::Outside => {
                let next = on.script.ops[on.cursor + 1..].iter().find(|op| op.kind == Kind::Alloc);
                if op.seen != size && next.is_some_and(|next| next.seen == size) {
                    // It is the next one's: this one is missing.
                    return None;
                }
                match self.alloc_outside(bytes, size, stream, label, None, false) {
                    Ok(span) => span,
                    // Nothing happened, so the script still expects it.
                    Err(error) => return Some(Err(error)),
                }
            }
            Kind::Alloc | Kind::Free => return None,
        };
        let on = self.script.as_mut().expect("still on script");
        on.cursor += 1;
        if new {
            on.streams.push(stream);
        }
        if op.kind == Kind::Outside {
            let (slot, offset, expected) = (op.slot, span.address - self.span.address, op.seen);
            on.outside.push(Beyond { slot, offset, size });
            if size > expected {
                self.stats.divergences.note(Divergence::Grew { slot, expected, actual: size });
            }
        }
        Some(Ok(span))
    }

    fn alloc_in_open_step(
        &mut self,
        bytes: Bytes,
        size: u64,
        stream: Stream,
        label: &str,
    ) -> Result<DeviceSpan, Error> {
        let label_id = self.labels.id(label);
        let open = self.open.as_mut().expect("the caller looked");
        let lane = open.lane(stream);
        if open.record.requests.len() >= MOST_REQUESTS {
            open.mode = Mode::Passthrough;
            return self.alloc_outside(bytes, size, stream, label, None, false);
        }
        let (stats, record) = (&mut self.stats, &mut open.record);
        let request = record.requests.len() as u32;
        let (mut slot, mut script) = (None, None);
        if let Mode::Replay { script: planned, matcher } = &mut open.mode {
            let mut linked = Vec::new();
            slot = matcher.find(
                planned,
                lane,
                size,
                &record.requests,
                &mut |divergence| stats.divergences.note(divergence),
                &mut |earlier, slot| linked.push((earlier, slot)),
            );
            for (earlier, slot) in linked {
                record.requests[earlier as usize].slot = slot;
            }
            script = Some(Arc::clone(planned));
        }
        record.alloc(Request { size, lane, label: label_id, slot, in_plan: false, freed: false });
        let planned =
            slot.filter(|slot| script.as_ref().is_some_and(|script| !script.template.slots[*slot as usize].outlives));
        if let (Some(script), Some(slot)) = (&script, planned)
            && self.slot_is_free(script, slot, size)
            && self.order_in_claimed(stream)
        {
            let offset = script.offsets[slot as usize];
            self.open.as_mut().expect("as above").record.requests[request as usize].in_plan = true;
            let state = BlockState::Slot(slot);
            let (step, request, streams) = (self.steps, Some(request), Vec::new());
            let block = Block { size, asked: bytes.get(), label: label_id, stream, step, request, state, streams };
            self.live.insert(offset, block);
            self.usage_taken(size);
            return Ok(DeviceSpan { address: self.span.address + offset, bytes });
        }
        // What outlives the step has a slot that is not planned, and is no miss.
        let missed = script.is_some() && (planned.is_some() || slot.is_none());
        let served = self.alloc_outside(bytes, size, stream, label, Some(request), missed);
        if served.is_err() {
            // Nothing happened: who asked may free something and ask again.
            let open = self.open.as_mut().expect("as above");
            open.record.undo_alloc();
            if let Mode::Replay { script, matcher } = &mut open.mode {
                matcher.undo(script, lane, slot);
            }
        }
        served
    }

    /// The safety rule: whether no byte of the slot is used by anything, whatever the plan says. Names what is in the way.
    fn slot_is_free(&mut self, script: &Script, slot: u32, size: u64) -> bool {
        let offset = script.offsets[slot as usize];
        debug_assert!(size <= script.template.slots[slot as usize].size, "a slot holds what it is given");
        if let Some((_, BlockState::Pending(_))) = self.blocker(offset, offset + size) {
            self.drain(false);
        }
        let Some((by_offset, by)) = self.blocker(offset, offset + size) else { return true };
        let current = self.live.get(&by_offset).is_some_and(|block| block.step == self.steps);
        let divergence = match by {
            BlockState::Slot(by) if current => Divergence::LateFree { slot, by },
            _ => Divergence::Blocked { slot, by_offset },
        };
        self.stats.divergences.note(divergence);
        false
    }

    /// What lives in `[from, to)`, if anything. Live blocks never overlap, so the last that begins before `to` decides.
    fn blocker(&self, from: u64, to: u64) -> Option<(u64, BlockState)> {
        let (offset, block) = self.live.range(..to).next_back()?;
        (offset + block.size > from).then(|| (*offset, block.state.clone()))
    }

    pub(crate) fn alloc_outside(
        &mut self,
        bytes: Bytes,
        size: u64,
        stream: Stream,
        label: &str,
        request: Option<u32>,
        missed: bool,
    ) -> Result<DeviceSpan, Error> {
        let offset = match self.take(size, stream) {
            Some(offset) => offset,
            None => self.take_when_exhausted(bytes, size, stream, label)?,
        };
        let label = self.labels.id(label);
        let step = if self.open.is_some() && !self.is_outside() { self.steps } else { 0 };
        let (state, streams) = (BlockState::Outside { missed }, Vec::new());
        let block = Block { size, asked: bytes.get(), label, stream, step, request, state, streams };
        self.live.insert(offset, block);
        self.stats.outside_taken(size, missed);
        self.usage_taken(size);
        self.usage_reaches(offset);
        Ok(DeviceSpan { address: self.span.address + offset, bytes })
    }

    #[cold]
    pub(crate) fn free_off_script(&mut self, address: u64) {
        if address == 0 {
            return;
        }
        let Some(offset) = self.block_of(address) else {
            self.stats.divergences.note(Divergence::UnknownFree { address });
            return;
        };
        if offset < self.claimed && !self.live.contains_key(&offset) {
            self.leave_script();
        }
        if self.in_pool(offset) {
            if !self.free_in_pool(offset) {
                self.stats.divergences.note(Divergence::FreedTwice { address });
            }
            return;
        }
        let Some(block) = self.live.get(&offset).filter(|block| !matches!(block.state, BlockState::Pending(_))) else {
            self.stats.divergences.note(Divergence::FreedTwice { address });
            return;
        };
        let (step, request, missed) =
            (block.step, block.request, matches!(block.state, BlockState::Outside { missed: true }));
        let current = self.open.is_some() && step == self.steps;
        let in_plan = matches!(block.state, BlockState::Slot(_));
        if step != 0 && !current {
            self.leaks.freed(step, block.size);
        }
        if in_plan && !current {
            self.stats.divergences.note(Divergence::FreeAfterStep { offset });
        }
        if current && let Some(open) = &mut self.open {
            match request {
                Some(request) => open.record.free(request),
                // Served outside while on script, so it has no record yet: counted when the step ends.
                None => open.freed_outside += 1,
            }
        }
        if let Some(on) = &mut self.script
            && let Some(outside) = on.outside.iter_mut().rev().find(|beyond| beyond.offset == offset)
        {
            outside.offset = FREED;
        }
        self.verify(offset);
        self.usage_given(self.live.get(&offset).map_or(0, |block| block.size));
        let capturing = self.is_capturing();
        let mut block = self.live.remove(&offset).expect("it was just there");
        let mut streams = std::mem::take(&mut block.streams);
        if capturing && self.backing.is_capturing(block.stream) {
            // Whether its last kernel runs now or in the graph is not known: it is reused when the capture is over.
            streams.push(block.stream);
        }
        if matches!(block.state, BlockState::Outside { .. }) {
            self.stats.outside_given(block.size, missed);
        }
        if !streams.is_empty() {
            self.live.insert(offset, block);
            self.free_after(offset, streams);
            return;
        }
        self.poison(offset, &block);
        // A slot's bytes stay claimed, and no other stream of this step has slots there.
        if !(in_plan && current) {
            self.give(offset, block.size, block.stream);
        }
    }

    /// Gives bytes back that `stream` had, but for what the open step's plan has claimed: that comes back when the step ends,
    /// and until then its streams have to mind whose it was.
    pub(crate) fn give(&mut self, offset: u64, size: u64, stream: Stream) {
        if offset < self.claimed
            && let Some(open) = &mut self.open
        {
            open.intruders.push(stream);
        }
        self.space.give(offset.max(self.claimed)..offset + size, After::Work(stream));
    }
}
