"""Local model architectures, one file each, named by its model_type.

A file here defines, by the naming convention of transformers, one `XConfig` with a `model_type`, one `XModel` and one
`XForCausalLM`. It imports only torch and transformers, because a copy of it is saved in every model folder. Adding an
architecture takes no other edit: see docs/own_model.md. `own_code.register_own` imports a file when a model of its
type is asked for, so a mistake in it disturbs nobody else.
"""

import pkgutil

MODEL_TYPES = tuple(module.name for module in pkgutil.iter_modules(__path__))
