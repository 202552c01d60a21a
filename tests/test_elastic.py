"""Nodes that come and go."""

import os
import signal
import subprocess
import sys
import time

import pytest

from elastic import ELASTIC, elastic
from runs import PATIENCE, ROOT, Run, block_of, edited, finish, free_port, same_run, start, wait_until


@pytest.mark.slow
@pytest.mark.parametrize("case", ["ppo", "ppg", "dqn", "sac"])
def test_nodes_come_and_go(case, tmp_path):
    assert elastic(case, 5, 1, tmp_path)


def test_the_variables_that_the_docs_set_are_those_of_the_tests():
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
    """With a fake srun and scontrol: ended while both nodes train, then on one node to the end, in the same bytes."""
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
    assert job(1, 1).wait(PATIENCE) == 0, (tmp_path / "out").read_text()
    out = (tmp_path / "out").read_text()
    assert "on 2 process(es)" in out and "going on from" in out and "on 1 process(es)" in out, out
    flags = f"{flags} --num-envs 8 --shards 8 --checkpoint-every 512 --run-dir {tmp_path / 'calm'}"
    calm = finish(start("ppo_ddp.py", 1, flags, launched=True, LOCKSTEP_DTYPE="float32"), tmp_path / "calm")
    assert calm.code == 0, calm.err
    assert same_run(calm, Run(0, "", "", run_dir)) == ""
