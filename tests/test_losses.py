"""What training minimises, by hand."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from pretune_export.losses import TEMPERATURE, choice_loss  # noqa: E402


def test_a_certain_choice_loses_what_it_is_slower():
    score = torch.tensor([9.0, 0.0, 0.0, 9.0])
    target = torch.log(torch.tensor([1.0, 0.5, 1.0, 0.25]))  # best / latency
    task = torch.tensor([0, 0, 2, 2])  # of task 1 there is nothing
    assert float(choice_loss(score, target, task)) == pytest.approx((0.0 + 0.75) / 2, abs=1e-6)


def test_equal_scores_choose_at_random_and_the_better_one_is_to_score_higher():
    score = torch.zeros(2, requires_grad=True)
    loss = choice_loss(score, torch.log(torch.tensor([1.0, 0.5])), torch.tensor([0, 0]))
    assert float(loss.detach()) == pytest.approx(0.25)
    loss.backward()
    assert score.grad is not None
    assert score.grad.tolist() == pytest.approx([-0.125 / TEMPERATURE, 0.125 / TEMPERATURE])
