"""The shape of a decoder, found on the meta device: which modules are its layers, and which linears are in them.

Nothing is looked up by model name. The layers are the one ModuleList whose members are of one class and hold linears; a
model that is built otherwise is refused with the reason, because half-quantizing it would look like success.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from quantize.as_stored import shape_as_stored
from quantize.checkpoint import Checkpoint, one_line, whole_numbers
from quantize.errors import QuantizeError
from quantize.experts import SplitExperts


@dataclass(frozen=True)
class Decoder:
    """`model` has its weights on the meta device. `prefix` is the path of the list of layers ("model.layers")."""

    model: PreTrainedModel
    prefix: str
    layers: nn.ModuleList

    def layer_prefix(self, index: int) -> str:
        return f"{self.prefix}.{index}."

    def layer_linears(self, index: int) -> dict[str, nn.Linear]:
        """The linears of one layer by their full names, in module order; its gates are left out."""
        gates = self.layer_gates(index)
        named = self.layers[index].named_modules(prefix=f"{self.prefix}.{index}")
        return {name: module for name, module in named if isinstance(module, nn.Linear) and name not in gates}

    def layer_gates(self, index: int) -> tuple[str, ...]:
        """What decides where tokens go in a layer: the routers beside its experts, and linears with a single output. A
        rounded one would send tokens elsewhere for a saving of nothing; they are never quantized."""
        layer, prefix = self.layers[index], f"{self.prefix}.{index}"
        blocks = {name.rpartition(".")[0]: len(experts) for name, experts in self.layer_experts(index).items()}
        gates = []
        for name, module in layer.named_modules(prefix=prefix):
            weight = getattr(module, "weight", None)
            if not isinstance(weight, nn.Parameter) or weight.dim() != 2:
                continue
            routed = blocks.get(name.rpartition(".")[0]) == weight.shape[0]
            if routed or (isinstance(module, nn.Linear) and weight.shape[0] == 1):
                gates.append(name)
        return tuple(gates)

    def layer_experts(self, index: int) -> dict[str, SplitExperts]:
        """The mixtures of experts of one layer by their full names."""
        named = self.layers[index].named_modules(prefix=f"{self.prefix}.{index}")
        return {name: module for name, module in named if isinstance(module, SplitExperts)}

    def outer_linears(self) -> dict[str, nn.Linear]:
        """The linears outside the layers, lm_head among them."""
        return {
            name: module
            for name, module in self.model.named_modules()
            if isinstance(module, nn.Linear) and not name.startswith(self.prefix + ".")
        }

    def head_is_tied(self) -> bool:
        head, embedding = self.model.get_output_embeddings(), self.model.get_input_embeddings()
        return head is not None and getattr(head, "weight", None) is embedding.weight


def linears_of(layer: nn.Module) -> dict[str, nn.Linear]:
    """By their names in the layer, its gates among them."""
    return {name: module for name, module in layer.named_modules() if isinstance(module, nn.Linear)}


def open_decoder(checkpoint: Checkpoint) -> Decoder:
    """The model of a checkpoint, on the meta device. Raises QuantizeError for one whose code, structure or tensors do
    not fit."""
    try:
        config = AutoConfig.from_pretrained(checkpoint.path, trust_remote_code=False)
        if getattr(config, "is_encoder_decoder", False):
            raise QuantizeError(
                f"{checkpoint.path}: {config.model_type} is an encoder with a decoder; only decoders are supported"
            )
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=weights_dtype(checkpoint), trust_remote_code=False)
    except QuantizeError:
        raise
    except Exception as failure:
        # transformers raises what comes up in the architecture's own code: ValueError, ZeroDivisionError, ...
        raise QuantizeError(
            f"{checkpoint.path}: transformers cannot build this model ({one_line(failure)[:300]})"
        ) from None
    model.eval()
    shape_as_stored(model, checkpoint.tensor_names)
    prefix, layers = find_layers(model, checkpoint)
    decoder = Decoder(model, prefix, layers)
    refuse_unquantizable(decoder, checkpoint)
    refuse_missing_tensors(decoder, checkpoint)
    return decoder


def weights_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The dtype of most weights, which becomes that of the scales."""
    sizes: dict[torch.dtype, int] = {}
    for name in checkpoint.tensor_names:
        if len(checkpoint.shape(name)) == 2:
            tensor = checkpoint.tensor(name)
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
    dtype = max(sizes, key=lambda key: sizes[key]) if sizes else torch.float32
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise QuantizeError(f"{checkpoint.path}: weights of {dtype} cannot be quantized; start from bf16, fp16 or fp32")
    return dtype


def find_layers(model: nn.Module, checkpoint: Checkpoint) -> tuple[str, nn.ModuleList]:
    """The outermost ModuleList of one class with linears inside. Raises when there is none, or more than one."""
    found: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        inside_another = any(name.startswith(outer + ".") for outer in found)
        if isinstance(module, nn.ModuleList) and len(module) and not inside_another and holds_weights(module[0]):
            found[name] = module
    if not found:
        raise QuantizeError(
            f"{checkpoint.path}: {type(model).__name__} has no list of decoder layers with linears in it"
        )
    if len(found) > 1:
        raise QuantizeError(
            f"{checkpoint.path}: {type(model).__name__} has more than one stack of layers ({', '.join(found)}); "
            "only models with a single decoder are supported"
        )
    name, layers = next(iter(found.items()))
    classes = sorted({type(layer).__name__ for layer in layers})
    if len(classes) > 1:
        raise QuantizeError(f"{checkpoint.path}: the layers in {name} are of different classes ({', '.join(classes)})")
    return name, layers


def holds_weights(layer: nn.Module) -> bool:
    return any(isinstance(module, nn.Linear) or is_transposed_linear(module) for module in layer.modules())


def is_transposed_linear(module: nn.Module) -> bool:
    """GPT-2's Conv1D: a linear with its weight stored the other way round, which no loader of these formats expects."""
    return type(module).__name__ == "Conv1D"


def refuse_unquantizable(decoder: Decoder, checkpoint: Checkpoint) -> None:
    kind = type(decoder.layers[0]).__name__
    for name, module in decoder.layers.named_modules():
        name = f"{kind}.{name.partition('.')[2]}"
        if is_transposed_linear(module):
            raise QuantizeError(
                f"{checkpoint.path}: {name} is a Conv1D (weights stored transposed, as in GPT-2), "
                "which compressed-tensors cannot express; such models are not supported"
            )
        if isinstance(module, nn.Conv1d):
            # Mamba's forward reads the weight of a linear without calling it: a quantized one has none.
            raise QuantizeError(
                f"{checkpoint.path}: {name} is a convolution over tokens (a state-space or hybrid model); "
                "only decoders with attention are supported"
            )
    for index, layer in enumerate(decoder.layers):
        for name, parameter in layer.named_parameters():
            if parameter.dim() > 2 and min(parameter.shape[-2:]) > 8:
                stored = f"{decoder.layer_prefix(index)}{name}" in checkpoint.files
                reason = "is stored as one tensor for all experts" if stored else "computes its experts in its own way"
                raise QuantizeError(
                    f"{checkpoint.path}: {kind}.{name} {tuple(parameter.shape)} {reason}; only mixtures with plain "
                    "linears per expert on disk (as Mixtral's and Qwen-MoE's) can be quantized"
                )


def refuse_shared_keys(decoder: Decoder, what: str) -> None:
    """Raises QuantizeError where layers read keys and values of earlier ones (`num_kv_shared_layers`, Gemma 3n and 4):
    what is moved or tried in one layer then changes others, which a look at that layer does not show."""
    if getattr(decoder.model.config.get_text_config(), "num_kv_shared_layers", None):
        raise QuantizeError(
            f"{type(decoder.model).__name__}: its layers share keys and values, so {what} cannot judge a layer "
            "by itself; use gptq, int4 or int8"
        )


def refuse_missing_tensors(decoder: Decoder, checkpoint: Checkpoint) -> None:
    """The head may be missing: it is tied, or stored under an older name (GPT-NeoX's embed_out) and copied as it is."""
    head = {f"{name}.weight" for name in decoder.outer_linears()}
    for name, parameter in decoder.model.named_parameters():
        if name not in checkpoint.files:
            if name in head:
                continue
            raise QuantizeError(f"{checkpoint.path}: has no tensor {name}, which its config.json calls for")
        if checkpoint.shape(name) != tuple(parameter.shape):
            raise QuantizeError(
                f"{checkpoint.path}: {name} is {checkpoint.shape(name)}, "
                f"but config.json calls for {tuple(parameter.shape)}"
            )
        if checkpoint.dtype(name).startswith(("I", "U", "BOOL")):
            raise whole_numbers(checkpoint.files[name], name, checkpoint.dtype(name))


def load_module(decoder: Decoder, module: nn.Module, prefix: str, checkpoint: Checkpoint, device: torch.device) -> None:
    """Puts a module and all modules in it on `device`, from the checkpoint."""
    for name, child in module.named_modules():
        load_own_tensors(decoder, child, f"{prefix}{name}." if name else prefix, checkpoint, device)


def load_own_tensors(
    decoder: Decoder, module: nn.Module, prefix: str, checkpoint: Checkpoint, device: torch.device
) -> None:
    """Puts a module's own tensors on `device`, its children's not. Buffers that no checkpoint holds (rotary
    frequencies) are computed by the model's own initializer, as transformers does when it loads a model."""
    computed = False
    for name, buffer in module._buffers.items():
        if buffer is None:
            continue
        stored = prefix + name in checkpoint.files and name not in module._non_persistent_buffers_set
        computed = computed or not stored
        module._buffers[name] = (
            checkpoint.tensor(prefix + name).to(device) if stored else torch.empty_like(buffer, device=device)
        )
    if computed:
        # Its random weights go to parameters on the meta device, which is to say nowhere.
        initialize: Any = decoder.model._init_weights
        initialize(module)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            tensor = checkpoint.tensor(prefix + name).to(device)
            module._parameters[name] = nn.Parameter(tensor, requires_grad=False)
