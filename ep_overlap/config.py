"""What a user may ask of a schedule, and what is refused by name."""

from dataclasses import dataclass, fields
from typing import Final, Literal

from ep_overlap.plan.lower import check_budget, is_count
from ep_overlap.plan.order import OrderName, order_named

PAIRED_FROM_MICROBATCHES: Final = 2
"""From so many microbatches on, the paired order has two forwards to interleave."""
GRAPHED_TILE: Final = 64
"""Attention is replayed from CUDA graphs for a multiple of so many tokens: see
``models.megatron_graphs``."""


@dataclass(frozen=True, kw_only=True)
class OverlapConfig:
    """Options of an ``OverlapSchedule``.

    Raises:
        ValueError: an option is unknown, out of range, or excludes another.
    """

    num_microbatches: int
    overlap: bool = True
    """Megatron's ``--overlap-moe-expert-parallel-comm``. False: the serial order."""
    order: OrderName | str | None = None
    """``plain``, ``paired``, ``serial``; None: paired where there are two microbatches or more, and
    plain for a model that draws random numbers."""
    order_text: str | None = None
    """An order of one's own, as words (the content of an order file); excludes ``order``."""
    delay_wgrad: bool = False
    """Megatron's ``--delay-wgrad-compute``: weight gradients are nodes of their own (W)."""
    dispatch_over_wgrad: bool = False
    """Megatron's ``--overlap-dispatch-backward-with-experts-wgrad``: the backward of each dispatch
    runs over the experts' weight gradients, without overlap too."""
    recompute_granularity: Literal["full"] | None = None
    """Megatron's ``--recompute-granularity full``, each layer by itself: it keeps its input alone,
    and its forward runs again before its backward, as nodes of their own (R)."""
    max_unsharded_units: int | None = None
    """Budget of layer units gathered at once, with ``optim_grads_params``; None: as many as
    overlap needs."""
    divide_loss: bool = True
    """Whether each microbatch's loss is divided by their number; False: ``loss_fn`` has done so."""
    trace: bool = False
    """Record when every action waited and ran; ``StepResult.trace``."""

    def __post_init__(self) -> None:
        if not is_count(self.num_microbatches):
            raise ValueError(
                "num_microbatches must be a whole number of at least 1, got "
                f"{self.num_microbatches!r}"
            )
        for option in fields(self):
            value = getattr(self, option.name)
            if option.type is bool and not isinstance(value, bool):  # any text would switch it on
                raise ValueError(f"{option.name} must be True or False, got {value!r}")
        check_budget(self.max_unsharded_units)
        if self.order is not None and self.order_text is not None:
            raise ValueError("order and order_text exclude each other; give one of them")
        if self.order is not None:
            order_named(self.order)
        if self.recompute_granularity not in (None, "full"):
            raise ValueError(
                f"recompute_granularity {self.recompute_granularity!r} is no schedule's; expected "
                "'full' or None. A model recomputes parts of a layer by its own settings"
            )
        if not self.overlap and self.order_text is not None:
            raise ValueError("order_text needs overlap; set overlap=True or leave it out")
        if not self.overlap and self.order not in (None, OrderName.SERIAL):
            raise ValueError(
                f"order {self.order!r} needs overlap; set overlap=True or leave it out"
            )

    @property
    def order_name(self) -> OrderName:
        """The order in force, where no text gives one."""
        if not self.overlap:
            return OrderName.SERIAL
        if self.order is None:
            paired = self.num_microbatches >= PAIRED_FROM_MICROBATCHES
            return OrderName.PAIRED if paired else OrderName.PLAIN
        return OrderName(self.order)

    def order_for(self, *, draws_random: bool) -> OrderName:
        """The order in force for a model that draws random numbers, or for one that does not."""
        order = self.order_name
        is_default = self.order is None and order is OrderName.PAIRED
        return OrderName.PLAIN if draws_random and is_default else order
