"""torch.distributed.checkpoint on an ordinary lf-ckpt store: its planners, our files, deltas and checksums, no pickle.

writer = lf_ckpt.dcp.LfStorageWriter("ckpt")
dcp.save(state_dict, checkpoint_id="100", storage_writer=writer, planner=lf_ckpt.dcp.LfSavePlanner())
dcp.load(state_dict, storage_reader=lf_ckpt.dcp.LfStorageReader("ckpt"), planner=lf_ckpt.dcp.LfLoadPlanner())
"""

from .planners import LfLoadPlanner, LfSavePlanner
from .reading import LfStorageReader
from .writing import LfStorageWriter

__all__ = ["LfLoadPlanner", "LfSavePlanner", "LfStorageReader", "LfStorageWriter"]
