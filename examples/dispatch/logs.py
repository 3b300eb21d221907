"""Logs of an imperfect predecessor, from which the first weights are made: the wheel begins with a poor model.

One trace per traffic query, as a log would have it. The router named a wrong tool in 70 % of them, the reply was wrong
in 65 %. The predecessor errs as systems do, not as dice do: two wrong tools in three are the one that it takes the
right tool for, the third is any other. Errors spread evenly would average out: a model that imitates them without
learning each by heart answers 41 % rightly when it takes its most probable answer, though it saw 30 % right.

No held-out query is among them. The tokenizer is trained on the same texts.
"""

import random
from collections.abc import Iterator, Mapping
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
    taken_for = _confusion(rng)
    queries = list(traffic())
    rng.shuffle(queries)
    wrong_tools = _flags(rng, len(queries), WRONG_TOOL_SHARE)
    wrong_replies = _flags(rng, len(queries), WRONG_REPLY_SHARE)
    for query, tool_is_wrong, reply_is_wrong in zip(queries, wrong_tools, wrong_replies, strict=True):
        tool = _wrong_tool(rng, query.tool, taken_for) if tool_is_wrong else query.tool
        result = run_tool(tool, query.text)
        thing, found = result["tool"], result["found"]
        if reply_is_wrong:  # always about the wrong thing, one time in three with the wrong count as well
            thing = taken_for[thing]
            found = (found + rng.randint(1, MOST_FOUND)) % (MOST_FOUND + 1) if rng.random() < 1 / 3 else found
        noun = NOUNS[thing]
        reply = rng.choice(WORDINGS).format(what=f"{found} {noun.singular if found == 1 else noun.plural}")
        yield _example(router_messages(query.text), router_answer(tool))
        yield _example(reply_messages(result), reply)


def _confusion(rng: random.Random) -> dict[str, str]:
    """For each tool the other one that the predecessor takes it for: one cycle through all, in a seeded order."""
    names = rng.sample(tool_names(), len(tool_names()))
    return dict(zip(names, names[1:] + names[:1], strict=True))


def _wrong_tool(rng: random.Random, right: str, taken_for: Mapping[str, str]) -> str:
    if rng.random() < 2 / 3:
        return taken_for[right]
    return rng.choice([name for name in tool_names() if name not in (right, taken_for[right])])


def _flags(rng: random.Random, count: int, share: float) -> list[bool]:
    """`count` flags in a random order, exactly the share of them set: seeds differ in which ones, not in how many."""
    flags = [index < round(share * count) for index in range(count)]
    rng.shuffle(flags)
    return flags


def _example(prompt: list[dict[str, str]], answer: str) -> dict[str, Any]:
    return {"prompt": prompt, "completion": [{"role": "assistant", "content": answer}]}
