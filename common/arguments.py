"""The flags that all scripts share, their ranges, the command line, and the way from it to `main` and out."""

import dataclasses
import gc
import json
import math
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from numbers import Real
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import tyro

from common.processes import BadInput, Stopped, end_now, end_with_parent

# the type of a flag, which values are valid (NaN is not), and what they are called
Count = Annotated[int, (lambda x: x >= 1, "an integer of at least 1")]
Whole = Annotated[int, (lambda x: x >= 0, "an integer of at least 0")]
Positive = Annotated[float, (lambda x: 0 < x < math.inf, "a number above 0")]
Weight = Annotated[float, (lambda x: 0 <= x < math.inf, "a number of at least 0")]
Fraction = Annotated[float, (lambda x: 0 <= x <= 1, "a number from 0 to 1")]
Rate = Annotated[float, (lambda x: 0 < x <= 1, "a number above 0, at most 1")]
Norm = Annotated[float, (lambda x: x > 0, "a number above 0 (inf: no clipping)")]
Seed = Annotated[int, (lambda x: 0 <= x < 2**32, "an integer from 0 to 2**32 - 1")]
Seconds = Annotated[float, (lambda x: 2 <= x <= 1e6, "a number from 2 to 1e6")]
Return = Annotated[float, (lambda x: x > -math.inf, "a number")]

TYPES = {  # of flags; a program may give numpy's numbers, paths, and 1e5 for 100000
    bool: (lambda x: isinstance(x, bool | np.bool_), "True or False"),
    int: (lambda x: isinstance(x, Real) and type(x) is not bool and float(x).is_integer(), "an integer"),
    float: (lambda x: isinstance(x, Real) and type(x) is not bool, "a number"),
    str: (lambda x: isinstance(x, str | os.PathLike), "text"),
}

# --help shows shared flags, from each of these on, under a title; a script's own under "algorithm"
TITLES = {"env_id": "experiment", "eval_every": "evaluation", "resume": "run", "run_dir": "output"}
# these change no number and no row (--cuda changes roundings, which is printed)
MAY_CHANGE_ON_RESUME = {"resume", "run_dir", "track", "wandb_project_name", "wandb_entity", "tensorboard"}
MAY_CHANGE_ON_RESUME |= {"capture_video", "save_model", "timeout", "cuda"}
PATIENCE = 5.0  # seconds that rank 0 may need to say what happened
# of errors of a collective or the store whose other end is gone
PEER_ENDED = ("closed by peer", "reset by peer", "Broken pipe", "another rank has ended", "got 0 bytes")


@dataclass
class RunArgs:
    """Flags of every script."""

    # experiment; the first three are explained, and have their defaults, in each script
    env_id: str
    total_timesteps: Whole
    num_envs: Count
    env_kwargs: str = "{}"
    """JSON of options for the simulator, such as '{"num_levels": 200}'"""
    seed: Seed = 1
    """seed of everything random, from 0 to 2**32 - 1"""
    shards: Count | None = None
    """power of two, such as 8: results are the same to the bit on 1, 2, 4, 8 processes, and depend on it"""
    checkpoint_every: Whole = 0
    """write a checkpoint, and end all episodes, every so many transitions (all ranks); 0: never"""
    load_model: str | None = None
    """start from a model.pt (networks, normalisers, learned alpha); --total-timesteps 0: only evaluate it"""

    # evaluation
    eval_every: Whole = 50_000
    """evaluate every so many transitions (all ranks), before learning, and at the end; 0: never"""
    eval_episodes: Count = 20
    """episodes per evaluation, all ranks; an episode is cut at 27,000 steps"""
    stop_at_return: Return | None = None
    """end the run once an evaluation's mean return reaches this, the one before learning aside"""
    capture_video: bool = False
    """film the first episode of each evaluation: videos/{global_step}.mp4 in the run directory (needs av)"""

    # run
    resume: bool = False
    """continue the run in --run-dir from its newest checkpoint, or start it if there is none"""
    cuda: bool = True
    """use GPUs if there are any"""
    compile: bool = False
    """compile losses and gradients (CPU: needs g++): 12 to 18 s and 100 MB a rank, then faster"""
    num_threads: Whole = 0
    """threads per rank; 0: all cores (torch: one for small networks or batches, and with --shards)"""
    vectorization: Literal["sync", "async"] = "sync"
    """async: one process per environment, for slow simulators; Atari and EnvPool use threads instead"""
    timeout: Seconds = 600.0
    """end the run, with all stacks, if a rank makes no progress for this many seconds"""

    # output
    run_dir: str | None = None
    """directory of config.json and metrics.csv; if unset, runs/{env_id}__{script}__{seed}__{time}"""
    save_model: bool = False
    """write model.pt at the end"""
    track: bool = False
    """log to Weights & Biases too (offline with WANDB_MODE=offline)"""
    wandb_project_name: str = "lockstep"
    """wandb project"""
    wandb_entity: str | None = None
    """wandb user or team"""
    tensorboard: bool = False
    """log to TensorBoard too: `tensorboard --logdir runs` (needs tensorboard)"""

    def __post_init__(self) -> None:
        """Raise `BadInput`, naming the flag, for a value outside its range, and for flags that do not fit."""
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            self._convert(name, hint)
        try:
            options = json.loads(self.env_kwargs)
        except ValueError:
            options = None
        needed = """a JSON object, such as '{"num_levels": 200}'"""
        self.require(isinstance(options, dict), "env_kwargs", needed)
        for name, package in {"track": "wandb", "tensorboard": "tensorboard", "capture_video": "av"}.items():
            missing = getattr(self, name) and find_spec(package) is None
            self.require(not missing, name, f"left off, or first: pip install {package}")
        evaluated = self.eval_every > 0 or (self.stop_at_return is None and not self.capture_video)
        self.require(evaluated, "eval_every", "at least 1 with --stop-at-return or --capture-video")
        self.require(bool(self.run_dir) or not self.resume, "run_dir", "a directory with --resume")
        self.require(self.checkpoint_every > 0 or not self.resume, "checkpoint_every", "at least 1 with --resume")

    def _convert(self, name: str, hint: Any) -> None:
        """Give a field its value as the type `hint` has it; raise `BadInput` where that has no such value."""
        value = getattr(self, name)
        options = get_args(hint)
        if NoneType in options:
            if value is not None:
                self._convert(name, options[0])
        elif get_origin(hint) is Annotated:
            self._convert(name, options[0])
            valid, needed = options[1]
            self.require(valid(getattr(self, name)), name, needed)
        elif get_origin(hint) is Literal:
            self.require(value in options, name, " or ".join(options))
        elif hint in TYPES:
            valid, needed = TYPES[hint]
            self.require(valid(value), name, needed)
            setattr(self, name, hint(value))

    def require(self, valid: bool, name: str, needed: str) -> None:
        """Raise `BadInput`, naming the flag of the field `name`, unless `valid`."""
        if not valid:
            raise BadInput(f"{flag(name)} {getattr(self, name)}: must be {needed}.")

    def require_multiple(self, name: str, divisor: int, divisor_name: str) -> None:
        """Raise `BadInput`, with the nearest valid value, unless `divisor` divides the field `name`."""
        nearest = max(divisor, getattr(self, name) // divisor * divisor)
        needed = f"a multiple of {divisor_name} ({divisor}), such as {nearest}"
        self.require(getattr(self, name) % divisor == 0, name, needed)

    def require_budget(self, least: int, what: str) -> None:
        """Raise `BadInput` unless --total-timesteps is `least` or more, or 0 to evaluate a loaded model."""
        evaluates = self.load_model is not None and self.total_timesteps == 0 and self.eval_every > 0
        valid = evaluates or self.total_timesteps >= least
        self.require(valid, "total_timesteps", f"at least {least}, {what}")


def flag(name: str) -> str:
    """The command line's spelling of a field."""
    return "--" + name.replace("_", "-")


def parse(args_type: type[RunArgs], words: list[str], prints: bool = True) -> RunArgs:
    """The command line's `words` as an instance of `args_type`; --help has the titles of `TITLES`."""
    fields = {field.name: field for field in dataclasses.fields(args_type)}
    switches = {flag(name) for name, field in fields.items() if field.type is bool}
    plain = []  # --flag=False and --flag False, as sweeps write them, are --no-flag
    for word in words:
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if plain and plain[-1] in switches and not word.startswith("-"):
            name = plain.pop()
            value = word
        elif name not in switches or not equals:
            plain.append(name if name in switches else word)
            continue
        if value.lower() not in ("true", "false"):
            raise BadInput(f"{name} {value}: must be True or False.")
        plain.append(name if value.lower() == "true" else f"--no-{name[2:]}")
    groups: dict[str, list[str]] = {"experiment": [], "algorithm": []}
    title = ""
    for name in fields:
        title = TITLES.get(name, title) if name in RunArgs.__dataclass_fields__ else "algorithm"
        groups.setdefault(title, []).append(name)
    boxes = []  # tyro shows a nested dataclass as a box, without the fields that are not for `__init__`
    for title, names in groups.items():
        hidden = [(x, Any, dataclasses.field(default=fields[x].default, init=False)) for x in fields if x not in names]
        unchecked = {"__post_init__": lambda self: None}
        boxes.append((title, dataclasses.make_dataclass(title, hidden, bases=(args_type,), namespace=unchecked)))
    flags = dataclasses.make_dataclass("Flags", boxes)
    parsed = tyro.cli(flags, args=plain, config=(tyro.conf.OmitArgPrefixes,), console_outputs=prints)
    return args_type(**{name: getattr(getattr(parsed, title), name) for title in groups for name in groups[title]})


def launch(main: Callable[[Any], None], args_type: type[RunArgs]) -> None:
    """Run `main` with the command line's flags. Exit codes: 0 done, 2 bad input, 1 a fault, 128 + signal.

    torchrun ends all ranks after the first to end, so ranks sleep before they end with what rank 0 says too.
    """
    rank = int(os.environ.get("RANK") or 0)
    code = 0
    try:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            end_with_parent()  # no rank outlives a killed torchrun
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
            socket.create_connection(address).close()  # refused if it was killed before
        args = parse(args_type, sys.argv[1:], prints=rank == 0)
        if "RANK" not in os.environ and int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
            print("srun has started several tasks: each trains alone (docs/launching.md)", file=sys.stderr)
        gc.freeze()  # what the imports made stays, so it need not be walked at each collection
        try:
            main(args)
        except SystemExit as error:  # an environment's is no end of the run
            if not isinstance(error, Stopped):
                raise RuntimeError(f"sys.exit({error.code}) was called") from error
            raise
        if not os.environ.get("RANK"):
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
