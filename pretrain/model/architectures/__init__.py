"""Local model architectures, each in a file named after its model_type.

A file defines one `XConfig` with a `model_type`, one `XModel` and one `XForCausalLM`, as in transformers. It only
imports torch and transformers, because it is copied to every saved model folder. To add an architecture, add a file
(see docs/own_model.md). A file is imported when a model of its type is loaded (`own_code.register_own`).
"""

import pkgutil

MODEL_TYPES = tuple(module.name for module in pkgutil.iter_modules(__path__))
