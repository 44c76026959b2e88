"""A model of Qwen3.5-27B's geometry with few layers and random weights, and the steps of the two workloads of the recorded traces.

Three of four layers are Gated DeltaNet, the fourth is full attention, as in the whole model. Weights are drawn on the device with one
seed, so that every process has the same.
"""

import dataclasses
import inspect

import torch

MIXED = [4128, 4128, 1000, 16384, 4128, 7777, 16384, 30000, 1000, 4128, 30000, 7777]
TURNS = [9000, 3000, 5000, 4128, 4128]
CHUNK = 4128
DECODES = 8
PERIOD = 4  # layers, the last of which is full attention
# The same shape of workload, with prompts that a CPU gets through.
SHORT_MIXED = [70, 70, 20, 130, 70, 100, 130, 200, 20, 70, 200, 100]
SHORT_TURNS, SHORT_CHUNK, SHORT_DECODES = [150, 50, 80, 70, 70], 70, 2


@dataclasses.dataclass(frozen=True)
class Step:
    """One forward: its phase, its tokens, and how many are in the cache before it; 0 begins a conversation with an empty one."""

    phase: str
    tokens: int
    past: int = 0

    @property
    def key(self):
        """What tells forwards apart that ask for different memory. Attention's mask and repeated keys are as long as the context, so it
        is in there, rounded up to a power of two: under one key sizes then differ by less than a factor of two."""
        return (self.phase, self.tokens, 1 << (self.past + self.tokens - 1).bit_length())


def mixed(short):
    """Prefills of mixed length, each with a cache of its own that goes with the step."""
    return [Step("prefill", tokens) for tokens in (SHORT_MIXED if short else MIXED)]


def chat(short):
    """Five turns on one growing cache: chunks of the prompt, then one token at a time."""
    turns, chunk, decodes = (SHORT_TURNS, SHORT_CHUNK, SHORT_DECODES) if short else (TURNS, CHUNK, DECODES)
    steps, past = [], 0
    for turn in turns:
        lengths = [min(chunk, turn - at) for at in range(0, turn, chunk)]
        for phase, tokens in [*(("prefill", n) for n in lengths), *[("decode", 1)] * decodes]:
            steps.append(Step(phase, tokens, past))
            past += tokens
    return steps


WORKLOADS = {"mixed": mixed, "chat": chat}


def config(layers, tiny):
    from transformers import Qwen3_5TextConfig

    kinds = ["full_attention" if (n + 1) % PERIOD == 0 else "linear_attention" for n in range(layers)]
    sizes = dict(hidden_size=5120, intermediate_size=17408, num_attention_heads=24, num_key_value_heads=4, head_dim=256,
                 linear_num_key_heads=16, linear_num_value_heads=48, vocab_size=248320)  # fmt: skip
    if tiny:
        sizes = dict(hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
                     linear_num_key_heads=1, linear_num_value_heads=3, vocab_size=512)  # fmt: skip
    return Qwen3_5TextConfig(**sizes, num_hidden_layers=layers, layer_types=kinds, max_position_embeddings=262144)


class Model:
    """The transformer and its head. `forward` is what a server does in a step."""

    def __init__(self, layers, device, tiny, seed=7):
        from transformers import DynamicCache, Qwen3_5ForCausalLM

        self.config, self.device, self.layers = config(layers, tiny), device, layers
        torch.manual_seed(seed)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device(device):
                self.causal = Qwen3_5ForCausalLM(self.config).eval()
        finally:
            torch.set_default_dtype(before)
        self._cache = DynamicCache
        forward = inspect.signature(type(self.causal.model).forward).parameters
        # transformers 5.24 renamed it; earlier ones swallow the new name.
        self._cache_name = "cache" if "cache" in forward else "past_key_values"

    def weights(self):
        """Bytes of all weights and buffers."""
        kept = [*self.causal.parameters(), *self.causal.buffers()]
        return sum(t.numel() * t.element_size() for t in kept)

    def new_cache(self):
        return self._cache(config=self.config)

    def inputs(self, steps, seed=11):
        """Random tokens for each step of a workload, on the device; decode steps have none: they take what came out before."""
        gen = torch.Generator().manual_seed(seed)
        vocabulary = self.config.vocab_size
        ids = [torch.randint(vocabulary, (1, s.tokens), generator=gen) if s.phase == "prefill" else None for s in steps]
        return [None if t is None else t.to(self.device) for t in ids]

    def forward(self, ids, cache):
        """Hidden states of all tokens [1, T, hidden], and logits of the last one [1, 1, vocabulary]."""
        out = self.causal.model(input_ids=ids, use_cache=True, **{self._cache_name: cache})
        hidden = out.last_hidden_state
        return hidden, self.causal.lm_head(hidden[:, -1:])

    def parts(self):
        """[(kind, module)]: what a forward's peak is attributed to."""
        kinds = [("Gated DeltaNet", "linear_attn"), ("attention", "self_attn"), ("MLP", "mlp")]
        return [(kind, getattr(layer, name)) for layer in self.causal.model.layers for kind, name in kinds if hasattr(layer, name)]
