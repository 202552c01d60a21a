"""What rank 0 prints: notes, and a line that shows how far the run has come."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping

SHOWN = {
    "time/SPS": "{:,.0f} SPS",
    "charts/episodic_return": "return {:.1f}",
    "eval/episodic_return": "evaluation {:.1f}",
}


class Console:
    """Prints the progress of a run of `total_timesteps`; on a terminal each line replaces the one before."""

    def __init__(self, total_timesteps: int) -> None:
        self.total_timesteps = total_timesteps
        self.latest: dict[str, float] = {"global_step": 0}  # the newest number of each column
        self.first_loss: tuple[float, float] | None = None  # step and time of the first row that has a loss
        self.printed_step, self.printed_time = 0, 0.0

    def show(self, row: Mapping[str, float]) -> None:
        """Print the progress with a row of metrics: with each evaluation, of other rows at most one in ten seconds."""
        self.latest |= row
        if self.first_loss is None and any(name.startswith("losses/") and name != "losses/alpha" for name in row):
            self.first_loss = row["global_step"], time.perf_counter()
        seconds = 0.2 if sys.stdout.isatty() else 10.0
        if "eval/episodic_return" in row or time.perf_counter() >= self.printed_time + seconds:
            self._print()

    def _print(self) -> None:
        step, total, now = self.latest["global_step"], self.total_timesteps, time.perf_counter()
        parts = [f"{step:,} of {total:,} ({step / max(total, 1):.0%})"]
        parts += [text.format(self.latest[name]) for name, text in SHOWN.items() if name in self.latest]
        if self.first_loss is not None and step > self.first_loss[0]:  # before it learns it is much faster
            left = int((total - step) * (now - self.first_loss[1]) / (step - self.first_loss[0]))
            parts.append(f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02} left")
        line = "  ".join(parts)
        if sys.stdout.isatty():
            self.note(f"\r{line:<100}", end="")
        else:
            self.note(line)
        self.printed_step, self.printed_time = step, now

    def note(self, text: str, end: str = "\n") -> None:
        """Print a line, if the console takes it: a full disk behind it is no reason to stop learning."""
        try:
            print(text, end=end, flush=True)
        except UnicodeError:
            print(ascii(text), end=end, flush=True)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def end(self, complete: bool) -> None:
        """End the terminal's line; of a complete run, show the last row before."""
        if complete and self.latest["global_step"] != self.printed_step:
            self._print()
        if sys.stdout.isatty():
            self.note("")
