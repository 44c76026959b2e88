"""What an earlier run measured, for a run with fewer allocators: its rows and its digests, if it was the same model."""

import dataclasses
import json

import allocators

SAME = ("layers", "device", "tiny", "short")  # of a job: what another run must agree on


@dataclasses.dataclass(frozen=True)
class Earlier:
    """Jobs by name, each marked with the heading of its run, and the tiles that its kernels ran with."""

    results: dict = dataclasses.field(default_factory=dict)
    tiles: dict = dataclasses.field(default_factory=dict)

    def moved(self, tiles):
        """Kernels that were tuned otherwise than now, or of which one of the runs does not know: outputs need not be equal then."""
        return sorted(kernel for kernel in {*self.tiles, *tiles} if self.tiles.get(kernel) != tiles.get(kernel))


def read(args):
    """The jobs of `args.earlier` with allocators that are not chosen now; ValueError says what does not fit."""
    if not args.earlier:
        return Earlier()
    with open(args.earlier) as f:
        data = json.load(f)
    if not isinstance(data, dict) or not isinstance(data.get("results"), dict) or "heading" not in data:
        raise ValueError("it is not the JSON of a run of this script")
    job = {"layers": args.layers, "device": args.device, "tiny": args.tiny, "short": args.device == "cpu"}
    found = {}
    for name, result in data["results"].items():
        section, _, which = name.partition(" ")
        done = all(part.get("done") for part in result["parts"])
        if which.split(",")[0] not in set(allocators.NAMES) - set(args.allocators) or section not in args.only or not done:
            continue
        for part in result["parts"]:
            for what in SAME:
                if part["job"][what] != job[what]:
                    raise ValueError(f"its job '{name}' had {what} = {part['job'][what]}, this run has {job[what]}")
        found[name] = {**result, "earlier": result.get("earlier", data["heading"])}
    if not found:
        raise ValueError("it has no finished job of an allocator that is left out now, in the sections chosen")
    tune = data["results"].get("tune", {}).get("parts", [{}])[0]
    return Earlier(found, tune.get("tiles", {}))
