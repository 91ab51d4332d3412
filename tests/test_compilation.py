"""What is compiled is compiled at the start, once, and never while a run is under way."""

import pytest
from conftest import events, launch, run_script


def compilations(path) -> list[float]:
    """Times at which compilations began."""
    return [float(line.split()[0]) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("strategy", ["single", "fsdp2", "zero3"])
def test_layers_are_compiled_once_and_nothing_after_step_2(recipe, tmp_path, strategy):
    """Neither by training, nor by validation, which comes between, nor by samples of text of any length.

    One compilation serves all layers, with and without gradients; hooks of a strategy inside it would break it into
    dozens.
    """
    arguments = [
        "tests/train_and_count.py", "--config", recipe, "--precision", "bf16", "--compile", "regional",
        "--budget.steps", "8", "--validation.every_steps", "4", "--samples.every_steps", "4",
        "--samples.max_new_tokens", "8",
    ]  # fmt: skip
    environment = {"COMPILATIONS": str(tmp_path / "compilations"), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    if strategy == "single":
        run_script(*arguments, **environment)
    else:
        launch(strategy, 2, *arguments, **environment)
    times = {line["step"]: line["time"] for line in events(tmp_path / "run", "train")}
    began = compilations(tmp_path / "compilations0")
    assert 1 <= len(began) <= 4, f"{len(began)} compilations"
    assert not [when for when in began if when > times[2]], (
        f"{sum(when > times[2] for when in began)} of {len(began)} compilations came after step 2"
    )
