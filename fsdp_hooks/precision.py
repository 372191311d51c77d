"""Mixed precision: in which dtype weights are computed with, kept, and gradients reduced."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class MixedPrecision:
    """Dtypes of a unit's floating-point parameters; others stay as they are.

    Inputs are not cast: a unit gets what the one before it returns, so let the first one make the
    compute dtype (an embedding does). ``param_dtype`` and ``reduce_dtype`` are those of FSDP2's
    ``MixedPrecisionPolicy``; unlike there, ``reduce_dtype`` is the main weights' unless told
    otherwise.

    Raises:
        ValueError: a dtype is no floating-point dtype.
    """

    param_dtype: torch.dtype | None = None
    """Of compute parameters and gathers. None: each parameter's own."""
    main_dtype: torch.dtype = torch.float32
    """Of main weights, of their gradients, and of sums over microbatches."""
    reduce_dtype: torch.dtype | None = None
    """Of gradients on the wire. None: ``main_dtype``."""

    def __post_init__(self) -> None:
        for name, dtype in (
            ("param_dtype", self.param_dtype),
            ("main_dtype", self.main_dtype),
            ("reduce_dtype", self.reduce_dtype),
        ):
            given: object = dtype
            if given is None and name != "main_dtype":
                continue
            if not isinstance(given, torch.dtype) or not given.is_floating_point:
                raise ValueError(
                    f"{name} is {given!r}; expected a floating-point dtype, such as torch.bfloat16"
                )


@dataclass(frozen=True, kw_only=True)
class Dtypes:
    """What a policy comes to for the parameters of one dtype."""

    compute: torch.dtype
    main: torch.dtype
    reduce: torch.dtype


def dtypes_of(own: torch.dtype, mp: MixedPrecision | None) -> Dtypes:
    """The policy for parameters of dtype ``own``; without one, everything is in it."""
    if mp is None or not own.is_floating_point:
        return Dtypes(compute=own, main=own, reduce=own)
    return Dtypes(
        compute=mp.param_dtype or own,
        main=mp.main_dtype,
        reduce=mp.reduce_dtype or mp.main_dtype,
    )
