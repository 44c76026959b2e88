"""``python -m terrace``: what can be asked without a program of one's own."""

from __future__ import annotations

import argparse
import sys

from terrace import __version__, doctor


def main(arguments: list[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m terrace", description=__doc__)
    parser.add_argument("--version", action="version", version=f"terrace {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    told = "what gets in the way of the allocator here, and what to do about it"
    examine = commands.add_parser("doctor", help=told, description=told, epilog="Exit status 1 if something stands in the way.")
    examine.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    examine.add_argument("--budget", help="also see whether this budget is free, such as 20GiB or 0.9")
    given = parser.parse_args(arguments)
    try:
        return doctor.run(given.json, given.budget)
    except ValueError as wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
