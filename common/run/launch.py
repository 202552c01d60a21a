"""The end of a process: which exceptions end a run how, exit codes, and that nobody is left behind."""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from typing import Any

from common.errors import BadInput, Fault, out_of_memory, peer_ended
from common.run.arguments import RunArgs, parse
from common.watchdog import end_now


def launch(main: Callable[[Any], None], args_type: type[RunArgs]) -> None:
    """Run `main` with the arguments of the command line, then exit: 0 done, 2 bad input, 1 a fault, 128 + signal.

    Only rank 0 prints what is wrong with the arguments; a traceback comes from the rank that failed.
    """
    rank = int(os.environ.get("RANK", 0))
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed
            setattr(sys, name, open(os.devnull, "w"))
    try:
        with ExitStack() as stack:
            if rank != 0:
                nowhere = stack.enter_context(open(os.devnull, "w"))
                stack.enter_context(redirect_stdout(nowhere))
                stack.enter_context(redirect_stderr(nowhere))
            try:
                args = parse(args_type)
            except BrokenPipeError:  # of `--help | head`
                sys.stdout = open(os.devnull, "w")  # what the old one still holds is for nobody
                raise SystemExit(0) from None
        gc.freeze()  # what the imports made stays: not walking it at each collection starts a tenth of a second earlier
        main(args)
        if "RANK" not in os.environ:
            return
        code, agreed = 0, ""  # and no finalisation, in which a thread of torch's that calls Python aborts, if rarely
    except (BadInput, Fault) as error:  # mostly raised alike by all ranks: one of them says it
        code, agreed = 2 if isinstance(error, BadInput) else 1, f"rank {rank}: {error}"
        if rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
    except SystemExit as error:  # tyro's, or the end after a signal
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        agreed = f"rank {rank}: ended with code {code}"
    except BaseException as error:
        code, agreed = 130 if isinstance(error, KeyboardInterrupt) else 1, ""
        if out_of_memory(error):
            reason = " ".join(str(error).split())
            print(f"error: rank {rank} is out of memory ({reason}); lower the sizes.", file=sys.stderr, flush=True)
        elif peer_ended(error):
            print(f"rank {rank}: stopped, because another rank ended.", file=sys.stderr, flush=True)
            time.sleep(5)  # torchrun calls the first rank to end the cause: leave that to the other
        elif code == 1:
            traceback.print_exc()
    if agreed and code in (1, 2) and rank != 0:
        time.sleep(3)  # torchrun ends all ranks after the first to end: leave that to rank 0, which says why
        print(f"error: {agreed}", file=sys.stderr, flush=True)  # still here: this rank is alone with it
    end_now(code)
