"""Two nodes train one run; the second is lost and comes back, and the bytes are those of a run that nobody disturbed.

    python tests/elastic.py [--losses 5] [--seed 1] [--namespaces] [case ...]

A node is a torchrun with one process: two of them on this machine, or each in a network namespace of its own (Linux,
root, and the `ip` command). The second is killed, alone or with all that it started, asked to end, stopped and woken,
or, between namespaces, cut off; a process of the first is killed too. Each row takes a while, so that there is time.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import tyro

from chaos import CASES
from runs import PATIENCE, ROOT, Run, finish, free_port, same_run, start

PAUSES = {"ppo": 1.0, "ppg": 0.6, "dqn": 2.0, "sac": 2.0}  # seconds a row: two minutes alone
TIMEOUT = 15  # seconds, after which a hung node counts as lost
ELASTIC = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TORCH_ELASTIC_WORKER_IDENTICAL": "1"}  # see docs/launching.md


@dataclass
class Nodes:
    """Where two nodes run, and what was printed there."""

    folder: Path
    command: list[str]
    pause: float
    namespaces: tuple[str, ...] = ()
    launchers: list[subprocess.Popen | None] = field(default_factory=lambda: [None, None])
    port: int = 0

    def start(self, node: int) -> None:
        host = "10.77.0.1" if self.namespaces else "127.0.0.1"
        if not self.port:
            self.port = free_port()
        words = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc_per_node=1"]
        words += ["--max-restarts=100", "--rdzv_backend=c10d", "--rdzv_id=1", f"--rdzv_endpoint={host}:{self.port}"]
        conf = f"is_host={node == 0},last_call_timeout=3,keep_alive_interval=1,read_timeout=20"
        words += [f"--local_addr={host[:-1]}{node + 1}", "--rdzv_conf", conf, *self.command]
        env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "LOCKSTEP_DTYPE": "float32"}
        env |= ELASTIC | {"LOCKSTEP_PAUSE": str(self.pause)}
        if self.namespaces:
            words = ["ip", "netns", "exec", self.namespaces[node], *words]
            env["GLOO_SOCKET_IFNAME"] = f"v{self.namespaces[node]}"
        with open(self.log(node), "ab") as log:
            self.launchers[node] = subprocess.Popen(words, env=os.environ | env, stdout=log, stderr=log)

    def log(self, node: int) -> Path:
        return self.folder / f"node{node}.log"

    def family(self, node: int) -> list[psutil.Process]:
        """The launcher and what it started, that first."""
        with contextlib.suppress(psutil.NoSuchProcess):
            me = psutil.Process(self.launchers[node].pid)
            return [*me.children(recursive=True), me]
        return []

    def send(self, node: int, number: int, only: slice = slice(None)) -> None:
        for process in self.family(node)[only]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def wait(self, happened) -> bool:
        """Wait for an event -> whether it came before the first node's end."""
        deadline = time.monotonic() + PATIENCE
        while not happened():
            if self.launchers[0].poll() is not None:
                return False
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.05)
        return True

    def said(self) -> str:
        return "\n".join(self.log(node).read_text() for node in (0, 1) if self.log(node).exists())

    def starts(self, processes: int) -> int:
        """How often the run has started at a number of processes, as rank 0, on the first node, says."""
        return self.log(0).read_text().count(f" on {processes} process(es)")

    def wait_for_start(self, processes: int, times: int) -> bool:
        """Wait until it has done so more than some times -> whether that came."""
        return self.wait(lambda: self.starts(processes) > times)


@contextlib.contextmanager
def two_namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces, 10.77.0.1 and 10.77.0.2, joined by a cable; its ends are called v and their names."""
    names = (f"{os.getpid()}a", f"{os.getpid()}b")

    def ip(words: str) -> None:
        subprocess.run(["ip", *words.split()], check=True)

    try:
        for name in names:
            ip(f"netns add {name}")
        ip(f"link add v{names[0]} netns {names[0]} type veth peer name v{names[1]} netns {names[1]}")
        for number, name in enumerate(names, 1):
            ip(f"-n {name} addr add 10.77.0.{number}/24 dev v{name}")
            ip(f"-n {name} link set v{name} up")
            ip(f"-n {name} link set lo up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def elastic(case: str, losses: int, seed: int, folder: Path, namespaces: tuple[str, ...] = ()) -> list[str]:
    """Raises `AssertionError` where the disturbed run ends otherwise than the undisturbed -> what was done to it."""
    script, flags = CASES[case]
    flags = f"{flags} --shards 2 --save-model --resume --timeout {TIMEOUT}"
    chance, calm, run_dir = random.Random(f"{case} {seed}"), folder / "calm", folder / "elastic"
    undisturbed = start(script, 1, f"{flags} --run-dir {calm}", launched=True, LOCKSTEP_DTYPE="float32")
    assert finish(undisturbed, calm).code == 0
    launcher = str(ROOT / "tests" / "launcher.py")
    nodes = Nodes(folder, [launcher, script, *f"{flags} --run-dir {run_dir}".split()], PAUSES[case], namespaces)
    kinds = ("kill", "kill", "kill all", "end", "stop", "kill a process", "kill the host's process")
    kinds += ("cut", "cut") * bool(namespaces)
    done = []
    try:
        nodes.start(0)
        time.sleep(1)
        nodes.start(1)
        together = 0
        for _ in range(losses):
            if not done or chance.random() < 0.7:  # else it is lost while it comes back
                if not nodes.wait_for_start(2, together):
                    break
            time.sleep(chance.uniform(0, 5))
            if nodes.launchers[0].poll() is not None:
                break
            together = nodes.starts(2)
            done.append(chance.choice(kinds))
            disturb(nodes, done[-1], chance)
        host = nodes.launchers[0].wait(PATIENCE)
        assert host == 0, nodes.said()
        nodes.launchers[1].wait(120)  # with 0, or a traceback of torchrun's own where it came back too late
    finally:
        for node in (0, 1):
            if nodes.launchers[node] is not None:
                nodes.send(node, signal.SIGKILL)
                nodes.launchers[node].wait()
    time.sleep(1)
    left = [p.pid for p in psutil.process_iter(["cmdline"]) if str(run_dir) in (p.info["cmdline"] or [])]
    assert not left, f"left: {left}"
    assert not (parts := same_run(Run(0, "", "", calm), Run(0, "", "", run_dir))), parts
    return done


def disturb(nodes: Nodes, kind: str, chance: random.Random) -> None:
    """Lose a node, or a process of one, and bring it back."""
    if kind == "kill":
        nodes.send(1, signal.SIGKILL, slice(-1, None))
    elif kind == "kill all":
        nodes.send(1, signal.SIGKILL)
    elif kind == "end":
        nodes.send(1, signal.SIGTERM, slice(-1, None))
    elif kind.endswith("process"):
        node = 0 if "host" in kind else 1
        for process in nodes.family(node)[:-1][:1]:
            process.kill()
        return  # torchrun starts it again
    alone = nodes.starts(1)
    if kind in ("stop", "cut"):
        if kind == "stop":
            nodes.send(1, signal.SIGSTOP)
        else:
            set_link(nodes.namespaces[1], "down")
        nodes.wait_for_start(1, alone)  # the first node has gone on alone
        if kind == "stop":
            nodes.send(1, signal.SIGCONT)
            return  # its own torchrun brings it back
        nodes.send(1, signal.SIGKILL)
        set_link(nodes.namespaces[1], "up")
    time.sleep(chance.uniform(0, 10))
    nodes.launchers[1].wait(PATIENCE)
    nodes.start(1)


def set_link(namespace: str, state: str) -> None:
    subprocess.run(["ip", "-n", namespace, "link", "set", f"v{namespace}", state], check=True)


def main(
    cases: tyro.conf.Positional[tuple[str, ...]] = ("ppo", "ppg", "dqn", "sac"),
    losses: int = 5,
    seed: int = 1,
    namespaces: bool = False,
) -> None:
    """Print, for each case, how a node was lost, and that the bytes are the undisturbed run's."""
    for case in cases:
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            names = stack.enter_context(two_namespaces()) if namespaces else ()
            begun = time.monotonic()
            done = elastic(case, losses, seed, Path(folder), names)
            print(f"{case}: the same bytes after {', '.join(done)} ({time.monotonic() - begun:.0f} s)", flush=True)


if __name__ == "__main__":
    tyro.cli(main)
