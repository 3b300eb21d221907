"""When a run of failed rollouts means that going on is pointless."""

from enum import StrEnum

from noria.contracts.errors import AgentUnavailable, PolicyUnavailable, StationFailed

ROW = 8
"""This many failures in a row with one cause end a run of rollouts; fewer, if fewer are planned and none connects."""
SAMPLES = 3
"""On how many samples a cause must show that a sample itself can bring about: members of a group come in a row."""


class Fault(StrEnum):
    """Why a rollout failed, as far as it may concern every other one too."""

    UNREACHABLE = "unreachable"
    """No connection to the agent."""
    SLOW = "slow"
    """The agent did not answer in time."""
    NONSENSE = "nonsense"
    """The agent answered with an error or with another shape than the rollout endpoint's."""
    POLICY = "policy"
    """An upstream failed on a call of the target node."""
    PROXY = "proxy"
    """The proxy did not hand out the rollout's records."""


class FaultCounter:
    """Counts failures in a row and raises when they show that every further rollout would fail alike."""

    def __init__(self, planned: int, rollout_url: str, proxy_url: str, policy_version: str) -> None:
        self._planned = planned
        self._rollout_url = rollout_url
        self._proxy_url = proxy_url
        self._policy_version = policy_version
        self._fault: Fault | None = None
        self._count = 0
        self._samples: set[int] = set()

    def count(self, fault: Fault | None, sample_id: int, error: str) -> None:
        """Take note of one rollout that has ended; `fault` is None where nothing failed that concerns others too.

        Raises `AgentUnavailable`, `PolicyUnavailable` or `StationFailed` when the row is long enough.
        """
        if fault is not self._fault:
            self._fault, self._count, self._samples = fault, 0, set()
        if fault is None:
            return
        self._count += 1
        self._samples.add(sample_id)
        if fault in (Fault.UNREACHABLE, Fault.PROXY):
            hopeless = self._count >= min(ROW, self._planned)
        else:
            hopeless = self._count >= ROW and len(self._samples) >= SAMPLES
        if hopeless:
            raise self._stop(fault, error)

    def _stop(self, fault: Fault, error: str) -> StationFailed:
        rollouts = f"{self._count} rollouts in a row failed; the last: {error}"
        if fault is Fault.POLICY:
            return PolicyUnavailable(
                f"the policy server does not answer for version {self._policy_version!r}: {rollouts}. "
                "See that the policy server runs ([policy] port, [proxy.upstreams]) and can load that version"
            )
        if fault is Fault.PROXY:
            return StationFailed(
                f"the proxy at {self._proxy_url} does not hand out its records: {rollouts}. See that it runs "
                "([proxy] port) with this home's trainer key (NORIA_TRAINER_KEY, or trainer.key below [home])"
            )
        what = {
            Fault.UNREACHABLE: "is down",
            Fault.SLOW: "is too slow",
            Fault.NONSENSE: "answers with errors or nonsense",
        }[fault]
        return AgentUnavailable(
            f"the agent at {self._rollout_url} {what}: {rollouts}. See that it runs where [agent] url says"
        )
