"""C6: bad input gets one message that names the flag, and nothing is started. Processes: test_clean_end.py."""

import math
import sys

import gymnasium as gym
import numpy as np
import pytest

import dqn_ddp
import ppg_ddp
import ppo_ddp
import sac_ddp
from common.arguments import flag, parse
from common.processes import BadInput
from tests.envs import Plain

SCRIPTS = {"ppo": ppo_ddp, "ppg": ppg_ddp, "dqn": dqn_ddp, "sac": sac_ddp}
OBSERVATIONS = "make no vector; register a wrapper that makes them a Box"
WHOLE = "--scale-pixels False: must be left on"
REFUSED = [  # script, flags, what is said
    ("ppo", "--no-such-flag 1", "--no-such-flag"),
    ("ppo", "--env-id", "--env-id"),
    ("ppo", "--vectorization thread", "--vectorization"),
    ("ppo", "--total-timesteps 1e6", "--total-timesteps"),
    ("ppo", "--norm-obs yes", "--norm-obs yes: must be True or False"),
    ("ppo", "--norm_obs=1", "--norm-obs 1: must be True or False"),
    ("ppo", "--resume --run-dir= --checkpoint-every 512", "--run-dir : must be a directory"),
    ("dqn", "--resume --run-dir somewhere", "--checkpoint-every 0: must be at least 1"),
    ("ppo", "--run-dir file", "--run-dir file: cannot be written"),
    ("ppo", "--run-dir file/below", "--run-dir file/below: cannot be written"),
    ("ppo", "--num-steps 10", "--num-steps 10: must be a multiple of --num-minibatches (4), such as 8"),
    ("ppg", "--target-kl 0.01", "--update-epochs 1: must be at least 2 with --target-kl"),
    ("ppo", "--env-kwargs nonsense", "--env-kwargs nonsense: must be a JSON object, such as '{"),
    ("ppo", '--env-kwargs {"gravity":1}', '--env-kwargs {"gravity":1}: CartPoleEnv.__init__() got'),
    ("dqn", "--capture-video --eval-every 0", "--eval-every 0: must be at least 1"),
    ("ppo", "--stop-at-return 100 --eval-every 0", "--eval-every 0: must be at least 1"),
    ("ppo", "--total-timesteps 100", "--total-timesteps 100: must be at least 512"),
    ("ppg", "--total-timesteps 8191", "--total-timesteps 8191: must be at least 8192"),
    ("dqn", "--total-timesteps 5000", "--total-timesteps 5000: must be at least 100"),
    ("sac", "--total-timesteps 0", "--total-timesteps 0: must be at least"),
    ("ppo", "--total-timesteps 0 --load-model a --eval-every 0", "--total-timesteps 0: must be at least"),
    ("ppo", "--timeout 1", "--timeout 1.0: must be a number from 2 to 1e6"),  # it is fed once a second
    ("ppo", "--num-envs 1 --num-steps 16 --num-minibatches 16", "--norm-adv minibatch: must be none"),
    ("ppo", "--shards 8", "--num-envs 4: must be a multiple of --shards (8), such as 8"),
    ("ppg", "--num-aux-minibatches 3", "--num-aux-minibatches 3: must be a divisor of"),
    ("dqn", "--buffer-size 1001", "--buffer-size 1001: must be a multiple of --num-envs (4), such as 1000"),
    ("dqn", "--buffer-size 1000000000000", "--buffer-size 1000000000000: must be at most"),
    ("dqn", "--batch-size 20000", "--batch-size 20000: must be at most --buffer-size (10000)"),
    ("dqn", "--n-step 5000", "--buffer-size 10000: must be at least 20000"),
    ("ppo", "--env-id NoSuchEnv-v0", "Environment `NoSuchEnv` doesn't exist."),
    ("ppo", "--env-id nomodule:Env-v0", "No module named 'nomodule'"),
    ("ppo", "--env-id ALE/NoSuchGame-v5", "`NoSuchGame` doesn't exist in namespace ALE"),
    ("ppo", "--env-id MinAtar/NoSuch-v1", "`NoSuch` doesn't exist in namespace MinAtar"),
    ("ppo", '--env-id ALE/Pong-v5 --env-kwargs {"batch_size":1}', "leave out game and batch_size"),
    ("ppo", "--env-id Sequence-v0", OBSERVATIONS),  # this one and the like: `SPACES`
    ("dqn", '--env-id ALE/Pong-v5 --env-kwargs {"grayscale":false}', OBSERVATIONS),
    ("ppo", "--env-id Image-v0 --norm-obs", "--norm-obs True: must be left off"),
    ("ppo", "--network impala", "--network impala: must be left off"),
    ("dqn", "--no-scale-pixels", WHOLE),
    ("dqn", "--env-id MinAtar/Breakout-v1 --no-scale-pixels", WHOLE),
    ("ppo", "--env-id MultiDiscrete-v0", "not MultiDiscrete([2 2])"),
    ("ppo", "--env-id IntBox-v0", "must be Discrete or Box of floats"),
    ("ppo", "--env-id NoSuchTask-v0", "registers it: MODULE:ID"),
    ("dqn", "--env-id Pendulum-v1", "its actions must be Discrete"),
    ("sac", "--env-id CartPole-v1", "its actions must be Box"),
    ("sac", "--env-id ImageBox-v0", "must be an environment with vector observations"),
    ("sac", "--env-id OpenBox-v0", "must be an environment whose actions have finite bounds"),
]
IMAGE = gym.spaces.Box(0, 255, (12, 12, 3), np.uint8)
SPACES = {  # of observations, or of actions
    "Sequence": {"obs": gym.spaces.Sequence(gym.spaces.Discrete(2))},
    "Image": {"obs": IMAGE},
    "ImageBox": {"obs": IMAGE, "actions": gym.spaces.Box(-1, 1, (2,), np.float32)},
    "MultiDiscrete": {"actions": gym.spaces.MultiDiscrete([2, 2])},
    "IntBox": {"actions": gym.spaces.Box(0, 5, (2,), np.int64)},
    "OpenBox": {"actions": gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)},
}
for name, spaces in SPACES.items():
    gym.register(f"{name}-v0", Plain, kwargs=spaces)


@pytest.mark.parametrize("script, flags, said", REFUSED)
def test_what_is_refused(script, flags, said, tmp_path, monkeypatch, capfd):
    """In one line, before any file of a run exists. What tyro finds it says itself, in a box."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    module = SCRIPTS[script]
    try:
        module.main(parse(module.Args, flags.split()))
    except BadInput as error:
        assert said in str(error) and "\n" not in str(error)
    except SystemExit as error:
        assert error.code == 2 and said in capfd.readouterr().err
    else:
        raise AssertionError("it ran")
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} <= {"file", "lock"}


NAN = math.nan
NUMBERS = {  # what a field may not be
    0: "num_envs num_steps num_minibatches update_epochs total_timesteps buffer_size batch_size train_frequency n_step"
    " learning_rate adam_eps clip_coef timeout max_grad_norm target_kl eval_episodes target_network_frequency tau"
    " policy_frequency policy_lr q_lr alpha",
    -1: "seed num_threads eval_every ent_coef vf_coef learning_starts log_every aux_epochs n_pi num_aux_minibatches"
    " aux_learning_rate beta_clone checkpoint_every",
    NAN: "learning_rate gamma gae_lambda clip_coef ent_coef vf_coef timeout max_grad_norm target_kl stop_at_return"
    " adam_eps tau start_e end_e exploration_fraction per_alpha per_beta policy_lr q_lr alpha",
    1.5: "gamma gae_lambda per_beta",
    math.inf: "learning_rate",
    2**40: "seed timeout",
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_number_that_cannot_work_is_refused_by_its_flag(script):
    args_type = SCRIPTS[script].Args
    for value, names in NUMBERS.items():
        for name in set(names.split()) & {*args_type.__dataclass_fields__}:
            with pytest.raises(BadInput, match=flag(name)):
                args_type(**{name: value})


def test_advantages_of_one_sample_are_not_normalised():
    """Less its own mean each would be zero, and nothing would move the policy."""
    small = {"num_envs": 1, "num_steps": 16, "num_minibatches": 16, "total_timesteps": 1000}
    for script in (ppo_ddp, ppg_ddp):
        with pytest.raises(BadInput, match="--norm-adv batch"):
            script.Args(**small | {"num_steps": 1, "num_minibatches": 1}, norm_adv="batch")
        for settings in ({"norm_adv": "none"}, {"norm_adv": "batch"}, {"num_minibatches": 8}):
            script.Args(**small | settings)


def test_a_missing_package_is_named_with_its_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "minatar.gym", None)
    with pytest.raises(BadInput, match="^--env-id MinAtar/Breakout-v1: .*minatar.gym"):
        ppo_ddp.main(ppo_ddp.Args(env_id="MinAtar/Breakout-v1", run_dir=str(tmp_path / "run")))
    for name, package in {"track": "wandb", "tensorboard": "tensorboard", "capture_video": "av"}.items():
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(BadInput, match=f"^{flag(name)} True: must be left off, or first: pip install {package}"):
            ppo_ddp.Args(**{name: True})
