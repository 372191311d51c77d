"""A result's file: all of it, or what was there before."""

import os
from pathlib import Path


class CannotWriteError(Exception):
    """A result that was found could not be written."""


def write_whole(path: Path, content: str | bytes) -> None:
    """Write beside ``path``, then take its place. Written to as they are: a device, a pipe, and a
    file in a directory where nothing new may be.

    Args:
        path: where to.
        content: text is written as UTF-8.

    Raises:
        CannotWriteError: it cannot be written; nothing is left of it.
    """
    data = content.encode() if isinstance(content, str) else content
    may_replace = path.is_file() or not path.exists()
    in_place = not (may_replace and os.access(path.parent, os.W_OK))
    part = path if in_place else path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(data)
        if not in_place:
            part.replace(path)
    except OSError as error:
        if not in_place:
            part.unlink(missing_ok=True)
        raise CannotWriteError(f"{path}: {error.strerror}") from None
