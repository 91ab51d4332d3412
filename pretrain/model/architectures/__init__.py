"""Local model architectures, one file each; importing this package registers them with AutoConfig and AutoModel.

A file here defines, by the naming convention of transformers, one `XConfig` with a `model_type`, one `XModel` and one
`XForCausalLM`. It imports only torch and transformers, because a copy of it is saved in every model folder. Adding an
architecture takes no other edit: see docs/models.md.
"""

import importlib
import pkgutil
from types import ModuleType

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel


def register(module: ModuleType) -> str:
    """Registers the one causal language model that a module defines and returns its model_type.

    Registering also marks the classes so that they are saved with their code: `from_pretrained(folder,
    trust_remote_code=True)` then works on machines without this project.
    """
    defined_here = {
        name: item for name, item in vars(module).items() if getattr(item, "__module__", "") == module.__name__
    }
    causal_names = [name for name in defined_here if name.endswith("ForCausalLM")]
    if len(causal_names) != 1:
        raise TypeError(f"{module.__name__} must define exactly one class named XForCausalLM; found {causal_names}")
    causal_class: type[PreTrainedModel] = defined_here[causal_names[0]]
    model_class: type[PreTrainedModel] = defined_here[causal_names[0].removesuffix("ForCausalLM") + "Model"]
    config_class = causal_class.config_class
    AutoConfig.register(config_class.model_type, config_class)
    AutoModel.register(config_class, model_class)
    AutoModelForCausalLM.register(config_class, causal_class)
    config_class.register_for_auto_class("AutoConfig")
    model_class.register_for_auto_class("AutoModel")
    causal_class.register_for_auto_class("AutoModelForCausalLM")
    return config_class.model_type


MODEL_TYPES = tuple(
    register(importlib.import_module(f"{__name__}.{module.name}")) for module in pkgutil.iter_modules(__path__)
)
