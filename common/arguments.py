"""What a user sets: the flags that all scripts share, their ranges, and the command line."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_type_hints

import tyro

from common.processes import BadInput


class Range(NamedTuple):
    """The values of a flag for which `valid` is true (not for NaN); `needed` describes them."""

    valid: Callable[[Any], bool]
    needed: str


Count = Annotated[int, Range(lambda x: x >= 1, "an integer of at least 1")]
Whole = Annotated[int, Range(lambda x: x >= 0, "an integer of at least 0")]
Period = Whole  # 0: never
Positive = Annotated[float, Range(lambda x: 0 < x < math.inf, "a number above 0")]
Weight = Annotated[float, Range(lambda x: 0 <= x < math.inf, "a number of at least 0")]
Fraction = Annotated[float, Range(lambda x: 0 <= x <= 1, "a number from 0 to 1")]
Rate = Annotated[float, Range(lambda x: 0 < x <= 1, "a number above 0, at most 1")]
Norm = Annotated[float, Range(lambda x: x > 0, "a number above 0 (inf: no clipping)")]
Seed = Annotated[int, Range(lambda x: 0 <= x < 2**32, "an integer from 0 to 2**32 - 1")]
Seconds = Annotated[float, Range(lambda x: 2 <= x <= 1e6, "a number from 2 to 1e6")]
Return = Annotated[float, Range(lambda x: x > -math.inf, "a number")]

# --help shows the flags under these titles, and all others under "algorithm"
GROUPS = {
    "experiment": "env_id env_kwargs total_timesteps num_envs seed shards checkpoint_every load_model",
    "algorithm": "",
    "evaluation": "eval_every eval_episodes stop_at_return capture_video",
    "run": "resume cuda compile num_threads vectorization timeout",
    "output": "run_dir save_model log_every track wandb_project_name wandb_entity tensorboard",
}
# these change no number and no row (--cuda changes roundings, and that is printed)
MAY_CHANGE_ON_RESUME = {"resume", "run_dir", "track", "wandb_project_name", "wandb_entity", "tensorboard"}
MAY_CHANGE_ON_RESUME |= {"capture_video", "save_model", "timeout", "cuda"}


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
    checkpoint_every: Period = 0
    """write a checkpoint, and end all episodes, every so many transitions (all ranks); 0: never"""
    load_model: str | None = None
    """start from a model.pt (networks, normalisers, learned alpha); --total-timesteps 0: only evaluate it"""

    # evaluation
    eval_every: Period = 50_000
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
    """threads per rank; 0: all cores (torch: one, except for large images without --shards)"""
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
            value = getattr(self, name)
            for annotated in (hint, *get_args(hint)):  # itself, or in a union with None
                for x in getattr(annotated, "__metadata__", ()):
                    if isinstance(x, Range) and value is not None:
                        self.require(x.valid(value), name, x.needed)
        try:
            options = json.loads(self.env_kwargs)
        except ValueError:
            options = None
        is_object = isinstance(options, dict)
        self.require(is_object, "env_kwargs", """a JSON object, such as '{"num_levels": 200}'""")
        for name, package in {"track": "wandb", "tensorboard": "tensorboard", "capture_video": "av"}.items():
            missing = getattr(self, name) and find_spec(package) is None
            self.require(not missing, name, f"left off, or first: pip install {package}")
        evaluated = self.eval_every > 0 or (self.stop_at_return is None and not self.capture_video)
        self.require(evaluated, "eval_every", "at least 1 with --stop-at-return or --capture-video")
        self.require(bool(self.run_dir) or not self.resume, "run_dir", "a directory with --resume")
        resumable = self.checkpoint_every > 0 or not self.resume
        self.require(resumable, "checkpoint_every", "at least 1 with --resume")

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

    def as_json(self) -> dict[str, Any]:
        """All flags as they are read back from config.json."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def experiment(self) -> dict[str, Any]:
        """The flags on which numbers or rows depend."""
        return {name: value for name, value in self.as_json().items() if name not in MAY_CHANGE_ON_RESUME}


def flag(name: str) -> str:
    """The command line's spelling of a field."""
    return "--" + name.replace("_", "-")


def parse(args_type: type[RunArgs], words: list[str] | None = None) -> RunArgs:
    """The command line, or `words`, as an instance of `args_type`; --help has the titles of `GROUPS`."""
    fields = dataclasses.fields(args_type)
    words = sys.argv[1:] if words is None else words
    switches = {flag(field.name) for field in fields if field.type in (bool, "bool")}
    for name, value in pairwise(part for word in words for part in word.split("=", 1)):
        if name.replace("_", "-").replace("--no-", "--") in switches and not value.startswith("-"):
            raise BadInput(f"{name} {value}: takes no value; write --flag or --no-flag.")
    all_names = {field.name for field in fields}
    groups = {title: all_names.intersection(names.split()) for title, names in GROUPS.items()}
    groups["algorithm"] = all_names.difference(*groups.values())
    boxes = []  # tyro shows a nested dataclass as a box, without the fields that are not for `__init__`
    for title, names in groups.items():
        hidden = [field for field in fields if field.name not in names]
        hidden = [(field.name, Any, dataclasses.field(default=field.default, init=False)) for field in hidden]
        unchecked = {"__post_init__": lambda self: None}
        box = dataclasses.make_dataclass(title, hidden, bases=(args_type,), namespace=unchecked)
        boxes.append((title, box))
    config = (tyro.conf.OmitArgPrefixes,)
    parsed = tyro.cli(dataclasses.make_dataclass("Flags", boxes), args=words, config=config)
    values = {name: getattr(getattr(parsed, title), name) for title in groups for name in groups[title]}
    return args_type(**values)
