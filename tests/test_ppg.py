"""PPG is PPG: what its phases move and what they leave."""

import numpy as np
import pytest
import torch

import ppg_ddp
import ppo_ddp
from runs import flat, run

SMALL = {"num_envs": 4, "num_steps": 32, "n_pi": 4, "aux_epochs": 4, "num_aux_minibatches": 4, "eval_every": 0}


@pytest.fixture
def record(monkeypatch, tmp_path):
    """Run PPG in this process -> [(kind, copies of all parameters, statistics)] of its loss calls."""

    def train(**settings):
        calls, losses = [], {}
        for kind, cls in (("policy", ppg_ddp.PPOLoss), ("aux", ppg_ddp.AuxLoss)):

            def forward(self, *batch, kind=kind, original=cls.forward):
                losses[kind] = self
                aux = dict(losses["aux"].named_parameters()) if "aux" in losses else {}
                loss, stats = original(self, *batch)
                copies = {name: p.detach().clone() for name, p in aux.items()}
                calls.append((kind, copies, [x.clone() for x in stats.values()]))
                return loss, stats

            monkeypatch.setattr(cls, "forward", forward)
        path = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        ppg_ddp.main(ppg_ddp.Args(**SMALL | settings, run_dir=str(path)))
        monkeypatch.undo()
        return calls

    return train


def test_policy_phases_leave_the_auxiliary_head_alone(record):
    """From the first auxiliary update on, the head is bit for bit the same in each policy phase; the rest moves."""
    calls = record(total_timesteps=3 * 4 * 128)
    kinds = [kind for kind, _, _ in calls]
    assert kinds.count("aux") == 3 * 16 and kinds.count("policy") == 3 * 4 * 4
    stays, moves = 0, 0
    for (kind, before, _), (next_kind, after, _) in zip(calls, calls[1:], strict=False):
        if kind == next_kind == "policy" and before:
            head = [name for name in before if name.startswith("aux_critic")]
            rest = [name for name in before if not name.startswith("aux_critic")]
            assert len(head) == 2 and all(before[name].equal(after[name]) for name in head)
            stays += all(before[name].equal(after[name]) for name in rest)
            moves += 1
    assert moves >= 30 and stays == 0


def test_distillation_holds_the_policy(record):
    """KL is 0 at a phase's first minibatch, then grows, more so without its weight; the auxiliary loss falls."""
    grown = {}
    for beta in (1.0, 0.0):
        calls = record(total_timesteps=3 * 4 * 128, beta_clone=beta, anneal_lr=False, aux_learning_rate=2e-3)
        aux = np.array([parts for kind, _, parts in calls if kind == "aux"]).reshape(3, 4, 4, 3)  # phase, epoch, mb
        kl = aux[..., 1]
        assert np.abs(kl[:, 0, 0]).max() < 1e-7 and kl[:, -1].min() > 1e-8
        grown[beta] = kl[:, -1].mean()
        assert (aux[:, -1, :, 0].mean(1) < aux[:, 0, :, 0].mean(1)).all(), "the auxiliary value loss did not fall"
    assert grown[0.0] > 2 * grown[1.0]


def test_the_gradient_of_an_auxiliary_minibatch_by_hand(float64):
    """Autograd's gradient of the heads and of the last policy layer equals one written out for a softmax policy."""
    torch.manual_seed(0)
    space = ppg_ddp.gym.spaces
    agent = ppg_ddp.Agent(space.Box(-1, 1, (3,), np.float32), space.Discrete(3))
    obs, returns, old_pi = torch.randn(8, 3), torch.randn(8), torch.randn(8, 3)
    loss_fn = ppg_ddp.AuxLoss(agent, ppg_ddp.Args(beta_clone=0.7))
    head, actor, critic = loss_fn.aux_critic, agent.actor[-1], agent.critic[-1]
    loss_fn(obs, returns, old_pi)[0].backward()
    with torch.no_grad():
        h = agent.actor[:-1](obs)
        aux_error = (h @ head.weight.T + head.bias).squeeze(-1) - returns  # d 0.5 e^2 / d value = e
        p = (h @ actor.weight.T + actor.bias).softmax(-1)
        logit_gradient = 0.7 * (p - old_pi.softmax(-1)) / 8  # d KL(old || p) / d logits = p - old
        feature_gradient = logit_gradient @ actor.weight + aux_error[:, None] / 8 * head.weight
        value_error = agent.critic(obs).squeeze(-1) - returns
        expected = {
            "aux head": (head.weight.grad, aux_error[None] @ h / 8),
            "actor": (actor.weight.grad, logit_gradient.T @ h),
            "critic": (critic.weight.grad, value_error[None] @ agent.critic[:-1](obs) / 8),
            "policy": (agent.actor[2].weight.grad, (feature_gradient * (1 - h**2)).T @ agent.actor[:2](obs)),
        }
    for name, (gradient, by_hand) in expected.items():
        torch.testing.assert_close(gradient, by_hand, rtol=1e-10, atol=1e-12, msg=name)


def test_both_phases_share_one_schedule(monkeypatch, tmp_path):
    """Each optimiser's rate falls linearly over the whole run, and never starts again."""
    rates, step = {}, torch.optim.Adam.step

    def noted(self, *args, **kwargs):
        rates.setdefault(len(self.param_groups[0]["params"]), []).append(self.param_groups[0]["lr"])
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.Adam, "step", noted)
    settings = {"total_timesteps": 12 * 128, "learning_rate": 1e-3, "aux_learning_rate": 2e-3}
    ppg_ddp.main(ppg_ddp.Args(**SMALL | settings, run_dir=str(tmp_path / "run")))
    policy, aux = (rates[number] for number in sorted(rates))  # the auxiliary one moves the head besides
    np.testing.assert_allclose(policy, np.repeat(1e-3 * (1 - np.arange(12) / 12), 4))
    np.testing.assert_allclose(aux, np.repeat(2e-3 * (1 - np.array([3, 7, 11]) / 12), 16))


@pytest.mark.parametrize("world_size, env", [(1, "Pendulum-v1 --norm-obs"), (2, "tests.envs:ShortCartPole-v0")])
def test_without_auxiliary_phases_it_is_ppo(world_size, env, tmp_path):
    """`--aux-epochs 0` with PPO's flags: metrics and parameters bit for bit, also where all episodes are truncated."""
    flags = f"--env-id {env} --total-timesteps 1536 --save-model --eval-every 1000"
    ppo = ppo_ddp.Args()
    for name in ("learning_rate", "update_epochs", "adam_eps", "norm_adv", "gamma"):
        flags += f" --{name.replace('_', '-')} {getattr(ppo, name)}"
    a = run("ppo_ddp.py", world_size, flags, tmp_path / "ppo", dtype="float32")
    flags += " --aux-epochs 0 --clip-vloss"
    b = run("ppg_ddp.py", world_size, flags, tmp_path / "ppg", dtype="float32")
    shared = a.rows[0].keys()
    assert a.rows == [{name: row[name] for name in shared} for row in b.rows]
    assert not any(row[name] for row in b.rows for name in row.keys() - shared)
    tensors = dict(flat(b.model))
    assert all(x.equal(tensors[name]) for name, x in flat(a.model)) and a.model["agent"]
