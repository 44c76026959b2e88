"""Plans every byte of an inference forward in PyTorch, and replays the plan."""

from terrace._terrace import __version__

__all__ = ["__version__"]
