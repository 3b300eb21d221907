import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from sqlalchemy import insert

from noria.contracts.errors import NotFound, ReleaseConflict
from noria.contracts.release import Release, ReleaseState
from noria.release.registry import Registry
from noria.stores.online import OnlineStore
from noria.stores.tables import releases

TARGET = "dispatch.router"
V0, V1, V2 = (f"{TARGET}.r0000{n}" for n in range(3))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[OnlineStore]:
    store = OnlineStore(f"sqlite:///{tmp_path / 'online.db'}")
    store.upgrade()
    yield store
    store.close()


@pytest.fixture
def registry(store: OnlineStore) -> Registry:
    return Registry(store)


def promote(registry: Registry, version: str, **more: str | None) -> Release:
    return registry.promote(TARGET, version, f"rounds/{version}", by="test", why="it is better", **more)  # type: ignore[arg-type]


def states(registry: Registry) -> dict[str, tuple[str, float]]:
    return {release.version: (release.state.value, release.weight) for release in registry.releases(TARGET)}


def test_a_promotion_retires_what_was_live_and_is_logged(registry: Registry, store: OnlineStore) -> None:
    assert registry.current(TARGET) is None
    assert store.release_head() == 0
    first = promote(registry, V0, expected_parent=None)
    assert first == Release(TARGET, V0, f"rounds/{V0}", None, ReleaseState.LIVE, 1.0)
    second = promote(registry, V1, expected_parent=V0, report_sha256="5ha")
    assert second == Release(TARGET, V1, f"rounds/{V1}", V0, ReleaseState.LIVE, 1.0)
    assert registry.current(TARGET) == second
    assert registry.live_releases() == {TARGET: second}
    assert states(registry) == {V0: ("retired", 0.0), V1: ("live", 1.0)}
    events = registry.events(TARGET)
    assert [(e.version, e.from_state, e.to_state, e.weight) for e in events] == [
        (V0, None, "live", 1.0),
        (V0, "live", "retired", 0.0),
        (V1, None, "live", 1.0),
    ]
    assert (events[2].by, events[2].why, events[2].report_sha256) == ("test", "it is better", "5ha")
    assert [event.id for event in events] == [1, 2, 3]
    assert store.release_head() == 3


def test_promoting_what_is_live_changes_nothing(registry: Registry, store: OnlineStore) -> None:
    promote(registry, V0)
    live = promote(registry, V1, expected_parent=V0)
    assert promote(registry, V1, expected_parent=V0) == live
    assert store.release_head() == 3


def test_a_decision_against_another_version_is_refused(registry: Registry, store: OnlineStore) -> None:
    with pytest.raises(ReleaseConflict, match=f"{V1} was compared with {V0}, but None is live"):
        promote(registry, V1, expected_parent=V0)
    promote(registry, V0)
    promote(registry, V1)
    for expected in (V0, None):
        with pytest.raises(ReleaseConflict, match=f"{V2} was compared with {expected}, but {V1} is live"):
            promote(registry, V2, expected_parent=expected)
    with pytest.raises(ReleaseConflict, match="a version's weights never change"):
        registry.promote(TARGET, V1, "elsewhere", by="test", why="")
    assert store.release_head() == 3


def test_targets_do_not_touch_each_other(registry: Registry) -> None:
    promote(registry, V0)
    registry.promote("dispatch.reply", "dispatch.reply.r00001", "c", by="test", why="w", expected_parent=None)
    assert set(registry.live_releases()) == {TARGET, "dispatch.reply"}
    assert len(registry.releases()) == 2
    assert len(registry.events()) == 2
    assert len(registry.events(TARGET)) == 1


def test_a_roll_back_returns_to_the_parent_for_good(registry: Registry) -> None:
    promote(registry, V0)
    promote(registry, V1)
    back = registry.roll_back(TARGET, by="test", why="it is worse", version=V1)
    assert back is not None
    assert back == registry.current(TARGET)
    assert states(registry) == {V0: ("live", 1.0), V1: ("rolled_back", 0.0)}
    assert registry.events(TARGET)[-1].why == f"{V1} was rolled back: it is worse"
    with pytest.raises(ReleaseConflict, match=f"{V1} was rolled back and stays so"):
        promote(registry, V1)
    assert registry.roll_back(TARGET, by="test", why="again", version=V1) == back, "safe to repeat"
    with pytest.raises(ReleaseConflict, match=f"{V2} is not live, {V0} is"):
        registry.roll_back(TARGET, by="test", why="another", version=V2)
    assert registry.roll_back(TARGET, by="test", why="no release at all") is None
    assert registry.current(TARGET) is None
    with pytest.raises(NotFound, match="nothing is live"):
        registry.roll_back(TARGET, by="test", why="more")


def test_a_roll_back_to_a_named_version(registry: Registry) -> None:
    for version in (V0, V1, V2):
        promote(registry, version)
    with pytest.raises(NotFound, match="no released version r9"):
        registry.roll_back(TARGET, to="r9", by="test", why="w")
    with pytest.raises(ReleaseConflict, match=f"cannot return to {V2}, which is live"):
        registry.roll_back(TARGET, to=V2, by="test", why="w")
    assert states(registry)[V2] == ("live", 1.0)
    back = registry.roll_back(TARGET, to=V0, by="test", why="w")
    assert back is not None
    assert back.version == V0
    assert promote(registry, V1, expected_parent=V0).parent == V0, "a retired version may return by a new decision"
    with pytest.raises(ReleaseConflict, match=f"cannot return to {V2}, which is rolled_back"):
        registry.roll_back(TARGET, to=V2, by="test", why="w")


def test_of_promotions_at_once_one_wins(registry: Registry, store: OnlineStore) -> None:
    promote(registry, V0)
    start = threading.Barrier(8)
    won: list[str] = []
    lost: list[str] = []

    def try_to(version: str) -> None:
        mine = Registry(OnlineStore(store.url))
        start.wait()
        try:
            won.append(promote(mine, version, expected_parent=V0).version)
        except ReleaseConflict:
            lost.append(version)

    threads = [threading.Thread(target=try_to, args=(f"{TARGET}.r{n:05d}",)) for n in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    live = registry.current(TARGET)
    assert live is not None
    assert won == [live.version]
    assert len(lost) == 7
    assert sorted(states(registry)) == sorted([V0, live.version])


def test_of_promotions_by_processes_one_wins(registry: Registry, store: OnlineStore) -> None:
    promote(registry, V0)
    script = f"""
import sys
from noria.contracts.errors import ReleaseConflict
from noria.release.registry import Registry
from noria.stores.online import OnlineStore
registry = Registry(OnlineStore({store.url!r}))
print("ready", flush=True)
sys.stdin.readline()
try:
    registry.promote({TARGET!r}, sys.argv[1], "c", by="test", why="w", expected_parent={V0!r})
    print("won")
except ReleaseConflict:
    print("lost")
"""
    processes = [
        subprocess.Popen([sys.executable, "-c", script, v], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for v in (V1, V2)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    answers = []
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        answers.append(process.communicate(timeout=60)[0].strip())
    assert sorted(answers) == ["lost", "won"]
    live = registry.current(TARGET)
    assert live is not None
    assert live.version == (V1, V2)[answers.index("won")]


def put(store: OnlineStore, target: str, version: str, state: ReleaseState, weight: float) -> Release:
    """A row as a later Noria writes it, in a state that this one has no transition to."""
    release = Release(target, version, f"rounds/{version}", None, state, weight)
    with store.write() as connection:
        connection.execute(insert(releases), {**asdict(release), "state": state.value})
    return release


def test_what_serves_is_the_live_version_and_the_canary_of_each_target(registry: Registry, store: OnlineStore) -> None:
    assert registry.serving() == {}
    promote(registry, V0)
    live = promote(registry, V1, expected_parent=V0)
    assert registry.serving() == {TARGET: (live, None)}
    canary = put(store, TARGET, V2, ReleaseState.CANARY, 0.1)
    alone = put(store, "shop.reply", "shop.reply.r00001", ReleaseState.CANARY, 0.2)
    put(store, "shop.search", "shop.search.r00001", ReleaseState.CANDIDATE, 0.0)
    put(store, "shop.search", "shop.search.r00002", ReleaseState.ROLLED_BACK, 0.0)
    assert registry.serving() == {TARGET: (live, canary), "shop.reply": (None, alone)}
    assert registry.live_releases() == {TARGET: live}


def test_of_several_canaries_the_latest_round_serves(registry: Registry, store: OnlineStore) -> None:
    put(store, TARGET, V2, ReleaseState.CANARY, 0.2)
    put(store, TARGET, V1, ReleaseState.CANARY, 0.1)
    [(live, canary)] = registry.serving().values()
    assert live is None
    assert canary is not None
    assert (canary.version, canary.weight) == (V2, 0.2)
