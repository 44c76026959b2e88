"""`terrace.gdn.patch(model, window=..)` on tiny random models in fp32: results beside transformers' own, and what is refused. What it takes
is in test_gdn_peak."""

import copy
import pathlib
import sys
import warnings

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from gdn_models import MODELS, cache_of, delta_nets, made, modeling  # noqa: E402
from terrace import gdn  # noqa: E402

torch.set_num_threads(1)
WINDOW = 64
CLOSE = 1e-5
"""Of the largest value. Reordered sums in fp32 differ by 5e-6 at most here; a state that is lost, by 1e-2 or more."""


@pytest.fixture(params=MODELS)
def model(request):
    drawn = made(request.param, torch.float32)
    with torch.no_grad():  # larger than they are drawn, or no layer would matter much beside the residual
        for p in drawn.parameters():
            p.mul_(4 if p.dim() > 1 else 1)
    return drawn


@pytest.fixture
def dense():
    return made("qwen3_5", torch.float32)


def tokens(*shape):
    return torch.randint(64, shape, generator=torch.Generator().manual_seed(5))


def run(model, ids, pieces=None, **more):
    """Logits of all tokens, which come in `pieces` with one cache, and the cache's tensors; without `pieces` there is no cache."""
    mask, at, logits, cache = more.pop("mask", None), 0, [], {}
    with torch.inference_mode():
        for piece in pieces or [ids.shape[1]]:
            seen = None if mask is None else mask[:, : at + piece]
            out = model(ids[:, at : at + piece], attention_mask=seen, use_cache=pieces is not None, **cache, **more)
            cache = {} if pieces is None else cache_of(out)
            logits.append(out.logits)
            at += piece
    return torch.cat(logits, 1), [state for kept in cache.values() for layer in kept.layers for state in tensors(layer)]


def tensors(layer):
    """A cache's keys and values, or convolution's and rule's states."""
    if getattr(layer, "keys", None) is not None:
        return [layer.keys, layer.values]
    return [layer.conv_states[0], layer.recurrent_states[0]]


def distance(a, b):
    """The largest difference, of the largest value."""
    return ((a - b).abs().max() / b.abs().max()).item()


def check(model, ids, pieces=None, **more):
    """With windows as without, and as transformers has it; logits and states."""
    before, states_before = run(model, ids, pieces, **more)
    with gdn.patch(model, window=WINDOW), warnings.catch_warnings():
        warnings.filterwarnings("error", "a forward runs")
        now, states = run(model, ids, pieces, **more)
    keep = slice(None) if more.get("mask") is None else more["mask"].bool()
    assert distance(now[keep], before[keep]) <= CLOSE
    assert len(states) == len(states_before) == (0 if pieces is None else 8)
    for state, expected in zip(states, states_before):
        assert state.dtype == expected.dtype and state.shape == expected.shape
        assert distance(state, expected) <= CLOSE


def sizes_of(model, monkeypatch):
    """The list that will hold the number of tokens of each call of the prefill's and the decode's rule."""
    sizes = []

    def counting(inner):
        def counted(q, *args, **kwargs):
            sizes.append(q.shape[1])
            return inner(q, *args, **kwargs)

        counted.__wrapped__ = inner  # its signature is what the patch goes by
        return counted

    for name in ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"):
        monkeypatch.setattr(gdn, name, counting(getattr(gdn, name)))
    return sizes


@pytest.mark.parametrize("length", [300, 256, 2 * WINDOW + 1, WINDOW + 2])
def test_a_prompt_without_a_cache(model, length):
    check(model, tokens(1, length))


@pytest.mark.parametrize("length", [300, 256, 2 * WINDOW + 1, WINDOW + 2])
def test_a_prompt_and_its_cache(model, length):
    check(model, tokens(1, length), [length])


def test_a_prompt_in_two_pieces_and_then_decodes(model):
    check(model, tokens(1, 304), [150, 150, 1, 1, 1, 1])


def test_a_batch_with_padding_on_the_left_longer_than_a_window(model):
    ids, mask = tokens(2, 230), torch.ones(2, 230, dtype=torch.int64)
    mask[1, : WINDOW + 9] = 0
    check(model, ids, mask=mask)
    check(model, ids, [150, 78, 1, 1], mask=mask)


def test_generating_gives_the_same_tokens(dense):
    ids = tokens(2, 150)
    how = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "num_beams": 2}
    expected = dense.generate(ids, **how)
    with gdn.patch(dense, window=WINDOW):
        assert torch.equal(dense.generate(ids, **how), expected)


def test_windows_are_as_long_as_asked_and_a_last_token_goes_with_the_one_before(dense, monkeypatch):
    sizes = sizes_of(dense, monkeypatch)
    with gdn.patch(dense, window=WINDOW):
        for length, expected in ((200, [64, 64, 64, 8]), (129, [64, 65]), (128, [64, 64]), (65, [65]), (66, [64, 2]), (1, [1])):
            sizes.clear()
            run(dense, tokens(1, length), [length])
            assert sizes == expected * 3, length


def test_each_token_of_norms_mlps_and_experts_is_computed_once_and_in_windows(model):
    seen = {}

    def look(name, inner):
        def looking(self, first, *more):
            seen.setdefault(name, []).append(first.shape[0 if first.dim() < 3 else 1])
            return inner(self, first, *more)

        return looking

    with pytest.MonkeyPatch.context() as monkeypatch:
        for kind in {type(m) for m in model.modules() if type(m).__name__.endswith(("MLP", "Experts", "RMSNorm"))}:
            monkeypatch.setattr(kind, "forward", look(kind.__name__, kind.forward))
        with gdn.patch(model, window=WINDOW):
            run(model, tokens(1, 150))
    assert len(seen) == (3 if hasattr(model.config, "num_experts") else 2)
    for name, sizes in seen.items():
        assert sizes == [64, 64, 22] * (9 + 2 if name.endswith("RMSNorm") else 4), name


@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_next"])
def test_a_sparse_models_router_logits_are_there_for_all_tokens(name):
    model, ids = made(name, torch.float32), tokens(2, 150)
    with torch.inference_mode():
        before = model(ids, output_router_logits=True, use_cache=False).router_logits
        with gdn.patch(model, window=WINDOW):
            now = model(ids, output_router_logits=True, use_cache=False).router_logits
    assert [r.shape for r in now] == [r.shape for r in before] == [(300, 2)] * 4
    assert all(distance(a, b) <= CLOSE for a, b in zip(now, before))


def test_hidden_states_are_recorded_as_before(dense):
    ids = tokens(1, 150)
    with torch.inference_mode():
        before = dense(ids, output_hidden_states=True).hidden_states
        with gdn.patch(dense, window=WINDOW):
            now = dense(ids, output_hidden_states=True).hidden_states
    assert len(now) == len(before) == 5
    assert all(distance(a, b) <= CLOSE for a, b in zip(now, before))


@pytest.mark.parametrize("what", ["update_conv_state", "update_recurrent_state"])
@pytest.mark.parametrize("pieces", [None, [150]])
def test_a_state_that_is_lost_between_windows_would_be_noticed(model, monkeypatch, what, pieces):
    """What the other tests compare is far from equal where a window restarts one of the two."""
    from transformers.cache_utils import LinearAttentionLayer

    ids = tokens(1, 150)
    before, _ = run(model, ids, pieces)
    inner = getattr(LinearAttentionLayer, what)

    def forgetting(self, states, *args, **kwargs):
        returned = inner(self, states, *args, **kwargs)
        kept = self.conv_states if what == "update_conv_state" else self.recurrent_states
        kept[0].zero_()
        return returned

    monkeypatch.setattr(LinearAttentionLayer, what, forgetting)
    with gdn.patch(model, window=WINDOW):
        now, _ = run(model, ids, pieces)
    assert distance(now[:, :WINDOW], before[:, :WINDOW]) <= CLOSE
    assert distance(now, before) >= 1e3 * CLOSE


def test_short_prompts_and_decodes_are_the_same_bits_as_without_windows(model):
    ids = tokens(1, 40)
    with gdn.patch(model):
        expected, states_expected = run(model, ids, [38, 1, 1])
    with gdn.patch(model, window=WINDOW):
        now, states = run(model, ids, [38, 1, 1])
    assert torch.equal(now, expected)
    assert all(torch.equal(a, b) for a, b in zip(states, states_expected))


def test_hooks_see_whole_forwards(model):
    """Of which transformers records its outputs, and accelerate moves weights."""
    seen, ids = [], tokens(1, 150)
    for name, module in model.named_modules():
        if name.endswith(("linear_attn", "mlp", "norm")):
            module.register_forward_hook(lambda _, given, out: seen.append(out.shape[:2]))
    run(model, ids)
    expected = list(seen)
    with gdn.patch(model, window=WINDOW):
        seen.clear()
        run(model, ids)
    gated = [shape for shape in expected if shape[1] == 128]  # the norm inside of a Gated DeltaNet layer, [tokens * heads, 128]
    assert [shape for shape in seen if shape[1] != 128] == [shape for shape in expected if shape[1] != 128]
    assert len(gated) == 3 and len([shape for shape in seen if shape[1] == 128]) == 3 * 3


@pytest.mark.parametrize("window", [0, -64, 100, 64.0, "64", True])
def test_a_window_that_is_no_multiple_of_64_is_refused_and_nothing_replaced(dense, window):
    theirs = modeling(dense).torch_chunk_gated_delta_rule
    with pytest.raises(ValueError, match="pass a positive multiple of 64 tokens"):
        gdn.patch(dense, window=window)
    untouched(dense)
    assert modeling(dense).torch_chunk_gated_delta_rule is theirs


def test_layers_that_are_not_known_to_continue_are_refused(dense, monkeypatch):
    layer = delta_nets(dense)[1]
    kind = type(layer)
    monkeypatch.setattr(layer, "__class__", type(kind.__name__, (kind,), {"__module__": "transformers.models.other.modeling_other"}))
    monkeypatch.setitem(sys.modules, "transformers.models.other.modeling_other", modeling(dense))
    with pytest.raises(ValueError, match=r"layers\.1\.linear_attn is a Qwen3_5GatedDeltaNet, which is not known to continue"):
        gdn.patch(dense, window=WINDOW)
    monkeypatch.undo()
    monkeypatch.setattr("transformers.__version__", "5.2.0")
    with pytest.raises(ValueError, match=r"need transformers 5\.17 or newer, and 5\.2\.0 is installed"):
        gdn.patch(dense, window=WINDOW)
    untouched(dense)


def untouched(model):
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]


def test_restoring_leaves_no_trace(model):
    ids = tokens(1, 150)
    before, _ = run(model, ids)
    patch = gdn.patch(model, window=WINDOW)
    replaced = [name for name, module in model.named_modules() if "forward" in vars(module)]
    assert sorted(patch.replaced[2:]) == sorted(f"{name}.forward" for name in replaced)
    assert sum(name.endswith("linear_attn") for name in replaced) == 3
    assert sum(name.endswith("norm") for name in replaced) == 4 * 2 + 1 + 2
    wide = [name for name in replaced if name.endswith(("mlp", "experts", "shared_expert"))]
    assert len(wide) == (8 if hasattr(model.config, "num_experts") else 4)
    assert not [name for name in replaced if name.endswith(("self_attn", "gate", "linear_attn.norm"))]
    patch.restore()
    assert patch.replaced == []
    untouched(model)
    assert torch.equal(run(model, ids)[0], before)


def test_a_forward_that_an_instance_had_of_its_own_is_called_and_put_back(dense):
    """As accelerate's hooks are."""
    norm = dense.model.norm
    seen, inner = [], norm.forward

    def own(x):
        seen.append(x.shape[1])
        return inner(x)

    norm.forward = own
    with gdn.patch(dense, window=WINDOW):
        run(dense, tokens(1, 150))
    assert seen == [64, 64, 22] and norm.forward is own


def test_windows_come_to_a_patched_model_and_are_of_one_size(dense):
    with gdn.patch(dense) as first, gdn.patch(dense, window=WINDOW) as second:
        assert len(first.replaced) == 2 and len(second.replaced) == 3 + 9 + 2 + 4
        assert gdn.patch(dense, window=WINDOW).replaced == []
        with pytest.raises(ValueError, match=r"layers\.0\.linear_attn runs in windows of 64 tokens already"):
            gdn.patch(dense, window=128)
    untouched(dense)


def test_a_copy_of_a_patched_model_runs_its_own_weights(dense):
    ids = tokens(1, 150)
    with gdn.patch(dense, window=WINDOW):
        copied = copy.deepcopy(dense)
        expected = run(copied, ids)[0]
        with torch.no_grad():
            for p in dense.parameters():
                p.zero_()
        assert torch.equal(run(copied, ids)[0], expected) and expected.abs().max() > 0


def test_packed_sequences_run_without_windows_as_before_and_say_so_once(dense, monkeypatch):
    ids = tokens(1, 150)
    cu = torch.tensor([0, 50, 150], dtype=torch.int32)
    packed = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 100, "max_length_k": 100}
    packed["position_ids"] = torch.cat([torch.arange(50), torch.arange(100)])[None]
    with gdn.patch(dense):
        before, _ = run(dense, ids, **packed)
    sizes = sizes_of(dense, monkeypatch)
    with gdn.patch(dense, window=WINDOW):
        with pytest.warns(UserWarning, match="without windows, with more memory: it has cu_seq_lens_q") as said:
            now, _ = run(dense, ids, **packed)
            run(dense, ids, **packed)
        assert len([one for one in said if "without windows" in str(one.message)]) == 1
    assert sizes == [150] * 6
    assert distance(now, before) <= CLOSE


class Wrapped:
    """A cache as a server might have it: it answers as transformers' does, and keeps its layers to itself."""

    def __init__(self, inner):
        self.__inner = inner

    def __getattr__(self, name):
        if name == "layers":
            raise AttributeError(name)
        return getattr(self.__inner, name)


def test_a_cache_that_records_the_past_or_is_not_known_goes_without_windows(dense, monkeypatch):
    layer, hidden = delta_nets(dense)[0], torch.randn(1, 150, 64)
    recording, renamed, wrapped = (transformers.DynamicCache(config=dense.config) for _ in range(3))
    recording.layers[0].activate_past_recording()
    newer = hasattr(recording, "get_conv_state")  # before, a layer looked at its cache's layers itself
    name, other = ("cache", "cache_params") if newer else ("cache_params", "cache")
    cases = [(recording, name, "its cache records the past"), (renamed, other, f"it has {other}, which is not what these layers call")]
    if newer:
        cases.append((Wrapped(wrapped), name, "its cache, a Wrapped, holds no states"))
    sizes = sizes_of(dense, monkeypatch)
    with gdn.patch(dense, window=WINDOW), torch.inference_mode():
        expected = layer(hidden)
        for cache, name, why in cases:
            sizes.clear()
            with pytest.warns(UserWarning, match=why):
                assert distance(layer(hidden, **{name: cache}), expected) <= CLOSE
            assert sizes == [150]
    assert recording.layers[0].conv_states[0].shape[-1] == 150
