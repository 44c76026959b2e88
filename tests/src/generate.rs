//! Random inputs, reproducible from a seed.

use terrace_planner::problem::{Buffer, Piece, Problem, Reserved};
use terrace_profiles::units::{Align, Bytes, Interval, Offset, Tick};
use terrace_profiles::{Action, BufferId, Event, LabelId, LaneId, Profile};

/// SplitMix64: the generator that the synthetic instances are defined by.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// A generator with that seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.draw() % bound
    }

    /// Log-uniform in `[1, 2^(k_most + 1) - 1]`, as the synthetic instances draw sizes and lives.
    pub fn log_uniform(&mut self, k_most: u64) -> u64 {
        let k = self.draw() % (k_most + 1);
        (1 << k) + self.draw() % (1 << k)
    }
}

/// What a random problem may contain beside sizes and lives.
#[derive(Clone, Copy, Debug, Default)]
pub struct Features {
    /// Alignments of 1, 2 or 4 on each buffer.
    pub aligns: bool,
    /// Lives with gaps.
    pub gaps: bool,
    /// Gaps in which part of the bytes stay in use.
    pub windows: bool,
    /// Fixed offsets.
    pub fixed: bool,
    /// Two lanes.
    pub lanes: bool,
    /// Pairs kept apart.
    pub apart: bool,
    /// Reserved bytes and a border.
    pub reserved: bool,
}

/// A problem of `count` buffers with sizes up to `largest` and ticks up to `ticks`.
pub fn problem(random: &mut Random, count: usize, largest: u64, ticks: u64, features: Features) -> Problem {
    let mut buffers = Vec::with_capacity(count);
    let mut base = 0;
    for _ in 0..count {
        let align = if features.aligns { 1 << random.below(3) } else { 1 };
        let align = Align::new(align).expect("a power of two");
        let size = Bytes::new(1 + random.below(largest)).expect("small").align_up(align).expect("small");
        let start = random.below(ticks);
        let end = start + 1 + random.below(ticks - start);
        let life = Interval::new(Tick(start), Tick(end)).expect("not empty");
        let mut buffer = Buffer::new(size, align, life);
        if features.gaps && random.below(3) == 0 && end - start >= 3 {
            buffer.pieces = pieces(random, &buffer, features.windows);
        }
        if features.fixed && random.below(4) == 0 {
            // Above all fixed before it, so that no two meet.
            let offset = (base + random.below(largest)).next_multiple_of(align.get());
            buffer.fixed = Offset::new(offset);
            base = offset + size.get();
        }
        if features.lanes {
            buffer.lane = random.below(2) as u32;
        }
        buffers.push(buffer);
    }
    let mut apart = Vec::new();
    for a in 0..count as u32 {
        for b in a + 1..count as u32 {
            if features.apart && random.below(6) == 0 {
                apart.push((a, b));
            }
        }
    }
    let reserved = if features.reserved { reserved(random, base, largest) } else { Vec::new() };
    Problem { buffers, apart, reserved }
}

/// A range and a border, neither where something is fixed: all that ends at or below `base`.
fn reserved(random: &mut Random, base: u64, largest: u64) -> Vec<Reserved> {
    let mut between = |from, length| Reserved {
        from: Offset::new(from).expect("small"),
        to: Offset::new(from + random.below(length)).expect("small"),
    };
    let first = between(base + largest / 2, largest);
    // Room for the largest buffer lies above both.
    vec![first, between(first.to.get() + largest / 3, 1)]
}

/// Two stretches with a gap between, or, with windows, one in which only the middle bytes stay in use.
fn pieces(random: &mut Random, buffer: &Buffer, windows: bool) -> Box<[Piece]> {
    let (start, end) = (buffer.lifetime.start.0, buffer.lifetime.end.0);
    let from = start + 1 + random.below(end - start - 2);
    let to = from + 1 + random.below(end - from - 1);
    let piece = |start, end, low, high| Piece {
        lifetime: Interval::new(Tick(start), Tick(end)).expect("not empty"),
        from: Bytes::new(low).expect("small"),
        to: Bytes::new(high).expect("small"),
    };
    let size = buffer.size.get();
    let (first, last) = (piece(start, from, 0, size), piece(to, end, 0, size));
    if windows && size >= 2 {
        let low = random.below(size - 1);
        let high = low + 1 + random.below(size - low - 1);
        Box::new([first, piece(from, to, low, high), last])
    } else {
        Box::new([first, last])
    }
}

/// A rectangle of `height` bytes and `width` ticks cut into at most `count` buffers, shuffled: their optimum is the height,
/// with not a byte to spare. Some are left out with a chance of one in `holes`, where that is not 0.
pub fn cut(random: &mut Random, count: usize, height: u64, width: u64, holes: u64) -> Problem {
    // Bytes from and to, ticks from and to.
    let mut pieces = vec![(0, height, 0, width)];
    for _ in 0..20 * count {
        let (low, high, start, end) = pieces[random.below(pieces.len() as u64) as usize];
        let at = pieces.iter().position(|piece| *piece == (low, high, start, end)).expect("it was just chosen");
        if random.below(2) == 0 && high - low > 1 {
            let middle = low + 1 + random.below(high - low - 1);
            pieces[at] = (low, middle, start, end);
            pieces.push((middle, high, start, end));
        } else if end - start > 1 {
            let middle = start + 1 + random.below(end - start - 1);
            pieces[at] = (low, high, start, middle);
            pieces.push((low, high, middle, end));
        }
        if pieces.len() >= count {
            break;
        }
    }
    if holes > 0 {
        pieces.retain(|_| random.below(holes) > 0);
    }
    let mut buffers: Vec<Buffer> = Vec::with_capacity(pieces.len());
    for (low, high, start, end) in pieces {
        let place = random.below(buffers.len() as u64 + 1) as usize;
        buffers.insert(place, plain(high - low, start, end));
    }
    Problem { buffers, ..Problem::default() }
}

/// A profile of the events that such lives make: one lane, one label, ticks by event.
pub fn profile(random: &mut Random, count: u32, largest: u64) -> Profile {
    let mut profile = Profile {
        name: "random".to_owned(),
        labels: vec!["random".to_owned()],
        lanes: vec!["stream 0".to_owned()],
        ..Profile::default()
    };
    let mut alive: Vec<u32> = Vec::new();
    let mut next = 0;
    let mut push = |action| {
        let tick = Tick(profile.events.len() as u64);
        profile.events.push(Event { tick, action });
    };
    while next < count || !alive.is_empty() {
        if next < count && (alive.is_empty() || random.below(5) < 3) {
            let bytes = Bytes::new(random.log_uniform(largest.ilog2().into())).expect("small");
            let id = BufferId(next);
            push(Action::Alloc { id, bytes, label: LabelId(0), lane: LaneId(0), hints: None });
            alive.push(next);
            next += 1;
        } else {
            let dead = alive.swap_remove(random.below(alive.len() as u64) as usize);
            push(Action::Free { id: BufferId(dead) });
        }
    }
    profile
}

/// The synthetic instances of `tests/corpus/README.md`: `synth-N` for any N and seed.
pub fn synth(count: u64, seed: u64) -> Problem {
    let mut random = Random::new(seed);
    let buffers = (0..count).map(|_| {
        let size = 64 * random.log_uniform(17);
        let length = random.log_uniform(11);
        let lower = random.draw() % (2 * count);
        plain(size, lower, lower + length)
    });
    Problem { buffers: buffers.collect(), ..Problem::default() }
}

/// `dense-10k` of `tests/corpus/README.md`, for any count and seed: lives between any two ticks, so that about two thirds of
/// all pairs meet.
pub fn dense(count: u64, seed: u64) -> Problem {
    let mut random = Random::new(seed);
    let buffers = (0..count).map(|_| {
        let size = 64 * random.log_uniform(17);
        let (a, b) = (random.draw() % (2 * count), random.draw() % (2 * count));
        plain(size, a.min(b), a.max(b) + 1)
    });
    Problem { buffers: buffers.collect(), ..Problem::default() }
}

fn plain(size: u64, lower: u64, upper: u64) -> Buffer {
    let life = Interval::new(Tick(lower), Tick(upper)).expect("not empty");
    Buffer::new(Bytes::new(size).expect("small"), Align::ONE, life)
}
