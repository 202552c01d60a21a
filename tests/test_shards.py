"""`--shards`: the same float32 bytes at any number of processes; what a run gives to each shard."""

import gc
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import ppo_ddp
from common import processes
from common.processes import BadInput, World
from common.run import CHUNK, Run
from common.shards import Gradient
from common.tensors import to_tensor
from runs import finish, fork, run, same_run, start, train

PPO = "--env-id tests.envs:ShortCartPole-v0 --num-envs 8 --num-steps 32 --total-timesteps 1536 --eval-every 800"
PPO += " --eval-episodes 6"
SLOWLY = "--update-epochs 10 --learning-rate 1e-4"  # so that the epoch of the early stop depends on each shard's part
PPG = f"{PPO} --n-pi 3 --aux-epochs 2 --num-aux-minibatches 8"
DQN = "--num-envs 8 --total-timesteps 1600 --learning-starts 1000 --buffer-size 1200 --eval-every 800"
DQN += " --eval-episodes 6"
SAC = "--num-envs 4 --batch-size 64 --total-timesteps 840 --learning-starts 800 --buffer-size 812"
SAC += " --eval-every 420 --eval-episodes 3"
MINATAR = "--env-id MinAtar/Breakout-v1 --num-envs 4 --eval-every 512 --eval-episodes 3"
IMAGES = f"{MINATAR} --num-steps 32 --total-timesteps 1024"
PONG = "--env-id ALE/Pong-v5 --num-envs 4 --eval-every 0"
BOX = f"{PPO} --env-id tests.envs:NoisyPendulum-v0 --total-timesteps 1024 --norm-adv batch --norm-obs"
DQN_PONG = f"{PONG} --buffer-size 400 --total-timesteps 560 --learning-starts 480 --batch-size 16 --log-every 200"
CASES = {
    "ppo": ("ppo_ddp.py", 8, f"{PPO} --norm-obs {SLOWLY} --total-timesteps 1024 --target-kl 0.0001 --seed 4", (1, 8)),
    "ppo box, batch": ("ppo_ddp.py", 2, BOX, (1, 2)),
    "ppo compiled": ("ppo_ddp.py", 2, f"{PPO} --total-timesteps 1024 --compile", (1, 2)),
    "ppo minatar": ("ppo_ddp.py", 4, IMAGES, (1, 2)),
    "ppo pong": ("ppo_ddp.py", 2, f"{PONG} --num-steps 8 --total-timesteps 64 --update-epochs 2", (1, 2)),
    "ppg": ("ppg_ddp.py", 4, f"{PPG} --env-id Pendulum-v1 --norm-adv none --no-norm-reward", (1, 2)),
    "ppg minatar": ("ppg_ddp.py", 2, f"{IMAGES} --n-pi 4 --aux-epochs 1", (1, 2)),
    "dqn": ("dqn_ddp.py", 4, f"{DQN} --prioritized --n-step 3 --double-q --dueling", (1, 4)),
    "dqn minatar": ("dqn_ddp.py", 4, f"{MINATAR} --total-timesteps 1200 --learning-starts 800", (1, 2)),
    "dqn pong": ("dqn_ddp.py", 2, f"{DQN_PONG} --prioritized --n-step 3", (1, 2)),
    "sac": ("sac_ddp.py", 4, f"{SAC} --prioritized --policy-frequency 3", (1, 2)),
}


@pytest.mark.parametrize("case", [pytest.param(x, marks=[pytest.mark.slow] * (x == "ppo compiled")) for x in CASES])
def test_the_same_bytes_at_any_number_of_processes(case, tmp_path):
    """And where a layer's result for one row depends on how many rows it is given."""
    if case == "ppo compiled" and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("without AVX2 torch 2.13 writes C++ that does not compile")
    script, shards, flags, sizes = CASES[case]
    flags, fault = f"{flags} --shards {shards} --save-model", {"LOCKSTEP_FAULT": "rows@0@0"}
    first, *others = (run(script, n, flags, tmp_path / str(n), "float32", **fault) for n in sizes)
    for other in others:
        assert same_run(first, other) == "" and len(other.rows) >= 2
    if case == "ppo compiled":
        assert "--compile:" not in first.out
    if case == "ppo":
        assert 1 < len(set(first.column("losses/epochs"))), "no early stop"
        assert max(first.column("charts/episodic_length")) > 24.0, "episodes of at most 30: hardly one was truncated"


def test_threads_of_blas_do_not_matter(tmp_path):
    """`python` leaves OMP_NUM_THREADS unset; torchrun sets 1."""
    flags = "--env-id Pendulum-v1 --num-envs 32 --shards 2 --num-steps 16 --total-timesteps 1024 --eval-every 0"
    runs = []
    for threads in ("1", "2"):
        env = {"OMP_NUM_THREADS": threads, "OPENBLAS_CORETYPE": "Haswell"}  # not every kind rounds otherwise on two
        words = f"{flags} --run-dir {tmp_path / threads}"
        runs.append(finish(start("ppo_ddp.py", 1, words, **env), tmp_path / threads))
        assert runs[-1].code == 0, runs[-1].err
    assert runs[0].rows == runs[1].rows


def test_the_number_of_shards_is_part_of_the_experiment(tmp_path):
    """--shards 1 and 4 sum in other orders; without, one process is one shard."""
    flags, settings = f"{PPO} --total-timesteps 512 --eval-every 0", ("", "--shards 1", "--shards 4")
    rows = [run("ppo_ddp.py", 1, f"{flags} {x}", tmp_path / str(i), "float32").rows for i, x in enumerate(settings)]
    assert rows[0] == rows[1] != rows[2]


@pytest.mark.parametrize("world_size, shards, nearest", [(4, 2, 4), (1, 3, 4), (3, 4, 4)])
def test_shards_that_do_not_fit_the_processes_are_refused(world_size, shards, nearest, monkeypatch):
    for name, value in {"RANK": 0, "WORLD_SIZE": world_size}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(BadInput, match=f"^--shards {shards}: must be a power of two, such as {nearest};"):
        World(False, shards)


UNLIKE = [nn.Dropout(0.1), nn.RReLU(), nn.BatchNorm1d(2), nn.InstanceNorm1d(2, track_running_stats=True)]


@pytest.mark.parametrize("module", UNLIKE)
def test_a_module_that_each_process_would_have_otherwise_is_refused_by_name(module):
    """With --shards or on several processes; not after `eval`, nor on one process without."""
    loss = nn.Sequential(nn.Linear(2, 2), nn.Sequential(module))
    with pytest.raises(BadInput, match=r"^1\.0.*: \w+ (draws|keeps)"):
        Gradient(loss, World(False, 2), False, print)
    Gradient(loss, World(False), False, print)
    module.eval()
    Gradient(loss, World(False, 2), False, print)


def test_a_loss_without_ddp_is_refused_on_several_processes():
    world = World(False)
    world.world_size = 2
    with pytest.raises(BadInput, match=r"^Linear: must be in DDP\(...\) on several processes[.]$"):
        Gradient(nn.Linear(2, 2), world, False, print)


class Loss(nn.Module):
    """Of random sizes: one layer frozen, one used twice, weights that lie channels-last."""

    def __init__(self, rng: np.random.Generator) -> None:
        super().__init__()
        width = int(rng.integers(2, 40))
        self.inner = nn.Linear(width, width)
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, width), nn.Tanh(), self.inner)
        self.layers.to(memory_format=torch.channels_last)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, more: tuple) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        rows = (self.scale * self.inner(self.frozen(self.layers(x)).relu())).square().mean(1) * more[0]
        return rows.mean(), {"loss": rows.mean().detach(), "rows": rows.detach()}


def check_gradients(world: World) -> None:
    num, here = world.num_shards, slice(world.shards[0], world.shards[-1] + 1)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        torch.manual_seed(seed)
        loss = Loss(rng)
        trained = [p for p in loss.parameters() if p.requires_grad]
        optimizer = torch.optim.Adam(trained, 1e-2, fused=True)
        gradient = Gradient(DDP(loss, bucket_cap_mb=0.001) if world.world_size > 1 else loss, world, False, print)
        for _ in range(3):
            batches = [torch.from_numpy(rng.normal(size=(5, 3, 6, 6)).astype("f")) for _ in range(num)]
            weights = torch.from_numpy(rng.random((num, 5)).astype("f"))
            alone = [loss(x, (w,)) for x, w in zip(batches, weights, strict=True)]
            parts = [torch.autograd.grad(value, trained) for value, _ in alone]
            optimizer.zero_grad()
            stats = gradient((torch.cat(batches[here]), (weights[here].flatten(),)), [5] * len(world.shards))
            for (_, expected), given in zip(alone[here], stats, strict=True):
                assert all(given[name].equal(x) for name, x in expected.items())
            for p, *x in zip(trained, *parts, strict=True):
                total = x[0] + x[1] if num == 2 else (x[0] + x[1]) + (x[2] + x[3])
                assert p.grad.equal(total / num) and p.grad.stride() == p.stride()
            optimizer.step()


def mean_gradients(memory: bool, shards: int | None) -> None:
    """In a process group, which no DDP module outlives, since gloo may abort the process then."""
    torch.set_num_threads(1)
    os.sched_getaffinity = lambda _: {*range(8)}  # more ranks than cores share memory too
    if not memory:
        processes.share_memory = lambda *_: None
    world = World(False, shards)
    with world.open(60.0):
        assert bool(world.memory) == (memory and world.world_size > 1)
        assert world.gather([world.rank, 0.5]).tolist() == [[float(rank), 0.5] for rank in range(world.world_size)]
        check_gradients(world)
        gc.collect()
        assert not [x for x in gc.get_objects() if type(x) is DDP]


TREES = [(1, False, 4), (2, True, 4), (2, False, 4), (4, True, 4), (4, False, 4), (2, True, None), (2, False, None)]


@pytest.mark.parametrize("world_size, memory, shards", [*TREES, (4, True, None)])
def test_gradients_are_means_over_shards_added_along_a_tree(world_size, memory, shards, tmp_path):
    """Through shared memory and through sockets; without --shards of as many as ranks."""
    fork(mean_gradients, (memory, shards), world_size, tmp_path / "out", {})


class Rows(nn.Module):
    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.linear = nn.Linear(size, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        rows = self.linear(x).squeeze(-1)
        return rows.square().mean(), {"mean": rows.detach().mean(), "rows": rows.detach()}


def run_of(shards: int, compiles: bool = False, **registered) -> Run:
    """A run in this process, without environments."""
    size = 4 // shards
    envs = SimpleNamespace(shards=[slice(k * size, (k + 1) * size) for k in range(shards)])
    new = Run(SimpleNamespace(compile=compiles), World(False, shards), envs, SimpleNamespace(note=pytest.fail))
    new.world.gather_objects = lambda value: [value]
    new.register(**registered)
    new.lap()
    return new


def test_by_shard_gives_a_function_each_shards_rows_alone():
    """In chunks, for memory; results in the places of their inputs."""
    seen, steps = [], CHUNK  # 2 environments of a shard: two chunks
    obs = torch.randn(steps, 4, 3)

    def function(x):
        seen.append(len(x))
        return x.sum(-1), x[:, :2]

    sums, parts = run_of(2).by_shard(function, obs)
    assert seen == [CHUNK] * 4 and sums.equal(obs.sum(-1)) and parts.equal(obs[..., :2])


def test_draws_from_the_default_generator_are_told_once(tmp_path, monkeypatch, capfd):
    forward = ppo_ddp.PPOLoss.forward

    def with_noise(self, mb):
        loss, stats = forward(self, mb)
        return loss, stats | {"noise": torch.randn(())}

    train(ppo_ddp, tmp_path / "a", num_steps=16, total_timesteps=192)
    assert "default generator" not in capfd.readouterr().out
    monkeypatch.setattr(ppo_ddp.PPOLoss, "forward", with_noise)
    monkeypatch.setattr(ppo_ddp, "COLUMNS", (*ppo_ddp.COLUMNS, "losses/noise"))
    train(ppo_ddp, tmp_path / "c", num_steps=16, total_timesteps=192)
    [told] = [line for line in capfd.readouterr().out.splitlines() if "default generator" in line]
    assert told.startswith("step 64: something drew") and "docs/modify.md" in told


@pytest.mark.parametrize("offset", range(0, 64, 4))
def test_what_a_shard_computes_begins_at_a_multiple_of_64_bytes(offset):
    """Wherever its rows begin; what has such an address already is no copy."""
    memory = torch.zeros(64).numpy()
    rows = memory[offset // 4 : offset // 4 + 14].reshape(2, 7)
    assert to_tensor(rows).data_ptr() % 64 == 0
    assert np.shares_memory(to_tensor(rows).numpy(), memory) == (offset == 0)
    strided = torch.zeros(3, 32).numpy()[:, offset // 4 : offset // 4 + 7]  # such as the rows of one environment
    assert to_tensor(strided).is_contiguous()
