"""YAML and ``key=value`` overrides to a validated pydantic model, with the origin of every value."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from lf_meta.errors import ConfigError

M = TypeVar("M", bound=BaseModel)
Overrides = Iterable[str]


class _Loader(yaml.SafeLoader):
    """YAML whose numbers are what people write: ``3e-4`` is a float, and a repeated key is an error."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def _unique_mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(k) for k, _ in node.value]
    doubled = next((k for i, k in enumerate(keys) if k in keys[:i]), None)
    if doubled is not None:
        raise ConfigError(str(doubled), f"given twice in one section (line {node.start_mark.line + 1})")
    return {k: loader.construct_object(v, deep=True) for k, (_, v) in zip(keys, node.value, strict=True)}


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)


def _parse(text: str, what: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, TypeError, ValueError) as e:  # TypeError: a key that is a list
        raise ConfigError(what, f"is not valid YAML: {' '.join(str(e).split())}") from e
    except RecursionError:
        raise ConfigError(what, "is nested too deeply") from None


def read_file(path: str | None) -> dict[str, Any]:
    """The nested mapping in a YAML file; ``{}`` for None or an empty file."""
    if path is None:
        return {}
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(path, f"cannot be read: {e}") from e
    data = _parse(text, path)
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(path, f"must hold sections (a mapping), not {type(data).__name__}")
    return data


def parse_override(text: str) -> tuple[str, Any]:
    """``optim.lr=1e-3`` to ``("optim.lr", 0.001)``; the value is read as YAML."""
    key, sep, value = text.partition("=")
    if not sep or not key:
        raise ConfigError(text, "an override is written key=value, for example optim.lr=1e-3")
    return key.strip(), _parse(value, key)


def flatten(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mapping to ``{dotted key: leaf}``."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, dotted + "."))
        else:
            flat[dotted] = value
    return flat


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Inverse of :func:`flatten`; a key that is both leaf and section is an error."""
    nested: dict[str, Any] = {}
    for dotted, value in flat.items():
        *parents, leaf = dotted.split(".")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise ConfigError(dotted, f"{parent} is a value, not a section")
        node[leaf] = value
    return nested


def known_keys(model: type[BaseModel], prefix: str = "") -> dict[str, bool]:
    """Dotted names of every setting, and whether it is a free mapping that takes any key below it."""
    keys: dict[str, bool] = {}
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and get_origin(kind) is None and issubclass(kind, BaseModel):
            keys |= known_keys(kind, f"{prefix}{name}.")
        else:
            keys[f"{prefix}{name}"] = get_origin(kind) is dict
    return keys


def _refuse_unknown(flat: Mapping[str, Any], known: Mapping[str, bool]) -> None:
    sections = {k.split(".")[0] for k in known}
    for key, value in flat.items():
        if key in known or any(free and key.startswith(k + ".") for k, free in known.items()):
            continue
        if key in sections and (value is None or value == {}):
            continue  # an empty section
        nearest = difflib.get_close_matches(key, [*known, *sections], n=1, cutoff=0.0)
        raise ConfigError(key, f"unknown setting; the nearest is {nearest[0]}")


def _merge(
    model: type[BaseModel], path: str | None, overrides: Overrides
) -> tuple[dict[str, Any], dict[str, str]]:
    flat: dict[str, Any] = {}
    origin: dict[str, str] = {}
    layers = [(str(path), flatten(read_file(path)))]
    layers += [("command line", flatten(dict([parse_override(o)]))) for o in overrides]
    for name, layer in layers:
        flat.update(layer)
        origin.update(dict.fromkeys(layer, name))
    _refuse_unknown(flat, known_keys(model))
    return {k: v for k, v in flat.items() if k not in model.model_fields}, origin  # less empty sections


def first_problem(error: ValidationError, prefix: str = "") -> ConfigError:
    """The first finding of pydantic as a ConfigError; ``prefix`` is put before its key."""
    first = error.errors()[0]
    key = prefix + ".".join(str(p) for p in first["loc"]) or "config"
    problem = first["msg"].removeprefix("Value error, ")
    shown = "" if isinstance(first["input"], (BaseModel, dict)) else f" (got {first['input']!r})"
    return ConfigError(key, problem + shown)


def build(model: type[M], path: str | None, overrides: Overrides) -> M:
    """Merge file and overrides over the defaults and validate into ``model``."""
    flat, _ = _merge(model, path, overrides)
    try:
        return model.model_validate(unflatten(flat))
    except ValidationError as e:
        raise first_problem(e) from None


def origins_of(model: type[BaseModel], path: str | None, overrides: Overrides) -> dict[str, tuple[Any, str]]:
    """Dotted key to (value, origin) for every setting of the resolved configuration."""
    _, origin = _merge(model, path, overrides)
    resolved = build(model, path, overrides).model_dump(mode="json")
    return {k: (v, origin.get(k, "default")) for k, v in flatten(resolved).items()}
