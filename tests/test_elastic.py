"""Restarts: launchers that come and go, the name of an attempt, and wandb over stops."""

import csv
import json
import threading

import pytest
import torch.distributed as dist
from test_output import wandb_history, wandb_records

from common.distributed import attempt_name
from runs import ROOT, finish, start


def names(store, world_size, late=0.0):
    """What each rank of an attempt takes as its name; None for one that does not come to any."""
    found = [None] * world_size

    def join(rank):
        try:
            found[rank] = attempt_name(store, rank, world_size, 5.0)
        except TimeoutError:
            pass

    ranks = [threading.Thread(target=join, args=(rank,)) for rank in range(world_size)]
    for rank in ranks:
        rank.start()
        rank.join(late)
    for rank in ranks:
        rank.join()
    return found


@pytest.mark.parametrize("late", [0.0, 0.3], ids=["at once", "one after another"])
def test_an_attempt_has_a_name_that_no_other_had(late):
    """In one store: all ranks of an attempt agree, also after one that died while it called, and at another size."""
    store, seen = dist.HashStore(), set()
    for world_size in (3, 3, 1, 2, 4):
        for rank in range(world_size):  # of one that was killed before it had its answer
            store.set(f"call/{rank}", "dead")
        (name,) = set(names(store, world_size, late))
        assert name is not None and name not in seen
        seen.add(name)


def test_ranks_that_do_not_meet_say_so(monkeypatch):
    """A rank alone ends within its limit: rank 0 without the others, and another without rank 0."""
    store = dist.HashStore()
    with pytest.raises(TimeoutError, match="rank 0: no call/1"):
        attempt_name(store, 0, 2, 0.2)
    with pytest.raises(TimeoutError, match="rank 1: no answer"):
        attempt_name(store, 1, 2, 0.2)
    with pytest.raises(TimeoutError, match="rank 0: no"):  # the one that called is gone
        attempt_name(store, 0, 2, 0.2)


TRACKED = "--num-envs 4 --num-steps 32 --total-timesteps 1536 --checkpoint-every 512 --track --resume"


def test_wandb_offline_goes_on_as_the_same_run(tmp_path):
    """Killed and continued offline: the same id in a second folder, which holds all rows of metrics.csv once."""
    flags = f"{TRACKED} --run-dir {tmp_path / 'run'}"
    env = {"LOCKSTEP_FAULT": "kill@0@27"}
    killed = finish(start("ppo_ddp.py", 1, flags, launched=True, cwd=tmp_path, **env), tmp_path / "run")
    assert killed.code == -9, killed.err
    done = finish(start("ppo_ddp.py", 1, flags, cwd=tmp_path), tmp_path / "run")
    assert done.code == 0 and "going on from" in done.out, done.err
    first, second = sorted(tmp_path.glob("wandb/offline-run-*"))
    assert first.name.split("-")[-1] == second.name.split("-")[-1] == (tmp_path / "run" / "wandb_id").read_text()
    history = [int(row["global_step"]) for row in wandb_history(wandb_records(next(second.glob("*.wandb"))))]
    assert history == [int(row["global_step"]) for row in done.rows] and len(history) == 14


STUB = """
import json, os
from types import SimpleNamespace


class Artifact:
    def __init__(self, *_, **__): pass
    def add_file(self, *_, **__): pass


class Run:
    id, starting_step = "abc", int(os.environ["THERE"])
    def define_metric(self, *_, **__): pass
    def log_artifact(self, *_): pass
    def finish(self, **_): pass
    def log(self, row, step): note([step, row])


def note(what):
    with open(os.environ["SENT"], "a") as file:
        file.write(json.dumps(what) + "\\n")


def setup():
    return SimpleNamespace(settings=SimpleNamespace(mode="online"))


def init(id, resume, **_):
    note([id, resume])
    return Run()
"""


@pytest.mark.parametrize("there", [0, 3, 11], ids=["nothing", "less than the checkpoint", "more than the checkpoint"])
def test_wandb_is_sent_what_it_lacks(there, tmp_path):
    """A run that goes on online sends each row that wandb lacks, once, under its number in metrics.csv."""
    (tmp_path / "wandb.py").write_text(STUB)
    flags, sent = f"{TRACKED} --run-dir {tmp_path / 'run'}", tmp_path / "sent"
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "SENT": str(sent)}
    fault = {"LOCKSTEP_FAULT": "kill@0@27", "THERE": "0"}
    assert finish(start("ppo_ddp.py", 1, flags, launched=True, **fault, **env), tmp_path / "run").code == -9
    assert [json.loads(line)[0] for line in sent.read_text().splitlines()] == [None, *range(8)]
    sent.unlink()
    done = finish(start("ppo_ddp.py", 1, flags, THERE=str(there), **env), tmp_path / "run")
    assert done.code == 0 and "going on from" in done.out, done.err
    first, *rows = (json.loads(line) for line in sent.read_text().splitlines())
    assert first == ["abc", "allow"]
    with open(tmp_path / "run" / "metrics.csv", newline="") as file:
        expected = [{name: float(cell) for name, cell in row.items() if cell} for row in csv.DictReader(file)]
    for row in expected:
        if "time/SPS" in row:
            row["charts/SPS"] = row.pop("time/SPS")
    assert len(expected) == 14 and rows == [[number, row] for number, row in enumerate(expected)][there:]
