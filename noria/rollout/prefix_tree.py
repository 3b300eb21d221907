"""Which calls of a rollout continue which: causal order, and the tree that shared prompt prefixes form.

A turn whose prompt begins with all tokens of an earlier turn (its prompt and its answer) is that turn's child. An agent
that appends to one conversation gives a path; one that begins anew at each call gives separate roots; one that goes on
from one point in two ways gives a branch.
"""

from collections.abc import Sequence

from noria.contracts.call import Call, CallTokens


def causal_order(calls: Sequence[Call]) -> tuple[Call, ...]:
    """The calls in the order in which they began; the store's id decides between equal times.

    The id is the order of commit, so of two overlapping calls the shorter one has the smaller id although it may have
    begun later; a call that depends on another always begins after that one's answer.
    """
    return tuple(sorted(calls, key=lambda call: (call.request_time, call.id or 0, call.uid)))


def parents(turns: Sequence[CallTokens]) -> tuple[int | None, ...]:
    """For each turn, in causal order, the index of the earlier turn that it continues; None for a root.

    Of several candidates the longest counts, then the latest.
    """
    wholes = [turn.prompt_token_ids + turn.completion_token_ids for turn in turns]
    found: list[int | None] = []
    for index, turn in enumerate(turns):
        best: int | None = None
        for earlier in range(index):
            whole = wholes[earlier]
            if turn.prompt_token_ids[: len(whole)] != whole:
                continue
            if best is None or len(whole) >= len(wholes[best]):
                best = earlier
        found.append(best)
    return tuple(found)


def paths(turns: Sequence[CallTokens]) -> tuple[tuple[int, ...], ...]:
    """The turns cut into paths: each turn stands in exactly one, and each turn of a path continues the one before it.

    Where a turn is continued in several ways, the first child goes on with the path and each other child begins its
    own, so that no sampled token stands in two paths.
    """
    found: list[list[int]] = []
    path_that_ends_at: dict[int, list[int]] = {}
    for index, parent in enumerate(parents(turns)):
        path = path_that_ends_at.pop(parent, None) if parent is not None else None
        if path is None:
            path = []
            found.append(path)
        path.append(index)
        path_that_ends_at[index] = path
    return tuple(tuple(path) for path in found)
