"""Calls with their tokens, scores, releases and their log."""

import sqlalchemy as sa
from alembic import op

revision = "v0001"
down_revision = None
branch_labels = None
depends_on = None


def _id() -> "sa.Column[int]":
    return sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True)


def upgrade() -> None:
    """Create every table."""
    op.create_table(
        "calls",
        _id(),
        sa.Column("uid", sa.Text, nullable=False, unique=True),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("app", sa.Text, nullable=False),
        sa.Column("process_node", sa.Text, nullable=False),
        sa.Column("trace_id", sa.Text, nullable=False),
        sa.Column("model_name", sa.Text, nullable=False),
        sa.Column("policy_version", sa.Text),
        sa.Column("arm", sa.Text, nullable=False),
        sa.Column("input", sa.Text, nullable=False),
        sa.Column("output", sa.Text, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("error_type", sa.Text),
        sa.Column("finish_reasons", sa.Text, nullable=False),
        sa.Column("usage", sa.Text),
        sa.Column("agent_version", sa.Text),
        sa.Column("subject", sa.Text),
        sa.Column("consent", sa.Boolean, nullable=False),
        sa.Column("reward_score", sa.Double),
        sa.Column("attributes", sa.Text, nullable=False),
        sa.Column("request_time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("response_time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("duration_ms", sa.Double, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("calls_trace_id", "calls", ["trace_id"])
    op.create_index("calls_app_node_id", "calls", ["app", "process_node", "id"])
    op.create_table(
        "call_tokens",
        sa.Column(
            "call_id",
            sa.BigInteger().with_variant(sa.Integer, "sqlite"),
            sa.ForeignKey("calls.id", ondelete="CASCADE"),
            primary_key=True,
            autoincrement=False,
        ),
        sa.Column("prompt_token_ids", sa.LargeBinary, nullable=False),
        sa.Column("completion_token_ids", sa.LargeBinary, nullable=False),
        sa.Column("logprobs", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "scores",
        _id(),
        sa.Column("target_kind", sa.Text, nullable=False),
        sa.Column("target_id", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("value", sa.Double, nullable=False),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("scorer", sa.Text, nullable=False),
        sa.Column("scorer_version", sa.Text, nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("explanation", sa.Text),
        sa.UniqueConstraint("target_kind", "target_id", "name", "scorer", "scorer_version", name="scores_key"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "releases",
        sa.Column("target", sa.Text, primary_key=True),
        sa.Column("version", sa.Text, primary_key=True),
        sa.Column("checkpoint", sa.Text, nullable=False),
        sa.Column("parent", sa.Text),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("weight", sa.Double, nullable=False),
    )
    op.create_index(
        "releases_one_live",
        "releases",
        ["target"],
        unique=True,
        sqlite_where=sa.text("state = 'live'"),
        postgresql_where=sa.text("state = 'live'"),
    )
    op.create_table(
        "release_events",
        _id(),
        sa.Column("target", sa.Text, nullable=False),
        sa.Column("version", sa.Text, nullable=False),
        sa.Column("from_state", sa.Text),
        sa.Column("to_state", sa.Text, nullable=False),
        sa.Column("weight", sa.Double, nullable=False),
        sa.Column("by", sa.Text, nullable=False),
        sa.Column("why", sa.Text, nullable=False),
        sa.Column("report_sha256", sa.Text),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("release_events_target", "release_events", ["target", "id"])


def downgrade() -> None:
    """Drop every table."""
    for table in ("release_events", "releases", "scores", "call_tokens", "calls"):
        op.drop_table(table)
