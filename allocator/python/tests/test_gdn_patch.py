"""`terrace.gdn.patch` on tiny random transformers models: what is replaced, what transformers passes, and that results stay."""

import pathlib
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from gdn_models import MODELS, cache_of, delta_nets, made, modeling  # noqa: E402
from terrace import gdn  # noqa: E402

torch.set_num_threads(1)
RULES = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")


@pytest.fixture(params=MODELS)
def model(request):
    return made(request.param, torch.bfloat16)


def logits(model, ids, **more):
    with torch.inference_mode():
        return model(ids, **more).logits


def close(a, b):
    return ((a.float() - b.float()).square().mean().sqrt() / b.float().square().mean().sqrt()).item() <= 2e-2


def test_prompts_and_decodes_give_what_they_gave_before(model):
    ids = torch.randint(64, (2, 150))
    before = logits(model, ids)
    with gdn.patch(model) as patch, torch.inference_mode():
        assert len(patch.replaced) == 2 and all(name.endswith(rule) for name, rule in zip(patch.replaced, RULES))
        whole = logits(model, ids)
        prompt = model(ids[:, :147], use_cache=True)
        steps = [model(ids[:, at : at + 1], use_cache=True, **cache_of(prompt)).logits for at in range(147, 150)]
    assert close(whole, before)
    assert close(torch.cat([prompt.logits, *steps], 1), before)
    assert torch.equal(logits(model, ids), before), "restored"


def test_what_transformers_passes_reaches_the_kernels(model, monkeypatch):
    calls = []

    def spy(name, inner):
        def called(*args, **kwargs):
            calls.append((name, args, kwargs))
            return inner(*args, **kwargs)

        return called

    for name in ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"):
        inner = getattr(gdn, name)
        spied = spy(name, inner)
        spied.__wrapped__ = inner  # its signature is what the patch goes by
        monkeypatch.setattr(gdn, name, spied)
    ids = torch.randint(64, (1, 70))
    cu = torch.tensor([0, 20, 70], dtype=torch.int32)
    with gdn.patch(model), torch.inference_mode():
        packed = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 50, "max_length_k": 50}
        model(ids, use_cache=False, position_ids=torch.cat([torch.arange(20), torch.arange(50)])[None], **packed)
        assert len(calls) == 3
        for name, (q, k, v), given in calls:
            assert name == "chunk_gated_delta_rule"
            assert q.shape == k.shape and v.shape == (1, 70, 2, 128)
            assert given["cu_seqlens"] is cu, "the same tensor for each layer, so that it is read once"
            assert given["use_qk_l2norm_in_kernel"] is True and given["output_final_state"] is False
            assert given["g"].shape == given["beta"].shape == (1, 70, 2)
        calls.clear()
        model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert [name for name, _, _ in calls] == ["chunk_gated_delta_rule"] * 3 + ["fused_recurrent_gated_delta_rule"] * 6
    assert all(given["initial_state"].shape == (1, 2, 128, 128) for _, _, given in calls[3:])


def test_a_patched_model_is_not_patched_twice_and_restoring_is_safe_to_repeat(model):
    module = modeling(model)
    theirs = [getattr(module, name) for name in RULES]
    first = gdn.patch(model)
    second = gdn.patch(model)
    assert len(first.replaced) == 2 and second.replaced == []
    second.restore()
    assert [getattr(module, name) for name in RULES] != theirs
    first.restore()
    first.restore()
    assert [getattr(module, name) for name in RULES] == theirs and first.replaced == []


def test_what_somebody_else_put_there_since_is_left(model):
    module = modeling(model)
    theirs = getattr(module, RULES[0])
    patch = gdn.patch(model)
    other = object()
    setattr(module, RULES[0], other)
    patch.restore()
    try:
        assert getattr(module, RULES[0]) is other
    finally:
        setattr(module, RULES[0], theirs)


def test_an_exception_inside_restores(model):
    module = modeling(model)
    theirs = getattr(module, RULES[0])
    with pytest.raises(KeyError), gdn.patch(model):
        raise KeyError
    assert getattr(module, RULES[0]) is theirs


def test_layers_that_hold_the_functions_themselves_are_patched_one_by_one():
    """As transformers had it before 5.x."""

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.chunk_gated_delta_rule = self.recurrent_gated_delta_rule = max

    model = torch.nn.ModuleList([Layer(), torch.nn.Linear(1, 1), Layer()])
    patch = gdn.patch(model)
    assert patch.replaced == [f"{n}.{rule}" for n in (0, 2) for rule in ("chunk_gated_delta_rule", "recurrent_gated_delta_rule")]
    q = torch.randn(1, 5, 1, 128)
    g = -torch.rand(1, 5, 1)
    o, _ = model[0].chunk_gated_delta_rule(q, q, q, g=g, beta=-g, use_qk_l2norm_in_kernel=True, some_flag_of_the_model=1)
    assert o.shape == q.shape
    patch.restore()
    assert model[0].chunk_gated_delta_rule is max


def test_a_model_without_such_layers_or_with_other_heads_is_refused_and_left_alone(model):
    with pytest.raises(ValueError, match="Linear has no gated delta net layer"):
        gdn.patch(torch.nn.Linear(1, 1))
    module = modeling(model)
    theirs = getattr(module, RULES[0])
    delta_nets(model)[0].head_v_dim = 64
    with pytest.raises(ValueError, match="head_v_dim is 64"):
        gdn.patch(model)
    assert getattr(module, RULES[0]) is theirs
