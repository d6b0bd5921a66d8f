"""Which modules certainly draw no random numbers, so that keyed streams and their cost can be left out for them."""

from __future__ import annotations

import warnings
from functools import cache

import torch.nn.functional as F
from torch import fx, nn

from pipe.announce import logger
from pipe.partition.capture import draws as draws_by_function

_SILENT = frozenset(
    {nn.Module}  # a bare one holds others and has no forward
    | {nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict, nn.Identity, nn.Flatten, nn.Unflatten}
    | {nn.Linear, nn.Bilinear, nn.Embedding, nn.EmbeddingBag, nn.ChannelShuffle, nn.PixelShuffle, nn.PixelUnshuffle}
    | {nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Fold, nn.Unfold}
    | {nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.LocalResponseNorm}
    | {nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d}
    | {nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.LPPool1d, nn.LPPool2d}
    | {nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d}
    | {nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d, nn.MaxUnpool1d, nn.MaxUnpool2d, nn.MaxUnpool3d}
    | {nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d}
    | {nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d, nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d}
    | {nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d, nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d}
    | {nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.GLU, nn.Sigmoid, nn.Tanh}
    | {nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.Hardshrink, nn.Softshrink, nn.Tanhshrink, nn.LogSigmoid, nn.Softplus, nn.Softsign}
    | {nn.Softmax, nn.Softmax2d, nn.LogSoftmax, nn.Softmin, nn.Threshold, nn.CosineSimilarity, nn.PairwiseDistance}
    | {
        nn.CrossEntropyLoss,
        nn.NLLLoss,
        nn.MSELoss,
        nn.L1Loss,
        nn.SmoothL1Loss,
        nn.HuberLoss,
        nn.BCELoss,
        nn.BCEWithLogitsLoss,
        nn.KLDivLoss,
    }
    | {nn.RNNCell, nn.LSTMCell, nn.GRUCell, nn.TransformerEncoder, nn.TransformerDecoder, nn.Transformer}
)
_DROPOUTS = frozenset({nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout})
_RECURRENT = frozenset({nn.RNN, nn.LSTM, nn.GRU})
_TRANSFORMER_LAYERS = frozenset({nn.TransformerEncoderLayer, nn.TransformerDecoderLayer})
_COMPILED = "torch._dynamo.eval_frame.OptimizedModule"  # its forward calls the module in it
_NAMED = {"pipe.partition.sequence.Chain", _COMPILED} | frozenset(  # by name, so that they need not be imported
    f"torchvision.{name}"
    for name in (
        *("models.resnet.ResNet", "models.resnet.BasicBlock", "models.resnet.Bottleneck", "models.vgg.VGG", "models.alexnet.AlexNet"),
        *("models.mobilenetv2.MobileNetV2", "models.mobilenetv2.InvertedResidual", "models.mobilenetv3.InvertedResidual"),
        *("ops.misc.Conv2dNormActivation", "ops.misc.SqueezeExcitation", "ops.misc.FrozenBatchNorm2d", "ops.misc.Permute"),
    )
)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def draws(module: nn.Module) -> bool:
    """Whether the module may draw random numbers; False only where it is known that it cannot, whatever its mode.

    By exact type: a user's class, a subclass, a hook, a `forward` of its own may do anything. A compiled module is what is in it.
    """
    loud = next((each for each in module.modules() if not _is_silent(each)), None)
    if any(_is_compiled(each) for each in module.modules()):
        if loud is not None:
            _say(type(loud).__name__)
        else:  # dynamo looks at .grad of what enters; it hides the warning by a means that threads share, and that "error" beats
            warnings.filterwarnings(
                "ignore", r"The \.grad attribute of a Tensor that is not a leaf", module=r"torch\.(_dynamo|_subclasses)"
            )
    return loud is not None


@cache
def _say(loud: str) -> None:
    """Tells once what torch does without a word: under keyed random streams it compiles nothing."""
    logger.warning(
        "compiled layers of a stage run as they are where a layer beside them may draw random numbers (%s): random streams that do not "
        "depend on the cut and torch.compile exclude each other",
        loud,
    )


def _is_compiled(module: nn.Module) -> bool:
    return _name(module) == _COMPILED or getattr(module, "_compiled_call_impl", None) is not None


def _name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _is_silent(module: nn.Module) -> bool:
    kind = type(module)
    if isinstance(module, fx.GraphModule):
        return not draws_by_function(module.graph)
    hooks = [hook for name in _HOOKS for hook in getattr(module, name, {}).values()]
    if ("forward" in vars(module) and _name(module) != _COMPILED) or not all(getattr(hook, "draws_nothing", False) for hook in hooks):
        return False
    if kind in _DROPOUTS:
        return bool(module.p == 0)
    if kind in _RECURRENT:
        return bool(module.dropout == 0 or module.num_layers == 1)
    if kind is nn.MultiheadAttention:
        return bool(module.dropout == 0)
    if kind in _TRANSFORMER_LAYERS:  # its dropouts are modules in it, and an activation may be anything
        return module.activation in (F.relu, F.gelu) or isinstance(module.activation, nn.Module)
    # exact name included for nn.MultiheadAttention's own projection, a Linear that differs in its type only
    return kind in _SILENT or kind is nn.modules.linear.NonDynamicallyQuantizableLinear or _name(module) in _NAMED
