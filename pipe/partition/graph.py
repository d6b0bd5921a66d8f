"""A captured model as a sequence of nodes, and the module of one stage: a part of the graph with the unsplit model's names.

What a later stage needs crosses as one value, a tensor alone or a tuple; a value that a stage does not use itself passes through it:

    stage 0: forward(x)        -> (h, skip)
    stage 1: forward((h, skip)) -> (h', skip)         its gradient comes back as a running sum, through the stages in between
    stage 2: forward((h', skip), mask)                inputs of the model come from the controller, to each stage that uses them
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils import _pytree as pytree

from pipe.errors import PlanError

_CANDIDATES = 16  # places to cut, at least, beside 4 a stage, if the graph has them


class GraphLayers:
    """The nodes of a captured model, as layers are: counted, named, cut."""

    def __init__(self, model: nn.Module, graph: fx.Graph, given: Mapping[str, Any]) -> None:
        """`given`: the arguments of one micro-batch, by name; their shapes tell what crosses where."""
        self._root = model
        self._inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self._output = next(node for node in graph.nodes if node.op == "output")
        self._nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output", "get_attr")]
        self._at = {node: i for i, node in enumerate(self._nodes)}
        self._tensors = _tensors(fx.GraphModule(model, graph), [given[str(node.target)] for node in self._inputs])
        self._last = {node: max((self._end(user) for user in node.users), default=-1) for node in self._nodes}
        self.names = tuple(_path(node) for node in self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)

    def _end(self, user: fx.Node) -> int:
        return len(self._nodes) if user.op == "output" else self._at[user]

    def alive(self, at: int) -> list[fx.Node]:
        """The values that cross a cut before node `at`: made before, used at or after it."""
        return [node for node in self._nodes[:at] if self._last[node] >= at]

    def candidates(self, stages: int) -> list[int]:
        """Where to cut: where the fewest tensors cross, and so many places that there is a choice."""
        crossing = [sum(self._tensors[node] for node in self.alive(at)) for at in range(1, len(self))]
        wanted = min(max(_CANDIDATES, 4 * stages), len(crossing))
        most = sorted(crossing)[wanted - 1] if wanted else 0
        return [at for at, count in enumerate(crossing, 1) if count <= most]

    def begins(self, names: Sequence[str], stages: int) -> tuple[int, ...]:
        """Nodes of each stage, from the names of the modules that begin the second and later stages.

        Raises:
            PlanError: a name is unknown, or they are not in the model's order or number.
        """
        at = []
        for name in names:
            found = next((i for i, path in enumerate(self.names) if path == name or path.startswith(f"{name}.")), None)
            if found is None:
                near = difflib.get_close_matches(name, set(self.names), n=3)
                raise PlanError(f"split names {name!r}, which is no module that the model calls{f' (near: {near})' if near else ''}")
            at.append(found)
        at = at[1:] if at[:1] == [0] else at
        if len(at) != stages - 1 or any(later <= earlier for earlier, later in zip([0, *at], at)):
            raise PlanError(
                f"split={list(names)!r} begins stages at nodes {at} of the model's graph; there are {stages} stages, and they begin in the "
                f"model's order: give {stages - 1} names of modules in the order in which they are called"
            )
        return tuple(end - begin for begin, end in zip([0, *at], [*at, len(self)]))

    def part(self, begin: int, end: int) -> fx.GraphModule:
        """The module of nodes begin to end."""
        graph, env = fx.Graph(), {}
        alive = self.alive(begin)
        if begin:
            value = graph.placeholder(self._value)
            for k, node in enumerate(alive):
                env[node] = value if len(alive) == 1 else graph.call_function(operator.getitem, (value, k))
        last = end == len(self)
        used = [node for step in [*self._nodes[begin:end], *([self._output] if last else [])] for node in step.all_input_nodes]
        for node in self._inputs:
            if node in used:
                env[node] = graph.placeholder(str(node.target))
        for node in dict.fromkeys(node for node in used if node.op == "get_attr"):
            env[node] = graph.node_copy(node)
        for node in self._nodes[begin:end]:
            env[node] = graph.node_copy(node, env.__getitem__)
        if last:
            graph.output(fx.node.map_arg(self._output.args[0], env.__getitem__))
        else:
            out = [env[node] for node in self.alive(end)]
            graph.output(out[0] if len(out) == 1 else tuple(out))
        graph.lint()
        return fx.GraphModule(self._root, graph)

    def parts(self, counts: Sequence[int]) -> list[nn.Module]:
        """The modules of all stages; what no node uses is held by the first, so that no weight is lost."""
        begin, parts = 0, list[nn.Module]()
        for count in counts:
            parts.append(self.part(begin, begin + count))
            begin += count
        held = {name for part in parts for name, _ in _weights(part)}
        for name, tensor in _weights(self._root):
            if name not in held:
                _attach(parts[0], name, tensor, self._root)
        return parts

    def contents(self, s: int, counts: Sequence[int]) -> str:
        """What a stage holds, in words: the modules of its first and last nodes."""
        begin = sum(counts[:s])
        paths = [path for path in self.names[begin : begin + counts[s]] if path] or ["forward itself"]
        return f"{paths[0]} to {paths[-1]} ({counts[s]} nodes)"

    def keywords(self, part: nn.Module) -> frozenset[str]:
        """The model's inputs that a stage's module takes."""
        names = {str(node.target) for node in part.graph.nodes if node.op == "placeholder"} if isinstance(part, fx.GraphModule) else set()
        return frozenset(names - {self._value})

    @property
    def _value(self) -> str:
        return "value" if all(node.target != "value" for node in self._inputs) else "value_of_the_stage_before"


def _path(node: fx.Node) -> str:
    """The module in whose forward the node is; for a call of a module, that module; the root is ""."""
    if node.op == "call_module":
        return str(node.target)
    return next((entry[0] for entry in reversed((node.meta.get("nn_module_stack") or {}).values())), "")


def _tensors(captured: fx.GraphModule, given: Sequence[Any]) -> dict[fx.Node, int]:
    """How many tensors each node's value holds; 1 where that is not known."""
    try:
        with torch.no_grad():
            FakeTensorProp(captured).propagate(*given)
    except Exception:  # an operator that needs values: where the fewest nodes cross is as good
        return dict.fromkeys(captured.graph.nodes, 1)
    held = {node: pytree.tree_leaves(node.meta.pop("val", None)) for node in captured.graph.nodes}
    return {node: sum(isinstance(leaf, Tensor) for leaf in leaves) for node, leaves in held.items()}


def _weights(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


def _attach(part: nn.Module, name: str, tensor: Tensor, root: nn.Module) -> None:
    """Gives the part a parameter or buffer under its full name."""
    path, _, own = name.rpartition(".")
    at, source = part, root
    for step in path.split(".") if path else ():
        source = source._modules[step] or nn.Module()
        if at._modules.get(step) is None:
            at.add_module(step, nn.Module())
        at = at._modules[step] or nn.Module()
    if isinstance(tensor, nn.Parameter):
        at.register_parameter(own, tensor)
    else:
        at.register_buffer(own, tensor, persistent=own not in source._non_persistent_buffers_set)
