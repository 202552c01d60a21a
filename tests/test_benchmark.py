"""The benchmark: statistics, commands, a runner that loses nothing, figures as the data say."""

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ppo_ddp
from benchmark import compare, plot, scaling
from benchmark import run as runner
from benchmark.suites import REFERENCES, SCALES, SUITES, suite_of, work
from common.arguments import parse
from common.processes import BadInput
from runs import PATIENCE, ROOT, wait_until

RESULTS = ROOT / "benchmark" / "results"


def test_interquartile_mean_by_hand():
    assert plot.interquartile_mean(np.array([4.0, 1.0, 100.0, 2.0]), 0) == 3.0
    assert plot.interquartile_mean(np.array([0.0, 1.0, 2.0, 3.0, 100.0]), 0) == pytest.approx(2.0)
    assert plot.interquartile_mean(np.array([1.0, 5.0]), 0) == 3.0
    table = np.array([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0], [4.0, 40.0]])
    assert plot.interquartile_mean(table, 0).tolist() == [2.5, 25.0]


def test_the_interval_is_that_of_the_mean_of_a_normal():
    """Of 400 normal draws: the known 95 % interval of a 25 % trimmed mean, +- 1.96 * 1.093 / 20, to 15 %."""
    x = np.random.default_rng(1).normal(size=400)
    low, high = plot.interval([x])
    assert (high - low) / 2 == pytest.approx(1.96 * 1.093 / 20, rel=0.15)
    assert low < plot.interquartile_mean(x, 0) < high
    assert plot.interval([np.zeros(2), np.full(2, 10.0)]) == (5.0, 5.0)  # resampled within each group


def curve(returns: list, seeds: list[int] | None = None, steps=(100, 200, 300), wall=0.0) -> plot.Curve:
    names = ("global_step", "eval/episodic_return", "time/wall")
    rows = [[dict(zip(names, (*at, wall), strict=True)) for at in zip(steps, run, strict=True)] for run in returns]
    return plot.Curve(np.array(steps), np.array(returns), np.zeros((len(returns), 3)), rows, seeds or [1], (1,))


def test_differences_by_hand():
    """On each task, and over tasks, where returns are scaled; against the fewest processes."""
    returns = {("Breakout", "a"): [15.2, 15.2], ("Breakout", "b"): [0.4, 30.0]}
    returns |= {("Freeway", "a"): [60.0, 60.0], ("Freeway", "b"): [30.2, 30.2]}
    curves = {(f"MinAtar/{task}-v1", x, 1): curve([[y] for y in two], steps=(1,)) for (task, x), two in returns.items()}
    curves["MinAtar/Freeway-v1", "b", 2] = curve([[0.0]], steps=(1,))
    rows = plot.differences(curves, suite_of("minatar"), "a").splitlines()
    assert rows[2] == "| b | MinAtar/Breakout-v1 | +0.0 | -14.8 to +14.8 |" and "less a's" in rows[0]
    assert rows[3] == "| b | MinAtar/Freeway-v1 | -29.8 | -29.8 to -29.8 |"
    assert rows[4] == "| b | all 2, scaled | -0.25 | -0.50 to +0.00 |"
    with pytest.raises(BadInput, match="--against c: nothing of it is recorded; name one of a, b."):
        plot.differences(curves, suite_of("minatar"), "c")
    assert plot.differences({("x", "a", 1): curve([[1.0, 1.0, 1.0]])}, suite_of("minatar"), "a").startswith("No other")


def test_agreement_of_two_world_sizes_by_hand():
    """Rows to 1e-3, without times, seed by seed; and whether intervals overlap."""
    one = curve([[9.0, 9.0, 9.0], [1.0, 2.0, 3.0], [5.0, 5.0, 5.0]], [1, 2, 3], wall=1.0)
    assert plot.agreement(one, curve([[1.0, 2.0005, 3.1], [5.1, 5.0, 5.0]], [2, 3])) == "200 and 0; overlap"
    for last in (300.0, -300.0):
        assert plot.agreement(one, curve([[1.0, 2.0, last], [last, last, last]], [2, 3])) == "200 and 0; apart"
    assert plot.agreement(one, curve([[1.0, 2.0, 9.0]], [2])) == "200", "an interval of one run is a point"
    assert plot.agreement(one, curve([[1.0, 2.0, 3.0]], [2])) == "the same bytes"


def test_the_evaluation_before_learning_is_no_final_return():
    one = curve([[20.0, 300.0, 500.0]], steps=(0, 50, 100))
    assert one.final.tolist() == [400.0]
    low, top = plot.limits([one], 900.0, [])  # worse than random
    assert low < 20.0 and top > 500.0


def test_training_episodes_by_tenths_of_a_run():
    """By a row's number of episodes; one on a border belongs to the tenth that it ends."""
    returns = [(10, "", 1.0), (50, "2.0", 3), (100, "4.0", 1), (150, "8.0", 1)]
    returns += [(100 * k, str(k), 1) for k in range(2, 11)]
    names = ("global_step", "charts/episodic_return", "charts/episodes", "time/wall")
    rows = [dict(zip(names, map(str, (*row, 7.0 + row[0])), strict=True)) for row in returns]
    first, second, *rest = plot.tenths(rows)
    assert first == (100.0, 2.5, 107.0) and second == (200.0, 5.0, 207.0)
    assert rest == [(100.0 * k, k, 7.0 + 100 * k) for k in range(3, 11)]
    with pytest.raises(BadInput, match="no training episode ended in tenth 3 of a run of 1000 transitions"):
        plot.tenths([row for row in rows if row["global_step"] != "300"])


@pytest.mark.parametrize("suite", SUITES)
def test_every_command_is_accepted(suite):
    runs = runner.runs_of(suite_of(suite))
    assert len({run.name for run in runs}) == len(runs)
    for run in {(run.script, run.env_id, run.flags, run.world_size): run for run in runs}.values():  # but for the seed
        command = run.command(Path("somewhere"))
        words = command[command.index(run.script) + 1 :]
        args = parse(importlib.import_module(run.script.removesuffix(".py")).Args, words)
        assert args.seed == run.seed and args.num_envs % run.world_size == 0
        if run.script == "ppg_ddp.py":
            phases = args.total_timesteps // (args.num_envs * args.num_steps * args.n_pi)
            assert phases >= 10, f"{run.name}: {phases} auxiliary phases"
        assert run.env_id in SCALES
    assert all(env_id in SCALES for _, env_id in REFERENCES)


def test_an_interrupted_run_goes_on_where_its_suite_has_checkpoints(tmp_path):
    name = "CartPole-v1__ppo_ddp__w1__s1"
    flags = "--eval-every 0 --num-envs 8 --num-steps 32 --checkpoint-every 2048 --total-timesteps 12288"
    suite = f'from benchmark.suites import work\nSUITE = [work("ppo_ddp.py", "CartPole-v1", "{flags}", {{1: (1,)}})]'
    (tmp_path / "tiny.py").write_text(suite)
    run_dir = tmp_path / "work" / "tiny" / name
    words = "-m benchmark.run tiny.py --cores 1 --work work --results results".split()
    about = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(ROOT)}, "stdout": subprocess.PIPE, "text": True}
    outputs = []
    for code in (130, 0):
        process = subprocess.Popen([sys.executable, *words], **about)
        if code:
            wait_until(lambda: any(x.name.isdigit() for x in (run_dir / "checkpoints").glob("*")), process)
            process.send_signal(signal.SIGINT)
        outputs.append(process.communicate(timeout=PATIENCE)[0])
        assert process.returncode == code, outputs
    assert f"{name} ended in" in outputs[0] and f"{name} done in" in outputs[1]
    assert "going on from" in (tmp_path / "work" / "tiny" / f"{name}.log").read_text()
    ppo_ddp.main(parse(ppo_ddp.Args, [*flags.split(), "--run-dir", str(tmp_path / "calm")]))
    curves = [compare.load(path) for path in (tmp_path / "results" / "tiny" / f"{name}.csv", tmp_path / "calm")]
    assert not [*compare.compare_rows(*curves)]
    record = json.loads((tmp_path / "results" / "tiny" / f"{name}.json").read_text())
    assert "--resume" in record["command"] and record["seconds"] >= float(curves[0].rows[-1]["time/wall"]) - 0.1


def test_a_run_goes_on_by_the_same_code_only(tmp_path, monkeypatch):
    """As it was at its commit, whatever the newest is; and by the same command."""
    (tmp_path / "checkpoints").mkdir()
    for commit, changed, difference, now, same in (
        ("a", False, "", ("commit", ""), True),
        ("a", False, "", ("", ""), False),  # it is gone
        ("a", False, "", ("commit", "+x"), False),
        ("a", True, "+x", ("commit", "+x"), True),
        ("a", True, "", ("commit", ""), False),  # a file that git does not track
        (None, None, "", ("", ""), False),  # no git
    ):
        monkeypatch.setattr(runner, "git", lambda script, word, *_, now=now: now[word == "diff"])
        config = {"commit": commit, "changed": changed, "command": "ppo_ddp.py --seed 1 --run-dir a"}
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "changes.diff").write_text(difference)
        for seed in (1, 2):
            words = f"python ppo_ddp.py --seed {seed} --run-dir b".split()
            assert runner.started_by(words, tmp_path, ROOT / "ppo_ddp.py") == (same and seed == 1)


def test_a_script_that_git_does_not_track_is_recorded(tmp_path):
    """As changed, without a difference. The record names no folder of the machine."""
    run = runner.Run("tiny", "ppo_ddp.py", "CartPole-v1", "", 1, 1, "")
    run_dir, results = tmp_path / "run", tmp_path / "results"
    run_dir.mkdir()
    (results / "tiny").mkdir(parents=True)
    older = results / "tiny" / f"{run.name}.diff"
    older.write_text("+x")
    (run_dir / "config.json").write_text(json.dumps(dict.fromkeys(runner.KEPT, True)))
    (run_dir / "metrics.csv").write_text(f"{','.join(runner.RECORDED)}\n100,1,1,1,2,3\n")
    runner.record(run, run_dir, results, 3.0)
    about = runner.recorded(run, results)
    assert about["changed"] and not older.exists()
    assert about["command"].endswith(f" --run-dir runs/benchmark/tiny/{run.name}")


def test_what_another_command_recorded_is_not_replaced(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner.signal, "signal", lambda *_: None)  # those of the tests stay
    curve = Path("runs/results/tiny/CartPole-v1__ppo_ddp__w1__s1.csv")
    curve.parent.mkdir(parents=True)
    flags = "--eval-every 0 --num-steps 16 --total-timesteps"
    command = f"python ppo_ddp.py --env-id CartPole-v1 --seed 1 {flags} 640 --run-dir runs/elsewhere"
    curve.with_suffix(".json").write_text(json.dumps({"command": command, "seconds": 1.0}))
    curve.write_text("a curve of an hour")

    def started(steps: int, **settings) -> str:
        run = f"'ppo_ddp.py', 'CartPole-v1', '{flags} {steps}', {{1: (1,)}}"
        Path("tiny.py").write_text(f"from benchmark.suites import work\nSUITE = [work({run})]\n")
        assert runner.main(runner.Args("tiny.py", cores=1, **settings)) == 0
        return capsys.readouterr().out

    assert "1 runs, 1 of them recorded" in started(640)
    said = f"^--results runs/results: {curve.stem} is recorded there by another command; .* by --replace"
    with pytest.raises(BadInput, match=said):
        started(64)
    assert curve.read_text() == "a curve of an hour"
    assert f"{curve.stem} done in" in started(64, replace=True) and "\n64," in curve.read_text()
    with pytest.raises(BadInput, match=f"--results {curve}: cannot be written"):
        started(64, results=curve)
    Path("tiny.py").write_text(f"SUITE = [{work('a.py', 'b', '--x 1', {1: (1,)})}, {work('a.py', 'b', '', {1: (2,)})}]")
    with pytest.raises(BadInput, match="a.py on b is there twice; give the works variants"):
        suite_of("tiny.py")


def test_seeds_that_are_not_recorded_are_told(tmp_path, capsys):
    lacking = ("Taxi-v4__dqn_ddp__w1__s2.json", "FrozenLake-v1__ppo_ddp__w1__s?.csv")
    shutil.copytree(RESULTS / "toytext", tmp_path / "toytext", ignore=shutil.ignore_patterns(*lacking))
    plot.main(plot.Args("toytext", results=tmp_path, figures=tmp_path))
    assert "\nWithout these seeds, which are not recorded: Taxi-v4__dqn_ddp__w1__s2.\n" in capsys.readouterr().out


@pytest.mark.parametrize("suite", ["scaling", *(suite for suite in SUITES if (RESULTS / suite).exists())])
def test_figures_and_table_are_what_the_data_say(suite, tmp_path, monkeypatch):
    """Redrawn: the committed figures byte by byte, and the table in docs/results.md."""
    monkeypatch.chdir(ROOT)
    page = tmp_path / "docs" / "results.md"
    folder, figures = tmp_path / "benchmark" / "figures", Path("benchmark/figures")
    page.parent.mkdir()
    shutil.copy(ROOT / "docs" / "results.md", page)
    if suite == "scaling":
        scaling.draw(scaling.Args(results=RESULTS / "scaling.csv", figure=folder / "scaling.svg", readme=page))
        names = {"scaling.svg"}
    else:
        against = "ppo_ddp" if suite.startswith("minatar") else None
        plot.main(plot.Args(suite, figures=folder, readme=page, against=against))
        names = {f"{suite}/{path.name}" for path in (figures / suite).iterdir()}
    assert page.read_text() == (ROOT / "docs" / "results.md").read_text()
    assert {str(path.relative_to(folder)) for path in folder.rglob("*.svg")} == names
    assert all((folder / name).read_bytes() == (figures / name).read_bytes() for name in names)
