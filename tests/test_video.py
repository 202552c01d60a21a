"""--capture-video: films of the very episodes that count, and runs that are the same with and without."""

import av
import gymnasium as gym
import numpy as np
import pytest

import ppo_ddp
from common.environments import EVALUATION, Episode, environment_seeds, evaluate
from common.processes import World
from common.video import film
from runs import run


def frames_of(path) -> tuple[list[np.ndarray], float]:
    with av.open(path) as file:
        rate = float(file.streams.video[0].average_rate)
        return [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)], rate


@pytest.mark.parametrize(
    "env_id, action, shape, rate",
    [
        ("CartPole-v1", 0, (400, 600, 3), 50),
        ("ALE/Pong-v5", 0, (210, 160, 3), 15),
        ("Hopper-v5", [0.5, 0.0, -0.5], (480, 480, 3), 125),
        ("MinAtar/Breakout-v1", 0, (10, 10, 3), 30),
    ],
)
def test_a_film_shows_the_first_episode(env_id, action, shape, rate, tmp_path, monkeypatch):
    """As many pictures as steps, of the right size and colours, from the first state on."""
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.setenv("MUJOCO_GL", "egl")
    options = '{"max_num_frames_per_episode": 240}' if env_id.startswith("ALE/") else "{}"
    args = ppo_ddp.Args(env_id=env_id, env_kwargs=options, eval_episodes=2, capture_video=True)
    _, episode = evaluate(lambda obs: np.array([action] * len(obs)), args, World(cuda=False))
    assert episode.seed == environment_seeds(1, EVALUATION, [0])[0]
    if env_id.startswith("ALE/"):
        first = None
    else:
        env = gym.make(env_id, render_mode="rgb_array")
        env.reset(seed=episode.seed)
        try:
            first = env.render()
        except Exception as error:  # MuJoCo's, in many ways, where no library draws without a display
            pytest.skip(f"{env_id} cannot be drawn here: {error}")
    film(tmp_path / "videos" / "7.mp4", args, episode, lambda: None)
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
    episode = Episode(1, np.zeros(4), [np.array(0)] * 5, 1e6)
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


def test_what_cannot_be_drawn_is_said_and_the_run_goes_on(tmp_path):
    done = run("ppo_ddp.py", 1, f"{FLAGS} --env-id envs:Dots-v0 --capture-video", tmp_path / "run")
    assert done.out.count("--capture-video: no film (") == 3 and done.rows[-1]["eval/episodic_return"]
    assert not [*done.dir.glob("videos/[0-9].mp4")]
