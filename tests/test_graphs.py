"""--cuda-graphs, tried without a GPU: what stands in for a graph does again, to the same memory, what torch did.

It finds what a graph would get wrong: numbers that are kept and not read anew, results overwritten by the next replay,
tensors that move, and what may not be done while it records. That it is fast, only a GPU can tell (test_gpu.py).
"""

from __future__ import annotations

import csv
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import dqn_ddp
import ppg_ddp
import ppo_ddp
import sac_ddp
from common.distributed import World
from common.errors import BadInput, Fault
from common.graphs import SEEN, WARMUP, Graphed, copies, tensors_of
from common.run.loop import Run

FORBIDDEN = {"aten::_local_scalar_dense", "aten::lift_fresh"}  # values that go to Python, and come from it


class Recorder(TorchDispatchMode):
    """A graph: operators, their arguments and where their results went. Recording changes nothing."""

    replays = 0  # of all

    def __init__(self):
        super().__init__()
        self.steps, self.changed = [], {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func._schema.name in FORBIDDEN:  # DDP's list of the parameters in use, int32, is never on a GPU
            assert args[0].dtype == torch.int32, f"{func} while it is recorded"
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for x in tensors(value):
                    self.changed.setdefault(x.data_ptr(), (x, x.clone()))
        out = func(*args, **kwargs)
        self.steps.append((func, args, kwargs, out))
        return out

    @torch.no_grad()
    def replay(self):
        Recorder.replays += 1
        for func, args, kwargs, out in self.steps:
            for old, new in zip(tensors(out), tensors(func(*args, **kwargs)), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [x for part in value for x in tensors(part)] if isinstance(value, list | tuple) else []


@contextmanager
def recording(recorder, stream, capture_error_mode):
    assert capture_error_mode == "thread_local"
    with recorder:
        yield
    with torch.no_grad():
        for x, before in reversed(recorder.changed.values()):
            x.copy_(before)


class OnCPU(Graphed):
    """With each number that is a tensor on a GPU; torch reads it in float64 here."""

    made = []

    def __init__(self, *recorded):
        super().__init__(*recorded)
        self.made.append(self)

    def __call__(self, *inputs):
        return super().__call__(*tree_map_only(float, lambda x: torch.tensor(x, dtype=torch.float64), inputs))


@pytest.fixture
def emulated(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorder)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(Recorder, "replays", 0)
    monkeypatch.setattr(OnCPU, "made", [])


PPO = {"total_timesteps": 512, "num_steps": 32, "eval_every": 256, "eval_episodes": 2}
RUNS = {
    "ppo": (ppo_ddp, PPO),
    "ppo, Box": (ppo_ddp, PPO | {"env_id": "Pendulum-v1", "target_kl": 0.02}),
    "ppo, images": (ppo_ddp, PPO | {"env_id": "MinAtar/Breakout-v1"}),
    "ppo, shards": (ppo_ddp, PPO | {"shards": 2}),
    "ppg": (ppg_ddp, PPO | {"n_pi": 2, "aux_epochs": 2}),
    "ppg, shards": (ppg_ddp, PPO | {"n_pi": 2, "aux_epochs": 2, "shards": 2}),
    "dqn": (dqn_ddp, {"double_q": True, "max_grad_norm": 1.0, "prioritized": True, "env_id": "MinAtar/Breakout-v1"}),
    "dqn, shards": (dqn_ddp, {"num_envs": 4, "shards": 2, "prioritized": True}),
    "sac": (sac_ddp, {"env_id": "Pendulum-v1", "prioritized": True}),
    "sac, shards": (sac_ddp, {"env_id": "Pendulum-v1", "num_envs": 2, "shards": 2}),
}
OFF_POLICY = {"total_timesteps": 300, "learning_starts": 100, "batch_size": 16, "buffer_size": 300, "log_every": 100}
OFF_POLICY |= {"train_frequency": 2, "eval_every": 200, "eval_episodes": 2}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_with_graphs_is_the_same(name, emulated, monkeypatch, tmp_path):
    """The same bytes, though updates, and looks at images, are replays."""
    module, settings = RUNS[name]
    settings = settings if module in (ppo_ddp, ppg_ddp) else OFF_POLICY | settings
    for folder in ("without", "with"):
        if folder == "with":
            monkeypatch.setattr("common.run.loop.graphed", lambda wanted, world, *recorded: OnCPU(*recorded))
        args = module.Args(cuda=False, num_threads=1, save_model=True, run_dir=str(tmp_path / folder), **settings)
        module.main(args)
        assert (Recorder.replays > 0) == (folder == "with")
    files = [tmp_path / folder / "metrics.csv" for folder in ("without", "with")]
    without, with_graphs = ([untimed(row) for row in csv.DictReader(file.open(newline=""))] for file in files)
    assert with_graphs == without
    models = [torch.load(file.parent / "model.pt", weights_only=True) for file in files]
    assert [x.tobytes() for x in arrays(models[0])] == [x.tobytes() for x in arrays(models[1])]
    updates = [x for x in OnCPU.made if x.optimizers]
    assert len(updates) == (2 if module in (ppg_ddp, sac_ddp) else 1)
    assert all(x.recordings and x.calls.total() > WARMUP + 2 for x in updates), "hardly an update was a replay"


def test_processes_that_would_record_at_different_calls_are_refused():
    """NCCL wants an operation recorded by all or by none; sizes of parts of a batch return at other calls on each."""

    def graphed(processes, plain, size):
        world = SimpleNamespace(world_size=processes, num_shards=4, nccl=True)
        args = dqn_ddp.Args(cuda_graphs=True, batch_size=size)
        run = SimpleNamespace(args=args, world=world, replay=SimpleNamespace(plain=plain))
        return Run.graphed(run, print, torch.optim.SGD([torch.zeros(1)]))

    with pytest.raises(
        BadInput, match="^--cuda-graphs True: must be left off with --prioritized or --n-step on several"
    ):
        graphed(2, False, 128)
    with pytest.raises(BadInput, match="^--batch-size 18: must be a multiple of 4 with --cuda-graphs"):
        graphed(2, True, 18)
    assert all(isinstance(graphed(*case), Graphed) for case in ((1, False, 18), (2, True, 16)))


@pytest.mark.parametrize("nccl, fails, destroyed", [(True, True, 0), (True, False, 1), (False, True, 1)])
def test_after_a_fault_nccl_is_not_waited_for(nccl, fails, destroyed, monkeypatch):
    """Its end is a collective, which a rank that has failed would wait for until --timeout."""
    calls = []
    monkeypatch.setattr(World, "_init_process_group", lambda self, *_: setattr(self, "nccl", nccl))
    monkeypatch.setattr("common.distributed.dist.is_initialized", lambda: True)
    monkeypatch.setattr("common.distributed.dist.destroy_process_group", lambda: calls.append(1))
    world = World(cuda=False)
    world.world_size = 2
    with suppress(Fault), world.process_group(60.0):
        if fails:
            raise Fault("a fault of one rank")
    assert len(calls) == destroyed


@pytest.mark.parametrize("module, wrappers", [(ppo_ddp, 1), (ppg_ddp, 2), (dqn_ddp, 1), (sac_ddp, 2)])
def test_ddp_takes_no_time_of_its_own(module, wrappers, monkeypatch, tmp_path):
    """Every 100th call it would wait for the GPU, which may not be while a graph is recorded."""
    rates = []
    monkeypatch.setattr(DDP, "_set_ddp_runtime_logging_sample_rate", lambda self, rate: rates.append(rate))
    monkeypatch.setattr(World, "uses_ddp", property(lambda self: True, lambda *_: None), raising=False)
    settings = {"total_timesteps": 512, "num_steps": 32, "n_pi": 1, "learning_starts": 480, "shards": 2}
    settings = {name: x for name, x in settings.items() if name in module.Args.__dataclass_fields__}
    env_id = "Pendulum-v1" if module is sac_ddp else "CartPole-v1"
    module.main(
        module.Args(env_id=env_id, num_envs=4, eval_every=0, cuda=False, run_dir=str(tmp_path / "r"), **settings)
    )
    assert rates == [2**31 - 1] * wrappers


def untimed(row):
    return {name: cell for name, cell in row.items() if not name.startswith("time/")}


def arrays(value):
    if isinstance(value, dict):
        return [x for part in value.values() for x in arrays(part)]
    return [value.numpy()] if isinstance(value, torch.Tensor) else []


def test_each_set_of_shapes_is_recorded_when_it_returns(emulated):
    seen = []

    def double(x, more):
        seen.append(len(x))
        return [2 * x, (more[0] + 1,)]

    function = Graphed(double)
    for _ in range(WARMUP):
        function(torch.ones(3), [torch.zeros(1)])
    assert seen == [3] * WARMUP and not Recorder.replays
    for value in (1.0, 2.0):
        results = function(torch.full((3,), value), [torch.full((1,), value)])
        assert results[0].tolist() == [2 * value] * 3 and results[1][0].tolist() == [value + 1]
    assert seen == [3] * (WARMUP + 1) and Recorder.replays == 2
    for size in (2, 0, 2, 3, 0, 2):
        assert function(torch.ones(size), [torch.zeros(1)])[0].tolist() == [2.0] * size
    assert seen[WARMUP + 1 :] == [2, 0, 2, 0] and Recorder.replays == 6


def test_counts_of_shapes_that_do_not_return_are_bounded(emulated):
    """As of parts of a batch, which may have any size, in a run of any length; a shape that returns is recorded."""
    function = Graphed(lambda x: 2 * x)
    for size in range(1, 5 * SEEN):
        function(torch.ones(size, 1))
    assert len(function.calls) <= SEEN and not function.recordings
    for _ in range(3):
        assert function(torch.ones(7, 1)).tolist() == [[2.0]] * 7
    assert list(function.recordings) == [((7, 1),)] and Recorder.replays == 2


def test_results_are_not_those_of_the_next_call(emulated):
    function = Graphed(lambda x: x + 1)
    for _ in range(WARMUP):
        function(torch.zeros(()))
    kept = [function(torch.tensor(float(i))) for i in range(3)]
    assert [x.item() for x in kept] == [1.0, 2.0, 3.0]


def test_nests_keep_their_layout():
    image = torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    nest = [image, (torch.ones(1),)]
    copy = copies(nest)
    assert copy[0].stride() == image.stride() and copy[0].data_ptr() != image.data_ptr()
    assert isinstance(copy[1], tuple) and [x.shape for x in tensors_of(nest)] == [image.shape, (1,)]


def test_the_recorder_finds_what_a_graph_would_keep(emulated):
    """The stand-in is no better than a graph: a number of Python's stays as it was."""
    number = [1.0]
    function = Graphed(lambda x: x * number[0])
    for _ in range(WARMUP + 1):
        function(torch.ones(()))
    number[0] = 2.0
    assert function(torch.ones(())).item() == 1.0
    with pytest.raises(AssertionError, match="while it is recorded"):
        for _ in range(WARMUP + 1):
            Graphed.__call__(read, torch.ones(()))


read = Graphed(lambda x: x * x.item())


@pytest.mark.parametrize("module", [ppo_ddp, ppg_ddp, dqn_ddp, sac_ddp])
def test_without_a_gpu_graphs_are_refused(module, tmp_path):
    env_id = "Pendulum-v1" if module is sac_ddp else "CartPole-v1"
    with pytest.raises(BadInput, match="^--cuda-graphs: needs a GPU for each process; leave it off"):
        module.main(module.Args(env_id=env_id, cuda_graphs=True, run_dir=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()
