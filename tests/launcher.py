"""Runs a script in float64 and, if asked, with a fault on one rank: `python launcher.py SCRIPT ...`.

Environment: LOCKSTEP_DTYPE (float32 or float64), LOCKSTEP_FAULT (KIND@RANK@COUNT: at that rank's so-manieth gather;
`write`: within the so-manieth file that it writes of checkpoints; `start`, `rows`: throughout), LOCKSTEP_NOTE (a file
that is made when a hang begins), LOCKSTEP_GRACE (seconds from a signal to the end), LOCKSTEP_FSIZE (bytes after which
a file takes no more, as on a full disk), LOCKSTEP_PAUSE (seconds at each row), LOCKSTEP_SOCKETS (no shared memory).
"""

import importlib
import os
import resource
import signal
import sys
import time

import torch

from common import checkpoint, logger, processes
from common.arguments import launch

FIRST_NETWORK = {"Agent": "actor.4.bias", "QNetwork": "head.2.bias", "Actor": "layers.4.bias"}  # and a parameter of it


def stand_still() -> None:
    open(os.environ["LOCKSTEP_NOTE"], "w").close()
    time.sleep(1000)


def after_making(network: type, change) -> None:
    init = network.__init__

    def changed(self, *args, **kwargs):
        init(self, *args, **kwargs)
        with torch.no_grad():
            change(self)

    network.__init__ = changed


def perturb(module, rank: int, after: int, kind: str) -> None:
    """Arrange for `kind` to happen on `rank` when it has gathered `after` times."""
    here, count = int(os.environ.get("RANK", 0)) == rank, 0
    gather, write_whole, networks = processes.World.gather, checkpoint.write_whole, []

    def faulty_gather(self, values):
        nonlocal count
        count += 1
        if here and count == after:
            if kind == "raise":
                raise ZeroDivisionError("a fault on purpose")
            if kind == "kill" and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "hang":
                stand_still()
            if kind == "parameter":
                with torch.no_grad():
                    dict(networks[0].named_parameters())[name][1] += 1e-7
        return gather(self, values)

    def torn(path, *args):
        nonlocal count
        count += 1
        if here and count == after:
            path.write_bytes(b"half of it")
            os.kill(os.getpid(), signal.SIGKILL)
        return write_whole(path, *args)

    if kind == "write":
        checkpoint.write_whole = torn
    else:
        processes.World.gather = faulty_gather
    if kind == "parameter":
        first, name = next(item for item in FIRST_NETWORK.items() if hasattr(module, item[0]))
        after_making(getattr(module, first), networks.append)
    if kind == "start" and here:  # as where another kind of processor rounds the first parameters otherwise
        for network in (getattr(module, name) for name in (*FIRST_NETWORK, "Critics") if hasattr(module, name)):
            after_making(network, lambda self: torch._foreach_mul_([*self.parameters()], 1 + 1e-6))
    for layer in (torch.nn.Linear, torch.nn.Conv2d) if kind == "rows" else ():
        depend_on_rows(layer)


def depend_on_rows(layer: type) -> None:
    """Change results by a millionth for each row that is given, as they may on some processor."""
    forward = layer.forward
    layer.forward = lambda self, x: forward(self, x) * (1 + 1e-6 * x.shape[0])


def main(words: list[str]) -> None:
    torch.set_default_dtype(getattr(torch, os.environ.get("LOCKSTEP_DTYPE", "float64")))
    script = importlib.import_module(words[0].removesuffix(".py"))
    sys.argv = words
    if "LOCKSTEP_FSIZE" in os.environ:
        resource.setrlimit(resource.RLIMIT_FSIZE, 2 * (int(os.environ["LOCKSTEP_FSIZE"]),))
    if "LOCKSTEP_SOCKETS" in os.environ:
        processes.share_memory = lambda *_: None
    processes.GRACE = float(os.environ.get("LOCKSTEP_GRACE", processes.GRACE))
    if "LOCKSTEP_FAULT" in os.environ:
        kind, rank, after = os.environ["LOCKSTEP_FAULT"].split("@")
        perturb(script, int(rank), int(after), kind)
    if "LOCKSTEP_PAUSE" in os.environ:  # in which others can be killed
        log, seconds = logger.Logger.log, float(os.environ["LOCKSTEP_PAUSE"])
        logger.Logger.log = lambda *args: (log(*args), time.sleep(seconds))
    launch(script.main, script.Args)


if __name__ == "__main__":
    main(sys.argv[1:])
