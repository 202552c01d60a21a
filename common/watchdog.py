"""Signals and the watchdog: SIGINT and SIGTERM become requests; a process that hangs is ended."""

from __future__ import annotations

import ctypes
import faulthandler
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import connection

from common.errors import BadInput, Fault, peer_ended

GRACE = 10.0  # seconds from a stop request to the next boundary, after which the process ends at once
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Watchdog:
    """`signum`: the first SIGINT or SIGTERM that this rank received, or 0. `World.gather` tells the other ranks."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.signum = 0
        self.grace = 1.0  # seconds; until the ranks have met, a request ends the process almost at once
        self._next_arming = math.inf

    def feed(self) -> None:
        """Say that the run makes progress."""
        if time.monotonic() >= self._next_arming:
            self._next_arming = time.monotonic() + 1.0
            faulthandler.dump_traceback_later(self._timeout, exit=True)

    @contextmanager
    def watching(self, timeout: float) -> Iterator[None]:
        """Turn signals into requests. After `timeout` seconds without `feed`, print all stacks and exit with code 1."""
        self._timeout = timeout
        self._next_arming = 0.0
        self.feed()
        undo = ExitStack()
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        undo.callback(os.close, writer)  # ends the thread
        undo.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(writer, warn_on_full_buffer=False))
        for number in SIGNALS:
            undo.callback(signal.signal, number, signal.signal(number, lambda *_: None))
        os.register_at_fork(after_in_child=undo.close)  # a process that an environment forks is no rank
        # a main thread that waits inside a collective runs no Python signal handler, so a thread reads what came
        listener = threading.Thread(target=self._listen, args=(reader,), daemon=True)
        listener.start()
        try:
            yield
        except BaseException as error:
            if self.rank and self.signum and (isinstance(error, BadInput | Fault) or peer_ended(error)):
                raise SystemExit(128 + self.signum) from error  # rank 0 says why
            raise
        finally:
            undo.close()
            listener.join()
            self._next_arming = math.inf
            faulthandler.cancel_dump_traceback_later()

    def _listen(self, reader: int) -> None:
        """Thread: note the first signal; at a second one, or after `grace` seconds, end the process."""
        requested = math.inf  # when the first signal came
        while time.monotonic() < requested + self.grace:
            if not connection.wait([reader], 0.1 if self.signum else None):
                continue
            received = os.read(reader, 1)
            if not received:
                os.close(reader)
                return
            if received[0] not in SIGNALS:
                continue
            if not self.signum:
                self.signum = received[0]
                requested = time.monotonic()
            elif time.monotonic() > requested + 0.5:  # launchers may deliver one request twice
                break
        end_now(128 + self.signum)


def end_now(code: int) -> None:
    """End this process and its children without unwinding. Rows are flushed: nothing is lost."""
    for child in multiprocessing.active_children():
        child.kill()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # nobody reads it
            stream.flush()
    os._exit(code)


def end_with_parent(signum: int) -> None:
    """Let this process get `signum` once its parent is gone, however it ended (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signum)  # PR_SET_PDEATHSIG
