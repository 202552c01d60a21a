"""Measures the scripts beside Stable-Baselines3, in interleaved repetitions, and prints medians and ratios.

    python -m benchmark.speed                 # all rows
    python -m benchmark.speed --rows 1 7 --repetitions 5
    python -m benchmark.speed --rows 12 13 14 15 16 17    # on a GPU
    python -m benchmark.speed --rows 1 5 6 18 --repetitions 5    # --compile
    python -m benchmark.speed --against HEAD~3 --repetitions 5    # this tree beside an older commit, without the peer

The first run installs the peer into benchmark/.peer (this and clones need the internet); rows 10 and 11 need EnvPool.
Rows 12 to 17 run CleanRL's and LeanRL's files as they stand (see benchmark/peer_file.py), from clones in
benchmark/.peers, and need envpool==1.2.5, tensordict==0.7.2, torchrl==0.7.2, tqdm, stable-baselines3 and
opencv-python-headless.
Steps per second are those of the steady state: the first eighth of a run is left out. Nothing else should run on the
machine meanwhile.
"""

from __future__ import annotations

import csv
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch
import tyro

from common.processes import end_with_parent

ROOT = Path(__file__).parent.parent
PEER = ROOT / "benchmark" / ".peer"
PEERS = ROOT / "benchmark" / ".peers"
GPU = (12, 13, 14, 15, 16, 17)
BREAKOUT = "--env-id ALE/Breakout-v5 --clip-coef 0.1 --no-norm-reward --num-envs"
HOPPER = "--env-id Hopper-v5 --num-envs 1 --total-timesteps 2400 --learning-starts 200 --log-every 100"


@dataclass
class Args:
    rows: tuple[Literal[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18], ...] = ()
    """which rows of the table, 1 to 11 and 18 if left out (with --against 1, 3, 5 and 6); 12 to 17 are of a GPU"""
    repetitions: int = 3
    """interleaved repetitions of each work"""
    against: str = ""
    """a commit: compare our scripts in this tree with those of that commit, instead of with the peer"""

    def __post_init__(self) -> None:
        self.rows = self.rows or (
            (1, 3, 5, 6) if self.against else (*range(1, 9), 10, 11, 18, 9)
        )  # 9 last: its memory would count for what starts after it
        if self.repetitions < 1:
            raise ValueError(f"--repetitions {self.repetitions}: must be at least 1.")
        if self.against and set(self.rows) & {7, 8, 9}:
            raise ValueError("--rows: 7, 8 and 9 measure no steps per second; leave them out with --against.")


@dataclass
class Measure:
    sps: float  # environment transitions per second, steady state, all ranks
    memory: float  # peak of the largest process, MB
    wall: float  # seconds, start to end


def install_peer() -> None:
    if not (PEER / "installed").exists():
        print("installing the peer into", PEER.relative_to(ROOT), flush=True)
        subprocess.run([sys.executable, "-m", "venv", PEER], check=True)
        packages = [
            "torch==2.13.0",
            "stable-baselines3==2.9.*",
            "gymnasium[atari,mujoco]>=1.4,<2",
            "opencv-python-headless",
        ]
        subprocess.run([PEER / "bin" / "python", "-m", "pip", "install", "--quiet", *packages], check=True)
        (PEER / "installed").touch()


def fetch_peers() -> None:
    """Those of one commit of CleanRL and of one of LeanRL, unless they are there."""
    for name, commit in (
        ("vwxyzjn/cleanrl", "fe8d8a03c41a7ef5b523e2e354bd01c363e786bb"),
        ("pytorch-labs/LeanRL", "20bfe6794aa488e896ae51588164ac5b4d865a9f"),
    ):
        folder = PEERS / name.split("/")[1]
        if not folder.exists():
            subprocess.run(["git", "clone", "--quiet", f"https://github.com/{name}", folder], check=True)
            subprocess.run(["git", "-C", folder, "checkout", "--quiet", commit], check=True)


def timed(command: list[str], threads: int, gpu: bool = False, root: Path = ROOT) -> tuple[str, float, float]:
    """Run to the end -> output, peak memory (MB) of the largest process, seconds."""
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"PYTHONPATH": path} | {"OMP_NUM_THREADS": str(threads or CORES)}
    if not gpu:
        env["CUDA_VISIBLE_DEVICES"] = ""
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT, preexec_fn=end_with_parent)
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            raise
        wall = time.perf_counter() - start
        out.seek(0)
        output = out.read()
    if status:
        raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{output}")
    return output, usage.ru_maxrss * 1024 / 1e6, wall


def ours(
    script: str,
    flags: str,
    processes: int = 1,
    threads: int = 1,
    gpu: bool = False,
    root: Path = ROOT,
) -> Measure:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    launch = launch if processes > 1 else [sys.executable]
    with tempfile.TemporaryDirectory() as folder:
        words = f"{flags} --eval-every 0 --num-threads {threads} --run-dir {folder}/run".split()
        _, memory, wall = timed([*launch, str(root / script), *words], threads, gpu, root)
        with open(f"{folder}/run/metrics.csv", newline="") as file:
            rows = [(int(row["global_step"]), float(row["time/wall"])) for row in csv.DictReader(file)]
    (s0, t0), (s1, t1) = rows[max(1, len(rows) // 8)], rows[-1]
    return Measure((s1 - s0) / (t1 - t0), memory, wall)


def peer(work: str, total: int, threads: int = 1) -> Measure:
    command = [str(PEER / "bin" / "python"), str(ROOT / "benchmark" / "peer_sb3.py"), work, str(total), str(threads)]
    output, memory, wall = timed(command, threads)
    return Measure(float(output.split("sps")[1].split()[0]), memory, wall)


def our_start() -> Measure:
    flags = "--env-id benchmark.first_step:FirstStep-v0 --eval-every 0"
    with tempfile.TemporaryDirectory() as folder:
        words = f"{flags} --run-dir {folder}/run".split()
        return Measure(0.0, *timed([sys.executable, str(ROOT / "ppo_ddp.py"), *words], 1)[1:])


def peer_start() -> Measure:
    command = [str(PEER / "bin" / "python"), str(ROOT / "benchmark" / "peer_sb3.py"), "startup", "0", "1"]
    return Measure(0.0, *timed(command, 1)[1:])


def pools(env_id: str, num_envs: int, steps: int) -> dict[str, Callable[[], Measure]]:
    """PPO on an environment through gymnasium and through EnvPool, with one thread (of torch too) and with two."""
    flags = f"--num-envs {num_envs} --total-timesteps {steps} --env-id"
    return {
        f"{num_envs} envs, {name} t{threads}": partial(ours, "ppo_ddp.py", f"{flags} {prefix}{env_id}", 1, threads)
        for threads in (1, 2)
        for name, prefix in (("gymnasium", ""), ("EnvPool", "envpool/"))
    }


def theirs(script: str, flags: str) -> Measure:
    """A file of CleanRL or LeanRL, on the GPU."""
    command = [sys.executable, "-m", "benchmark.peer_file", str(PEERS / script), *flags.split()]
    output, memory, wall = timed(command, CORES, gpu=True)
    return Measure(float(output.split("sps ")[-1].split()[0]), memory, wall)


def on_gpu(script: str, flags: str, ways: tuple[str, ...] = ("",)) -> dict[str, Callable[[], Measure]]:
    """A script of ours, with each of some further flags."""
    threads = {way: 1 if way == "--no-cuda" else CORES for way in ways}
    return {f"ours {way}".strip(): partial(ours, script, f"{flags} {way}", 1, threads[way], True) for way in ways}


def atari(num_envs: int, iterations: int) -> dict[str, Callable[[], Measure]]:
    """PPO on Breakout through EnvPool, ours through ALE too; CleanRL takes a sixth of the iterations."""
    flags, size = f"--num-envs {num_envs} --total-timesteps", num_envs * 128
    fast = f"{flags} {iterations * size}"
    game = "--clip-coef 0.1 --no-norm-reward --env-id"
    through_ale = on_gpu("ppo_ddp.py", f"{fast} {game} ALE/Breakout-v5", ("", "--compile"))
    return {
        "CleanRL": partial(theirs, "LeanRL/leanrl/ppo_atari_envpool.py", f"{flags} {iterations // 6 * size}"),
        "LeanRL": partial(theirs, "LeanRL/leanrl/ppo_atari_envpool_torchcompile.py", f"{fast} {FAST}"),
        **on_gpu("ppo_ddp.py", f"{fast} {game} envpool/Breakout-v5", ("", "--compile")),
        **{f"{name}, ALE": work for name, work in through_ale.items()},
    }


CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
FAST = "--compile --cudagraphs"
CHEETAH = "--env-id HalfCheetah-v5 --learning-starts 1000 --total-timesteps"
DQN = "--learning-starts 1000 --num-envs 1 --total-timesteps"
DQN_BREAKOUT = "--buffer-size 20000 --batch-size 32 --train-frequency 4 --target-network-frequency 1000"
DQN_BREAKOUT += " --learning-rate 1e-4 --end-e 0.01 --exploration-fraction 0.1"

CARTPOLE = "--total-timesteps 100000 --no-norm-reward"
COMPILED = f"{CARTPOLE} --num-envs 8 --compile"
DQN_CARTPOLE = "--num-envs 1 --train-frequency 10 --learning-starts 1000 --total-timesteps 80000"
DQN_CARTPOLE += " --loss huber --max-grad-norm 10"  # as the peer
WORKS = {
    1: {
        "peer": partial(peer, "ppo-cartpole", 60_000),
        "ours": partial(ours, "ppo_ddp.py", CARTPOLE),
        "ours, --compile": partial(ours, "ppo_ddp.py", f"{CARTPOLE} --compile"),
    },
    2: {
        "1 rank, 4 envs, DDP": partial(ours, "benchmark/one_rank_ddp.py", CARTPOLE),
        "2 ranks, 4 envs each": partial(ours, "ppo_ddp.py", f"{CARTPOLE} --num-envs 8", 2),
        "1 rank, 8 envs": partial(ours, "ppo_ddp.py", f"{CARTPOLE} --num-envs 8"),
    },
    3: {
        "peer t1": partial(peer, "ppo-breakout", 10_240, 1),
        "ours t1": partial(ours, "ppo_ddp.py", f"{BREAKOUT} 8 --total-timesteps 10240", 1, 1),
        "peer t2": partial(peer, "ppo-breakout", 10_240, 2),
        "ours t2": partial(ours, "ppo_ddp.py", f"{BREAKOUT} 8 --total-timesteps 10240", 1, 2),
    },
    4: {
        "1 rank of 8 envs": partial(ours, "ppo_ddp.py", f"{BREAKOUT} 8 --total-timesteps 10240", 1, 1),
        "1 rank of 16 envs": partial(ours, "ppo_ddp.py", f"{BREAKOUT} 16 --total-timesteps 20480", 1, 1),
        "2 ranks of 8 envs": partial(ours, "ppo_ddp.py", f"{BREAKOUT} 16 --total-timesteps 20480", 2, 1),
    },
    5: {
        "peer": partial(peer, "dqn-cartpole", 40_000),
        "ours": partial(ours, "dqn_ddp.py", DQN_CARTPOLE),
        "ours, --compile": partial(ours, "dqn_ddp.py", f"{DQN_CARTPOLE} --compile"),
    },
    6: {
        "peer t1": partial(peer, "sac-hopper", 2_400, 1),
        "ours t1": partial(ours, "sac_ddp.py", HOPPER, 1, 1),
        "ours t1, --compile": partial(ours, "sac_ddp.py", f"{HOPPER} --compile", 1, 1),
        "peer t2": partial(peer, "sac-hopper", 2_400, 2),
        "ours t2": partial(ours, "sac_ddp.py", HOPPER, 1, 2),
        "ours, default": partial(ours, "sac_ddp.py", HOPPER, 1, 0),
    },
    7: {"peer": peer_start, "ours": our_start},
    10: pools("CartPole-v1", 8, 100_000) | pools("CartPole-v1", 64, 400_000),
    11: pools("HalfCheetah-v5", 8, 40_000) | pools("HalfCheetah-v5", 64, 160_000),
    12: atari(8, 240),
    13: atari(64, 240),
    14: {
        "CleanRL": partial(theirs, "cleanrl/cleanrl/ppo.py", "--total-timesteps 60000"),
        **on_gpu("ppo_ddp.py", CARTPOLE, ("", "--compile", "--no-cuda")),
    },
    15: {
        "CleanRL": partial(
            theirs, "cleanrl/cleanrl/dqn_atari.py", f"{DQN} 12000 {DQN_BREAKOUT} --env-id BreakoutNoFrameskip-v4"
        ),
        **on_gpu("dqn_ddp.py", f"{DQN} 24000 {DQN_BREAKOUT} --log-every 1000 --env-id ALE/Breakout-v5"),
    },
    16: {
        "CleanRL": partial(theirs, "LeanRL/leanrl/dqn.py", f"{DQN} 40000"),
        "LeanRL": partial(theirs, "LeanRL/leanrl/dqn_torchcompile.py", f"{DQN} 80000 {FAST}"),
        **on_gpu("dqn_ddp.py", f"{DQN} 80000 --train-frequency 10 --log-every 1000", ("", "--no-cuda")),
    },
    17: {
        "CleanRL": partial(theirs, "LeanRL/leanrl/sac_continuous_action.py", f"{CHEETAH} 5000"),
        "LeanRL": partial(theirs, "LeanRL/leanrl/sac_continuous_action_torchcompile.py", f"{CHEETAH} 20000 {FAST}"),
        **on_gpu("sac_ddp.py", f"{CHEETAH} 20000 --num-envs 1 --log-every 500"),
    },
    18: {
        "1 process": partial(ours, "ppo_ddp.py", COMPILED),
        "1 process, --shards 4": partial(ours, "ppo_ddp.py", f"{COMPILED} --shards 4"),
        "2 processes": partial(ours, "ppo_ddp.py", COMPILED, 2),
    },
}
GOALS = {"CleanRL": "better 3", "LeanRL": "better 1"}
RATIOS = {
    1: [("ours", "peer", "at least 2.0, better 2.7"), ("ours, --compile", "peer", "at least 3.4, better 4")],
    2: [
        ("2 ranks, 4 envs each", "1 rank, 4 envs, DDP", "at least 0.85, better 1.7"),
        ("2 ranks, 4 envs each", "1 rank, 8 envs", "better 1.1"),
    ],
    3: [("ours t1", "peer t1", "at least 1.2, better 1.5"), ("ours t2", "peer t2", "at least 1.3, better 1.6")],
    4: [
        ("2 ranks of 8 envs", "1 rank of 8 envs", "at least 1.7, better 1.9"),
        ("2 ranks of 8 envs", "1 rank of 16 envs", "no goal"),
    ],
    5: [("ours", "peer", "at least 2.1, better 2.7"), ("ours, --compile", "peer", "at least 2.5, better 3")],
    **dict.fromkeys(
        (10, 11),
        [(f"{n} envs, EnvPool t{t}", f"{n} envs, gymnasium t{t}", "no goal") for n in (8, 64) for t in (1, 2)],
    ),
    6: [
        ("ours t1", "peer t1", "at least 1.1, better 1.6"),
        ("ours t1, --compile", "peer t1", "at least 1.2, better 1.4"),
        ("ours t2", "peer t2", "at least 1.15, better 1.6"),
        ("ours, default", "peer t1", "at least 1.4"),
    ],
    18: [
        ("1 process, --shards 4", "1 process", "at least 0.6, better 0.8"),
        ("2 processes", "1 process", "at least 1.15, better 1.4"),
    ],
    **{row: [("ours", name, goal) for name, goal in GOALS.items() if name in WORKS[row]] for row in GPU},
}
NAMES = {
    1: "PPO CartPole",
    2: "PPO CartPole, DDP",
    3: "PPO Breakout",
    4: "PPO Breakout, DDP",
    5: "DQN CartPole",
    6: "SAC Hopper",
    7: "start-up, memory",
    10: "PPO CartPole through EnvPool",
    11: "PPO HalfCheetah through EnvPool",
    12: "PPO Breakout, GPU, 8 environments",
    13: "PPO Breakout, GPU, 64 environments",
    14: "PPO CartPole, GPU",
    15: "DQN Breakout, GPU",
    16: "DQN CartPole, GPU",
    17: "SAC HalfCheetah, GPU",
    18: "PPO, 8 CartPoles, compiled",
}


def replay_memory() -> None:
    """A million transitions of Pong, of random actions, with two gradient steps: the memory of the only rank."""
    flags = "--env-id ALE/Pong-v5 --num-envs 8 --buffer-size 1000000 --learning-starts 999984 --log-every 100000"
    flags += " --end-e 1"
    memory = ours("dqn_ddp.py", f"{flags} --total-timesteps 1000000", 1, 2).memory
    print(f"\nrow 8: a million Atari transitions\n  {memory / 1000:.2f} GB in all (at most 7.5)", flush=True)


def replay_latency(repetitions: int, side: int = 1000) -> None:
    """Milliseconds to draw 128 of side**2 transitions of 4 numbers by their priorities, and to change those."""
    import numpy as np
    from gymnasium.spaces import Box

    from common.processes import World
    from common.replay import ReplayBuffer

    torch.set_num_threads(1)
    world = World(cuda=False)
    generator = torch.Generator()
    obs = np.zeros((side, 4), np.float32)
    yes = np.ones(side, bool)
    with world.open(600):
        rb = ReplayBuffer(side**2, side, world, Box(-1, 1, (4,), np.float32), (), np.dtype(np.int64), alpha=0.6)
        rb.observe(obs)
        for _ in range(side):
            infos = {"final_obs": {}, "episode_ended": yes}
            rb.add(np.zeros(side, np.int64), np.ones(side), yes, ~yes, obs, infos)
        for places in np.arange(side**2).reshape(side, side):
            rb.update_priorities(places, torch.rand(side))
        times: dict[str, list[float]] = {"sample": [], "update": []}
        for _ in range(1000 * repetitions):
            start = time.perf_counter()
            sample = rb.sample(128, generator)
            middle = time.perf_counter()
            rb.update_priorities(sample.indices, sample.batch.rewards)
            times["sample"].append(middle - start)
            times["update"].append(time.perf_counter() - middle)
    print("\nrow 9: 128 of a million, by priority (at most 0.3, better 0.1)")
    for name, values in times.items():
        print(f"  {name:22}{1000 * statistics.median(values):.3f} ms", flush=True)


def compare(args: Args) -> None:
    """Run each work of ours by this tree and by a commit, in turn, and print ratios of their steps per second."""
    with tempfile.TemporaryDirectory() as folder:
        archive, tree = f"{folder}/tree.tar", Path(folder) / "tree"
        made = subprocess.run(
            ["git", "-C", ROOT, "archive", "-o", archive, args.against], capture_output=True, text=True
        )
        if made.returncode:
            sys.exit(f"error: --against {args.against}: {made.stderr.strip()}")
        shutil.unpack_archive(archive, tree)
        for row in args.rows:
            works = {name: work for name, work in WORKS[row].items() if work.func is ours}
            works = {name: work for name, work in works.items() if "--compile" not in name}  # some commits lack it
            ratios: dict[str, list[float]] = {name: [] for name in works}
            print(f"\nrow {row}: {NAMES[row]}, steps per second of this tree / of {args.against}")
            for repetition in range(args.repetitions):
                for name, work in works.items():
                    roots = (ROOT, tree) if repetition % 2 == 0 else (tree, ROOT)
                    sps = {root: work(root=root).sps for root in roots}
                    ratios[name].append(sps[ROOT] / sps[tree])
                    print(f"  {name:22}{sps[ROOT]:.0f} / {sps[tree]:.0f} = {ratios[name][-1]:.3f}", flush=True)
            for name, r in ratios.items():
                print(
                    f"  {name:22}median {statistics.median(r):.3f} [{min(r):.3f}, {max(r):.3f}] of {len(r)}", flush=True
                )


def main(args: Args) -> None:
    if set(args.rows) & {10, 11, 12, 13} and find_spec("envpool") is None:
        sys.exit("error: --rows: 10 to 13 need EnvPool: pip install envpool==1.2.5")
    if set(args.rows) & set(GPU) and not torch.cuda.is_available():
        sys.exit("error: --rows: 12 to 17 need a GPU; leave them out.")
    if args.against:
        compare(args)
        return
    if set(args.rows) & {1, 3, 5, 6, 7}:
        install_peer()
    if set(args.rows) & set(GPU):
        fetch_peers()
    for row in args.rows:
        if row in (8, 9):
            replay_memory() if row == 8 else replay_latency(args.repetitions)
            continue
        works = WORKS[row]
        measures: dict[str, list[Measure]] = {name: [] for name in works}
        for _ in range(args.repetitions):
            for name, work in works.items():
                measures[name].append(work())
        print(f"\nrow {row}: {NAMES[row]}, median [min, max] of {args.repetitions}")
        for name, values in measures.items():
            speeds, walls = [m.sps for m in values], [m.wall for m in values]
            memory = statistics.median(m.memory for m in values)
            if row == 7:
                text = f"{statistics.median(walls):8.2f} s [{min(walls):.2f}, {max(walls):.2f}] to the first step"
            else:
                text = f"{statistics.median(speeds):8.0f} steps/s [{min(speeds):.0f}, {max(speeds):.0f}]"
            print(f"  {name:22}{text}, {memory:.0f} MB at most", flush=True)
        for a, b, wanted in RATIOS.get(row, []):
            pairs = sorted(x.sps / y.sps for x, y in zip(measures[a], measures[b], strict=True))
            ratio = statistics.median(pairs)
            print(f"  {a} / {b}: {ratio:.2f} [{pairs[0]:.2f}, {pairs[-1]:.2f}] ({wanted})", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Args))
