"""The LoongForge trainer: typed configuration, models, one training loop and the ``loongforge`` command line."""

from lf_meta import _env as _env  # first: sets thread policy before torch can load its OpenMP runtime
from lf_meta.config import Config, load_config
from lf_meta.errors import ConfigError, DataError, MetaError, NonFiniteLossError

__all__ = ["Config", "ConfigError", "DataError", "MetaError", "NonFiniteLossError", "load_config"]
__version__ = "0.1.0"
