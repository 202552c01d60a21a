"""`--shards`: the same bytes, in float32, at any number of processes."""

import gc
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.testing._internal.distributed.fake_pg import FakeStore

import ppo_ddp
from common.distributed import World
from common.environments import EVALUATION, make_envs
from common.episodes import evaluate
from common.errors import BadInput, Fault
from common.shards import Gradients, sum_over_ranks
from common.tensors import to_tensor
from runs import finish, fork, run, same_run, start

PPO = "--env-id tests.envs:ShortCartPole-v0 --num-envs 8 --num-steps 32 --total-timesteps 1536 --eval-every 800"
PPO += " --eval-episodes 6"
SLOWLY = "--update-epochs 10 --learning-rate 1e-4"  # so that the epoch of the early stop depends on each shard's part
PPG = f"{PPO} --n-pi 3 --aux-epochs 2 --num-aux-minibatches 8"
DQN = "--num-envs 8 --total-timesteps 1600 --learning-starts 1000 --buffer-size 1200 --eval-every 800"
DQN += " --eval-episodes 6"
SAC = "--num-envs 4 --batch-size 64 --total-timesteps 840 --learning-starts 800 --buffer-size 812"
SAC += " --eval-every 420 --eval-episodes 3"
MINATAR = "--env-id MinAtar/Breakout-v1 --num-envs 4 --eval-every 512 --eval-episodes 3"
PONG = "--env-id ALE/Pong-v5 --num-envs 4 --eval-every 0"
CASES = {
    "ppo": ("ppo_ddp.py", 8, f"{PPO} --norm-obs {SLOWLY} --target-kl 0.0001", (1, 2, 8)),
    "ppo box, batch": (
        "ppo_ddp.py",
        2,
        f"{PPO} --env-id tests.envs:NoisyPendulum-v0 --total-timesteps 1024 --norm-adv batch --norm-obs",
        (1, 2),
    ),
    "ppo compiled": ("ppo_ddp.py", 2, f"{PPO} --total-timesteps 1024 --compile", (1, 2)),
    "ppo minatar": ("ppo_ddp.py", 4, f"{MINATAR} --num-steps 32 --total-timesteps 1024", (1, 2)),
    "ppo pong": ("ppo_ddp.py", 2, f"{PONG} --num-steps 8 --total-timesteps 64 --update-epochs 2", (1, 2)),
    "ppg": ("ppg_ddp.py", 4, f"{PPG} --env-id Pendulum-v1 --norm-adv none --no-norm-reward", (1, 2)),
    "ppg minatar": (
        "ppg_ddp.py",
        2,
        f"{MINATAR} --num-steps 32 --total-timesteps 1024 --n-pi 4 --aux-epochs 1",
        (1, 2),
    ),
    "dqn": ("dqn_ddp.py", 4, f"{DQN} --prioritized --n-step 3 --double-q --dueling", (1, 2, 4)),
    "dqn minatar": ("dqn_ddp.py", 4, f"{MINATAR} --total-timesteps 1200 --learning-starts 800", (1, 2)),
    "dqn pong": (
        *("dqn_ddp.py", 2),
        f"{PONG} --buffer-size 400 --total-timesteps 560 --learning-starts 480 --batch-size 16 --log-every 200",
        (1, 2),
    ),
    "sac": ("sac_ddp.py", 4, f"{SAC} --prioritized --policy-frequency 3", (1, 2)),
}
SLOW = {"ppo compiled", "ppo pong", "ppg minatar", "dqn pong"}


def same_bytes(script, shards, flags, sizes, tmp_path, **env):
    flags = f"{flags} --shards {shards} --save-model"
    runs = [run(script, n, flags, tmp_path / str(n), "float32", **env) for n in sizes]
    for other in runs[1:]:
        assert same_run(runs[0], other) == "" and len(other.rows) >= 2
    return runs[0]


@pytest.mark.parametrize("case", [pytest.param(x, marks=[pytest.mark.slow] if x in SLOW else []) for x in CASES])
def test_the_same_bytes_at_any_number_of_processes(case, tmp_path):
    """And where a layer's result for one row depends on how many rows it is given, as on some processors it may."""
    if case == "ppo compiled" and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("without AVX2 torch 2.13 writes C++ that does not compile")
    first = same_bytes(*CASES[case], tmp_path, LOCKSTEP_FAULT="rows@0@0")
    if case == "ppo compiled":
        assert "--compile:" not in first.out
    if case == "ppo":
        assert 1 < len(set(first.column("losses/epochs"))), "no early stop"
        assert max(first.column("charts/episodic_length")) > 24.0, "episodes of at most 30: hardly one was truncated"


def test_threads_of_blas_do_not_matter(tmp_path):
    """As users start it: `python` leaves OMP_NUM_THREADS unset, so BLAS would take all cores; torchrun sets 1."""
    flags = "--env-id Pendulum-v1 --num-envs 32 --shards 2 --learning-starts 320 --total-timesteps 640"
    flags += " --train-frequency 8 --log-every 320 --eval-every 0"
    runs = []
    for size, threads in ((1, "2"), (2, "1")):
        words, run_dir = f"{flags} --run-dir {tmp_path / threads}", tmp_path / threads
        process = start("sac_ddp.py", size, words, OMP_NUM_THREADS=threads, OPENBLAS_CORETYPE="Haswell")
        runs.append(finish(process, run_dir))  # not every processor's products round otherwise on two threads
        assert runs[-1].code == 0, runs[-1].err
    assert runs[0].rows == runs[1].rows


def test_the_number_of_shards_is_part_of_the_experiment(tmp_path):
    """--shards 1 and 4 sum in other orders; without, one process is one shard."""
    flags, settings = f"{PPO} --total-timesteps 512 --eval-every 0", ("", "--shards 1", "--shards 4")
    rows = [run("ppo_ddp.py", 1, f"{flags} {x}", tmp_path / str(i), "float32").rows for i, x in enumerate(settings)]
    assert rows[0] == rows[1] != rows[2]


@pytest.mark.parametrize(
    "world_size, shards, said",
    [(4, 2, "a multiple of the number of processes .4., such as 4"), (3, 4, "left out on 3 processes")],
)
def test_shards_that_do_not_fit_the_processes_are_refused(world_size, shards, said, monkeypatch):
    for name, value in {"RANK": 0, "WORLD_SIZE": world_size, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(BadInput, match=f"^--shards {shards}: must be {said}"):
        World(False, shards)


@pytest.mark.parametrize(
    "module",
    [
        nn.Dropout(0.1),
        nn.RReLU(),
        nn.BatchNorm1d(2),
        nn.InstanceNorm1d(2, track_running_stats=True),
    ],
)
def test_a_module_that_each_process_would_have_otherwise_is_refused_by_name(module):
    """With --shards or on several processes; not where it does nothing (`eval`), nor on one process without."""
    loss = nn.Sequential(nn.Linear(2, 2), nn.Sequential(module))
    with pytest.raises(BadInput, match=r"^1\.0.*: \w+ (draws|keeps)"):
        Gradients(World(False, 2)).add_loss(loss)
    Gradients(World(False)).add_loss(loss)
    module.eval()
    Gradients(World(False, 2)).add_loss(loss)


class Loss(nn.Module):
    """Of random sizes: one layer frozen, one used twice, one whose weights lie channels-last in memory."""

    def __init__(self, rng: np.random.Generator) -> None:
        super().__init__()
        width = int(rng.integers(2, 40))
        self.inner = nn.Linear(width, width)
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, width), nn.Tanh(), self.inner)
        self.layers.to(memory_format=torch.channels_last)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = (self.scale * self.inner(self.frozen(self.layers(x)).relu())).square().mean()
        return loss, {"loss": loss.detach()}


def gradients_of_losses(world: World) -> None:
    """Three backward passes each; gradients are bit for bit the tree's sum of each shard's, over their number."""
    gradients = Gradients(world)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        torch.manual_seed(seed)
        loss = Loss(rng)
        trained = [p for p in loss.parameters() if p.requires_grad]
        wrapped = DDP(loss, bucket_cap_mb=0.001, gradient_as_bucket_view=seed % 2 == 0) if world.uses_ddp else loss
        gradients.add_loss(wrapped)
        for _ in range(3):
            batches = [torch.from_numpy(rng.normal(size=(5, 3, 6, 6)).astype("f")) for _ in range(4)]
            shards = [torch.autograd.grad(loss(x)[0], trained) for x in batches]
            losses = [loss(x)[0].item() for x in batches]
            loss.zero_grad()
            stats = gradients.backward(wrapped, [batches[shard] for shard in world.shards])
            assert [x["loss"].item() for x in stats] == [losses[shard] for shard in world.shards]
            for p, *parts in zip(trained, *shards, strict=True):
                assert p.grad.equal(((parts[0] + parts[1]) + (parts[2] + parts[3])) / 4)
                torch.testing.assert_close(p.grad, torch.stack(parts).mean(0))
            with torch.no_grad():
                torch._foreach_sub_(trained, [p.grad for p in trained])


def shard_gradients(shared_memory: bool) -> None:
    """In a process group; nothing keeps a DDP module, since gloo may abort if one outlives the group."""
    torch.set_num_threads(1)
    world = World(False, 4)
    with world.process_group(60, shared_memory):
        assert bool(world.memory) == (shared_memory and 1 < world.world_size <= len(world.affinity))
        gradients_of_losses(world)
        gc.collect()
        assert not [x for x in gc.get_objects() if type(x) is DDP]


@pytest.mark.parametrize("world_size, shared_memory", [(1, True), (2, True), (4, False)])
def test_gradients_are_means_over_shards_added_along_a_tree(world_size, shared_memory, tmp_path):
    """Of 4 shards, through shared memory and through sockets: bit for bit the same on any number of processes."""
    fork(shard_gradients, (shared_memory,), world_size, tmp_path / "out", {})


def test_a_parameter_that_one_shard_alone_uses_is_refused():
    """On one process, as DDP does on several."""
    loss = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
    loss.forward = lambda x, both: (loss[0](x).sum() + (loss[1](x).sum() if both else 0.0), {})
    gradients = Gradients(World(False, 2))
    gradients.add_loss(loss)
    for used in ([True, True], [False, False], [True, False], [False, True]):
        loss.zero_grad()
        if used[0] == used[1]:
            gradients.backward(loss, [torch.ones(3, 2)] * 2, used)
        else:
            with pytest.raises(Fault, match="^a loss uses a parameter for one shard and not for another"):
                gradients.backward(loss, [torch.ones(3, 2)] * 2, used)
            gradients.earlier.clear()


def test_draws_from_the_default_generator_are_told_once(tmp_path, monkeypatch, capfd):
    """In one line, with the way that keeps the promise; a run that draws nothing there says nothing."""
    settings = {"num_steps": 16, "total_timesteps": 192, "eval_every": 0, "cuda": False}
    ppo_ddp.main(ppo_ddp.Args(**settings, run_dir=str(tmp_path / "a")))
    assert "default generator" not in capfd.readouterr().out
    forward = ppo_ddp.PPOLoss.forward
    monkeypatch.setattr(ppo_ddp.PPOLoss, "forward", lambda *inputs: (torch.randn(1), forward(*inputs))[1])
    ppo_ddp.main(ppo_ddp.Args(**settings, run_dir=str(tmp_path / "b")))
    told = [line for line in capfd.readouterr().out.splitlines() if "default generator" in line]
    assert len(told) == 1 and told[0].startswith("step 64: something drew") and "docs/modify.md" in told[0]


def test_a_rank_of_eight_exchanges_with_its_neighbours_at_growing_distances(monkeypatch):
    """Rank 3 with 2, then 1, then 7: a binary tree over the numbers of ranks, on all of them at once."""
    peers, batch = [], dist.batch_isend_irecv
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda both: (peers.append([x.peer for x in both]), batch(both))[1])
    dist.init_process_group("fake", rank=3, world_size=8, store=FakeStore())
    try:
        sum_over_ranks(torch.ones(5), SimpleNamespace(rank=3, world_size=8, memory=None, nccl=True))
    finally:
        dist.destroy_process_group()
    assert peers == [[2, 2], [1, 1], [7, 7]]


def test_gradients_of_an_earlier_step_are_refused():
    """They would be added to a shard's, or replaced."""
    loss = nn.Linear(2, 1)
    loss.forward = lambda x: ((x @ loss.weight.T + loss.bias).sum(), {})
    gradients = Gradients(World(False, 2))
    gradients.add_loss(loss)
    gradients.backward(loss, [torch.ones(3, 2)] * 2)
    with pytest.raises(Fault, match="call optimizer.zero_grad.. before"):
        gradients.backward(loss, [torch.ones(3, 2)] * 2)


def test_an_evaluation_acts_for_one_shard_at_a_time():
    """Whose observations begin at a multiple of 64 bytes."""
    seen, addresses = [], set()

    def act(obs):
        seen.append(len(obs))
        addresses.add(obs.ctypes.data % 64)
        return np.zeros(len(obs), int)

    envs = make_envs("CartPole-v1", 1, EVALUATION, range(3), (gym.spaces.Discrete,))
    envs.shards = [slice(0, 2), slice(2, 3)]
    evaluate(act, envs, 3, World(False, 2))
    envs.close()
    assert seen[:4] == [2, 1, 2, 1] and addresses == {0}


@pytest.mark.parametrize("offset", range(0, 64, 4))
def test_what_a_shard_computes_begins_at_a_multiple_of_64_bytes(offset):
    """Wherever its rows begin, since products round by the address; what has such an address already is no copy."""
    memory = torch.zeros(64).numpy()
    rows = memory[offset // 4 : offset // 4 + 14].reshape(2, 7)
    assert to_tensor(rows).data_ptr() % 64 == 0
    assert np.shares_memory(to_tensor(rows).numpy(), memory) == (offset == 0)
    strided = torch.zeros(3, 32).numpy()[:, offset // 4 : offset // 4 + 7]  # such as the rows of one environment
    assert to_tensor(strided).is_contiguous()
