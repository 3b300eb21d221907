"""Alembic migrations of the online store."""
