"""What ran is what is recorded; runs are compared to the byte, and drawn; a suite of one's own is accepted."""

import csv
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path

import pytest

import ppg_ddp
import ppo_ddp
from benchmark import compare, plot_runs
from benchmark import run as runner
from common.arguments import parse
from common.logger import COLUMNS_OF_ALL, Logger, processor
from common.processes import World
from fuzz import PROCESSORS
from runs import ROOT, block_of, train

SMALL = {"num_envs": 2, "num_steps": 16, "num_minibatches": 2, "total_timesteps": 320, "eval_every": 160}
SMALL |= {"eval_episodes": 2, "save_model": True}


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    subprocess.run(["git", "-C", folder, *identity, *words], check=True, capture_output=True)


def recorded_by(script: Path, run_dir: Path) -> tuple[dict, str]:
    """What a run of the script leaves: config.json, and changes.diff or an empty text."""
    with Logger(ppo_ddp.Args(run_dir=str(run_dir)), script, (), World(cuda=False)) as logger:
        logger.start(None)
    difference = run_dir / "changes.diff"
    return json.loads((run_dir / "config.json").read_text()), difference.read_text() if difference.exists() else ""


def test_the_difference_from_the_commit_is_kept(tmp_path):
    """Of a changed script, an uncommitted one, one without a repository; and what else decides bytes."""
    script = tmp_path / "there" / "mine.py"
    script.parent.mkdir()
    script.write_text("x = 1\n")
    none, difference = recorded_by(script, tmp_path / "0")
    assert none["commit"] is None and none["changed"] is None and difference == ""
    git(script.parent, "init", "-q")
    git(script.parent, "commit", "-q", "--allow-empty", "-m", "empty")
    assert recorded_by(script, tmp_path / "1")[0]["changed"]
    git(script.parent, "add", "mine.py")
    git(script.parent, "commit", "-q", "-m", "mine")
    clean, difference = recorded_by(script, tmp_path / "2")
    assert len(clean["commit"]) == 40 and difference == "" and not clean["changed"]
    script.write_text("x = 2\n")
    changed, difference = recorded_by(script, tmp_path / "3")
    assert changed["changed"] and "-x = 1\n+x = 2\n" in difference and changed["commit"] == clean["commit"]
    assert changed["sources"] != clean["sources"] == none["sources"] and changed["threads"] >= 1
    assert changed["device"] == processor() and changed["blas"] and changed["versions"]["torch"] == version("torch")


def test_instructions_that_variables_choose_are_recorded():
    """Those by which tests imitate an older processor: what torch and OpenBLAS then take."""
    program = "import json, pathlib, ppo_ddp; from common.logger import run_record; from common.processes import World;"
    program += "print(json.dumps(run_record(ppo_ddp.Args(), pathlib.Path('ppo_ddp.py'), (), World(cuda=False))))"
    words = {"cwd": ROOT, "env": os.environ | PROCESSORS["old"], "capture_output": True, "check": True}
    record = json.loads(subprocess.run([sys.executable, "-c", program], **words).stdout)
    assert record["instructions"] == "DEFAULT" and any("Nehalem" in library for library in record["blas"])


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name, seed in (("a", 1), ("again", 1), ("other", 2)):
        train(ppo_ddp, folder / name, **SMALL, seed=seed)
    return folder


def told(capsys, a: Path, b: Path) -> tuple[int, str]:
    code = compare.main(compare.Args(a, b))
    return code, capsys.readouterr().out


def test_the_same_bytes_and_two_seeds(recorded, capsys):
    code, said = told(capsys, recorded / "a", recorded / "again")
    assert code == 0 and re.match(r"the same bytes: 13 rows, to step [\d,]+, and the tensors of model.pt\n", said)
    assert "their records do not differ" in said
    code, said = told(capsys, recorded / "a", recorded / "other")
    assert code == 1 and "they part in row 1, step 0: eval/episodic_return is " in said
    assert "\n    args.seed: 1 against 2\n" in said and re.search(r"model.pt: \d+ tensors of 18 differ", said)


@pytest.mark.parametrize("shards, change, reason", [
    (None, {}, ""),
    (None, {"instructions": "none", "threads": 9}, "instructions AVX against none, threads 1 against 9"),
    (None, {"commit": "x"}, ""),
    (None, {"versions": {"torch": "1.0"}}, f"torch {version('torch')} against 1.0"),
    (None, {"world_size": 2}, "1 against 2 processes without --shards"),
    (4, {"world_size": 2}, ""),
])  # fmt: skip
def test_runs_that_cannot_be_the_same_bytes_are_said_to_be_so(shards, change, reason, recorded, tmp_path, capsys):
    """By processor, versions, threads and processes, but not by code or flags."""
    for name, changes in (("a", {}), ("other", change)):
        shutil.copytree(recorded / name, tmp_path / name)
        record = json.loads((recorded / name / "config.json").read_text()) | {"instructions": "AVX", "threads": 1}
        record["args"]["shards"] = shards
        (tmp_path / name / "config.json").write_text(json.dumps(record | changes))
    first, *rest = told(capsys, tmp_path / "a", tmp_path / "other")[1].splitlines()
    assert first == f"not to be expected to have the same bytes: {reason}" if reason else "part in row 1" in first


def test_what_cannot_be_compared_is_told(recorded, tmp_path, capsys):
    """Other threads alone are not told; a column of one run is, and a model that is missing."""
    shutil.copytree(recorded / "a", tmp_path / "b")
    record = json.loads((recorded / "a" / "config.json").read_text()) | {"threads": 9}
    (tmp_path / "b" / "config.json").write_text(json.dumps(record))
    table = tmp_path / "b" / "metrics.csv"
    header, rest = table.read_text().split("\n", 1)
    table.write_text(f"{header},losses/mine\n" + rest.replace("\n", ",\n"))
    code, said = told(capsys, recorded / "a", tmp_path / "b")
    assert code == 0 and said.splitlines()[1] == "not compared, since only one has it: losses/mine"
    assert "not to be expected" not in said
    (tmp_path / "b" / "model.pt").unlink()
    code, said = told(capsys, recorded / "a", tmp_path / "b")
    assert code == 1 and "has no model.pt, so the run has not ended" in said and not said.startswith("the same bytes")


def test_the_first_cell_that_differs_is_named(recorded, tmp_path, capsys):
    part = "they part in row 5, step 128: losses/value_loss is "
    for name, factor, said in (
        ("losses/value_loss", 1 + 1e-6, (part, ", 1.0e-06 of it\n", "as far as both go")),
        ("losses/value_loss", math.nan, (part, "agree to 0.001 up to step 96\n")),
        ("time/wall", 2, ("the same bytes",)),
    ):
        header, *rows = csv.reader((recorded / "a" / "metrics.csv").read_text().splitlines())
        cells, column = rows[4], header.index(name)
        cells[column] = repr(float(cells[column]) * factor)
        (tmp_path / "b.csv").write_text("".join(",".join(row) + "\n" for row in (header, *rows)))
        code, printed = told(capsys, recorded / "a", tmp_path / "b.csv")
        assert code == int(name != "time/wall") and all(text in printed for text in said), printed


def test_a_shorter_run_is_not_the_same_bytes(recorded, tmp_path, capsys):
    """Nor is one whose last line is cut off; and without records, nothing is said of them."""
    text = (recorded / "a" / "metrics.csv").read_text()
    *rows, last = text.splitlines(keepends=True)
    for name, end, fault in (("short", "", "(13 rows against 12)"), ("torn", last[:-3], "its last line is cut off")):
        (tmp_path / f"{name}.csv").write_text("".join(rows) + end)
        code, said = told(capsys, recorded / "a", tmp_path / name)
        assert code == 1 and fault in said and "ends at step 320, " in said
        assert "the same bytes" not in said and "not to be expected" not in said


def test_the_sweep_of_the_docs_is_a_suite(tmp_path, capsys):
    """Of three learning rates and five seeds, each of which goes on after a stop."""
    (tmp_path / "my_suite.py").write_text(block_of("results.md", "from benchmark.suites import work"))
    runner.main(runner.Args(str(tmp_path / "my_suite.py"), dry_run=True))
    lines = capsys.readouterr().out.splitlines()
    assert len(set(lines)) == 15 and all(" --resume " in line for line in lines)
    for line in lines:
        words = shlex.split(line)
        parse(ppo_ddp.Args, words[words.index("ppo_ddp.py") + 1 :])


HEADER = "global_step,charts/episodic_return,eval/episodic_return,losses/value_loss,losses/aux/kl_loss,time/wall\n"
ROWS = "0,,9.5,,,0.1\n100,20.0,,0.5,,1.0\n200,,,0.25,,2.0\n200,,30.0,,,2.5\n"


def write(folder: Path, rows: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text(HEADER + rows)
    return folder


def panels(**runs: Path) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """What is drawn: by panel and label, the points of a curve. The legend names each run."""
    figure = plot_runs.draw({label: compare.load(path) for label, path in runs.items()})
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [*runs]
    curves = {axis.get_title(): {x.get_label(): x.get_xydata() for x in axis.lines} for axis in figure.axes}
    return {title: {label: [*map(tuple, x)] for label, x in lines.items()} for title, lines in curves.items()}


def test_each_column_is_a_panel_and_each_run_a_curve(tmp_path):
    """Without blank cells, and without a line that is being written, where 123456 may still be 12."""
    # a name with _ matplotlib would hide
    a, b = write(tmp_path / "a", ROWS + "300,12"), write(tmp_path / "b", "50,1.0,,2.0,,1.0\n")
    assert panels(_a=a, b=b) == {
        "return of training episodes": {"_a": [(100, 20.0)], "b": [(50, 1.0)]},
        "return of evaluations": {"_a": [(0, 9.5), (200, 30.0)], "b": []},
        "losses/value_loss": {"_a": [(100, 0.5), (200, 0.25)], "b": [(50, 2.0)]},
    }
    names = (*COLUMNS_OF_ALL, *ppg_ddp.COLUMNS)
    assert {*HEADER.strip().split(",")} <= {"global_step", *names} and plot_runs.RETURNS.keys() <= {*names}


def test_bad_input_is_one_line_and_code_2(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner.signal, "signal", lambda *_: None)  # those of the tests stay
    (tmp_path / "empty").mkdir()
    good = write(tmp_path / "a", ROWS)
    cases = {
        "nowhere: is no run directory": ((tmp_path / "nowhere",), None),
        "empty: is no run directory": ((tmp_path / "empty",), None),
        "metrics.csv: holds no whole row": ((write(tmp_path / "header", ""),), None),
        "no row has a return or a loss yet": ((write(tmp_path / "blank", "8,,,,,1.0\n"),), None),
        "name at least one": ((), None),
        "--out nowhere/x.png: cannot be written": ((good, tmp_path / "empty"), Path("nowhere/x.png")),
    }
    for said, (runs, out) in cases.items():
        with pytest.raises(SystemExit) as ended:
            runner.or_say_why(partial(plot_runs.main, plot_runs.Args(runs, out)))
        told = capsys.readouterr().err
        assert ended.value.code == 2 and said in told and told.startswith("error: ") and told.count("\n") == 1
