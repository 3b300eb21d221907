"""The agent's rollout endpoint."""

import asyncio
from collections.abc import Callable, Sequence

import dagster as dg

from noria.contracts.trajectory import Trajectory
from noria.rollout.driver import RolloutPlan, run_rollouts
from resources.settings import Settings


class Agent(dg.ConfigurableResource[object]):
    """Drives the real agent through controlled rollouts: its URL, the proxy and the trainer's key from noria.toml."""

    settings: dg.ResourceDependency[Settings]

    def roll_out(
        self,
        plans: Sequence[RolloutPlan],
        *,
        target: str,
        policy_version: str,
        on_trajectory: Callable[[Trajectory], None],
        progress: Callable[[int, int], None],
    ) -> None:
        """Run every plan; each trajectory is handed over as it ends.

        Raises `AgentUnavailable` or `PolicyUnavailable` when going on is pointless; what was handed over stays.
        """
        config = self.settings.config
        settings = config.target(target)
        asyncio.run(
            run_rollouts(
                plans,
                agent_url=config.agent.url,
                rollout_path=config.agent.rollout_path,
                proxy_url=config.proxy.url,
                trainer_key=config.trainer_key(),
                policy_version=policy_version,
                temperature=settings.temperature,
                concurrency=settings.concurrency,
                timeout_seconds=config.agent.timeout_seconds,
                on_trajectory=on_trajectory,
                progress=progress,
            )
        )
