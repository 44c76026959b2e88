"""The same layer by transformers with FLA: made here with random weights, given to Terrace through a safetensors file, run by both.

transformers' classes call FLA without bounds of sequences, and FLA then tunes itself for minutes at long prompts; so they are given here, as
servers do. The convolution is torch's, unless causal_conv1d is installed.
"""

import gc
import importlib
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

# Once flash_qla can be imported, FLA dispatches to it.
os.environ["FLA_FLASH_QLA"] = "0"

# profiles/models/qwen3.6-27b.toml, as its class takes it.
LARGE = dict(
    hidden_size=5120, num_attention_heads=24, num_key_value_heads=4, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=48,
    linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4, intermediate_size=17408, vocab_size=32,
    num_hidden_layers=4, layer_types=["linear_attention"] * 3 + ["full_attention"], rms_norm_eps=1e-6,
)
# To try the script without a GPU.
SMALL = LARGE | dict(hidden_size=64, linear_num_key_heads=1, linear_num_value_heads=2, intermediate_size=96)


class Layer:
    """transformers' decoder layer with random weights, on a device."""

    def __init__(self, fields, device, dtype):
        config_class = importlib.import_module("transformers.models.qwen3_5.configuration_qwen3_5").Qwen3_5TextConfig
        self.modeling = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
        self.fields, self.device, self.dtype, self.fla_calls = fields, device, dtype, 0
        torch.manual_seed(8)
        with torch.device(device):
            self.layer = self.modeling.Qwen3_5DecoderLayer(config_class(**fields), 0).to(dtype).eval()
        for name, weight in self.layer.named_parameters():
            if name.endswith("A_log"):
                weight.uniform_(0.02, 4).log_()
            elif name.endswith("dt_bias"):
                weight.normal_().sub_(1)
            elif "norm" in name:
                weight.add_(0.1 * torch.randn_like(weight))
            elif name.endswith("conv1d.weight"):
                weight.normal_().mul_(0.5)
            else:
                weight.normal_().mul_(weight.shape[-1] ** -0.5)
        self._use_fla()

    def _use_fla(self):
        try:
            rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        except Exception as reason:  # noqa: BLE001 - it may fail in any way, and the report says how
            self.rule = f"torch's own rule ({type(reason).__name__}: {reason})"
            return
        known = ["g", "beta", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel"]
        bounds = {}

        def counted(q, k, v, **rest):
            self.fla_calls += 1
            tokens = q.shape[1]
            if tokens not in bounds:
                bounds[tokens] = torch.tensor([0, tokens], device=q.device)
            return rule(q, k, v, cu_seqlens=bounds[tokens], **{key: value for key, value in rest.items() if key in known})

        self.modeling.torch_chunk_gated_delta_rule = counted
        self.layer.linear_attn.chunk_gated_delta_rule = counted  # where older classes keep it
        self.rule = "FLA " + getattr(importlib.import_module("fla"), "__version__", "")

    def weights_bytes(self):
        return sum(weight.numel() * weight.element_size() for weight in self.layer.parameters())

    def save(self, folder):
        tensors = {f"model.layers.0.{name}": weight.contiguous() for name, weight in self.layer.state_dict().items()}
        save_file(tensors, folder / "layer.safetensors")
        config = {"architectures": ["Qwen3_5ForCausalLM"]} | self.fields
        (folder / "config.json").write_text(json.dumps(config))

    def run(self, hidden):
        return self.layer(hidden, position_embeddings=None)

    def measure(self, hidden, times):
        """Output, peak bytes of activations with the stream that goes in, and the median of seconds."""
        cuda = self.device == "cuda"
        out = self.run(hidden)
        out = out[0] if isinstance(out, tuple) else out
        kept = out[0].cpu()
        del out
        seconds = []
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        for _ in range(times):
            start = time.perf_counter()
            self.run(hidden)
            if cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        peak = torch.cuda.max_memory_allocated() - self.weights_bytes() if cuda else 0
        reserved = torch.cuda.max_memory_reserved() - self.weights_bytes() if cuda else 0
        return kept, peak, reserved, sorted(seconds)[times // 2]


def to_file(tensor, path):
    """Raw numbers, little-endian."""
    tensor.contiguous().view(torch.uint8).numpy().tofile(path)


def from_file(path, dtype, width):
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=dtype).reshape(-1, width)


def rms(a, b):
    """Of the difference, as a part of b's; a million numbers at a time."""
    off = of = 0.0
    for left, right in zip(a.flatten().split(1 << 20), b.flatten().split(1 << 20)):
        left, right = left.double(), right.double()
        off += (left - right).square().sum().item()
        of += right.square().sum().item()
    return (off / of) ** 0.5


@torch.no_grad()
def compare(binary, tokens, windows, device="cuda", small=False, times=3):
    """Rows of a table, and what was run."""
    fields = SMALL if small else LARGE
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    layer = Layer(fields, device, dtype)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        layer.save(folder)
        hidden = torch.randn(1, tokens, fields["hidden_size"], device=device, dtype=dtype)
        before = hidden[0].cpu()
        to_file(before, folder / "in")
        expected, peak, reserved, seconds = layer.measure(hidden, times)
        rule, calls = layer.rule, layer.fla_calls
        rows.append(dict(what=f"transformers, {rule}", peak=peak, reserved=reserved, seconds=seconds))
        del layer, hidden
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        first = None
        for window in windows:
            command = [
                binary, "--model", str(folder / "config.json"), "--tokens", str(tokens), "--window", str(window), "--device", device,
                "--weights", str(folder / "layer.safetensors"), "--input", str(folder / "in"), "--output", str(folder / "out"),
                "--rounds", str(times + 1), "--json",
            ]
            ran = subprocess.run(command, capture_output=True, text=True)
            if ran.returncode:
                raise SystemExit(f"{' '.join(command)}\n{ran.stderr}")
            report = json.loads(ran.stdout)
            given = from_file(folder / "out", dtype, fields["hidden_size"])
            first = given if first is None else first
            same = bool(torch.equal(given.view(torch.uint8), first.view(torch.uint8)))
            if not same or given is first:
                # Of what the layer adds to its stream, a stricter measure: the stream itself passes unchanged.
                added = [each.float() - before.float() for each in (given, expected)]
                errors = dict(rms=rms(given, expected), rms_added=rms(*added))
            rows.append(dict(
                what=f"Terrace, window {window}", peak=report["measured_peak"], reserved=report["budget"], seconds=report["prefill_seconds"],
                predicted=report["predicted_peak"], residual=report["residual"], same_bits=same, rms_windows=0.0 if same else rms(given, first), **errors,
                unpinned=report["unpinned_projections"], report=report,
            ))
    return rows, dict(tokens=tokens, rule=rule, fla_calls=calls, device=device)
