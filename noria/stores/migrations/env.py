"""The Alembic environment: migrates the connection that `OnlineStore.upgrade` hands over, in its transaction."""

from alembic import context

from noria.stores.tables import metadata


def run() -> None:
    """Apply the migrations that are missing."""
    connection = context.config.attributes["connection"]
    # SQLite cannot alter most of a table in place; batch mode copies it instead.
    context.configure(connection=connection, target_metadata=metadata, render_as_batch=True)
    with context.begin_transaction():
        context.run_migrations()


if __name__ == "env_py":  # the name under which Alembic executes this file; importing it runs nothing
    run()
