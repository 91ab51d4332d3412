"""Local model architectures, each in a file named after its model_type.

By transformers' naming convention, a file defines one `XConfig` with a `model_type`, one `XModel` and one
`XForCausalLM`. It imports only torch and transformers, because every model folder contains a copy of it. To add an
architecture, you only need to add its file (see docs/own_model.md). `own_code.register_own` imports a file only for
models of its type, so a mistake in it doesn't affect other models.
"""

import pkgutil

MODEL_TYPES = tuple(module.name for module in pkgutil.iter_modules(__path__))
