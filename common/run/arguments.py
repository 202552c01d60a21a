"""What a user sets: the flags that all scripts share, and types of flags with the range that a value must be in."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_type_hints

from common.errors import BadInput, flag, require


class Range(NamedTuple):
    """`valid` tells whether a value may stand (False for NaN), `needed` says what may."""

    valid: Callable[[Any], bool]
    needed: str


def is_object(text: str) -> bool:
    """Whether a text is a JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


Count = Annotated[int, Range(lambda x: x >= 1, "an integer of at least 1")]
Whole = Annotated[int, Range(lambda x: x >= 0, "an integer of at least 0")]
Period = Whole  # 0: never
Positive = Annotated[float, Range(lambda x: 0 < x < math.inf, "a number above 0")]
Weight = Annotated[float, Range(lambda x: 0 <= x < math.inf, "a number of at least 0")]
Fraction = Annotated[float, Range(lambda x: 0 <= x <= 1, "a number from 0 to 1")]
Rate = Annotated[float, Range(lambda x: 0 < x <= 1, "a number above 0, at most 1")]
Norm = Annotated[float, Range(lambda x: x > 0, "a number above 0 (inf: no clipping)")]
Seed = Annotated[int, Range(lambda x: 0 <= x < 2**32, "an integer from 0 to 2**32 - 1")]
Threads = Annotated[int, Range(lambda x: 0 <= x <= 1024, "an integer from 0 to 1024")]
Seconds = Annotated[float, Range(lambda x: 0 < x <= 1e6, "a number above 0, at most 1e6")]
Json = Annotated[str, Range(is_object, """a JSON object, such as '{"num_levels": 200}'""")]
Return = Annotated[float, Range(lambda x: x > -math.inf, "a number")]

# flags that a run may change on its way: they change no number and no row (--cuda: roundings, of which it is told)
FREE = {"resume", "run_dir", "track", "wandb_project_name", "wandb_entity", "cuda", "save_model", "timeout"}
FREE |= {"capture_video", "tensorboard"}
FREE |= {"check_sync_every", "cuda_graphs"}
EXPERIMENT = {"seed", "shards", "checkpoint_every", "load_model"}  # of those in RunArgs, what numbers depend on


@dataclass
class RunArgs:
    """Flags of every script: where and how it runs and is watched. Of these, `seed` alone is to change what is learned.

    (Roundings aside, which `shards` orders, and environments that draw from `random`; `stop_at_return` ends it.)
    """

    seed: Seed = 1
    """seed of everything random, from 0 to 2**32 - 1"""
    shards: Count | None = None
    """a power of two, 8 say: the same bytes on 1, 2, 4 and 8 processes; part of the experiment, as the seed is"""
    checkpoint_every: Period = 0
    """at multiples of so many transitions (all ranks), write a checkpoint and end all episodes: take many; 0: never"""
    resume: bool = False
    """go on with the run in --run-dir from its newest checkpoint; start it if it is not there"""
    run_dir: str | None = None
    """where config.json and metrics.csv go (default: runs/{env_id}__{script}__{seed}__{time})"""
    track: bool = False
    """log to Weights & Biases too (offline with WANDB_MODE=offline)"""
    wandb_project_name: str = "lockstep"
    """wandb's project"""
    wandb_entity: str | None = None
    """wandb's user or team"""
    tensorboard: bool = False
    """write the same rows for `tensorboard --logdir runs` (needs tensorboard)"""
    cuda: bool = True
    """use GPUs where there are any"""
    cuda_graphs: bool = False
    """GPU: launch the kernels of an update together, from its 12th on (not tried on a GPU so far)"""
    num_threads: Threads = 0
    """threads per rank, of Atari, EnvPool and torch; 0: the cores divided by the local ranks (torch on vectors: one)"""
    vectorization: Literal["sync", "async"] = "sync"
    """async: a process for each environment, those of evaluation too, if slow; Atari and EnvPool have threads"""
    eval_every: Period = 50_000
    """evaluate before learning, at each multiple of so many transitions (all ranks), and at the end; 0: never"""
    eval_episodes: Count = 20
    """episodes per evaluation, shared among the ranks; one of 27,000 steps counts as it stands"""
    stop_at_return: Return | None = None
    """end the run once an evaluation reaches this mean return"""
    capture_video: bool = False
    """film the first episode of each evaluation: videos/{global_step}.mp4 in the run directory (needs av)"""
    load_model: str | None = None
    """start from the networks and normalisers of a model.pt; with --total-timesteps 0, evaluate it and end"""
    save_model: bool = False
    """write model.pt at the end"""
    check_sync_every: Period = 100_000
    """check at each multiple of so many transitions (all ranks) that the ranks hold equal bits; 0: never"""
    timeout: Seconds = 600.0
    """seconds between boundaries (iteration or auxiliary epoch; DQN, SAC: 500 transitions; 100 steps of evaluation)"""

    def experiment(self) -> dict[str, Any]:
        """The flags on which numbers depend: neither where it runs nor how it is watched."""
        elsewhere = {field.name for field in dataclasses.fields(RunArgs)} - EXPERIMENT
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in elsewhere}

    def __post_init__(self) -> None:
        """Check every field, a script's own too, against the range in its annotation."""
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            value = getattr(self, name)
            for annotated in (hint, *get_args(hint)):  # itself, or in a union with None
                for valid, needed in (x for x in getattr(annotated, "__metadata__", ()) if isinstance(x, Range)):
                    require(value is None or valid(value), flag(name), value, needed)
        if self.stop_at_return is not None:
            require(self.eval_every > 0, "--eval-every", self.eval_every, "at least 1 with --stop-at-return")
        if self.capture_video:
            require(self.eval_every > 0, "--eval-every", self.eval_every, "at least 1 with --capture-video")
        if self.track:  # an unreachable wandb is given up before the ranks have waited for each other
            require(self.timeout >= 30, "--timeout", self.timeout, "at least 30 with --track")
        if self.resume:
            require(self.run_dir is not None, "--run-dir", self.run_dir, "a directory with --resume")
            require(self.checkpoint_every > 0, "--checkpoint-every", 0, "at least 1 with --resume")

    def require_budget(self, least: int, needed: str) -> None:
        """Raise `BadInput` unless --total-timesteps is `least` or more, or 0 to evaluate a loaded model."""
        if self.load_model is None or self.total_timesteps:
            require(self.total_timesteps >= least, "--total-timesteps", self.total_timesteps, needed)
        else:
            alone = "with --total-timesteps 0"
            require(self.eval_every > 0, "--eval-every", self.eval_every, f"at least 1 {alone}")
            require(not self.save_model, "--save-model", True, f"left off {alone}")
            require(not self.checkpoint_every, "--checkpoint-every", self.checkpoint_every, f"0 {alone}")


def command_line(args: type[Any], words: list[str] | None = None) -> list[str]:
    """The command line's words, for tyro. Raises `BadInput` where a switch of the dataclass `args` has a value."""
    words = sys.argv[1:] if words is None else words
    switches = {flag(field.name) for field in dataclasses.fields(args) if field.type in (bool, "bool")}
    for word, following in zip(words, [*words[1:], "-"], strict=True):
        name, joined, value = word.partition("=")
        switch = name.replace("_", "-").replace("--no-", "--")
        if switch in switches and (joined or not following.startswith("-")):
            raise BadInput(f"{name} {value or following}: takes no value; write {switch} or --no-{switch[2:]}.")
    return words
