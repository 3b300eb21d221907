"""Benchmarks: each writes figures as JSON lines; `bench.render` makes docs/performance.md of them."""
