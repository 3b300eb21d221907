"""One JSON line and one move of the progress bar per optimizer step."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import TrainerCallback

_NAMES = {
    "loss": "loss",
    "entropy": "entropy",
    "grad_norm": "grad_norm",
    "clip_ratio/region_mean": "clip_ratio",
    "kl": "kl",
    "learning_rate": "learning_rate",
    "mean_token_accuracy": "token_accuracy",
}
"""The trainer's names of what is worth a curve, and ours."""


class StepLog(TrainerCallback):
    """Writes `{"step": …, "loss": …, …, "seconds": …}` per optimizer step, flushed, and shows a bar.

    path     the log; lines of steps after the one resumed from are cut off when training begins
    steps    how many steps this training has
    start    the trainer's step number before its first step
    extra    further values of a step, given its number (1 to steps)
    """

    def __init__(
        self,
        path: Path,
        *,
        steps: int,
        title: str,
        start: int = 0,
        extra: Callable[[int], dict[str, Any]] | None = None,
    ) -> None:
        self.path = path
        self.steps = steps
        self.title = title
        self.start = start
        self.extra = extra
        self.last: dict[str, Any] = {}
        self._began = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the log behind the last step that counts."""
        if not state.is_world_process_zero:
            return
        done = state.global_step - self.start
        kept = [line for line in read_log(self.path) if line["step"] <= done]
        # By rename: whoever follows the log sees that it is another file, not one that became shorter under its feet.
        temporary = self.path.with_name(f".{self.path.name}")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
        temporary.replace(self.path)
        self._file = self.path.open("a")
        self._bar = tqdm(total=self.steps, initial=done, desc=self.title, unit="step", mininterval=1.0)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the step's clock."""
        self._began = time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Write the line of the step that has just ended."""
        if not state.is_world_process_zero or not logs or "loss" not in logs:
            return
        step = state.global_step - self.start
        line: dict[str, Any] = {"step": step}
        line.update({ours: _number(logs[theirs]) for theirs, ours in _NAMES.items() if theirs in logs})
        if self.extra is not None:
            line.update(self.extra(step))
        line["seconds"] = round(time.monotonic() - self._began, 4)
        self.last = line
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self._bar.set_postfix({"loss": f"{line['loss']}"[:6]}, refresh=False)
        self._bar.update(1)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close log and bar."""
        if state.is_world_process_zero:
            self._file.close()
            self._bar.close()


def _number(value: Any) -> float | None:
    """A JSON number; what is not finite has none and becomes null."""
    value = float(value)
    return round(value, 6) if math.isfinite(value) else None


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a step log; a last line that a kill cut off is left out."""
    lines: list[dict[str, Any]] = []
    if not path.exists():
        return lines
    for text in path.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines
