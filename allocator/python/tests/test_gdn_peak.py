"""What a model takes whose layers run in windows of tokens, counted in the tensors that operators make, and on a device."""

import pathlib
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from gdn_models import delta_nets, made  # noqa: E402
from terrace import gdn  # noqa: E402

torch.set_num_threads(1)
WINDOW = 64


def tokens(*shape):
    return torch.randint(64, shape, generator=torch.Generator().manual_seed(5))


class Live(TorchDispatchMode):
    """Bytes of the tensors that operators made and that are still there, and the most there ever were; what was there before is not counted."""

    def __init__(self):
        super().__init__()
        self.storages, self.peak = {}, 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        made = op(*args, **(kwargs or {}))
        self.storages = {ref: size for ref, size in self.storages.items() if not ref.expired()}
        for t in tree_leaves(made):
            if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in known:
                self.storages[StorageWeakRef(t.untyped_storage())] = t.untyped_storage().nbytes()
        self.peak = max(self.peak, sum(self.storages.values()))
        return made


def peak(call):
    """The most bytes alive at the end of an operator of `call`, beyond what was there before."""
    call()  # the first one loads
    with Live() as live:
        call()
    return live.peak


@torch.inference_mode()
def test_a_layer_takes_its_output_and_one_window():
    layer = delta_nets(made("qwen3_5", torch.float32))[0]
    model = torch.nn.ModuleList([layer])
    hidden = {n: torch.randn(1, n, 64) for n in (WINDOW, 32 * WINDOW, 64 * WINDOW)}
    with gdn.patch(model):
        window, without = (peak(lambda n=n: layer(hidden[n])) for n in (WINDOW, 32 * WINDOW))
    with gdn.patch(model, window=WINDOW):
        once, twice = (peak(lambda n=n: layer(hidden[n])) for n in (32 * WINDOW, 64 * WINDOW))
    output = hidden[32 * WINDOW].nbytes
    assert twice - once == output, "twice the tokens are twice the output, and nothing else"
    states = 4 * (2 * 128 * 128 + 4 * 512)  # the rule's and the convolution's, as they were before a window and after it
    assert once <= output + window + 2 * states
    assert without >= 4 * 32 * WINDOW * (512 + 256), "transformers' layer has its projections for all tokens"
    assert once < without / 4


@torch.inference_mode()
def test_a_decoder_takes_tensors_of_the_hidden_size_for_all_tokens_and_nothing_wider():
    model = made("qwen3_5", torch.float32, layer_types=["linear_attention"] * 4, intermediate_size=512).model
    ids = {n: tokens(1, n) for n in (32 * WINDOW, 64 * WINDOW)}

    def grown():
        once, twice = (peak(lambda n=n: model(ids[n], use_cache=False)) for n in ids)
        return (twice - once) / (32 * WINDOW)

    with gdn.patch(model):
        without = grown()
    with gdn.patch(model, window=WINDOW):
        within = grown()
    # For each token: the embeddings, a layer's input, its residual, its normed input and a part's output; and cosine, sine and position.
    rotary = 2 * 4 * int(32 * model.config.rope_parameters.get("partial_rotary_factor", 1)) + 8
    assert within <= 4 * 64 * 5 + rotary
    assert without >= within + 4 * 512, "the MLP has a row of its inner size for each token"


@pytest.mark.gpu
@torch.inference_mode()
def test_on_a_device_a_prompt_takes_half_the_memory_at_most(cuda):
    model = made("qwen3_5", torch.bfloat16, layer_types=["linear_attention"] * 4).cuda()
    ids = tokens(1, 60_000).cuda()

    def measured():
        model(ids, use_cache=False, logits_to_keep=1)  # the first one loads
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = model(ids, use_cache=False, logits_to_keep=70)
        return out.logits.float(), torch.cuda.max_memory_allocated() - before

    with gdn.patch(model):
        expected, without = measured()
    with gdn.patch(model, window=256):
        logits, within = measured()
    assert ((logits - expected).square().mean().sqrt() / expected.square().mean().sqrt()).item() <= 2e-2
    assert within < without / 2, f"{within} bytes in windows, {without} without"
