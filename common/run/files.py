"""Files that are whole or not there, and the lock of the run directory."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import pickle
import time
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch

from common.errors import BadInput, Fault

PATIENCE = 15.0  # seconds to wait for the end of a process that holds the run directory
CHUNK = 2**26  # bytes that are read at once, and after which a file that is written is flushed
hashing = partial(hashlib.blake2b, digest_size=16)


def size_and_digest(pieces: Iterable[bytes | memoryview], file: BinaryIO | None = None) -> tuple[int, str]:
    """The size in bytes and the digest of what the pieces hold together; `file`: where to write them."""
    digest, size, flushed = hashing(), 0, 0
    for piece in pieces:
        digest.update(piece)
        size += len(piece)
        if file is not None:
            file.write(piece)
            if size - flushed >= CHUNK:  # otherwise the last flush may have gigabytes to write
                os.fsync(file.fileno())
                flushed = size
    return size, digest.hexdigest()


def write_flushed(path: Path, pieces: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Write a file and flush it to the disk -> its size in bytes, and its digest."""
    with open(path, "wb") as file:
        found = size_and_digest(pieces, file)
        file.flush()
        os.fsync(file.fileno())
    return found


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
    """Flush the names of a folder's files to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def locked(folder: Path) -> int:
    """Make a folder and lock it -> the descriptor that holds the lock, until it is closed or the process ends.

    Waits for an owner that is ending; raises `BadInput` (--run-dir) where another process keeps the lock. On a file
    system without locks it takes none.
    """
    deadline = time.monotonic() + PATIENCE
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(folder)):
                return descriptor
        except FileNotFoundError:
            pass  # its last owner removed it at the end
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                fault = "another process is writing there; end it, or name another"
                raise BadInput(f"--run-dir {folder}: {fault}.") from None
            time.sleep(0.1)
        except OSError:  # no locks
            return descriptor
        os.close(descriptor)


def read_model(path: str) -> dict[str, Any]:
    """The content of a model.pt. Raises `BadInput` (--load-model) where it is none."""
    model, reason = None, "no model.pt"
    try:
        model = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, LookupError, pickle.UnpicklingError) as error:
        reason = getattr(error, "strerror", None) or reason
    if not isinstance(model, dict) or "args" not in model:
        raise BadInput(f"--load-model {path}: cannot be read ({reason}).")
    return model
