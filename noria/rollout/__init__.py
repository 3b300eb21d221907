"""Drive the agent, record what it does, and assemble trajectories."""
