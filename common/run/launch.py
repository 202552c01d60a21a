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

from common.errors import BadInput, Fault, peer_ended
from common.run.arguments import RunArgs, parse
from common.watchdog import end_now


def launch(main: Callable[[Any], None], args_type: type[RunArgs]) -> None:
    """Run `main` with the arguments of the command line, then exit: 0 done, 2 bad input, 1 a fault, 128 + signal.

    torchrun ends all ranks after the first to end. So ranks sleep before they end with what rank 0 says too.
    """
    rank = int(os.environ.get("RANK", 0))
    nowhere = open(os.devnull, "w")
    sys.stdout = sys.stdout or nowhere  # None if closed
    sys.stderr = sys.stderr or nowhere
    code = 0
    patience = 5  # seconds that rank 0 may need to say what happened
    try:
        with redirect_stdout(nowhere if rank else sys.stdout), redirect_stderr(nowhere if rank else sys.stderr):
            args = parse(args_type)
        patience += 10 if args.track else 0  # and to end wandb's run before
        gc.freeze()  # what the imports made stays, so it need not be walked at each collection
        main(args)
        if "RANK" not in os.environ:
            return  # otherwise no finalisation, in which a thread of torch's that calls Python aborts, if rarely
    except (BadInput, Fault) as error:
        code = 2 if isinstance(error, BadInput) else 1
        time.sleep(patience if rank else 0)
        print(f"error: {f'rank {rank}: ' if rank else ''}{error}", file=sys.stderr, flush=True)
    except SystemExit as error:  # tyro's, or the end after a signal
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr, flush=True)
        time.sleep(patience if rank and code == 2 else 0)
    except KeyboardInterrupt:
        code = 130
    except BaseException as error:
        code = 1
        if peer_ended(error):
            print(f"rank {rank}: stopped, because another rank ended.", file=sys.stderr, flush=True)
            # torchrun names the first rank to end as the cause: let that be the other, which may sleep too
            time.sleep(patience + 10)
        else:
            traceback.print_exc()
    end_now(code)
