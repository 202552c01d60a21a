"""--capture-video: films of the very episodes that count, and runs that are the same with and without."""

import av
import gymnasium as gym
import numpy as np
import pytest

import ppo_ddp
from common.environments import EVALUATION, Environments, Episode, environment_seeds, evaluate
from common.processes import World
from common.video import film
from runs import run


def played(env_id: str, most: int) -> Episode:
    """Episode 0 of seed 1, with random actions, at most so many."""
    envs = Environments(ppo_ddp.Args(env_id=env_id), EVALUATION, [range(1)], World(cuda=False))
    envs.single_action_space.seed(1)
    envs.reset()
    actions, total = [], 0.0
    while len(actions) < most:
        actions.append(np.array(envs.single_action_space.sample()))
        _, rewards, terminations, truncations, _ = envs.step(actions[-1][None])
        total += float(rewards[0])
        if terminations[0] or truncations[0]:
            break
    envs.close()
    return Episode(int(envs.seeds[0]), actions, total)


def frames_of(path) -> tuple[list[np.ndarray], float]:
    with av.open(path) as file:
        rate = float(file.streams.video[0].average_rate)
        return [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)], rate


@pytest.mark.parametrize(
    "env_id, shape, rate",
    [
        ("CartPole-v1", (400, 600, 3), 50),
        ("ALE/Pong-v5", (210, 160, 3), 15),
        ("Hopper-v5", (480, 480, 3), 125),
        ("MinAtar/Breakout-v1", (10, 10, 3), 30),
    ],
)
def test_a_film_shows_the_episode(env_id, shape, rate, tmp_path, monkeypatch):
    """As many pictures as steps, of the right size and colours, from the first state on."""
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.setenv("MUJOCO_GL", "egl")
    episode = played(env_id, 60)
    if env_id.startswith("ALE/"):
        first = None
    else:
        env = gym.make(env_id, render_mode="rgb_array")
        env.reset(seed=episode.seed)
        try:
            first = env.render()
        except Exception as error:  # MuJoCo's, in many ways, where no library draws without a display
            pytest.skip(f"{env_id} cannot be drawn here: {error}")
    film(tmp_path / "videos" / "7.mp4", ppo_ddp.Args(env_id=env_id), episode, lambda: None)
    assert [path.name for path in (tmp_path / "videos").iterdir()] == ["7.mp4"]
    frames, fps = frames_of(tmp_path / "videos" / "7.mp4")
    assert len(frames) == len(episode.actions) > 1 and fps == rate
    assert all(frame.shape == shape for frame in frames)
    if first is None:  # Pong's table and its players
        assert np.abs(frames[0][100, 80].astype(int) - (144, 72, 17)).max() < 12
        assert (np.abs(frames[0].astype(int) - (92, 186, 92)).max(-1) < 40).sum() > 50
    else:
        first = first * 255 if first.dtype != np.uint8 else first
        assert np.abs(frames[0].astype(float) - first).mean() < 6 < np.abs(frames[-1].astype(float) - first).max()


def test_an_episode_that_does_not_repeat_is_no_film(tmp_path):
    """Where, played again, it comes to another return."""
    episode = played("CartPole-v1", 60)._replace(episodic_return=1e6)
    with pytest.raises(ValueError, match="^played again, the episode came to "):
        film(tmp_path / "videos" / "7.mp4", ppo_ddp.Args(), episode, lambda: None)
    assert not (tmp_path / "videos" / "7.mp4").exists()


FLAGS = "--num-envs 4 --num-steps 32 --total-timesteps 512 --eval-every 256 --eval-episodes 4"


def test_numbers_are_the_same_with_and_without(tmp_path):
    """The rows of metrics.csv; and there is a film of each evaluation."""
    calm = run("ppo_ddp.py", 2, FLAGS, tmp_path / "calm")
    filmed = run("ppo_ddp.py", 2, f"{FLAGS} --capture-video", tmp_path / "filmed")
    assert calm.rows == filmed.rows
    assert {path.name for path in (filmed.dir / "videos").iterdir()} == {"0.mp4", "256.mp4", "512.mp4"}


def test_the_episode_that_is_kept_is_the_first():
    args = ppo_ddp.Args(eval_episodes=3, capture_video=True)
    _, episode = evaluate(lambda obs: np.zeros(len(obs), int), args, World(cuda=False))
    assert episode.seed == environment_seeds(1, EVALUATION, [0])[0]
    assert len(episode.actions) == episode.episodic_return


def test_what_cannot_be_drawn_is_said_and_the_run_goes_on(tmp_path):
    done = run("ppo_ddp.py", 1, f"{FLAGS} --env-id envs:Dots-v0 --capture-video", tmp_path / "run")
    assert done.out.count("--capture-video: no film (") == 3 and done.rows[-1]["eval/episodic_return"]
    assert not [*done.dir.glob("videos/[0-9].mp4")]
