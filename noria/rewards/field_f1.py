"""F1 over the fields of a structured answer, each with the values that are accepted for it.

Values compare as in the AST checker of the Berkeley Function Calling Leaderboard (Patil et al. 2025): strings without
regard to case, spaces and the punctuation `,./-_*^`, with `'` as `"`; an accepted `""` makes a field optional; an
accepted mapping has accepted values of its own for each of its keys; a list compares element by element.
"""

import re
from collections.abc import Mapping, Sequence

_IGNORED = re.compile(r"[ ,./\-_*^]")


def field_f1(answer: Mapping[str, object], accepted: Mapping[str, Sequence[object]]) -> float:
    """Harmonic mean of precision (given fields that are right) and recall (needed fields that are right), in [0, 1].

    answer    field -> value as the model gave it
    accepted  field -> the values that are right for it, `""` among them if it may be left out

    An optional field counts only if it was given. Nothing needed and nothing given is 1.
    """
    right = sum(1 for name, value in answer.items() if name in accepted and is_accepted(value, accepted[name]))
    counted = sum(1 for name, values in accepted.items() if name in answer or not _optional(values))
    if not answer and not counted:
        return 1.0
    return 2 * right / (len(answer) + counted)


def is_accepted(value: object, accepted: Sequence[object]) -> bool:
    """Whether `value` equals one of the accepted values; `""` itself is accepted where it stands among them."""
    return any(_equal(value, candidate) for candidate in accepted)


def _optional(accepted: Sequence[object]) -> bool:
    return any(isinstance(candidate, str) and candidate == "" for candidate in accepted)


def _equal(value: object, accepted: object) -> bool:
    if isinstance(value, str) and isinstance(accepted, str):
        return value == accepted or (bool(accepted) and _standard(value) == _standard(accepted))
    if isinstance(value, bool) or isinstance(accepted, bool):
        return value is accepted  # True is no 1
    if isinstance(value, Mapping) and isinstance(accepted, Mapping):
        return value.keys() <= accepted.keys() and all(
            is_accepted(value[key], _options(values)) if key in value else _optional(_options(values))
            for key, values in accepted.items()
        )
    if isinstance(value, list | tuple) and isinstance(accepted, list | tuple):
        return len(value) == len(accepted) and all(map(_equal, value, accepted))
    return value == accepted


def _options(values: object) -> Sequence[object]:
    return values if isinstance(values, list | tuple) else (values,)


def _standard(text: str) -> str:
    return _IGNORED.sub("", text).lower().replace("'", '"')
