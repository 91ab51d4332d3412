"""Fills in the texts of templates/: recipes, and what plan.py says in words. Imports nothing heavy."""

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.gpus import GIB
from pretrain.units import bytes_text, count_text, duration_text

if TYPE_CHECKING:
    import jinja2


def render(template: str, **values: Any) -> str:
    """Fills in a file of templates/. Raises UndefinedError for a name that the template mistypes."""
    return _templates().get_template(template).render(values)


def lines_of(template: str, macro: str, *arguments: Any, **names: Any) -> list[str]:
    """Calls a macro of a file of templates/; returns its lines. names: what the file uses beside the arguments."""
    module = _templates().get_template(template).make_module(names)
    return str(getattr(module, macro)(*arguments)).splitlines()


@cache
def _templates() -> "jinja2.Environment":
    import jinja2

    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates", encoding="utf-8"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    # count replaces Jinja's own filter, an alias of length. A JSON string is a YAML string, whatever its characters.
    templates.filters.update(
        bytes=bytes_text,
        count=count_text,
        duration=duration_text,
        gib=lambda value, form: format(value / GIB, form),
        number=lambda value, form=",": format(value, form),
        quoted=lambda value: json.dumps(str(value)),
    )
    return templates
