"""The whole configuration, typed: one frozen pydantic model per section.

Unknown keys, wrong types and impossible combinations become a :class:`~lf_meta.errors.ConfigError` that
names the dotted key (see :mod:`lf_meta.config_load`, which reads YAML and ``key=value`` overrides).
"""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from lf_meta.config_load import build, origins_of

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]


class Section(BaseModel):
    """Base of all sections: immutable, and closed against unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RunSection(Section):
    """What this run is called, how long it is and where it writes."""

    name: Annotated[str, Field(pattern=r"^[^/\x00]+$", max_length=200)] | None = Field(
        None, description="folder under run.dir; default: model-size-NNN, never reused"
    )
    dir: str = Field("runs", description="folder that holds all runs")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(
        0, description="one seed for initial weights, sample order and dropout"
    )
    steps: PositiveInt = Field(
        300, description="optimizer steps; also the length of the learning-rate schedule"
    )


class ModelSection(Section):
    """Which model, and which of its sizes."""

    name: str = Field("gr00t_n16_lm", description="registered model, or module:callable")
    size: str = Field("tiny", description="a named size of that model")
    vocab_size: PositiveInt | None = Field(None, description="default: the data set's vocabulary")
    args: dict[str, int | float | bool | str] = Field(
        default_factory=dict, description="overrides single dimensions, e.g. model.args.layers=6"
    )


class DataSection(Section):
    """Training text and how it is cut into records."""

    path: str | None = Field(
        None, description="text, .jsonl, .npz or .loongbin; default: Python's own reference"
    )
    tokenizer: str | None = Field(
        None, description="'bytes' (default for text) or the path of a tokenizer.json"
    )
    max_len: Annotated[int, Field(ge=2)] = Field(
        128, description="longest record in tokens; longer texts are split"
    )
    eval_fraction: Fraction = Field(0.05, description="share of the documents held out for eval")
    workers: PositiveInt = Field(1, description="processes that tokenize")


class BatchSection(Section):
    """Records per optimizer step over all ranks, and in how many micro-batches each rank takes its share."""

    size: PositiveInt = Field(16, description="global batch in records")
    accum: PositiveInt = Field(1, description="micro-batches per rank and step")

    @field_validator("accum")
    @classmethod
    def _divides_size(cls, accum: int, info: ValidationInfo) -> int:
        size = info.data.get("size", accum)
        if size % accum:
            raise ValueError(f"batch.size {size} is not a multiple of batch.accum {accum}")
        return accum


class OptimSection(Section):
    """Fused AdamW with warm-up and cosine decay, both pure functions of the step."""

    lr: PositiveFloat = Field(3e-3, description="peak learning rate")
    min_lr_ratio: Fraction = Field(0.1, description="learning rate after the last step, as a share of lr")
    warmup: NonNegativeInt = Field(20, description="steps of linear warm-up")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.95), description="AdamW betas")
    eps: PositiveFloat = Field(1e-8, description="AdamW epsilon")
    weight_decay: NonNegativeFloat = Field(0.1, description="on matrices only, not on norms")
    clip: NonNegativeFloat = Field(1.0, description="global gradient norm; 0 turns clipping off")


class DeviceSection(Section):
    """Where it runs and in which precision."""

    type: Annotated[str, Field(pattern=r"^[a-z][a-z0-9]*$")] = Field(
        "auto",
        description="auto: the accelerator that torch sees, or cpu; or one by name: cuda, npu, mlu, cpu",
    )
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="auto: bf16 autocast where the accelerator supports it"
    )
    deterministic: bool = Field(
        False, description="on cuda: only kernels whose result repeats bit for bit (slower)"
    )
    threads: Annotated[int, Field(ge=0, le=4096)] = Field(
        0, description="CPU threads of torch per rank; 0 leaves torch's choice"
    )


class LoaderSection(Section):
    """Which loader feeds the loop; both deliver the same batches."""

    backend: Literal["iouring", "torch"] = Field(
        "iouring", description="lf-iouring, or torch's own DataLoader"
    )
    engine: Literal["auto", "io_uring", "pread", "python"] = Field(
        "auto", description="lf-iouring's read engine"
    )
    threads: NonNegativeInt = Field(
        0, description="engine threads or torch workers; 0: automatic / in-process"
    )
    prefetch: PositiveInt = Field(4, description="batches read ahead")


def _retention(value: Any) -> int | list[dict[str, Any]]:
    """A number of newest checkpoints, or rules of lf-ckpt as data."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    if not isinstance(value, list) or not value:
        raise ValueError(
            "a whole number greater than 0, or a list of rules such as [{last: 3}, {every: 1000}]"
        )
    import lf_ckpt  # with torch, which most configurations are read without

    try:
        lf_ckpt.keep_from_json(value)
    except lf_ckpt.PolicyError as e:
        raise ValueError(str(e)) from None
    if _names_rule(value, "best"):
        raise ValueError(
            "best: the trainer saves no metrics with a checkpoint, so none can be the best by one"
        )
    return value


def _names_rule(rules: list[dict[str, Any]], name: str) -> bool:
    """Whether a list of valid rules, or one inside it, holds a rule of that name."""
    return any(
        key == name or (key in ("any", "all") and _names_rule(value, name))
        for rule in rules
        for key, value in rule.items()
    )


_KEEP_SCHEMA = {
    "anyOf": [
        {"type": "integer", "exclusiveMinimum": 0},
        {"type": "array", "minItems": 1, "items": {"type": "object"}},
    ]
}
Retention = Annotated[int | list[dict[str, Any]], PlainValidator(_retention), WithJsonSchema(_KEEP_SCHEMA)]


class CkptSection(Section):
    """When, where and how state is saved."""

    backend: Literal["lf", "torch"] = Field("lf", description="lf-ckpt, or torch.save")
    every: NonNegativeInt = Field(20, description="steps between saves; 0: only at the end and on a signal")
    keep: Retention = Field(
        3, description="newest checkpoints kept; lf: or rules, e.g. [{last: 3}, {every: 1000}]"
    )
    full_every: NonNegativeInt = Field(8, description="lf: deltas before a new full save")
    compress: Literal["auto", "raw", "zstd"] = Field(
        "auto", description="lf: auto compresses what gets smaller"
    )
    dir: str | None = Field(None, description="default: RUN/ckpt")
    on_error: Literal["raise", "warn"] = Field(
        "raise", description="stop, or log and go on, when a save fails"
    )

    @model_validator(mode="after")
    def _rules_are_lf_ckpts(self) -> CkptSection:
        if self.backend == "torch" and not isinstance(self.keep, int):
            raise ValueError("keep: rules belong to backend=lf; torch keeps a number of newest checkpoints")
        return self


class EvalSection(Section):
    """The held-out split."""

    every: NonNegativeInt = Field(100, description="steps between evaluations; 0: only at the end")
    batches: NonNegativeInt = Field(8, description="global batches per evaluation; 0: the whole split")


class MetricsSection(Section):
    """Logging; the only place where the host waits for the device."""

    every: PositiveInt = Field(10, description="steps between log lines")
    sample_ids: bool = Field(False, description="write the record ids of every step to RUN/ids-rank-R.jsonl")


class DistSection(Section):
    """Data parallel over torchrun's ranks."""

    backend: Literal["auto", "gloo", "nccl", "hccl", "cncl"] = Field(
        "auto", description="auto: nccl on cuda, gloo on cpu, elsewhere the one registered for the device"
    )
    timeout: Annotated[int, Field(gt=0, le=10**7)] = Field(
        1800, description="seconds until a lost peer is an error"
    )


def _absolute(path: str | None) -> str | None:
    return None if path is None else os.path.abspath(path)


class Config(Section):
    """A complete run. ``Config()`` is the default job."""

    run: RunSection = Field(default_factory=RunSection)
    model: ModelSection = Field(default_factory=ModelSection)
    data: DataSection = Field(default_factory=DataSection)
    batch: BatchSection = Field(default_factory=BatchSection)
    optim: OptimSection = Field(default_factory=OptimSection)
    device: DeviceSection = Field(default_factory=DeviceSection)
    loader: LoaderSection = Field(default_factory=LoaderSection)
    ckpt: CkptSection = Field(default_factory=CkptSection)
    eval: EvalSection = Field(default_factory=EvalSection)
    metrics: MetricsSection = Field(default_factory=MetricsSection)
    dist: DistSection = Field(default_factory=DistSection)

    def anchored(self) -> Config:
        """The same with absolute paths, so that the run can be resumed from any working directory."""
        tokenizer = self.data.tokenizer
        if tokenizer not in (None, "bytes"):
            tokenizer = _absolute(tokenizer)
        data = self.data.model_copy(update={"path": _absolute(self.data.path), "tokenizer": tokenizer})
        ckpt = self.ckpt.model_copy(update={"dir": _absolute(self.ckpt.dir)})
        return self.model_copy(update={"data": data, "ckpt": ckpt})

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for YAML or JSON."""
        return self.model_dump(mode="json")


def load_config(path: str | None = None, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Read a YAML file (or nothing), apply ``key=value`` overrides, validate.

    Raises:
        ConfigError: with the dotted key of the first problem and, for an unknown key, the nearest name.
    """
    return build(Config, path, overrides)


def config_origins(path: str | None, overrides: list[str] | tuple[str, ...]) -> dict[str, tuple[Any, str]]:
    """Every dotted key with its value and where it came from: ``default``, the file's name, or ``command line``."""
    return origins_of(Config, path, overrides)
