"""C6: bad input gets one message that names the flag, exit code 2, and nothing is started."""

import math
import re

import pytest

import ppg_ddp
import ppo_ddp
from common.errors import BadInput, require_divisible
from common.run.loop import crossed
from runs import ROOT, finish, run, start

NAN = math.nan


@pytest.mark.parametrize("script", [ppo_ddp, ppg_ddp])
@pytest.mark.parametrize(
    "field, value",
    [(name, 0) for name in ("num_envs", "num_steps", "num_minibatches", "update_epochs", "total_timesteps")]
    + [(name, -1) for name in ("seed", "num_threads", "eval_every", "check_sync_every", "ent_coef", "vf_coef")]
    + [(name, 0.0) for name in ("learning_rate", "adam_eps", "clip_coef", "timeout", "max_grad_norm", "target_kl")]
    + [(name, NAN) for name in ("learning_rate", "gamma", "gae_lambda", "clip_coef", "ent_coef", "vf_coef", "timeout")]
    + [(name, NAN) for name in ("max_grad_norm", "target_kl", "stop_at_return", "adam_eps")]
    + [("gamma", 1.1), ("gae_lambda", -0.1), ("learning_rate", math.inf), ("eval_episodes", 0)]
    + [("num_minibatches", 3), ("total_timesteps", 511), ("seed", 2**32), ("timeout", 1e10)],
)
def test_a_value_that_cannot_work_is_refused_by_its_flag(script, field, value):
    flag = "--num-steps" if (field, value) == ("num_minibatches", 3) else "--" + field.replace("_", "-")
    with pytest.raises(BadInput, match=re.escape(flag)):
        script.Args(**{field: value})


@pytest.mark.parametrize("script", [ppo_ddp, ppg_ddp])
def test_advantages_of_one_sample_are_not_normalised(script):
    """Less its own mean each would be zero, and nothing would move the policy."""
    small = {"num_envs": 1, "num_steps": 16, "num_minibatches": 16, "total_timesteps": 1000}
    with pytest.raises(BadInput, match="--norm-adv minibatch: must be none, or over at least 2 samples"):
        script.Args(**small, norm_adv="minibatch")
    with pytest.raises(BadInput, match="--norm-adv batch"):
        script.Args(**small | {"num_steps": 1, "num_minibatches": 1}, norm_adv="batch")
    for settings in ({"norm_adv": "none"}, {"norm_adv": "batch"}, {"num_minibatches": 8}):
        script.Args(**small | settings)


def test_ppg_refuses_a_run_without_an_auxiliary_phase():
    with pytest.raises(BadInput, match=r"--total-timesteps 8191.*8192"):
        ppg_ddp.Args(total_timesteps=8191)
    ppg_ddp.Args(total_timesteps=8192)
    ppg_ddp.Args(total_timesteps=8191, aux_epochs=0)
    with pytest.raises(BadInput, match="--num-aux-minibatches 3: must be a divisor of.*such as 2[.]"):
        ppg_ddp.Args(num_aux_minibatches=3)
    with pytest.raises(BadInput, match="--num-aux-minibatches 17: .*16000000000.*such as 16 or 20[.]"):  # at once
        ppg_ddp.Args(num_aux_minibatches=17, num_steps=10**9, total_timesteps=10**12)
    for field in ("aux_epochs", "n_pi", "num_aux_minibatches", "aux_learning_rate", "beta_clone"):
        with pytest.raises(BadInput, match="--" + field.replace("_", "-")):
            ppg_ddp.Args(**{field: -1})


def test_nearest_valid_values_are_named():
    with pytest.raises(BadInput, match="8 or 12"):
        require_divisible("--num-envs", 10, 4, "the number of processes")
    with pytest.raises(BadInput, match="such as 4[.]"):
        require_divisible("--num-envs", 2, 4, "the number of processes")


def test_periods_happen_at_or_past_each_multiple():
    steps = range(0, 1001, 64)
    events = [b for a, b in zip(steps, steps[1:], strict=False) if crossed(250, a, b)]
    assert events == [256, 512, 768] and not crossed(0, 0, 10)


@pytest.mark.parametrize(
    "flags, needed",
    [
        ("--env-id NoSuchEnv-v0", "--env-id NoSuchEnv-v0"),
        ("--env-id CartPole-v7", "--env-id CartPole-v7"),
        ("--env-id nomodule:Env-v0", "--env-id nomodule:Env-v0: No module named 'nomodule'"),
        ("--env-id .envs:Env-v0", "--env-id .envs:Env-v0: must be an id"),
        ("--env-id :CartPole-v1", "--env-id :CartPole-v1: must be an id"),
        ("--env-id tests.envs:TinyImage-v0", "an image (3-D Box, at least 3 x 3 with"),
        ("--env-id tests.envs:NarrowImage-v0", "an image (3-D Box, at least 3 x 3 with"),
        ("--env-id ALE/NoSuchGame-v5", "--env-id ALE/NoSuchGame-v5"),
        ("--env-id tests.envs:DiscreteObs-v0", "observation space Discrete"),
        ("--env-id tests.envs:DictObs-v0", "observation space Dict"),
        ("--env-id tests.envs:CubeImage-v0", "with fewer channels, first or last, than rows and columns)"),
        ("--env-id tests.envs:MiddleImage-v0", "with fewer channels, first or last, than rows and columns)"),
        ("--env-id tests.envs:TupleObs-v0", "observation space Tuple"),
        ("--env-id tests.envs:MatrixObs-v0", "observation space Box"),
        ("--env-id tests.envs:MultiDiscrete-v0", "action space MultiDiscrete"),
        ("--env-id tests.envs:IntBox-v0", "action space Box"),
        ("--env-id tests.envs:Dots-v0 --norm-obs", "--norm-obs"),
    ],
)
def test_what_main_refuses(flags, needed, tmp_path, monkeypatch):
    """Unknown environments and unsupported spaces: `BadInput` of one line, before a run directory exists."""
    monkeypatch.chdir(tmp_path)
    words = flags.split()
    args = ppo_ddp.Args(env_id=words[1], norm_obs="--norm-obs" in words)
    with pytest.raises(BadInput, match=re.escape(needed)) as caught:
        ppo_ddp.main(args)
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())


def test_a_missing_package_is_named_with_its_command(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "minatar.gym", None)
    monkeypatch.setitem(__import__("sys").modules, "minatar", None)
    with pytest.raises(BadInput, match=r"--env-id MinAtar/Breakout-v1.*pip install minatar"):
        ppo_ddp.main(ppo_ddp.Args(env_id="MinAtar/Breakout-v1", run_dir=str(tmp_path / "run")))
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(BadInput, match=r"--track.*pip install wandb"):
        ppo_ddp.main(ppo_ddp.Args(track=True, run_dir=str(tmp_path / "run")))
    assert not (tmp_path / "run" / "metrics.csv").exists()


@pytest.mark.parametrize(
    "flags, message, env",
    [
        ("--no-such-flag 1", "--no-such-flag", {}),
        ("--env-id NoSuchEnv-v0", "--env-id NoSuchEnv-v0", {}),
        ("--track", "--track: No API key configured", {"WANDB_MODE": "online", "WANDB_API_KEY": "", "NETRC": "none"}),
        ("--run-dir /proc/nowhere", "--run-dir /proc/nowhere: cannot be written", {}),
    ],
)
def test_two_ranks_say_it_once(flags, message, env, tmp_path):
    """Under torchrun the message appears exactly once, from rank 0, with no traceback of ours, and nothing is left."""
    home = {"HOME": str(tmp_path), "WANDB_CONFIG_DIR": str(tmp_path / "wandb-config")}
    run = finish(start("ppo_ddp.py", 2, flags, cwd=tmp_path, **env, **home), tmp_path)
    said = " ".join(re.sub(r"[│╭╮╰╯─]", " ", run.err + run.out).split())
    assert run.code == 1
    assert said.count(message) == 1, run.err + run.out
    assert not re.search(rf'File "{ROOT}/(common|\w+_ddp)', said), "a traceback of ours"
    assert not list(tmp_path.glob("runs/*/metrics.csv"))


@pytest.mark.parametrize("script", ["ppo_ddp.py", "ppg_ddp.py", "dqn_ddp.py", "sac_ddp.py"])
def test_environments_that_do_not_divide_are_refused(script, tmp_path):
    refused = run(script, 2, "--num-envs 5", tmp_path / "run", code=2)
    message = "--num-envs 5: must be a multiple of the number of processes (2), such as 4 or 6."
    assert f"error: {message}" in refused.err and "Traceback" not in refused.err and not refused.dir.exists()


def test_a_rank_that_is_alone_with_its_fault_says_it(tmp_path):
    """A package that only one node lacks: that rank's message appears, and nothing waits for the other."""
    env = {"LOCKSTEP_FAULT": "refuse@1@0"}
    run = finish(start("ppo_ddp.py", 2, f"--run-dir {tmp_path / 'run'}", True, **env), tmp_path)
    assert run.code == 1 and run.err.count("rank 1: --env-id refused on purpose") == 1


def test_a_refusal_leaves_a_users_directory_alone(tmp_path, monkeypatch):
    """--track without login into a folder that holds other files, or is empty: refused, and the files as they were."""
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    for name in ("empty", "full"):
        (tmp_path / name).mkdir()
        if name == "full":
            (tmp_path / name / "notes").write_text("mine")
        before = set((tmp_path / name).iterdir()) | {tmp_path / name / "lock"}
        with pytest.raises(BadInput, match="--track"):
            ppo_ddp.main(ppo_ddp.Args(track=True, run_dir=str(tmp_path / name)))
        assert set((tmp_path / name).iterdir()) == before
