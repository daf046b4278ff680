"""A weight transfer engine that reads folders, by which vLLM's own server follows a run.

``shoal pull TICKET --follow --as weight_v --out DIR`` writes the versions, and an unmodified
``vllm serve MODEL --weight-transfer-config '{"backend": "shoal"}'`` takes them: vLLM finds
`roles.engines.vllm.register` by the entry point ``vllm.general_plugins``. Its server is told by
HTTP when to look (``VLLM_SERVER_DEV_MODE=1``): ``/init_weight_transfer_engine`` names the
folder, then ``/start_weight_update``, ``/update_weights`` and ``/finish_weight_update``. A
delta is put on top of the checkpoint that this engine has built before.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from p2p.cast.weight_v import build, folder_of, is_delta, tensors, versions
from p2p.errors import ConfigError

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass
class FolderInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Settings of the engine: where the versions are."""

    folder: str
    base: str = ""
    """Checkpoint that the first delta is added to, if no full version is there."""


@dataclass
class FolderUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Request to take a version."""

    version: int = 0
    """Version to take; 0 is the newest."""


class FolderEngine(WeightTransferEngine):  # type: ignore[misc]
    """Reads versions of `p2p.cast.weight_v`."""

    init_info_cls = FolderInit
    update_info_cls = FolderUpdate

    def init_transfer_engine(self, init_info: FolderInit) -> None:
        self._root = Path(init_info.folder)
        self._built = {0: Path(init_info.base)} if init_info.base else {}
        self._place = Path(tempfile.mkdtemp(prefix="shoal-weights-"))
        if not self._root.is_dir():
            raise ConfigError(
                f"there is no folder {self._root}: shoal pull --as weight_v makes it"
            )

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FolderUpdate) -> None:
        there = versions(self._root)
        version = update_info.version or max(there, default=0)
        if version not in there:
            raise ConfigError(f"{self._root} has no version {version}")
        self.model.load_weights(self._tensors(self._checkpoint(version)))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        head = getattr(self.model, "lm_head", None)
        if hasattr(head, "cpu_linear"):  # vLLM 0.32 packs a tied head for CPUs only once
            dispatch_cpu_unquantized_gemm(head, remove_weight=False)

    def shutdown(self) -> None:
        if hasattr(self, "_place"):
            shutil.rmtree(self._place, ignore_errors=True)

    def _checkpoint(self, version: int) -> Path:
        """Build the checkpoint of a version from the newest full or built version before it."""
        chain = [version]
        while is_delta(folder_of(self._root, chain[-1])) and chain[-1] - 1 not in self._built:
            if not folder_of(self._root, chain[-1] - 1).is_dir():
                break
            chain.append(chain[-1] - 1)
        before = self._built.get(chain[-1] - 1)
        for one in reversed(chain):
            if one in self._built:
                before = self._built[one]
                continue
            target = self._place / f"{one:06d}"
            build(folder_of(self._root, one), one, before, target)
            before = self._built[one] = target
            for old in [number for number in self._built if 0 < number < one]:
                shutil.rmtree(self._built.pop(old))
        return self._built[version]

    def _tensors(self, folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
        for name, one in tensors(folder).items():
            with one.path.open("rb") as file:
                file.seek(one.start)
                data = bytearray(file.read(one.end - one.start))
            if one.dtype not in _DTYPES:
                raise ConfigError(f"{folder}: {name} is of type {one.dtype}")
            yield name, torch.frombuffer(data, dtype=_DTYPES[one.dtype]).view(one.shape)
