"""Checked binary containers for training samples: .loongbin token sequences in length buckets."""

from lf_format._clips import video_frames, video_sample
from lf_format._codecs import Coding
from lf_format._container import WriteReport
from lf_format._dataset import Dataset, open_dataset
from lf_format._decision import Decision
from lf_format._errors import FormatError, InputError, WorkerError
from lf_format._fields import Field
from lf_format._locations import Blocks, Extents, Locations
from lf_format._merge import convert, merge
from lf_format._options import CodecOptions
from lf_format._overlap import OverlapReport, overlap
from lf_format._pairs import PairsReport, preprocess_pairs
from lf_format._preprocess import PreprocessReport, preprocess, preprocess_documents
from lf_format._preprocess_options import Advance
from lf_format._reader import Reader
from lf_format._records import DOCUMENT_END, DOCUMENT_START, Record, frame_pairs
from lf_format._robot import preprocess_robot
from lf_format._robot_options import RobotReport
from lf_format._salvage import SalvageReport, salvage
from lf_format._schema import TokenizerInfo
from lf_format._split import bucket_edges
from lf_format._stats import BucketSet, LengthSummary, bucket_set, suggest_buckets, summarize
from lf_format._tokenizers import ByteTokenizer, JsonTokenizer, Tokenizer, load_tokenizer, loads_tokenizer
from lf_format._verify import VerifyReport, verify
from lf_format._writer import Writer

__version__ = "0.1.0"

__all__ = [
    "DOCUMENT_END",
    "DOCUMENT_START",
    "Advance",
    "Blocks",
    "BucketSet",
    "ByteTokenizer",
    "CodecOptions",
    "Coding",
    "Dataset",
    "Decision",
    "Extents",
    "Field",
    "FormatError",
    "InputError",
    "JsonTokenizer",
    "LengthSummary",
    "Locations",
    "OverlapReport",
    "PairsReport",
    "PreprocessReport",
    "Reader",
    "Record",
    "RobotReport",
    "SalvageReport",
    "Tokenizer",
    "TokenizerInfo",
    "VerifyReport",
    "WorkerError",
    "WriteReport",
    "Writer",
    "bucket_edges",
    "bucket_set",
    "convert",
    "frame_pairs",
    "load_tokenizer",
    "loads_tokenizer",
    "merge",
    "open_dataset",
    "overlap",
    "preprocess",
    "preprocess_documents",
    "preprocess_pairs",
    "preprocess_robot",
    "salvage",
    "suggest_buckets",
    "summarize",
    "verify",
    "video_frames",
    "video_sample",
]
