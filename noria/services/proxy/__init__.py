"""The proxy that an agent's base URL points at: it routes, records, and answers pinned nodes."""
