"""Logs of an imperfect predecessor, from which the first weights are made: the wheel begins with a poor model.

One trace per traffic query, as a log would have it: the router named a wrong tool in 70 % of them, and the reply got
the number or the thing wrong in 65 %. No held-out query is among them. The tokenizer is trained on the same texts.
"""

import random
from collections.abc import Iterator
from typing import Any

from examples.dispatch.data import tool_names, traffic
from examples.dispatch.prompts import reply_messages, router_answer, router_messages
from examples.dispatch.tool import MOST_FOUND, NOUNS, run_tool

WRONG_TOOL_SHARE = 0.7
WRONG_REPLY_SHARE = 0.65
WORDINGS = ("I found {what}.", "There are {what} for you.", "Your search gave {what}.")


def imperfect_logs(seed: int) -> Iterator[dict[str, Any]]:
    """Examples `{"prompt": messages, "completion": messages}` in a seeded order; the same seed gives the same logs."""
    rng = random.Random(f"dispatch logs {seed}")
    queries = list(traffic())
    rng.shuffle(queries)
    wrong_tools = _flags(rng, len(queries), WRONG_TOOL_SHARE)
    wrong_replies = _flags(rng, len(queries), WRONG_REPLY_SHARE)
    for query, tool_is_wrong, reply_is_wrong in zip(queries, wrong_tools, wrong_replies, strict=True):
        tool = rng.choice([name for name in tool_names() if name != query.tool]) if tool_is_wrong else query.tool
        result = run_tool(tool, query.text)
        yield _example(router_messages(query.text), router_answer(tool))
        yield _example(reply_messages(result), _reply(rng, result["tool"], result["found"], reply_is_wrong))


def _flags(rng: random.Random, count: int, share: float) -> list[bool]:
    """`count` flags in a random order, exactly the share of them set: seeds differ in which ones, not in how many."""
    flags = [index < round(share * count) for index in range(count)]
    rng.shuffle(flags)
    return flags


def _reply(rng: random.Random, tool: str, found: int, wrong: bool) -> str:
    if wrong and rng.random() < 0.5:
        found = rng.choice([number for number in range(MOST_FOUND + 1) if number != found])
    elif wrong:
        tool = rng.choice([name for name in NOUNS if name != tool])
    noun = NOUNS[tool]
    return rng.choice(WORDINGS).format(what=f"{found} {noun.singular if found == 1 else noun.plural}")


def _example(prompt: list[dict[str, str]], answer: str) -> dict[str, Any]:
    return {"prompt": prompt, "completion": [{"role": "assistant", "content": answer}]}
