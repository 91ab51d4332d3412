"""Local model architectures, one file each, named by its model_type.

By transformers' naming convention, a file defines one `XConfig` with a `model_type`, one `XModel` and one
`XForCausalLM`. It imports only torch and transformers, because a copy of it is saved in every model folder. Adding an
architecture needs no other edit (see docs/own_model.md). `own_code.register_own` imports a file only for a model of
its type, so a mistake in it doesn't affect other models.
"""

import pkgutil

MODEL_TYPES = tuple(module.name for module in pkgutil.iter_modules(__path__))
