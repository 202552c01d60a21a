"""What a run leaves: its directory, films, what wandb and TensorBoard hold; scripts can be copied."""

import json
import math
import os
import re
import shutil
import struct
import sys
from pathlib import Path

import av
import gymnasium as gym
import numpy as np
import pytest
import torch

import dqn_ddp
import ppg_ddp
import ppo_ddp
import sac_ddp
from common.arguments import parse
from common.environments import EVALUATION, Episode, environment_seeds, evaluate
from common.logger import Logger, write_whole
from common.processes import BadInput, World
from common.video import film
from runs import ROOT, Run, finish, run, start, train

ALL = {"ppo_ddp.py": ppo_ddp, "ppg_ddp.py": ppg_ddp, "dqn_ddp.py": dqn_ddp, "sac_ddp.py": sac_ddp}
SHORT = "--num-steps 32 --total-timesteps 1024 --eval-every 500 --eval-episodes 3"
REPLAY = "--learning-starts 900 --batch-size 16 --total-timesteps 1202 --eval-every 500 --eval-episodes 3"
REPLAY += " --log-every 200 --train-frequency 8"
FILMED = "--num-envs 4 --num-steps 32 --total-timesteps 512 --eval-every 256 --eval-episodes 4"
KILLED = "--num-envs 4 --num-steps 32 --total-timesteps 1536 --eval-every 512 --eval-episodes 3"
KILLED += " --checkpoint-every 512 --resume"


def test_the_run_directory(tmp_path):
    """Blank cells for nothing to report, episodes of all ranks, a config to rerun from."""
    result = run("ppg_ddp.py", 2, f"{SHORT} --n-pi 4 --save-model --seed 3", tmp_path / "a")
    rows = result.timed_rows
    assert list(rows[0])[0] == "global_step" and set(rows[0]) > {*ppg_ddp.COLUMNS, "time/SPS"}
    assert "1,024 of 1,024  SPS " in result.out
    updates = [row for row in rows if row["losses/policy_loss"]]
    evaluations = [row for row in rows if row["eval/episodic_return"]]
    assert [int(row["global_step"]) for row in updates] == list(range(128, 1025, 128))
    assert [int(row["global_step"]) for row in evaluations] == [0, 512, 1024]
    for row in updates:
        assert not any(row[name] for name in row if name.startswith("eval/") or name == "time/eval")
        assert bool(row["charts/episodic_return"]) == (row["charts/episodes"] != "0")
        assert row["charts/episodic_return"] == row["charts/episodic_length"]  # CartPole gives 1 a step
        for name, cell in row.items():
            assert cell == "" or repr(float(cell)) == cell or repr(int(cell)) == cell, name
    episodes = [(float(row["charts/episodic_length"] or 0), int(row["charts/episodes"])) for row in updates]
    assert 700 < sum(mean * count for mean, count in episodes) <= 1024 and sum(count for _, count in episodes) > 20
    for row in evaluations:
        assert row["eval/episodes"] == "3" and row["time/eval"] and not row["losses/policy_loss"]
    config = json.loads((result.dir / "config.json").read_text())
    assert config["world_size"] == 2 and torch.__version__.startswith(config["versions"]["torch"]) and config["device"]
    assert ppg_ddp.Args(**config["args"]).seed == 3 and "ppg_ddp.py" in config["command"]
    model = result.model
    assert model["global_step"] == 1024 and model["args"].items() <= config["args"].items()
    assert model["args"]["seed"] == 3 and "run_dir" not in model["args"]
    agent = ppg_ddp.Agent(gym.spaces.Box(-1, 1, (4,), np.float32), gym.spaces.Discrete(2))
    agent.load_state_dict(model["agent"])  # no `module.` prefixes


def test_the_run_directory_of_replay_scripts(tmp_path):
    """The whole vector steps that fit, blank losses before the first gradient step."""
    result = run("dqn_ddp.py", 2, REPLAY, tmp_path / "a")
    assert "1,200 transitions by 4 environments on 2 process" in result.out
    updates = [row for row in result.rows if row["charts/learning_rate"]]
    assert [int(row["global_step"]) for row in updates] == [200, 400, 600, 800, 1000, 1200]
    assert [bool(row["losses/td_loss"]) for row in updates] == [False] * 4 + [True] * 2
    evaluations = [int(row["global_step"]) for row in result.rows if row["eval/episodic_return"]]
    assert evaluations == [0, 500, 1000, 1200]


def test_speed_does_not_count_evaluation(tmp_path):
    """time/SPS: transitions by the seconds that were not evaluation's."""
    sizes = {"learning_starts": 100, "log_every": 128, "train_frequency": 8, "total_timesteps": 512}
    evaluations, checked = 0.0, 0
    for row in train(dqn_ddp, tmp_path / "a", **sizes, eval_every=128).timed_rows:
        evaluations += float(row["time/eval"] or 0)
        if row["time/SPS"] and evaluations:
            seconds = int(row["global_step"]) / float(row["time/SPS"])
            assert seconds == pytest.approx(float(row["time/wall"]) - evaluations, rel=1e-4)
            checked += 1
    assert checked == 4


@pytest.mark.parametrize("size, written", [(5000, "metrics.csv"), (20000, "model.pt")])
def test_a_full_disk_ends_a_run(size, written, tmp_path):
    """Another file than metrics.csv is whole or absent."""
    flags = f"--num-steps 16 --save-model --eval-every 0 --total-timesteps {64 * (1000 if size == 5000 else 4)}"
    env = {"LOCKSTEP_FSIZE": str(size), "GIT_DIR": str(tmp_path / "none")}  # no difference from a commit to write too
    result = run("ppo_ddp.py", 1, flags, tmp_path / "run", code=1, **env)
    assert re.search("File too large|unexpected pos", result.err), result.err  # torch's own words
    assert (result.dir / "config.json").exists() and not (result.dir / "model.pt").exists()


def test_what_is_there_stays_until_the_new_is_whole(tmp_path, monkeypatch):
    """A file that is written anew, on a disk that then fails."""
    write_whole(tmp_path / "model.pt", text="old")

    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("common.logger.os.fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "model.pt", text="new")
    assert (tmp_path / "model.pt").read_text() == "old"


def test_a_run_that_is_refused_may_be_tried_again(tmp_path):
    """Its directory, made with those above it, is still free."""
    with pytest.raises(BadInput, match="^--load-model nothing.pt: is no model.pt of --save-model"):
        train(ppo_ddp, tmp_path / "a" / "b", total_timesteps=512, load_model="nothing.pt")
    train(ppo_ddp, tmp_path / "a" / "b", total_timesteps=512)


def test_a_terminal_has_a_bar_with_the_time_left(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    train(ppo_ddp, tmp_path / "run", total_timesteps=1024)
    bar = r"100%\S+ 1024/1024 \[\d\d:\d\d<00:00, .*it/s, SPS .*return \d+\.\d\]"
    assert re.search(bar, capfd.readouterr().out)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_that_columns_lack_is_told_on_every_rank(rank, tmp_path):
    world = World(cuda=False)
    world.rank = rank
    with Logger(dqn_ddp.Args(run_dir=str(tmp_path)), Path("dqn_ddp.py"), ("losses/td_loss",), world) as logger:
        logger.start(None)
        logger.log(8, {"losses/td_loss": 1.0})
        with pytest.raises(KeyError, match="metrics.csv has no column losses/mine; add it to COLUMNS"):
            logger.log(16, {"losses/td_loss": 1.0, "losses/mine": 1.0})
    assert rank == 1 or (tmp_path / "metrics.csv").read_text().count("\n") == 2


def test_the_default_directory_names_the_run_and_is_no_other_run_s(tmp_path, monkeypatch):
    """Of two runs that start in one folder in the same second each has its own."""
    monkeypatch.chdir(tmp_path)
    args = ppo_ddp.Args(env_id="tests.envs:ShortCartPole-v0")
    with Logger(args, ROOT / "ppo_ddp.py", (), World(cuda=False)) as a:
        with Logger(args, ROOT / "ppo_ddp.py", (), World(cuda=False)) as b:
            names = [logger.dir.relative_to(tmp_path / "runs").name for logger in (a, b)]
    form = r"tests\.envs-ShortCartPole-v0__ppo_ddp__1__\d{8}-\d{6}-\d{6}"
    assert all(re.fullmatch(form, name) for name in names) and len({*names}) == 2
    assert {*os.listdir("runs")} == {*names}


def test_a_copied_script_runs(tmp_path):
    assert all("copy this file and `common/`" in (ROOT / name).read_text() for name in ALL)
    shutil.copy(ROOT / "ppg_ddp.py", tmp_path)
    shutil.copytree(ROOT / "common", tmp_path / "common", ignore=shutil.ignore_patterns("__pycache__"))
    flags = "--total-timesteps 1024 --n-pi 2 --eval-every 512 --num-steps 64 --run-dir run"
    done = finish(start(tmp_path / "ppg_ddp.py", 2, flags, cwd=tmp_path, PYTHONPATH=""), tmp_path / "run")
    assert done.code == 0 and len(done.rows) == 4 + 3, done.err


def test_help_names_every_flag(capsys):
    for script, module in ALL.items():
        with pytest.raises(SystemExit, match="^0$"):
            parse(module.Args, ["--help"])
        said = capsys.readouterr().out
        assert re.findall(r"^\W (--[a-z-]+)", said, re.M)[:3] == ["--env-id", "--total-timesteps", "--num-envs"]
        sources = ((ROOT / name).read_text() for name in (script, "common/arguments.py"))
        source = "".join(text.split("def __post_init__")[0] for text in sources)
        for field in module.Args.__dataclass_fields__:
            assert "--" + field.replace("_", "-") in said
            assert re.search(rf'^    {field}: [^\n]*\n    """\w', source, re.M), f"{script}: {field} is not explained"


def frames_of(path) -> tuple[list[np.ndarray], float]:
    with av.open(path) as file:
        rate = float(file.streams.video[0].average_rate)
        return [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)], rate


@pytest.mark.parametrize("env_id, action, shape, rate", [
    ("CartPole-v1", 0, (400, 600, 3), 50),
    ("ALE/Pong-v5", 0, (210, 160, 3), 15),
    ("Hopper-v5", [0.5, 0.0, -0.5], (480, 480, 3), 125),
    ("MinAtar/Breakout-v1", 0, (10, 10, 3), 30),
])  # fmt: skip
def test_a_film_shows_the_first_episode(env_id, action, shape, rate, tmp_path, monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.setenv("MUJOCO_GL", "egl")
    options = '{"max_num_frames_per_episode": 240}' if env_id.startswith("ALE/") else "{}"
    args = ppo_ddp.Args(env_id=env_id, env_kwargs=options, eval_episodes=2, capture_video=True)
    _, episode = evaluate(lambda obs: np.array([action] * len(obs)), args, World(cuda=False))
    if env_id.startswith("ALE/"):
        first = None
    else:
        env = gym.make(env_id, render_mode="rgb_array")
        env.reset(seed=environment_seeds(1, EVALUATION, [0])[0])
        try:
            first = env.render()
        except Exception as error:  # MuJoCo's, in many ways, where no library draws without a display
            pytest.skip(f"{env_id} cannot be drawn here: {error}")
    film(tmp_path / "videos" / "7.mp4", args, World(cuda=False), episode)
    assert [path.name for path in (tmp_path / "videos").iterdir()] == ["7.mp4"]
    frames, fps = frames_of(tmp_path / "videos" / "7.mp4")
    assert len(frames) == len(episode.actions) > 1 and fps == rate
    assert all(frame.shape == shape for frame in frames)
    if first is None:  # Pong's table and its players
        assert np.abs(frames[0][100, 80].astype(int) - (144, 72, 17)).max() < 12
        assert (np.abs(frames[0].astype(int) - (92, 186, 92)).max(-1) < 40).sum() > 50
    else:
        first = first * 255 if first.dtype != np.uint8 else first
        assert np.abs(frames[0].astype(float) - first).mean() < 6 < np.abs(frames[-1].astype(float) - first).max()


def test_an_episode_that_does_not_repeat_is_no_film(tmp_path):
    """Where, played again, it comes to another return."""
    episode = Episode(np.zeros(4), [np.array(0)] * 5, 1e6)
    with pytest.raises(ValueError, match="^played again, the episode came to "):
        film(tmp_path / "videos" / "7.mp4", ppo_ddp.Args(), World(cuda=False), episode)
    assert not (tmp_path / "videos" / "7.mp4").exists()


def test_numbers_are_the_same_with_and_without(tmp_path):
    calm = run("ppo_ddp.py", 2, FILMED, tmp_path / "calm")
    filmed = run("ppo_ddp.py", 2, f"{FILMED} --capture-video", tmp_path / "filmed")
    assert calm.rows == filmed.rows
    assert {path.name for path in (filmed.dir / "videos").iterdir()} == {"0.mp4", "256.mp4", "512.mp4"}


def test_what_cannot_be_drawn_is_said_and_the_run_goes_on(tmp_path):
    done = run("ppo_ddp.py", 1, f"{FILMED} --env-id envs:Dots-v0 --capture-video", tmp_path / "run")
    assert done.out.count("--capture-video: no film (") == 3 and done.rows[-1]["eval/episodic_return"]
    assert not [*done.dir.glob("videos/*[0-9].mp4")]


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
    rows = [record.history.item for record in records if record.WhichOneof("record_type") == "history"]
    return [{i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items} for items in rows]


def by_step(run_dir: Path) -> dict[int, dict[str, float]]:
    """Rows by step; others make one of a row and an evaluation at the same step."""
    found = {}
    for row in Run(0, "", "", run_dir).timed_rows:
        numbers = {name: float(cell) for name, cell in row.items() if cell}
        found[int(row["global_step"])] = found.get(int(row["global_step"]), {}) | numbers
    return found


def test_wandb_holds_what_metrics_csv_holds(tmp_path):
    """Killed and continued offline: one run in two folders, with its settings."""
    run_dir = tmp_path / "run"
    env = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)}
    run("ppo_ddp.py", 1, f"{KILLED} --track", run_dir, code=-9, LOCKSTEP_FAULT="kill@0@40", **env)
    done = run("ppo_ddp.py", 1, f"{KILLED} --track", run_dir, **env)
    folders = sorted(tmp_path.glob("wandb/offline-run-*"))
    assert [folder.name.split("-")[-1] for folder in folders] == 2 * [(run_dir / "wandb_id").read_text()]
    records = wandb_records(next(folders[1].glob("*.wandb")))
    about = next(record.run for record in records if record.WhichOneof("record_type") == "run")
    config = {item.key: json.loads(item.value_json) for item in about.config.update}
    assert about.run_group == "CartPole-v1__ppo_ddp" and config["num_envs"] == 4 and config["world_size"] == 1
    resumed_at = next(step for step in (512, 1024) if f"going on from {run_dir}/checkpoints/{step}" in done.out)
    rows = {step: row for step, row in by_step(run_dir).items() if step > resumed_at}
    history = {row["global_step"]: row for row in wandb_history(records)}
    assert [*history] == [*rows] and len(rows) >= 4
    for step, logged in history.items():
        row = rows[step] | {"charts/SPS": rows[step]["time/SPS"]}
        assert {name: x for name, x in logged.items() if name[0] != "_"} == row


def test_tensorboard_holds_what_metrics_csv_holds(tmp_path):
    """Each number at its step, once; also of a run that was killed and went on."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run("ppo_ddp.py", 2, f"{KILLED} --tensorboard", tmp_path / "run", code=-9, LOCKSTEP_FAULT="kill@0@40")
    done = run("ppo_ddp.py", 2, f"{KILLED} --tensorboard", tmp_path / "run")
    assert "going on from" in done.out
    read = EventAccumulator(str(done.dir / "tensorboard"), size_guidance={"scalars": 0})
    read.Reload()
    twice = ("global_step", "time/wall")  # in a row and an evaluation
    names = [name for name in read.Tags()["scalars"] if name not in twice]
    there = sorted((name, event.step, event.value) for name in names for event in read.Scalars(name))
    rows = by_step(done.dir).items()
    here = sorted((name, step, x) for step, row in rows for name, x in row.items() if name not in twice)
    assert [x[:2] for x in there] == [x[:2] for x in here] and len(here) > 100
    assert all(math.isclose(a[2], b[2], rel_tol=1e-6) for a, b in zip(there, here, strict=True))  # it keeps float32
