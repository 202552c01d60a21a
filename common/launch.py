"""From the command line to `main`, and the end of a process: what it prints, and its exit code."""

from __future__ import annotations

import gc
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

from common.arguments import RunArgs, parse
from common.processes import BadInput, Stopped, end_now, end_with_parent

PATIENCE = 5.0  # seconds that rank 0 may need to say what happened
# of errors of a collective or the store whose other end is gone
PEER_ENDED = ("closed by peer", "reset by peer", "Broken pipe", "another rank has ended", "got 0 bytes")


def launch(main: Callable[[Any], None], args_type: type[RunArgs]) -> None:
    """Run `main` with the command line's flags. Exit codes: 0 done, 2 bad input, 1 a fault, 128 + signal.

    torchrun ends all ranks after the first to end, so ranks sleep before they end with what rank 0 says too.
    """
    rank = int(os.environ.get("RANK", 0))
    nowhere = open(os.devnull, "w")
    code = 0
    try:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            end_with_parent()  # no rank outlives a killed torchrun
            address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
            socket.create_connection(address).close()  # refused if it was killed before
        with redirect_stdout(nowhere if rank else sys.stdout), redirect_stderr(nowhere if rank else sys.stderr):
            args = parse(args_type)
        gc.freeze()  # what the imports made stays, so it need not be walked at each collection
        try:
            main(args)
        except SystemExit as error:  # an environment's is no end of the run
            if not isinstance(error, Stopped):
                raise RuntimeError(f"sys.exit({error.code}) was called") from error
            raise
        if "RANK" not in os.environ:
            return
    except BadInput as error:
        code = 2
        time.sleep(PATIENCE if rank else 0)
        print(f"error: {f'rank {rank}: ' if rank else ''}{error}", file=sys.stderr)
    except SystemExit as error:  # tyro's, or the end after a signal
        code = error.code
        time.sleep(PATIENCE if rank and code == 2 else 0)
    except KeyboardInterrupt:
        code = 130
    except BaseException as error:
        code = 1
        if isinstance(error, RuntimeError) and any(sign in str(error) for sign in PEER_ENDED):
            print(f"rank {rank}: stopped, because another rank ended.", file=sys.stderr, flush=True)
            time.sleep(2 * PATIENCE)  # torchrun names the first rank to end as the cause
        else:
            traceback.print_exc()
    end_now(code)
