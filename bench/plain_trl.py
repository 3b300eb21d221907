"""The peer of the learning curve: plain TRL, generating by itself, on the same queries, weights and hyperparameters.

    python bench/plain_trl.py --base .noria/artifacts/base/model --out bench/plain_trl.jsonl --seed 0 --steps 80

`GRPOTrainer` samples 8 answers to each of 8 queries and updates on them at once: it is on-policy at every step, without
an agent, proxy, store or gate in between. Writes {"rollouts", "accuracy", "reward", "seconds", "seed"} as JSON lines,
accuracy over the held-out queries, greedily, before training and after every 512 rollouts.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from datasets import Dataset, disable_progress_bars
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer

from examples.dispatch.data import Query, held_out, traffic
from examples.dispatch.prompts import MAX_TOKENS, ROUTER, named_tool, router_messages
from training.checkpoint import quiet

EVERY_ROLLOUTS = 512


def reward(answer: str, tool: str) -> float:
    """1 for the right tool, 0.1 for another answer in the right form, 0 else: the example's reward."""
    named = named_tool(answer)
    return 0.0 if named is None else 1.0 if named == tool else 0.1


@torch.no_grad()
def accuracy(model: Any, tokenizer: Any, queries: tuple[Query, ...], batch: int = 64) -> float:
    """Share of the queries whose most probable answer names the right tool."""
    was_training = model.training
    model.eval()
    right = 0
    for start in range(0, len(queries), batch):
        part = queries[start : start + batch]
        texts = [
            tokenizer.apply_chat_template(router_messages(query.text), tokenize=False, add_generation_prompt=True)
            for query in part
        ]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False).to(model.device)
        inputs.pop("token_type_ids", None)
        made = model.generate(**inputs, max_new_tokens=MAX_TOKENS[ROUTER], do_sample=False)
        answers = tokenizer.batch_decode(made[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        right += sum(named_tool(answer) == query.tool for answer, query in zip(answers, part, strict=True))
    model.train(was_training)
    return right / len(queries)


class Curve(TrainerCallback):
    """Writes a point before training and after every `EVERY_ROLLOUTS` rollouts."""

    def __init__(self, out: Path, tokenizer: Any, *, batch: int, seed: int) -> None:
        self.file = out.open("w")
        self.tokenizer = tokenizer
        self.batch = batch
        self.seed = seed
        self.reward: float | None = None
        self.training_seconds = 0.0
        self.began = 0.0

    def point(self, model: Any, rollouts: int) -> None:
        """Evaluate, write, and start the clock again: evaluation is not counted as training."""
        self.training_seconds += time.monotonic() - self.began if self.began else 0.0
        line = {
            "rollouts": rollouts,
            "accuracy": round(accuracy(model, self.tokenizer, held_out()), 4),
            "reward": self.reward,
            "seconds": round(self.training_seconds, 1),
            "seed": self.seed,
        }
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        print(json.dumps(line), flush=True)
        self.began = time.monotonic()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """The starting point."""
        self.point(model, 0)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Remember the step's mean reward."""
        self.reward = round(logs["reward"], 4) if logs and "reward" in logs else self.reward

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """A point when enough rollouts have been drawn since the last."""
        if state.global_step * self.batch % EVERY_ROLLOUTS == 0:
            self.point(model, state.global_step * self.batch)


def main() -> None:
    """Train and write the curve."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", required=True, help="model folder of the cold start")
    parser.add_argument("--out", required=True, type=Path, help="JSON lines file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=80, help="updates of one batch each")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--threads", type=int, default=None)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    disable_progress_bars()

    tokenizer = AutoTokenizer.from_pretrained(options.base, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(options.base, dtype=torch.float32)
    rows = [{"prompt": router_messages(query.text), "tool": query.tool} for query in traffic()]

    def right_function(completions: list[Any], tool: list[str], **_: Any) -> list[float]:
        return [reward(answer[0]["content"], name) for answer, name in zip(completions, tool, strict=True)]

    with tempfile.TemporaryDirectory() as work:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=right_function,
            args=GRPOConfig(
                output_dir=work,
                max_steps=options.steps,
                per_device_train_batch_size=options.batch,
                num_generations=options.group,
                learning_rate=options.lr,
                lr_scheduler_type="constant",
                importance_sampling_level="sequence",
                loss_type="grpo",
                epsilon=0.2,
                beta=0.0,
                temperature=1.0,
                max_completion_length=MAX_TOKENS[ROUTER],
                activation_checkpointing=False,
                use_cpu=True,
                bf16=False,
                dataloader_pin_memory=False,
                seed=options.seed,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[Curve(options.out, tokenizer, batch=options.batch, seed=options.seed)],
        )
        quiet(trainer)
        trainer.train()


if __name__ == "__main__":
    main()
