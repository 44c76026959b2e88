"""The gated delta rule under the installed allocator: its workspace is recorded and planned like any other tensor."""

from __future__ import annotations

import os


def planned() -> dict[str, int]:
    import torch

    import terrace
    from terrace import gdn
    from terrace.gdn import library, rule

    alloc = terrace.install(budget="1GiB", torch_errors=False)
    if os.environ["TERRACE_PLACE"] == "fake":  # which runs no kernels
        library.Library.prefill = lambda self, args: library.Path()
    q = torch.zeros(1, 3000, 2, 128, dtype=torch.bfloat16, device="cuda")
    v = torch.zeros(1, 3000, 6, 128, dtype=torch.bfloat16, device="cuda")
    g = torch.zeros(1, 3000, 6, device="cuda")
    for _ in range(4):
        with alloc.step(("prefill", 3000)):
            gdn.chunk_gated_delta_rule(q, q, v, g, g, output_final_state=True)
    torch.cuda.synchronize()
    stats = alloc.stats()
    workspace = library.load().workspace_bytes(library.CUDA, 2, 6) + rule.WORKSPACE_ALIGN
    asked = workspace + v.numel() * v.element_size() + 6 * 128 * 128 * 4
    names = ("arena", "steps_on_script", "hits", "replay_allocs", "plans", "overflow_peak")
    return {"asked": asked, **{name: stats[name] for name in names}}


def test_workspace_and_results_are_recorded_once_and_then_planned(child):
    found = child(planned)
    # Output, workspace and final state all live at once, each rounded up to the alignment.
    assert found["asked"] <= found["arena"] <= found["asked"] + 3 * 512
    assert found["hits"] == found["replay_allocs"] == 3 * 3
    assert (found["steps_on_script"], found["plans"], found["overflow_peak"]) == (3, 1, 0)
