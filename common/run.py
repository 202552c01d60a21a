"""What surrounds a training loop: gradients, rows of metrics, what is done periodically."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from common.acting import PERIOD, Policy
from common.arguments import MAY_CHANGE_ON_RESUME, RunArgs
from common.environments import TRAINING, Environments, evaluate
from common.logger import Logger, write_whole
from common.processes import BadInput, Stopped, World, generators_kept, one_line, process_kept
from common.shards import GRAPHS, Gradient, copied
from common.tensors import check_equal, for_model, state_of, upload

STOP_PERIOD = 100  # transitions (all ranks) after which ranks exchange stop requests
CHUNK = 1024  # rows of a network's input, for memory
PARALLEL = 2**23  # rows times weights of a layer, from which threads help


def crossed(period: int, before: int, now: int) -> bool:
    """True if the step counter reached a multiple of `period` after `before`, up to `now`; 0: never."""
    return period > 0 and now // period > before // period


class Run:
    """One run of a script, on this rank. Every rank must call each method."""

    def __init__(self, args: RunArgs, world: World, envs: Environments, logger: Logger) -> None:
        self.args = args
        self.world = world
        self.envs = envs
        self.logger = logger
        self.device = world.device
        self.upload = partial(upload, world.device)  # an array -> a tensor, several -> a list
        self.state: dict[str, Any] = {}
        self.replay: Any = None
        self.policies: list[Policy] = []
        self.gradients: dict[nn.Module, Gradient] = {}
        self.graphs: dict[Callable, Callable] = {}
        self.reported: dict[str, list] = defaultdict(list)  # at each update, a scalar for each shard
        self.sums: dict[str, Any] = Counter()  # of what was reported before, for each shard
        self.counts: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()  # by column
        self.column = "time/rollout"  # of the seconds from `lap_start` on
        self.lap_start = time.perf_counter()
        self.first_obs: np.ndarray | None = None  # of the last evaluation's episodes
        self.needs_reset = True  # at the beginning and after each checkpoint
        self.global_step = 0  # at the last call of `evaluate_and_checkpoint`
        self.num_checkpoints = 0  # how many have been written
        self.checkpoint_due = False
        if args.compile:
            torch.compiler.reset()  # torch keeps eight graphs of a function over all runs

    def register(self, replay: Any = None, **state: Any) -> None:
        """Modules, optimisers, generators, tensors, normalisers: what is equal on all ranks, to the bit.

        It is compared and saved; in model.pt are no optimisers, schedules and generators. Each rank has, and saves,
        its own part of `replay`, a buffer.
        """
        self.state |= state
        self.replay = self.replay if replay is None else replay

    def policy(self, module: nn.Module) -> Policy:
        """What acts in rollouts: all results of `module`, (n, ...) each, by numpy where its layers are simple."""
        self.policies.append(Policy(module, self._graph(module), self.world, self.logger.note))
        return self.policies[-1]

    @torch.no_grad()
    def by_shard(self, function: Callable[..., tuple], *tensors: torch.Tensor) -> list[torch.Tensor]:
        """A function of rows (b, ...) -> its results for (T, n, ...), each shard alone, without gradients."""
        of_shards = []
        function = self._graph(function)
        for shard in self.envs.shards:
            # in memory of its own: kernels may round by address
            rows = [x[:, shard].flatten(0, 1).clone().split(CHUNK) for x in tensors]
            results = [function(*chunk) for chunk in zip(*rows, strict=True)]
            of_shards.append([torch.cat(x).unflatten(0, (len(tensors[0]), -1)) for x in zip(*results, strict=True)])
        return [torch.cat(x, 1) for x in zip(*of_shards, strict=True)]

    def _graph(self, function: Callable) -> Callable:
        """With --compile, a GPU's operations of a function started at once."""
        if not self.args.compile or self.device.type == "cpu":
            return function
        if function not in self.graphs:
            torch._dynamo.config.suppress_errors = True  # no compiler: eager
            compiled = torch.compile(function, dynamic=False, options=GRAPHS)
            self.graphs[function] = lambda *inputs: copied(compiled(*inputs))  # the next call overwrites them
        return self.graphs[function]

    def backward(self, loss: nn.Module, *inputs: Any, sizes: list[int] | None = None) -> dict[str, torch.Tensor]:
        """Run a loss and its backward; set `.grad` to the mean over all shards of all ranks.

        `inputs`: nested tensors (b, ...), one shard's rows after another's: `sizes` each, or equally many.
        Returns what the loss reports, by name: (b,), or scalars, of which `log` writes means, as (shards here,).
        """
        if self.column == "time/rollout":
            self.lap("time/update")
        if loss not in self.gradients:
            self._require_registered(loss)
            self.gradients[loss] = Gradient(loss, self.world, self._compiles(sizes), self.logger.note)
        stats = self.gradients[loss](inputs, sizes)  # collective
        for policy in self.policies if self.device.type == "cuda" else ():
            policy.calls += -policy.calls % PERIOD  # the next one copies the weights anew
        self.world.feed()
        of_names = {name: [torch.as_tensor(x[name]) for x in stats] for name in stats[0]}
        for name, of_shards in of_names.items():
            if of_shards[0].dim() == 0:
                self.reported[name].append(of_shards)
                if len(self.reported[name]) == 16:  # more would fragment memory
                    self._sum_reported(name)
        return {name: x[0].reshape(-1) if len(x) == 1 else torch.hstack(x) for name, x in of_names.items()}

    def _compiles(self, sizes: list[int] | None) -> bool:
        """--compile, except where a shard's part of a batch changes its size, each compiled anew."""
        if not self.args.compile or sizes is None or self.world.num_shards == 1:
            return self.args.compile
        equal = self.args.batch_size % self.world.num_shards == 0 and not self.replay.alpha
        if not equal:
            self.logger.note("--compile: not used, since a shard's part of a batch changes its size")
        return equal

    def _require_registered(self, loss: nn.Module) -> None:
        """Raise `BadInput` if a loss trains what is not registered: a resumed run would lose it."""
        optimizers = [x for x in self.state.values() if isinstance(x, torch.optim.Optimizer)]
        stepped = {p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        saved = {x for x in self.state.values() if isinstance(x, torch.Tensor)}
        saved |= {p for x in self.state.values() if isinstance(x, nn.Module) for p in x.parameters()}
        for name, p in loss.named_parameters():
            if p.requires_grad and not (p in saved and p in stepped):
                lacking = "its module" if p not in saved else "its optimiser"
                raise BadInput(f"run.register: {name} is trained, but {lacking} is not registered.")

    def mean_over_ranks(self, values: list[torch.Tensor]) -> float:
        """The mean of a scalar that `backward` returned at several updates, over all ranks."""
        means = [[of_shard.mean().item()] for of_shard in torch.stack(values, 1).double()]
        return self.world.gather_shards(means).mean()  # collective

    def load_or_start(self, act: Callable[[np.ndarray], np.ndarray], last_step: int, minibatch_size: int) -> None:
        """Go on from a checkpoint or load a model, and evaluate before anything is learned.

        `act`: a shard's observations (n, *shape) -> actions. `last_step`: of the run.
        `minibatch_size`: of all ranks; it decides on torch's threads.
        """
        args = self.args
        modules = [x for x in self.state.values() if isinstance(x, nn.Module)]
        largest = max((p.numel() for x in modules for p in x.parameters()), default=0)
        large = largest * minibatch_size // self.world.world_size >= PARALLEL
        if large and self.device.type == "cpu" and not args.num_threads and not self.world.sharded:
            torch.set_num_threads(self.world.cores)
        self.act = act
        self.last_step = last_step
        saved = {}
        if args.checkpoint_every:
            from common.checkpoint import Checkpoints

            self.checkpoints = Checkpoints(self.world, self.logger, self.state, self.replay)  # collective
            saved = self.checkpoints.read_newest() if args.resume else {}  # collective
            self.global_step = saved.get("global_step", 0)
            self.num_checkpoints = saved.get("num_checkpoints", 0)
        if args.load_model is not None and not self.global_step:
            from common.checkpoint import load_model

            load_model(args, self.state)
        self.logger.start(saved.get("logger"), last_step)
        processes = f"{self.world.world_size} process(es){' through shared memory' if self.world.memory else ''}"
        self.logger.note(f"{last_step:,} transitions by {args.num_envs} environments on {processes}, {self.device}")
        if args.eval_every and not self.global_step:
            self._evaluate()  # collective
            if self.world.stop:
                raise Stopped(128 + self.world.stop)
        self.lap_start = time.perf_counter()

    def reset_environments(self) -> np.ndarray:
        """Reset all environments, after a checkpoint from other seeds -> observations (n, *shape)."""
        self.needs_reset = False
        for policy in self.policies:
            policy.calls = 0
        return self.envs.reset(self.num_checkpoints)

    def row_due(self, global_step: int, log_every: int) -> bool:
        """Whether to log a row: every `log_every`, before a checkpoint, where the run may end."""
        before = self.global_step
        self.lap()
        if crossed(STOP_PERIOD, before, global_step):
            self.world.gather([])  # collective: stop requests
        may_end = self.args.stop_at_return is not None and crossed(self.args.eval_every, before, global_step)
        if global_step == self.last_step or self.world.stop or may_end:
            return True
        return crossed(log_every, before, global_step) or crossed(self.args.checkpoint_every, before, global_step)

    def log(self, global_step: int, more: dict[str, float]) -> None:
        """Write a row: means of what losses reported and of ended episodes; `more` columns."""
        self.lap()
        for name in [*self.reported]:
            self._sum_reported(name)
        sums = np.column_stack([self.envs.pop_sums(), *self.sums.values()])
        table = self.world.gather([*sums.ravel(), *self.seconds.values()])  # collective
        totals, seconds = np.split(table, [sums.size], axis=1)
        returns, lengths, episodes, *losses = totals.reshape(self.world.num_shards, -1).sum(0).tolist()
        row = dict(zip(self.seconds, seconds.max(0).tolist(), strict=True))  # the slowest rank's
        row["charts/episodes"] = int(episodes)
        if episodes:
            row["charts/episodic_return"] = returns / episodes
            row["charts/episodic_length"] = lengths / episodes
        for (name, count), total in zip(self.counts.items(), losses, strict=True):
            row[f"losses/{name}"] = total / count / self.world.num_shards
        for of_row in (self.sums, self.counts, self.seconds):
            of_row.clear()
        self.logger.log(global_step, row | more)

    def _sum_reported(self, name: str) -> None:
        updates = self.reported.pop(name)
        self.counts[name] += len(updates)
        self.sums[name] += np.array([torch.stack(x).double().sum().item() for x in zip(*updates, strict=True)])

    def lap(self, column: str = "time/rollout") -> None:
        """Count the seconds from now on for this column, those before for the last call's."""
        now = time.perf_counter()
        self.seconds[self.column] += now - self.lap_start
        self.column = column
        self.lap_start = now

    def evaluate_and_checkpoint(self, global_step: int, may_checkpoint: bool = True) -> bool:
        """Evaluate and write a checkpoint where these are due -> whether the run is to end.

        `may_checkpoint`: False while the script holds data that a checkpoint would lack; a due one waits.
        """
        args = self.args
        before = self.global_step
        self.global_step = global_step
        if self.world.stop:
            return True
        last = global_step == self.last_step
        if args.eval_every and (last or crossed(args.eval_every, before, global_step)):
            score = self._evaluate()  # collective
            if self.world.stop or (args.stop_at_return is not None and score >= args.stop_at_return):
                return True
        self.checkpoint_due |= crossed(args.checkpoint_every, before, global_step)
        if self.checkpoint_due and may_checkpoint and not last:
            self.checkpoint_due = False
            check_equal(global_step, self.state, self.world)  # collective
            self.num_checkpoints += 1
            self.checkpoints.write(global_step, self.num_checkpoints)  # collective
            self.needs_reset = True
        self.lap_start = time.perf_counter()
        return False

    @generators_kept()
    def _evaluate(self) -> float:
        """Compare ranks, then play and log the evaluation -> its mean return."""
        check_equal(self.global_step, self.state, self.world)  # collective
        row, episode = evaluate(self.act, self.args, self.world, self.logger.note)  # collective
        if self.first_obs is not None and not np.array_equal(episode.first_obs, self.first_obs):
            self.logger.note("evaluations began otherwise from the same seeds: no run of this task repeats")
        self.first_obs = episode.first_obs
        if not self.world.stop:  # which cuts it short
            self.logger.log(self.global_step, row)
            self.logger.film(self.global_step, episode)
        return row["eval/episodic_return"]

    def finish(self) -> None:
        """Compare ranks; write model.pt, with what is registered."""
        check_equal(self.global_step, self.state, self.world)  # collective
        if self.args.save_model and self.logger.enabled:
            args = {name: x for name, x in vars(self.args).items() if name not in MAY_CHANGE_ON_RESUME}
            model = {"args": args, "global_step": self.global_step}
            model |= {name: state_of(x) for name, x in for_model(self.state).items()}
            write_whole(self.logger.dir / "model.pt", partial(torch.save, model))


@contextmanager
def open_run(
    args: RunArgs, script: str, columns: tuple[str, ...], action_spaces: tuple[type[gym.Space], ...]
) -> Iterator[Run]:
    """Open environments, the run directory, with the script's `columns`, and the process group."""
    world = World(args.cuda, args.shards)
    args.require_multiple("num_envs", world.num_shards, "--shards" if world.sharded else "the number of processes")
    size = args.num_envs // world.num_shards
    parts = [range(shard * size, (shard + 1) * size) for shard in world.shards]
    with process_kept(), closing(Environments(args, TRAINING, parts, world)) as envs:
        space = envs.single_action_space
        integers = isinstance(space, gym.spaces.Box) and not np.issubdtype(space.dtype, np.floating)
        if integers or not isinstance(space, action_spaces):
            needed = " or ".join(kind.__name__ for kind in action_spaces).replace("Box", "Box of floats")
            fault = f"must be {needed}, not {one_line(envs.action_space)} (docs/environments.md)"
            raise BadInput(f"--env-id {args.env_id}: its actions {fault}.")
        torch.set_num_threads(args.num_threads or 1)  # until the networks are known
        with Logger(args, Path(script), columns, world) as logger, world.open(args.timeout):
            if "flattened" in envs.envs.metadata:
                numbers = f"{envs.single_observation_space.shape[0]} numbers"
                logger.note(f"observations are flattened: {envs.envs.metadata['flattened']} to {numbers}")
            logger.compare_ranks()  # collective
            run = Run(args, world, envs, logger)
            try:
                yield run
                run.finish()  # collective
            finally:
                run.gradients.clear()  # gloo may abort the process if a DDP module outlives its group
