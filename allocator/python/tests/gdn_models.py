"""Tiny random models of the architectures that `terrace.gdn.patch` knows."""

import sys

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
MODELS = {
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {}),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", EXPERTS),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", EXPERTS),
}


def made(name, dtype, **sizes):
    """The same weights at each call."""
    config, causal, more = MODELS[name]
    if not hasattr(transformers, causal):
        pytest.skip(f"transformers {transformers.__version__} has no {causal}")
    torch.manual_seed(3)
    return getattr(transformers, causal)(getattr(transformers, config)(**{**SIZES, **more, **sizes})).eval().to(dtype)


def delta_nets(model):
    """The Gated DeltaNet layers, in order."""
    return [module for module in model.modules() if type(module).__name__.endswith("GatedDeltaNet")]


def modeling(model):
    """The module whose names those layers look up."""
    return sys.modules[type(delta_nets(model)[0]).__module__]


def cache_of(output):
    """The cache that a forward returned, by the name that the next one takes it under: transformers 5.24 renamed it."""
    name = "cache" if hasattr(output, "cache") else "past_key_values"
    return {name: getattr(output, name)}
