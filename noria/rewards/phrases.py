"""Which of several things a text names."""

import re
from collections.abc import Mapping, Sequence

_NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_NUMBER = re.compile(rf"\b(?:(\d{{1,18}})|({'|'.join(_NUMBER_WORDS)}))\b")


def named(text: str, phrases: Mapping[str, Sequence[str]]) -> set[str]:
    """The keys of which `text` contains at least one phrase, as whole words, without regard to case."""
    return {
        key
        for key, options in phrases.items()
        if any(re.search(rf"(?<!\w){re.escape(option)}(?!\w)", text, re.IGNORECASE) for option in options)
    }


def numbers(text: str) -> set[int]:
    """The whole numbers that `text` names, in digits or in words up to ten."""
    return {int(digits) if digits else _NUMBER_WORDS.index(word) for digits, word in _NUMBER.findall(text.lower())}
