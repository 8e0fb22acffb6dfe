"""Incremental, asynchronous, crash-safe checkpoints for PyTorch.

store = lf_ckpt.open("ckpt", keep=[lf_ckpt.Last(3)])
start = lf_ckpt.resume(store, model, optimizer)
store.save(step, *lf_ckpt.collect(model, optimizer))  # in the loop
"""

from .dtypes import ITEM_SIZE as _ITEM_SIZE
from .errors import (
    CkptError,
    CorruptError,
    DiskFullError,
    HalfLoadedError,
    LockedError,
    MismatchError,
    NoCheckpointError,
    PeerLostError,
    RankFailedError,
    UnsupportedError,
    UploadError,
)
from .files import FileLayer
from .handle import SaveHandle
from .interop import (
    ExportReport,
    export_file,
    export_safetensors,
    import_any,
    import_dcp,
    import_file,
    import_safetensors,
    import_torch,
    load_file,
    verify_file,
)
from .keepspec import keep_as_json, keep_from_json, parse_keep
from .lock import break_lock
from .opening import open
from .options import Options
from .publish import Publisher, Subscriber, UpdateReport
from .report import Loaded, LoadReport, SaveReport
from .resume import resume
from .retention import (
    AllOf,
    AnyOf,
    Best,
    Candidate,
    Every,
    EverySeconds,
    Last,
    Phases,
    PolicyError,
)
from .rng import rng_state, set_rng_state
from .state import RestoreReport, collect, restore
from .store import Store
from .typed import Collected, Stateful, pack, unpack
from .upload import Upload

__version__ = "0.1.0"

DTYPES = tuple(_ITEM_SIZE)
"""Names of the element types that can be stored."""

__all__ = [
    "DTYPES",
    "AllOf",
    "AnyOf",
    "Best",
    "Candidate",
    "CkptError",
    "Collected",
    "CorruptError",
    "DiskFullError",
    "Every",
    "EverySeconds",
    "ExportReport",
    "FileLayer",
    "HalfLoadedError",
    "Last",
    "LoadReport",
    "Loaded",
    "LockedError",
    "MismatchError",
    "NoCheckpointError",
    "Options",
    "PeerLostError",
    "Phases",
    "PolicyError",
    "Publisher",
    "RankFailedError",
    "RestoreReport",
    "SaveHandle",
    "SaveReport",
    "Stateful",
    "Store",
    "Subscriber",
    "UnsupportedError",
    "UpdateReport",
    "Upload",
    "UploadError",
    "break_lock",
    "collect",
    "export_file",
    "export_safetensors",
    "import_any",
    "import_dcp",
    "import_file",
    "import_safetensors",
    "import_torch",
    "keep_as_json",
    "keep_from_json",
    "load_file",
    "open",
    "pack",
    "parse_keep",
    "restore",
    "resume",
    "rng_state",
    "set_rng_state",
    "unpack",
    "verify_file",
]
