"""What surrounds a training loop: the run directory, what is saved, what is done periodically."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from common.acting import Acting
from common.environments import Environments
from common.episodes import evaluate
from common.errors import BadInput
from common.run.arguments import RunArgs
from common.run.logger import Logger
from common.shards import Gradients
from common.state import check_equal
from common.tensors import to_tensor, upload

Act = Callable[[np.ndarray], np.ndarray]
STOP_PERIOD = 100  # transitions (all processes) after which processes exchange stop requests


def crossed(period: int, before: int, now: int) -> bool:
    """True if the step counter reached a multiple of `period` after `before`, up to `now`; 0: never."""
    return period > 0 and now // period > before // period


COLUMNS_OF_ALL = (
    *("charts/episodic_return", "charts/episodic_length", "charts/episodes", "charts/learning_rate"),
    *("eval/episodic_return", "eval/episodic_length", "eval/episodes"),
    *("time/wall", "time/SPS", "time/rollout", "time/update", "time/eval"),
)


class Means:
    """Means, over the updates since the last row, of what losses report by name; and times.

    `seconds`: by column. A row shows the slowest process's.
    """

    def __init__(self, envs: Environments) -> None:
        self.envs = envs
        self.world = envs.world
        self.lap_start = 0.0
        self._clear()

    def _clear(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.sums: list[Counter[str]] = [Counter() for _ in self.envs.shards]
        self.counts: Counter[str] = Counter()
        self.waiting: list[list[dict[str, torch.Tensor]]] = []  # what is not yet in the sums

    def lap(self, column: str | None = None) -> None:
        """Add the seconds since the last call to a column, or to none."""
        now = time.perf_counter()
        if column is not None:
            self.seconds[column] += now - self.lap_start
        self.lap_start = now

    def add(self, stats: list[dict[str, torch.Tensor]]) -> None:
        """Add what a loss returned for each shard here, by name: means over its samples, or a number for each."""
        self.waiting.append(stats)
        if len(self.waiting) == 16:  # keeping more tensors until the row would fragment memory
            self._sum()

    def _sum(self) -> None:
        for name in dict.fromkeys(name for stats in self.waiting for name in stats[0]):
            updates = [stats for stats in self.waiting if name in stats[0]]
            self.counts[name] += len(updates)
            for shard, sums in enumerate(self.sums):
                values = torch.stack([stats[shard][name] for stats in updates])
                means = values.double().reshape(len(updates), -1).mean(-1)
                sums[name] = sum(means.tolist(), sums[name])
        self.waiting = []

    def row(self) -> dict[str, float]:
        """The columns of episodes, losses and times since the last call, over all processes.

        Without an episode that ended, or an update, the columns of their means are left out.
        """
        self._sum()
        sums = []
        for episodes, losses in zip(self.envs.episodes.pop(), self.sums, strict=True):
            sums.append(episodes | {f"losses/{name}": value for name, value in losses.items()})
        total = self.world.reduce(sums, maxima=self.seconds)  # collective
        row = {name: total[name] for name in self.seconds}
        row["charts/episodes"] = int(total["episodes"])
        if total["episodes"]:
            row["charts/episodic_return"] = total["return"] / total["episodes"]
            row["charts/episodic_length"] = total["length"] / total["episodes"]
        for name, count in self.counts.items():
            row[f"losses/{name}"] = total[f"losses/{name}"] / count / self.world.num_shards
        self._clear()
        return row


class Run:
    """One run of a script, on this process. Every process must call each method.

    `environments_must_start`: True at the start and after each checkpoint, until `start_environments` is called.
    `global_step`: transitions of all processes at the last call of `evaluate_and_checkpoint`;
    `last_step`: at the end of the run. `means`: what a row of metrics.csv is made of.
    """

    def __init__(self, args: RunArgs, envs: Environments, logger: Logger) -> None:
        self.args = args
        self.envs = envs
        self.world = envs.world
        self.device = envs.world.device
        self.logger = logger
        self.state: dict[str, Any] = {}
        self.replay: Any = None
        self.acting: list[Acting] = []
        self.gradients = Gradients(envs.world, logger.note)
        self.means = Means(envs)
        self.checkpoints: Any = None
        self.checkpoint_number = 0  # how many have been written
        self.environments_must_start = True
        self.compiles = args.compile
        self.global_step = 0
        self.last_step = 0
        self.checkpoint_step = 0  # the last step at which a checkpoint was allowed, due or not

    def register(self, replay: Any = None, **state: Any) -> None:
        """Register what is equal on all processes: modules, optimisers, generators, tensors, normalisers.

        It is compared at each --check-sync-every and saved in checkpoints and, except optimisers and generators,
        in model.pt. `replay`: the buffer, of which each process saves its own part.
        """
        self.state |= state
        if replay is not None:
            self.replay = replay

    def upload(self, nest: Any) -> Any:
        """Arrays, tensors, or nested lists, tuples, dicts of them -> tensors on this process's device."""
        return upload(tree_map_only(np.ndarray, to_tensor, nest), self.device)

    def policy(self, module: nn.Module) -> Acting:
        """An actor for rollouts: computes what `module` does, on arrays, and faster for a few vectors."""
        self.acting.append(Acting(module, self.world, self.envs.shards, self.logger.note))
        return self.acting[-1]

    def backward(self, loss: nn.Module, *inputs: list[Any]) -> list[dict[str, torch.Tensor]]:
        """Run a loss and its backward for each shard of this process, and leave in `.grad` the mean over all shards.

        `inputs`: lists with an entry for each shard here. Returns what the loss reports for each.
        Raises `BadInput` if the loss trains a parameter that is not registered: a resumed run would lose it.
        """
        if loss not in self.gradients.parameters:
            self._require_registered(loss)
            self.gradients.add_loss(loss, *inputs, compiles=self.compiles)  # collective
        for acting in self.acting:
            acting.parameters_changed = True
        self.world.watchdog.feed()
        return self.gradients.backward(loss, *inputs)  # collective

    def mean_over_ranks(self, values: list[list[torch.Tensor]]) -> float:
        """The mean over updates, shards of all processes, and samples: for each update, a list over shards."""
        of_shards = [torch.stack(x).double().mean(-1).tolist() for x in zip(*values, strict=True)]
        return self.world.gather_shards(of_shards).mean()  # collective

    def _require_registered(self, loss: nn.Module) -> None:
        optimizers = [x for x in self.state.values() if isinstance(x, torch.optim.Optimizer)]
        stepped = {p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        saved = {x for x in self.state.values() if isinstance(x, torch.Tensor)}
        saved |= {p for x in self.state.values() if isinstance(x, nn.Module) for p in x.parameters()}
        for name, parameter in loss.named_parameters():
            if parameter.requires_grad and not (parameter in saved and parameter in stepped):
                lacking = "its module" if parameter not in saved else "its optimiser"
                name = name.removeprefix("module.")
                raise BadInput(f"run.register: {name} is trained, but {lacking} is not registered.")

    def load_or_start(self, act: Act, last_step: int, **schedules: float) -> None:
        """Go on from a checkpoint or load a model, and evaluate `act` before anything is learned.

        `last_step`: transitions at the end of the run. `schedules`: by flag, the part of the run (True: all) over
        which it changes something. A resumed run may be made longer only after that part.
        """
        args = self.args
        self.last_step = last_step
        if args.compile and self.replay is not None and self.world.num_shards > 1:
            self.compiles = self.replay.plain and args.batch_size % self.world.num_shards == 0
            if not self.compiles:  # each size would be compiled anew
                self.logger.note("--compile: not used, since a shard's part of a batch changes its size")
        if args.checkpoint_every:
            from common.run.checkpoint import Checkpoints

            self.checkpoints = Checkpoints(args, self.world, self.logger, self.state, self.replay)
            ends = {name: part * last_step for name, part in schedules.items()}
            self.global_step, self.checkpoint_number = self.checkpoints.read_newest(ends)  # collective
            self.checkpoint_step = self.global_step
        if args.load_model is not None and not self.global_step:
            from common.run.checkpoint import load_model

            load_model(args, self.world, self.state, self.logger)  # collective
        plan = f"{last_step} transitions by {args.num_envs} environments"
        through = f", through {self.world.carrier}" if self.world.carrier else ""
        self.logger.start(f"{plan} on {self.world.world_size} process(es), {self.device}{through}")
        if args.eval_every and not self.global_step:
            self._evaluate(act)  # collective
            if self.world.stop:
                raise SystemExit(128 + self.world.stop)

    def start_environments(self) -> np.ndarray:
        """Start all environments anew, from other seeds after a checkpoint -> observations (n, *shape)."""
        self.environments_must_start = False
        for acting in self.acting:
            acting.restart()
        return self.envs.start(self.checkpoint_number)

    def row_due(self, global_step: int, log_every: int) -> bool:
        """Whether to log a row now: at multiples of `log_every`, before a checkpoint, and at the end of the run.

        Call it after each vector step, before `evaluate_and_checkpoint`. Processes also exchange stop requests here.
        """
        before = self.global_step
        if crossed(STOP_PERIOD, before, global_step):
            self.world.gather([])  # collective
        if global_step == self.last_step or self.world.stop:
            return True
        return crossed(log_every, before, global_step) or crossed(self.args.checkpoint_every, before, global_step)

    def evaluate_and_checkpoint(self, global_step: int, act: Act, may_checkpoint: bool = True) -> bool:
        """Compare processes, evaluate, write a checkpoint where these are due -> whether the run is to end.

        `may_checkpoint`: False while the script holds data that a checkpoint would lack; a due checkpoint then waits.
        """
        args = self.args
        before = self.global_step
        self.global_step = global_step
        if crossed(args.check_sync_every, before, global_step):
            check_equal(global_step, self.state, self.world)  # collective
        if self.world.stop:
            return True
        last = global_step == self.last_step
        if args.eval_every and (last or crossed(args.eval_every, before, global_step)):
            score = self._evaluate(act)  # collective
            if self.world.stop or (args.stop_at_return is not None and score >= args.stop_at_return):
                return True
        if may_checkpoint and not last:
            due = crossed(args.checkpoint_every, self.checkpoint_step, global_step)
            self.checkpoint_step = global_step
            if due:
                if self.replay is not None:
                    self.replay.cut()  # collective
                self.checkpoint_number += 1
                self.checkpoints.write(global_step, self.checkpoint_number)  # collective
                self.environments_must_start = True
        return False

    def _evaluate(self, act: Act) -> float:
        """Play and log the evaluation -> its mean return."""
        episodes = self.args.eval_episodes
        row = evaluate(act, self.envs.evaluation, episodes, self.world, self.checkpoint_number)  # collective
        if not self.world.stop:  # a stop cuts it short
            self.logger.log(self.global_step, row)
        return row["eval/episodic_return"]

    def finish(self, **more: Any) -> None:
        """Write model.pt, with what is registered and `more`, and mark the run as finished."""
        if self.args.save_model:
            self.logger.save(self.global_step, self.state | more)
        if self.args.checkpoint_every and not self.world.stop:
            self.logger.write("finished", b"")


@contextmanager
def open_run(args: RunArgs, file: str, columns: tuple[str, ...], envs: Environments) -> Iterator[Run]:
    """Open the run directory, with the script's own `columns` of metrics.csv, and the process group.

    Train in a function called inside, so that its DDP modules are freed.
    """
    world = envs.world
    with (
        Logger(args, file, ("global_step", *COLUMNS_OF_ALL, *columns), world, envs.evaluation) as logger,
        world.process_group(args.timeout, args.shared_memory),  # collective
    ):
        yield Run(args, envs, logger)
