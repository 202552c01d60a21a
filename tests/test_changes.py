"""What users change in a script keeps the promise: the same bytes on two processes as on one, under `--shards 2`."""

import pytest

import fuzz

ENV = '{"shape": [5], "dtype": "float32", "actions": [2], "action_dtype": "float32", "end": 0.05, "cut": 0.05}'
DISCRETE = '{"shape": [5], "dtype": "float32", "actions": [3, 0], "end": 0.05, "cut": 0.05}'
SHARED = {"env-id": "tests.envs:Drawn-v0", "env-kwargs": ENV, "num-envs": "4", "shards": "2", "eval-episodes": "3"}
ACTOR_CRITIC = SHARED | {"num-steps": "32", "num-minibatches": "2", "update-epochs": "2", "total-timesteps": "1280"}
ACTOR_CRITIC |= {"eval-every": "640", "norm-obs": ""}
REPLAY = SHARED | {"learning-starts": "64", "train-frequency": "8", "batch-size": "17", "total-timesteps": "320"}
REPLAY |= {"eval-every": "160", "log-every": "80"}
FLAGS = {"ppo": ACTOR_CRITIC, "ppg": ACTOR_CRITIC | {"n-pi": "2", "update-epochs": "4", "num-aux-minibatches": "4"}}
FLAGS |= {"dqn": REPLAY | {"env-kwargs": DISCRETE}, "sac": REPLAY}

ADAM = "torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=args.adam_eps, fused=True)"
GROUPS = "[{'params': [*agent.critic.parameters()], 'lr': 1e-3}, {'params': [*agent.trunk.parameters()]}"
GROUPS += ", {'params': [*agent.value_trunk.parameters(), *agent.actor.parameters(), agent.log_std]}]"
SECOND = "    value_parameters = [*agent.critic.parameters(), *agent.value_trunk.parameters()]\n"
SECOND += "    policy_parameters = [p for p in agent.parameters() if all(p is not q for q in value_parameters)]\n"
SECOND += f"    optimizer = {ADAM.replace('agent.parameters()', 'policy_parameters')}\n"
SECOND += "    value_optimizer = torch.optim.SGD(value_parameters, lr=1e-2)\n"
SECOND += "    run.register(value_optimizer=value_optimizer)\n"
ZERO = "                optimizer.zero_grad()\n"
STEP = "                optimizer.step()\n"
LOSS = "        loss = pg_loss - args.ent_coef * entropy_loss + args.vf_coef * v_loss\n"
TERM = "        activity = (features**2).mean()\n"
TERM += LOSS.replace("\n", " + 0.01 * activity\n")
ANNEAL = LOSS.replace("args.ent_coef", "self.ent_coef")
MADE = "    loss_fn = PPOLoss(agent, args)\n"
SET = "        run.means.lap()\n"

CHANGES = {
    "AdamW": ("ppo", (ADAM, ADAM.replace("Adam(", "AdamW(").replace("fused=True", "weight_decay=0.1"))),
    "two parameter groups": ("ppg", (ADAM, ADAM.replace("agent.parameters()", GROUPS))),
    "a second optimiser": (
        "ppo",
        (f"    optimizer = {ADAM}\n", SECOND),
        (ZERO, f"{ZERO}                value_optimizer.zero_grad()\n"),
        (STEP, f"{STEP}                value_optimizer.step()\n"),
    ),
    "a scheduled coefficient": (
        "ppo",
        (LOSS, ANNEAL),
        (MADE, f"{MADE}    loss_fn.ent_coef = torch.tensor(args.ent_coef, device=run.device)\n"),
        (SET, f"        loss_fn.ent_coef.fill_(args.ent_coef * fraction)\n{SET}"),
    ),
    "a loss term and its metric": (
        "ppo",
        (LOSS, TERM),
        ('"entropy": entropy_loss}', '"entropy": entropy_loss, "activity": activity}'),
        ('"losses/entropy", ', '"losses/entropy", "losses/activity", '),
    ),
    "a number that changes": (
        "dqn",
        ("        features = self.trunk(obs)\n", "        features = self.trunk(obs) * self.factor\n"),
        (
            "        self.head = self._stream(num_actions)\n",
            "        self.factor = 1.0\n        self.head = self._stream(num_actions)\n",
        ),
        (SET, f"        q_network.factor = 1.0 + global_step / 32\n{SET}"),
    ),
    "LayerNorm": ("sac", ("256), nn.ReLU()\n", "256), nn.LayerNorm(256), nn.ReLU()\n")),
    "a shared trunk": (
        "ppo",
        ("self.value_trunk = None if self.trunk.image else Trunk(obs_space, network)", "self.value_trunk = None"),
    ),
}


@pytest.fixture(scope="module")
def servers():
    servers = fuzz.Servers()
    yield servers
    servers.close()


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_has_the_same_bytes_on_two_processes(change, servers):
    script, *edits = CHANGES[change]
    launches = [fuzz.Launch(1, "1"), fuzz.Launch(2, "1")]
    draw = fuzz.Draw(0, script, FLAGS[script], "", launches, "this", False, tuple(edits))
    assert fuzz.tried(draw, servers) == "same"
