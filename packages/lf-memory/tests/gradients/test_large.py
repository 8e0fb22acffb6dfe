"""1.34 billion parameters, planned without the memory for one of them, with and without logits."""

import resource

import pytest
import torch
from torch.nn import functional as F

from lf_memory.gradients import predict

MIB = 2**20
CHUNK = 256  # tokens


class ChunkedCrossEntropy(torch.autograd.Function):
    """Head and cross entropy, a chunk of tokens at a time; the backward pass makes each chunk's logits again."""

    @staticmethod
    def forward(ctx, hidden, weight, targets):
        ctx.save_for_backward(hidden, weight, targets)
        losses = [
            F.cross_entropy((h @ weight.t()).float(), t, reduction="sum") for h, t in _chunks(hidden, targets)
        ]
        return torch.stack(losses).sum() / len(targets)

    @staticmethod
    def backward(ctx, gradient):
        hidden, weight, targets = ctx.saved_tensors
        to_hidden, to_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        for at, (h, t) in enumerate(_chunks(hidden, targets)):
            probability = (h @ weight.t()).float()
            probability -= probability.logsumexp(-1, keepdim=True)
            probability.exp_()
            probability.scatter_add_(1, t[:, None], torch.full_like(t[:, None], -1, dtype=torch.float32))
            probability *= gradient / len(targets)
            small = probability.to(weight.dtype)
            to_hidden[at * CHUNK : at * CHUNK + len(t)] = small @ weight
            to_weight.addmm_(small.t(), h)
        return to_hidden, to_weight, None


def _chunks(hidden, targets):
    return zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True)


@pytest.fixture
def large(gpt):
    """large(head_loss): the model of the research, in bfloat16 on the meta device, and its ids."""

    def make(head_loss=None):
        with torch.device("meta"):
            model = gpt(24, 2048, 16, 32000, 2048, head_loss=head_loss).bfloat16()
            return model, torch.zeros(4, 2048, dtype=torch.long)

    return make


def test_the_chunked_loss_is_the_plain_one(gpt):
    ids = torch.arange(10 * 60).view(10, 60) * 7 % 512  # two chunks and a part of one
    plain, chunked = gpt(), gpt(head_loss=ChunkedCrossEntropy.apply)
    chunked.load_state_dict(plain.state_dict())
    losses = [plain(ids), chunked(ids)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses)
    for one, other in zip(plain.parameters(), chunked.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-6, rtol=1e-4)


def test_kept_gradients_of_a_large_model_take_2563_mib(large):
    model, ids = large()
    plan = predict(model, ids, mode="all-alive", device="cpu")
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(1.34e9, rel=0.01)
    assert plan.parameter_peak_bytes / MIB == pytest.approx(2563.2, abs=0.1)


def test_gradients_given_up_at_once_take_125_mib_but_logits_2000(large):
    model, ids = large()
    plan = predict(model, ids, device="cpu")
    assert plan.parameter_peak_bytes / MIB == pytest.approx(125, abs=0.1)
    assert plan.arena_bytes == plan.parameter_peak_bytes
    assert plan.gradient_peak_bytes / MIB > 1950


def test_without_logits_the_whole_backward_pass_takes_less_than_300_mib(large):
    """2563 -> 125 MiB of parameter gradients, and 2654 -> less than 300 MiB of all that the pass allocates."""
    model, ids = large(ChunkedCrossEntropy.apply)
    plan = predict(model, ids, device="cpu")
    kept = predict(model, ids, device="cpu", mode="all-alive")
    assert plan.parameter_peak_bytes / MIB == pytest.approx(125, abs=0.1)
    assert plan.gradient_peak_bytes / MIB <= 300
    assert kept.gradient_peak_bytes / MIB > 2600
    assert plan.share_below(3, "slot", ["parameter"]) == 1


def test_planning_takes_hardly_any_memory(large):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model, ids = large()
    predict(model, ids, device="cpu")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 256 << 10  # KiB; its parameters alone would take 2563 MiB
