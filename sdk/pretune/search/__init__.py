"""Search over the decisions of design spaces in latent space."""

from pretune.search.adapt import Posterior
from pretune.search.task_search import Proposal, TaskSearch

__all__ = ["Posterior", "Proposal", "TaskSearch"]
