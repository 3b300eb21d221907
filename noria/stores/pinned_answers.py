"""What pinned calls without a recording were answered, kept so that a whole group of rollouts is answered the same.

Whoever writes first decides, whichever process that is; everyone else reads what stands there.
"""

from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import Connection, RowMapping, select
from sqlalchemy.dialects import postgresql, sqlite

from noria.stores.online import OnlineStore
from noria.stores.tables import pinned_answers


@dataclass(frozen=True, slots=True)
class PinnedAnswer:
    """An answer that stands in for a later call's own.

    uid             the call that it was the answer to
    output          its JSON text, as `Call.output` has it
    policy_version  the version that gave it, None where it was not the policy server
    """

    uid: str
    output: str
    policy_version: str | None


class PinnedAnswers:
    """Answers by key. Methods raise SQLAlchemy's errors, or `ConfigError`, where the store cannot be reached."""

    def __init__(self, store: OnlineStore) -> None:
        self._store = store

    def get(self, key: str) -> PinnedAnswer | None:
        """The answer under a key, None where nobody has put one there."""
        with self._store.read() as connection:
            return _find(connection, key)

    def keep(self, key: str, answer: PinnedAnswer) -> PinnedAnswer:
        """Put an answer under a key that has none. Returns what stands there: this answer, or an earlier one."""
        row = {
            "key": key,
            "uid": answer.uid,
            "output": answer.output,
            "policy_version": answer.policy_version,
            "at": datetime.now(UTC),
        }
        with self._store.write() as connection:
            insert = sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert
            # On PostgreSQL this waits for another writer of the same key, and the select then sees what it has written.
            connection.execute(insert(pinned_answers).on_conflict_do_nothing(index_elements=["key"]), [row])
            found = _find(connection, key)
        assert found is not None, "a row is there after an insert that may only conflict with one"
        return found


def _find(connection: Connection, key: str) -> PinnedAnswer | None:
    row = connection.execute(select(pinned_answers).where(pinned_answers.c.key == key)).mappings().first()
    return None if row is None else _from_row(row)


def _from_row(row: RowMapping) -> PinnedAnswer:
    return PinnedAnswer(row["uid"], row["output"], row["policy_version"])
