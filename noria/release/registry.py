"""The serving chain: which version of each target is live, and every transition that led there."""

from dataclasses import asdict, replace
from datetime import UTC, datetime
from types import EllipsisType

from sqlalchemy import ColumnElement, Connection, insert, select, update

from noria.contracts.errors import NotFound, ReleaseConflict
from noria.contracts.release import Release, ReleaseEvent, ReleaseState
from noria.stores.online import OnlineStore
from noria.stores.tables import event_from_row, release_events, release_from_row, releases


class Registry:
    """Releases in the online store. Each change is one transaction in which no other writer runs."""

    def __init__(self, store: OnlineStore) -> None:
        self._store = store

    def current(self, target: str) -> Release | None:
        """The live version of a target, None when nothing has been released."""
        return self.live_releases().get(target)

    def live_releases(self) -> dict[str, Release]:
        """The live version of every target that has one."""
        query = select(releases).where(releases.c.state == ReleaseState.LIVE.value)
        with self._store.read() as connection:
            found = [release_from_row(row) for row in connection.execute(query).mappings()]
        return {release.target: release for release in found}

    def serving(self) -> dict[str, tuple[Release | None, Release | None]]:
        """The live version and the canary of every target that has either: what the proxy shares its traffic among.

        Should a target have several canaries, the one of the latest round counts.
        """
        states = [ReleaseState.LIVE.value, ReleaseState.CANARY.value]
        query = select(releases).where(releases.c.state.in_(states)).order_by(releases.c.target, releases.c.version)
        found: dict[str, tuple[Release | None, Release | None]] = {}
        with self._store.read() as connection:
            for release in map(release_from_row, connection.execute(query).mappings()):
                live, canary = found.get(release.target, (None, None))
                found[release.target] = (release, canary) if release.state is ReleaseState.LIVE else (live, release)
        return found

    def releases(self, target: str | None = None) -> list[Release]:
        """Every version that was ever released, of one target or of all, by target and version."""
        query = select(releases).order_by(releases.c.target, releases.c.version)
        if target is not None:
            query = query.where(releases.c.target == target)
        with self._store.read() as connection:
            return [release_from_row(row) for row in connection.execute(query).mappings()]

    def events(self, target: str | None = None) -> list[ReleaseEvent]:
        """Every transition, of one target or of all, oldest first."""
        query = select(release_events).order_by(release_events.c.id)
        if target is not None:
            query = query.where(release_events.c.target == target)
        with self._store.read() as connection:
            return [event_from_row(row) for row in connection.execute(query).mappings()]

    def promote(
        self,
        target: str,
        version: str,
        checkpoint: str,
        *,
        by: str,
        why: str,
        report_sha256: str | None = None,
        expected_parent: str | EllipsisType | None = ...,
    ) -> Release:
        """Make a version live; the one that was live before it becomes its parent and is retired.

        Changes nothing when the version is live already. `expected_parent` is the version that the decision was made
        against (None: nothing was live); left out, any is accepted. Raises `ReleaseConflict` when another version is
        live than that, when the version was rolled back, or when it was released with another checkpoint.
        """
        with self._store.write() as connection:
            live, known = _live(connection, target), _find(connection, target, version)
            if known is not None and known.checkpoint != checkpoint:
                raise ReleaseConflict(
                    f"{version} was released with checkpoint {known.checkpoint!r}, not {checkpoint!r}; "
                    "a version's weights never change: release another version"
                )
            if live is not None and live.version == version:
                return live
            if known is not None and known.state is ReleaseState.ROLLED_BACK:
                raise ReleaseConflict(f"{version} was rolled back and stays so; release a later version of {target}")
            parent = live.version if live is not None else None
            if expected_parent is not ... and parent != expected_parent:
                raise ReleaseConflict(
                    f"{target}: {version} was compared with {expected_parent}, but {parent} is live; "
                    "make the eval_report again"
                )
            if live is not None:
                _move(connection, live, ReleaseState.RETIRED, by, f"replaced by {version}", report_sha256)
            if known is None:
                known = Release(target, version, checkpoint, parent, ReleaseState.CANDIDATE, 0.0)
                connection.execute(insert(releases), {**asdict(known), "state": known.state.value})
                return _move(connection, known, ReleaseState.LIVE, by, why, report_sha256, first=True)
            known = replace(known, parent=parent)
            connection.execute(update(releases).where(*_key(known)).values(parent=parent))
            return _move(connection, known, ReleaseState.LIVE, by, why, report_sha256)

    def roll_back(
        self, target: str, *, to: str | None = None, by: str, why: str, version: str | None = None
    ) -> Release | None:
        """Take the live version back; its parent, or the version `to`, is live again. Returns what is live afterwards.

        None is returned when the live version had no parent: the target's calls then go to the default upstream.
        `version` names the one to take back, which makes the call safe to repeat: when it is rolled back already,
        nothing changes. Raises `NotFound` when nothing is live or there is no version `to`, and `ReleaseConflict` when
        another version than `version` is live, or when the one to return to was itself rolled back.
        """
        with self._store.write() as connection:
            live = _live(connection, target)
            if version is not None and (live is None or live.version != version):
                known = _find(connection, target, version)
                if known is not None and known.state is ReleaseState.ROLLED_BACK:
                    return live
                raise ReleaseConflict(f"{version} is not live, {live.version if live else 'nothing'} is")
            if live is None:
                raise NotFound(f"nothing is live for {target}, so nothing can be rolled back")
            name = to if to is not None else live.parent
            back = None if name is None else _find(connection, target, name)
            if name is not None and back is None:
                raise NotFound(f"{target} has no released version {name}; see the registry's releases for its versions")
            if back is not None and back.state is not ReleaseState.RETIRED:
                raise ReleaseConflict(
                    f"{target} cannot return to {back.version}, which is {back.state.value}; "
                    "name a retired version with `to`"
                )
            _move(connection, live, ReleaseState.ROLLED_BACK, by, why, None)
            if back is None:
                return None
            return _move(connection, back, ReleaseState.LIVE, by, f"{live.version} was rolled back: {why}", None)


def _key(release: Release) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    return releases.c.target == release.target, releases.c.version == release.version


def _find(connection: Connection, target: str, version: str) -> Release | None:
    query = select(releases).where(releases.c.target == target, releases.c.version == version)
    row = connection.execute(query).mappings().first()
    return None if row is None else release_from_row(row)


def _live(connection: Connection, target: str) -> Release | None:
    query = select(releases).where(releases.c.target == target, releases.c.state == ReleaseState.LIVE.value)
    row = connection.execute(query).mappings().first()
    return None if row is None else release_from_row(row)


def _move(
    connection: Connection,
    release: Release,
    to: ReleaseState,
    by: str,
    why: str,
    report_sha256: str | None,
    *,
    first: bool = False,
) -> Release:
    """Change a release's state and write the event; `first` when it had none before."""
    weight = 1.0 if to is ReleaseState.LIVE else 0.0
    connection.execute(update(releases).where(*_key(release)).values(state=to.value, weight=weight))
    event = {
        "target": release.target,
        "version": release.version,
        "from_state": None if first else release.state.value,
        "to_state": to.value,
        "weight": weight,
        "by": by,
        "why": why,
        "report_sha256": report_sha256,
        "at": datetime.now(UTC),
    }
    connection.execute(insert(release_events), event)
    return replace(release, state=to, weight=weight)
