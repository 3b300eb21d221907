"""Long-running processes: proxy, policy server, judge. They talk to each other over HTTP only."""
