"""Every shipped recipe can run: with stand-in shards for its data it passes the check, and the plan in it holds."""

import itertools
import re
import shlex

import pytest

from pretrain.model.build import check_vocabulary
from pretrain.model.model_config import load_model_config, load_recipe_model_config
from pretrain.planning.candidates import work_of_run
from pretrain.recipe import read_run_config
from pretrain.training.metrics import count_text
from pretrain.training.run_plan import derive
from pretrain.training.validation import open_validation
from support.project import ROOT, run_script

RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
WANTED = {"demo", "llama_125m", "llama_1b", "qwen3_0.6b", "deepone_162m", "gpt2_124m", "tiny_curriculum"}
WANTED |= {"big_batch_adamw", "smollm_corpus", "continue_pretraining", "pile_406m", "any_text"}


TOKENIZERS = {
    "gpt2": 50_257,
    "HuggingFaceTB/cosmo2-tokenizer": 49_152,
    "HuggingFaceTB/SmolLM2-135M": 49_152,
    "Qwen/Qwen3-0.6B-Base": 151_669,
}
"""{tokenizer on the Hub that recipes name: its ids}"""


def stand_ins(name, shards, folder) -> list[tuple[str, str]]:
    """Overrides that put small shards under the names of the recipe's folders, without limits on their epochs.

    The model of a recipe that continues one from the Hub is the same shape from here.
    """
    data = read_run_config(ROOT / f"recipes/{name}.yaml").data
    overrides = []
    for number, stage in enumerate(data.mixtures):
        prefix = f"data.stages.{number}.train" if data.stages else "data.train"
        for place, source in enumerate(stage.train):
            stand_in = folder / source.shards
            stand_in.parent.mkdir(parents=True, exist_ok=True)
            if not stand_in.exists():
                stand_in.symlink_to(shards)
            overrides.append((f"{prefix}.{place}.shards", str(stand_in)))
            if source.max_epochs:
                overrides.append((f"{prefix}.{place}.max_epochs", "null"))
    if name == "continue_pretraining":
        overrides += [("model", "model_configs/smollm_135m.json"), ("init", "scratch")]
    return overrides


def test_the_recipes_that_are_documented_exist():
    assert set(RECIPES) >= WANTED


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_passes_the_check(name, shards, tmp_path, monkeypatch):
    """On a CPU a recipe's attention and precision are those of the CPU; everything else is as on a GPU."""
    monkeypatch.chdir(ROOT)
    config = read_run_config(f"recipes/{name}.yaml", stand_ins(name, shards, tmp_path))
    run = derive(config, ranks=1)
    open_validation(config.data)
    assert run.total_steps > 0 and run.micro_steps(0) >= 1


def test_the_check_itself_says_that_a_recipe_can_run(shards, tmp_path):
    overrides = [word for key, value in stand_ins("smollm_corpus", shards, tmp_path) for word in (f"--{key}", value)]
    result = run_script("train.py", "--config", "recipes/smollm_corpus.yaml", "--check", *overrides)
    assert "this run can start" in result.stdout


def preparations_in(text: str) -> dict[str, tuple[str, int]]:
    """{folder of shards: (tokenizer, its ids)} of the commands of prepare_data.py in a recipe's comment or a page."""
    lines = text.replace("\\\n#", " ").replace("\\\n", " ").splitlines()
    commands = [shlex.split(line.strip("# ")) for line in lines if "python prepare_data.py" in line]
    options = [dict(itertools.pairwise(words)) for words in commands]
    sizes = TOKENIZERS | {o["--output"]: int(o["--train_tokenizer"]) for o in options if "--train_tokenizer" in o}
    return {o["--output"]: (o["--tokenizer"], sizes[o["--tokenizer"]]) for o in options if "--tokenizer" in o}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_how_its_data_is_prepared_and_the_vocabulary_fits(name):
    """Every folder of shards comes from a command in the comment, whose tokenizer is trained there or can be had."""
    text = (ROOT / f"recipes/{name}.yaml").read_text()
    commands = (ROOT / "Makefile").read_text().replace("$(BIN)/", "") if "`make demo`" in text else text
    prepared = preparations_in(commands)
    overrides = [("model", "model_configs/smollm_135m.json")] if name == "continue_pretraining" else []
    config = read_run_config(ROOT / f"recipes/{name}.yaml", overrides)
    folders = {str(source.shards) for stage in config.data.mixtures for source in stage.train}
    assert folders <= prepared.keys()
    (vocabulary,) = {prepared[folder] for folder in folders}
    source = config.model.model_copy(update={"config": str(ROOT / config.model.config)})
    assert check_vocabulary(load_recipe_model_config(source, vocabulary[1]), vocabulary[1]) == []


def test_folders_of_one_name_are_prepared_with_one_tokenizer():
    """Two recipes may share shards: who prepared them for the one can train the other."""
    tokenizers: dict[str, set] = {}
    for name in RECIPES:
        for folder, tokenizer in preparations_in((ROOT / f"recipes/{name}.yaml").read_text()).items():
            tokenizers.setdefault(folder, set()).add(tokenizer)
    assert {folder: each for folder, each in tokenizers.items() if len(each) > 1} == {}


def test_the_readmes_shards_are_those_of_its_recipe():
    prepared = preparations_in((ROOT / "README.md").read_text())
    (source,) = read_run_config(ROOT / "recipes/llama_125m.yaml").data.train
    assert prepared[str(source.shards)] == ("tokenizers/fineweb_edu", 32_000)


@pytest.mark.parametrize("name", RECIPES)
def test_the_plan_in_a_recipe_is_that_of_the_recipe(name, monkeypatch):
    """Parameters, tokens and steps of the comment; `python plan.py ... --comment` writes it anew."""
    monkeypatch.chdir(ROOT)
    text = (ROOT / f"recipes/{name}.yaml").read_text().replace("\n#   ", " ")
    pattern = r"^# Plan, by (plan\.py .*):\n# (\S+) parameters, (\S+) tokens, ([\d,]+) steps"
    found = re.search(pattern, text, re.MULTILINE)
    assert found, "no plan: python plan.py --config recipes/NAME.yaml --gpus N --gpu KIND --comment"
    words = found[1].split()
    assert words[words.index("--config") + 1] == f"recipes/{name}.yaml"
    overrides = [("model", words[words.index("--model") + 1]), ("init", "scratch")] if "--model" in words else []
    config = read_run_config(f"recipes/{name}.yaml", overrides)
    work = work_of_run(config, load_recipe_model_config(config.model, vocabulary_size=None))
    expected = (count_text(work.sizes.total), count_text(work.tokens), f"{work.steps:,}")
    assert found.groups()[1:] == expected


def test_the_smollm_corpus_is_mixed_as_it_is():
    """220B, 28B and 4B tokens: one pass over each takes the same part of the run."""
    sources = read_run_config(ROOT / "recipes/smollm_corpus.yaml").data.train
    tokens = {"fineweb_edu_dedup": 220, "cosmopedia_v2": 28, "python_edu": 4}
    assert {source.shards.name: round(source.weight * 252) for source in sources} == tokens


def test_the_pile_recipe_is_the_one_of_gpt2_at_406m():
    config = read_run_config(ROOT / "recipes/pile_406m.yaml")
    model = load_model_config(str(ROOT / config.model.config))
    assert (model.hidden_size, model.num_attention_heads, model.num_hidden_layers) == (1024, 16, 24)
    assert (config.data.sampling, config.data.sequence_length) == ("random_windows", 1024)
