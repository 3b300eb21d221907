"""The lineage: one file per station, in the order of the flow, its checks beside it."""
