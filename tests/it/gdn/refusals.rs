//! Bad input: one sentence that names the argument and what was expected, and nothing is written.

use half::{bf16, f16};
use terrace_kernels::{
    Block, Checkpoints, Cpu, Decode, Design, Device, Dtype, Error, Gdn, Indices, Initial, Last, Place, Pool, PoolMut,
    Prefill, Sequences, States, Tensor, TensorMut, Window, Workspace, choose_window, decode, prefill, workspace,
};
use terrace_profiles::units::{Bytes, DeviceSpan};

const TOKENS: u64 = 100;
const KEYS: u64 = 2;
const VALUES: u64 = 4;
const STATES: usize = 3 * VALUES as usize * 128 * 128;
const CU: [i64; 4] = [0, 40, 40, 100];
const CANARY: f32 = -7.0;

/// Arguments that are served, to be spoilt, and what their sentences are.
struct Refusals {
    sentences: String,
}

impl Refusals {
    fn prefill(&mut self, what: &str, spoil: impl FnOnce(&mut Prefill<'_>, &mut Workspace<'_>)) -> Error {
        let rows = |heads: u64| vec![bf16::ONE; (TOKENS * heads * 128) as usize];
        let (q, k, v) = (rows(KEYS), rows(KEYS), rows(VALUES));
        let gates = vec![-0.5_f32; (TOKENS * VALUES) as usize];
        let h0 = vec![0.5_f32; STATES];
        let mut o = vec![bf16::from_f32(CANARY); (TOKENS * VALUES * 128) as usize];
        let (mut ht, mut kept) = (vec![CANARY; STATES], vec![CANARY; STATES]);
        let device = Device::Cpu(Cpu::new(2));
        let shape = Gdn::new(KEYS as u32, VALUES as u32).unwrap();
        let mut blocks = Block::zeroed(workspace(&device, shape, Window::MIN, Design::Fused).total());
        blocks.iter_mut().for_each(|block| block.bytes().fill(0xC5));
        let mut args = Prefill {
            q: Tensor::new(&q[..], [TOKENS, KEYS, 128]),
            k: Tensor::new(&k[..], [TOKENS, KEYS, 128]),
            v: Tensor::new(&v[..], [TOKENS, VALUES, 128]),
            g: Tensor::gates(&gates[..], [TOKENS, VALUES]),
            beta: Tensor::gates(&gates[..], [TOKENS, VALUES]),
            o: TensorMut::new(&mut o[..], [TOKENS, VALUES, 128]),
            sequences: Sequences::packed(&CU),
            states: States::Separate {
                initial: Some(Initial { pool: Pool::new(&h0[..], [3, VALUES]), slots: None, has_initial: None }),
                last: Some(Last { pool: PoolMut::new(&mut ht[..], [3, VALUES]), slots: None }),
            },
            checkpoints: Some(Checkpoints { every: 1, states: PoolMut::new(&mut kept[..], [3, VALUES]) }),
            scale: None,
            l2norm: false,
            window: Window::MIN,
            design: Design::Fused,
        };
        let mut memory = Workspace::blocks(&mut blocks);
        spoil(&mut args, &mut memory);
        let error = prefill(&device, args, memory).expect_err(what);
        assert!(o.iter().all(|x| x.to_f32() == CANARY), "{what}: o was written");
        assert!(ht.iter().chain(&kept).all(|x| *x == CANARY), "{what}: states were written");
        assert!(blocks.iter_mut().all(|block| block.bytes().iter().all(|byte| *byte == 0xC5)), "{what}: workspace");
        self.note(what, &error);
        error
    }

    fn decode(&mut self, what: &str, spoil: impl FnOnce(&mut Decode<'_>)) {
        let rows = |heads: u64| vec![bf16::ONE; (3 * heads * 128) as usize];
        let (q, k, v) = (rows(KEYS), rows(KEYS), rows(VALUES));
        let gates = vec![-0.5_f32; (3 * VALUES) as usize];
        let mut o = vec![bf16::from_f32(CANARY); (3 * VALUES * 128) as usize];
        let mut states = vec![CANARY; STATES];
        let mut args = Decode {
            q: Tensor::new(&q[..], [3, KEYS, 128]),
            k: Tensor::new(&k[..], [3, KEYS, 128]),
            v: Tensor::new(&v[..], [3, VALUES, 128]),
            g: Tensor::gates(&gates[..], [3, VALUES]),
            beta: Tensor::gates(&gates[..], [3, VALUES]),
            o: TensorMut::new(&mut o[..], [3, VALUES, 128]),
            cu_seqlens: Indices::host(&[0, 1, 3]),
            slots: Indices::host(&[2, 0]),
            pool: PoolMut::new(&mut states[..], [3, VALUES]),
            scale: None,
            l2norm: false,
        };
        spoil(&mut args);
        let error = decode(&Device::Cpu(Cpu::new(2)), args).expect_err(what);
        assert!(o.iter().all(|x| x.to_f32() == CANARY), "{what}: o was written");
        assert!(states.iter().all(|x| *x == CANARY), "{what}: states were written");
        self.note(what, &error);
    }

    fn note(&mut self, what: &str, error: &Error) {
        let sentence = error.to_string();
        assert!(!sentence.ends_with('.') && !sentence.contains('\n'), "one sentence: {sentence}");
        self.sentences += &format!("{what}\n    {sentence}\n");
    }
}

/// Memory of a bad argument, for as long as any call may want it.
fn room<T: Clone>(value: T, len: usize) -> &'static mut [T] {
    vec![value; len].leak()
}

fn raw(address: u64, dtype: Dtype, heads: u64) -> Tensor<'static> {
    // SAFETY: every call that is given it refuses before it reads.
    unsafe { Tensor::from_raw(Place::Host, address, dtype, [TOKENS, heads, 128]) }
}

#[test]
fn each_bad_argument_of_a_prefill_is_one_sentence_and_nothing_is_written() {
    let mut all = Refusals { sentences: String::new() };
    let size = (TOKENS * VALUES * 128) as usize;
    let halves: &'static [bf16] = room(bf16::ZERO, size);
    let others: &'static [f16] = room(f16::ZERO, size);
    let gates: &'static [f32] = room(0.0, size);
    let states: &'static [bf16] = room(bf16::ZERO, STATES);

    all.prefill("q with heads that do not divide", |args, _| args.q = Tensor::new(halves, [TOKENS, 3, 128]));
    all.prefill("q with 64 elements", |args, _| args.q = Tensor::new(halves, [TOKENS, KEYS, 64]));
    all.prefill("v with 256 elements", |args, _| args.v = Tensor::new(halves, [TOKENS, VALUES, 256]));
    all.prefill("k with fewer tokens", |args, _| args.k = Tensor::new(halves, [TOKENS - 1, KEYS, 128]));
    all.prefill("k with other heads", |args, _| args.k = Tensor::new(halves, [TOKENS, 1, 128]));
    all.prefill("g of key heads", |args, _| args.g = Tensor::gates(gates, [TOKENS, KEYS]));
    all.prefill("beta with more tokens", |args, _| args.beta = Tensor::gates(gates, [TOKENS + 1, VALUES]));
    all.prefill("k of another type", |args, _| args.k = Tensor::new(others, [TOKENS, KEYS, 128]));
    all.prefill("beta of a third type", |args, _| args.beta = Tensor::gates(others, [TOKENS, VALUES]));
    all.prefill("q that is too short", |args, _| args.q = Tensor::new(&halves[..300], [TOKENS, KEYS, 128]));
    all.prefill("v strided beyond its slice", |args, _| args.v = args.v.strides(VALUES * 128 + 1, 128));
    all.prefill("q strided beyond memory", |args, _| args.q = args.q.strides(u64::MAX / 2, 128));
    all.prefill("o whose rows share elements", |args, _| {
        args.o = TensorMut::new(room(bf16::ZERO, size), [TOKENS, VALUES, 128]).strides(128, 128);
    });
    all.prefill("q that is null", |args, _| args.q = raw(0, Dtype::Bf16, KEYS));
    all.prefill("q at an odd address", |args, _| args.q = raw(4097, Dtype::Bf16, KEYS));
    all.prefill("k on a device", |args, _| {
        // SAFETY: as in `raw`.
        args.k = unsafe { Tensor::from_raw(Place::Device, 4096, Dtype::Bf16, [TOKENS, KEYS, 128]) };
    });
    all.prefill("o over v", |args, _| {
        // SAFETY: as in `raw`.
        args.o = unsafe { TensorMut::from_raw(Place::Host, args.v.address() + 2, Dtype::Bf16, [TOKENS, VALUES, 128]) };
    });
    all.prefill("scale that is not a number", |args, _| args.scale = Some(f32::NAN));

    all.prefill("no bounds", |args, _| args.sequences = Sequences::packed(&[]));
    all.prefill("bounds that begin late", |args, _| args.sequences = Sequences::packed(&[1, 40, 40, 100]));
    all.prefill("bounds that decrease", |args, _| args.sequences = Sequences::packed(&[0, 40, 39, 100]));
    all.prefill("bounds that are negative", |args, _| args.sequences = Sequences::packed(&[0, 40, -40, 100]));
    all.prefill("bounds beyond the tokens", |args, _| args.sequences = Sequences::packed(&[0, 40, 101, 101]));
    all.prefill("chunk indices that differ", |args, _| {
        args.sequences.chunk_indices = Some(&[[0, 0], [1, 0]]);
    });
    all.prefill("chunk offsets that differ", |args, _| args.sequences.chunk_offsets = Some(&[0, 1, 2, 2]));
    all.prefill("chunk offsets that are too few", |args, _| args.sequences.chunk_offsets = Some(&[0, 1]));

    let mut initial = |what, change: &dyn Fn(&mut Initial<'_>)| {
        all.prefill(what, |args, _| {
            let States::Separate { initial: Some(initial), .. } = &mut args.states else { unreachable!() };
            change(initial);
        });
    };
    initial("initial states of other heads", &|initial| initial.pool = Pool::new(states, [3, 2]));
    initial("initial states in fp16", &|initial| initial.pool = Pool::new(&others[..0], [3, VALUES]));
    initial("initial states that are too few", &|initial| initial.pool = Pool::new(states, [2, VALUES]));
    initial("initial slots that are too few", &|initial| initial.slots = Some(&[0, 1]));
    initial("an initial slot outside the pool", &|initial| initial.slots = Some(&[0, 3, 1]));
    initial("an initial slot that is negative", &|initial| initial.slots = Some(&[-1, 0, 1]));
    initial("has_initial that is too short", &|initial| initial.has_initial = Some(&[true]));
    all.prefill("a final slot twice", |args, _| {
        let States::Separate { last: Some(last), .. } = &mut args.states else { unreachable!() };
        last.slots = Some(&[2, 1, 2]);
    });
    all.prefill("final states over the initial ones", |args, _| {
        let States::Separate { initial: Some(initial), last: Some(last) } = &mut args.states else { unreachable!() };
        // SAFETY: as in `raw`.
        last.pool = unsafe { PoolMut::from_raw(Place::Host, initial.pool.address(), Dtype::F32, [3, VALUES]) };
    });
    all.prefill("a slot twice in place", |args, _| {
        let pool = PoolMut::new(room(0.0_f32, STATES), [3, VALUES]);
        args.states = States::InPlace { pool, slots: Some(&[1, 1, 0]), has_initial: None };
    });
    all.prefill("slots that overlap", |args, _| {
        let pool = PoolMut::new(room(0.0_f32, STATES), [3, VALUES]).slot_stride(100);
        args.states = States::InPlace { pool, slots: None, has_initial: None };
    });
    all.prefill("checkpoints every 0 chunks", |args, _| args.checkpoints.as_mut().unwrap().every = 0);
    all.prefill("checkpoints without room", |args, _| {
        args.sequences = Sequences::packed(&[0, 100, 100, 100]);
        args.checkpoints.as_mut().unwrap().states = PoolMut::new(room(0.0_f32, 0), [0, VALUES]);
    });
    all.prefill("checkpoints in bf16", |args, _| {
        args.checkpoints.as_mut().unwrap().states = PoolMut::new(room(bf16::ZERO, STATES), [3, VALUES]);
    });

    let span = |workspace: &Workspace<'_>, skip: u64, less: u64| {
        let span = workspace.span();
        let bytes = Bytes::new(span.bytes.get() - less).unwrap();
        // SAFETY: a part of the caller's own workspace, or refused before it is touched.
        unsafe { Workspace::from_raw(Place::Host, DeviceSpan { address: span.address + skip, bytes }) }
    };
    all.prefill("a workspace that is too small", |_, workspace| *workspace = span(workspace, 0, 1));
    all.prefill("a workspace that is misaligned", |_, workspace| *workspace = span(workspace, 8, 0));
    all.prefill("a workspace over q", |args, workspace| {
        let bytes = workspace.span().bytes;
        let address = args.q.address() / 256 * 256;
        // SAFETY: refused before it is touched.
        *workspace = unsafe { Workspace::from_raw(Place::Host, DeviceSpan { address, bytes }) };
    });
    all.prefill("a workspace on a device", |_, workspace| {
        // SAFETY: refused before it is touched.
        *workspace = unsafe { Workspace::from_raw(Place::Device, workspace.span()) };
    });
    // Which of the buffers the rounded address meets first depends on where they lie.
    let filters = vec![
        (r"address \d{6,}", "address [address]"),
        (r"the workspace and \w+ overlap", "the workspace and q overlap"),
    ];
    insta::with_settings!({ filters => filters }, {
        insta::assert_snapshot!(all.sentences);
    });
}

#[test]
fn each_bad_argument_of_a_decode_step_is_one_sentence_and_nothing_is_written() {
    let mut all = Refusals { sentences: String::new() };
    all.decode("too few slots", |args| args.slots = Indices::host(&[1]));
    all.decode("a slot outside the pool", |args| args.slots = Indices::host(&[0, 3]));
    all.decode("a slot below -1", |args| args.slots = Indices::host(&[0, -2]));
    all.decode("a slot twice", |args| args.slots = Indices::host(&[1, 1]));
    all.decode("no bounds", |args| args.cu_seqlens = Indices::host(&[]));
    all.decode("bounds beyond the tokens", |args| args.cu_seqlens = Indices::host(&[0, 1, 4]));
    all.decode("bounds on a device", |args| {
        // SAFETY: refused before it is read.
        args.cu_seqlens = unsafe { Indices::device(4096, 3) };
    });
    all.decode("o with other heads", |args| args.o = TensorMut::new(room(bf16::ZERO, 384), [3, 1, 128]));
    insta::assert_snapshot!(all.sentences);
}

#[test]
fn the_workspace_depends_on_neither_tokens_nor_data() {
    let shape = Gdn::new(16, 48).unwrap();
    let device = Device::Cpu(Cpu::new(4));
    let total = workspace(&device, shape, Window::DEFAULT, Design::Fused).total();
    assert!(total.get() < 10 << 20, "{total}");
    assert_eq!(choose_window(&device, total, shape, Design::Fused), Ok(Window::MAX), "on the CPU every window fits");
    let little = Bytes::new(1000).unwrap();
    let refused = choose_window(&device, little, shape, Design::Fused).unwrap_err();
    assert_eq!(refused, Error::Budget { budget: little, smallest: total });
    assert_eq!(
        refused.to_string(),
        format!("a workspace of 1000 bytes holds no window; the smallest, of 64 tokens, needs {}", total.get())
    );
}

#[test]
fn calls_are_counted_by_route_and_refusals_too() {
    let before = terrace_kernels::path::counts();
    let mut all = Refusals { sentences: String::new() };
    all.prefill("scale", |args, _| args.scale = Some(f32::INFINITY));
    let after = terrace_kernels::path::counts();
    assert!(after.refused > before.refused);
}
