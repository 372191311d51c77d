"""What a root counts: collectives, misses of the safety net, unsharded bytes."""

from threading import Lock
from typing import final

from fsdp_hooks.lifecycle import ShardingStats


@final
class Counters:
    """Mutable counters; the AG, RS and comp lanes write them, each under the lock."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._stats = ShardingStats()

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
            stats = self._stats
            live = stats.unsharded_bytes + unsharded_bytes
            self._stats = ShardingStats(
                num_all_gathers=stats.num_all_gathers + all_gathers,
                num_reduce_scatters=stats.num_reduce_scatters + reduce_scatters,
                num_all_reduces=stats.num_all_reduces + all_reduces,
                hook_misses=stats.hook_misses + hook_misses,
                unsharded_bytes=live,
                peak_unsharded_bytes=max(stats.peak_unsharded_bytes, live),
            )

    def read(self) -> ShardingStats:
        """The counts so far."""
        return self._stats
