"""megatron-core's HybridModel, cut into the parts that a schedule runs.

Its decoder holds attention and what follows as layers of their own. Attention and what is right
behind it are a layer of the schedule, and so is what stands alone::

    pattern       *   E   *   -   E   *   *   E
                  \\___/   \\___/   |   |   \\___/
    schedule       L0      L1    L2  L3    L4       (MoE, dense, MoE, dense, MoE)

An E alone is a layer with experts whose ``attn`` begins with their norm.

What is before and after them is the model's own ``forward``, run with another decoder: for ``pre``
one that returns what it is given, for ``post`` one that has no layers but the final norm.
"""

# Modules are exchanged in shallow copies, as in ``megatron_ends``.
# pyright: reportPrivateUsage=false

import copy
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, cast, final

from torch import Tensor, nn

from ep_overlap.models.megatron_ends import with_values
from ep_overlap.models.megatron_globals import INSTALL_HINT
from ep_overlap.models.megatron_layers import GPTState, Halves
from ep_overlap.models.megatron_parts import MegatronParts
from ep_overlap.models.megatron_refused import refuse_unsupported
from ep_overlap.run.layer import JoinedModules

try:
    from megatron.core.models.hybrid.hybrid_block import HybridStack
    from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_layer import TransformerLayer
except ImportError as error:
    raise ImportError(INSTALL_HINT) from error


@final
class HybridParts(MegatronParts[HybridModel]):
    """A HybridModel as the schedule sees it.

    On CPU, use it inside ``megatron_on_cpu``. A layer of two modules is ``JoinedModules``: shard
    each (``modules_of``), and then the model.

    Args:
        model: as a script has built it.
        cuda_graphs: see ``GPTParts``.

    Raises:
        ValueError: the model uses something that the parts leave out, or layers of other kinds.
    """

    def __init__(self, model: HybridModel, *, cuda_graphs: bool = False) -> None:
        symbols = "".join(_decoder(model).layer_type_list)
        _refuse(symbols, _unknown(symbols))  # first: a setting may be of layers of another kind
        refuse_unsupported(model)
        layers = [cast(TransformerLayer, layer) for layer in _decoder(model).layers]
        for index, layer in enumerate(layers):
            _refuse(symbols, _unlike_its_symbol(index, layer, symbols[index]))
        super().__init__(model, list(_halves(layers, symbols)), cuda_graphs=cuda_graphs)

    def pre(self, state: GPTState) -> Tensor:
        """As there."""
        batch, entrance = state.batch, _Entrance()
        model = _with_decoder(self._model, entrance)
        model.mtp_process = model.post_process = False  # what the decoder returns is the output
        hidden = model.forward(batch.tokens, batch.position_ids, cast(Tensor, batch.attention_mask))
        state.rotary = entrance.rotary
        return hidden

    def post(self, state: GPTState, hidden: Tensor, *shared: Tensor) -> Tensor:
        """As there."""
        batch, decoder = state.batch, copy.copy(_decoder(self._model))
        decoder._modules = {**decoder._modules, "layers": nn.ModuleList()}
        model = _with_decoder(with_values(self._model, shared), decoder)
        return model.forward(
            batch.tokens,
            batch.position_ids,
            cast(Tensor, batch.attention_mask),
            decoder_input=hidden,
            labels=cast(Tensor, batch.targets),
            loss_mask=batch.loss_mask,
        )


class _Entrance(nn.Module):
    """In place of a decoder: notes the rotary angles, and returns what it is given."""

    input_tensor: None = None
    """The model asks for it: there is no pipeline stage before this one."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary: Tensor | None = None

    def forward(
        self, hidden_states: Tensor, *, rotary_pos_emb: Tensor | None, **others: object
    ) -> Tensor:
        self.rotary = rotary_pos_emb
        return hidden_states


def _decoder(model: HybridModel) -> HybridStack:
    return cast(HybridStack, model.decoder)


def _with_decoder(model: HybridModel, decoder: nn.Module) -> HybridModel:
    own = copy.copy(model)
    own._modules = {**model._modules, "decoder": decoder}
    return own


# ---- which layers there are ----------------------------------------------------------------------

_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        Symbols.ATTENTION: "attention",
        Symbols.MOE: "experts",
        Symbols.MLP: "an MLP",
        Symbols.MAMBA: "Mamba",
        Symbols.GDN: "gated delta net",
        Symbols.DS_ATTENTION: "sparse attention",
        Symbols.MLA: "multi-latent attention",
    }
)
_FIRST: Final = (Symbols.ATTENTION, Symbols.MLA)
_SECOND: Final = (Symbols.MOE, Symbols.MLP)


def _refuse(symbols: str, problem: str | None) -> None:
    if problem is not None:
        raise ValueError(
            f"this HybridModel cannot be cut into parts: of its pattern {symbols!r}, {problem}. "
            "Expected '*' and '+' (attention), 'E' (experts) and '-' (an MLP) alone; change the "
            "pattern, or turn overlap_moe_expert_parallel_comm off"
        )


def _unknown(symbols: str) -> str | None:
    """What is wrong with a pattern; None: nothing."""
    for index, symbol in enumerate(symbols):
        if symbol not in (*_FIRST, *_SECOND):
            return f"layer {index} is {symbol!r} ({_NAMES[symbol]})"
    return None if symbols else "nothing is a layer"


def _halves(layers: Sequence[TransformerLayer], symbols: str) -> Iterator[Halves]:
    """The layers of the schedule."""
    for index, layer in enumerate(layers):
        if symbols[index] in _FIRST and symbols[index + 1 : index + 2] not in _SECOND:
            yield Halves(layer, None, layer)
        elif symbols[index] in _SECOND and symbols[index - 1 : index] in _FIRST:
            attention = layers[index - 1]
            yield Halves(attention, layer, JoinedModules([attention, layer]))
        elif symbols[index] in _SECOND:
            yield Halves(None, layer, layer)


def _unlike_its_symbol(index: int, layer: TransformerLayer, symbol: str) -> str | None:
    """A spec of one's own may build anything. What the parts do not call must do nothing."""
    idle: dict[str, object]
    if symbol in _FIRST:
        idle = {
            "pre_mlp_layernorm": layer.pre_mlp_layernorm,
            "mlp": layer.mlp,
            "mlp_bda": layer.mlp_bda,
        }
    else:
        idle = {
            "input_layernorm": layer.input_layernorm,
            "self_attention": layer.self_attention,
            "self_attn_bda": layer.self_attn_bda,
            "pre_cross_attn_layernorm": layer.pre_cross_attn_layernorm,
            "cross_attention": layer.cross_attention,
            "cross_attn_bda": layer.cross_attn_bda,
        }
    for name, module in idle.items():
        if not isinstance(module, IdentityOp):
            return f"layer {index} ({symbol!r}) has a {type(module).__name__} as its {name}"
    if isinstance(layer.mlp, MoELayer) != (symbol == Symbols.MOE):
        return f"layer {index} ({symbol!r}) has a {type(layer.mlp).__name__} as its mlp"
    return None
