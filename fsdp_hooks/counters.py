"""What a root counts: collectives, misses of the safety net, unsharded bytes."""

from threading import Lock
from typing import final

from fsdp_hooks.lifecycle import ShardingStats


@final
class Counters:
    """Mutable counters; the AG, RS and comp lanes write them, each under the lock."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._all_gathers = self._reduce_scatters = self._all_reduces = 0
        self._hook_misses = 0
        self._unsharded_bytes = self._peak_unsharded_bytes = 0

    def add(
        self,
        *,
        all_gathers: int = 0,
        reduce_scatters: int = 0,
        all_reduces: int = 0,
        hook_misses: int = 0,
        unsharded_bytes: int = 0,
    ) -> None:
        """Count what happened."""
        with self._lock:
            self._all_gathers += all_gathers
            self._reduce_scatters += reduce_scatters
            self._all_reduces += all_reduces
            self._hook_misses += hook_misses
            self._unsharded_bytes += unsharded_bytes
            if self._unsharded_bytes > self._peak_unsharded_bytes:
                self._peak_unsharded_bytes = self._unsharded_bytes

    def read(self) -> ShardingStats:
        """The counts so far."""
        with self._lock:
            return ShardingStats(
                num_all_gathers=self._all_gathers,
                num_reduce_scatters=self._reduce_scatters,
                num_all_reduces=self._all_reduces,
                hook_misses=self._hook_misses,
                unsharded_bytes=self._unsharded_bytes,
                peak_unsharded_bytes=self._peak_unsharded_bytes,
            )
