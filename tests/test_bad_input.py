"""C6: bad input gets one message that names the flag, exit code 2, and nothing is started."""

import math
import re
import sys

import pytest
from gymnasium.spaces import Discrete

import dqn_ddp
import ppg_ddp
import ppo_ddp
import sac_ddp
from common.environments import TRAINING, make_envs
from common.errors import BadInput, flag
from common.run.arguments import PACKAGES_OF_FLAGS, parse
from common.run.loop import crossed
from runs import ROOT, finish, run, start
from tests import faults

SCRIPTS = {"ppo": ppo_ddp, "ppg": ppg_ddp, "dqn": dqn_ddp, "sac": sac_ddp}
REFUSED = [
    *faults.REFUSED_FLAGS,
    *((script, f"--env-id {id}", said) for script, id, said in faults.REFUSED_ENVIRONMENTS),
]


@pytest.mark.parametrize("script, flags, said", REFUSED)
def test_what_is_refused(script, flags, said, tmp_path, monkeypatch, capfd):
    """In one line, before any file of a run exists. What tyro finds it says itself, in a box."""
    monkeypatch.chdir(tmp_path)
    module = SCRIPTS[script]
    try:
        module.main(parse(module.Args, flags.replace(" :", " tests.faults:").split()))
    except BadInput as error:
        assert said in str(error) and "\n" not in str(error)
    except SystemExit as error:
        assert error.code == 2 and said in capfd.readouterr().err
    else:
        raise AssertionError("it ran")
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "lock"]


@pytest.mark.parametrize(
    "env_id, options, said",
    [
        ("ALE/Pong-v5", '{"game": "breakout"}', "game is not to be set here"),
        ("CartPole-v1", '{"gravity": 1}', "unexpected keyword argument 'gravity'"),
    ],
)
def test_options_that_a_simulator_does_not_take_are_refused(env_id, options, said):
    with pytest.raises(BadInput, match=f"^--env-kwargs .*{said}"):
        make_envs(env_id, 1, TRAINING, range(2), (Discrete,), env_kwargs=options)


NAN = math.nan
NUMBERS = {  # what a field may not be
    0: "num_envs num_steps num_minibatches update_epochs total_timesteps buffer_size batch_size train_frequency n_step"
    " learning_rate adam_eps clip_coef timeout max_grad_norm target_kl eval_episodes target_network_frequency tau"
    " policy_frequency policy_lr q_lr alpha",
    -1: "seed num_threads eval_every check_sync_every ent_coef vf_coef learning_starts log_every aux_epochs n_pi"
    " num_aux_minibatches aux_learning_rate beta_clone checkpoint_every",
    NAN: "learning_rate gamma gae_lambda clip_coef ent_coef vf_coef timeout max_grad_norm target_kl stop_at_return"
    " adam_eps tau start_e end_e exploration_fraction per_alpha per_beta policy_lr q_lr alpha",
    1.5: "gamma gae_lambda per_beta",
    math.inf: "learning_rate",
    2**40: "seed num_threads timeout",
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_number_that_cannot_work_is_refused_by_its_flag(script):
    args_type = SCRIPTS[script].Args
    for value, names in NUMBERS.items():
        for name in set(names.split()) & {*args_type.__dataclass_fields__}:
            with pytest.raises(BadInput, match="--" + name.replace("_", "-")):
                args_type(**{name: value})


@pytest.mark.parametrize("script", [ppo_ddp, ppg_ddp])
def test_advantages_of_one_sample_are_not_normalised(script):
    """Less its own mean each would be zero, and nothing would move the policy."""
    small = {"num_envs": 1, "num_steps": 16, "num_minibatches": 16, "total_timesteps": 1000}
    with pytest.raises(BadInput, match="--norm-adv batch"):
        script.Args(**small | {"num_steps": 1, "num_minibatches": 1}, norm_adv="batch")
    for settings in ({"norm_adv": "none"}, {"norm_adv": "batch"}, {"num_minibatches": 8}):
        script.Args(**small | settings)


def test_ppg_refuses_a_run_without_an_auxiliary_phase():
    with pytest.raises(BadInput, match=r"--total-timesteps 8191.*8192"):
        ppg_ddp.Args(total_timesteps=8191)
    ppg_ddp.Args(total_timesteps=8192)
    ppg_ddp.Args(total_timesteps=8191, aux_epochs=0)


def test_periods_happen_at_or_past_each_multiple():
    steps = range(0, 1001, 64)
    events = [b for a, b in zip(steps, steps[1:], strict=False) if crossed(250, a, b)]
    assert events == [256, 512, 768] and not crossed(0, 0, 10)


def test_a_missing_package_is_named_with_its_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "minatar.gym", None)
    monkeypatch.setitem(sys.modules, "minatar", None)
    with pytest.raises(BadInput, match=r"--env-id MinAtar/Breakout-v1.*pip install minatar"):
        ppo_ddp.main(ppo_ddp.Args(env_id="MinAtar/Breakout-v1", run_dir=str(tmp_path / "run")))
    for name, package in PACKAGES_OF_FLAGS.items():
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(BadInput, match=f"^{flag(name)}: needs {package}: pip install {package}$"):
            ppo_ddp.Args(**{name: True})


@pytest.mark.parametrize(
    "flags, message, env",
    [
        ("--no-such-flag 1", "--no-such-flag", {}),
        ("--track", "--track: No API key configured", {"WANDB_MODE": "online", "WANDB_API_KEY": "", "NETRC": "none"}),
    ],
)
def test_two_ranks_print_one_message(flags, message, env, tmp_path):
    """torchrun's own report aside, one line or box and no traceback of ours."""
    run = finish(start("dqn_ddp.py", 2, flags, cwd=tmp_path, **env), tmp_path)
    said = " ".join(re.sub("[│╭╮╰╯─]", " ", run.err + run.out).split())
    assert run.code == 1
    assert said.count(message) == 1, run.err + run.out
    assert not re.search(rf'File "{ROOT}/(common|\w+_ddp)', said), "a traceback of ours"
    assert not list(tmp_path.glob("runs/*/metrics.csv"))


@pytest.mark.parametrize("script", ["ppo", "dqn"])
def test_environments_that_do_not_divide_are_refused(script, tmp_path):
    refused = run(f"{script}_ddp.py", 2, "--num-envs 5", tmp_path / "run", code=2)
    message = "--num-envs 5: must be a multiple of the number of processes (2), such as 4 or 6."
    assert f"error: {message}" in refused.err and "Traceback" not in refused.err and not refused.dir.exists()
