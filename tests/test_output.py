"""What a run leaves: config.json, metrics.csv, model.pt and wandb's history; and that a script can be copied."""

import csv
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import dqn_ddp
import ppg_ddp
import ppo_ddp
import sac_ddp
from common.distributed import World
from common.environments import make_envs
from common.errors import BadInput, Fault
from common.run.arguments import parse
from common.run.logger import Logger, write_whole
from common.run.loop import header
from runs import PATIENCE, ROOT, finish, run, start, wait_until

SCRIPTS = ("ppo_ddp.py", "ppg_ddp.py")
ALL = {"ppo_ddp.py": ppo_ddp, "ppg_ddp.py": ppg_ddp, "dqn_ddp.py": dqn_ddp, "sac_ddp.py": sac_ddp}
SHORT = "--num-steps 32 --total-timesteps 2048 --eval-every 1000 --eval-episodes 3"
REPLAY = "--learning-starts 900 --batch-size 16 --total-timesteps 1202 --eval-every 500 --eval-episodes 3"
REPLAY += " --log-every 200"


def wandb_records(path: Path) -> list:
    """The records of an offline run: a LevelDB-style log (7-byte file header, 32 KiB blocks)."""
    from wandb.proto import wandb_internal_pb2

    data, at, record, records = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # a block's tail too short for a header
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or last part
            records.append(wandb_internal_pb2.Record())
            records[-1].ParseFromString(record)
            record = b""
    return records


def wandb_history(records: list) -> list[dict]:
    """The rows among records, with wandb's own columns."""
    rows = [record.history.item for record in records if record.WhichOneof("record_type") == "history"]
    return [{i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items} for items in rows]


def test_wandb_holds_what_metrics_csv_holds(tmp_path):
    """Two ranks, offline: one run, whose history equals metrics.csv, with SPS under its usual name."""
    script, size, number, flags = "sac_ddp.py", 2, 1 + 6 + 3, f"--track {REPLAY} --run-dir {tmp_path / 'run'}"
    result = finish(start(script, size, flags, cwd=tmp_path, WANDB_MODE="offline"), tmp_path / "run")
    assert result.code == 0, result.err
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    records = wandb_records(file)
    history = wandb_history(records)
    about = next(record.run for record in records if record.WhichOneof("record_type") == "run")
    config = {item.key: json.loads(item.value_json) for item in about.config.update}
    assert config["num_envs"] == 4 and config["world_size"] == size and "args" not in config
    (source,) = (record.artifact for record in records if record.WhichOneof("record_type") == "artifact")
    assert {script, "common/run/logger.py"} < {content.path for content in source.manifest.contents}
    assert about.run_group.endswith(f"__{script[:-3]}") and set(about.tags) == {script[:-3], f"processes-{size}"}
    with open(tmp_path / "run" / "metrics.csv", newline="") as csv_file:
        rows = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(csv_file)]
    assert len(history) == len(rows) == number
    for logged, row in zip(history, rows, strict=True):
        if "time/SPS" in row:
            row["charts/SPS"] = row.pop("time/SPS")
        assert {k: v for k, v in logged.items() if not k.startswith("_")} == row


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_run_directory(script, tmp_path):
    """Blank cells for nothing to report, episodes of all ranks, a model without prefixes, a config to rerun from."""
    flags = f"{SHORT} --save-model --seed 3" + (" --n-pi 4" if script == "ppg_ddp.py" else "")
    result = run(script, 2, flags, tmp_path / "a")
    module = ppg_ddp if "ppg" in script else ppo_ddp
    with open(result.dir / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["global_step", *header(module.COLUMNS)]
    updates = [row for row in rows if row["losses/policy_loss"]]
    evaluations = [row for row in rows if row["eval/episodic_return"]]
    assert [int(row["global_step"]) for row in updates] == list(range(128, 2049, 128))
    assert [int(row["global_step"]) for row in evaluations] == [0, 1024, 2048]
    for row in updates:
        assert not any(row[name] for name in row if name.startswith("eval/") or name == "time/eval")
        assert bool(row["charts/episodic_return"]) == (row["charts/episodes"] != "0")
        for name, cell in row.items():
            assert cell == "" or repr(float(cell)) == cell or repr(int(cell)) == cell, name
    lengths = [
        float(r["charts/episodic_length"]) * int(r["charts/episodes"]) for r in updates if r["charts/episodic_length"]
    ]
    assert 2048 - 4 * 500 <= sum(lengths) <= 2048 and sum(int(r["charts/episodes"]) for r in updates) > 40
    for row in evaluations:
        assert row["eval/episodes"] == "3" and row["time/eval"] and not row["losses/policy_loss"]
    config = json.loads((result.dir / "config.json").read_text())
    assert (
        config["world_size"] == 2 and config["args"]["seed"] == 3 and config["versions"]["torch"] == torch.__version__
    )
    assert module.Args(**config["args"]).num_steps == 32 and script in config["command"] and config["device"]
    model = result.model
    assert model["global_step"] == 2048 and model["args"].items() <= config["args"].items()
    assert model["args"]["seed"] == 3 and "run_dir" not in model["args"]
    agent = module.Agent(module.gym.spaces.Box(-1, 1, (4,), np.float32), module.gym.spaces.Discrete(2))
    agent.load_state_dict(model["agent"])  # no `module.` prefixes


@pytest.mark.parametrize("script", ["dqn_ddp.py", pytest.param("sac_ddp.py", marks=pytest.mark.slow)])
def test_the_run_directory_of_replay_scripts(script, tmp_path):
    """The whole vector steps that fit, blank losses before the first gradient step, networks that load."""
    result = run(script, 2, f"{REPLAY} --save-model --check-sync-every 400", tmp_path / "a")
    module, loss = ALL[script], "losses/td_loss" if script == "dqn_ddp.py" else "losses/qf1_loss"
    with open(result.dir / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["global_step", *header(module.COLUMNS)] and "1200 transitions by 4 env" in result.out
    updates = [row for row in rows if row["charts/learning_rate"]]
    assert [int(row["global_step"]) for row in updates] == [200, 400, 600, 800, 1000, 1200]
    assert [bool(row[loss]) for row in updates] == [False] * 4 + [True] * 2
    assert [int(row["global_step"]) for row in rows if row["eval/episodic_return"]] == [0, 500, 1000, 1200]
    for row in updates:
        assert bool(row["charts/episodic_return"]) == (row["charts/episodes"] != "0")
        for name, cell in row.items():
            assert cell == "" or repr(float(cell)) == cell or repr(int(cell)) == cell, name
    config, model = json.loads((result.dir / "config.json").read_text()), result.model
    assert model["global_step"] == 1200 and model["args"].items() <= config["args"].items()
    assert module.Args(**config["args"]) and module.Args(**model["args"])
    envs = make_envs(module.Args().env_id, 1, 0, range(1), (module.gym.spaces.Space,))
    spaces = envs.single_observation_space, envs.single_action_space
    envs.close()
    if script == "dqn_ddp.py":
        networks = {name: module.QNetwork(spaces[0], 2, False) for name in ("q_network", "target_network")}
    else:
        actor, critics = module.Actor(*spaces, torch.device("cpu")), module.Critics(*spaces)
        networks = {"actor": actor, "critics": critics, "critics_target": critics}
    for name, network in networks.items():
        network.load_state_dict(model[name])  # no `module.` prefixes


@pytest.mark.parametrize("module", [ppg_ddp, dqn_ddp])
def test_speed_does_not_count_evaluation(module, tmp_path):
    """time/SPS: transitions by the seconds that were not evaluation's."""
    sizes = (
        {"learning_starts": 100, "log_every": 128, "train_frequency": 8}
        if hasattr(module.Args, "learning_starts")
        else {"num_steps": 32}
    )
    sizes |= {"n_pi": 4} if module is ppg_ddp else {}
    module.main(module.Args(total_timesteps=512, eval_every=128, cuda=False, run_dir=str(tmp_path / "a"), **sizes))
    with open(tmp_path / "a" / "metrics.csv", newline="") as file:
        evaluations, checked = 0.0, 0
        for row in csv.DictReader(file):
            evaluations += float(row["time/eval"] or 0)
            if row["time/SPS"] and evaluations:
                seconds = int(row["global_step"]) / float(row["time/SPS"])
                assert seconds == pytest.approx(float(row["time/wall"]) - evaluations, rel=1e-9)
                checked += 1
    assert checked == 4


@pytest.mark.parametrize("size, written", [(200, "config.json"), (5000, "metrics.csv"), (20000, "model.pt")])
def test_a_full_disk_is_one_line_and_loses_nothing(size, written, tmp_path):
    """A row is whole or absent, and ends the run; another file is whole or absent."""
    flags = "--num-steps 16 --save-model --eval-every 0 --total-timesteps "
    flags += f"{64 * 1000 if written == 'metrics.csv' else 64 * 4} --run-dir {tmp_path / 'new' / 'run'}"
    env = {"LOCKSTEP_FSIZE": str(size), "GIT_DIR": str(tmp_path / "none")}  # no difference from a commit to write too
    result = finish(start("ppo_ddp.py", 1, flags, True, **env), tmp_path / "new" / "run")
    assert result.err.count("error: ") == result.err.count("\n") == 1 and "File too large" in result.err, result.err
    assert result.code == 1 and str(result.dir / written) in result.err
    if written == "config.json":
        assert list(result.dir.iterdir()) == []
        return
    assert sorted(path.name for path in result.dir.iterdir()) == ["config.json", "metrics.csv"]
    lines = (result.dir / "metrics.csv").read_text().split("\n")
    assert lines[-1] == "" and len({line.count(",") for line in lines[:-1]}) == 1 and len(lines) > 4
    assert json.loads((result.dir / "config.json").read_text())["args"]["num_steps"] == 16


def test_what_is_there_stays_until_the_new_is_whole(tmp_path, monkeypatch):
    """A file that is written anew, on a disk that then fails: the old one, and no part of the new."""
    write_whole(tmp_path / "model.pt", b"old")

    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("common.run.logger.os.fsync", fail)
    with pytest.raises(Fault, match="model.pt: cannot be written .No space left"):
        write_whole(tmp_path / "model.pt", b"new")
    assert (tmp_path / "model.pt").read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("how", ["deleted", "moved"])
def test_a_vanished_directory_ends_the_run(how, tmp_path):
    """At the next row, in one line with the path; what was moved away stays whole."""
    path = tmp_path / "run" / "metrics.csv"
    process = start("ppo_ddp.py", 1, f"--total-timesteps 100000000 --eval-every 0 --run-dir {tmp_path / 'run'}")
    wait_until(lambda: path.exists() and path.read_text().count("\n") > 2, process)
    shutil.rmtree(tmp_path / "run") if how == "deleted" else (tmp_path / "run").rename(tmp_path / "there")
    result = finish(process, tmp_path / "run")
    assert result.code == 1 and result.err.count("\n") == 1, result.err
    assert f"error: {path}: cannot be written (No such file or directory)" in result.err
    assert not (tmp_path / "run").exists()
    assert how == "deleted" or (tmp_path / "there" / "metrics.csv").read_text().endswith("\n")


def test_a_run_that_is_refused_may_be_tried_again(tmp_path):
    """Its directory is still free."""
    args = {"total_timesteps": 512, "eval_every": 0, "run_dir": str(tmp_path / "a" / "b")}
    with pytest.raises(BadInput, match="^--load-model nothing.pt: cannot be read"):
        ppo_ddp.main(ppo_ddp.Args(**args, load_model="nothing.pt"))
    ppo_ddp.main(ppo_ddp.Args(**args))
    with pytest.raises(BadInput, match="^--run-dir .*b: holds a run already; name a new directory"):
        ppo_ddp.main(ppo_ddp.Args(**args))
    assert (tmp_path / "a" / "b" / "metrics.csv").read_text().count("\n") == 2


def test_a_terminal_has_a_bar_with_the_time_left(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    ppo_ddp.main(ppo_ddp.Args(total_timesteps=1024, eval_every=0, run_dir=str(tmp_path / "run")))
    bar = re.search(r"100%\S+ 1024/1024 \[\d\d:\d\d<00:00, .*it/s, return \d+\.\d\]", capsys.readouterr().out)
    assert bar


@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_that_columns_lack_is_told_on_every_rank(rank, tmp_path, monkeypatch):
    """In one line that says where it belongs, and nothing of the row is written."""
    monkeypatch.setenv("RANK", str(rank))
    for name, value in (("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    args = dqn_ddp.Args(run_dir=str(tmp_path / "run"))
    with Logger(args, "dqn_ddp.py", header(dqn_ddp.COLUMNS), World(cuda=False)) as logger:
        logger.start("a plan")
        logger.log(8, {"losses/td_loss": 1.0})
        with pytest.raises(Fault, match="^step 16: metrics.csv has no column losses/mine; add it to COLUMNS.$"):
            logger.log(16, {"losses/td_loss": 1.0, "losses/mine": 1.0})
    assert rank == 1 or (tmp_path / "run" / "metrics.csv").read_text().count("\n") == 2


def test_the_default_directory_names_the_run(tmp_path):
    process = start("ppo_ddp.py", 1, "--env-id tests.envs:ShortCartPole-v0 --total-timesteps 512", cwd=tmp_path)
    assert finish(process, tmp_path).code == 0
    (path,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"tests\.envs-ShortCartPole-v0__ppo_ddp__1__\d{8}-\d{6}", path.name)


def test_the_last_row_is_shown(tmp_path):
    done = run("ppo_ddp.py", 1, "--num-steps 32 --total-timesteps 384 --eval-every 0", tmp_path / "run")
    assert done.out.count("384 of 384 (100%)") == 1


def test_a_run_ends_at_a_return(tmp_path):
    result = run("ppo_ddp.py", 2, f"{SHORT} --stop-at-return 5", tmp_path / "a")
    assert result.column("global_step")[-1] == 1024 and result.column("eval/episodic_return")[-1] >= 5


@pytest.mark.parametrize("script, size", [("ppg_ddp.py", 2), pytest.param("sac_ddp.py", 1, marks=pytest.mark.slow)])
def test_a_copied_script_runs(script, size, tmp_path):
    """The script and `common/`, as its docstring says, alone in a folder."""
    assert all("copy this file and `common/`" in (ROOT / name).read_text() for name in ALL)
    shutil.copy(ROOT / script, tmp_path)
    shutil.copytree(ROOT / "common", tmp_path / "common", ignore=shutil.ignore_patterns("__pycache__"))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    launch = [sys.executable, *(torchrun if size == 2 else []), script]
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    flags = ["--total-timesteps", "4096", "--eval-every", "2048", "--run-dir", "run"]
    replay = script in ("dqn_ddp.py", "sac_ddp.py")
    flags += ["--learning-starts", "4000"] if replay else ["--num-steps", "64"]
    done = subprocess.run([*launch, *flags], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    rows = 5 if replay else 16
    assert (tmp_path / "run" / "metrics.csv").read_text().count("\n") == 1 + rows + 3


def test_help_names_every_flag(capsys):
    """Each flag has its meaning; the reader of --help meets no empty line."""
    read, write = os.pipe()
    os.close(read)  # as by `--help | head`, which has seen enough
    command = [sys.executable, ROOT / "ppo_ddp.py", "--help"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, timeout=PATIENCE)
    os.close(write)
    assert done.returncode == 0 and not done.stderr
    for script, module in ALL.items():
        with pytest.raises(SystemExit, match="^0$"):
            parse(module.Args, ["--help"])
        said = capsys.readouterr().out
        sources = ((ROOT / name).read_text() for name in (script, "common/run/arguments.py"))
        source = "".join(text.split("def __post_init__")[0] for text in sources)
        for field in module.Args.__dataclass_fields__:
            assert "--" + field.replace("_", "-") in said
            assert re.search(rf'^    {field}: [^\n]*\n    """\w', source, re.M), f"{script}: {field} is not explained"
