"""Which of its calls a rollout has come to: the first, second, … of a node, or of the same input."""

import heapq
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Hashable

_ROLLOUTS = 8192


class Occurrences:
    """The calls of each rollout, counted by key from 0, as this process has seen them.

    Clients try a call again that failed. Such a call gives its number back, and the next one of the key takes it.
    """

    def __init__(self, rollouts: int = _ROLLOUTS) -> None:
        self._limit = rollouts
        self._rollouts: OrderedDict[str, _Counts] = OrderedDict()

    def take(self, rollout: str, key: Hashable) -> int:
        """The number of this call. Of the rollouts that were quiet the longest, the counts are dropped."""
        counts = self._rollouts.setdefault(rollout, _Counts())
        self._rollouts.move_to_end(rollout)
        while len(self._rollouts) > self._limit:
            self._rollouts.popitem(last=False)
        return counts.take(key)

    def give_back(self, rollout: str, key: Hashable, number: int) -> None:
        """The call with this number was not answered."""
        if rollout in self._rollouts:
            self._rollouts[rollout].give_back(key, number)


class _Counts:
    def __init__(self) -> None:
        self._taken: Counter[Hashable] = Counter()
        self._free: dict[Hashable, list[int]] = defaultdict(list)

    def take(self, key: Hashable) -> int:
        if free := self._free.get(key):
            return heapq.heappop(free)
        self._taken[key] += 1
        return self._taken[key] - 1

    def give_back(self, key: Hashable, number: int) -> None:
        heapq.heappush(self._free[key], number)
