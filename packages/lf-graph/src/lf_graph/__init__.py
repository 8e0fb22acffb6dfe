"""Training steps as CUDA graphs, captured in pieces and checked before capture."""

from lf_graph._errors import (
    AddressError,
    BudgetError,
    ClosedError,
    GraphCaptureError,
    GraphError,
    SignatureError,
    StaleReplayError,
)

__version__ = "0.1.0"

__all__ = [
    "AddressError",
    "BudgetError",
    "ClosedError",
    "GraphCaptureError",
    "GraphError",
    "SignatureError",
    "StaleReplayError",
]
