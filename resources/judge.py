"""The judge service."""

import dagster as dg

from noria.contracts.evaluation import EvaluationRequest, EvaluationResult
from noria.services.judge_client import evaluate
from resources.settings import Settings


class Judge(dg.ConfigurableResource[object]):
    """Scores a candidate and a baseline on a suite, item by item."""

    settings: dg.ResourceDependency[Settings]

    def evaluate(self, request: EvaluationRequest) -> EvaluationResult:
        """Paired scores of every item. Raises `PolicyUnavailable` with the reason when the judge cannot answer."""
        config = self.settings.config.judge
        return evaluate(config.url, request, config.timeout_seconds)
