"""What surrounds a training loop: the run directory, what is saved, and what happens at multiples of a period."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from common.environments import Environments
from common.episodes import evaluate
from common.errors import BadInput, Fault
from common.graphs import graphed
from common.run.arguments import RunArgs
from common.run.checkpoint import Checkpoints, load_model
from common.run.logger import Logger
from common.shards import average_over_shards
from common.state import check_equal
from common.tensors import to_tensor, upload

Act = Callable[[np.ndarray], np.ndarray]
Numbers = dict[str, float]  # by name
STOP_PERIOD = 500  # transitions (all processes) after which processes exchange stop requests, if rows are rarer


def crossed(period: int, before: int, now: int) -> bool:
    """True where the step counter reached or passed a multiple of `period` between `before` and `now`; 0 is never."""
    return period > 0 and now // period > before // period


STANDARD = {
    "charts/": ("charts/episodic_return", "charts/episodic_length", "charts/episodes", "charts/learning_rate"),
    "eval/": ("eval/episodic_return", "eval/episodic_length", "eval/episodes"),
    "losses/": (),
    "time/": ("time/wall", "time/SPS", "time/rollout", "time/update", "time/eval"),
}


def header(columns: tuple[str, ...]) -> tuple[str, ...]:
    """The columns of metrics.csv: those of every script and a script's own, each in the group of its first word."""
    groups = [(*names, *(x for x in columns if x.startswith(prefix))) for prefix, names in STANDARD.items()]
    return (*sum(groups, ()), *(x for x in columns if not x.startswith(tuple(STANDARD))))


class Means:
    """Means over the updates since the last row of what losses return by name, and times.

    `seconds`: by column, for the script to add to. A row shows those of the slowest process.
    """

    def __init__(self, envs: Environments) -> None:
        self.envs, self.world = envs, envs.world
        self._clear()

    def _clear(self) -> None:
        self.seconds = {"time/rollout": 0.0, "time/update": 0.0}
        self.sums: list[Counter[str]] = [Counter() for _ in self.envs.shards]
        self.counts: Counter[str] = Counter()
        self.waiting: list[list[dict[str, torch.Tensor]]] = []  # what is not yet in the sums

    def add(self, stats: list[dict[str, torch.Tensor]]) -> None:
        """Add what a loss returned for each shard here, by name: means, whose mean over shards must be the batch's, or
        tensors of numbers for each sample, of the same shape for all shards and updates.
        """
        self.waiting.append(stats)
        if len(self.waiting) == 16:  # more tensors, kept until the row, would fragment the memory of batches
            self._sum()

    def _sum(self) -> None:
        names, places, means = dict.fromkeys(name for stats in self.waiting for name in stats[0]), [], []
        for name in names:
            stats = [x for x in self.waiting if name in x[0]]
            self.counts[name] += len(stats)
            for sums, parts in zip(self.sums, zip(*stats, strict=True), strict=True):
                values = torch.stack([part[name] for part in parts]).double().reshape(len(parts), -1)
                means.append(values.mean(-1).to(self.world.device))
                places += [(sums, name)] * len(parts)
        if means:  # which come from a GPU in one copy
            for (sums, name), value in zip(places, torch.cat(means).tolist(), strict=True):
                sums[name] += value
        self.waiting = []

    def row(self) -> Numbers:
        """The columns of episodes, losses and times since the last call, over all processes.

        Without an episode that ended, or an update, the columns of their means are left out.
        """
        self._sum()
        sums = []
        for episodes, losses in zip(self.envs.episodes.pop(), self.sums, strict=True):
            sums.append(episodes | {f"losses/{name}": value for name, value in losses.items()})
        total = self.world.reduce(sums, maxima=self.seconds)  # collective
        row = {"charts/episodes": int(total["episodes"])} | {name: total[name] for name in self.seconds}
        if total["episodes"]:
            row["charts/episodic_return"] = total["return"] / total["episodes"]
            row["charts/episodic_length"] = total["length"] / total["episodes"]
        for name, count in self.counts.items():
            row[f"losses/{name}"] = total[f"losses/{name}"] / count / self.world.num_shards
        self._clear()
        return row


class Run:
    """One run of a script, on this process.

    `restart`: True at the start and after each checkpoint, until `start_environments` is called. `global_step`:
    transitions of all processes at the last call of `boundary`. `means`: what a row of metrics.csv is made of. Every
    process must call each method.
    """

    def __init__(self, args: RunArgs, envs: Environments, logger: Logger) -> None:
        self.args, self.envs, self.world, self.device, self.logger = args, envs, envs.world, envs.world.device, logger
        self.state: dict[str, Any] = {}
        self.replay, self.means, self.kept_memory = None, Means(envs), None
        self.global_step, self.last_step, self.restart = 0, 0, True
        self.checkpoint_step = 0  # the last step at which a checkpoint was allowed, whether or not one was due

    def keep(self, replay: Any = None, **state: Any) -> None:
        """Register what is equal on all processes at all times: modules, optimisers, generators, tensors, normalisers.

        It is compared at each --check-sync-every and saved in checkpoints and, except optimisers and generators, in
        model.pt. `replay`: the buffer, of which each process saves its own part.
        """
        self.state |= state
        self.replay = replay if replay is not None else self.replay

    def average_gradients(self, loss: nn.Module) -> None:
        """Average the gradients of a loss over shards (`--shards`), otherwise, which DDP does, over processes.

        Raises `BadInput` for what the loss trains and `keep` lacks: a resumed run would lose it.
        """
        average_over_shards(loss, self.world)
        optimizers = [x for x in self.state.values() if isinstance(x, torch.optim.Optimizer)]
        stepped = {p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        kept = {x for x in self.state.values() if isinstance(x, torch.Tensor)}
        kept |= {p for x in self.state.values() if isinstance(x, nn.Module) for p in x.parameters()}
        for name, parameter in loss.named_parameters():
            if parameter.requires_grad and not (parameter in kept and parameter in stepped):
                lacking = "its module" if parameter not in kept else "its optimiser"
                name = name.removeprefix("module.")
                raise BadInput(f"run.keep: {name} is trained, but {lacking} is not kept; call run.keep with it before.")

    def graphed(self, function: Callable, *optimizers: torch.optim.Optimizer) -> Callable:
        """`function`, with `--cuda-graphs` as a CUDA graph that includes the steps of its optimisers.

        Raises `BadInput` where processes would record it at different calls, since NCCL needs them to do so at once.
        """
        rb = self.replay
        if self.args.cuda_graphs and optimizers and rb is not None and self.world.world_size > 1:
            size = self.args.batch_size
            self.args.require(rb.plain, "cuda_graphs", "left off with --prioritized or --n-step on several processes")
            needed = f"a multiple of {self.world.num_shards} with --cuda-graphs"
            self.args.require(size % self.world.num_shards == 0, "batch_size", needed)
        return graphed(self.args.cuda_graphs, self.world, function, *optimizers)

    def number(self, number: float) -> float | torch.Tensor:
        """A number that changes from call to call of a `graphed` function, to be uploaded: a tensor if for a GPU."""
        return number if self.device.type == "cpu" else torch.tensor(number, dtype=torch.float32)

    def tensor(self, array: np.ndarray | torch.Tensor) -> torch.Tensor:
        """The array, or the tensor that is there already, on this process's device, begun at a multiple of 64 bytes."""
        if isinstance(array, torch.Tensor):
            return array.clone() if array.data_ptr() % 64 else array
        return self.upload(to_tensor(array))

    def tensors(self, *arrays: np.ndarray | torch.Tensor) -> list[torch.Tensor]:
        """Arrays, and tensors of this process's memory, on its device, in one copy."""
        return self.upload([to_tensor(x) if isinstance(x, np.ndarray) else x for x in arrays])

    def device_memory(self, array: np.ndarray) -> torch.Tensor:
        """Memory of the array's shape and layout on this process's device, a CPU's the array's own, a GPU's kept."""
        own = torch.from_numpy(array)
        if self.device.type == "cpu":
            return own
        if self.kept_memory is None:
            self.kept_memory = torch.empty_like(own, device=self.device)
        return self.kept_memory

    def upload(self, nest: Any) -> Any:
        """Nested lists, tuples and dicts with tensors -> the same on this process's device, in one copy."""
        return upload(nest, self.device)

    def begin(self, act: Act, last_step: int, schedules: Mapping[str, float]) -> None:
        """Go on from a checkpoint or load a model, and evaluate `act` before anything is learned.

        `last_step`: transitions at the end of the run. `schedules`: by the field of its flag, the part of the run over
        which something changes with it; where it has passed, a run that goes on may be longer than it was to be.
        """
        self.last_step, ends = last_step, {name: part * last_step for name, part in schedules.items()}
        self.checkpoints = Checkpoints(self.args, self.world, self.logger, self.state, self.replay, ends)  # collective
        self.global_step = self.checkpoint_step = self.checkpoints.global_step
        load_model(self.args, self.world, self.state, self.checkpoints)  # collective
        plan = f"{last_step} transitions by {self.args.num_envs} environments"
        through = f", through {self.world.carrier}" if self.world.carrier else ""
        self.logger.start(f"{plan} on {self.world.world_size} process(es), {self.device}{through}")
        if self.args.eval_every and not self.checkpoints.number:
            self._evaluate(0, act)  # collective

    def start_environments(self) -> np.ndarray:
        """Start every environment anew, from other seeds after each checkpoint -> observations (n, *shape)."""
        self.restart = False
        return self.envs.start(self.checkpoints.number)

    def row_due(self, global_step: int, log_every: int) -> bool:
        """Whether to log a row now: at multiples of `log_every`, before a checkpoint, and at the end of the run.

        Call it after each vector step, before `boundary`. Processes also exchange stop requests here.
        """
        if crossed(STOP_PERIOD, self.global_step, global_step):
            self.world.gather([])  # collective
        ends = global_step == self.last_step or self.world.stop
        due = crossed(log_every, self.global_step, global_step)
        return bool(ends or due or crossed(self.args.checkpoint_every, self.global_step, global_step))

    def boundary(self, global_step: int, act: Act, may_checkpoint: bool = True) -> bool:
        """Compare processes, evaluate and write a checkpoint where their periods are due -> whether the run is to end.

        `may_checkpoint`: False while the script holds data that a checkpoint would lack; a due checkpoint then waits.
        """
        args, before, last = self.args, self.global_step, global_step == self.last_step or bool(self.world.stop)
        self.global_step = global_step
        if crossed(args.check_sync_every, before, global_step):
            if any(self.world.gradients.values()):
                raise Fault("a loss uses a parameter for one shard and not for another: use it at every call.")
            check_equal(global_step, self.state, self.world)  # collective
        if self.world.stop:
            return True
        if args.eval_every and (crossed(args.eval_every, before, global_step) or last):
            score = self._evaluate(global_step, act)  # collective
            if self.world.stop or (args.stop_at_return is not None and score >= args.stop_at_return):
                return True
        if may_checkpoint and not last:
            due = crossed(args.checkpoint_every, self.checkpoint_step, global_step)
            self.checkpoint_step = global_step
            if due:
                self._write_checkpoint(global_step)  # collective
        return False

    def _write_checkpoint(self, global_step: int) -> None:
        if self.replay is not None:
            self.replay.cut()  # collective
        self.checkpoints.write(global_step)  # collective
        self.restart = True

    def _evaluate(self, global_step: int, act: Act) -> float:
        """Play and log the evaluation -> its mean return."""
        number = self.checkpoints.number
        row = evaluate(act, self.envs.evaluation, self.args.eval_episodes, self.world, number)  # collective
        if not self.world.stop:  # which cuts it short
            self.logger.log(global_step, row)
        return row["eval/episodic_return"]

    def finish(self, **more: Any) -> None:
        """Write model.pt, with `more` than what is kept, and say that the run is finished."""
        if self.args.save_model:
            self.logger.save(self.global_step, self.state | more)
        self.checkpoints.finish()


@contextmanager
def open_run(args: RunArgs, file: str, columns: tuple[str, ...], envs: Environments) -> Iterator[Run]:
    """Open the run directory and process group. Train in a function called inside, so that its DDP modules are freed.

    `columns`: the script's own of metrics.csv.
    """
    world = envs.world
    with (
        Logger(args, file, header(columns), world, envs.evaluation) as logger,
        world.process_group(args.timeout, args.shared_memory),
    ):
        yield Run(args, envs, logger)
