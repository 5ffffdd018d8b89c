"""Does a sequence stay itself in a flat batch? Asked once of every model, before it serves.

The one idea: the same tokens stand twice in one step, as two requests that both begin at position 0, and must get the
same logits. A model that counts positions itself (Bart's decoder) or lets neighbouring tokens mix gives others.
"""

import torch
from transformers import PreTrainedModel

from eval.engine import attention
from eval.engine.attention import StepContext, TorchAttention
from eval.engine.kv_cache import KVCache, KVGeometry
from eval.engine.probe import PROBE_TOKENS, probe_tokens
from eval.errors import EvalError

BOUND = 0.05
"""Of a token's logits. Equal rows of one batch differ by rounding only, and most do not differ at all."""


def refuse_unless_packable(model: PreTrainedModel, geometry: KVGeometry) -> None:
    """Raises EvalError naming a model, with the paged attention under it, whose requests would change one another."""
    device = model.device
    once = torch.arange(PROBE_TOKENS, device=device)
    step = StepContext(
        kv=KVCache.allocate(geometry, 2, PROBE_TOKENS, model.dtype, device),
        query_starts=torch.tensor([0, PROBE_TOKENS, 2 * PROBE_TOKENS], dtype=torch.int32, device=device),
        context_lens=torch.tensor([PROBE_TOKENS, PROBE_TOKENS], dtype=torch.int32, device=device),
        block_tables=torch.tensor([[0], [1]], dtype=torch.int32, device=device),
        slot_mapping=torch.arange(2 * PROBE_TOKENS, device=device),
    )
    token_ids = probe_tokens(model).repeat(2)[None]
    with torch.inference_mode(), attention.attending(TorchAttention(), step):
        logits = model(input_ids=token_ids, position_ids=once.repeat(2)[None], use_cache=False).logits[0].float()
    first, second = logits.split(PROBE_TOKENS)
    # The first token may be one of padding, whose logits are zero.
    errors = ((second - first).norm(dim=1) / first.norm(dim=1))[1:]
    if not errors.median() <= BOUND:
        raise EvalError(
            f"{type(model).__name__}: a sequence's logits change with what stands before it in the batch (it takes no "
            "position_ids, or mixes neighbouring tokens); the engine cannot run it"
        )
