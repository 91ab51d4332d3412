"""Two ranks must agree on the report of every step."""

import json
import os
from pathlib import Path

import torch

from pretrain.training.step_reports import Consensus, Request
from support.save_and_die import strategy_of

NAN = float("nan")


def consensus_of(rank: int = 0, ranks: int = 1, meeting_point: Path | None = None) -> Consensus:
    return Consensus(strategy_of(rank, ranks, meeting_point))


def step(consensus, number, loss, grad_norm, skipped, request):
    figures = (torch.tensor(float(figure)) for figure in (loss, grad_norm, skipped))
    return [*consensus.exchange(number, *figures, request), *consensus.settle()]


def test_one_rank_has_its_own_figures():
    (report,) = step(consensus_of(), 3, 2.5, 0.5, 0, Request.SAVE)
    assert (report.step, report.loss, report.grad_norm, report.skipped) == (3, 2.5, 0.5, False)
    assert report.request == Request.SAVE


def test_two_ranks_agree_on_mean_loss_largest_norm_and_most_urgent_request(tmp_path):
    figures = [
        [(2.0, 1.0, 0, Request.NONE), (2.0, 1.0, 0, Request.PREEMPT), (NAN, 1.0, 1, Request.SAVE)],
        [(4.0, 3.0, 0, Request.NONE), (2.0, 1.0, 0, Request.INTERRUPT), (2.0, NAN, 0, Request.NONE)],
    ]
    children = []
    for rank in (0, 1):
        if (child := os.fork()) == 0:
            consensus = consensus_of(rank, 2, tmp_path / "store")
            seen = [r for number, of_step in enumerate(figures[rank]) for r in step(consensus, number, *of_step)]
            rows = [[r.step, str(r.loss), str(r.grad_norm), r.skipped, r.request.name] for r in seen]
            (tmp_path / f"{rank}.json").write_text(json.dumps(rows))
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert (
        first
        == second
        == [
            [0, "3.0", "3.0", False, "NONE"],
            [1, "2.0", "1.0", False, "INTERRUPT"],
            [2, "nan", "nan", True, "SAVE"],
        ]
    )
