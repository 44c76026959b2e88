"""The implementations beside ours, each behind one call on `reference.Inputs`, with what their interfaces trap one in.

`load` never skips in silence: what cannot be imported, or fails on a small case, is reported with its reason. All of them get q and k normalised,
the state V-first in float32, beta in float32, and no copy of the state is timed. FLA gets cu_seqlens always, as a server's call does, and on
the host too, which saves a synchronisation (without them it tunes itself anew for minutes at long prompts); FlashQLA gets a single sequence
without, which is its cheaper path. Tables derived from cu_seqlens are cached by FLA and FlashQLA on the tensor's identity, so they are warm.
"""

import importlib
import importlib.metadata
import os

import torch

import reference

# Once flash_qla can be imported, FLA dispatches to it; without this FLA's column would show FlashQLA.
os.environ["FLA_FLASH_QLA"] = "0"


def _fla():
    rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule

    def prepare(x):
        cu = dict(cu_seqlens=x.bounds.int64, cu_seqlens_cpu=x.bounds.host)
        q, k, v, g, beta = (t[None] for t in (x.q, x.k, x.v, x.g, x.beta))

        def call():
            o, ht = rule(q, k, v, g, beta, scale=x.scale, initial_state=x.h0, output_final_state=True, state_v_first=True, **cu)
            return o[0], ht

        return call

    return prepare


def _flash_qla():
    rule = importlib.import_module("flash_qla").chunk_gated_delta_rule

    def prepare(x):
        # int32, as it makes them itself for a single sequence: another type compiles every kernel anew.
        cu = dict(cu_seqlens=x.bounds.int32) if len(x.cu) > 2 else {}
        q, k, v, g, beta = (t[None] for t in (x.q, x.k, x.v, x.g, x.beta))

        def call():
            o, ht = rule(q, k, v, g, beta, scale=x.scale, initial_state=x.h0, output_final_state=True, state_v_first=True, **cu)
            return o[0], ht

        return call

    return prepare


def _flashinfer():
    rule = importlib.import_module("flashinfer.gdn_prefill").chunk_gated_delta_rule

    def prepare(x):
        alpha = x.g.exp()  # its `g` is the decay itself, not the logarithm; made outside of the timed call

        def call():
            return rule(x.q, x.k, x.v, alpha, x.beta, scale=x.scale, initial_state=x.h0, output_final_state=True,
                        cu_seqlens=x.bounds.int64)

        return call

    return prepare


# name: (distribution, loader)
PREFILL = {
    "FLA": ("fla-core", _fla),
    "FlashQLA": ("flash-qla", _flash_qla),
    "FlashInfer": ("flashinfer-python", _flashinfer),
}


def reason(e):
    """The first line of an error's text, short enough for a table."""
    return f"{type(e).__name__}: {e}".splitlines()[0][:160]


def load(wanted, required, key_heads, value_heads):
    """{name: prepare} of those that run on a small case, {name: version}, and {name: reason} of the rest."""
    ready, versions, missing = {}, {}, {}
    for name, (distribution, loader) in PREFILL.items():
        if name not in wanted:
            missing[name] = "not asked for"
            continue
        try:
            prepare = loader()
            o, ht = prepare(reference.make([128], key_heads, value_heads, seed=3))()
            if not (torch.isfinite(o).all() and torch.isfinite(ht).all()):
                raise ArithmeticError("its result on 128 tokens is not finite")
            torch.cuda.synchronize()
            ready[name], versions[name] = prepare, importlib.metadata.version(distribution)
        except Exception as e:
            missing[name] = reason(e)
    for name, why in missing.items():
        print(f"{name}: not run: {why}", flush=True)
        if name in required:
            raise SystemExit(f"{name} is required (--require {name}) and does not run: {why}")
    return ready, versions, missing
