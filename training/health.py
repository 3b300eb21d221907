"""Whether what a round made can be built upon: finite, and not collapsed onto one answer."""

import math
from typing import Any

import torch
from transformers import TrainerCallback


class HealthWatch(TrainerCallback):
    """Stops at a loss that is not finite, on every rank at the same step, and remembers how the round ended.

    start   the trainer's step number before the round's first step
    """

    def __init__(self, *, start: int = 0) -> None:
        self.start = start
        self.broken: str | None = None
        self.entropy: float | None = None

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        """Look at the step that has just ended."""
        if not logs or "loss" not in logs:
            return control
        self.entropy = logs.get("entropy", self.entropy)
        for name in ("loss", "grad_norm"):
            value = float(logs.get(name) or 0.0)
            if self.broken is None and not math.isfinite(value):
                self.broken = (
                    f"{name} was {value} at step {state.global_step - self.start}; lower training.learning_rate"
                )
                control.should_training_stop = True
                control.should_save = False
        return control

    def verdict(self, weights: dict[str, torch.Tensor], min_entropy: float) -> str | None:
        """Why the round's weights must not be built upon, None if they may.

        weights       the consolidated weights
        min_entropy   least mean entropy per trained token, in nats, of the last step
        """
        if self.broken is not None:
            return self.broken
        for name, weight in weights.items():
            if not bool(torch.isfinite(weight).all()):
                return f"the weights {name} are not finite; lower training.learning_rate"
        if self.entropy is not None and self.entropy < min_entropy:
            return (
                f"the policy collapsed: its mean entropy per token was {self.entropy:.3g} nats in the last step, "
                f"below {min_entropy:g}"
            )
        return None
