"""Tests for the distillation example: its KL divergence equals one computed from full logits, document by document."""

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from transformers import AutoConfig

from pretrain.errors import InputError
from pretrain.model.build import build_model
from pretrain.model.loss_terms import Seen
from pretrain.registry import LOSS_TERMS, load_extensions
from support.project import ROOT
from support.tiny_models import TINY_LLAMA

CONFIG = AutoConfig.for_model(**TINY_LLAMA)


@pytest.fixture
def teacher(tmp_path):
    model = build_model(CONFIG, seed=1).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    model.save_pretrained(tmp_path / "teacher")
    load_extensions([str(ROOT / "examples/distillation.py")])
    return model, str(tmp_path / "teacher")


def test_the_term_is_the_kl_divergence_from_the_teacher_within_documents(teacher):
    model, folder = teacher
    student = build_model(CONFIG, seed=2).eval()
    ids = torch.arange(1, 25).view(2, 12)
    lengths = [[5, 7], [12]]
    documents = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths])
    hidden = torch.randn(2, 12, CONFIG.hidden_size, requires_grad=True)
    made = LOSS_TERMS["distillation"]
    term = made(made.Options(teacher=folder, temperature=2.0, chunk=5), CONFIG)
    head = student.get_output_embeddings()
    found = term(Seen(ids, ids, hidden, documents, 0, head, None, {}))
    alone = []
    for row, parts in zip(ids, lengths, strict=True):
        alone += [model(part[None]).logits[0] for part in row.split(parts)]
    theirs = F.softmax(torch.cat(alone) / 2, dim=-1)
    ours = F.log_softmax(head(hidden).flatten(0, 1) / 2, dim=-1)
    expected = 4 * (theirs * (theirs.log() - ours)).sum()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    gradients = [torch.autograd.grad(loss, hidden)[0] for loss in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)
    assert not any(parameter.requires_grad for parameter in term.teacher.parameters())


def test_a_teacher_that_does_not_fit_is_refused(teacher):
    made = LOSS_TERMS["distillation"]
    with pytest.raises(InputError, match="both must use the same tokenizer"):
        made(made.Options(teacher=teacher[1]), AutoConfig.for_model(**TINY_LLAMA | {"vocab_size": 999}))
    with pytest.raises(InputError, match=r"distillation: \./nowhere"):
        made(made.Options(teacher="./nowhere"), CONFIG)
    config = AutoConfig.for_model(**TINY_LLAMA | {"model_type": "mistral", "sliding_window": 8})
    build_model(config, seed=1).save_pretrained(folder := f"{teacher[1]}_with_window")
    with pytest.raises(InputError, match="attends to 8 tokens"):
        made(made.Options(teacher=folder), CONFIG)
    with pytest.raises(ValidationError, match="temperature"):
        made.Options(teacher=folder, temperature=0)
