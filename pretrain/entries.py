"""Checks of the classes and functions that extensions register."""

from inspect import signature
from pkgutil import resolve_name
from typing import Any


def check_entry(entry: Any, kind: str, base: type | None, needs: tuple[str, str] | None) -> None:
    """Raises TypeError if an entry of a `registry.Table` can't be used.

    That is, if a class has the wrong base, lacks a method or has `Options` of the wrong class, or if a function or
    method doesn't accept its arguments.
    """
    if base and not (isinstance(entry, type) and issubclass(entry, base)):
        raise TypeError(f"{entry.__name__} is {kind} and must be a subclass of {base.__name__}")
    if needs and not hasattr(entry, needs[0]):
        raise TypeError(f"{entry.__name__} is {kind} and must have {needs[1]}")
    if missing := getattr(entry, "__abstractmethods__", None):
        raise TypeError(f"{entry.__name__} is {kind} and must define {' and '.join(sorted(missing))}")
    options, default = (getattr(owner, "Options", None) for owner in (entry, base))
    wanted = default or resolve_name("pretrain.config:Section")  # which imports the registry
    if options is not default and not (isinstance(options, type) and issubclass(options, wanted)):
        raise TypeError(f"{entry.__name__}.Options must be a subclass of {wanted.__name__}")
    called = {} if isinstance(entry, type) else {entry: 2}
    for method in getattr(base, "__abstractmethods__", ()):
        called[getattr(entry, method)] = len(signature(getattr(base, method)).parameters)
    for function, count in called.items():
        try:
            signature(function).bind(*range(count))
        except TypeError as error:
            raise TypeError(f"{function.__qualname__} must accept {count} arguments ({error})") from None
