"""Signals and the watchdog: SIGINT and SIGTERM become requests; a process that reaches no boundary is ended."""

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
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection

from common.errors import explained

GRACE = 10.0  # seconds from a stop request to the next boundary, after which the process ends at once


class Watchdog:
    """`signum`: the first SIGINT or SIGTERM that this rank received, or 0. `World.gather` tells the other ranks."""

    def __init__(self, rank: int) -> None:
        self.rank, self.signum = rank, 0
        self.grace = 1.0  # until the ranks have met, a request ends the process almost at once
        self._fed, self._armed = 0.0, math.inf

    def feed(self) -> None:
        """Say that a boundary was reached."""
        self._fed = time.monotonic()
        if self._fed > self._armed + 1.0:  # in C, in case a library hangs while it holds the interpreter
            self._armed = self._fed
            faulthandler.dump_traceback_later(self._timeout + GRACE, exit=True)

    @contextmanager
    def watching(self, timeout: float) -> Iterator[None]:
        """Turn signals into requests, and end this process with code 1 after `timeout` seconds without `feed`."""
        self._timeout, self._fed, self._armed = timeout, time.monotonic(), -math.inf
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        previous = signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        handlers = {number: signal.signal(number, self._request) for number in (signal.SIGINT, signal.SIGTERM)}
        # a thread, because a main thread that waits inside a collective runs no Python signal handler
        watch = threading.Thread(target=self._watch, args=(wake_read,), daemon=True)
        watch.start()
        try:
            yield
        except BaseException as error:
            if self.rank and self.signum and explained(error):  # rank 0 says why
                raise SystemExit(128 + self.signum) from error
            raise
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(previous)
            self._armed = math.inf
            faulthandler.cancel_dump_traceback_later()
            os.close(wake_write)  # ends the thread
            watch.join()

    def _request(self, number: int, _: object = None) -> None:
        self.signum = self.signum or number

    def _watch(self, wake_read: int) -> None:
        """Thread: note the first signal; end the process at a second one, after `grace`, or after the timeout."""
        requested = None  # when the first signal came
        while True:
            deadline = self._fed + self._timeout if requested is None else requested + self.grace
            if connection.wait([wake_read], max(0.0, deadline - time.monotonic())):
                received = os.read(wake_read, 1)
                if not received:
                    os.close(wake_read)
                    return
                if received[0] in (signal.SIGINT, signal.SIGTERM):
                    self._request(received[0])
                    requested = requested or time.monotonic()
                    if time.monotonic() - requested > 0.5:  # launchers may deliver one request twice
                        end_now(128 + self.signum)
            elif requested is not None and time.monotonic() > requested + self.grace:  # which may have grown
                end_now(128 + self.signum)
            elif requested is None and time.monotonic() > self._fed + self._timeout:
                note = f"rank {self.rank}: no boundary reached for --timeout {self._timeout:g} seconds; it stands at\n"
                stacks = ["".join(traceback.format_stack(frame)) for frame in sys._current_frames().values()]
                with suppress(OSError):  # a full disk
                    print(note + "\n".join(stacks), file=sys.stderr, flush=True)  # at once: other ranks print theirs
                end_now(1)


def end_now(code: int) -> None:
    """End this process and its children without unwinding. Rows already written are flushed, so nothing is lost."""
    for child in multiprocessing.active_children():
        child.kill()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # nobody reads it
            stream.flush()
    os._exit(code)


def end_with_parent(signum: int) -> None:
    """Let this process get `signum` once its parent is gone, however that ended (Linux; elsewhere nothing)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signum)  # PR_SET_PDEATHSIG
