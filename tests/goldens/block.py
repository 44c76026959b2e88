"""Makes the goldens of tests/it/block.rs: one Gated DeltaNet layer of transformers' own classes, at small widths.

Each file holds the layer's weights in bf16 under the names of a checkpoint, the stream that goes in and what comes out for a prefill
and for decode steps after it, all computed in fp32 from the rounded weights, and in its metadata the config.json.

    python tests/goldens/block.py tests/goldens        # needs torch, transformers, safetensors
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from transformers import DynamicCache
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer

PREFILL, DECODE, HIDDEN = 150, 5, 64
COMMON = dict(
    hidden_size=HIDDEN,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_conv_kernel_dim=4,
    intermediate_size=96,
    vocab_size=32,
    num_hidden_layers=4,
    layer_types=["linear_attention"] * 3 + ["full_attention"],
    rms_norm_eps=1e-5,
)
# Qwen3-Next's dense feed-forward is what it has where num_experts is 0.
CASES = {
    "qwen3.5": (
        "Qwen3_5ForCausalLM", Qwen3_5TextConfig, Qwen3_5DecoderLayer, "model.language_model",
        dict(linear_num_key_heads=1, linear_num_value_heads=2),
    ),
    "qwen3-next": (
        "Qwen3NextForCausalLM", Qwen3NextConfig, Qwen3NextDecoderLayer, "model",
        dict(linear_num_key_heads=2, linear_num_value_heads=4, num_experts=0),
    ),
}
LAYER = 2


def weights(layer: torch.nn.Module) -> None:
    """Such that every weight matters: norms off one, decays from slow to fast, gates on both sides of a half."""
    for name, weight in layer.named_parameters():
        if name.endswith("A_log"):
            value = torch.empty_like(weight).uniform_(0.02, 4).log()
        elif name.endswith("dt_bias"):
            value = torch.randn_like(weight) - 1
        elif "norm" in name:
            value = weight + 0.2 * torch.randn_like(weight)
        elif name.endswith("conv1d.weight"):
            value = 0.5 * torch.randn_like(weight)
        else:
            value = torch.randn_like(weight) / weight.shape[-1] ** 0.5
        weight.copy_(value.bfloat16().float())


def golden(to: Path, name: str) -> None:
    architecture, config_class, layer_class, prefix, own = CASES[name]
    fields = COMMON | own
    config = config_class(**fields)
    torch.manual_seed(8)
    layer = layer_class(config, LAYER).float().eval()
    weights(layer)
    stream = torch.randn(1, PREFILL + DECODE, HIDDEN)
    cache = DynamicCache(config=config)

    def run(hidden):
        return layer(hidden, position_embeddings=None, past_key_values=cache)

    out = [run(stream[:, :PREFILL])] + [run(stream[:, at : at + 1]) for at in range(PREFILL, PREFILL + DECODE)]
    tensors = {f"{prefix}.layers.{LAYER}.{key}": value.bfloat16() for key, value in layer.state_dict().items()}
    tensors |= {"golden.input": stream[0], "golden.output": torch.cat(out, 1)[0]}
    about = {
        "config": json.dumps({"architectures": [architecture]} | fields),
        "layer": str(LAYER),
        "prefill": str(PREFILL),
        "made_with": f"torch {torch.__version__}, transformers {transformers.__version__}",
    }
    save_file({key: value.contiguous() for key, value in tensors.items()}, to / f"block-{name}.safetensors", about)


if __name__ == "__main__":
    with torch.no_grad():
        for case in CASES:
            golden(Path(sys.argv[1]), case)
