"""`--capture-video`: the first episode of an evaluation, played again from its seed and its actions, as a film.

Played again, so that the evaluation itself is the same with and without, whatever drawing does to a simulator.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from common.environments import Episode
from common.errors import BadInput
from common.simulators import kept_random_state, make_vec

FPS = 30  # at most: of more steps a second, each second, third, ... is drawn
LEAST_SIDE = 256  # pixels of the longer side: smaller pictures are enlarged


def require_encoder() -> None:
    """Raise `BadInput` (--capture-video) where the package that writes films is missing."""
    try:
        import av  # noqa: F401
    except ImportError as error:
        raise BadInput("--capture-video: needs av: pip install av") from error


def film(path: Path, env_id: str, env_kwargs: str, episode: Episode, alive: Callable[[], None]) -> None:
    """Write the episode as H.264 (mp4), whole or not at all; `alive` is called at each picture.

    Raises what a simulator that cannot draw itself raises, `OSError`, and `ValueError` where the episode, played again,
    comes to another return.
    """
    import av

    path.parent.mkdir(exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    try:
        with (
            kept_random_state(),  # an environment may draw from it
            closing(pictures(env_id, env_kwargs, episode)) as drawn,
            av.open(part, "w", format="mp4") as file,
        ):
            stream = file.add_stream("libx264", rate=next(drawn), options={"crf": "18"})
            stream.pix_fmt = "yuv420p"
            for number, picture in enumerate(drawn):
                if number == 0:
                    stream.height, stream.width = picture.shape[:2]
                file.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
                alive()
            file.mux(stream.encode())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def pictures(env_id: str, env_kwargs: str, episode: Episode) -> Iterator[Any]:
    """First how many there are a second, then each, (height, width, 3) uint8: what an action was taken in."""
    if not os.environ.get("DISPLAY"):  # MuJoCo's and pygame's ways to draw without one
        os.environ.setdefault("MUJOCO_GL", "egl")
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    ale, total = env_id.startswith("ALE/"), 0.0
    with closing(make_vec(env_id, 1, episode.seed, json.loads(env_kwargs), draws=True)) as env:
        games = ale or getattr(env, "atari", False)
        rate = 15 if games else env.metadata.get("render_fps") or FPS  # Atari: four of 60 frames a step
        every = math.ceil(rate / FPS)
        yield round(rate / every)
        obs, _ = env.reset(seed=np.array([episode.seed]) if ale else [episode.seed])
        for step, action in enumerate(episode.actions):
            if step % every == 0:
                yield as_film_takes_it(obs[0, 0] if ale else env.render()[0])
            obs, rewards, *_ = env.step(action[None])
            total += float(rewards[0])
    if total != episode.episodic_return:
        raise ValueError(f"played again, the episode came to {total}, not {episode.episodic_return}")


def as_film_takes_it(picture: np.ndarray) -> np.ndarray:
    """A picture (h, w, 3), uint8 or floats from 0 to 1 -> uint8, enlarged where tiny, of even height and width."""
    if np.issubdtype(picture.dtype, np.floating):
        picture = (picture * 255).round().astype(np.uint8)
    times = math.ceil(LEAST_SIDE / max(picture.shape[:2]))
    picture = picture.repeat(times, 0).repeat(times, 1)
    return np.pad(picture, ((0, picture.shape[0] % 2), (0, picture.shape[1] % 2), (0, 0)), "edge")
