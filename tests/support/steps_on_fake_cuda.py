"""Cases of tests/test_fake_cuda.py, for support.fake_cuda to run."""

from collections.abc import Callable

import torch

from support.fake_cuda import fake_cuda


def on_weight(use: Callable[[torch.Tensor], object]) -> Callable[[], None]:
    def case():
        with fake_cuda():
            use(torch.empty(4, 4, device="cuda", requires_grad=True))

    return case


WAITS = {
    "item": lambda weight: weight.sum().item(),
    "truth": lambda weight: bool(weight.sum() > 0),
    "list": lambda weight: weight.tolist(),
    "shape from values": lambda weight: weight.nonzero(),
    "mask as an index": lambda weight: weight[weight > 0],
    "comparison": lambda weight: torch.equal(weight, weight),
    "copy to the host": lambda weight: weight.cpu(),
    "copy from the host": lambda weight: weight.detach().copy_(torch.ones(4, 4)),
    "number to the device": lambda weight: torch.tensor(1.0, device=weight.device),
    "synchronize": lambda weight: torch.cuda.synchronize(),
}
MIXES = {"product": lambda weight: weight @ torch.ones(4, 4), "sum": lambda weight: weight + torch.ones(4)}
RUNS = {
    "backward": lambda weight: (weight @ weight).sum().backward(),
    "scalar of the host": lambda weight: weight * torch.tensor(2.0),
    "copy without waiting": lambda weight: torch.ones(4).to("cuda", non_blocking=True) + weight,
    "number on the device": lambda weight: torch.full((), 1.0, device=weight.device),
    "write of a number": lambda weight: weight.detach()[0].fill_(1.0),
}
OF_FAKE_CUDA = {"waits": WAITS, "mixes": MIXES, "runs": RUNS}

CASES = {f"{kind}: {name}": on_weight(use) for kind, uses in OF_FAKE_CUDA.items() for name, use in uses.items()}
