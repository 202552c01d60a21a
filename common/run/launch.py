"""The end of a process: what it prints, its exit code, and that it leaves no other process behind."""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

from common.errors import BadInput, Fault, out_of_memory, peer_ended
from common.run.arguments import RunArgs, parse
from common.watchdog import end_now


def launch(main: Callable[[Any], None], args_type: type[RunArgs]) -> None:
    """Run `main` with the arguments of the command line, then exit: 0 done, 2 bad input, 1 a fault, 128 + signal.

    Only rank 0 prints what is wrong with the arguments; a traceback comes from the rank that failed.
    """
    rank = int(os.environ.get("RANK", 0))
    nowhere = open(os.devnull, "w")
    sys.stdout, sys.stderr = sys.stdout or nowhere, sys.stderr or nowhere  # None if closed
    message = ""  # what all ranks say alike: rank 0 says it, and another only if it is left alone with it
    try:
        with redirect_stdout(nowhere if rank else sys.stdout), redirect_stderr(nowhere if rank else sys.stderr):
            try:
                args = parse(args_type)
            except BrokenPipeError:  # of `--help | head`
                raise SystemExit(0) from None
        gc.freeze()  # what the imports made stays: not walking it at each collection starts a tenth of a second earlier
        main(args)
        if "RANK" not in os.environ:
            return
        code = 0  # and no finalisation, in which a thread of torch's that calls Python aborts, if rarely
    except (BadInput, Fault) as error:
        code, message = 2 if isinstance(error, BadInput) else 1, f"rank {rank}: {error}"
        if rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
    except SystemExit as error:  # tyro's, or the end after a signal
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        message = f"rank {rank}: ended with code {code}"
    except BaseException as error:
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        if out_of_memory(error):
            reason = " ".join(str(error).split())
            print(f"error: rank {rank} is out of memory ({reason}); lower the sizes.", file=sys.stderr, flush=True)
        elif peer_ended(error):
            print(f"rank {rank}: stopped, because another rank ended.", file=sys.stderr, flush=True)
            time.sleep(5)  # torchrun names the first rank to end as the cause: let that be the other
        elif code == 1:
            traceback.print_exc()
    if message and code in (1, 2) and rank != 0:
        time.sleep(3)  # torchrun ends all ranks after the first to end: let that be rank 0, which says why
        print(f"error: {message}", file=sys.stderr, flush=True)
    end_now(code)
