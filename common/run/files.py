"""Files that are whole or not there, and the run directory's lock."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from common.errors import BadInput, Fault

PATIENCE = 15.0  # seconds to wait for the end of a process that holds the run directory
CHUNK = 2**26  # bytes that are read at once, and after which a file that is written is flushed
hashing = partial(hashlib.blake2b, digest_size=16)


def write_flushed(path: Path, pieces: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Write a file and flush it to the disk, each piece from where it is -> its size in bytes, and its digest."""
    digest, size, flushed = hashing(), 0, 0
    with open(path, "wb") as file:
        for piece in pieces:
            file.write(piece)
            digest.update(piece)
            size += len(piece)
            if size - flushed >= CHUNK:  # otherwise the last flush may have gigabytes to write
                os.fsync(file.fileno())
                flushed = size
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def size_and_digest(pieces: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """The size in bytes and the digest of what the pieces hold together."""
    digest, size = hashing(), 0
    for piece in pieces:
        digest.update(piece)
        size += len(piece)
    return size, digest.hexdigest()


def digest_of(record: Mapping[str, Any]) -> str:
    """The digest of what JSON can hold."""
    return hashing(json.dumps(record).encode()).hexdigest()


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Write a file under another name, then rename it: whole or, with a `Fault` that names it, not there."""
    part = path.with_name(f"{path.name}.part")
    try:
        write_flushed(part, [content])
        os.replace(part, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise Fault(f"{path}: cannot be written ({error.strerror}).") from error


def flush_names(folder: Path) -> None:
    """Have the disk know what is in a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def locked(folder: Path) -> int:
    """Make a folder and hold its lock, which ends with the process -> the descriptor that holds it.

    Waits for a dying owner; raises `BadInput` (--run-dir) where another process keeps it. A file system that has no
    locks is taken without.
    """
    deadline = time.monotonic() + PATIENCE
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            if time.monotonic() > deadline:
                raise BadInput(
                    f"--run-dir {folder}: another process is writing there; end it, or name another."
                ) from None
            time.sleep(0.1)
            continue
        except OSError:
            return descriptor
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(folder)):
                return descriptor
        os.close(descriptor)  # its owner removed it at the end
