"""Registers models that aren't in transformers, from files in `architectures` or model folders with custom code."""

import json
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_relative_import_files, get_relative_imports
from transformers.utils import cached_file

from pretrain.errors import InputError, Problems, error_in_file, one_line
from pretrain.model import architectures
from pretrain.registry import ARCHITECTURES, LOADED_CODE, digest_of, import_file

USUAL_NAMES = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers", "depth", "n_blocks"),
    "hidden_size": ("n_embd", "d_model", "dim", "width", "embed_dim", "n_embed"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads", "heads"),
    "vocab_size": ("n_vocab", "vocabulary_size", "num_tokens"),
    "intermediate_size": ("n_inner", "d_ff", "ffn_dim", "hidden_dim"),
    "max_position_embeddings": ("n_positions", "n_ctx", "max_seq_len", "max_length", "block_size"),
}
"""{transformers' name: names commonly used in other code}"""
NEEDED = ("num_hidden_layers", "hidden_size", "vocab_size")
"""Sizes needed to compute FLOPs and memory."""


def register(module: ModuleType) -> str:
    """Registers a module's causal language model and returns its model_type.

    Raises InputError unless the module defines exactly one and follows the conventions in `architectures`.
    """
    defined_here = {
        name: item for name, item in vars(module).items() if getattr(item, "__module__", "") == module.__name__
    }
    causal_names = [name for name in defined_here if name.endswith("ForCausalLM")]
    causal_class = defined_here[causal_names[0]] if len(causal_names) == 1 else None
    config_class = getattr(causal_class, "config_class", None)
    model_class = defined_here.get("".join(causal_names).removesuffix("ForCausalLM") + "Model")
    if model_class is None or getattr(config_class, "__module__", "") != module.__name__:
        raise InputError(
            f"{module.__file__}: must define exactly one class XForCausalLM, its base model XModel, and its "
            "config_class, a configuration class with its own model_type"
        )
    register_classes(module.__file__, config_class, causal_class, model_class)
    ARCHITECTURES.register(config_class.model_type)(causal_class)
    return config_class.model_type


def register_extensions() -> None:
    """Registers architectures that extensions have added to ARCHITECTURES. Raises the same errors as `register`."""
    for name, causal_class in ARCHITECTURES.items():
        if name in CONFIG_MAPPING and CONFIG_MAPPING[name] is causal_class.config_class:
            continue
        module = sys.modules[causal_class.__module__]
        if (model_type := causal_class.config_class.model_type) != name:
            raise InputError(f"{module.__file__}: registered as {name}, but its model_type is {model_type}")
        register(module)
        LOADED_CODE["code of the model"] = digest_of([Path(module.__file__)])


def register_classes(
    file: str | Path,
    config_class: type[PreTrainedConfig],
    causal_class: type[PreTrainedModel],
    model_class: type[PreTrainedModel] | None,
) -> None:
    """Registers the classes with transformers, and adds size aliases to `attribute_map`.

    Their code is saved with the model, so `from_pretrained(folder, trust_remote_code=True)` works on machines without
    this project. Raises InputError if the model_type is already in use, the classes use a different configuration, or
    a size is missing.
    """
    model_type = config_class.model_type
    # In this lazy mapping, get() only finds entries that are already loaded.
    known = CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING else None  # noqa: SIM401
    if not model_type or (known is not None and known.__module__ != config_class.__module__):
        said = f"model_type {model_type!r} is already taken" if model_type else "it has no model_type"
        raise InputError(
            f"{file}: {config_class.__name__}: {said}; choose a different one, here and in config.json (to use "
            "transformers' own model, omit trust_remote_code)"
        )
    name_sizes(file, config_class)
    if known is not None:
        return
    for made in filter(None, (causal_class, model_class)):
        if getattr(made.config_class, "__name__", None) != config_class.__name__:
            raise InputError(f"{file}: {made.__name__} must set config_class = {config_class.__name__}")
    AutoConfig.register(model_type, config_class)
    config_class.register_for_auto_class("AutoConfig")
    if model_class is not None:
        AutoModel.register(config_class, model_class)
        model_class.register_for_auto_class("AutoModel")
    AutoModelForCausalLM.register(config_class, causal_class)
    causal_class.register_for_auto_class("AutoModelForCausalLM")


def name_sizes(file: str | Path, config_class: type[PreTrainedConfig]) -> None:
    """Adds size aliases, such as n_layer, to the class's attribute_map.

    Raises InputError if a size is missing or the configuration can't be saved.
    """
    try:
        example = config_class()
    except Exception as error:  # custom code may raise any error
        raise InputError(
            f"{error_in_file(error, Path(file))}; {config_class.__name__}() must work without arguments; "
            "add default values"
        ) from error
    try:  # otherwise, the first checkpoint would fail
        with tempfile.TemporaryDirectory() as folder:
            example.save_pretrained(folder)
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"{file}: transformers can't save {config_class.__name__}: {reason}; if a key has the name of a "
            "generation parameter, such as top_k, rename it or declare it in the class, as in top_k: int = 2"
        ) from error
    missing = {}
    for name, usual in USUAL_NAMES.items():
        if hasattr(example, name):
            continue
        found = [other for other in usual if isinstance(getattr(example, other, None), int)]
        if len(found) == 1:
            config_class.attribute_map = {**config_class.attribute_map, name: found[0]}
        elif name in NEEDED:
            missing[name] = found
    if missing:
        entries = json.dumps({name: found[0] if found else "YOUR_NAME" for name, found in missing.items()})
        raise InputError(
            f"{file}: {config_class.__name__} has no {', '.join(missing)}, needed to compute FLOPs and memory; "
            f"map them to your names in the class: attribute_map = {entries}"
        )


def register_folder(name_or_path: str, keys: dict[str, Any]) -> None:
    """Registers the classes in a config.json's auto_map, from the Python files next to it.

    Raises InputError with file, line and message if the code has an error.

    Args:
        name_or_path: a folder or Hub ID.
        keys: its config.json.
    """
    register_all()  # so that the folder can't reuse a local architecture's model_type
    paths: dict[str, Path] = {}
    class_names = {}
    for kind in ("AutoConfig", "AutoModelForCausalLM", "AutoModel"):
        name = keys["auto_map"].get(kind)
        if name is None and kind == "AutoModel":
            continue
        # A name from another repository starts with the repository, which may contain dots.
        repository, _, place = str(name).rpartition("--")
        file, *rest = place.split(".")
        if len(rest) != 1:
            raise InputError(
                f"{name_or_path}/config.json: auto_map needs {kind}, as in "
                '{"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.MineForCausalLM"}'
            )
        paths[kind] = fetched(repository or name_or_path, f"{file}.py")
        class_names[kind] = rest[0]
    files = {Path(file) for path in paths.values() for file in (path, *get_relative_import_files(path))}
    digest = digest_of(files)
    classes = {}
    for kind, path in paths.items():
        # The module is named after its contents, so a checkpoint's copy of the code is the same module.
        module = import_file(path, f"groundwork_own_{digest}")
        classes[kind] = getattr(module, class_names[kind], None)
        if classes[kind] is None:
            raise InputError(f"{path}: does not define {class_names[kind]}, the {kind} in auto_map")
    causal_class = classes["AutoModelForCausalLM"]
    register_classes(paths["AutoConfig"], classes["AutoConfig"], causal_class, classes.get("AutoModel"))
    LOADED_CODE["code of the model"] = digest


def fetched(name_or_path: str, file: str) -> Path:
    """Fetches a Python file and its relative imports from a folder or Hub ID, and returns the file's path.

    Raises InputError if a file is missing.
    """
    paths = {}
    files = [file]
    for name in files:  # grows; files may import each other
        try:
            paths[name] = path = Path(cached_file(name_or_path, name)).absolute()
        except OSError as error:
            raise InputError(f"{name_or_path}: {name}: {one_line(error)}") from error
        try:
            imported = get_relative_imports(path)
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: cannot be read: {error}") from error
        files += {f"{other}.py" for other in imported} - set(files)
    return paths[file]


def own_keys_of(name_or_path: str) -> dict[str, Any] | None:
    """Returns the config.json of a folder or Hub ID if it contains an auto_map, otherwise None."""
    try:
        keys = json.loads(Path(cached_file(name_or_path, "config.json")).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # AutoConfig reports the problem
    return keys if isinstance(keys, dict) and isinstance(keys.get("auto_map"), dict) else None


def register_own(model_type: str) -> None:
    """Registers the file in `architectures` for a model_type in MODEL_TYPES.

    Raises InputError with file, line and message if the file has an error.
    """
    path = Path(architectures.__path__[0]) / f"{model_type}.py"
    found = register(import_file(path, architectures.__name__))
    if found != model_type:
        raise InputError(f"{path}: its model_type is {found!r}; rename the file to {found}.py, or change model_type")


def register_all() -> None:
    """Registers all files in `architectures`. Files with errors are skipped."""
    for model_type in architectures.MODEL_TYPES:
        Problems().attempt(register_own, model_type)
