"""What is rewarded: the file that a strategy person edits to say what good means. noria.toml names its functions."""

import json

from examples.dispatch.prompts import named_tool
from examples.dispatch.tool import NOUNS
from noria.rewards.phrases import named, numbers
from noria.rewards.reward import Attempt

_THINGS = {tool: (noun.singular, noun.plural) for tool, noun in NOUNS.items()}


def router(attempt: Attempt) -> float:
    """1 for the tool that the business system wanted, 0.1 for any other answer in the right form, 0 else."""
    answer = named_tool(attempt.output)
    if answer is None:
        return 0.0
    return 1.0 if answer == _expected_tool(attempt) else 0.1


def reply(attempt: Attempt) -> dict[str, float]:
    """Half for the count, two fifths for the thing, a tenth for one whole sentence; 1 only if all are right.

    The right answer stands in the attempt's own input, the tool's result. A reply that names several numbers or
    several things has not told the user which is meant, and gets nothing for it.
    """
    try:
        result = json.loads(attempt.last_user_text)
        tool, found = result["tool"], result["found"]
    except (ValueError, TypeError, KeyError):
        return {"count": 0.0, "thing": 0.0, "sentence": 0.0}
    text = attempt.output.strip()
    counts = numbers(text) or ({0} if named(text, {"nothing": ("no", "nothing", "none")}) else set())
    return {
        "count": 0.5 if counts == {found} else 0.0,
        "thing": 0.4 if named(text, _THINGS) == {tool} else 0.0,
        "sentence": 0.1 if _is_one_sentence(text) else 0.0,
    }


def _expected_tool(attempt: Attempt) -> object:
    feedback = attempt.reference.get("right_function")
    explanation = feedback.get("explanation") if isinstance(feedback, dict) else None
    return explanation.get("expected") if isinstance(explanation, dict) else None


def _is_one_sentence(text: str) -> bool:
    return len(text) > 1 and text[-1] in ".!?" and not any(mark in text[:-1] for mark in ".!?\n")
