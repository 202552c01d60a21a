"""--track and --tensorboard: wandb and TensorBoard hold what metrics.csv holds, also after a kill."""

import json
import math
import struct
from pathlib import Path

from runs import Run, finish, run, start

FLAGS = "--num-envs 4 --num-steps 32 --total-timesteps 1536 --eval-every 512 --eval-episodes 3"
FLAGS += " --checkpoint-every 512 --resume"


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


def by_step(run_dir: Path) -> dict[int, dict[str, float]]:
    """metrics.csv under the names of others; they make one of a row and an evaluation at the same step."""
    found = {}
    for row in Run(0, "", "", run_dir).timed_rows:
        numbers = {name: float(cell) for name, cell in row.items() if cell}
        found[int(row["global_step"])] = found.get(int(row["global_step"]), {}) | numbers
    return found


def test_wandb_holds_what_metrics_csv_holds(tmp_path):
    """Killed and continued offline: one run in two folders, the second from the checkpoint on; with its settings."""
    run_dir = tmp_path / "run"
    for code, env in ((-9, {"LOCKSTEP_FAULT": "kill@0@40"}), (0, {})):
        done = finish(start("ppo_ddp.py", 1, f"{FLAGS} --track --run-dir {run_dir}", True, tmp_path, **env), run_dir)
        assert done.code == code, done.err
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

    run("ppo_ddp.py", 2, f"{FLAGS} --tensorboard", tmp_path / "run", code=-9, LOCKSTEP_FAULT="kill@0@40")
    done = run("ppo_ddp.py", 2, f"{FLAGS} --tensorboard", tmp_path / "run")
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
