"""Published GR00T N1.6 weights in and out: safetensors folders with NVIDIA's key names.

Names, their sources and what could not be verified: :mod:`lf_meta.models.gr00t_vla_names`.

12 published tensors are used by no forward pass (``lm_head`` and the vision tower's pooling head): their shapes are
checked, they are not loaded and not written.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lf_meta.errors import MetaError
from lf_meta.models.gr00t_vla import GR00TVLA, config_for
from lf_meta.models.gr00t_vla_names import OPTIONAL, slots, unused_shapes
from lf_meta.models.published_config import OWN_CONFIG, read_config, write_config

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
FLOATS = {"F64", "F32", "F16", "BF16"}


class WeightsError(MetaError):
    """A folder does not hold the weights of this model.

    Attributes:
        missing: keys that the model needs and the folder does not have.
        unexpected: keys that the model does not know.
        wrong: key -> (expected, found) for shapes and dtypes that differ.
    """

    exit_code = 2

    def __init__(
        self,
        folder: Path,
        problem: str,
        *,
        missing: tuple[str, ...] = (),
        unexpected: tuple[str, ...] = (),
        wrong: Mapping[str, tuple[str, str]] | None = None,
    ) -> None:
        self.missing, self.unexpected, self.wrong = missing, unexpected, dict(wrong or {})
        lines = [f"{folder}: {problem}"]
        lines += [f"  missing: {key}" for key in missing]
        lines += [f"  unexpected: {key}" for key in unexpected]
        lines += [f"  {key}: expected {e}, found {f}" for key, (e, f) in self.wrong.items()]
        super().__init__("\n".join(lines))


# folders


def _safetensors(path: Path) -> Any:
    """The module, which only this file needs."""
    try:
        import safetensors.torch
    except ImportError as e:
        raise WeightsError(path, "weights need safetensors: pip install 'lf-meta[hf]'") from e
    return safetensors


def _open(path: Path) -> Any:
    module = _safetensors(path)
    try:
        return module.safe_open(path, framework="pt")
    except (OSError, module.SafetensorError) as e:
        raise WeightsError(path, f"cannot be read as safetensors: {e}") from e


def _files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: those its index names, or the single one."""
    index = folder / INDEX
    if not index.exists():
        if not (folder / SINGLE).exists():
            raise WeightsError(folder, f"has neither {SINGLE} nor {INDEX}")
        return [folder / SINGLE]
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise WeightsError(index, f"is no index of safetensors files: {type(e).__name__}: {e}") from e
    if any(not isinstance(n, str) or Path(n).name != n or n in ("", "..") for n in names):
        raise WeightsError(index, "names files outside its folder")
    return [folder / name for name in names]


def _headers(folder: Path) -> dict[str, tuple[Path, tuple[int, ...], str]]:
    """key -> (file, shape, dtype), read from the files' headers alone."""
    found: dict[str, tuple[Path, tuple[int, ...], str]] = {}
    for path in _files(folder):
        with _open(path) as file:
            for key in file.keys():  # noqa: SIM118  (safe_open is no mapping)
                if key in found:
                    raise WeightsError(folder, f"{key} is in {found[key][0].name} and in {path.name}")
                part = file.get_slice(key)
                found[key] = (path, tuple(part.get_shape()), part.get_dtype())
    return found


def check_folder(model: GR00TVLA, folder: str | os.PathLike[str]) -> None:
    """Check keys, shapes and dtypes of a folder against a model (which may be on the meta device); reads no weights.

    What is optional (heads of ours, the token of state dropout) may be absent from the folder, each as a whole.

    Raises:
        WeightsError: with every key that is missing, unexpected or wrong.
    """
    headers, wanted, path = _headers(Path(folder)), slots(model), Path(folder)
    needed = {key for key in wanted if not key.startswith(_absent_heads(headers))}
    known = {key: slot.shape for key, slot in wanted.items()} | unused_shapes(model.config)
    wrong = {}
    for key in sorted(known.keys() & headers.keys()):
        _, shape, dtype = headers[key]
        if shape != known[key]:
            wrong[key] = (str(list(known[key])), str(list(shape)))
        elif dtype not in FLOATS:
            wrong[key] = ("floating point", dtype)
    missing, unexpected = sorted(needed - headers.keys()), sorted(headers.keys() - known.keys())
    if missing or unexpected or wrong:
        raise WeightsError(
            path,
            f"{len(missing)} keys missing, {len(unexpected)} unexpected, {len(wrong)} of a wrong shape or dtype",
            missing=tuple(missing),
            unexpected=tuple(unexpected),
            wrong=wrong,
        )


def _absent_heads(headers: Mapping[str, object]) -> tuple[str, ...]:
    return tuple(prefix for prefix in OPTIONAL if not any(key.startswith(prefix) for key in headers))


def from_pretrained(
    folder: str | os.PathLike[str],
    size: str | None = None,
    *,
    device: str | torch.device = "cpu",
    **args: int | float | bool | str,
) -> GR00TVLA:
    """Build the model that a folder holds, with its weights, in float32.

    Args:
        folder: ``model.safetensors`` or shards with ``model.safetensors.index.json``.
        size: a named size; None is what the folder's own description says (``loongforge.json`` of
            :func:`save_pretrained`, or NVIDIA's ``config.json`` on top of size 3b).
        device: where the weights go; they are read one tensor at a time.
        args: single dimensions to replace, e.g. state_loss=0.1 for a fresh world model.

    Raises:
        WeightsError: the folder is not readable, or keys, shapes or dtypes differ: all of them are named.
        ConfigError: unknown size or dimension.
    """
    path = Path(folder)
    config = config_for(size, None, args) if size else read_config(path, args)
    with torch.device("meta"):
        model = GR00TVLA(config)
    check_folder(model, path)
    model.to_empty(device=device)
    with torch.device(device):
        model.add_optional_heads()
    _fill(model, path)
    return model


@torch.no_grad()
def _fill(model: GR00TVLA, folder: Path) -> None:
    places, parameters = slots(model), dict(model.named_parameters())
    for path in _files(folder):
        with _open(path) as file:
            for key in file.keys():  # noqa: SIM118
                if key in places:
                    places[key].of(parameters).copy_(file.get_tensor(key))


def save_pretrained(
    model: GR00TVLA, folder: str | os.PathLike[str], *, shard_bytes: int = 5_000_000_000
) -> None:
    """Write a folder that :func:`from_pretrained` reads, and Isaac-GR00T but for the 12 tensors nobody uses.

    The folder appears complete or not at all.

    Args:
        folder: must not exist.
        shard_bytes: larger weights are cut into files of at most this size (single tensors are not cut).

    Raises:
        WeightsError: the folder exists or cannot be written, or the model is another one.
    """
    path = Path(folder)
    kind: type = type(model)
    if not issubclass(kind, GR00TVLA):
        raise WeightsError(
            path, f"this is the layout of gr00t_n16_vla; save the state_dict() of a {kind.__name__}"
        )
    if shard_bytes < 1:
        raise WeightsError(path, f"shard_bytes={shard_bytes}: use a positive number of bytes")
    if path.exists():
        raise WeightsError(path, "exists; weights are written into a new folder")
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        _write(model, partial, shard_bytes)
        write_config(model.config, partial / OWN_CONFIG)
        partial.rename(path)
    except OSError as e:
        raise WeightsError(path, f"cannot be written: {e}") from e
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(model: GR00TVLA, folder: Path, shard_bytes: int) -> None:
    save_file = _safetensors(folder).torch.save_file
    parameters = dict(model.named_parameters())
    tensors = {key: slot.of(parameters) for key, slot in slots(model).items()}
    shards = list(_shards(tensors, shard_bytes))
    names = [SINGLE] if len(shards) == 1 else [_shard_name(i, len(shards)) for i in range(len(shards))]
    for name, keys in zip(names, shards, strict=True):
        save_file({k: tensors[k].contiguous().cpu() for k in keys}, folder / name, {"format": "pt"})
    if len(shards) > 1:
        total = sum(t.numel() * t.element_size() for t in tensors.values())
        where = {key: name for name, keys in zip(names, shards, strict=True) for key in keys}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=1, sort_keys=True))


def _shard_name(number: int, total: int) -> str:
    return f"model-{number + 1:05d}-of-{total:05d}.safetensors"


def _shards(tensors: Mapping[str, Tensor], limit: int) -> Iterator[list[str]]:
    keys: list[str] = []
    filled = 0
    for key, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if keys and filled + size > limit:
            yield keys
            keys, filled = [], 0
        keys.append(key)
        filled += size
    yield keys
