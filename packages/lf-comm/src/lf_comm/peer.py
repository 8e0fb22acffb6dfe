"""Tensors held once on a host and read by all of its ranks without copies: frozen towers, embeddings.

    shared = lf_comm.share_tensors({"table": table} if rank == 0 else None)    # every rank of one host
    shared["table"]                                                            # the same pages on every rank

    lf_comm.share_module(tower)          # a frozen module: its parameters and buffers become those of rank 0

The memory is copied once, sealed (the kernel refuses every write to it) and its file descriptor passed to each rank;
nothing is pickled. It lives as long as any rank maps it, also when its owner has gone. Writing into a shared tensor is
against the contract: it changes pages of that rank only, and `check` finds it.
"""

from __future__ import annotations

import json
import os
import secrets
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lf_comm import _sealed
from lf_comm._channel import Channel
from lf_comm._errors import CommError
from lf_comm._text import text_of


class PeerError(CommError, RuntimeError):
    """Base of what sharing raises."""


class PeerGoneError(PeerError):
    """The owner left before this rank had its memory. owner: its rank in the group."""

    def __init__(self, owner: int, why: str) -> None:
        self.owner, self.why = owner, why
        super().__init__(
            f"rank {owner} left, or is on another host, before its tensors were here ({why}); share again"
        )

    def __reduce__(self) -> tuple[type[PeerGoneError], tuple[int, str]]:
        return PeerGoneError, (self.owner, self.why)


class PeerWrittenError(PeerError):
    """This rank has written into shared tensors. names: which; other ranks do not see it."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        super().__init__(
            f"written on this rank only, though shared: {', '.join(names)}; copy a tensor before writing"
        )

    def __reduce__(self) -> tuple[type[PeerWrittenError], tuple[tuple[str, ...]]]:
        return PeerWrittenError, (self.names,)


class PeerTensors(Mapping[str, Tensor]):
    """Shared tensors by name. owner: rank whose they were; nbytes: of the memory, once for all ranks of the host."""

    def __init__(self, fd: int, entries: tuple[_sealed.Entry, ...], owner: int) -> None:
        self.owner, self._fd = owner, fd
        self.nbytes = os.fstat(fd).st_size
        self.inode = os.fstat(fd).st_ino  # of the memory; the same on all ranks
        self._entries = {entry.name: entry for entry in entries}
        base = _sealed.mapped(fd)
        self._tensors = {name: _sealed.view(base, entry) for name, entry in self._entries.items()}
        self._closed = weakref.finalize(self, os.close, fd)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def check(self) -> None:
        """Compare all bytes with the sealed ones, at the speed of memory. Raises PeerWrittenError naming tensors that
        this rank has written; ValueError when closed."""
        if not self._closed.alive:
            raise ValueError("these tensors are closed")
        sealed = _sealed.mapped(self._fd)
        differ = (
            name
            for name, tensor in self._tensors.items()
            if not torch.equal(_bytes(tensor), _bytes(_sealed.view(sealed, self._entries[name])))
        )
        if names := tuple(differ):
            raise PeerWrittenError(names)

    def close(self) -> None:
        """Give up the memory; it goes when no rank, and no tensor that was taken from here, has it. Twice is once."""
        self._tensors = {}
        self._closed()


def share_tensors(
    tensors: Mapping[str, Tensor] | None,
    group: dist.ProcessGroup | None = None,
    *,
    owner: int = 0,
    timeout_s: float = 30.0,
) -> PeerTensors:
    """The owner's tensors, on all ranks of a group within one host, in the same pages; all ranks call it.

    tensors: strided, on the CPU, of any dtype; only the owner's count, and they are copied once. Results are
    contiguous, need no gradient and are for reading. owner: a rank of the group. timeout_s: for the owner's answer.

    Raises, on every rank, PeerError when one rank cannot have them, PeerGoneError when the owner left; on the owner
    TypeError for other tensors.
    """
    channel = Channel(group)
    if not 0 <= owner < channel.size:
        raise ValueError(f"owner={owner}: a rank of this group of {channel.size} is wanted")
    device = _device(channel)
    if channel.rank == owner:
        return _give(tensors, channel, owner, device)
    try:
        said = json.loads(text_of(owner, "", channel, device))
    except RuntimeError as error:
        raise PeerGoneError(owner, str(error).splitlines()[0]) from error
    if "error" in said:
        raise PeerError(f"rank {owner} shares nothing: {said['error']}")
    fd, problem = -1, None
    try:
        fd = _take(said, owner, timeout_s)
    except PeerError as error:
        problem = error
    try:
        _agree(problem, channel, device)
        return PeerTensors(fd, _sealed.entries_of_json(said["table"], os.fstat(fd).st_size), owner)
    except BaseException:
        if fd >= 0:
            os.close(fd)
        raise


def share_module(
    module: nn.Module, group: dist.ProcessGroup | None = None, *, owner: int = 0, timeout_s: float = 30.0
) -> PeerTensors:
    """Give a frozen module the parameters and buffers of the owner's; all ranks. Other ranks may have it on meta.

    What it held before is freed. Raises PeerError when a parameter needs a gradient, on all ranks, and when a rank's
    module has other parameters or buffers than the owner's; else as :func:`share_tensors`.
    """
    trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    channel = Channel(group)
    counts = channel.all_gather(torch.tensor([len(trained)], device=_device(channel))).flatten().tolist()
    if any(counts):
        what = trained[0] if trained else f"a parameter of rank {next(r for r, n in enumerate(counts) if n)}"
        raise PeerError(
            f"{what} needs a gradient; only frozen modules are shared (module.requires_grad_(False))"
        )
    shared = share_tensors(own if channel.rank == owner else None, group, owner=owner, timeout_s=timeout_s)
    odd = next((n for n in own.keys() | shared.keys() if _form(own.get(n)) != _form(shared.get(n))), None)
    odds = channel.all_gather(torch.tensor([odd is not None], device=_device(channel))).flatten().tolist()
    if any(odds):
        shared.close()
        raise PeerError(
            f"{odd or f'a tensor of rank {odds.index(True)}'} is not what rank {owner}'s module has"
        )
    made: dict[int, Tensor] = {id(old): shared[name] for name, old in own.items()}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            part._parameters[name] = _parameter(made, parameter)
        for name, buffer in part.named_buffers(recurse=False, remove_duplicate=False):
            part._buffers[name] = made[id(buffer)]
    return shared


def _give(
    tensors: Mapping[str, Tensor] | None, channel: Channel, owner: int, device: torch.device
) -> PeerTensors:
    try:
        if tensors is None:
            raise TypeError(f"tensors is None on rank {owner}, whose tensors are to be shared")
        entries, nbytes = _sealed.layout(tensors)
        fd = _sealed.create(tensors, entries, nbytes)
    except BaseException as error:
        text_of(owner, json.dumps({"error": str(error)}), channel, device)
        raise
    offer = None
    try:
        address = f"lf-comm-{secrets.token_hex(16)}"
        offer = _sealed.Offer(fd, address)
        said = {"address": address, "boot": _boot(), "table": _sealed.entries_to_json(entries)}
        text_of(owner, json.dumps(said), channel, device)
        _agree(None, channel, device)
        return PeerTensors(fd, entries, owner)
    except BaseException:
        os.close(fd)
        raise
    finally:
        if offer is not None:
            offer.close()


def _take(said: dict[str, str], owner: int, timeout_s: float) -> int:
    """The owner's memory, proved to be sealed and to hold what the table says."""
    if said["boot"] != _boot():
        raise PeerError(f"rank {owner} is on another host; share within one host only (a group of its ranks)")
    try:
        fd = _sealed.receive(said["address"], timeout_s)
    except (TimeoutError, OSError) as error:
        raise PeerGoneError(owner, str(error)) from error
    try:
        if not _sealed.is_sealed(fd):
            raise PeerError(f"what rank {owner} gave is not sealed, so it could change")
        _sealed.entries_of_json(said["table"], os.fstat(fd).st_size)
    except ValueError as error:
        os.close(fd)
        raise PeerError(str(error)) from error
    except BaseException:
        os.close(fd)
        raise
    return fd


def _agree(problem: PeerError | None, channel: Channel, device: torch.device) -> None:
    """All ranks have the memory, or all raise."""
    try:
        failed = channel.all_gather(torch.tensor([problem is not None], device=device)).flatten().tolist()
    except RuntimeError as error:
        left = PeerError(f"a rank left while tensors were shared ({str(error).splitlines()[0]}); share again")
        raise problem or left from error
    if problem is not None:
        raise problem
    if any(failed):
        raise PeerError(f"rank {failed.index(True)} could not get the tensors; its own error says why")


def _device(channel: Channel) -> torch.device:
    """Where the group's messages have to lie."""
    nccl = dist.get_backend(channel.group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def _boot() -> str:
    """Of this host, until it restarts."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.flatten().view(torch.uint8)


def _form(tensor: Tensor | None) -> object:
    return None if tensor is None else (tensor.dtype, tuple(tensor.shape))


def _parameter(made: dict[int, Tensor], old: Tensor) -> nn.Parameter:
    """One for each old one, so that tied parameters stay tied."""
    new = made[id(old)]
    if not isinstance(new, nn.Parameter):
        new = made[id(old)] = nn.Parameter(new, requires_grad=False)
    return new
