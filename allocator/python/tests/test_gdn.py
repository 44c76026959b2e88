"""The gated delta rule on the CPU: values against float64, what is accepted, and what is refused with which words."""

import importlib.util
import inspect
import pathlib
import sys

import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import gdn_reference as reference  # noqa: E402
from terrace import gdn  # noqa: E402
from terrace.gdn import bounds, library, rule  # noqa: E402

CPU = torch.device("cpu")
torch.set_num_threads(1)  # small tensors: a second thread only waits
LIMITS = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 1e-5}


def check(got, want, dtype, what=""):
    """Outputs within the rounding of their type; states, which are fp32 everywhere, far closer."""
    o, last = (reference.error(w, t) for w, t in zip(want, got))
    assert o <= LIMITS[dtype], f"o {what}"
    assert last <= LIMITS[dtype], f"state {what}"
    assert got[0].dtype == dtype and got[1].dtype == torch.float32


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("batch, tokens, key_heads, value_heads", [(1, 1, 1, 1), (2, 65, 2, 6), (1, 140, 1, 1)])
@pytest.mark.parametrize("l2norm", [False, True])
def test_a_prefill_is_the_rule(dtype, batch, tokens, key_heads, value_heads, l2norm):
    x = reference.make(batch, tokens, key_heads, value_heads, dtype, unit=not l2norm)
    state = reference.states(batch, value_heads)
    got = gdn.chunk_gated_delta_rule(*x, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=l2norm)
    check(got, reference.rule(*x, state=state, l2norm=l2norm), dtype)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("tokens", [1, 4, 8, 9, 70])
def test_a_decode_step_is_the_rule_at_any_length(dtype, tokens):
    q, k, v, g, beta = reference.make(3, tokens, 2, 4, dtype)
    state = reference.states(3, 4)
    got = gdn.fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta, initial_state=state, output_final_state=True)
    check(got, reference.rule(q, k, v, g, beta, state=state), dtype)


@pytest.mark.parametrize("tokens", [3, 100])
@pytest.mark.parametrize("step", ["chunk", "recurrent"])
def test_states_are_k_first_unless_asked_for_v_first(step, tokens):
    # A state that is remembered: strong gates would hide a wrong one.
    q, k, v, g, beta = reference.make(2, tokens, 2, 4, decay=0.002)
    state = reference.states(2, 4)
    call = {"chunk": gdn.chunk_gated_delta_rule, "recurrent": gdn.fused_recurrent_gated_delta_rule}[step]
    given = {"g": g, "beta": beta, "output_final_state": True}
    o, last = call(q, k, v, initial_state=state, **given)
    o_v, last_v = call(q, k, v, initial_state=state.mT.contiguous(), state_v_first=True, **given)
    want = reference.rule(q, k, v, g, beta, state=state)
    check((o, last), want, torch.bfloat16)
    assert torch.equal(o, o_v) and torch.equal(last, last_v.mT)
    # A square state of the wrong order is no error anywhere: it has to be far off here, or the test proves nothing.
    wrong_o, wrong = call(q, k, v, initial_state=state.mT.contiguous(), **given)
    assert reference.error(want[0], wrong_o) > 0.1 and reference.error(want[1], wrong) > 0.1
    assert reference.error(want[1], last_v) > 0.1


def test_a_final_state_goes_into_the_next_call_in_either_order():
    x = reference.make(1, 128, 2, 4)
    want = reference.rule(*x)
    for v_first in (False, True):
        order = {"state_v_first": v_first, "output_final_state": True}
        first, middle = gdn.chunk_gated_delta_rule(*(t[:, :64] for t in x), **order)
        second, last = gdn.chunk_gated_delta_rule(*(t[:, 64:] for t in x), initial_state=middle, **order)
        whole, whole_last = gdn.chunk_gated_delta_rule(*x, **order)
        assert torch.equal(torch.cat([first, second], 1), whole) and torch.equal(last, whole_last)
        check((whole, last.mT if v_first else last), want, torch.bfloat16)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("v_first", [False, True])
def test_an_initial_state_of_any_type_and_strides_is_read_and_not_written(kind, v_first):
    x = reference.make(3, 66, 1, 2)
    wide = torch.zeros(6, 3, 128, 160, dtype=kind)
    state = wide[::2, 1:, :, 16:144]
    state.copy_(reference.states(3, 2))
    before = wide.clone()
    k_first = state.mT if v_first else state
    for call in (gdn.chunk_gated_delta_rule, gdn.fused_recurrent_gated_delta_rule):
        y = x if call is gdn.chunk_gated_delta_rule else tuple(t[:, :2] for t in x)
        q, k, v, g, beta = y
        got = call(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, state_v_first=v_first)
        check((got[0], got[1].mT if v_first else got[1]), reference.rule(*y, state=k_first), torch.bfloat16)
    assert torch.equal(before, wide)


def test_without_an_initial_state_it_starts_from_zeros_and_a_state_comes_only_if_asked_for():
    x = reference.make(2, 66, 1, 2)
    for tokens, call in ((66, gdn.chunk_gated_delta_rule), (2, gdn.fused_recurrent_gated_delta_rule)):
        q, k, v, g, beta = (t[:, :tokens] for t in x)
        o, none = call(q, k, v, g=g, beta=beta)
        assert none is None
        assert reference.error(reference.rule(q, k, v, g, beta)[0], o) <= 6e-3


CU = [0, 0, 1, 65, 65, 300, 364, 364]


@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
@pytest.mark.parametrize("on_host", [False, True])
def test_packed_sequences_each_start_from_their_own_state(integers, on_host):
    x = reference.make(1, CU[-1], 2, 4)
    state = reference.states(len(CU) - 1, 4)
    cu = torch.tensor(CU, dtype=integers)
    host = {"cu_seqlens_cpu": torch.tensor(CU)} if on_host else {}
    got = gdn.chunk_gated_delta_rule(*x, initial_state=state, output_final_state=True, cu_seqlens=cu, **host)
    check(got, reference.rule(*x, state=state, cu=CU), torch.bfloat16)
    for n in range(len(CU) - 1):
        if CU[n] == CU[n + 1]:
            assert torch.equal(got[1][n], state[n]), f"the state of the empty sequence {n}"
        else:
            alone = [t[:, CU[n] : CU[n + 1]] for t in x]
            o, last = gdn.chunk_gated_delta_rule(*alone, initial_state=state[n : n + 1], output_final_state=True)
            assert torch.equal(o, got[0][:, CU[n] : CU[n + 1]]) and torch.equal(last[0], got[1][n]), f"sequence {n} alone"


@pytest.mark.parametrize("cu", [[0, 1, 2, 3], [0, 4, 4, 7], [0, 8, 9, 17], [0, 2, 40]])
def test_packed_sequences_are_decoded_whatever_the_longest(cu):
    q, k, v, g, beta = reference.make(1, cu[-1], 2, 4)
    state = reference.states(len(cu) - 1, 4)
    got = gdn.fused_recurrent_gated_delta_rule(
        q, k, v, g, beta=beta, initial_state=state, output_final_state=True, cu_seqlens=torch.tensor(cu)
    )
    check(got, reference.rule(q, k, v, g, beta, state=state, cu=cu), torch.bfloat16)


def test_no_tokens_leave_the_state_as_it_is():
    x = [t[:, :0] for t in reference.make(2, 1, 1, 2)]
    state = reference.states(2, 2)
    o, last = gdn.chunk_gated_delta_rule(*x, initial_state=state, output_final_state=True)
    assert o.shape == (2, 0, 2, 128) and torch.equal(last, state)


def test_repeated_key_heads_give_what_shared_ones_do():
    q, k, v, g, beta = reference.make(2, 130, 2, 6)
    shared = gdn.chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)
    for repeat in (lambda t: t.repeat_interleave(3, 2), lambda t: t.unsqueeze(3).expand(-1, -1, -1, 3, -1).flatten(2, 3)):
        each = gdn.chunk_gated_delta_rule(repeat(q), repeat(k), v, g, beta, output_final_state=True)
        assert all(torch.equal(a, b) for a, b in zip(shared, each))


def test_views_of_one_fused_buffer_are_read_where_they_lie():
    q, k, v, g, beta = reference.make(2, 70, 2, 6)
    fused = torch.cat([t.flatten(2) for t in (q, k, v)], -1)
    views = [t.unflatten(-1, (-1, 128)) for t in fused.split([256, 256, 768], -1)]
    assert all(rule._rows(t, 16).data_ptr() == t.data_ptr() for t in views)
    got = gdn.chunk_gated_delta_rule(*views, g, beta, output_final_state=True)
    assert all(torch.equal(a, b) for a, b in zip(got, gdn.chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)))


def test_what_cannot_be_read_where_it_lies_is_copied():
    q, k, v, g, beta = reference.make(2, 70, 2, 6)
    want = gdn.chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)
    channels_first = lambda t: t.flatten(2).mT.contiguous().mT.unflatten(-1, (-1, 128))  # noqa: E731
    shifted = lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)  # noqa: E731
    batch_apart = lambda t: torch.cat([t, t], 1)[:, : t.shape[1]]  # noqa: E731
    for name, lay in (("channels first", channels_first), ("misaligned", shifted), ("batch apart", batch_apart)):
        got = gdn.chunk_gated_delta_rule(lay(q), lay(k), lay(v), lay(g.unsqueeze(-1)).squeeze(-1) if name == "batch apart" else g, beta,
                                         output_final_state=True)  # fmt: skip
        assert all(torch.equal(a, b) for a, b in zip(want, got)), name
    # One batch row of channels first is what transformers passes: its elements alone are apart.
    row = [channels_first(t[:1]) for t in (q, k, v)]
    assert all(t.flatten(0, 1).stride(2) == 70 for t in row)
    got = gdn.chunk_gated_delta_rule(*row, g[:1], beta[:1])[0]
    assert torch.equal(got, gdn.chunk_gated_delta_rule(q[:1], k[:1], v[:1], g[:1], beta[:1])[0])
    one = q[:, :, :1]
    got = gdn.chunk_gated_delta_rule(one.expand(-1, -1, 6, -1), one.expand(-1, -1, 6, -1), v, g, beta)[0]
    assert torch.equal(got, gdn.chunk_gated_delta_rule(one, one, v, g, beta)[0]), "heads that share their memory"


def test_gates_and_beta_are_computed_here_if_asked_for():
    q, k, v, g, _ = reference.make(1, 90, 2, 4)
    raw, logits = torch.randn(1, 90, 4), torch.randn(1, 90, 4)
    a_log, dt_bias = torch.randn(4), torch.randn(4)
    want_g = -a_log.exp() * torch.nn.functional.softplus(raw + dt_bias)
    want = reference.rule(q, k, v, want_g, logits.sigmoid())
    gate = {"use_gate_in_kernel": True, "A_log": a_log, "dt_bias": dt_bias, "use_beta_sigmoid_in_kernel": True}
    got = gdn.chunk_gated_delta_rule(q, k, v, raw, logits, output_final_state=True, **gate)
    check(got, want, torch.bfloat16)
    got = gdn.fused_recurrent_gated_delta_rule(q, k, v, raw, beta=logits, output_final_state=True, **gate)
    check(got, want, torch.bfloat16)
    none = gdn.fused_recurrent_gated_delta_rule(q, k, v, output_final_state=True)
    check(none, reference.rule(q, k, v, torch.zeros_like(g), torch.ones_like(g)), torch.bfloat16)


def test_scale_is_that_of_the_head_unless_given():
    x = reference.make(1, 30, 1, 2)
    plain, double = (gdn.chunk_gated_delta_rule(*x, scale=s)[0] for s in (None, 2 * 128**-0.5))
    assert torch.equal(2 * plain, double)


def test_chunk_indices_are_compared_with_the_sequences():
    x = reference.make(1, CU[-1], 1, 1)
    cu = torch.tensor(CU)
    rows = [(n, c) for n in range(len(CU) - 1) for c in range(-(-(CU[n + 1] - CU[n]) // 64))]
    right = torch.tensor(rows, dtype=torch.int32)
    want = gdn.chunk_gated_delta_rule(*x, cu_seqlens=cu)[0]
    assert torch.equal(want, gdn.chunk_gated_delta_rule(*x, cu_seqlens=cu, chunk_indices=right)[0])
    wrong = right.clone()
    wrong[1, 0] += 1  # as tables are shifted where an empty sequence was forgotten
    with pytest.raises(ValueError, match="chunk_indices"):
        gdn.chunk_gated_delta_rule(*x, cu_seqlens=cu, chunk_indices=wrong)
    with pytest.raises(ValueError, match=r"chunk_indices is of shape \(6, 2\); expected \(7, 2\)"):
        gdn.chunk_gated_delta_rule(*x, cu_seqlens=cu, chunk_indices=right[1:])


def test_cu_seqlens_is_read_once_for_each_tensor_and_again_once_written(monkeypatch):
    reads = []
    monkeypatch.setattr(bounds, "_int64", lambda t: reads.append(1) or t.to(torch.int64).clone())
    cu = torch.tensor([0, 3, 10])
    assert [bounds.packed(cu, None).host.tolist() for _ in range(48)] == [[0, 3, 10]] * 48 and len(reads) == 1
    cu[1] = 4
    assert bounds.packed(cu, None).host.tolist() == [0, 4, 10] and len(reads) == 2
    assert bounds.packed(cu.clone(), None).host.tolist() == [0, 4, 10] and len(reads) == 3
    with torch.inference_mode():
        made = torch.tensor([0, 5])
    assert [bounds.packed(made, None).host.tolist() for _ in range(3)] == [[0, 5]] * 3 and len(reads) == 4
    known = len(bounds._known)
    del cu, made
    assert len(bounds._known) < known, "what is remembered keeps no tensor alive"


def test_a_capture_never_waits_and_keeps_nothing(monkeypatch):
    monkeypatch.setattr(bounds, "_steps", {})
    cu = torch.tensor([0, 3, 10])
    bounds.packed(cu, None)
    monkeypatch.setattr(bounds, "capturing", lambda device: True)
    assert bounds.packed(cu, None).sequences == 2
    unknown = cu.clone()
    with pytest.raises(RuntimeError, match="pass cu_seqlens_cpu"):
        bounds.packed(unknown, None)
    assert bounds.packed(unknown, torch.tensor([0, 3, 10])).sequences == 2
    assert bounds.steps(4, 2, CPU).tolist() == [0, 2, 4, 6] and not bounds._steps
    monkeypatch.setattr(bounds, "capturing", lambda device: False)
    kept = bounds.steps(4, 2, CPU)
    assert kept.tolist() == [0, 2, 4, 6] and bounds.steps(4, 2, CPU) is kept


def test_the_workspace_is_the_allocators_and_does_not_grow_with_the_prompt(monkeypatch):
    asked = []
    empty = torch.empty
    monkeypatch.setattr(rule.torch, "empty", lambda *a, **k: asked.append((a[0], k)) or empty(*a, **k))
    for tokens in (64, 1000):
        gdn.chunk_gated_delta_rule(*reference.make(1, tokens, 1, 2))
    workspaces = [size for size, given in asked if given["dtype"] == torch.uint8]
    assert len(workspaces) == 2 and workspaces[0] == workspaces[1] > 0


@pytest.mark.parametrize(
    "change, error, words",
    [
        ({"q": lambda t: t[..., :64]}, ValueError, "heads of 128"),
        ({"q": lambda t: t[0]}, ValueError, "expected \\[B, T, heads, 128\\]"),
        ({"k": lambda t: t[:, :-1]}, ValueError, "k is of shape \\(2, 9, 2, 128\\)"),
        ({"k": lambda t: t[:, :, :1]}, ValueError, "k is of shape"),
        ({"q": lambda t: t.repeat(1, 1, 2, 1), "k": lambda t: t.repeat(1, 1, 2, 1)}, ValueError, "expected a multiple"),
        ({"g": lambda t: t[..., :1]}, ValueError, "g is of shape"),
        ({"beta": lambda t: t.double()}, TypeError, "beta is torch.float64"),
        ({"v": lambda t: t.half()}, TypeError, "v is torch.float16 and q is torch.bfloat16"),
        ({"q": lambda t: t.int(), "k": lambda t: t.int(), "v": lambda t: t.int()}, TypeError, "q is torch.int32"),
        ({"k": lambda t: t.to("meta")}, ValueError, "k is on meta"),
        ({"initial_state": lambda _: torch.zeros(1, 6, 128, 128)}, ValueError, "a state for each of the 2 sequences"),
        ({"initial_state": lambda _: torch.zeros(2, 6, 128, 64)}, ValueError, "initial_state is torch.float32 of shape"),
        ({"cu_seqlens": lambda _: torch.tensor([0, 20])}, ValueError, "packed in one"),
        ({"scale": lambda _: 0.0}, ValueError, "scale is 0"),
        ({"scale": lambda _: float("nan")}, ValueError, "scale"),
        ({"chunk_size": lambda _: 128}, ValueError, "chunk_size"),
        ({"cp_context": lambda _: object()}, NotImplementedError, "cp_context is not served"),
        ({"allow_neg_eigval": lambda _: True}, NotImplementedError, "allow_neg_eigval is not served"),
        ({"use_gate_in_kernel": lambda _: True}, ValueError, "A_log is None"),
        ({"head_first": lambda _: True}, TypeError, "no argument 'head_first'"),
        ({"v": lambda t: t.float().requires_grad_().bfloat16()}, RuntimeError, "computes no gradients"),
    ],
)
def test_what_is_not_served_is_refused_by_name(change, error, words):
    names = ("q", "k", "v", "g", "beta")
    args = dict(zip(names, reference.make(2, 10, 2, 6)))
    args |= {name: make(args.get(name)) for name, make in change.items()}
    if "k" in change and args["q"].shape[2] == 4:
        args["v"], args["g"], args["beta"] = (t[:, :, :5] for t in (args["v"], args["g"], args["beta"]))
    with pytest.raises(error, match=words):
        gdn.chunk_gated_delta_rule(**args)


@pytest.mark.parametrize(
    "cu, words",
    [([0, 11], "11"), ([1, 10], "0"), ([0, 7, 3, 10], "cu_seqlens"), ([[0, 10]], "sequences \\+ 1"), ([], "sequences \\+ 1")],
)
def test_bounds_that_do_not_fit_the_tokens_are_refused(cu, words):
    x = reference.make(1, 10, 1, 1)
    with pytest.raises(ValueError, match=words):
        gdn.chunk_gated_delta_rule(*x, cu_seqlens=torch.tensor(cu, dtype=torch.int64))


@pytest.mark.parametrize("tokens", [70, 12, 6])
def test_tokens_after_the_last_sequence_give_zeros(tokens):
    q, k, v, g, beta = reference.make(1, tokens, 1, 1)
    cu = torch.tensor([0, 2, 4])
    for call in (gdn.chunk_gated_delta_rule, gdn.fused_recurrent_gated_delta_rule):
        o = call(q, k, v, g=g, beta=beta, cu_seqlens=cu)[0]
        assert reference.error(reference.rule(q, k, v, g, beta, cu=[0, 2, 4])[0][:, :4], o[:, :4]) <= 6e-3
        assert (o[:, 4:] == 0).all()


def test_gradients_are_refused_only_while_they_are_computed():
    q, k, v, g, beta = reference.make(1, 10, 1, 1)
    v.requires_grad_()
    with torch.no_grad():
        assert gdn.chunk_gated_delta_rule(q, k, v, g, beta)[0].requires_grad is False
    with pytest.raises(RuntimeError, match="inference_mode"):
        gdn.fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta)


def test_the_old_name_of_v_first_still_works_and_says_so():
    x = reference.make(1, 10, 1, 1)
    with pytest.warns(DeprecationWarning, match="state_v_first"):
        _, last = gdn.chunk_gated_delta_rule(*x, output_final_state=True, transpose_state_layout=True)
    assert torch.equal(last, gdn.chunk_gated_delta_rule(*x, output_final_state=True, state_v_first=True)[1])


# fla-core 0.6.0, fla/ops/gated_delta_rule/{chunk,fused_recurrent}.py: names in order.
PREFILL = (
    "q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_beta_sigmoid_in_kernel allow_neg_eigval "
    "state_v_first cu_seqlens cu_seqlens_cpu chunk_indices cp_context kwargs"
)
DECODE = (
    "q k v g gk gv beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_gate_in_kernel A_log dt_bias "
    "use_beta_sigmoid_in_kernel allow_neg_eigval state_v_first cu_seqlens kwargs"
)


@pytest.mark.parametrize("function, names", [("chunk_gated_delta_rule", PREFILL), ("fused_recurrent_gated_delta_rule", DECODE)])
def test_signatures_are_flas(function, names):
    ours = inspect.signature(getattr(gdn, function)).parameters
    assert list(ours) == names.split()
    if importlib.util.find_spec("fla") is None:
        return
    theirs = inspect.signature(getattr(importlib.import_module("fla.ops.gated_delta_rule"), function)).parameters
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [(p.name, p.kind, p.default) for p in theirs.values()]


def test_a_library_of_another_interface_is_refused(monkeypatch):
    monkeypatch.setattr(library, "VERSION", (7, 3))
    with pytest.raises(ImportError, match="terrace.gdn needs 7.3"):
        library.Library(library.load().path)


def test_structs_are_as_large_as_the_library_says():
    """The library refuses a size that is smaller than its own struct, and bytes beyond it that are not 0."""
    for args, call in ((library.PrefillArgs(), "prefill"), (library.DecodeArgs(), "decode")):
        args.device.kind = 77
        with pytest.raises(gdn.GdnArgumentError, match="device.kind is 77"):
            getattr(library.load(), call)(args)


@pytest.mark.skipif(importlib.util.find_spec("torch._dynamo") is None, reason="this torch has no compiler")
def test_a_compiled_function_calls_it_outside_of_the_graph():
    x = reference.make(1, 70, 1, 2)
    compiled = torch.compile(lambda *args: gdn.chunk_gated_delta_rule(*args)[0] * 2, backend="eager")
    assert torch.equal(compiled(*x), 2 * gdn.chunk_gated_delta_rule(*x)[0])
