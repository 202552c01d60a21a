"""Numbers against their formulas: rows, rewards that are learned from, what each flag changes."""

import numpy as np
import pytest
import torch

import dqn_ddp
import ppg_ddp
import ppo_ddp
import sac_ddp
from common import run as run_module
from common.acting import Policy
from common.arguments import RunArgs
from common.environments import Environments
from common.normalization import explained_variance
from common.processes import World
from runs import flat, train
from test_shards import run_of


def test_a_row_of_dqn_by_hand(tmp_path, watch):
    """Means over all updates since the last row, epsilon, and the learning rate."""
    calls = watch(dqn_ddp.TDLoss, "forward")
    sizes = {"num_envs": 2, "train_frequency": 2, "learning_starts": 40, "total_timesteps": 200, "batch_size": 8}
    rates = {"learning_rate": 0.01, "start_e": 1.0, "end_e": 0.1, "exploration_fraction": 0.5}
    run = train(dqn_ddp, tmp_path, **sizes, **rates, log_every=80)
    losses = [stats["td_loss"].item() for _, (_, stats) in calls]
    assert run.column("global_step") == [80, 160, 200] and len(losses) == 80
    means = [np.mean(part) for part in np.split(np.array(losses), [20, 60])]
    assert run.column("losses/td_loss") == pytest.approx(means, rel=1e-6)
    # of the last vector step of each row, which began 2 transitions before
    assert run.column("charts/learning_rate") == pytest.approx([0.01 * (1 - step / 200) for step in (78, 158, 198)])
    assert run.column("charts/epsilon") == pytest.approx([1.0 - 0.9 * 0.78, 0.1, 0.1])


def test_a_row_has_the_times_of_the_slowest_process(monkeypatch):
    new = run_of(1)
    new.world.num_shards = 2  # one of them on another rank
    new.envs.pop_sums = lambda: np.zeros((1, 3))
    new.seconds["time/rollout"] = 5.0
    rows = []
    monkeypatch.setattr(new.world, "gather", lambda values: np.array([values, [0.0, 0.0, 0.0, 7.0]]))
    new.logger.log = lambda *row: rows.append(row)
    new.log(100, {"charts/learning_rate": 0.5})
    assert rows == [(100, {"charts/episodes": 0, "charts/learning_rate": 0.5, "time/rollout": 7.0})]


@pytest.mark.parametrize("num_shards", [1, 2])
def test_explained_variance_by_hand(num_shards):
    """None where returns are equal, but for the rounding of float32."""
    world = World(False, num_shards)
    advantages, values = np.random.default_rng(0).normal(size=(2, 50, 4))
    column = explained_variance(advantages, values, world)
    expected = 1 - advantages.var() / (advantages + values).var()
    assert column == {"losses/explained_variance": pytest.approx(expected, rel=1e-9)}
    for equal in (100.0, 0.0):
        values = (3 * values).astype(np.float32)
        advantages = (equal - values * (1 + 1e-7)).astype(np.float32)  # the last bit, as sums may change it
        assert len(np.unique(advantages.astype(float) + values)) > 1
        assert explained_variance(advantages, values, world) == {}


@pytest.mark.parametrize("atari", [True, False])
@pytest.mark.parametrize("module", [ppo_ddp, dqn_ddp])
def test_of_atari_the_sign_of_a_reward_is_learned_from(module, atari, tmp_path, monkeypatch):
    learned = []

    def noted(*args):
        learned.extend(np.ravel(args[2 if module is dqn_ddp else 0]))
        raise InterruptedError

    monkeypatch.setattr(Environments, "atari", property(lambda _: atari, lambda *_: None), raising=False)
    owner, name = (module.ReplayBuffer, "add") if module is dqn_ddp else (module, "discounted_returns")
    monkeypatch.setattr(owner, name, noted)
    with pytest.raises(InterruptedError):
        train(module, tmp_path / "run", env_id="tests.envs:NoisyCartPole-v0")
    assert len(learned) > 2 and (set(learned) == {-1.0, 1.0}) == atari


def test_what_ppo_learns_from(tmp_path, monkeypatch):
    """Actions as sampled; moments of observations, and of rewards' sums since the start."""
    seen = {name: [] for name in ("sampled", "actions", "obs", "rewards", "sums")}

    def note(owner, name, given):
        original = getattr(owner, name)

        def noted(*inputs):
            result = original(*inputs)
            for kind, x in given(result, *inputs).items():
                seen[kind].append(np.array(x))
            return result

        monkeypatch.setattr(owner, name, noted)

    note(ppo_ddp.Agent, "sample", lambda result, *_: {"sampled": result})
    note(run_module.Run, "by_shard", lambda _, self, function, out, actions: {"actions": actions})
    note(ppo_ddp, "discounted_returns", lambda _, rewards, *more: {"rewards": rewards})
    note(ppo_ddp.RunningMoments, "update", lambda _, self, x, world: {"obs" if self.shape else "sums": x})
    sizes = {"num_envs": 2, "num_steps": 120, "total_timesteps": 480, "num_minibatches": 4, "norm_obs": True}
    train(ppo_ddp, tmp_path, **sizes, env_id="Pendulum-v1", gamma=0.5)
    actions, rewards, sums, obs = (np.concatenate(seen[x]) for x in ("actions", "rewards", "sums", "obs"))
    assert np.array_equal(actions, seen["sampled"]) and np.abs(actions).max() > 2.0  # what Pendulum takes at most
    assert obs.shape == (240, 2, 3) and np.abs(obs).max() > 2.0  # speeds, as they are
    expected = np.zeros_like(rewards)
    for step, reward in enumerate(rewards):  # episodes end after 200 steps
        expected[step] = reward + (0.5 * expected[step - 1] if step % 200 else 0.0)
    np.testing.assert_allclose(sums, expected, rtol=1e-12)


def test_what_advantages_are_normalised_over(tmp_path, watch):
    """All of an epoch with `batch`, each minibatch with `minibatch`, neither with `none`. Rows stay together."""
    calls = watch(ppo_ddp.PPOLoss, "forward")
    sizes = {"num_steps": 32, "total_timesteps": 256, "update_epochs": 2, "norm_obs": True, "learning_rate": 0.01}
    for norm_adv, batch_is, minibatch_is in (("batch", True, False), ("minibatch", True, True), ("none", False, False)):
        calls.clear()
        train(ppo_ddp, tmp_path / norm_adv, **sizes, norm_adv=norm_adv)
        assert len(calls) == 16 and abs(calls[8][1][1]["approx_kl"]) < 1e-6
        batches = [mb for (_, mb), _ in calls[8:]]  # of the second update, whose observations are normalised
        seen = [mb.advantages for mb in batches[:4]]
        rows = [torch.column_stack([mb.obs, mb.values, mb.advantages, mb.returns]) for mb in batches]
        one, other = ({*map(tuple, torch.cat(part).tolist())} for part in (rows[:4], rows[4:]))
        assert (one == other) != minibatch_is
        assert norm_adv != "none" or all(mb.returns.allclose(mb.values + mb.advantages) for mb in batches)
        for x, normalised in ((torch.cat(seen), batch_is), (seen[0], minibatch_is), (seen[3], minibatch_is)):
            assert (abs(x.mean()) < 1e-5 and abs(x.std() - 1) < 0.02) == normalised, norm_adv


def test_the_share_of_random_actions_is_epsilon(tmp_path, monkeypatch, watch):
    calls = watch(dqn_ddp.ReplayBuffer, "add")
    monkeypatch.setattr(Policy, "__call__", lambda self, obs: [np.tile([0.0, 1.0], (len(obs), 1))])
    train(dqn_ddp, tmp_path, total_timesteps=4000, learning_starts=3900, start_e=0.5, end_e=0.5)
    taken = np.concatenate([actions for (_, actions, *_), _ in calls])
    assert len(taken) == 4000 and np.mean(np.equal(taken, 0)) == pytest.approx(0.25, abs=0.03)
    assert (taken[:256] != taken[256:512]).any()  # new noise each time


@pytest.fixture
def rates(monkeypatch):
    """By how many parameters they move, the learning rate of each step of optimisers."""
    found, step = {}, torch.optim.Adam.step

    def noted(self, *args, **kwargs):
        for group in self.param_groups:
            found.setdefault(len(group["params"]), []).append(group["lr"])
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.Adam, "step", noted)
    return found


def test_each_optimiser_of_sac_has_its_rate_and_its_steps(rates, tmp_path, watch):
    """First actions are of the whole range, later ones have normal noise; a truncated step is no end."""
    samples, added = (watch(sac_ddp.ReplayBuffer, name) for name in ("sample", "add"))
    acted = watch(run_module.Run, "by_shard")
    sizes = {"num_envs": 2, "total_timesteps": 80, "learning_starts": 40, "train_frequency": 2, "batch_size": 8}
    train(sac_ddp, tmp_path, **sizes, policy_lr=1e-3, q_lr=2e-3, env_id="tests.envs:NoisyPendulum-v0")
    assert rates == {12: [2e-3] * 20, 6: [1e-3] * 20, 1: [2e-3] * 20}  # critics, actor, temperature
    first = np.concatenate([actions for (_, actions, *_), _ in added[:20]])
    assert first.min() < -0.7 and first.max() > 0.7
    assert np.std([noise[0].tolist() for (_, _, _, noise), _ in acted]) == pytest.approx(1.0, abs=0.3)
    assert all((sample.batch.discounts == 0.99).all() for _, sample in samples)


def test_both_phases_of_ppg_share_one_schedule(rates, tmp_path):
    """Each optimiser's rate falls linearly over the whole run, and never starts again."""
    sizes = {"num_steps": 32, "n_pi": 4, "aux_epochs": 4, "num_aux_minibatches": 4, "total_timesteps": 12 * 128}
    train(ppg_ddp, tmp_path, **sizes, learning_rate=1e-3, aux_learning_rate=2e-3)
    assert rates.keys() == {12, 14}  # the auxiliary one moves the head besides
    np.testing.assert_allclose(rates[12], np.repeat(1e-3 * (1 - np.arange(12) / 12), 4))
    np.testing.assert_allclose(rates[14], np.repeat(2e-3 * (1 - np.array([3, 7, 11]) / 12), 16))


OTHERS = {"env_id", "num_envs", "total_timesteps", "log_every", "life_loss", "network", "scale_pixels"}
ROLLOUTS = {"num_steps": 16, "total_timesteps": 256, "update_epochs": 3, "learning_rate": 1e-2}
REPLAY = {"learning_starts": 40, "total_timesteps": 160, "batch_size": 8, "train_frequency": 4, "buffer_size": 80}
REPLAY |= {"prioritized": True, "target_network_frequency": 16}
SETTINGS = {
    ppo_ddp: ROLLOUTS,
    ppg_ddp: ROLLOUTS | {"n_pi": 2, "num_aux_minibatches": 4},
    dqn_ddp: REPLAY | {"max_grad_norm": 10.0, "learning_rate": 1e-2, "end_e": 0.5},
    sac_ddp: REPLAY | {"env_id": "Pendulum-v1", "num_envs": 2},
}


def another(name: str, value) -> bool | int | float | str:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return 2 * value
    return {"loss": "huber", "norm_adv": "none", "clip_coef": 0.001}.get(name, 0.02)


@pytest.mark.parametrize("module", SETTINGS)
def test_every_flag_of_an_algorithm_changes_what_is_learned(module, tmp_path):
    """A flag that is not wired in would leave the same parameters."""
    settings = {"env_id": "tests.envs:NoisyCartPole-v0", "save_model": True} | SETTINGS[module]

    def learned(name: str, **changes) -> dict[str, torch.Tensor]:
        state = dict(flat(train(module, tmp_path / name, **settings | changes).model))
        return {name: x for name, x in state.items() if "moments" not in name and "log_alpha" not in name}

    before, defaults = learned("none"), module.Args(**settings)
    for name in module.Args.__dataclass_fields__.keys() - RunArgs.__dataclass_fields__.keys() - OTHERS:
        after = learned(name, **{name: another(name, getattr(defaults, name))})
        assert not all(x.equal(after[key]) for key, x in before.items() if key in after), name
