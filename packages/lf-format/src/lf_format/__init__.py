"""Checked binary containers for training samples: .loongbin token sequences with length buckets and hashes."""

from lf_format._dataset import Dataset, open_dataset
from lf_format._errors import FormatError, InputError, WorkerError
from lf_format._reader import Extents, Reader
from lf_format._records import Record
from lf_format._schema import Field, TokenizerInfo
from lf_format._writer import Writer, WriteReport

__all__ = [
    "Dataset",
    "Extents",
    "Field",
    "FormatError",
    "InputError",
    "Reader",
    "Record",
    "TokenizerInfo",
    "WorkerError",
    "WriteReport",
    "Writer",
    "open_dataset",
]
