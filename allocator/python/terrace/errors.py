"""What goes wrong, beside Python's own ``TypeError``, ``ValueError`` and ``MemoryError``. Every text is a sentence that says what to do."""

from terrace._terrace import TerraceError


class InstallError(TerraceError):
    """The allocator cannot be put into this process; nothing of it was."""
