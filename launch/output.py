"""The workers' output: rank 0's is the launcher's own, each line of the others has their rank before it."""

from __future__ import annotations

import os
import re
import secrets
import threading
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.api import LogsDest

from launch.spec import WorkerRun

_STDOUT, _STDERR = 1, 2
_END = secrets.token_hex(16).encode()  # a pipe does not end by itself while elastic, or a child of a worker, still holds it


class Prefixed(LogsSpecs):
    """Torch elastic's places for output: pipes that we read, instead of files that grow.

    Elastic opens what it is told by name, and /dev/fd/N is a pipe's name. This is also where elastic shows each worker's
    environment, before the start; what the worker runs with is added there.
    """

    def __init__(self, runs: Sequence[WorkerRun]) -> None:
        super().__init__()
        self._runs = runs  # of this host, by local rank
        self._ends: list[int] = []
        self._readers: list[threading.Thread] = []

    @property
    def root_log_dir(self) -> str:
        return os.devnull

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        self.finish()  # of the attempt before
        for local_rank, env in envs.items():
            env.update(self._runs[local_rank].env)
            env["TORCHELASTIC_ERROR_FILE"] = ""
        return LogsDest(
            stdouts={local_rank: self._place(local_rank, _STDOUT) for local_rank in envs},
            stderrs={local_rank: self._place(local_rank, _STDERR) for local_rank in envs},
            error_files=dict.fromkeys(envs, os.devnull),
        )

    def finish(self) -> None:
        """Shows the last lines. All workers have ended."""
        for end in self._ends:
            os.write(end, _END)
            os.close(end)
        for reader in self._readers:
            reader.join()
        self._ends.clear()
        self._readers.clear()

    def _place(self, local_rank: int, sink: int) -> str:
        rank = self._runs[local_rank].rank
        if rank == 0:
            return ""  # inherited
        source, end = os.pipe()
        reader = threading.Thread(
            target=copy_lines, args=(source, sink, f"[rank {rank}] ".encode()), name=f"output of rank {rank}", daemon=True
        )
        reader.start()
        self._ends.append(end)
        self._readers.append(reader)
        return f"/dev/fd/{end}"


def copy_lines(source: int, sink: int, prefix: bytes) -> None:
    """Copies from one descriptor to another until _END, whole lines with the prefix; a progress bar's rewriting becomes lines."""
    with open(source, "rb", buffering=0) as stream:
        rest = b""
        while not rest.endswith(_END) and (chunk := stream.read(65536)):
            *lines, rest = re.split(rb"\r?\n|\r(?!$)", rest + chunk)
            _write(sink, b"".join(prefix + line + b"\n" for line in lines))
        if rest := rest.removesuffix(_END):
            _write(sink, prefix + rest + b"\n")


def _write(sink: int, data: bytes) -> None:
    try:
        while data:
            data = data[os.write(sink, data) :]
    except OSError:
        pass  # nobody reads any more; the worker must not stop for that
