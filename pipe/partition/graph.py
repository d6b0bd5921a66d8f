"""A captured model as a sequence of nodes, and the module of one stage: a part of the graph with the unsplit model's names.

A value goes from the stage that makes it to those that use it, past the ones in between:

    stage 0: forward(x=...)            -> (h, skip)       routes (0, 1) and (0, 2)
    stage 1: forward(h)                -> h'              route (1, 2)
    stage 2: forward(skip, h', mask=...)                  inputs of the model come from the controller, to each stage that uses them

A value that a node writes into in place is, from there on, one that the node's stage makes.
"""

from __future__ import annotations

import difflib
import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils import _pytree as pytree

from pipe.action import Route
from pipe.errors import PlanError

_WINDOWS = 32  # places to cut, at least, beside 8 a stage, if the graph has them


class GraphLayers:
    """The nodes of a captured model, as layers are: counted, named, cut."""

    def __init__(self, model: nn.Module, graph: fx.Graph, given: Mapping[str, Any]) -> None:
        """`given`: the arguments of one micro-batch, by name; their shapes tell what crosses where."""
        self._root = model
        self._inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self._output = next(node for node in graph.nodes if node.op == "output")
        self._nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output", "get_attr")]
        self._at = {node: i for i, node in enumerate(self._nodes)}
        self._nbytes, written = _propagated(fx.GraphModule(model, graph), [given[str(node.target)] for node in self._inputs])
        self._written = {node: [self._at[writer] for writer in writers] for node, writers in written.items() if node in self._at}
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
        """Where to cut: all along the model, of some places beside each other the one where the fewest bytes cross."""
        crossing, closed = self._crossing_bytes(), self._closed()
        places = [at for at in range(1, len(self)) if at not in closed]
        windows = min(max(_WINDOWS, 8 * stages), len(places))
        bounds = [len(places) * w // windows for w in range(windows + 1)] if windows else []
        return [min(places[begin:end], key=lambda at: (crossing[at], -at)) for begin, end in pairwise(bounds)]

    def _closed(self) -> set[int]:
        """The places between values that share memory and a write into them, see `_check_writers`."""
        written: dict[int, list[int]] = defaultdict(list)
        for node, writers in self._written.items():
            for writer in writers:
                written[writer].append(self._at[node])
        return {at for writer, made in written.items() if len(made) > 1 for at in range(sorted(made)[1] + 1, writer + 1)}

    def _crossing_bytes(self) -> list[int]:
        """What crosses a cut before each node."""
        change = [0] * (len(self) + 2)
        for at, node in enumerate(self._nodes):
            if self._last[node] > at:
                change[at + 1] += self._nbytes[node]
                change[self._last[node] + 1] -= self._nbytes[node]
        return list(accumulate(change))

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

    def routes(self, counts: Sequence[int]) -> tuple[Route, ...]:
        """Of each value that crosses between stages, the stage that makes it and those that take it."""
        return tuple(self._crossing(counts).values())

    def shared(self, counts: Sequence[int]) -> frozenset[str]:
        """The modules that several stages call, or in whose place they draw random numbers."""
        callers: dict[str, set[int]] = defaultdict(set)
        for node, s in zip(self._nodes, _stages(counts)):
            if node.op == "call_module":
                name = str(node.target)
                callers[getattr(self._root.get_submodule(name), "draws_as", name)].add(s)
        return frozenset(name for name, stages in callers.items() if len(stages) > 1)

    def _crossing(self, counts: Sequence[int]) -> dict[tuple[int, fx.Node], Route]:
        """The routes of values, in the order in which these are made; a value's key is where it was made or last written, and its node."""
        stage = [*_stages(counts), len(counts) - 1]  # of each node, and of the output
        takers: dict[tuple[int, fx.Node], set[int]] = defaultdict(set)

        def take(node: fx.Node, user: int) -> None:
            made = max([self._at[node], *(writer for writer in self._written.get(node, ()) if writer < user)])
            if stage[made] != stage[user]:
                takers[made, node].add(stage[user])
            if made != self._at[node]:  # who writes into it has it
                take(node, made)

        for at, user in enumerate([*self._nodes, self._output]):
            for node in user.all_input_nodes:
                if node in self._at:
                    take(node, at)
        self._check_writers(stage, takers)
        found = {key: (stage[key[0]], *sorted(stages)) for key, stages in takers.items() if stages}
        return {key: found[key] for key in sorted(found, key=lambda key: (key[0], self._at[key[1]]))}

    def _check_writers(self, stage: Sequence[int], takers: Mapping[tuple[int, fx.Node], set[int]]) -> None:
        """Refuses a cut after which a node would write into one of two values that shared memory before they crossed."""
        for writer in sorted({writer for writers in self._written.values() for writer in writers}):
            entered = {
                node
                for (made, node), taken in takers.items()
                if stage[writer] in taken and made < writer and writer in self._written.get(node, ())
            }
            if len(entered) > 1:
                names = " and ".join(sorted(node.name for node in entered))
                raise PlanError(
                    f"{self.names[writer] or type(self._root).__name__} writes in place into {names}, which share memory and are made on "
                    "stages before; after this cut one would not see the write: .clone() one of them, or keep them in one stage with split="
                )

    def part(self, begin: int, end: int) -> fx.GraphModule:
        """The module of nodes begin to end as a layer: takes and gives what crosses there as one value, a tensor alone or a tuple."""
        graph, env = fx.Graph(), {}
        alive = self.alive(begin)
        if begin:
            value = graph.placeholder(self._placeholder)
            for k, node in enumerate(alive):
                env[node] = value if len(alive) == 1 else graph.call_function(operator.getitem, (value, k))
        return self._module(graph, env, begin, end, self.alive(end))

    def _stage(self, s: int, counts: Sequence[int]) -> fx.GraphModule:
        """The module of a stage: takes and gives the values whose routes come by, in their order."""
        graph, env = fx.Graph(), {}
        crossing = self._crossing(counts).items()
        for k, node in enumerate(node for (_, node), route in crossing if s in route[1:]):
            env[node] = graph.placeholder(f"{self._placeholder}_{k}")
        begin = sum(counts[:s])
        return self._module(graph, env, begin, begin + counts[s], [node for (_, node), route in crossing if route[0] == s])

    def _module(self, graph: fx.Graph, env: dict[fx.Node, fx.Node], begin: int, end: int, outputs: Sequence[fx.Node]) -> fx.GraphModule:
        """Nodes begin to end behind the values in `env`; gives the outputs, one as it is, several as a tuple, or the model's output."""
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
            graph.output(env[outputs[0]] if len(outputs) == 1 else tuple(env[node] for node in outputs))
        graph.lint()
        return fx.GraphModule(self._root, graph)

    def parts(self, counts: Sequence[int]) -> list[nn.Module]:
        """The modules of all stages; what no node uses is held by the first, so that no weight is lost."""
        parts: list[nn.Module] = [self._stage(s, counts) for s in range(len(counts))]
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
        return frozenset(names & {str(node.target) for node in self._inputs})

    @property
    def _placeholder(self) -> str:
        """The name of a value from another stage; no input of the model begins like it."""
        name = "value"
        while any(str(node.target).startswith(name) for node in self._inputs):
            name += "_"
        return name


def _stages(counts: Sequence[int]) -> list[int]:
    """The stage of each node."""
    return [s for s, count in enumerate(counts) for _ in range(count)]


class _Propagation(FakeTensorProp):
    """Runs the graph without computing, and notes which nodes write into which values, themselves or by a view."""

    def __init__(self, captured: fx.GraphModule) -> None:
        super().__init__(captured, FakeTensorMode(allow_non_fake_inputs=True))
        self.written: dict[fx.Node, list[fx.Node]] = defaultdict(list)

    def run_node(self, n: fx.Node) -> Any:
        before = {node: _version(value) for node, value in self.env.items()}
        result = super().run_node(n)
        for node, version in before.items():
            if _version(self.env[node]) != version:
                self.written[node].append(n)
        return result


def _version(value: Any) -> int:
    return sum(leaf._version for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


def _path(node: fx.Node) -> str:
    """The module in whose forward the node is; for a call of a module, that module; the root is ""."""
    if node.op == "call_module":
        return str(node.target)
    return next((entry[0] for entry in reversed((node.meta.get("nn_module_stack") or {}).values())), "")


def _propagated(captured: fx.GraphModule, given: Sequence[Any]) -> tuple[dict[fx.Node, int], Mapping[fx.Node, list[fx.Node]]]:
    """How many bytes each node's value has, 1 where that is not known; and which nodes write into it."""
    run = _Propagation(captured)
    try:
        with torch.no_grad():
            run.propagate(*given)
    except Exception:  # an operator that needs values: where the fewest nodes cross is as good, and a stage that writes will be told
        return dict.fromkeys(captured.graph.nodes, 1), run.written
    held = {node: pytree.tree_leaves(node.meta.pop("val", None)) for node in captured.graph.nodes}
    return {node: 1 + sum(map(_bytes, leaves)) for node, leaves in held.items()}, run.written


def _bytes(leaf: Any) -> int:
    return leaf.numel() * leaf.element_size() if isinstance(leaf, Tensor) else 0


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
