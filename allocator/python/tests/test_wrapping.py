"""Models whose every forward is a step."""

from __future__ import annotations


def a_module():
    import inspect

    import pytest
    import torch

    import terrace

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(64, 64)

        def forward(self, input_ids, *, scale=1.0):
            return self.layer(input_ids) * scale

    # cuBLAS asks for workspaces of 32 MiB.
    alloc = terrace.install("256MiB")
    model = Model().cuda()
    signature = inspect.signature(model.forward)
    assert terrace.wrap(model) is model
    assert inspect.signature(model.forward) == signature
    with torch.no_grad():
        for rows in (8, 8, 3, 8, 3):
            model(torch.empty(rows, 64, device="cuda"))
            model(input_ids=torch.empty(rows, 64, device="cuda"), scale=2.0)
    assert alloc.stats()["steps"] == 10
    assert alloc.plan_html(("Model", 8, 64)) and alloc.plan_html(("Model", 3, 64))
    with pytest.raises(terrace.InstallError, match="wrapped already"):
        terrace.wrap(model)
    terrace.unwrap(model)
    model(torch.empty(8, 64, device="cuda"))
    assert alloc.stats()["steps"] == 10
    with pytest.raises(terrace.InstallError, match="is not wrapped"):
        terrace.unwrap(model)
    terrace.wrap(model, key=lambda input_ids: ("rows", input_ids.shape[0]))
    model(torch.empty(8, 64, device="cuda"))
    assert alloc.plan_html(("rows", 8)) is not None
    with pytest.raises(TypeError, match="not hashable"):
        terrace.wrap(terrace.unwrap(model), key=lambda input_ids: ["rows"])(torch.empty(8, 64, device="cuda"))
    assert terrace.tag_of(model) == terrace.tag_of(Model()) != terrace.tag_of(Model().half())
    assert terrace.tag_of(model) != terrace.tag_of(model, "fla 0.6")


def generation():
    import pytest
    import torch

    transformers = pytest.importorskip("transformers")
    import terrace

    alloc = terrace.install("512MiB")
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    model = transformers.LlamaForCausalLM(config).eval().cuda()
    terrace.wrap(model)
    for _ in range(3):
        # Where no kernels run, logits are whatever the memory held: only the number of tokens is certain.
        ids = torch.zeros(1, 16, dtype=torch.long, device="cuda")
        with torch.no_grad():
            first = model(input_ids=ids, use_cache=True)
            for _ in range(4):
                model(input_ids=ids[:, :1], past_key_values=first.past_key_values, use_cache=True)
        del first
    stats = alloc.stats()
    assert stats["steps"] == 15
    assert alloc.plan_html(("LlamaForCausalLM", 1, 16)) and alloc.plan_html(("LlamaForCausalLM", 1, 1))
    return stats["hit_rate"]


def test_a_module_is_wrapped_and_unwrapped(child):
    child(a_module)


def test_a_transformer_is_prefilled_and_decoded(child):
    import conftest

    conftest.need_torch()
    import importlib.util

    import pytest

    if importlib.util.find_spec("transformers") is None:
        pytest.skip("there is no transformers in this Python")
    assert child(generation) > 0.9
