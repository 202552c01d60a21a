"""Two nodes train one run; the second is lost and comes back, and the bytes are those of a run that nobody disturbed.

    python tests/elastic.py [--losses 5] [--seed 1] [case ...]

A node is a torchrun with one process: on Linux, for root, in a network namespace of its own. The second is lost in one
way of `KINDS` or, between namespaces, cut off. Each row takes a while, so that there is time.
"""

import contextlib
import os
import random
import shutil
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
from runs import PATIENCE, ROOT, Run, descendants, finish, free_port, same_run, send, start

PAUSES = {"ppo": 1.0, "ppg": 0.6, "dqn": 2.0, "sac": 2.0}  # seconds a row: two minutes alone
TIMEOUT = 15  # seconds, after which a hung node counts as lost
ELASTIC = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TORCH_ELASTIC_WORKER_IDENTICAL": "1"}  # see docs/launching.md
KINDS = ("kill", "kill", "kill all", "end", "stop", "a process", "a process of the first")


@dataclass
class Nodes:
    """Two nodes, in namespaces or, without these, both on this machine; and what they printed."""

    folder: Path
    command: list[str]
    pause: float
    namespaces: tuple[str, ...]
    launchers: list[subprocess.Popen | None] = field(default_factory=lambda: [None, None])
    port: int = field(default_factory=free_port)

    def start(self, node: int) -> None:
        host = "10.77.0.1" if self.namespaces else "127.0.0.1"
        words = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc_per_node=1"]
        words += ["--max-restarts=100", "--rdzv_backend=c10d", "--rdzv_id=1", f"--rdzv_endpoint={host}:{self.port}"]
        conf = f"is_host={node == 0},last_call_timeout=3,keep_alive_interval=1,read_timeout=20"
        words += [f"--local_addr={host[:-1]}{node + 1}", "--rdzv_conf", conf, *self.command]
        env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "LOCKSTEP_DTYPE": "float32"}
        env |= ELASTIC | {"LOCKSTEP_PAUSE": str(self.pause)}
        if self.namespaces:
            words = ["ip", "netns", "exec", self.namespaces[node], *words]
            env["GLOO_SOCKET_IFNAME"] = f"v{self.namespaces[node]}"
        with open(self.folder / f"node{node}.log", "ab") as log:
            self.launchers[node] = subprocess.Popen(words, env=os.environ | env, stdout=log, stderr=log)

    def wait_for_start(self, processes: int, times: int) -> bool:
        """Until it has started on some processes more than some times -> False where node 0 ends."""
        deadline = time.monotonic() + PATIENCE
        while self.starts(processes) <= times:
            if self.launchers[0].poll() is not None:
                return False
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.05)
        return True

    def starts(self, processes: int) -> int:
        return (self.folder / "node0.log").read_text().count(f" on {processes} process(es)")

    def said(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("node*.log")))

    def lose(self, kind: str, chance: random.Random) -> None:
        """Lose the second node, or a process of one, and bring it back."""
        alone = self.starts(1)
        first, second = (descendants(launcher) for launcher in self.launchers)
        if kind.startswith("a process"):
            send((first if "first" in kind else second)[1:2], signal.SIGKILL)
            return  # torchrun starts it again
        if kind == "stop":
            send(second, signal.SIGSTOP)
            self.wait_for_start(1, alone)  # the first node has gone on alone
            send(second, signal.SIGCONT)
            return  # its own torchrun brings it back
        if kind == "cut":
            ip(f"-n {self.namespaces[1]} link set v{self.namespaces[1]} down")
            self.wait_for_start(1, alone)
        send(second if kind in ("kill all", "cut") else second[:1], signal.SIGTERM if kind == "end" else signal.SIGKILL)
        if kind == "cut":
            ip(f"-n {self.namespaces[1]} link set v{self.namespaces[1]} up")
        time.sleep(chance.uniform(0, 10))
        self.launchers[1].wait(PATIENCE)
        self.start(1)


def ip(words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words.split()], check=check)


@contextlib.contextmanager
def two_namespaces() -> Iterator[tuple[str, ...]]:
    """Two network namespaces, 10.77.0.1 and .2, joined by a cable with ends v and their names."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        yield ()  # they cannot be made
        return
    names = (f"{os.getpid()}a", f"{os.getpid()}b")
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
            ip(f"netns del {name}", check=False)


def elastic(case: str, losses: int, seed: int, folder: Path) -> list[str]:
    """Asserts that the disturbed run ends as the undisturbed -> what was done to it."""
    script, flags = f"{case}_ddp.py", f"{CASES[case]} --shards 2 --save-model --resume --timeout {TIMEOUT}"
    chance, calm, run_dir = random.Random(f"{case} {seed}"), folder / "calm", folder / "elastic"
    undisturbed = start(script, 1, f"{flags} --run-dir {calm}", launched=True, LOCKSTEP_DTYPE="float32")
    assert finish(undisturbed, calm).code == 0
    words = [str(ROOT / "tests" / "launcher.py"), script, *f"{flags} --run-dir {run_dir}".split()]
    with two_namespaces() as namespaces:
        nodes, done = Nodes(folder, words, PAUSES[case], namespaces), []
        kinds = KINDS + ("cut", "cut") * bool(namespaces)
        try:
            nodes.start(0)
            time.sleep(1)
            nodes.start(1)
            together = 0
            for _ in range(losses):
                # else it is lost while it comes back
                if (not done or chance.random() < 0.7) and not nodes.wait_for_start(2, together):
                    break
                time.sleep(chance.uniform(0, 5))
                if nodes.launchers[0].poll() is not None:
                    break
                together = nodes.starts(2)
                done.append(chance.choice(kinds))
                nodes.lose(done[-1], chance)
            assert nodes.launchers[0].wait(PATIENCE) == 0, nodes.said()
            nodes.launchers[1].wait(120)  # with 0, or a traceback of torchrun's own where it came back too late
        finally:
            for launcher in filter(None, nodes.launchers):
                send(descendants(launcher), signal.SIGKILL)
                launcher.wait()
    time.sleep(1)
    left = [p.pid for p in psutil.process_iter(["cmdline"]) if str(run_dir) in (p.info["cmdline"] or [])]
    assert not left, f"left: {left}"
    assert not (parts := same_run(Run(0, "", "", calm), Run(0, "", "", run_dir))), parts
    return done


def main(cases: tyro.conf.Positional[tuple[str, ...]] = (*CASES,), losses: int = 5, seed: int = 1) -> None:
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            done = elastic(case, losses, seed, Path(folder))
            print(f"{case}: the same bytes after {', '.join(done)}", flush=True)


if __name__ == "__main__":
    tyro.cli(main)
