"""Everything of Noria that would exist without Dagster: contracts, stores, rewards, rollouts, releases and services."""

__version__ = "0.1.0"
