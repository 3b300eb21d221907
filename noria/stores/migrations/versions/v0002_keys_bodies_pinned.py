"""API keys, references to large content, the answers that a group shares; PostgreSQL: what followers by id rely on."""

import sqlalchemy as sa
from alembic import op

revision = "v0002"
down_revision = "v0001"
branch_labels = None
depends_on = None

FOLLOWED = ("calls", "scores")
"""Tables that readers follow by id; on PostgreSQL each row says which transaction wrote it."""

# Whoever inserts has the writers' turn before the first id is drawn, and until the commit: a trigger of the statement
# runs before its rows. Its number is `_ADVISORY_LOCK` of noria/stores/online_engine.py. A session that never times out
# would keep the turn for ever when its client stalls, so it gets a limit for this transaction.
TAKE_TURN = """
CREATE FUNCTION noria_take_turn() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('idle_in_transaction_session_timeout') = '0' THEN
        PERFORM set_config('idle_in_transaction_session_timeout', '60s', true);
    END IF;
    PERFORM pg_advisory_xact_lock(474316171617);
    RETURN NULL;
END $$
"""


def upgrade() -> None:
    """Create the tables; rows that are there already count as written before any running transaction."""
    op.create_table(
        "call_bodies",
        sa.Column(
            "call_id",
            sa.BigInteger().with_variant(sa.Integer, "sqlite"),
            sa.ForeignKey("calls.id", ondelete="CASCADE"),
            primary_key=True,
            autoincrement=False,
        ),
        sa.Column("sha256", sa.Text, primary_key=True),
        sa.Column("bytes", sa.BigInteger, nullable=False),
    )
    op.create_index("call_bodies_sha256", "call_bodies", ["sha256"])
    op.create_table(
        "api_keys",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("hash", sa.Text, nullable=False, unique=True),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("scopes", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("revoked_at", sa.DateTime(timezone=True)),
    )
    op.create_table(
        "pinned_answers",
        sa.Column("key", sa.Text, primary_key=True),
        sa.Column("uid", sa.Text, nullable=False),
        sa.Column("output", sa.Text, nullable=False),
        sa.Column("policy_version", sa.Text),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
    )
    if op.get_bind().dialect.name == "postgresql":
        op.execute(TAKE_TURN)
        for table in FOLLOWED:
            op.execute(
                f"CREATE TRIGGER {table}_take_turn BEFORE INSERT ON {table}"
                " FOR EACH STATEMENT EXECUTE FUNCTION noria_take_turn()"
            )
            op.execute(f"ALTER TABLE {table} ADD COLUMN written_by xid8 NOT NULL DEFAULT '0'::xid8")
            op.execute(f"ALTER TABLE {table} ALTER COLUMN written_by SET DEFAULT pg_current_xact_id()")


def downgrade() -> None:
    """Drop what `upgrade` made."""
    if op.get_bind().dialect.name == "postgresql":
        for table in FOLLOWED:
            op.execute(f"DROP TRIGGER {table}_take_turn ON {table}")
            op.execute(f"ALTER TABLE {table} DROP COLUMN written_by")
        op.execute("DROP FUNCTION noria_take_turn()")
    for table in ("pinned_answers", "api_keys", "call_bodies"):
        op.drop_table(table)
