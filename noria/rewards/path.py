"""How alike two paths through an agent's tools are."""

from collections.abc import Hashable, Sequence


def path_similarity(taken: Sequence[Hashable], expected: Sequence[Hashable]) -> float:
    """Share of steps that both paths have in the same order, in [0, 1].

    `2 * LCS / (len(taken) + len(expected))`, LCS the length of the longest common subsequence: steps left out and steps
    too many cost alike, and a step at the wrong place counts for nothing. 1 for equal paths, two empty ones included.
    """
    if not taken and not expected:
        return 1.0
    return 2 * _longest_common_subsequence(taken, expected) / (len(taken) + len(expected))


def _longest_common_subsequence(a: Sequence[Hashable], b: Sequence[Hashable]) -> int:
    best = [0] * (len(b) + 1)  # best[j]: length for the steps of `a` seen so far and b[:j]
    for step in a:
        diagonal = 0
        for j, other in enumerate(b, start=1):
            diagonal, best[j] = best[j], diagonal + 1 if step == other else max(best[j], best[j - 1])
    return best[-1]
