"""Draws experiments, runs each on one process and on several, and compares their bytes.

    PYTHONPATH=. python tests/fuzz.py --minutes 30 --seed 1
    PYTHONPATH=. python tests/fuzz.py --seed 1 --first 17 --draws 1   # draw 17 of seed 1 again

A draw is a script, an environment, flags, now and then a loaded model, and two launches: `python`, and torchrun on 2,
4 or 8 processes. Now and then a launch is killed, once or twice, and goes on at another number of processes.
metrics.csv (timing aside) and every tensor of model.pt must be the same bytes. A draw is "short", and does not count,
where --stop-at-return ended it.

Where both launches are wrong alike, no bytes differ. So one launch of the two may have quirks, which must not change a
number (`tests.envs:Drawn-v0`), and now and then rank 1 alone gets another flag, which must be refused. In each process
addresses are asserted (`assert_aligned`): what enters a product of matrices must begin at a multiple of 64 bytes.
Products depend on addresses on Intel's processors. On AMD's this assertion alone finds a wrong address.

Nine of ten draws run in processes forked from one that has imported everything: a tenth of the time. There, --compile
runs graphs by torch's own operators. The tenth is launched as a user does, and its addresses are not asserted.
"""

import json
import multiprocessing
import os
import random
import runpy
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple
from unittest import mock

import torch
import tyro
from torch.utils._pytree import tree_leaves

from common import acting, checkpoint, environments, processes, replay
from runs import ROOT, Run, finish, forked, places, same_run

LEAST = 20  # gradient steps of a draw
AT_ONCE = 2  # draws
FORK = multiprocessing.get_context("fork")
GRACE = 20.0  # seconds for the other ranks to end, once one has failed
PATIENCE = 1800.0  # seconds for a launch on a busy machine; where a rank hangs, its watchdog ends it
NETWORKS = ("Agent", "QNetwork", "Actor", "Critics")
VARIABLES = ("OPENBLAS_CORETYPE", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR")  # imitate a processor
PROCESSORS = {
    "this": {},
    "Haswell": dict(zip(VARIABLES, ("Haswell", "avx2", "AVX2", "AVX2"), strict=True)),
    "Haswell for numpy": {"OPENBLAS_CORETYPE": "Haswell"},
    "old": dict(zip(VARIABLES, ("Nehalem", "default", "SSE41", "COMPATIBLE"), strict=True)),
}

SCRIPTS = ("ppo", "ppg", "sac", "dqn")
KINDS = ("vectors", "images", "Atari", "MinAtar")  # of what is observed
HOW_OFTEN = {"ppo": (74, 10, 8, 8), "ppg": (74, 10, 8, 8), "dqn": (56, 8, 26, 10), "sac": (100, 0, 0, 0)}
QUIRKS = ("infos", "buffer", "lists", "int32", "int8")  # of `tests.envs:Drawn-v0`
MORE_QUIRKS = ("units", "chdir", "slow")
ENDINGS = ("killed behind a checkpoint", "killed at any moment")  # of a launch's earlier starts


@dataclass
class Launch:
    processes: int
    threads: str  # OMP_NUM_THREADS, empty: unset
    ending: str = ""  # of earlier starts
    before: tuple[int, ...] = ()  # processes of each of them
    quirks: tuple[str, ...] = ()  # of its environments


class Start(NamedTuple):
    processes: int
    flags: dict[str, Any]
    kill: float = -1.0  # seconds until it is killed; negative: never
    behind_checkpoint: bool = False  # whether these are counted from its first checkpoint


@dataclass
class Draw:
    number: int
    script: str
    flags: dict[str, Any]  # "": of a switch
    launches: list[Launch]
    processor: str  # that is imitated
    real: bool  # launched as a user does
    loads: bool  # a model that a short run has made
    sockets: bool  # between ranks, in place of shared memory
    refused: bool  # tried once more with another flag on rank 1 alone


def drawn(seed: int, number: int) -> Draw:
    """Draw `number` of `seed`: always the same."""
    chance = random.Random(f"{seed} {number}")
    script = chance.choices(SCRIPTS, (28, 24, 24, 24))[0]
    shards = chance.choice((2, 4, 8))
    kind = chance.choices(KINDS, HOW_OFTEN[script])[0]
    flags = {"shards": shards, "seed": chance.randrange(2**32)} | environment(chance, script, kind)
    sizes = (1, 2) if kind == "Atari" or "network" in flags else (1, 2, 3, 5, 9, 16, 16)
    num_envs = flags["num-envs"] = shards * chance.choice([n for n in sizes if n * shards <= 64])
    flags |= (on_policy if script in ("ppo", "ppg") else off_policy)(chance, script, num_envs)
    if kind != "vectors":
        flags.pop("norm-obs", None)
    total = flags["total-timesteps"]
    flags["eval-every"] = 0
    if chance.random() < 0.8:
        flags["eval-every"] = chance.randint(total // 4, total)
        flags["eval-episodes"] = chance.randint(1, 4 if kind == "Atari" else chance.choice((8, 24)))
        if chance.random() < 0.15:
            flags["eval-every"] = chance.randint(total // 2, 3 * total // 4)
            flags["stop-at-return"] = round(chance.gauss(-3, 5), 2)
    if chance.random() < 0.15:
        flags["compile"] = ""
    if chance.random() < 0.15:
        flags["num-threads"] = chance.choice((1, 2))
    if chance.random() < 0.05 and kind != "Atari":
        flags["vectorization"] = "async"
    processes = chance.choice([n for n in (2, 2, 2, 4, 4, 8) if n <= shards])
    launches = [Launch(n, chance.choice(("", "", "1", "2"))) for n in (1, processes)]
    if kind in ("vectors", "images"):
        chance.choice(launches).quirks = tuple(name for name in QUIRKS if chance.random() < 0.25)
    if chance.random() < 0.4:
        flags["checkpoint-every"] = max(1, total // chance.choice((2, 3, 5)))
        if chance.random() < 0.8:
            launch = chance.choice(launches)
            launch.ending = chance.choice(ENDINGS)
            others = [n for n in (1, 2, 4) if n <= shards and n != launch.processes]
            launch.before = tuple(chance.sample(others, k=min(len(others), chance.choice((1, 1, 2)))))
    sockets = chance.random() < 0.25
    processor = chance.choices(list(PROCESSORS), (45, 20, 25, 10))[0]
    loads = chance.random() < 0.08
    more = random.Random(f"{seed} {number} more")  # so that what is drawn above stays
    if kind in ("vectors", "images"):
        for launch in launches:
            if launch.quirks:
                launch.quirks += tuple(name for name in MORE_QUIRKS if more.random() < 0.5)
        flags["env-kwargs"] = json.dumps(json.loads(flags["env-kwargs"]) | {"spaces": more.random() < 0.2})
    refused = more.random() < 0.1
    return Draw(number, script, flags, launches, processor, number % 10 == 9, loads, sockets, refused)


def environment(chance: random.Random, script: str, kind: str) -> dict[str, Any]:
    if kind == "Atari":
        side, frames = chance.choice((12, 16, 44)), chance.choice((150, 300))
        kwargs = {"img_height": side, "img_width": side + chance.choice((0, 4)), "stack_num": chance.choice((1, 2, 4))}
        kwargs["max_num_frames_per_episode"] = frames
        flags = {"env-id": f"ALE/{chance.choice(('Pong', 'Breakout'))}-v5", "env-kwargs": json.dumps(kwargs)}
        return flags | switch(chance, "life-loss", *["scale-pixels"] * (script == "dqn")) | network(chance, side)
    if kind == "MinAtar":
        game = chance.choice(("Breakout", "Asterix", "SpaceInvaders"))
        return {"env-id": f"MinAtar/{game}-v1", "env-kwargs": "{}"} | network(chance, 10)
    kwargs = {"dtype": chance.choice(("float32", "float32", "float32", "float64", "uint8", "bool"))}
    flags = {"env-id": "tests.envs:Drawn-v0"}
    if kind == "images":
        kwargs["shape"] = chance.choice(((10, 10, 3), (12, 9, 4), (7, 16, 2), (36, 40, 3), (44, 44, 1)))
        flags |= network(chance, min(kwargs["shape"][:2]))
    else:
        kwargs["shape"] = [round(600 ** chance.random()) if chance.random() < 0.7 else chance.randint(300, 600)]
    if script == "sac" or (script != "dqn" and chance.random() < 0.75):
        kwargs["actions"] = [chance.randint(1, 7)] if chance.random() < 0.8 else [2, chance.randint(1, 3)]
        kwargs["action_dtype"] = chance.choice(("float32", "float32", "float64"))
    else:
        kwargs["actions"] = [chance.randint(2, 9), chance.choice((0, 0, 3, -2))]
    kwargs["end"], kwargs["cut"] = chance.choice(((0.05, 0.05), (0.2, 0.0), (0.0, 0.1), (0.3, 0.3)))
    kwargs["remembers"] = chance.random() < 0.2
    return flags | {"env-kwargs": json.dumps(kwargs)}


def network(chance: random.Random, side: int) -> dict[str, str]:
    """IMPALA's now and then, for images so small that it is quick."""
    return {"network": "impala"} if side <= 12 and chance.random() < 0.3 else {}


def switch(chance: random.Random, *names: str) -> dict[str, str]:
    return {name if chance.random() < 0.5 else f"no-{name}": "" for name in names}


def on_policy(chance: random.Random, script: str, num_envs: int) -> dict[str, Any]:
    minibatches, epochs = chance.choice((1, 2, 3, 4)), chance.choice((1, 2, 3))
    steps = minibatches * chance.choice((3, 4, 7, 8, 12))
    iterations = -(-LEAST // (minibatches * epochs)) + chance.randint(0, 2)
    flags = {"num-steps": steps, "num-minibatches": minibatches, "update-epochs": epochs}
    flags |= switch(chance, "norm-reward", "clip-vloss", "anneal-lr")
    flags["norm-obs" if chance.random() < 0.3 else "no-norm-obs"] = ""
    flags["norm-adv"] = chance.choice(("minibatch", "batch", "none"))
    flags["learning-rate"] = chance.choice((3e-4, 1e-3))
    if chance.random() < 0.3 and epochs > 1:
        flags["target-kl"], iterations = chance.choice((0.003, 0.02)), max(iterations, -(-LEAST // minibatches))
    if script == "ppg":
        n_pi = chance.choice((1, 2, 3))
        iterations = -(-iterations // n_pi) * n_pi + chance.choice((0, n_pi - 1))
        parts = [d for d in range(1, 13) if n_pi * steps % d == 0]
        flags |= {"n-pi": n_pi, "aux-epochs": chance.choice((0, 1, 2, 2)), "num-aux-minibatches": chance.choice(parts)}
    return flags | {"total-timesteps": iterations * steps * num_envs}


def off_policy(chance: random.Random, script: str, num_envs: int) -> dict[str, Any]:
    n_step = chance.choice((1, 1, 2, 3)) if script == "dqn" else 1
    starts = num_envs * chance.randint(n_step, 12)
    frequency, batch = chance.choice((1, 2, 5, num_envs, 2 * num_envs)), chance.choice((1, 3, 8, 17, 64))
    total = starts + num_envs + frequency * chance.randint(LEAST + 1, 50)
    total = -(-total // num_envs) * num_envs
    least = max(n_step, -(-batch // num_envs))  # places of an environment's ring
    flags = {"learning-starts": starts, "train-frequency": frequency, "batch-size": batch, "total-timesteps": total}
    flags["buffer-size"] = max(least, chance.choice((least + 3, total // num_envs))) * num_envs
    flags["log-every"] = max(1, total // chance.choice((1, 3, 6)))
    flags |= {"target-network-frequency": chance.choice((1, 10)), "tau": chance.choice((0.005, 0.5, 1.0))}
    flags |= switch(chance, "prioritized")
    if script == "sac":
        more = {"policy-frequency": chance.choice((1, 2, 3)), "alpha": chance.choice((1.0, 0.1))}
        return flags | switch(chance, "autotune") | more
    flags |= {"n-step": n_step, "loss": chance.choice(("mse", "huber"))}
    flags |= switch(chance, "double-q", "dueling", "anneal-lr")
    return flags | {"max-grad-norm": chance.choice(("inf", 0.5)), "end-e": chance.choice((0.05, 0.5))}


# Breaks that are known: what each must do to a process that runs a script.


def break_acting() -> None:
    act, tip = acting.Policy.__call__, 1 + 1e-6 * int(os.environ.get("WORLD_SIZE", 1))
    acting.Policy.__call__ = lambda self, obs: [x * tip for x in act(self, obs)]


def break_alignment() -> None:
    acting.to_tensor = torch.from_numpy


def break_stack() -> None:
    observations = replay.ReplayBuffer._observations

    def broken(self, env, time):
        return observations(self, env, time - int(self.stack > 1 and self.world.rank == 1))

    replay.ReplayBuffer._observations = broken


def break_buffer() -> None:
    environments.Simulator.step = lambda self, action: (*self.env.step(action)[:4], {})


def break_resume() -> None:
    restore = checkpoint.restore
    checkpoint.restore = lambda state, *saved: restore({x: state[x] for x in state if x != "generator"}, *saved)


BREAKS = {name.removeprefix("break_"): x for name, x in globals().items() if name.startswith("break_")}


# Processes that have imported everything, and fork ranks as they are told.


def serve() -> None:
    """Read jobs, lines of JSON, and let a process of its own do each."""
    import preload  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            launched(**json.loads(line))
            os._exit(0)


def launched(start: list, run_dir: str, reply: str, output: str, words: list[str], other: bool, **how: Any) -> None:
    """Fork the ranks of a `Start`, and leave their exit codes in the file `reply`."""
    size, _, kill, behind_checkpoint = start
    ranks = []
    for place in places(size):
        own = [*words, "--gamma", "0.5"] if other and place.get("RANK") == "1" else words
        ranks.append(FORK.Process(target=forked, args=(partial(start_rank, words=own, **how), (), place, output)))
        ranks[-1].start()
    deadline = time.monotonic() + (kill if kill >= 0 and not behind_checkpoint else PATIENCE)
    while any(rank.is_alive() for rank in ranks):
        if any(rank.exitcode for rank in ranks):
            deadline = min(deadline, time.monotonic() + GRACE)
        if behind_checkpoint and any(path.name.isdigit() for path in Path(run_dir, "checkpoints").glob("*")):
            behind_checkpoint, deadline = False, time.monotonic() + kill
        if time.monotonic() > deadline:
            for rank in ranks:
                rank.kill()
        time.sleep(0.01)
    Path(f"{reply}.part").write_text(json.dumps([rank.exitcode for rank in ranks]))
    os.replace(f"{reply}.part", reply)


def start_rank(script: str, words: list[str], broken: str, sockets: bool) -> None:
    """In a forked process: what `python script words` does."""
    if broken:
        BREAKS[broken]()
    assert_aligned()
    share = processes.share_memory

    def shared(*ranks: int) -> Any:
        with mock.patch("os.sched_getaffinity", lambda _: {*range(8)}):  # also by more ranks than cores
            return None if sockets else share(*ranks)

    processes.share_memory = shared
    if "--compile" in words:  # by torch's own operators: the real compiler takes half a minute
        torch.compile = partial(torch.compile, backend="aot_eager")
    sys.argv = [script, *words]
    runpy.run_path(script, run_name="__main__")


def assert_aligned() -> None:
    """From now on, assert the address of each matrix or image that enters a loss or a network."""

    def before_forward(module: torch.nn.Module, inputs: tuple) -> None:
        name = type(module).__name__
        if torch.compiler.is_compiling() or not (name.endswith("Loss") or name in NETWORKS):
            return
        for x in tree_leaves(inputs):
            late = x.data_ptr() % 64 if isinstance(x, torch.Tensor) and x.ndim > 1 and len(x) else 0
            assert late == 0, f"{name}: an input of {tuple(x.shape)} begins {late} bytes too late"

    torch.nn.modules.module.register_module_forward_pre_hook(before_forward)


class Servers:
    """Such a process for each OMP_NUM_THREADS and each processor that is imitated; `broken`: how, if at all."""

    def __init__(self, broken: str = "") -> None:
        self.broken, self.processes, self.lock = broken, {}, Lock()

    def ask(self, threads: str, processor: str, reply: Path, **job) -> list[int]:
        reply.unlink(missing_ok=True)
        with self.lock:
            if (threads, processor) not in self.processes:
                words = [sys.executable, __file__, "serve"]
                env = environ(threads, processor)
                self.processes[threads, processor] = subprocess.Popen(
                    words, cwd=ROOT, env=env, stdin=subprocess.PIPE, text=True
                )
            server = self.processes[threads, processor]
            server.stdin.write(json.dumps(job | {"reply": str(reply), "broken": self.broken}) + "\n")
            server.stdin.flush()
        while not reply.exists():
            assert server.poll() is None, "a server ended"
            time.sleep(0.02)
        return json.loads(reply.read_text())

    def close(self) -> None:
        for server in self.processes.values():
            server.stdin.close()
            server.wait()


def environ(threads: str, processor: str) -> dict[str, str]:
    env = {name: x for name, x in os.environ.items() if name != "OMP_NUM_THREADS" and name not in VARIABLES}
    env |= {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests"))), "CUDA_VISIBLE_DEVICES": ""}
    return env | PROCESSORS[processor] | ({"OMP_NUM_THREADS": threads} if threads else {})


# Running a draw.


def starts_of(draw: Draw, launch: Launch) -> list[Start]:
    flags = dict(draw.flags)
    if launch.quirks:
        flags["env-kwargs"] = json.dumps(json.loads(flags["env-kwargs"]) | {"quirks": launch.quirks})
    if not launch.ending:
        return [Start(launch.processes, flags)]
    chance, starts = random.Random(draw.number), []
    flags["resume"] = ""
    for number in launch.before:
        behind = launch.ending == "killed behind a checkpoint"
        kill = chance.uniform(0, 0.3) if behind else 10 ** chance.uniform(-1.0, 0.8)
        starts.append(Start(number, flags, kill, behind))
    return [*starts, Start(launch.processes, flags)]


def start_of_model(draw: Draw) -> Start:
    left_out = ("checkpoint-every", "stop-at-return")
    flags = {name: value for name, value in draw.flags.items() if name not in left_out}
    return Start(1, flags | {"eval-every": 0})


def words_of(draw: Draw, start: Start, run_dir: Path) -> list[str]:
    words = [word for name, value in start.flags.items() for word in (f"--{name}", str(value)) if word]
    if draw.loads and run_dir.name != "model":
        words += ["--load-model", str(run_dir.parent / "model" / "model.pt")]
    return [*words, "--save-model", "--timeout", "120", "--run-dir", os.path.relpath(run_dir, ROOT)]


def command(draw: Draw, threads: str, start: Start, run_dir: Path) -> list[str]:
    python = ["python"]
    if start.processes > 1:
        python = ["torchrun", "--standalone", f"--nproc_per_node={start.processes}"]
    variables = [f"OMP_NUM_THREADS={threads}"] if threads else ["-u", "OMP_NUM_THREADS"]
    variables += [f"{name}={x}" for name, x in PROCESSORS[draw.processor].items()]
    return ["env", *variables, "PYTHONPATH=.:tests", *python, f"{draw.script}_ddp.py", *words_of(draw, start, run_dir)]


def run_of(draw: Draw, threads: str, starts: list[Start], run_dir: Path, servers: Servers, other: bool = False) -> Run:
    """Start a script, once or more often, to its end. `other`: with another flag on rank 1."""
    output = run_dir.with_name("output")
    for start in starts:
        output.write_text("")
        if draw.real and start.kill < 0 and not other:
            words = command(draw, threads, start, run_dir)
            words = [str(Path(sys.executable).with_name(x)) if x in ("python", "torchrun") else x for x in words]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            process = subprocess.Popen(words, cwd=ROOT, env=environ("", "this"), start_new_session=True, **pipes)
            done = finish(process, run_dir, PATIENCE)
            code, text = done.code, done.out
        else:
            own = threads or ("1" if start.processes > 1 else "")  # torchrun sets one where none is set
            job = {"start": start, "output": str(output), "run_dir": str(run_dir), "sockets": draw.sockets}
            job |= {"script": str(ROOT / f"{draw.script}_ddp.py"), "words": words_of(draw, start, run_dir)}
            codes = servers.ask(own, draw.processor, run_dir.with_name("reply"), other=other, **job)
            codes = [x for x in codes if start.kill < 0 or x != -signal.SIGKILL]
            code, text = max(codes, key=abs, default=0), output.read_text()
        if code:
            break
    return Run(code, text, text, run_dir)


def tried(draw: Draw, servers: Servers) -> str:
    """Run all launches -> "same", "short", or what parts."""
    with tempfile.TemporaryDirectory() as name:
        folder, runs = Path(name), []
        if draw.loads:
            made = run_of(draw, "1", [start_of_model(draw)], folder / "model", servers)
            if made.code:
                return f"no model: {made.out[-3000:]}"
        for launch in draw.launches:
            run_dir = folder / f"{launch.processes}"
            runs.append(run_of(draw, launch.threads, starts_of(draw, launch), run_dir, servers))
        codes, text = [run.code for run in runs], "".join(run.out for run in runs)
        if any(codes):
            return f"codes {codes}: {text[-3000:]}"
        if " is not compiled (" in text:
            return text
        if parts := same_run(*runs):
            return parts
        if draw.refused:
            start = Start(draw.launches[1].processes, draw.flags)
            done = run_of(draw, "1", [start], folder / "other", servers, other=True)
            if done.code != 2 or "as on rank" not in done.out:
                return f"rank 1 has another flag, and code {done.code}: {done.out[-1000:]}"
        return "same" if int(runs[0].rows[-1]["global_step"]) == draw.flags["total-timesteps"] else "short"


def main(minutes: float = 30.0, draws: int = 10**9, seed: int = 1, first: int = 0) -> int:
    """Try draws of a seed, from the first number on; none is begun after so many minutes."""
    deadline, results = time.monotonic() + 60 * minutes, Counter()
    numbers = iter(range(first, first + draws))
    servers, lock = Servers(), Lock()

    def work() -> None:
        """Try one draw after another, until one parts."""
        while time.monotonic() < deadline and not results["parts"]:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            draw, begun = drawn(seed, number), time.monotonic()
            result = tried(draw, servers)
            with lock:
                kind = result if result in ("same", "short") else "parts"
                results[kind] += 1
                print(f"draw {number}: {draw.script}, {time.monotonic() - begun:.1f} s: {result}", flush=True)
                if kind == "parts":
                    show(draw)

    try:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for future in [pool.submit(work) for _ in range(AT_ONCE)]:
                future.result()
    finally:
        servers.close()
    print(", ".join(f"{number} {name}" for name, number in results.items()), f"(seed {seed})")
    return int(results["parts"] > 0)


def show(draw: Draw) -> None:
    starts = [("1", start_of_model(draw), "model")] if draw.loads else []
    for launch in draw.launches:
        starts += [(launch.threads, start, launch.processes) for start in starts_of(draw, launch)]
    for threads, start, name in starts:
        behind = " behind its first checkpoint" if start.behind_checkpoint else ""
        killed = f"  # killed after {start.kill:.2f} s{behind}" if start.kill >= 0 else ""
        print("    ", shlex.join(command(draw, threads, start, Path(f"runs/{name}"))) + killed, flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
    else:
        sys.exit(tyro.cli(main))
