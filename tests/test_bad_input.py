"""C6: bad input gets one message that names the flag, exit code 2, and nothing is started. Some cases of faults.py."""

import importlib
import math
import sys

import pytest

import dqn_ddp
import ppg_ddp
import ppo_ddp
import sac_ddp
from common.arguments import flag, parse
from common.processes import BadInput
from common.run import crossed
from runs import ROOT, edited
from tests import faults

SCRIPTS = {"ppo": ppo_ddp, "ppg": ppg_ddp, "dqn": dqn_ddp, "sac": sac_ddp}
REFUSED = [(script, f"--env-id {id}", said) for script, id, said in faults.REFUSED_ENVIRONMENTS]


@pytest.mark.parametrize("script, flags, said", [*faults.REFUSED_FLAGS, *REFUSED])
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


@pytest.mark.parametrize("script, flags, said", faults.FAULTY_ENVIRONMENTS[:6])  # those that `main` itself tells
def test_a_fault_of_an_environment_is_named_where_it_arises(script, flags, said, tmp_path, monkeypatch):
    """Environment and step, before it reaches a network; in training and in evaluation. The user's own error stays."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(faults.Wrong, "made", 0)
    module = importlib.import_module(f"{script}_ddp")
    flags = f"{faults.SHORT[script]} --env-id {flags}".replace(" :", " tests.faults:")
    with pytest.raises((FloatingPointError, KeyError)) as caught:
        module.main(parse(module.Args, flags.split()))
    assert said in f"{caught.typename}: {caught.value}"


CASES = {f"{case.script}: {case.what}": case for case in faults.all_cases()}
SOME = (
    "ppo: --env-id :Exits-v0",
    "ppo: two ranks: --no-such-flag",
    "ppo: two ranks: --num-envs 5",
    "ppo: two ranks: a reward is nan",
    "ppo: edit: a loss that is nan",
    "dqn: two ranks: torchrun killed",
    "ppo: an environment's process killed",
)


@pytest.mark.parametrize("name", SOME)
def test_a_case_is_as_it_must_be(name):
    """A run in a process of its own: what it says, its exit code, and what it leaves."""
    result = faults.tried(CASES[name])
    assert not result.wrong, result.line


def test_every_edit_of_every_case_finds_its_place():
    """And what comes of it is Python. The cases are not run."""
    for case in CASES.values():
        script = ROOT / f"{case.script}_ddp.py"
        compile(edited(script.name, script.read_text(), *(case.edits or [])), f"{script.name}, {case.what}", "exec")


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
    with pytest.raises(BadInput, match="^--env-id MinAtar/Breakout-v1 .*minatar.gym"):
        ppo_ddp.main(ppo_ddp.Args(env_id="MinAtar/Breakout-v1", run_dir=str(tmp_path / "run")))
    for name, package in {"track": "wandb", "tensorboard": "tensorboard", "capture_video": "av"}.items():
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(BadInput, match=f"^{flag(name)} True: must be left off, or first: pip install {package}"):
            ppo_ddp.Args(**{name: True})
