"""Host memory that a GPU copies from and to at the speed of its bus: registered with CUDA.

A copy from or to other memory goes through a buffer of the driver's, at a fraction of that speed, and
holds up the thread that asks for it. Registering fixes every page in place, which costs more than a
copy: so each block is registered once, for as long as its owner lives.
"""

import logging
import mmap
import weakref
from contextlib import suppress

import torch

_log = logging.getLogger(__name__)


class Pins:
    """The blocks that one user of memory has registered."""

    def __init__(self) -> None:
        """None yet."""
        self._owners: weakref.WeakSet[object] = weakref.WeakSet()

    def pin(self, owner: object, memory: mmap.mmap) -> None:
        """Register `memory`, shared or anonymous, until `owner` is gone; `owner` keeps it mapped.

        Never of a private mapping of a file: fixing its pages would copy them. If CUDA refuses (as it
        does for files on disks, since Linux 6.5), copies are slow, which is logged once for each block.
        """
        if owner in self._owners:
            return
        self._owners.add(owner)
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        runtime = torch.cuda.cudart()
        error = int(runtime.cudaHostRegister(address, len(memory), 0))
        if error:
            _log.warning(
                "cudaHostRegister gave error %d; %d bytes stay unpinned", error, len(memory)
            )
            # The refusal is this thread's last error, which its next launch reports as its own.
            with suppress(torch.AcceleratorError):
                torch.zeros(1, device="cuda")
        else:
            weakref.finalize(owner, runtime.cudaHostUnregister, address)
