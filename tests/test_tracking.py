"""--track and --tensorboard: what is sent, and that nothing of it stops or slows a run."""

import csv
import json
import math

from test_elastic import STUB

from runs import ROOT, Run, edited, finish, run, start

FLAGS = "--num-envs 4 --num-steps 32 --total-timesteps 1536 --eval-every 512 --eval-episodes 3"


def events(folder) -> dict[tuple[str, int], float]:
    """What TensorBoard has: by name and step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    read.Reload()
    return {(name, event.step): event.value for name in read.Tags()["scalars"] for event in read.Scalars(name)}


def expected(done: Run) -> dict[tuple[str, int], float]:
    with open(done.dir / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    found = {(name, int(row["global_step"])): float(cell) for row in rows for name, cell in row.items() if cell}
    return {("charts/SPS" if name == "time/SPS" else name, step): x for (name, step), x in found.items()}


def test_tensorboard_holds_what_metrics_csv_holds(tmp_path):
    """Each number at its step, once; also of a run that was killed and went on."""
    flags = f"{FLAGS} --tensorboard --checkpoint-every 512 --resume"
    fault = {"LOCKSTEP_FAULT": "kill@0@27", "code": -9}
    run("ppo_ddp.py", 2, flags, tmp_path / "run", **fault)
    done = run("ppo_ddp.py", 2, flags, tmp_path / "run")
    assert "going on from" in done.out
    there, here = events(done.dir / "tensorboard"), expected(done)
    assert there.keys() == here.keys() and len(here) > 100
    assert all(math.isclose(there[key], x, rel_tol=1e-6) for key, x in here.items())  # which keeps float32


def test_wandb_has_films_and_a_summary(tmp_path):
    """The best and the last return are asked for; each evaluation's row has its film."""
    edit = "def define_metric(self, *_, **__): pass", "def define_metric(self, *a, **k): note([a, k])"
    (tmp_path / "wandb.py").write_text(edited("STUB", STUB, edit))
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "SENT": str(tmp_path / "sent"), "THERE": "0"}
    flags = f"{FLAGS} --track --capture-video --run-dir run"
    done = finish(start("ppo_ddp.py", 1, flags, cwd=tmp_path, **env), tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "sent").read_text().splitlines()]
    assert done.code == 0 and [["eval/episodic_return"], {"step_metric": "global_step", "summary": "max,last"}] in lines
    films = {row["global_step"]: row["videos/evaluation"] for _, row in lines if "videos/evaluation" in (row or {})}
    assert films == {step: f"run/videos/{step}.mp4" for step in (0, 512, 1024, 1536)}
