"""Kills a run in every way at random moments, goes on with it at 1, 2 or 4 processes, and compares its bytes.

    python tests/chaos.py [--kills 12] [--seed 1] [case ...]

Each case runs once undisturbed. Then the same command, with --resume, is started again and again, and killed: a rank,
the launcher, or all of its group, at a random moment, half of the times while a checkpoint is being written. After
that it is left alone until it is finished.
"""

import random
import signal
import tempfile
import time
from pathlib import Path

import tyro

from runs import PATIENCE, descendants, finish, same_run, send, start

ROLLOUTS = "--num-envs 8 --num-steps 32 --checkpoint-every 512 --eval-every 5000 --eval-episodes 6"
CASES = {
    "ppo": f"{ROLLOUTS} --total-timesteps 25600 --norm-obs",
    "ppg": f"{ROLLOUTS} --total-timesteps 40960 --n-pi 2 --aux-epochs 1 --num-aux-minibatches 8",
    "dqn": "--num-envs 8 --buffer-size 4000 --learning-starts 1000 --total-timesteps 12000 --checkpoint-every 400"
    " --prioritized --n-step 3 --eval-every 3000 --eval-episodes 6",
    "sac": "--num-envs 4 --buffer-size 1000 --learning-starts 600 --total-timesteps 1800 --checkpoint-every 60"
    " --log-every 200 --eval-every 600 --eval-episodes 3",
}
SIGNALS = [[signal.SIGKILL], [signal.SIGTERM], [signal.SIGINT], [signal.SIGSTOP, signal.SIGKILL]]


def chaos(case: str, kills: int, seed: int, folder: Path) -> str:
    """Asserts that the disturbed run ends as the undisturbed -> how it went."""
    script, flags = f"{case}_ddp.py", f"{CASES[case]} --shards 4 --save-model"
    chance, calm, run_dir = random.Random(f"{case} {seed}"), folder / "calm", folder / "chaos"
    undisturbed = finish(start(script, 1, f"{flags} --run-dir {calm}"), calm)
    assert undisturbed.code == 0, undisturbed.err
    left, dying, out, run = kills, [], "", None
    while run is None or run.code != 0:
        process = start(script, chance.choice((1, 2, 4)), f"{flags} --resume --run-dir {run_dir}")
        killed = left > 0 and disturb(process, run_dir / "checkpoints", chance)
        left -= killed
        if killed and chance.random() < 0.5:
            dying.append(process)  # the next start meets what is left of it
        else:
            run = finish(process, run_dir)
            assert killed or run.code == 0, run.err
            out += run.out
    for process in dying:
        out += finish(process, run_dir).out
    assert not (parts := same_run(undisturbed, run)), parts
    return f"{kills - left} kills, {out.count('going on from')} resumes"


def disturb(process, checkpoints: Path, chance: random.Random) -> bool:
    """Let the run live a while, then kill a part of it -> whether it was still there."""
    before = set(checkpoints.glob("*"))
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None and not set(checkpoints.glob("*")) - before and time.monotonic() < deadline:
        if chance.random() < 0.001:  # before its first checkpoint
            break
        time.sleep(0.01)
    time.sleep(chance.uniform(0, 1.0))
    writing = chance.random() < 0.5
    while writing and process.poll() is None and not any(checkpoints.glob("*.part")) and time.monotonic() < deadline:
        time.sleep(0.0002)
    family = descendants(process)
    if process.poll() is not None or not family:
        return False
    ranks = [p for p in family if "torch.distributed.run" not in p.cmdline()] or family
    victims = chance.choice([[chance.choice(ranks)], [family[0]], family])
    for number in chance.choice(SIGNALS):
        send(victims, number)
        time.sleep(0.05)
    return True


def main(cases: tyro.conf.Positional[tuple[str, ...]] = (*CASES,), kills: int = 13, seed: int = 1) -> None:
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            print(f"{case}: the same bytes after {chaos(case, kills, seed, Path(folder))}", flush=True)


if __name__ == "__main__":
    tyro.cli(main)
