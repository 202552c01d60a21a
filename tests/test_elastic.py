"""Restarts: nodes that come and go, and wandb over stops."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from elastic import ELASTIC, elastic, two_namespaces
from runs import PATIENCE, ROOT, Run, edited, finish, free_port, same_run, start, wait_until
from test_output import wandb_history, wandb_records


def test_a_run_whose_second_rank_never_comes_says_so(tmp_path):
    """Before --timeout ends it, and in torch's own words."""
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "RANK": "0", "WORLD_SIZE": "2"}
    run = finish(start("ppo_ddp.py", 1, f"--timeout 10 --run-dir {tmp_path / 'run'}", **place), tmp_path / "run")
    assert run.code == 1 and "waiting for clients. 1/2 clients joined." in run.err, run.err


TRACKED = "--num-envs 4 --num-steps 32 --total-timesteps 1536 --checkpoint-every 512 --track --resume"


def test_wandb_offline_goes_on_as_the_same_run(tmp_path):
    """Killed and continued offline: the same id in a second folder, which holds all rows of metrics.csv once."""
    flags = f"{TRACKED} --run-dir {tmp_path / 'run'}"
    env = {"LOCKSTEP_FAULT": "kill@0@33"}
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


class Artifact:
    def __init__(self, *_, **__): pass
    def add_file(self, *_, **__): pass


class Video:
    def __init__(self, path, format): self.path = path
    def __str__(self): return self.path


class Run:
    id, starting_step, dir = "abc", int(os.environ["THERE"]), "wandb/run-1-abc/files"
    def define_metric(self, *_, **__): pass
    def log_artifact(self, *_): pass
    def finish(self, **_): pass
    def log(self, row, step): note([step, row])


def note(what):
    with open(os.environ["SENT"], "a") as file:
        file.write(json.dumps(what, default=str) + "\\n")


def Settings(**settings):
    return settings


def init(id, resume, **_):
    note([id, resume])
    return Run()
"""


def test_wandb_is_sent_what_it_lacks(tmp_path):
    """A run that goes on online sends each row that wandb lacks, once, under its number in metrics.csv."""
    (tmp_path / "wandb.py").write_text(STUB)
    flags, sent, there = f"{TRACKED} --run-dir {tmp_path / 'run'}", tmp_path / "sent", 3  # rows
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "SENT": str(sent)}
    fault = {"LOCKSTEP_FAULT": "kill@0@33", "THERE": "0"}
    assert finish(start("ppo_ddp.py", 1, flags, launched=True, **fault, **env), tmp_path / "run").code == -9
    numbers = [json.loads(line)[0] for line in sent.read_text().splitlines()]
    assert numbers == [None, *range(8)]
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


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("case", ["ppo", "ppg", "dqn", "sac"])
def test_nodes_come_and_go(case, seed, tmp_path):
    """Five losses at random moments; with seed 2 between two network namespaces, where a node is also cut off."""
    if seed == 1:
        assert elastic(case, 5, seed, tmp_path)
        return
    if os.geteuid() != 0 or subprocess.run(["ip", "netns"], capture_output=True).returncode != 0:
        pytest.skip("network namespaces need Linux, root and the ip command")
    with two_namespaces() as names:
        assert elastic(case, 5, seed, tmp_path, names)


def block_of(page: str, first: str) -> str:
    """The indented block of a page that has a line with `first`."""
    blocks = re.findall(r"(?:^    .*\n)+", (ROOT / "docs" / page).read_text(), re.MULTILINE)
    (block,) = (block for block in blocks if first in block)
    return re.sub(r"^    ", "", block, flags=re.MULTILINE)


def test_the_variables_that_the_docs_set_are_those_of_the_tests():
    """What was tried is what is told."""
    (line,) = (line for line in block_of("launching.md", "--nnodes=1:2").splitlines() if line.startswith("export "))
    assert dict(word.split("=") for word in line.split()[1:]) == ELASTIC


SRUN = """#!/bin/bash
for node in $(seq "$SLURM_NNODES"); do "$@" & echo $! >> "$FAKE/steps"; done
code=0; for pid in $(jobs -p); do wait "$pid" || code=1; done; exit $code
"""
SCONTROL = """#!/bin/bash
if [ "$1" = requeue ]; then echo "$2" > "$FAKE/requeued"; kill $(cat "$FAKE/steps"); exit; fi
[ "$1 $2 $3" = "show hostnames two,nodes" ] && echo localhost && echo other
"""


@pytest.mark.slow
def test_slurm_requeues_the_script_of_the_docs(tmp_path):
    """The script as it stands, but for its sizes, with a fake srun and scontrol: ended before its time limit while both
    nodes train, then on one node to the end; the bytes are those of one process that nobody ended."""
    flags = "--num-steps 32 --total-timesteps 4096 --eval-every 0 --save-model"
    script, run_dir = block_of("resume.md", "scontrol requeue"), tmp_path / "run"
    sizes = {"--nproc_per_node=4": "--nproc_per_node=1", "29400": str(free_port())}
    sizes |= {"--num-envs 64": f"--num-envs 8 {flags}", "1000000": "512", "runs/a": str(run_dir)}
    sizes |= {"ppo_ddp.py": f"{ROOT}/tests/launcher.py ppo_ddp.py"}
    script = edited("docs/resume.md", script, *sizes.items())
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "script": script}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.path.dirname(sys.executable)}:{os.environ['PATH']}", "FAKE": str(tmp_path)}
    env |= {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "two,nodes", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    env |= {"LOCKSTEP_DTYPE": "float32", "LOCKSTEP_PAUSE": "0.2", "CUDA_VISIBLE_DEVICES": ""}

    def job(nodes: int, restarts: int) -> subprocess.Popen:
        place = {"SLURM_NNODES": str(nodes), "SLURM_RESTART_COUNT": str(restarts)}
        with open(tmp_path / "out", "ab") as out:  # --open-mode=append
            return subprocess.Popen([tmp_path / "script"], env=os.environ | env | place, stdout=out, stderr=out)

    batch = job(2, 0)
    wait_until(lambda: any((run_dir / "checkpoints").glob("[0-9]*[0-9]")), batch)
    batch.send_signal(signal.SIGTERM)
    batch.wait(PATIENCE)
    assert (tmp_path / "requeued").read_text() == "17\n"
    deadline = time.monotonic() + PATIENCE
    while any(os.path.exists(f"/proc/{pid}") for pid in (tmp_path / "steps").read_text().split()):
        assert time.monotonic() < deadline, (tmp_path / "out").read_text()
        time.sleep(0.05)
    assert not (run_dir / "finished").exists()
    again = job(1, 1)
    assert again.wait(PATIENCE) == 0, (tmp_path / "out").read_text()
    out = (tmp_path / "out").read_text()
    assert "on 2 process(es)" in out and "going on from" in out and "on 1 process(es)" in out, out
    flags = f"{flags} --num-envs 8 --shards 8 --checkpoint-every 512 --run-dir {tmp_path / 'calm'}"
    calm = finish(start("ppo_ddp.py", 1, flags, launched=True, LOCKSTEP_DTYPE="float32"), tmp_path / "calm")
    assert calm.code == 0, calm.err
    assert same_run(calm, Run(0, "", "", run_dir)) == ""
