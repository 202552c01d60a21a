"""`--capture-video`: an evaluation's first episode, played again from its seed and its actions, as a film.

Played again, so that drawing, whatever it does to a simulator, does not change the evaluation.
"""

import os
from contextlib import closing
from pathlib import Path

import numpy as np

from common.arguments import RunArgs
from common.environments import EVALUATION, Environments, Episode
from common.processes import World


def film(path: Path, args: RunArgs, world: World, episode: Episode) -> None:
    """Write the episode as H.264 (mp4). Raises `ValueError` for another return than before."""
    import av

    if not os.environ.get("DISPLAY"):  # MuJoCo's and pygame's ways to draw without one
        os.environ.setdefault("MUJOCO_GL", "egl")
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    path.parent.mkdir(exist_ok=True)
    part = path.with_suffix(".part.mp4")
    total = 0.0
    with closing(Environments(args, EVALUATION, [range(1)], world, draws=True)) as envs, av.open(part, "w") as file:
        rate = 15 if envs.atari else envs.envs.metadata.get("render_fps") or 30  # Atari: four of 60 frames a step
        stream = file.add_stream("libx264", rate=round(rate), options={"crf": "18"})
        stream.pix_fmt = "yuv420p"
        obs = envs.reset()
        for action in episode.actions:
            picture = obs[0, 0] if envs.family == "ALE" else envs.envs.render()[0]  # (height, width, 3)
            if picture.dtype != np.uint8:  # MinAtar's, from 0 to 1
                picture = (picture * 255).round().astype(np.uint8)
            picture = picture[: len(picture) // 2 * 2, : picture.shape[1] // 2 * 2]  # H.264 takes even sides
            if not stream.codec_context.is_open:
                stream.height, stream.width, _ = picture.shape
            file.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")))
            obs, rewards, *_ = envs.step(action[None])
            total += float(rewards[0])
        file.mux(stream.encode())
    if total != episode.episodic_return:
        raise ValueError(f"played again, the episode came to {total}, not {episode.episodic_return}")
    part.replace(path)
