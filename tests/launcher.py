"""Runs a script in float64 and, if asked, with a fault on one rank: `python launcher.py SCRIPT ...`.

Environment: LOCKSTEP_DTYPE (float32 or float64), LOCKSTEP_FAULT (KIND@RANK@COUNT: at that rank's so-manieth gather;
`write`: within the so-manieth file that it writes of checkpoints; `rows`: everywhere),
LOCKSTEP_NOTE (a file that is made when a hang begins), LOCKSTEP_GRACE (seconds from a signal to the end),
LOCKSTEP_FSIZE (bytes after which a file takes no more, as on a full disk), LOCKSTEP_COMPILER (what runs graphs).
"""

import importlib
import os
import resource
import signal
import sys
import time

import torch

from common import distributed, watchdog
from common.run import checkpoint, logger
from common.run.launch import launch

FIRST_NETWORK = {"Agent": "actor.bias", "QNetwork": "head.2.bias", "Actor": "layers.4.bias"}  # and a parameter of it
NETWORKS = (*FIRST_NETWORK, "Critics")


def stand_still() -> None:
    open(os.environ["LOCKSTEP_NOTE"], "w").close()
    time.sleep(1000)


def perturb(module, rank: int, after: int, kind: str) -> None:
    """Arrange for `kind` to happen on `rank` when it has gathered `after` times."""
    here = int(os.environ.get("RANK", 0)) == rank
    gather, count = distributed.World.gather, 0

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

    if kind != "write":
        distributed.World.gather = faulty_gather
    elif here:
        save = checkpoint.save

        def torn(path, value):
            nonlocal count
            count += 1
            if count == after:
                path.write_bytes(b"half of it")
                os.kill(os.getpid(), signal.SIGKILL)
            return save(path, value)

        checkpoint.save = torn
    networks = []
    if kind == "parameter":
        found = [c for c in FIRST_NETWORK if hasattr(module, c)]
        network, name = getattr(module, found[0]), FIRST_NETWORK[found[0]]
        init = network.__init__

        def keep(self, *args, **kwargs):
            init(self, *args, **kwargs)
            networks.append(self)

        network.__init__ = keep
    if kind == "start" and here:  # as where another kind of processor rounds the first parameters otherwise
        for network in (getattr(module, name) for name in NETWORKS if hasattr(module, name)):

            def rounded(self, *args, init=network.__init__, **kwargs):
                init(self, *args, **kwargs)
                with torch.no_grad():
                    for parameter in self.parameters():
                        parameter *= 1 + 1e-6

            network.__init__ = rounded
    if kind == "rows":  # a layer's result for one row depends on how many there are, as it may on some processor
        depend_on_rows()


def depend_on_rows() -> None:
    """Change every layer's results by a millionth for each row that it is given, and so what acts in its place."""

    def changed(forward):
        return lambda layer, x: forward(layer, x) * (1 + 1e-6 * x.shape[0])

    for layer in (torch.nn.Linear, torch.nn.Conv2d):
        layer.forward = changed(layer.forward)


def main(words: list[str]) -> None:
    torch.set_default_dtype(getattr(torch, os.environ.get("LOCKSTEP_DTYPE", "float64")))
    script = importlib.import_module(words[0].removesuffix(".py"))
    sys.argv = words
    if "LOCKSTEP_FSIZE" in os.environ:
        resource.setrlimit(resource.RLIMIT_FSIZE, 2 * (int(os.environ["LOCKSTEP_FSIZE"]),))
    distributed.GRACE = watchdog.GRACE = float(os.environ.get("LOCKSTEP_GRACE", watchdog.GRACE))
    if "LOCKSTEP_FAULT" in os.environ:
        kind, rank, after = os.environ["LOCKSTEP_FAULT"].split("@")
        perturb(script, int(rank), int(after), kind)
    if "LOCKSTEP_PAUSE" in os.environ:  # seconds at each row, in which others can be killed
        log, seconds = logger.Logger.log, float(os.environ["LOCKSTEP_PAUSE"])
        logger.Logger.log = lambda *args: (log(*args), time.sleep(seconds))
    launch(script.main, script.Args)


if __name__ == "__main__":
    main(sys.argv[1:])
