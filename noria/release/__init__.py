"""Which weights serve, and on what evidence: registry, gate, statistics, suites."""
