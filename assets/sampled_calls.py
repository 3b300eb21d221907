"""Station 1: what the proxy has landed in the online store."""

import warnings

import dagster as dg

from noria.contracts.call import Call
from resources.stores import Stores

# Beta since Dagster 1.9, and the only kind of asset with an Observe button; its tests here would notice a change.
warnings.filterwarnings("ignore", category=dg.BetaWarning, message=".*observable_source_asset.*")


@dg.observable_source_asset(
    group_name="traffic",
    tags={"dagster/kind/sqlite": ""},
    description=(
        "**Your users' traffic.** Every model call of your agent that the proxy has sampled and landed in the online "
        "store, with its feedback. Nothing is made here: observing shows how much has come in, and how recently."
    ),
)
def sampled_calls(stores: Stores) -> dg.ObserveResult:
    """Count what has landed; the data version is the highest id, so that it changes only when something has."""
    online = stores.online
    last = online.last_call_id()
    newest = online.calls_after(last - 1, 1) if last else []
    return dg.ObserveResult(
        data_version=dg.DataVersion(str(last)),
        metadata={"calls": online.count_calls(), "last_call_id": last, **_newest(newest)},
    )


def _newest(calls: list[Call]) -> dict[str, dg.MetadataValue]:
    if not calls:
        return {}
    call = calls[0]
    return {
        "newest_call_at": dg.MetadataValue.timestamp(call.request_time),
        "newest_call": dg.MetadataValue.text(f"{call.target}: {call.status}, {call.duration_ms:.0f} ms"),
    }
