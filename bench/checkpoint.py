"""Measures how long training waits for checkpoints written in the foreground and in the background.

    python bench/checkpoint.py [--folder runs]

Trains a Llama with 308M parameters in fp32 in one process. Checkpoints contain the weights and both Adam moments.
Needs 10 GB of memory and 12 GB of disk.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

GEOMETRY = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 8000,
    "tie_word_embeddings": True,
}
TOKENS = 128
"""Tokens per step. This is small, so that steps are short compared to a save."""
STEPS_ALONE = 3
SAVES = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=None, help="folder on the disk to measure (default: temporary folder)"
    )
    arguments = parser.parse_args()
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from pretrain import config
    from pretrain.checkpoint.checkpoints import Checkpoints
    from pretrain.parallel.strategy import Strategy, device_type
    from pretrain.parallel.tensor_group import TensorGroup

    device = device_type()
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**GEOMETRY)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, GEOMETRY["vocab_size"], (1, TOKENS), device=device)

    def step() -> float:
        begun = time.perf_counter()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    def groups() -> dict:
        names = {parameter: name for name, parameter in model.named_parameters()}
        moments = {f"{names[p]}.{key}": value for p, state in optimizer.state.items() for key, value in state.items()}
        return {
            "model": TensorGroup.of({name: p.detach() for p, name in names.items()}),
            "optimizer": TensorGroup.of(moments),
        }

    # The first step creates the optimizer state, so it isn't timed.
    step()
    alone = statistics.median(step() for _ in range(STEPS_ALONE))
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{parameters / 1e6:.0f}M parameters, {device}, {torch.get_num_threads()} threads, a step takes {alone:.2f} s"
    )
    print(f"{'save':<20}{'wait s':>9}{'total s':>11}{'GB':>6}{'step s during save':>19}", flush=True)
    waits: dict[bool, list[float]] = {False: [], True: []}
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    strategy = Strategy("fp32")
    try:
        for in_background in (False, True):
            settings = config.Checkpoint(keep_last=1, async_save=in_background)
            checkpoints = Checkpoints(folder / str(in_background), strategy.ranks, settings)
            for number in range(1, SAVES + 1):
                checkpoints.save(number, {}, groups(), lambda folder: None)
                step_times = []
                while (save := checkpoints.finished()) is None:
                    step_times.append(step())
                waits[in_background].append(save.stall_seconds)
                name = f"{'background' if in_background else 'foreground'} {number}"
                steps = f"{statistics.mean(step_times):.2f} ({len(step_times)})" if step_times else "-"
                figures = f"{save.stall_seconds:>9.2f}{save.seconds:>11.1f}{save.bytes / 1e9:>6.2f}{steps:>19}"
                print(f"{name:<20}{figures}{f'  {save.problem}' if save.problem else ''}", flush=True)
            shutil.rmtree(folder / str(in_background))
    finally:
        shutil.rmtree(folder)
    foreground = statistics.median(waits[False])
    # The first background save allocates CPU memory, which later ones reuse.
    later = statistics.median(waits[True][1:])
    print(f"first background save:  {waits[True][0] / foreground:.0%} of the foreground wait (allocates memory)")
    print(f"later background saves: {later / foreground:.0%}")


if __name__ == "__main__":
    main()
