"""The worked changes of docs/modify.md beside the unchanged scripts: a suite for `benchmark.run`.

for x in ppo:rnd ppo:gru dqn:munchausen sac:redq; do
    patch -o ${x#*:}.py ${x%:*}_ddp.py docs/changes/${x#*:}.diff
done
python -m benchmark.run docs/changes/curves.py --results benchmark/results
python -m benchmark.plot docs/changes/curves.py --results benchmark/results --figures benchmark/figures \\
    --readme docs/results.md
"""

from benchmark.suites import work

CAR, POLE = (f"docs.changes.tasks:{name}-v0" for name in ("SparseMountainCar", "PositionCartPole"))
SPARSE = "--total-timesteps 200000 --eval-every 10000 --num-envs 8 --norm-obs"
PARTIAL = "--total-timesteps 500000 --eval-every 25000 --num-envs 16"
LUNAR = "--total-timesteps 500000 --eval-every 25000 --log-every 5000 --buffer-size 100000 --train-frequency 4"
LUNAR += " --learning-rate 5e-4 --exploration-fraction 0.2"
HOPPER = "--total-timesteps 30000 --eval-every 2000 --log-every 1000 --eval-episodes 10"
THREE, FIVE = {1: (1, 2, 3)}, {1: (1, 2, 3, 4, 5)}

SUITE = [
    work("ppo_ddp.py", CAR, SPARSE, FIVE),
    work("rnd.py", CAR, SPARSE, FIVE),
    work("ppo_ddp.py", POLE, PARTIAL, THREE),
    work("gru.py", POLE, PARTIAL, THREE),
    work("dqn_ddp.py", "LunarLander-v3", f"{LUNAR} --double-q", THREE),
    work("munchausen.py", "LunarLander-v3", LUNAR, THREE),
    work("sac_ddp.py", "Hopper-v5", HOPPER, THREE),
    work("redq.py", "Hopper-v5", f"{HOPPER} --num-critics 5", THREE),
]
