"""The gated delta rule on a CUDA device: values, streams, graphs, and what it waits for and allocates."""

import pathlib
import sys

import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import gdn_reference as reference  # noqa: E402
from terrace import gdn  # noqa: E402
from terrace.gdn import library, rule  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]
LIMITS = {torch.bfloat16: 6e-3, torch.float16: 6e-3}


def make(*args, **kwargs):
    return reference.make(*args, device="cuda", **kwargs)


def check(got, want, dtype=torch.bfloat16):
    for w, t in zip(want, got):
        assert reference.error(w, t) <= LIMITS[dtype]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b))


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("tokens", [1, 8, 9, 65, 300])
def test_both_functions_are_the_rule_with_states_in_the_order_asked_for(dtype, v_first, tokens):
    q, k, v, g, beta = make(2, tokens, 2, 6, dtype=dtype, unit=False, decay=0.01)
    state = reference.states(2, 6, device="cuda")
    want = reference.rule(q, k, v, g, beta, state=state, l2norm=True)
    given = state.mT.contiguous() if v_first else state
    for call in (gdn.chunk_gated_delta_rule, gdn.fused_recurrent_gated_delta_rule):
        before = given.clone()
        o, last = call(q, k, v, g=g, beta=beta, initial_state=given, output_final_state=True, use_qk_l2norm_in_kernel=True,
                       state_v_first=v_first)  # fmt: skip
        check((o, last.mT if v_first else last), want, dtype)
        assert reference.error(want[1], last if v_first else last.mT) > 0.1, "the other order would be noticed"
        assert torch.equal(given, before)


@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
def test_packed_sequences_and_views_of_one_fused_buffer(integers):
    bounds = [0, 0, 1, 65, 65, 300, 364, 364]
    q, k, v, g, beta = make(1, 364, 2, 6)
    state = reference.states(7, 6, device="cuda")
    cu = torch.tensor(bounds, dtype=integers, device="cuda")
    fused = torch.cat([t.flatten(2) for t in (q, k, v)], -1)
    views = [t.unflatten(-1, (-1, 128)) for t in fused.split([256, 256, 768], -1)]
    assert all(rule._rows(t, 16).data_ptr() == t.data_ptr() for t in views)
    got = gdn.chunk_gated_delta_rule(*views, g, beta, initial_state=state, output_final_state=True, cu_seqlens=cu)
    check(got, reference.rule(q, k, v, g, beta, state=state, cu=bounds))
    assert same(got, gdn.chunk_gated_delta_rule(q, k, v, g, beta, initial_state=state, output_final_state=True, cu_seqlens=cu))
    short = [0, 1, 1, 4, 8]
    step = [t[:, :8] for t in (q, k, v, g, beta)]
    got = gdn.fused_recurrent_gated_delta_rule(*step[:4], beta=step[4], initial_state=state[:4], output_final_state=True,
                                               cu_seqlens=torch.tensor(short, dtype=integers, device="cuda"))  # fmt: skip
    check(got, reference.rule(*step, state=state[:4], cu=short))


def test_it_runs_on_the_current_stream():
    x = make(1, 300, 2, 6)
    want = gdn.chunk_gated_delta_rule(*x, output_final_state=True)
    late = [torch.zeros_like(t) for t in x]
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # a tenth of a second: any other stream would read zeros
        for to, t in zip(late, x):
            to.copy_(t)
        got = gdn.chunk_gated_delta_rule(*late, output_final_state=True)
        assert not side.query(), "the call did not wait"
    side.synchronize()
    assert same(got, want)


def test_only_the_first_layer_waits_to_read_cu_seqlens():
    x = make(1, 300, 2, 6)
    cu = torch.tensor([0, 100, 300], device="cuda")
    want = gdn.chunk_gated_delta_rule(*x, cu_seqlens=cu)[0]
    other = cu.clone()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = gdn.chunk_gated_delta_rule(*x, cu_seqlens=cu)[0]
        given = gdn.chunk_gated_delta_rule(*x, cu_seqlens=other, cu_seqlens_cpu=torch.tensor([0, 100, 300]))[0]
        with pytest.raises(RuntimeError, match="synchroniz"):
            gdn.chunk_gated_delta_rule(*x, cu_seqlens=other)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(want, again) and torch.equal(want, given)


def captured(call):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("function", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"])
def test_a_captured_call_replays_with_other_inputs(function, packed):
    gdn.prepare(torch.bfloat16)
    tokens = 200 if function.startswith("chunk") else 4
    batch = 1 if packed else 3
    x = make(batch, tokens, 2, 6)
    state = reference.states(2 if packed else 3, 6, device="cuda")
    more = {"cu_seqlens": torch.tensor([0, tokens // 4, tokens], dtype=torch.int32, device="cuda")} if packed else {}

    def call():
        q, k, v, g, beta = x
        return getattr(gdn, function)(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, **more)

    graph, result = captured(call)
    for seed in (5, 6):
        for to, t in zip(x, make(batch, tokens, 2, 6, seed=seed)):
            to.copy_(t)
        graph.replay()
        torch.cuda.synchronize()
        assert same(result, call())


def test_a_captured_decode_step_replays_with_other_bounds():
    x = make(1, 6, 2, 6)
    state = reference.states(3, 6, device="cuda")
    cu = torch.tensor([0, 1, 2, 6], dtype=torch.int32, device="cuda")

    def call():
        q, k, v, g, beta = x
        return gdn.fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta, initial_state=state, output_final_state=True, cu_seqlens=cu)

    graph, result = captured(call)
    cu.copy_(torch.tensor([0, 3, 3, 5], dtype=torch.int32))
    graph.replay()
    torch.cuda.synchronize()
    check(result, reference.rule(*x, state=state, cu=[0, 3, 3, 5]))


def test_unknown_bounds_are_refused_in_a_capture_and_the_process_goes_on():
    x = make(1, 100, 1, 2)
    gdn.chunk_gated_delta_rule(*x)
    cu = torch.tensor([0, 40, 100], device="cuda")
    with pytest.raises(RuntimeError, match="pass cu_seqlens_cpu"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        gdn.chunk_gated_delta_rule(*x, cu_seqlens=cu)
    torch.cuda.synchronize()
    check(gdn.chunk_gated_delta_rule(*x, output_final_state=True, cu_seqlens=cu), reference.rule(*x, cu=[0, 40, 100]))


def test_nothing_is_allocated_but_results_and_a_workspace_of_one_size():
    """The library allocates nothing itself, and PyTorch's allocator is asked for the same at every length."""
    requested = "requested_bytes.all."
    expected = library.load().workspace_bytes(library.CUDA, 16, 48) + rule.WORKSPACE_ALIGN
    for tokens in (4096, 40_000):
        x = make(1, tokens, 16, 48)
        gdn.chunk_gated_delta_rule(*x, output_final_state=True)
        lost = []
        for _ in range(5):
            torch.cuda.synchronize()
            free = torch.cuda.mem_get_info()[0]
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_stats()[requested + "current"]
            o, last = gdn.chunk_gated_delta_rule(*x, output_final_state=True)
            torch.cuda.synchronize()
            lost.append(free - torch.cuda.mem_get_info()[0])
            results = sum(t.numel() * t.element_size() for t in (o, last))
            taken = torch.cuda.memory_stats()[requested + "peak"] - before - results
            assert taken == expected, f"{tokens} tokens"
            del o, last
        # Other processes come and go on the device; what a call took would be missing after each.
        assert min(lost) <= 0, f"{lost} bytes of the device"
        del x


def test_fla_gives_the_same_for_the_same_call():
    fla = pytest.importorskip("fla.ops.gated_delta_rule")
    q, k, v, g, beta = make(1, 500, 2, 6, unit=False, decay=0.02)
    state = reference.states(3, 6, device="cuda")
    cu = torch.tensor([0, 130, 131, 500], dtype=torch.int64, device="cuda")
    for v_first in (False, True):
        given = {"initial_state": state.mT.contiguous() if v_first else state, "state_v_first": v_first, "output_final_state": True,
                 "use_qk_l2norm_in_kernel": True, "cu_seqlens": cu}  # fmt: skip
        theirs = fla.chunk_gated_delta_rule(q, k, v, g, beta, **given)
        ours = gdn.chunk_gated_delta_rule(q, k, v, g, beta, **given)
        assert all(a.shape == b.shape and a.dtype == b.dtype and reference.error(a.double(), b) <= 1e-2 for a, b in zip(theirs, ours))
        theirs = fla.fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta, **given)
        ours = gdn.fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta, **given)
        assert all(a.shape == b.shape and reference.error(a.double(), b) <= 1e-2 for a, b in zip(theirs, ours))
