"""A W node of one microbatch: makes the weight gradients that a backward left in its queue."""

from typing import final

from ep_overlap.run.node import Hook, NodeRun
from fsdp_hooks.wgrad import WgradQueue


@final
class WgradRun:
    """Built once, run every step. What it reads are activations and output gradients, no weights.

    Args:
        queue: filled by the node's backward.
        node: the one whose backward fills it.
    """

    __slots__ = ("_node", "post_hooks", "pre_hooks", "queue")

    def __init__(self, queue: WgradQueue, node: NodeRun) -> None:
        self.queue = queue
        self._node = node
        # As a node's: they run in the work's own stream time.
        self.pre_hooks: tuple[Hook, ...] = ()
        self.post_hooks: tuple[Hook, ...] = ()

    def run(self) -> None:
        """Make what waits."""
        for hook in self.pre_hooks:
            hook()
        self.queue.flush(self._node.borrowed)
        for hook in self.post_hooks:
            hook()
