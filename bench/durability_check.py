"""What the store holds against what clients have received: the verdict of `bench.durability`."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from bench.durability_clients import content_of, marker, number_of
from noria.contracts.call import Call, CallStatus

SHOWN = 5
"""Offenders that a message names."""


@dataclass(slots=True)
class Verdict:
    """The store's rows after the drain, by how they compare with what was delivered; every list holds uids."""

    stored: int = 0
    undelivered: int = 0
    """Stored calls whose whole answer did not reach a client. They may be there."""
    missing: list[str] = field(default_factory=list[str])
    """Delivered and not stored."""
    duplicates: list[str] = field(default_factory=list[str])
    """Stored once more: under the same uid, or the same call under another one."""
    altered: list[str] = field(default_factory=list[str])
    """Stored with another content or status than was delivered, or never sent at all."""

    def violations(self) -> list[str]:
        """One sentence for each kind of offence."""
        offences = {
            "delivered calls are not in the store": self.missing,
            "calls are in the store twice": self.duplicates,
            "calls are in the store otherwise than they were": self.altered,
        }
        return [f"{len(uids)} {what}, first {', '.join(uids[:SHOWN])}" for what, uids in offences.items() if uids]


def compare(delivered: Mapping[str, int], sent: int, calls: Iterable[Call]) -> Verdict:
    """Compare the calls of a store with those that clients have sent and received.

    Args:
        delivered: the number of each call whose whole answer has arrived, by the uid that the answer's head gave.
        sent: calls are numbered from 1 to this.
        calls: every call of the store.
    """
    verdict = Verdict()
    uids: set[str] = set()
    numbers: set[int] = set()
    for call in calls:
        verdict.stored += 1
        number = number_of(call.input)
        if call.uid in uids or number in numbers:
            verdict.duplicates.append(call.uid)
            continue
        uids.add(call.uid)
        if number is None or not 1 <= number <= sent:
            verdict.altered.append(call.uid)
            continue
        numbers.add(number)
        if call.uid not in delivered:
            verdict.undelivered += 1
        elif delivered[call.uid] != number or not _is_whole(call, number):
            verdict.altered.append(call.uid)
    verdict.missing = [uid for uid in delivered if uid not in uids]
    return verdict


def _is_whole(call: Call, number: int) -> bool:
    try:
        asked = json.loads(call.input)["messages"][0]["content"]
        answered = json.loads(call.output or "")["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError):
        return False
    return call.status is CallStatus.OK and asked.startswith(marker(number)) and answered == content_of(number)
