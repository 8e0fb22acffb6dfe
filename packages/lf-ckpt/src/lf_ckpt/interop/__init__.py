"""Other formats in and out: safetensors, torch.save, folders of torch.distributed.checkpoint, and one-file bundles.

An import gives `(tensors, items)` for `store.save(step, *imported)`. Nothing here runs code from a file.
"""

from .bundle import bundle_reader, export_file, import_file, load_file, verify_file
from .dcp_folder import import_dcp
from .export import export_safetensors
from .safetensors_files import import_safetensors
from .sniff import import_any
from .torch_file import import_torch
from .writing import ExportReport

__all__ = [
    "ExportReport",
    "bundle_reader",
    "export_file",
    "export_safetensors",
    "import_any",
    "import_dcp",
    "import_file",
    "import_safetensors",
    "import_torch",
    "load_file",
    "verify_file",
]
